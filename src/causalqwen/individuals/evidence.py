"""What observed tokens, values and choices say about an individual: log-likelihood, gradient and curvature in g (theory 3.12,
3.15).

g = Phi^-1(e1) is the individual as a standard Gaussian vector: e1 is uniform, so g ~ N(0, I) a priori, whatever law the heads
read e1 by. In a context the individual adds reach * q(g) to loc_U, coordinate by coordinate, with q(g) = Q(Phi(g)) the head's
own reading and reach = gain scale_U there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from causalqwen.distributions import SCALE_FLOOR, StableFamily, upcast
from causalqwen.losses import graded_scale

LIKELIHOODS = ("softmax", "ovr", "values")
"""Likelihoods of an observed text: its tokens by a softmax, or by OvR's product, values beside; or its values alone."""


class Evidence(Protocol):
    """Observations of one kind."""

    def __len__(self) -> int: ...

    def evaluate(self, g: Tensor, curvature: bool = False) -> tuple[float, Tensor, Tensor | None]:
        """log p(observations | g), its gradient [C], and (asked for) the Fisher information in g [C, C]; float64."""


def read_factor(law: StableFamily, g: Tensor) -> tuple[Tensor, Tensor]:
    """q(g) = Q(Phi(g)) and q'(g), float64 [C]."""
    if law.alpha == 2:
        return g, torch.ones_like(g)
    with torch.enable_grad():
        g = g.detach().double().requires_grad_(True)
        q = law.quantile(torch.special.ndtr(g))
        (slope,) = torch.autograd.grad(q.sum(), g)
    return q.detach(), slope


@dataclass
class TokenEvidence:
    """N tokens, each with the law of U before it; the likelihood is the softmax over loc_S, or OvR's product over tokens.

    loc: loc_U [N, C]; reach: [N, C], what a unit of q adds. targets: int64 [N]. weight [V, C], bias [V] or None: of the
    scores. mask: bool [V], rows that take part. law: of the scores. For "ovr": thresholds [N], and of a score once the
    individual is known at some positions [n] its scale, [n, 1] or [n, V], and slope as in `graded_scale`.
    """

    loc: Tensor
    reach: Tensor
    targets: Tensor
    weight: Tensor
    bias: Tensor | None
    mask: Tensor
    law: StableFamily
    likelihood: str = "softmax"
    known: Callable[[Tensor], tuple[Tensor, float]] | None = None
    thresholds: Tensor | None = None
    positions_at_once: int = 128

    def __post_init__(self) -> None:
        if self.likelihood not in LIKELIHOODS[:2]:
            raise ValueError(f"unknown likelihood {self.likelihood!r}; use one of {', '.join(LIKELIHOODS[:2])}")

    def __len__(self) -> int:
        return len(self.targets)

    @torch.no_grad()
    def evaluate(self, g: Tensor, curvature: bool = False) -> tuple[float, Tensor, Tensor | None]:
        """See `Evidence`. The curvature is exact where scale_U has one shape over coordinates at all positions (as at the
        start), and that of the nearest such scale where it has not."""
        q, slope = read_factor(self.law, g)
        weight = upcast(self.weight)
        total, gradient = 0.0, torch.zeros(len(g), dtype=torch.float64, device=g.device)
        typical = self.reach.square().mean(0).sqrt()
        size = (self.reach @ typical / typical.square().sum()).square()  # of each position's reach, squared
        mass = weight.new_zeros(len(weight))
        outer = weight.new_zeros(weight.shape[1], weight.shape[1])
        for part in torch.arange(len(self), device=g.device).split(self.positions_at_once):
            scores = F.linear(self.loc[part] + self.reach[part] * q.to(self.reach.dtype), weight, self.bias)
            value, residual, weights, means = self._terms(scores, part, curvature)
            total += value.sum(dtype=torch.float64).item()
            toward = residual @ weight
            gradient += (toward * self.reach[part]).sum(0, dtype=torch.float64)
            if weights is not None:
                mass += size[part] @ weights
                if means:  # a softmax's residual is the target's row less the mean of all rows
                    mean = (weight[self.targets[part]] - toward) * size[part].sqrt().unsqueeze(-1)
                    outer += mean.T @ mean
        if not curvature:
            return total, gradient * slope, None
        information = (weight * mass.unsqueeze(-1)).T @ weight - outer
        unit = typical.double() * slope
        return total, gradient * slope, information.double() * unit * unit.unsqueeze(-1)

    @torch.no_grad()
    def each(self, g: Tensor) -> Tensor:
        """log p(token | g), one by one, float64 [N]; they add up to the total of `evaluate`."""
        q = read_factor(self.law, g)[0].to(self.reach.dtype)
        parts = []
        for part in torch.arange(len(self), device=g.device).split(self.positions_at_once):
            scores = F.linear(self.loc[part] + self.reach[part] * q, upcast(self.weight), self.bias)
            parts.append(self._terms(scores, part, False)[0].double())
        return torch.cat(parts) if parts else g.new_zeros(0, dtype=torch.float64)

    def _terms(self, scores: Tensor, part: Tensor, curvature: bool) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """Log-likelihoods [n], derivatives by the scores [n, V], weights of the curvature [n, V], and if it is a softmax's."""
        target = self.targets[part].unsqueeze(-1)
        everyone = bool(self.mask.all())
        if self.likelihood == "softmax":
            scores = scores if everyone else scores.masked_fill_(~self.mask, -torch.inf)
            partition = scores.logsumexp(-1, keepdim=True)
            value = (scores.gather(-1, target) - partition).squeeze(-1)
            p = scores.sub_(partition).exp_()
            residual = p.neg().scatter_add_(-1, target, torch.ones_like(target, dtype=p.dtype))
            return value, residual, p if curvature else None, True
        thresholds = self.thresholds[part].unsqueeze(-1)
        base, slope = self.known(part)
        scale = graded_scale(scores, base.clamp(min=SCALE_FLOOR), thresholds, slope, self.law)
        x = (thresholds - scores) / scale
        sign = torch.ones_like(x).scatter_(-1, target, -1.0)
        log_f, hazard = self.law.log_cdf_and_hazard(x * sign)
        _, hazard_other = self.law.log_cdf_and_hazard(-x * sign)
        # dx/dscore: scale itself moves with the score where there is a slope
        fall = slope * x.clamp(min=0) / (self.law.alpha * scale ** (self.law.alpha - 1)) if slope else 0.0
        rate = (fall - 1.0) / scale
        residual = sign * hazard * rate
        weights = hazard * hazard_other * rate.square() if curvature else None
        if not everyone:
            log_f, residual = log_f * self.mask, residual * self.mask
            weights = None if weights is None else weights * self.mask
        return log_f.sum(-1, dtype=torch.float64), residual, weights, False


@dataclass
class ValueEvidence:
    """n values, each with the law of U that the value head reads before it; what is left to the noise is a stable law.

    loc, reach: [n, C] as for tokens. row: W_reg [C]. bias: []. values: [n], on the value axis. scale: [n], of the noise,
    positive.
    """

    loc: Tensor
    reach: Tensor
    values: Tensor
    row: Tensor
    bias: Tensor
    scale: Tensor
    law: StableFamily

    def __len__(self) -> int:
        return len(self.values)

    def evaluate(self, g: Tensor, curvature: bool = False) -> tuple[float, Tensor, Tensor | None]:
        """See `Evidence`; the Fisher information of a location is the law's own over scale^2."""
        q, slope = read_factor(self.law, g)
        law, row = self.law, self.row.double()
        loadings = self.reach.double() * row * slope  # [n, C]: d(location)/dg
        with torch.enable_grad():
            location = self._location(q).requires_grad_(True)
            total = law.log_prob(self.values.double(), location, self.scale.double()).sum()
            (by_location,) = torch.autograd.grad(total, location)
        if not curvature:
            return total.item(), loadings.T @ by_location, None
        weights = law.information / self.scale.double().square()
        return total.item(), loadings.T @ by_location, (loadings * weights.unsqueeze(-1)).T @ loadings

    @torch.no_grad()
    def each(self, g: Tensor) -> Tensor:
        """log p(value | g) on the value axis, one by one, float64 [n]."""
        location = self._location(read_factor(self.law, g)[0])
        return self.law.log_prob(self.values.double(), location, self.scale.double())

    def _location(self, q: Tensor) -> Tensor:
        """Where each value lies, [n], given q(g)."""
        row = self.row.double()
        return self.loc.double() @ row + self.bias + (self.reach.double() * row) @ q


@dataclass(frozen=True)
class Branches:
    """The tokens that options go on with, fork by fork, T branches in all: score of each for the population average,
    float64 [T]; reach, what a unit of q(g) adds to it, [T, C]; sizes of the forks; paths bool [O, T] that each option takes."""

    score: Tensor
    reach: Tensor
    sizes: list[int]
    paths: Tensor

    def cpu(self) -> "Branches":
        """The same in the processor's memory, where people are."""
        return replace(self, **{name: getattr(self, name).cpu() for name in ("score", "reach", "paths")})

    def log_probs(self, q: Tensor) -> Tensor:
        """log P(option | q) [..., O] of individuals q [..., C]: a softmax over the branches of each fork on its way."""
        moved = (q.to(self.reach).unsqueeze(-2) * self.reach).sum(-1)  # of each alone: no row moves another
        scores = self.score + moved
        steps = torch.cat([fork.log_softmax(-1) for fork in scores.split(self.sizes, dim=-1)], dim=-1)
        return (steps.unsqueeze(-2) * self.paths).sum(-1)


@dataclass
class ChoiceEvidence:
    """n choices that somebody made: the branches of each question, and which option was taken. See `Evidence`."""

    questions: list[Branches]
    taken: list[int]
    law: StableFamily

    def __len__(self) -> int:
        return len(self.taken)

    def evaluate(self, g: Tensor, curvature: bool = False) -> tuple[float, Tensor, Tensor | None]:
        """See `Evidence`; each fork on the way is a softmax, with the Fisher information diag(p) - p p' of one."""
        q, slope = read_factor(self.law, g)
        total, gradient = 0.0, torch.zeros_like(g, dtype=torch.float64)
        information = g.new_zeros(len(g), len(g), dtype=torch.float64)
        for question, taken in zip(self.questions, self.taken, strict=True):
            scores, path = question.score + question.reach @ q, question.paths[taken]
            loadings, start = question.reach * slope, 0
            for size in question.sizes:
                fork, start = slice(start, start + size), start + size
                if not bool(path[fork].any()):
                    continue
                log_p, of_fork = scores[fork].log_softmax(-1), loadings[fork]
                total += float(log_p[path[fork]].sum())
                p = log_p.exp()
                gradient += (path[fork].to(p) - p) @ of_fork
                if curvature:
                    mean = p @ of_fork
                    information += (of_fork.T * p) @ of_fork - mean.unsqueeze(-1) * mean
        return total, gradient, information if curvature else None
