"""The distribution of a number from free text: what people would use instead, on the same tables, splits and features."""

from causalqwen.evaluation.numbers_benchmark.benchmark import JOINT, METHODS, Benchmark, graft, real_table
from causalqwen.evaluation.numbers_benchmark.report import markdown, summary

__all__ = ["JOINT", "METHODS", "Benchmark", "graft", "markdown", "real_table", "summary"]
