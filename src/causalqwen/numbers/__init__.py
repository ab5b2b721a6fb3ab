"""The number channel outside the model: finding numbers in text, transforming values, writing them. No model here."""

from causalqwen.numbers.grammar import NumberSpan, find_numbers
from causalqwen.numbers.law import CRPS_LEVELS, ClassLaws, ValueLaw
from causalqwen.numbers.rendering import (
    PLAIN,
    NumberStyle,
    finest_place,
    format_number,
    last_place,
    round_significant,
    spaced,
)
from causalqwen.numbers.rules import KINDS, PROTECTED, NumberRules
from causalqwen.numbers.transforms import ValueTransform, symlog

__all__ = [
    "CRPS_LEVELS",
    "KINDS",
    "PLAIN",
    "PROTECTED",
    "ClassLaws",
    "NumberRules",
    "NumberSpan",
    "NumberStyle",
    "ValueLaw",
    "ValueTransform",
    "find_numbers",
    "finest_place",
    "format_number",
    "last_place",
    "round_significant",
    "spaced",
    "symlog",
]
