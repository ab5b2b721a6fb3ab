"""Noise abducted from what was said: draws under which an observed text is the one that is decided (theory 3.13).

At an observed token y the noise h ~ N(0, I) (e2 = Phi(h)) is known to have made y the best score:

    S_y(h) >= S_k(h) + margin for every other k,   S(h) = W (loc + reach * Q(Phi(h))) + b

A point of that region is found by projections onto the half-spaces that are violated, from a draw of the prior; elliptical
slice sampling (Murray, Adams and MacKay 2010) then walks inside it, so that what is kept is a draw of the noise given what
was said. Where no point is found (a row inside the hull of others is never the best), what is missing is the token's own
noise: a residual, added to its score.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from causalqwen.decoding import QuantileReader

MARGIN = 0.02
"""Nats by which an observed token leads; scores of one position differ by 3e-5 between batch shapes in float32."""


@dataclass
class Scorer:
    """The scores of N positions as functions of the noise: loc, reach [N, C], weight [V, C], bias [V] or None, mask [V]."""

    loc: Tensor
    reach: Tensor
    weight: Tensor
    bias: Tensor | None
    mask: Tensor
    reader: QuantileReader

    def leads(self, h: Tensor, targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """By how much targets [n] lead the best other token at positions `rows` [n] under h [n, C], and which that is."""
        q = self.reader(torch.special.ndtr(h)).to(self.loc.dtype)
        scores = F.linear(self.loc[rows] + self.reach[rows] * q, self.weight, self.bias)
        if not bool(self.mask.all()):
            scores.masked_fill_(~self.mask, -torch.inf)
        own = scores.gather(-1, targets.unsqueeze(-1))
        best = scores.scatter_(-1, targets.unsqueeze(-1), -torch.inf).max(-1)
        return own.squeeze(-1) - best.values, best.indices


@torch.no_grad()
def abduct_noise(
    scorer: Scorer, targets: Tensor, start: Tensor, *, projections: int = 60, steps: int = 8, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Noise h [N, C] (float64) under which `targets` [N] lead, and residuals [N] where none was found (0 elsewhere).

    start: [N, C], draws of the prior. projections: half-spaces at most. steps: of elliptical slice sampling.
    """
    h, residual = _project(scorer, targets, start.double(), projections)
    inside = (residual == 0).nonzero().squeeze(-1)
    for _ in range(steps):
        if len(inside):
            h[inside] = _slice_step(scorer, targets, h, inside, generator)
    return h, residual


def _project(scorer: Scorer, targets: Tensor, h: Tensor, projections: int) -> tuple[Tensor, Tensor]:
    """Move each h onto the half-spaces that it violates, one after the other, the shortest way in q; and what is missing."""
    reader, h = scorer.reader, h.clone()
    limit = reader.law.quantile(torch.tensor(0.5 + reader.mass / 2 - 1e-9, dtype=torch.float64)).item()
    missing = torch.zeros(len(h), dtype=torch.float64)
    nearest = torch.full((len(h),), torch.inf, dtype=torch.float64)
    kept = h.clone()
    rows = torch.arange(len(h))
    for _ in range(projections):
        lead, rival = scorer.leads(h[rows], targets[rows], rows)
        short = MARGIN - lead.double()
        closer = short < nearest[rows]
        kept[rows[closer]], nearest[rows[closer]] = h[rows[closer]], short[closer]
        open_ = short > 0
        rows, rival, short = rows[open_], rival[open_], short[open_]
        if len(rows) == 0:
            break
        toward = scorer.reach[rows].double() * (scorer.weight[targets[rows]] - scorer.weight[rival]).double()
        unit = torch.as_tensor(reader.unit, dtype=torch.float64)
        q = reader(torch.special.ndtr(h[rows]))
        length = toward.square().sum(-1, keepdim=True).clamp(min=1e-30)
        q = q + 1.1 * (short + 0.1 * MARGIN).unsqueeze(-1) * toward / length
        x = (q / unit).clamp(-limit, limit)
        one = torch.ones((), dtype=torch.float64)
        e = 0.5 + (reader.law.cdf(x, 0 * one, one) - 0.5) / reader.mass
        h[rows] = torch.special.ndtri(e.clamp(1e-12, 1 - 1e-12))
    missing = torch.where(nearest > 0, nearest, missing)
    return kept, missing


def _slice_step(
    scorer: Scorer, targets: Tensor, h: Tensor, rows: Tensor, generator: torch.Generator, shrinks: int = 12
) -> Tensor:
    """One step of elliptical slice sampling of N(0, I) restricted to the region, for positions `rows`; [n, C]."""
    here, other = h[rows], torch.randn(len(rows), h.shape[1], generator=generator, dtype=torch.float64)
    angle = 2 * math.pi * torch.rand(len(rows), 1, generator=generator, dtype=torch.float64)
    low, high = angle - 2 * math.pi, angle.clone()
    found, open_ = here.clone(), torch.arange(len(rows))
    for _ in range(shrinks):
        proposal = here[open_] * angle[open_].cos() + other[open_] * angle[open_].sin()
        good = scorer.leads(proposal, targets[rows[open_]], rows[open_])[0] >= MARGIN
        found[open_[good]] = proposal[good]
        open_ = open_[~good]
        if len(open_) == 0:
            break
        behind = angle[open_] < 0
        low[open_] = torch.where(behind, angle[open_], low[open_])
        high[open_] = torch.where(behind, high[open_], angle[open_])
        draw = torch.rand(len(open_), 1, generator=generator, dtype=torch.float64)
        angle[open_] = low[open_] + draw * (high[open_] - low[open_])
    return found
