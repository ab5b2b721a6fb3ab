"""Laws and draws: the mathematics that everything else stands on. Imports nothing of this package."""

from causalqwen.distributions.draws import (
    BLOCK,
    INDIVIDUAL_STREAM,
    NOISE_STREAM,
    OBSERVED_STREAM,
    OWN_STREAM,
    WHOLE_TEXT,
    block_largest,
    block_uniforms,
    check_seed,
    own_uniforms,
    philox,
    uniform_draws,
)
from causalqwen.distributions.intermediate_stable import VALUE_FAMILIES, get_value_family
from causalqwen.distributions.stable import FAMILIES, FAR, SCALE_FLOOR, StableFamily, get_family, upcast, widen

__all__ = [
    "BLOCK",
    "FAMILIES",
    "FAR",
    "INDIVIDUAL_STREAM",
    "NOISE_STREAM",
    "OBSERVED_STREAM",
    "OWN_STREAM",
    "SCALE_FLOOR",
    "VALUE_FAMILIES",
    "WHOLE_TEXT",
    "StableFamily",
    "block_largest",
    "block_uniforms",
    "check_seed",
    "get_family",
    "get_value_family",
    "own_uniforms",
    "philox",
    "uniform_draws",
    "upcast",
    "widen",
]
