"""Own noise abducted from an observed text: a draw of it under which each observed token is decided (theory 3.13).

At a position whose scores are S_j = loc_j + own_j e_j, with e_j standard normal, token y was observed: S_y = M is the highest.
Given that, M has the density

    p(m) ~ phi((m - loc_y)/own_y) prod_{j != y} Phi((m - loc_j)/own_j)

and the other e_j are normals cut at (M - loc_j)/own_j. Nothing is searched for: M is a quantile on a grid; e_j stays what the
seed draws where that lies below the cut, and is drawn anew below it elsewhere, which is the same distribution.
"""

import torch
from torch import Tensor

from causalqwen.distributions import BLOCK, OBSERVED_STREAM, block_largest, block_uniforms, uniform_draws, widen

LEAD = 1e-3
"""Nats by which an observed token leads: scores of one position differ by 3e-5 between batch shapes in float32."""

_NODES, _GRID = 16, 1024  # of the integral
_BELOW, _ABOVE = 6.0, 8.0  # scales that it reaches below and above the scores that may be the best
_TOP, _BINS, _WIDTH = 256, 512, 0.1  # tokens that count one by one, and bins of the others, below the highest of them


def _chebyshev(x: Tensor) -> Tensor:
    return torch.cos(torch.arange(_NODES, dtype=torch.float64) * torch.acos(x).unsqueeze(-1))


_AT_NODES = torch.cos(torch.pi * (torch.arange(_NODES, dtype=torch.float64) + 0.5) / _NODES)
_AT_GRID = torch.linspace(-1, 1, _GRID, dtype=torch.float64)
_INTERPOLATION = _chebyshev(_AT_GRID) @ torch.linalg.inv(_chebyshev(_AT_NODES))


def draw_best(loc: Tensor, own: Tensor, targets: Tensor, uniform: Tensor) -> Tensor:
    """M [N], float64: the quantile at `uniform` [N] of the best score, given that it is that of targets int64 [N].

    loc, own: of all scores, [N, V] float32; loc is -inf for tokens that take no part. The product over the vocabulary is taken
    at Chebyshev's nodes, tokens after the first `_TOP` in bins, and its double logarithm, which is smooth, is interpolated.
    """
    (loc, own), index = widen(loc, own), targets.unsqueeze(-1)
    loc_y, own_y = (column.gather(-1, index).double() for column in (loc, own))
    others = loc.scatter(-1, index, -torch.inf)
    top = others.topk(min(_TOP, others.shape[-1] - 1), dim=-1)
    best, best_own = top.values[:, :1].double(), own.gather(-1, top.indices[:, :1]).double()
    narrow = (own_y**-2 + best_own**-2) ** -0.5
    meeting = narrow**2 * (loc_y / own_y**2 + best / best_own**2)  # of the two, where that is likeliest
    low = torch.minimum(meeting, best) - _BELOW * narrow
    high = torch.maximum(best + _ABOVE * best_own, loc_y + _BELOW * own_y)
    centre, width = (low + high) / 2, (high - low) / 2
    least, power = top.values[:, -1:], own.square()
    bins = ((least - others) / _WIDTH).clamp(0, _BINS - 1).nan_to_num(0.0).long()
    rest = ((others < least) & (others > -torch.inf)).to(loc)
    counts, scales, places = (
        torch.zeros(len(loc), _BINS, dtype=loc.dtype, device=loc.device).scatter_add_(1, bins, column)
        for column in (rest, rest * power, torch.where(rest > 0, others, 0.0))
    )
    filled = counts.clamp(min=1)
    each_loc = torch.cat([top.values, places / filled], dim=-1).double()
    each_own = torch.cat([own.gather(-1, top.indices), (scales / filled).sqrt().clamp(min=1e-6)], dim=-1).double()
    weight = torch.cat([torch.ones_like(top.values), counts], dim=-1).double()
    nodes = centre + width * _AT_NODES.to(loc.device)
    log_rest = torch.special.log_ndtr((nodes.unsqueeze(-1) - each_loc.unsqueeze(1)) / each_own.unsqueeze(1))
    doubled = (-(log_rest * weight.unsqueeze(1)).sum(-1)).clamp(min=1e-300).log()
    rest_at = -(doubled @ _INTERPOLATION.to(loc.device).T).exp()
    m = centre + width * _AT_GRID.to(loc.device)
    log_density = rest_at - ((m - loc_y) / own_y).square() / 2
    density = (log_density - log_density.amax(-1, keepdim=True)).exp()
    mass = (density.cumsum(-1) - density / 2) / density.sum(-1, keepdim=True)
    at = torch.searchsorted(mass, uniform.unsqueeze(-1)).clamp(1, _GRID - 1)
    before, after = mass.gather(-1, at - 1), mass.gather(-1, at)
    share = ((uniform.unsqueeze(-1) - before) / (after - before).clamp(min=1e-300)).clamp(0, 1)
    return (m.gather(-1, at - 1) + share * 2 * width / (_GRID - 1)).squeeze(-1)


def observed_normals(
    loc: Tensor, own: Tensor, targets: Tensor, seed: int, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Where own noise given the observed tokens is another than `seed` draws: rows, tokens int64 [m], and e [m] of these.

    loc, own: [N, V] as for `draw_best`. targets: int64 [N], the observed tokens. positions: int64 [N], of the draws.
    """
    seeds = torch.full_like(positions, seed)
    uniform = uniform_draws(seeds, OBSERVED_STREAM, positions, 1).squeeze(-1)
    best = draw_best(loc, own, targets, uniform)
    index = targets.unsqueeze(-1)
    loc_y, own_y = (column.gather(-1, index).squeeze(-1).double() for column in (loc, own))
    limits = ((best.unsqueeze(-1) - LEAD - loc) / own).scatter(-1, index, torch.inf)  # float64: a cut is exact
    blocks = -(-loc.shape[-1] // BLOCK)
    lowest = torch.nn.functional.pad(limits, (0, -loc.shape[-1] % BLOCK), value=torch.inf).view(len(loc), blocks, BLOCK)
    largest = block_largest(seeds, positions, blocks)
    at, block = (torch.special.ndtri(largest) > lowest.amin(-1)).nonzero().unbind(-1)
    normals = torch.special.ndtri(block_uniforms(seeds[at], positions[at], block, largest[at, block]))
    cut = lowest[at, block]
    which, lane = (normals > cut).nonzero().unbind(-1)
    rows, tokens, cut = at[which], block[which] * BLOCK + lane, cut[which, lane]
    anew = uniform_draws(seeds[rows] ^ tokens, OBSERVED_STREAM, positions[rows], 2)[:, 1]
    below = torch.special.ndtri((torch.special.ndtr(cut) * anew).clamp(min=1e-300))
    everyone = torch.arange(len(loc), device=loc.device)
    found = torch.cat([everyone, rows]), torch.cat([targets, tokens]), torch.cat([(best - loc_y) / own_y, below])
    order = found[0].argsort(stable=True)
    return found[0][order], found[1][order], found[2][order]
