"""Draws and decision rules: what can happen between a distribution over individuals and a token."""

from causalqwen.decoding.draws import BoundDecoding, QuantileReader
from causalqwen.decoding.hindsight import Hindsight, SaidNumber
from causalqwen.decoding.individual import Individual, Observed
from causalqwen.decoding.plan import PRESETS, CausalDecoding
from causalqwen.decoding.rules import decide, decision_scores

__all__ = [
    "PRESETS",
    "BoundDecoding",
    "CausalDecoding",
    "Hindsight",
    "Individual",
    "Observed",
    "QuantileReader",
    "SaidNumber",
    "decide",
    "decision_scores",
]
