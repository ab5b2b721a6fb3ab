"""Draws and decision rules: what can happen between a distribution over individuals and a token."""

from causalqwen.decoding.arithmetic import mean, mix, move, nearest
from causalqwen.decoding.draws import BoundDecoding, Drawn, Draws, Integrated
from causalqwen.decoding.individual import Individual, Observed
from causalqwen.decoding.plan import PRESETS, CausalDecoding, ObservedNoise, ObservedNumber
from causalqwen.decoding.population import Population
from causalqwen.decoding.voices import Voices, load_prior

__all__ = [
    "PRESETS",
    "BoundDecoding",
    "CausalDecoding",
    "Drawn",
    "Draws",
    "Individual",
    "Integrated",
    "Observed",
    "ObservedNoise",
    "ObservedNumber",
    "Population",
    "Voices",
    "load_prior",
    "mean",
    "mix",
    "move",
    "nearest",
]
