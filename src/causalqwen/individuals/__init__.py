"""Individuals inferred from what they said: evidence, posterior. Plain functions on tensors; stands on `decoding`."""

from causalqwen.individuals.evidence import (
    LIKELIHOODS,
    Branches,
    ChoiceEvidence,
    Evidence,
    TokenEvidence,
    ValueEvidence,
    read_factor,
)
from causalqwen.individuals.marginal import line_posterior, loading_sizes, value_marginal
from causalqwen.individuals.observed_noise import ROUNDINGS, observed_normals
from causalqwen.individuals.posterior import (
    Diagnostics,
    Posterior,
    find_posterior,
    likeliest_population,
    likeliest_spread,
    sample_posterior,
)

__all__ = [
    "LIKELIHOODS",
    "ROUNDINGS",
    "Branches",
    "ChoiceEvidence",
    "Diagnostics",
    "Evidence",
    "Posterior",
    "TokenEvidence",
    "ValueEvidence",
    "find_posterior",
    "likeliest_population",
    "likeliest_spread",
    "line_posterior",
    "loading_sizes",
    "observed_normals",
    "read_factor",
    "sample_posterior",
    "value_marginal",
]
