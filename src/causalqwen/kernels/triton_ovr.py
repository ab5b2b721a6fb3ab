"""The stage between the products of `chunked.one_pass` as one Triton kernel: every score is read once and written once.

For CUDA. With TRITON_INTERPRET=1 in the environment it runs on the CPU, slowly, in Triton's interpreter: that is how it is
tested where there is no GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from causalqwen.kernels.chunked import Block, OvrTask
from causalqwen.kernels.compiled_ovr import ATAN, MILLS

_WIDTH = 1024
_ROOT_2_PI: tl.constexpr = tl.constexpr(1 / math.sqrt(2 * math.pi))
_INVERSE_PI: tl.constexpr = tl.constexpr(1 / math.pi)
_FLOOR: tl.constexpr = tl.constexpr(1e-6)
_MILLS: tl.constexpr = tl.constexpr(MILLS[::-1])
_ATAN: tl.constexpr = tl.constexpr(ATAN)


@triton.jit
def _log1p(u):
    """log(1 + u), exact for small u (Kahan's correction)."""
    y = 1.0 + u
    d = y - 1.0
    return tl.where(d == 0.0, u, tl.log(y) * (u / tl.where(d == 0.0, 1.0, d)))


@triton.jit
def _log_cdf_and_hazard(x, CAUCHY: tl.constexpr):
    """log F(x) and F'(x)/F(x) of the standard law."""
    a = tl.abs(x)
    if CAUCHY:
        steep = a > 1.0
        z = tl.where(steep, 1.0 / tl.where(steep, a, 1.0), a)
        polynomial = tl.zeros_like(x)
        for i in tl.static_range(9):
            polynomial = polynomial * (z * z) + _ATAN[i]
        angle = z * polynomial
        tail = tl.where(steep, angle * _INVERSE_PI, 0.5 - angle * _INVERSE_PI)  # P(X > |x|)
        cdf = tl.where(x < 0, tail, 1.0 - tail)
        log_cdf = tl.where(x < 0, tl.log(tail), _log1p(-tail))
        return log_cdf, _INVERSE_PI / ((1.0 + x * x) * cdf)
    t = 1.0 / (1.0 + 0.25 * a)
    mills = tl.zeros_like(x)
    for i in tl.static_range(10):
        mills = (mills + _MILLS[i]) * t
    density = tl.exp(-0.5 * x * x) * _ROOT_2_PI
    tail = density * mills
    log_cdf = tl.where(x < 0, tl.log(mills * _ROOT_2_PI) - 0.5 * x * x, _log1p(-tail))
    return log_cdf, tl.where(x < 0, 1.0 / mills, density / (1.0 - tail))


@triton.jit
def _stage(
    scores, scale, thresholds, targets, column_weights, row_weights, losses, of_scale,
    columns, slope,
    CAUCHY: tl.constexpr, OWN: tl.constexpr, THRESHOLDS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    POSITIVE: tl.constexpr, SLOPED: tl.constexpr, OF_SCORES: tl.constexpr, OF_SCALES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per position; THRESHOLDS: 0 for one, 1 per token, 2 per position."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    row_weight = 1.0
    if ROWS:
        row_weight = tl.load(row_weights + row)
    common = 0.0
    if not OWN:
        common = tl.load(scale + row)
    loss = 0.0
    scale_gradient = 0.0
    for start in range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < columns
        at = row * columns + column
        score = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32)
        if THRESHOLDS == 1:
            threshold = tl.load(thresholds + column, mask=inside, other=0.0)
        elif THRESHOLDS == 2:
            threshold = tl.load(thresholds + row)
        else:
            threshold = tl.load(thresholds)
        x = threshold - score
        if OWN:
            base = tl.load(scale + at, mask=inside, other=1.0).to(tl.float32)
            base = base if CAUCHY else tl.sqrt(base)
            base = tl.maximum(base, _FLOOR)
        else:
            base = common + tl.zeros_like(x)
        s = base
        if SLOPED:
            grown = slope * tl.maximum(x, 0.0)
            s = base + grown if CAUCHY else tl.sqrt(base * base + grown)
        x = x / s
        weight = tl.where(inside, 1.0, 0.0)
        if COLUMNS:
            weight = tl.load(column_weights + column, mask=inside, other=0.0)
        right = inside & (column == target)
        # -log F(-x) of the right token: its sign turns x, and its hazard. In a sample of the wrong ones it does not count.
        sign = tl.where(right, -1.0 if POSITIVE else 1.0, 1.0)
        weight = tl.where(right, 1.0 if POSITIVE else 0.0, weight)
        log_cdf, hazard = _log_cdf_and_hazard(x * sign, CAUCHY)
        loss -= tl.sum(weight * log_cdf)
        hazard = sign * weight * hazard
        hazard = hazard * row_weight / s
        if OF_SCALES:
            of_base = hazard * x
            if SLOPED and not CAUCHY:
                of_base = of_base * base / s
            if OWN:
                of_base = of_base if CAUCHY else of_base / (2.0 * base)
                tl.store(scale + at, of_base, mask=inside)
            else:
                scale_gradient += tl.sum(of_base)
        if OF_SCORES:
            if SLOPED:
                fall = slope * tl.maximum(x, 0.0)
                hazard = hazard * (1.0 - (fall if CAUCHY else fall / (2.0 * s)))
            tl.store(scores + at, hazard, mask=inside)
    tl.store(losses + row, tl.load(losses + row) + loss)
    if OF_SCALES and not OWN:
        tl.store(of_scale + row, scale_gradient)


def triton_stage(block: Block, task: OvrTask, losses: Tensor) -> Tensor | None:
    """`chunked.tiled_stage` as a kernel; the same contract. TypeError for float64."""
    if losses.dtype != torch.float32:
        raise TypeError("impl='triton' computes in float32: use 'chunked' or 'reference' for float64")
    own = block.scale.dim() == 2
    of_scale = torch.zeros_like(losses) if block.of_scale and not own else None
    by = 2 if block.thresholds.shape[1] == 1 and len(block.thresholds) > 1 else int(block.thresholds.shape[1] > 1)
    empty = losses  # a pointer that is never read
    _stage[(len(losses),)](
        block.scores,
        block.scale,
        block.thresholds.contiguous(),
        block.targets,
        empty if block.column_weights is None else block.column_weights,
        empty if block.row_weights is None else block.row_weights.contiguous(),
        losses,
        empty if of_scale is None else of_scale,
        block.scores.shape[1],
        task.slope,
        CAUCHY=task.law.alpha == 1,
        OWN=own,
        THRESHOLDS=by,
        COLUMNS=block.column_weights is not None,
        ROWS=block.row_weights is not None,
        POSITIVE=task.column_weights is None,
        SLOPED=task.slope != 0,
        OF_SCORES=block.of_scores,
        OF_SCALES=block.of_scale,
        WIDTH=_WIDTH,
    )
    return of_scale
