"""CausalQwen: numbers with honest uncertainty and individuals who last, grafted onto a pretrained language model."""

__version__ = "0.1.0"

from causalqwen.decoding import PRESETS, CausalDecoding, Individual, Population
from causalqwen.kernels import linear_ovr_loss
from causalqwen.losses import cauchy_crps, cauchy_nll, ovr_loss
from causalqwen.modeling import (
    STARTS,
    AbductionNetwork,
    ActionNetwork,
    CausalQwenConfig,
    CausalQwenForCausalLM,
    CausalQwenOutput,
    CausalQwenProcessor,
    Choice,
    Intervention,
    NumberPrediction,
    NumberTextIteratorStreamer,
    NumberTextStreamer,
    Observation,
    Question,
    World,
)
from causalqwen.numbers import NumberRules, NumberStyle

__all__ = [
    "PRESETS",
    "STARTS",
    "AbductionNetwork",
    "ActionNetwork",
    "CausalDecoding",
    "CausalQwenConfig",
    "CausalQwenForCausalLM",
    "CausalQwenOutput",
    "CausalQwenProcessor",
    "Choice",
    "Individual",
    "Intervention",
    "NumberPrediction",
    "NumberRules",
    "NumberStyle",
    "NumberTextIteratorStreamer",
    "NumberTextStreamer",
    "Observation",
    "Population",
    "Question",
    "World",
    "cauchy_crps",
    "cauchy_nll",
    "linear_ovr_loss",
    "ovr_loss",
]
