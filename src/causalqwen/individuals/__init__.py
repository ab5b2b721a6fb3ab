"""Individuals inferred from what they said: evidence, posterior. Plain functions on tensors; stands on `decoding`."""

from causalqwen.individuals.evidence import LIKELIHOODS, Evidence, TokenEvidence, ValueEvidence, read_factor
from causalqwen.individuals.hindsight import Scorer, abduct_noise
from causalqwen.individuals.posterior import Posterior, find_posterior, likeliest_spread

__all__ = [
    "LIKELIHOODS",
    "Evidence",
    "Posterior",
    "Scorer",
    "TokenEvidence",
    "ValueEvidence",
    "abduct_noise",
    "find_posterior",
    "likeliest_spread",
    "read_factor",
]
