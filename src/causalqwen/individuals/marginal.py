"""Values that share an individual: their likelihood with e1 integrated out, and who that may be (theory 3.14).

    v_j = loc_j + loadings_j . Q(e1) + scale_j noise_j,   j = 1 .. n,   one e1, uniform on the unit cube

Under a Gaussian law that is one Gaussian in n dimensions. Under any other, e1 moves on the line Q(e1_c) = sign(W_c) t, on which
loadings_j . Q(e1) = |loadings_j|_1 t and t follows the standard law: a Cauchy individual's exact law wherever the loadings
of its values are multiples of each other, and a one-dimensional integral always.
"""

import math

import torch
from torch import Tensor

from causalqwen.distributions import StableFamily

NODES = 1024


def value_marginal(
    law: StableFamily, residuals: Tensor, loadings: Tensor, scale: Tensor, *, on_line: bool = False
) -> Tensor:
    """log p(v_1, ..., v_n) of one individual, or of many with n values each; differentiable in everything; float64 [...].

    Args:
        residuals: v - loc [..., n]. loadings: [..., n, C], scale_U W_reg at each value. scale: [..., n], of the noise.
        on_line: integrate over the line under a Gaussian law too, which is exact for proportional loadings.
    """
    residuals, loadings, scale = residuals.double(), loadings.double(), scale.double()
    if law.alpha == 2 and not on_line:
        factor = torch.linalg.cholesky(loadings @ loadings.mT + torch.diag_embed(scale.square()))
        white = torch.linalg.solve_triangular(factor, residuals.unsqueeze(-1), upper=False).squeeze(-1)
        volume = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * white.square().sum(-1) - volume - 0.5 * residuals.shape[-1] * math.log(2 * math.pi)
    return line_nodes(law, residuals, loading_sizes(law, loadings), scale)[1].logsumexp(-1)


def loading_sizes(law: StableFamily, loadings: Tensor) -> Tensor:
    """|loadings|_a [..., n], the scale of what the individual adds to each value; loadings [..., n, C]."""
    return law.linear_scale(loadings.abs(), loadings.new_ones(1, loadings.shape[-1])).squeeze(-1)


def line_nodes(
    law: StableFamily, residuals: Tensor, sizes: Tensor, scale: Tensor, nodes: int = NODES
) -> tuple[Tensor, Tensor]:
    """Places t [..., nodes] and the log of p(t, values) times what each stands for: sums over them are integrals over t.

    residuals, sizes (of the loadings, positive) and scale: [..., n]. t = centre + width tan(theta), theta on an even grid: fine
    around the best of the values' own guesses residuals/sizes, and reaching as far as any tail.
    """

    def joint(t: Tensor) -> Tensor:
        zero, one = torch.zeros_like(t), torch.ones_like(t)
        columns = (column.unsqueeze(-2) for column in (residuals, sizes, scale))
        value, size, width = columns
        of_values = law.log_prob(value, size * t.unsqueeze(-1), width.expand(*t.shape, value.shape[-1]))
        return law.log_prob(t, zero, one) + of_values.sum(-1)

    with torch.no_grad():
        guesses = torch.cat([residuals / sizes, torch.zeros_like(residuals[..., :1])], dim=-1)
        reaches = torch.cat([scale / sizes, torch.ones_like(residuals[..., :1])], dim=-1)
        around = torch.linspace(-2, 2, 9, dtype=torch.float64)
        fine = (guesses.unsqueeze(-1) + reaches.unsqueeze(-1) * around).flatten(-2)
        centre = fine.gather(-1, joint(fine).argmax(-1, keepdim=True))
        width = reaches.square().reciprocal().sum(-1, keepdim=True).rsqrt() * 2.0
    theta = math.pi * ((torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes - 0.5)
    t = centre + width * theta.tan()
    return t, joint(t) + (math.log(math.pi / nodes) + width.log() - 2 * theta.cos().log())


def line_posterior(
    law: StableFamily, residuals: Tensor, loadings: Tensor, scale: Tensor, count: int
) -> tuple[Tensor, float]:
    """Equally likely places t [count] of the line given values, and the nats that its median gains over t = 0.

    residuals [n], loadings [n, C], scale [n] as in `value_marginal`; exact up to the grid.
    """
    sizes = loading_sizes(law, loadings)
    t, log_weights = line_nodes(law, residuals, sizes, scale)
    order = t.argsort()
    t, share = t[order], log_weights[order].softmax(0).cumsum(0)
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    after = torch.searchsorted(share, levels).clamp(1, len(t) - 1)
    part = ((levels - share[after - 1]) / (share[after] - share[after - 1]).clamp(min=1e-300)).clamp(0, 1)
    places = t[after - 1] + part * (t[after] - t[after - 1])

    def fit(at: Tensor) -> float:
        return law.log_prob(residuals, sizes * at, scale).sum().item()

    return places, fit(places[count // 2]) - fit(torch.zeros((), dtype=torch.float64))
