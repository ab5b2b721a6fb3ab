"""Losses and scores of a predicted value: negative log-likelihood, CRPS, quantile losses."""

import torch
from torch import Tensor

from causalqwen.distributions import get_value_family


def value_nll(value: Tensor, loc: Tensor, scale: Tensor, *, family: str = "cauchy") -> Tensor:
    """-log density of `value` under S(loc, scale), elementwise; scale > 0. float64 where an argument is float64."""
    return -get_value_family(family).log_prob(value, loc, scale)


def cauchy_nll(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """log(pi scale) + log(1 + ((value - loc)/scale)^2), elementwise (theory 2.5). It is negative for small scales."""
    return value_nll(value, loc, scale, family="cauchy")


def cauchy_crps(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """CRPS of Cauchy(loc, scale) at `value`: scale/pi (2 z atan z - ln(1+z^2) + 2 ln 2), z = (value - loc)/scale.

    Elementwise, in the units of `value`, lower is better (theory 3.11). Finite although the law has no mean.
    """
    return get_value_family("cauchy").crps(value, loc, scale)


def quantile_loss(value: Tensor, quantile: Tensor, level: Tensor) -> Tensor:
    """Pinball loss max(p (v - q), (p - 1)(v - q)) of the quantile q at level p, elementwise."""
    gap = value - quantile
    return torch.maximum(level * gap, (level - 1) * gap)


def quantile_crps(value: Tensor, quantiles: Tensor, levels: Tensor) -> Tensor:
    """CRPS from quantiles: twice the mean pinball loss over the levels (Gneiting and Ranjan 2011).

    value [...], quantiles [..., L], levels [L] evenly spaced inside (0, 1) -> [...], in the units of `value`. With the
    quantiles clipped to a common range this is finite for every law, and the same rule scores every rival.
    """
    return 2 * quantile_loss(value.unsqueeze(-1), quantiles, levels).mean(-1)
