"""Laws and draws: the mathematics that everything else stands on. Imports nothing of this package."""

from causalqwen.distributions.draws import (
    BLOCK,
    INDIVIDUAL_STREAM,
    NOISE_STREAM,
    OBSERVED_STREAM,
    WHOLE_TEXT,
    block_largest,
    block_uniforms,
    check_seed,
    own_uniforms,
    uniform_draws,
)
from causalqwen.distributions.stable import FAMILIES, FAR, SCALE_FLOOR, StableFamily, get_family, upcast, widen

__all__ = [
    "BLOCK",
    "FAMILIES",
    "FAR",
    "INDIVIDUAL_STREAM",
    "NOISE_STREAM",
    "OBSERVED_STREAM",
    "SCALE_FLOOR",
    "WHOLE_TEXT",
    "StableFamily",
    "block_largest",
    "block_uniforms",
    "check_seed",
    "get_family",
    "own_uniforms",
    "uniform_draws",
    "upcast",
    "widen",
]
