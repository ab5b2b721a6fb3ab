"""Laws and draws: the mathematics that everything else stands on. Imports nothing of this package."""

from causalqwen.distributions.between import VALUE_FAMILIES, get_value_family
from causalqwen.distributions.draws import (
    INDIVIDUAL_STREAM,
    NOISE_STREAM,
    OWN_STREAM,
    WHOLE_TEXT,
    check_seed,
    philox,
    uniform_draws,
)
from causalqwen.distributions.stable import FAMILIES, FAR, SCALE_FLOOR, StableFamily, get_family, upcast, widen

__all__ = [
    "FAMILIES",
    "FAR",
    "INDIVIDUAL_STREAM",
    "NOISE_STREAM",
    "OWN_STREAM",
    "SCALE_FLOOR",
    "VALUE_FAMILIES",
    "WHOLE_TEXT",
    "StableFamily",
    "check_seed",
    "get_family",
    "get_value_family",
    "philox",
    "uniform_draws",
    "upcast",
    "widen",
]
