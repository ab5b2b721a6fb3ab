"""Draws of an individual's posterior, with what says whether to trust them (theory 3.12)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm

from causalqwen.individuals.evidence import Evidence
from causalqwen.individuals.posterior import Posterior

_CHAINS, _WARMUP = 2, 50


@dataclass(frozen=True)
class Diagnostics:
    """rhat: the largest split R-hat of a coordinate (1 where chains agree; above 1.05, draw more). effective: the smallest
    effective number of draws of a coordinate. evaluations: of the likelihood."""

    rhat: float
    effective: float
    evaluations: int


def sample_posterior(
    evidence: Sequence[Evidence],
    gaussian: Posterior,
    *,
    draws: int = 200,
    seed: int = 0,
) -> tuple[Tensor, Diagnostics]:
    """Draws g float64 [2 draws, C], of two chains, of the posterior whose mode and width are those of `gaussian`.

    Elliptical slice sampling on ellipses of the Gaussian that was found (Nishihara, Murray and Adams 2014): what decides is how
    far the posterior differs from it, so that nearly every first proposal is taken where it hardly does.
    """
    generator = torch.Generator().manual_seed(seed)
    prior = gaussian.prior_precision
    upper = torch.linalg.cholesky(gaussian.precision).mT
    used = 0

    def away() -> Tensor:
        normal = torch.randn(len(gaussian.mode), 1, generator=generator, dtype=torch.float64).to(upper.device)
        return torch.linalg.solve_triangular(upper, normal, upper=True).squeeze(-1)

    def ratio(x: Tensor) -> float:
        """log posterior less the log of the Gaussian that was found, at mode + x."""
        nonlocal used
        used += 1
        g = gaussian.mode + x
        from_prior = g - gaussian.prior_mean
        total = sum(part.evaluate(g)[0] for part in evidence if len(part))
        return total - 0.5 * (from_prior @ prior @ from_prior).item() + 0.5 * (x @ gaussian.precision @ x).item()

    kept = torch.empty(_CHAINS, draws, len(gaussian.mode), dtype=torch.float64)
    for chain in range(_CHAINS):
        x = away()
        level = ratio(x)
        for step in tqdm(range(_WARMUP + draws), desc=f"sampling, chain {chain + 1} of {_CHAINS}", leave=False):
            x, level = _turn(x, level, away(), ratio, generator)
            if step >= _WARMUP:
                kept[chain, step - _WARMUP] = (gaussian.mode + x).cpu()
    return kept.flatten(0, 1), Diagnostics(split_rhat(kept).max().item(), effective_draws(kept).min().item(), used)


def _turn(
    x: Tensor, level: float, other: Tensor, ratio: Callable[[Tensor], float], generator: torch.Generator
) -> tuple[Tensor, float]:
    """One step on the ellipse through x and `other` (Murray, Adams and MacKay 2010)."""

    def uniform() -> float:
        return float(torch.rand((), generator=generator, dtype=torch.float64))

    enough = level + math.log(max(uniform(), 1e-300))
    angle = 2 * math.pi * uniform()
    low, high = angle - 2 * math.pi, angle
    while True:
        at = x * math.cos(angle) + other * math.sin(angle)
        reached = ratio(at)
        if reached >= enough:
            return at, reached
        low, high = (angle, high) if angle < 0 else (low, angle)
        angle = low + uniform() * (high - low)


def split_rhat(chains: Tensor) -> Tensor:
    """Split R-hat [C] of draws [chains, n, C] (Gelman et al., Bayesian Data Analysis, 3rd ed., 11.4)."""
    half = chains.shape[1] // 2
    parts = torch.cat([chains[:, :half], chains[:, half : 2 * half]])
    within, between = parts.var(1).mean(0), parts.mean(1).var(0)
    return ((within * (half - 1) / half + between) / within.clamp(min=1e-300)).sqrt()


def effective_draws(chains: Tensor) -> Tensor:
    """Effective number of draws [C]: all over 1 + 2 sum of autocorrelations, up to the first negative pair (Geyer 1992)."""
    count, length = chains.shape[:2]
    centred = chains - chains.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, 2 * length, dim=1)
    autocovariance = torch.fft.irfft(spectrum.abs().square(), 2 * length, dim=1)[:, :length].mean(0) / length
    rho = autocovariance / autocovariance[0].clamp(min=1e-300)
    pairs = rho[: length // 2 * 2].view(length // 2, 2, -1).sum(1)
    positive = (pairs > 0).long().cumprod(0)
    return count * length / (2 * (pairs * positive).sum(0) - 1).clamp(min=1 / (count * length))
