"""Values that share an individual: their likelihood with e1 integrated out, and who that may be (theory 3.14).

    v_j = loc_j + loadings_j . Q(e1) + scale_j noise_j,   j = 1 .. n,   one e1, uniform on the unit cube

Under a Gaussian law that is one Gaussian in n dimensions. Under any other, e1 moves on the line Q(e1_c) = sign(W_c) t, on which
loadings_j . Q(e1) = +-|loadings_j|_1 t, with the sign of r where the individual crosses (`parts.crossing`), and t follows the
standard law: a Cauchy individual's exact law wherever the loadings of its values are multiples of each other, and a
one-dimensional integral always.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from causalqwen.distributions import StableFamily

_RUNGS, _REACH, _PIECES = 20, 1e4, 96  # of `line_nodes`


def value_marginal(law: StableFamily, residuals: Tensor, loadings: Tensor, scale: Tensor) -> Tensor:
    """log p(v_1, ..., v_n) of one individual, or of many with n values each; differentiable in everything; float64 [...].

    residuals: v - loc [..., n]. loadings: [..., n, C], scale_U W_reg at each value. scale: [..., n], of the noise.
    """
    residuals, loadings, scale = residuals.double(), loadings.double(), scale.double()
    if law.alpha == 2:
        factor = torch.linalg.cholesky(loadings @ loadings.mT + torch.diag_embed(scale.square()))
        white = torch.linalg.solve_triangular(factor, residuals.unsqueeze(-1), upper=False).squeeze(-1)
        volume = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * white.square().sum(-1) - volume - 0.5 * residuals.shape[-1] * math.log(2 * math.pi)
    sizes = loading_sizes(law, loadings)
    largest = loadings.take_along_dim(sizes.argmax(-1, keepdim=True).unsqueeze(-1), dim=-2)
    side = (loadings * largest).sum(-1).detach().sign()  # an individual who crosses reaches some values the other way
    return line_nodes(law, residuals, sizes * side, scale)[1].logsumexp(-1)


def loading_sizes(law: StableFamily, loadings: Tensor) -> Tensor:
    """|loadings|_a [..., n], the scale of what the individual adds to each value; loadings [..., n, C]."""
    return law.linear_scale(loadings.abs(), loadings.new_ones(1, loadings.shape[-1])).squeeze(-1)


def line_nodes(
    law: StableFamily, residuals: Tensor, sizes: Tensor, scale: Tensor, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """Places t [..., nodes] and the log of p(t, values) times what each stands for: sums over them are integrals over t.

    residuals, sizes (of the loadings; negative where the individual reaches the other way) and scale: [..., n]. The line is cut
    at distances 0, 1, 4, 16, ... widths from where each value, and the prior, has its peak, so that on a piece nothing varies
    faster than over the piece's own length; Gauss and Legendre's rule then takes the pieces that hold the mass, each cut into
    so many `parts`.
    """

    def joint(t: Tensor) -> Tensor:
        zero, unit = torch.zeros_like(t), torch.ones_like(t)
        columns = (column.unsqueeze(-2) for column in (residuals, sizes, scale))
        value, size, width = columns
        of_values = law.log_prob(value, size * t.unsqueeze(-1), width.expand(*t.shape, value.shape[-1]))
        return law.log_prob(t, zero, unit) + of_values.sum(-1)

    with torch.no_grad():
        moved = sizes != 0  # a value that t does not move has no peak
        peaks = torch.where(moved, residuals / sizes, 0.0), torch.where(moved, scale / sizes.abs(), 1.0)
        centre, width = (F.pad(peak, (0, 1), value=end) for peak, end in zip(peaks, (0.0, 1.0), strict=True))
        reach = _REACH * (centre.abs() + width).amax(-1, keepdim=True)
        rungs = 4.0 ** torch.arange(_RUNGS, dtype=torch.float64, device=residuals.device)
        steps = torch.cat([-rungs.flip(0), torch.zeros_like(rungs[:1]), rungs])
        cuts = (centre.unsqueeze(-1) + width.unsqueeze(-1) * steps).flatten(-2)
        cuts = torch.maximum(torch.minimum(cuts, reach), -reach).sort(-1).values
        middle, half = (cuts[..., 1:] + cuts[..., :-1]) / 2, (cuts[..., 1:] - cuts[..., :-1]) / 2
        mass = joint(middle) + half.log()
        kept = mass.topk(min(mass.shape[-1], _PIECES + 8 * residuals.shape[-1]), dim=-1).indices
        middle, half = (column.gather(-1, kept).unsqueeze(-1) for column in (middle, half))
        half = half / parts
        shifts = torch.arange(1 - parts, parts, 2, dtype=torch.float64, device=residuals.device)
        middle, half = ((middle + half * shifts).unsqueeze(-1), half.expand(*half.shape[:-1], parts).unsqueeze(-1))
        places, weights = (
            torch.from_numpy(column).to(residuals.device) for column in np.polynomial.legendre.leggauss(8)
        )
        t = (middle + half * places).flatten(-3)
        share = (half.log() + weights.log()).flatten(-3)
    return t, joint(t) + share


def shared_losses(
    losses: Tensor, law: StableFamily, residuals: Tensor, loadings: Tensor, scale: Tensor, group: Tensor
) -> Tensor:
    """The losses [n] of values, those of one group (int64 [n], -1 for none) replaced by equal shares of their joint one,
    -`value_marginal` of residuals, scale [n] and loadings [n, C]."""
    columns = [column.double() for column in (residuals, loadings, scale)]
    order = group.argsort(stable=True)
    members, counts = group[order].unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts
    for count in counts[(members >= 0) & (counts > 1)].unique().tolist():
        first = starts[(members >= 0) & (counts == count)]
        places = order[first.unsqueeze(-1) + torch.arange(count, device=order.device)]  # [people, count]
        joint = value_marginal(law, *(column[places] for column in columns))
        share = (-joint / count).to(losses.dtype).unsqueeze(-1).expand(places.shape)
        losses = losses.index_copy(0, places.flatten(), share.flatten())
    return losses


def line_posterior(law: StableFamily, residuals: Tensor, sizes: Tensor, scale: Tensor, count: int) -> Tensor:
    """Equally likely places t [count] of the line given values: residuals, scale [n] as in `value_marginal`, sizes [n] of its
    loadings; exact up to the grid."""
    t, log_weights = line_nodes(law, residuals, sizes, scale, parts=16)
    order = t.argsort()
    mass = log_weights[order].softmax(0)
    t, share = t[order], mass.cumsum(0) - mass / 2
    levels = (torch.arange(count, dtype=torch.float64, device=t.device) + 0.5) / count
    after = torch.searchsorted(share, levels).clamp(1, len(t) - 1)
    part = ((levels - share[after - 1]) / (share[after] - share[after - 1]).clamp(min=1e-300)).clamp(0, 1)
    return t[after - 1] + part * (t[after] - t[after - 1])
