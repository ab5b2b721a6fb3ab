"""The number channel outside the model: finding numbers in text, transforming values, writing them. No model here."""

from causalqwen.numbers.grammar import NumberSpan, find_numbers
from causalqwen.numbers.law import CRPS_LEVELS, ValueLaw
from causalqwen.numbers.rendering import format_number, round_significant, spaced
from causalqwen.numbers.transforms import ValueTransform, symlog

__all__ = [
    "CRPS_LEVELS",
    "NumberSpan",
    "ValueLaw",
    "ValueTransform",
    "find_numbers",
    "format_number",
    "round_significant",
    "spaced",
    "symlog",
]
