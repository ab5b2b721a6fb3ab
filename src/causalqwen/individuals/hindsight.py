"""Noise abducted from what was said: draws under which an observed text is the one that is decided (theory 3.13).

At an observed token y the noise h ~ N(0, I) (e2 = Phi(h)) is known to have made y the best score:

    S_y(h) >= S_k(h) + margin for every other k,   S(h) = W (loc + reach * Q(Phi(h))) + b

A point of that region is found by projections onto the half-spaces that are violated, from a draw of the prior; elliptical
slice sampling (Murray, Adams and MacKay 2010) and slides along lines then walk inside it, so that what is kept is a draw of
the noise given what was said. Where no point is found (a row inside the hull of others is never the best), what is missing
is the token's own noise: a residual, added to its score.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from causalqwen.decoding import QuantileReader

_PROJECTIONS, _SHRINKS = 60, 20  # at most: onto half-spaces, and of a bracket of angles
_POSITIONS_AT_ONCE = 64  # of which scores are held
STEPS = 20
"""Of the sampler behind its first point, which lies on the border of its region: a few leave it there (experiments 8)."""
MARGIN = 0.02
"""Nats by which an observed token leads; scores of one position differ by 3e-5 between batch shapes in float32."""

RIVALS, SLIDES = 8, 4
"""Lines per position, each away from one of the nearest rivals; slides along one of them after each ellipse."""


@dataclass
class Scorer:
    """The scores of N positions as functions of the noise: loc, reach [N, C], weight [V, C], bias [V] or None, mask [V]."""

    loc: Tensor
    reach: Tensor
    weight: Tensor
    bias: Tensor | None
    mask: Tensor
    reader: QuantileReader

    def __getitem__(self, rows: Tensor) -> "Scorer":
        """Some of the positions."""
        return replace(self, loc=self.loc[rows], reach=self.reach[rows])

    @property
    def is_linear(self) -> bool:
        """Whether scores are linear in h: a Gaussian law, read whole."""
        return self.reader.law.alpha == 2 and self.reader.mass == 1

    def without_noise(self) -> Tensor:
        """Scores [N, V] at h = 0; -inf for rows that no token uses."""
        scores = F.linear(self.loc, self.weight, self.bias)
        return scores if bool(self.mask.all()) else scores.masked_fill_(~self.mask, -torch.inf)

    def added(self, h: Tensor) -> Tensor:
        """What noise h [N, C] adds to the scores [N, V]."""
        q = (
            torch.as_tensor(self.reader.unit, device=h.device) * h
            if self.is_linear
            else self.reader(torch.special.ndtr(h))
        )
        q = q.to(self.loc.dtype)
        return F.linear(self.reach * q, self.weight)

    def leads(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """By how much targets [N] lead the best other token under h, and which that is."""
        return lead_of(self.without_noise().add_(self.added(h)), targets)


def lead_of(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Score of targets [N] less that of the best other token, and whose it is; scores [N, V] lose the targets' entries."""
    own = scores.gather(-1, targets.unsqueeze(-1))
    best = scores.scatter_(-1, targets.unsqueeze(-1), -torch.inf).max(-1)
    return own.squeeze(-1) - best.values, best.indices


def pauses(positions: int, steps: int) -> int:
    """How often `abduct_noise` pauses at most."""
    return math.ceil(positions / _POSITIONS_AT_ONCE) * (1 + steps)


@torch.no_grad()
def abduct_noise(
    scorer: Scorer,
    targets: Tensor,
    start: Tensor,
    *,
    steps: int = STEPS,
    generator: torch.Generator,
    pause: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Noise h [N, C] (float64) under which `targets` [N] lead, and residuals [N] where none was found (0 elsewhere).

    start: [N, C], draws of the prior. steps: of elliptical slice sampling. pause: called before each of them.
    """
    noise, missing = [], []
    for part in torch.arange(len(targets), device=targets.device).split(_POSITIONS_AT_ONCE):
        pause()
        h, residual = _project(scorer[part], targets[part], start[part].double())
        inside = (residual == 0).nonzero().squeeze(-1)
        if len(inside) and steps:
            of_inside, of_targets = scorer[part[inside]], targets[part[inside]]
            walked = _walk(of_inside, of_targets, h[inside], steps, generator, pause)
            walked = walked.clamp(-7, 7)  # where Phi is exact
            leads = of_inside.leads(walked, of_targets)[0] >= MARGIN / 2
            h[inside[leads]] = walked[leads]
        noise.append(h)
        missing.append(residual)
    return torch.cat(noise), torch.cat(missing)


def _project(scorer: Scorer, targets: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Move each h onto the half-spaces that it violates, one after the other, the shortest way in q; and what is missing."""
    reader, h = scorer.reader, h.clone()
    limit = reader.law.quantile(torch.tensor(0.5 + reader.mass / 2 - 1e-9, dtype=torch.float64)).item()
    nearest = torch.full((len(h),), torch.inf, dtype=torch.float64, device=h.device)
    kept = h.clone()
    rows = torch.arange(len(h), device=h.device)
    for _ in range(_PROJECTIONS):
        lead, rival = scorer[rows].leads(h[rows], targets[rows])
        short = MARGIN - lead.double()
        closer = short < nearest[rows]
        kept[rows[closer]], nearest[rows[closer]] = h[rows[closer]], short[closer]
        open_ = short > 0
        rows, rival, short = rows[open_], rival[open_], short[open_]
        if len(rows) == 0:
            break
        toward = scorer.reach[rows].double() * (scorer.weight[targets[rows]] - scorer.weight[rival]).double()
        unit = torch.as_tensor(reader.unit, dtype=torch.float64, device=h.device)
        q = reader(torch.special.ndtr(h[rows]))
        length = toward.square().sum(-1, keepdim=True).clamp(min=1e-30)
        q = q + 1.1 * (short + 0.1 * MARGIN).unsqueeze(-1) * toward / length
        x = (q / unit).clamp(-limit, limit)
        one = torch.ones((), dtype=torch.float64)
        e = 0.5 + (reader.law.cdf(x, 0 * one, one) - 0.5) / reader.mass
        h[rows] = torch.special.ndtri(e.clamp(1e-12, 1 - 1e-12))
    return kept, nearest.clamp(min=0)


def _walk(
    scorer: Scorer,
    targets: Tensor,
    h: Tensor,
    steps: int,
    generator: torch.Generator,
    pause: Callable[[], None],
) -> Tensor:
    """Draws of N(0, I) restricted to the region, from h [N, C] inside it: elliptical slice sampling.

    Where scores are linear in h, a whole ellipse costs one product: the scores turn with the noise. After each ellipse, h
    slides along a few lines, on which what is allowed is an interval: ellipses alone hardly leave the border where h starts.
    """
    still = scorer.without_noise()
    lines = Lines(scorer, still, targets) if scorer.is_linear else None
    turning = scorer.added(h) if scorer.is_linear else None

    def uniform(count: int) -> Tensor:
        return torch.rand(count, 1, generator=generator, dtype=torch.float64).to(h.device)

    for _ in range(steps):
        pause()
        other = torch.randn(h.shape, generator=generator, dtype=torch.float64).to(h.device)
        added = scorer.added(other) if scorer.is_linear else None
        angle = 2 * math.pi * uniform(len(h))
        low, high, taken = angle - 2 * math.pi, angle.clone(), torch.zeros_like(angle)
        open_ = torch.arange(len(h), device=h.device)
        for _ in range(_SHRINKS):
            cos, sin = angle[open_].cos(), angle[open_].sin()
            if turning is not None and added is not None:
                scores = still[open_] + turning[open_] * cos.float() + added[open_] * sin.float()
            else:
                scores = still[open_] + scorer[open_].added(h[open_] * cos + other[open_] * sin)
            good = lead_of(scores, targets[open_])[0] >= MARGIN
            taken[open_[good]] = angle[open_[good]]
            open_ = open_[~good]
            if len(open_) == 0:
                break
            behind = angle[open_] < 0
            low[open_] = torch.where(behind, angle[open_], low[open_])
            high[open_] = torch.where(behind, high[open_], angle[open_])
            angle[open_] = low[open_] + uniform(len(open_)) * (high[open_] - low[open_])
        h = h * taken.cos() + other * taken.sin()
        if lines is not None and turning is not None and added is not None:
            turning = turning * taken.cos().float() + added * taken.sin().float()
            for _ in range(SLIDES):
                along, which = lines.slide(h, still + turning, uniform(len(h)).squeeze(-1), generator)
                h = h + along.unsqueeze(-1) * lines.units[lines.rows, which]
                turning = turning + along.float().unsqueeze(-1) * lines.added[lines.rows, which]
    return h


class Lines:
    """For each of N positions some lines in h, along each of which the target gains on one of its nearest rivals.

    units: float64 [N, D, C]. added: [N, D, V], what a step of one along each adds to the scores.
    """

    def __init__(self, scorer: Scorer, still: Tensor, targets: Tensor) -> None:
        self.targets, self.rows = targets.unsqueeze(-1), torch.arange(len(targets), device=targets.device)
        count = min(RIVALS, still.shape[-1] - 1)
        rivals = still.scatter(-1, self.targets, -torch.inf).topk(count).indices
        toward = scorer.reach.unsqueeze(1) * (scorer.weight[self.targets] - scorer.weight[rivals])
        self.units = (toward / toward.norm(dim=-1, keepdim=True).clamp(min=1e-30)).double()
        self.added = torch.stack([scorer.added(unit) for unit in self.units.unbind(1)], dim=1)

    def slide(self, h: Tensor, scores: Tensor, uniform: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """How far each goes along one of its lines, float64 [N], and along which: N(0, 1) where the target keeps its lead."""
        which = torch.randint(self.units.shape[1], (len(h),), generator=generator).to(h.device)
        added = self.added[self.rows, which]
        spare = (scores.gather(-1, self.targets) - scores - MARGIN).scatter_(-1, self.targets, torch.inf)
        rate = added.gather(-1, self.targets) - added
        at = -spare / rate
        low = torch.where(rate > 0, at, -torch.inf).amax(-1).clamp(max=0).double()
        high = torch.where(rate < 0, at, torch.inf).amin(-1).clamp(min=0).double()
        start = (h * self.units[self.rows, which]).sum(-1)
        return truncated_normal(start + low, start + high, uniform) - start, which


def truncated_normal(low: Tensor, high: Tensor, uniform: Tensor) -> Tensor:
    """The quantile at `uniform` of N(0, 1) restricted to [low, high], float64; taken in the tail that is exact."""
    right = low > 0
    a, b = torch.where(right, -high, low), torch.where(right, -low, high)
    below, within = torch.special.ndtr(a), torch.special.ndtr(b) - torch.special.ndtr(a)
    x = torch.special.ndtri((below + uniform * within).clamp(1e-300, 1 - 1e-16))
    x = torch.maximum(torch.minimum(x, b), a)
    return torch.where(right, -x, x)
