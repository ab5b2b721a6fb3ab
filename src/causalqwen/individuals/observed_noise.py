"""Own noise abducted from an observed text: a draw of it under which each observed token is decided (theory 3.13).

At a position whose scores are S_j = loc_j + own_j e_j, with e_j standard normal, token y was observed: S_y = M is the highest.
Given that, M has the density

    p(m) ~ phi((m - loc_y)/own_y) prod_{j != y} Phi((m - loc_j)/own_j)

and the other e_j are normals cut at (M - loc_j)/own_j. Nothing is searched for: M is a quantile on a grid; e_j stays what the
seed draws where that lies below the cut, and is drawn anew below it elsewhere, which is the same distribution.
"""

import torch
from torch import Tensor

from causalqwen.distributions import BLOCK, OBSERVED_STREAM, block_largest, block_uniforms, uniform_draws, upcast, widen

LEAD = 1e-3
"""Nats by which an observed token leads: scores of one position differ by 3e-5 between batch shapes in float32."""

ROUNDINGS = 4.0
"""How many units of the largest score's last place they may differ by: what makes a lead in half precision (theory 3.13)."""

_NODES, _GRID = 32, 512  # of the integral
_PROBES, _DEPTH = 12, 20.0  # places that are looked at where it is sought, and nats below the highest where it ends
_TOP, _BINS, _WIDTH = 64, 128, 0.25  # tokens that count one by one, and bins of the others, in scales of those


def _chebyshev(x: Tensor) -> Tensor:
    return torch.cos(torch.arange(_NODES, dtype=torch.float64) * torch.acos(x).unsqueeze(-1))


_AT_NODES = torch.cos(torch.pi * (torch.arange(_NODES, dtype=torch.float64) + 0.5) / _NODES)
_AT_GRID = torch.linspace(-1, 1, _GRID, dtype=torch.float64)
_INTERPOLATION = _chebyshev(_AT_GRID) @ torch.linalg.inv(_chebyshev(_AT_NODES))
_TO_NODES, _TO_GRID = (((1 + x) / 2).square() for x in (_AT_NODES, _AT_GRID))  # closer below, where it is steep
_TO_PROBES = torch.linspace(0, 1, _PROBES, dtype=torch.float64)


def draw_best(loc: Tensor, own: Tensor, targets: Tensor, uniform: Tensor) -> Tensor:
    """M [N], float64: the quantile at `uniform` [N] of the best score, given that it is that of targets int64 [N].

    loc, own: of all scores, [N, V] float32; loc is -inf for tokens that take no part. The density is log-concave: where it is
    not negligible is found by looking at a few places, again and again between those next to it, and there the logarithm of the
    product over the vocabulary is taken at Chebyshev's nodes and interpolated.
    """
    (loc, own), index = widen(loc, own), targets.unsqueeze(-1)
    loc_y, own_y = (column.gather(-1, index).double() for column in (loc, own))
    others = _others(loc, own, index)
    low, wide = _reach(loc_y, own_y, others)
    while True:
        m = low + wide * _TO_PROBES.to(loc.device)
        log_density = _log_product(m, others) - ((m - loc_y) / own_y).square() / 2
        there = (log_density > log_density.amax(-1, keepdim=True) - _DEPTH).long()
        first, last = there.argmax(-1, keepdim=True), _PROBES - 1 - there.flip(-1).argmax(-1, keepdim=True)
        low, before = m.gather(-1, (first - 1).clamp(min=0)), wide
        wide = m.gather(-1, (last + 1).clamp(max=_PROBES - 1)) - low
        if bool((wide > before / 2).all()):
            break
    product = _log_product(low + wide * _TO_NODES.to(loc.device), others)
    to_grid = _TO_GRID.to(loc.device)
    m = low + wide * to_grid
    log_density = product @ _INTERPOLATION.to(loc.device).T - ((m - loc_y) / own_y).square() / 2
    density = (log_density - log_density.amax(-1, keepdim=True)).exp() * to_grid.sqrt()  # of the place on the grid
    mass = (density.cumsum(-1) - density / 2) / density.sum(-1, keepdim=True)
    at = torch.searchsorted(mass, uniform.unsqueeze(-1)).clamp(1, _GRID - 1)
    (m_before, m_at), (before, after) = ((column.gather(-1, at - 1), column.gather(-1, at)) for column in (m, mass))
    share = ((uniform.unsqueeze(-1) - before) / (after - before).clamp(min=1e-300)).clamp(0, 1)
    return (m_before + share * (m_at - m_before)).squeeze(-1)


Others = tuple[Tensor, Tensor, Tensor]


def _others(loc: Tensor, own: Tensor, index: Tensor) -> Others:
    """loc, own and how many, float64 [N, K], of all tokens but those of index [N, 1]: the best one by one, what comes after
    them in bins, and nothing of what lies so far below that it beats none."""
    top = loc.topk(min(_TOP, loc.shape[-1]), dim=-1)
    own_top, least = own.gather(-1, top.indices), top.values[:, -1:]
    width = _WIDTH * own_top.amax(-1, keepdim=True)
    bins = ((least - loc) / width).add_(1).clamp_(0, _BINS + 1).scatter_(-1, index, 0.0).long()  # 0 and the last: none
    counts, places, powers = (
        torch.zeros(len(loc), _BINS + 2, dtype=loc.dtype, device=loc.device).scatter_add_(1, bins, column)[:, 1:-1]
        for column in (torch.ones_like(least).expand_as(loc), loc, own.square())
    )
    filled = counts.clamp(min=1)
    apart = (top.values > least) & (top.indices != index)
    columns = (top.values, places / filled), (own_top, (powers / filled).sqrt().clamp(min=1e-6)), (apart, counts)
    each_loc, each_own, weight = (torch.cat(parts, dim=-1).double() for parts in columns)
    return each_loc, each_own, weight


def _reach(loc_y: Tensor, own_y: Tensor, others: Others) -> tuple[Tensor, Tensor]:
    """Where an interval starts, outside of which the density has a mass below 1e-9, and how wide it is, [N, 1].

    Below lies what y alone, or y above any one of the others, comes to with less: given S_y > S_j, S_y is at least a normal at
    narrow^2 (loc_y/own_y^2 + loc_j/own_j^2), narrow^-2 = own_y^-2 + own_j^-2. Above, where 5 scales of all others end, the
    product is nearly 1 and the density y's own tail.
    """
    each_loc, each_own, weight = others
    narrow = (own_y**-2 + each_own**-2) ** -0.5
    least = narrow**2 * (loc_y / own_y**2 + each_loc / each_own**2) - 6.5 * narrow
    low, free = (
        column.where(weight > 0, -torch.inf).amax(-1, keepdim=True) for column in (least, each_loc + 5 * each_own)
    )
    low = torch.maximum(low, loc_y - 6.5 * own_y)
    high = loc_y + own_y * (((free - loc_y) / own_y).clamp(min=0).square() + 45).sqrt()
    return low, high - low


def _log_product(m: Tensor, others: Others) -> Tensor:
    """sum_j log Phi((m - loc_j)/own_j) of the others, [N, places]."""
    each_loc, each_own, weight = others
    z = (m.unsqueeze(-1) - each_loc.unsqueeze(1)) / each_own.unsqueeze(1)
    return (torch.special.log_ndtr(z) @ weight.unsqueeze(-1)).squeeze(-1)


def _lead(loc: Tensor) -> float | Tensor:
    """By how much an observed token leads, a number or [N] of scores [N, V]: in half precision by some units in the last place
    of the largest."""
    precision = torch.finfo(loc.dtype)
    if precision.bits > 16:
        return LEAD
    return ROUNDINGS * precision.eps * upcast(loc).masked_fill(loc == -torch.inf, 0.0).abs().amax(-1)


def _below(cut: Tensor, uniform: Tensor) -> Tensor:
    """A standard normal given that it lies below `cut`, float64 [n]; of far ones only the exponent of the density counts.

    Phi by erfc: torch.special.ndtr is 0 from -9 on.
    """
    near = torch.special.ndtri(torch.erfc(-cut / 2**0.5) / 2 * uniform)
    return torch.where(cut < -30, -(cut.square() - 2 * uniform.log()).sqrt(), near)


def observed_normals(
    loc: Tensor, own: Tensor, targets: Tensor, seed: int, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Where own noise given the observed tokens is another than `seed` draws: rows, tokens int64 [m], and e [m] of these.

    loc: [N, V] as for `draw_best`, in the dtype in which scores are decided. own: [N, V]. targets: int64 [N], the observed
    tokens. positions: int64 [N], of the draws.
    """
    seeds, index = torch.full_like(positions, seed), targets.unsqueeze(-1)
    uniform = uniform_draws(seeds, OBSERVED_STREAM, positions, 1).squeeze(-1)
    best, lead = draw_best(loc, own, targets, uniform), _lead(loc)
    loc, own = widen(loc, own)
    loc_y, own_y = (column.gather(-1, index).squeeze(-1).double() for column in (loc, own))
    limit, blocks = best - lead, -(-loc.shape[-1] // BLOCK)  # no other score is above it
    nearly = (limit - 1e-5 * (1 + limit.abs())).to(loc.dtype).unsqueeze(-1)  # which float32's roundings do not pass
    cuts = torch.sub(nearly, loc).div_(own).scatter_(-1, index, torch.inf)
    if lacking := -loc.shape[-1] % BLOCK:
        cuts = torch.nn.functional.pad(cuts, (0, lacking), value=torch.inf)
    cuts, largest = cuts.view(len(loc), blocks, BLOCK), block_largest(seeds, positions, blocks)
    at, block = (torch.special.ndtri(largest) > cuts.amin(-1) - 1e-5).nonzero().unbind(-1)
    normals = torch.special.ndtri(block_uniforms(seeds[at], positions[at], block, largest[at, block]))
    which, lane = (normals > cuts[at, block] - 1e-5).nonzero().unbind(-1)
    rows, tokens, normals = at[which], block[which] * BLOCK + lane, normals[which, lane]
    cut = (limit[rows] - loc[rows, tokens]) / own[rows, tokens]  # float64: a cut is exact
    above = normals > cut
    rows, tokens, cut = rows[above], tokens[above], cut[above]
    anew = uniform_draws(seeds[rows] ^ tokens, OBSERVED_STREAM, positions[rows], 2)[:, 1]
    below = _below(cut, anew)
    everyone = torch.arange(len(loc), device=loc.device)
    found = torch.cat([everyone, rows]), torch.cat([targets, tokens]), torch.cat([(best - loc_y) / own_y, below])
    order = found[0].argsort(stable=True)
    return found[0][order], found[1][order], found[2][order]
