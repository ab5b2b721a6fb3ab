"""Scores, rivals, predictions and reports."""

from causalqwen.evaluation.evaluate import evaluate, write_metrics
from causalqwen.evaluation.language import compare_with_backbone
from causalqwen.evaluation.predict import predict_rows, write_jsonl

__all__ = ["compare_with_backbone", "evaluate", "predict_rows", "write_jsonl", "write_metrics"]
