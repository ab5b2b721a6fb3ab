"""The posterior of an individual g given evidence: its mode and its width (theory 3.12)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from causalqwen.individuals.evidence import Evidence

NARROWEST = 1e-4  # the least spread that is looked for where none is given
TOLERANCE = 1e-3  # nats that a step must promise
FARTHEST, HALVINGS = 7.9, 12
"""float64 cannot tell e1 from the cube's border any farther out; a step that does not gain is halved so often at most."""


@dataclass
class Posterior:
    """Gaussian around the mode: g ~ N(mode, precision^-1). gained: log-likelihood at the mode less that at the prior's mean,
    nats."""

    prior_precision: Tensor
    mode: Tensor
    precision: Tensor
    information: Tensor
    gained: float

    @property
    def directions(self) -> float:
        """How many directions the observations determine: tr(F (F + P)^-1), F the information, P the prior's precision."""
        return torch.linalg.solve(self.precision, self.information).diagonal().sum().item()


def likeliest_spread(gradient: Tensor, information: Tensor, widest: float = 1.0) -> float:
    """The prior's standard deviation s of g ~ N(0, s^2 I) under which the observations are likeliest (empirical Bayes).

    With the log-likelihood quadratic around 0 (gradient b, information F), log evidence(s) =
    b^T (F + I/s^2)^-1 b / 2 - log det(I + s^2 F) / 2, maximized over a grid of s from `NARROWEST` to `widest`; 1 is
    the law.
    """
    values, vectors = torch.linalg.eigh(information)
    values, along = values.clamp(min=0), (vectors.T @ gradient).square()
    spreads = torch.logspace(math.log10(NARROWEST), math.log10(widest), 200, dtype=torch.float64, device=values.device)
    squared = spreads.square().unsqueeze(-1)
    evidence = 0.5 * (along * squared / (1 + squared * values)).sum(-1) - 0.5 * torch.log1p(squared * values).sum(-1)
    return spreads[evidence.argmax()].item()


def likeliest_population(
    gradients: Sequence[Tensor], informations: Sequence[Tensor], *, widest: float = 1.0
) -> tuple[Tensor, float]:
    """Mean [C] and standard deviation of g ~ N(mean, s^2 I), the distribution of people under which their words are likeliest.

    The mean has a prior N(0, s^2 I), as wide as one more person at 0, and is integrated out. Each one's log-likelihood is
    quadratic around 0 (gradient b_p, information F_p): C_p = (F_p + I/s^2)^-1, A = (n + 1) I/s^2 - sum C_p/s^4,
    h = sum C_p b_p/s^2, log evidence(s) = (sum b_p^T C_p b_p + h^T A^-1 h - log det(s^2 A) - sum log det(I + s^2 F_p)) / 2,
    maximized over s up to `widest`; mean = A^-1 h.
    """
    people = [(pull.double(), known.double()) for pull, known in zip(gradients, informations, strict=True)]
    size = len(gradients[0])
    identity = torch.eye(size, dtype=torch.float64, device=gradients[0].device)

    @cache
    def at(log_spread: float) -> tuple[float, Tensor]:
        precision = math.exp(-2 * log_spread)
        of_mean, pull, evidence = identity * precision, torch.zeros_like(identity[0]), 0.0
        for gradient, information in people:
            factor = torch.linalg.cholesky(positive_definite(information + identity * precision))
            covariance = torch.cholesky_inverse(factor)
            mode = covariance @ gradient
            evidence += 0.5 * (gradient @ mode).item() - factor.diagonal().log().sum().item() - size * log_spread
            of_mean, pull = of_mean + identity * precision - covariance * precision**2, pull + mode * precision
        factor = torch.linalg.cholesky(positive_definite(of_mean))
        mean = torch.cholesky_solve(pull.unsqueeze(-1), factor).squeeze(-1)
        evidence += 0.5 * (pull @ mean).item() - factor.diagonal().log().sum().item() - size * log_spread
        return evidence, mean

    low, high = math.log(min(NARROWEST, widest)), math.log(widest)
    for points in (25, 9, 9):  # each grid looks closer, around the best of the one before it
        grid = torch.linspace(low, high, points, dtype=torch.float64).tolist()
        place = max(range(points), key=lambda index: at(grid[index])[0])
        low, high = grid[max(place - 1, 0)], grid[min(place + 1, points - 1)]
    return at(grid[place])[1], math.exp(grid[place])


def find_posterior(
    evidence: Sequence[Evidence],
    prior_mean: Tensor,
    prior_precision: Tensor | float | None,
    *,
    widest: float = 1.0,
    evaluations: int = 3,
) -> Posterior:
    """Mode by Fisher scoring from the prior's mean [C], the information taken there; a step that does not gain is halved.

    prior_precision: [C, C], a number for a multiple of I, or None for the likeliest spread up to `widest`. evaluations: of the
    log-likelihood at most, beside those that halve a step; the last step is not looked at again.
    """

    def evaluate(g: Tensor, curvature: bool) -> tuple[float, Tensor, Tensor | None]:
        parts = [e.evaluate(g, curvature) for e in evidence if len(e)]
        if not parts:
            raise ValueError(
                "nothing was observed that tells who somebody is: no word that another comes before, no number, no choice; "
                "give a text of two words or more"
            )
        total, gradient = sum(part[0] for part in parts), torch.stack([part[1] for part in parts]).sum(0)
        informations = [part[2] for part in parts if part[2] is not None]
        return total, gradient, torch.stack(informations).sum(0) if informations else None

    prior_mean = prior_mean.double()
    start, gradient, information = evaluate(prior_mean, True)
    assert information is not None
    identity = torch.eye(len(prior_mean), dtype=torch.float64, device=prior_mean.device)
    if prior_precision is None:
        prior_precision = likeliest_spread(gradient, information, widest) ** -2
    prior = prior_precision * identity if isinstance(prior_precision, float | int) else prior_precision.double()
    precision = positive_definite(information + prior)
    factor = torch.linalg.cholesky(precision)

    def penalty(g: Tensor) -> float:
        return 0.5 * ((g - prior_mean) @ prior @ (g - prior_mean)).item()

    def toward(step: Tensor) -> Tensor:
        return (mode + step).clamp(-FARTHEST, FARTHEST)

    mode, best, gained, used, halved = prior_mean, start, 0.0, 1, 0
    step = torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)
    promised = 0.5 * (step @ gradient).item()
    while used - halved < evaluations and halved < HALVINGS and promised > TOLERANCE:
        value, slope, _ = evaluate(toward(step), False)
        used += 1
        if not value - penalty(toward(step)) >= best - penalty(mode):  # nor where it is not a number
            step, promised, halved = step / 2, promised / 2, halved + 1
            continue
        mode, best, gained = toward(step), value, value - start
        pull = slope - prior @ (mode - prior_mean)
        step = torch.cholesky_solve(pull.unsqueeze(-1), factor).squeeze(-1)
        promised = 0.5 * (step @ pull).item()
    return Posterior(prior, mode, precision, information, gained)


def positive_definite(matrix: Tensor) -> Tensor:
    """A sum of information and precision [C, C], as it is where float64 can factor it; else with its least eigenvalues, which
    are nothing but rounding beside the greatest, raised to what rounding leaves of them."""
    matrix = (matrix + matrix.mT) / 2
    if int(torch.linalg.cholesky_ex(matrix).info) == 0:
        return matrix
    values, vectors = torch.linalg.eigh(matrix)
    least = len(matrix) * torch.finfo(matrix.dtype).eps * values[-1]
    return (vectors * values.clamp(min=4 * least)) @ vectors.mT
