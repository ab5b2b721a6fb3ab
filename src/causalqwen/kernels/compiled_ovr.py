"""The stage between the products of `chunked.one_pass`, fused by torch.compile: every score is read once and written once.

Needs what torch.compile needs (on the CPU a C++ compiler) and some ten seconds the first time; torch keeps what it made.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from causalqwen.distributions import SCALE_FLOOR
from causalqwen.kernels.chunked import Block, OvrTask

MILLS = (
    0.2499999875, 0.2500024419, 0.2342796882, 0.2046007597, 0.1475747572,
    0.1603895241, -0.08072356236, 0.240843697, -0.2033885745, 0.04973537813,
)  # fmt: skip

# atan(z)/z on [0, 1] as a polynomial in z^2, from its highest power, within 2e-8.
ATAN = (
    0.00284980641, -0.01606829675, 0.04269098064, -0.07504249084, 0.1064091279,
    -0.1420363908, 0.1999261872, -0.3333307331, 0.9999999848,
)  # fmt: skip


def _log_cdf_and_hazard(x: Tensor, cauchy: bool) -> tuple[Tensor, Tensor]:
    """log F(x) and F'(x)/F(x) of the standard law in float32: both sides from one logarithm, exact in both tails.

    F is `part` times e^`rest`; where part = 1 - p is rounded, Kahan's correction ((1 - part) - p)/part gives back what was
    lost.
    """
    a, upper = x.abs(), x >= 0
    if cauchy:
        steep = a > 1
        z = torch.where(steep, 1 / a, a)
        square = z * z
        angle = torch.full_like(x, ATAN[0])
        for coefficient in ATAN[1:]:
            angle = angle * square + coefficient
        angle = angle * z * (1 / math.pi)
        p = torch.where(steep, angle, 0.5 - angle)  # P(X > |x|)
        part = torch.where(upper, 1 - p, p)
        square = 1 + x * x
        inverse = 1 / (part * square)
        rest = torch.where(upper, ((1 - part) - p) * (inverse * square), 0.0)
        return part.log() + rest, inverse * (1 / math.pi)
    t = 1 / (1 + 0.25 * a)
    mills = t * MILLS[-1]
    for coefficient in MILLS[-2::-1]:
        mills = (mills + coefficient) * t
    exponent = -0.5 * x * x
    density = exponent.exp() * (1 / math.sqrt(2 * math.pi))
    p = density * mills
    part = torch.where(upper, 1 - p, mills)
    inverse = 1 / part
    rest = torch.where(upper, ((1 - part) - p) * inverse, exponent - 0.5 * math.log(2 * math.pi))
    return part.log() + rest, torch.where(upper, density, 1.0) * inverse


def _stage(
    scores: Tensor,
    scale: Tensor,
    thresholds: Tensor,
    targets: Tensor,
    column_weights: Tensor,
    row_weights: Tensor,
    slope: float,
    cauchy: bool,
    positive: bool,
) -> tuple[Tensor, Tensor]:
    """Losses [N] and gradients of the scale [N]; those of the scores, and of powers of scales, are written over them."""
    own = scale.dim() == 2
    base = scale.float() if own else scale.unsqueeze(1)
    if own:
        base = (base if cauchy else base.sqrt()).clamp(min=SCALE_FLOOR)
    x = thresholds - scores.float()
    above = x.clamp(min=0) * slope
    s = base
    if slope:
        s = base + above if cauchy else (base * base + above).sqrt()
    inverse = 1 / s
    x = x * inverse
    columns = torch.arange(scores.shape[1], dtype=torch.int32, device=x.device)
    right = columns == targets.unsqueeze(1)
    # -log F(-x) of the right token: its sign turns x, and its hazard. In a sample of the wrong ones it does not count.
    sign = torch.where(right, -1.0 if positive else 1.0, 1.0)
    weight = torch.where(right, 1.0 if positive else 0.0, column_weights)
    log_cdf, hazard = _log_cdf_and_hazard(x * sign, cauchy)
    losses = -(log_cdf * weight).sum(-1)
    hazard = hazard * (sign * weight * row_weights.unsqueeze(1) * inverse)
    of_base = hazard * x
    if slope and not cauchy:
        of_base = of_base * (base * inverse)
    of_scale = scale.copy_(of_base if cauchy else of_base / (2 * base)) if own else of_base.sum(-1)
    if slope:
        hazard = hazard * (1 - (above * inverse if cauchy else 0.5 * above * inverse * inverse))
    scores.copy_(hazard)
    return losses, of_scale


@functools.cache
def _fused() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_stage, dynamic=True)


def compiled_stage(block: Block, task: OvrTask, losses: Tensor) -> Tensor | None:
    """`chunked.tiled_stage` as one compiled loop; the same contract. TypeError for float64."""
    if losses.dtype != torch.float32:
        raise TypeError("impl='compiled' computes in float32: use 'chunked' or 'reference' for float64")
    # Ones where there are no weights: fewer variants to compile, and no slower.
    positions, columns = block.scores.shape
    column_weights = losses.new_ones(columns) if block.column_weights is None else block.column_weights
    row_weights = losses.new_ones(positions) if block.row_weights is None else block.row_weights.detach().contiguous()
    # A variant for each law, slope, kind of scale and of thresholds; numbers are constants in the loop, not read in it.
    with torch._dynamo.config.patch(recompile_limit=64, specialize_float=True):
        added, of_scale = _fused()(
            block.scores.detach(),
            block.scale.detach(),
            block.thresholds.detach(),
            block.targets.int(),
            column_weights,
            row_weights,
            task.slope,
            task.law.alpha == 1,
            task.column_weights is None,
        )
    losses += added
    return None if block.scale.dim() == 2 else of_scale
