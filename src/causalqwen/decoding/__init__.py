"""Draws and decision rules: what can happen between a distribution over individuals and a token."""

from causalqwen.decoding.draws import BoundDecoding, QuantileReader
from causalqwen.decoding.individual import Individual
from causalqwen.decoding.plan import PRESETS, CausalDecoding
from causalqwen.decoding.rules import decide, decision_scores

__all__ = ["PRESETS", "BoundDecoding", "CausalDecoding", "Individual", "QuantileReader", "decide", "decision_scores"]
