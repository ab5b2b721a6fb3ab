"""One pass over blocks of the vocabulary: OvR losses and their gradients together, in plain torch.

With d = C - loc, s the scale (graded where there is a slope) and x = d/s, a wrong token adds -log F(x), F the law's
distribution function, and with h = F'/F

    dL/dloc = h/s (1 - slope max(x, 0) s^(1-a)/a)      dL/dC = -dL/dloc      dL/dscale = h x/s (scale/s)^(a-1)

The right token adds -log F(-x): -h(-x) takes the place of h(x). The products are the library's; what lies between them, the
stage, is exchangeable. This one raises small tiles of a block's scores to float32 and writes their gradients over them, so
that nothing of tokens x vocabulary is ever there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from causalqwen.distributions import SCALE_FLOOR, StableFamily

BLOCK = 2**22  # scores, and powers of scales, at a time
BLOCK_ON_GPU = 2**26  # where every block is a dozen kernels, and few of them are faster (experiments 7.7)
TILE = 2**18  # of them in float32: few enough for a core's cache


class Scored(NamedTuple):
    """What the scores of N positions are made of; shapes as in `linear_ovr_loss`, thresholds [], [V] or [N, 1]."""

    loc: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor | None
    thresholds: Tensor


@dataclass
class OvrTask:
    """What a pass computes beside its tensors.

    targets: int64 [N], `NO_TARGET` (or any id outside the V rows) where none of them is right. mask: bool [V], False rows
    take no part. chunk_size: rows of W at a time, None for what `BLOCK` allows. column_weights: [V]; where they are given, the
    rows are a sample of the wrong tokens, and the target's own row is left out of it.
    """

    targets: Tensor
    law: StableFamily
    slope: float
    mask: Tensor | None = None
    chunk_size: int | None = None
    column_weights: Tensor | None = None


@dataclass
class Block:
    """v rows of the vocabulary.

    scores: [N, v], in the dtype of the products. scale: [N], or the powers scale_S^a [N, v]. thresholds: [1, 1], [1, v]
    or [N, 1]. targets: [N], counted from the block's first row. column_weights: [v], 0 for rows that take no part, or None.
    row_weights: [N] or None. of_scores, of_scale: whether their gradients are wanted.
    """

    scores: Tensor
    scale: Tensor
    thresholds: Tensor
    targets: Tensor
    column_weights: Tensor | None
    row_weights: Tensor | None
    of_scores: bool
    of_scale: bool


Stage = Callable[[Block, OvrTask, Tensor], Tensor | None]
"""What lies between the products; see `tiled_stage`."""


def one_pass(
    scored: Scored, task: OvrTask, wanted: tuple[bool, ...], row_weights: Tensor | None, stage: Stage
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses [N] and the gradients of their sum (weighted by `row_weights`) for the wanted of the five tensors."""
    loc, scale, weight, bias, thresholds = scored
    wide = torch.promote_types(
        torch.float32, torch.promote_types(loc.dtype, torch.promote_types(scale.dtype, weight.dtype))
    )
    positions, law, own = len(loc), task.law, scale.dim() == 2
    losses = torch.zeros(positions, dtype=wide, device=loc.device)
    gradients: list[Tensor | None] = [None] * len(scored)
    for place, (tensor, want) in enumerate(zip(scored, wanted, strict=True)):
        if want:  # each block's rows of dW are final: no wider accumulator, no zeros
            gradients[place] = torch.empty_like(weight) if place == 2 else torch.zeros_like(tensor, dtype=wide)
    of_scales_wanted = wanted[1] or (own and wanted[2])
    powers = (scale.to(loc.dtype) if law.alpha == 1 else scale.to(loc.dtype) ** law.alpha) if own else None
    most = BLOCK if loc.device.type == "cpu" else BLOCK_ON_GPU
    size = task.chunk_size or max(256, min(most // (1 + own) // max(positions, 1), 65536))
    for start in range(0, len(weight), size):
        part = slice(start, start + size)
        rows = weight[part]
        magnitudes = (rows.abs() if law.alpha == 1 else rows.abs() ** law.alpha) if own else None
        block = Block(
            F.linear(loc, rows, None if bias is None else bias[part]),
            F.linear(powers, magnitudes) if own else scale.to(wide),
            (thresholds[part].unsqueeze(0) if thresholds.dim() == 1 else thresholds.reshape(-1, 1)).to(wide),
            task.targets - start,
            _column_weights(task, part, wide),
            row_weights,
            wanted[0] or any(wanted[2:]),
            of_scales_wanted,
        )
        of_scale = stage(block, task, losses)
        of_scores = block.scores  # written over
        if gradients[0] is not None:
            gradients[0] += of_scores @ rows
        if gradients[2] is not None:
            torch.mm(of_scores.T, loc, out=gradients[2][part])
        if gradients[3] is not None:
            gradients[3][part] = of_scores.sum(0, dtype=wide)
        if gradients[4] is not None:
            over: tuple[int, ...] = ((0, 1), (0,), (1,))[thresholds.dim()]
            target = gradients[4][part] if thresholds.dim() == 1 else gradients[4]
            target -= of_scores.sum(over, keepdim=thresholds.dim() == 2, dtype=wide)
        if not own and gradients[1] is not None:
            gradients[1] += of_scale
        if own and of_scales_wanted:
            of_powers = block.scale  # written over
            if gradients[1] is not None:
                gradients[1] += of_powers @ magnitudes
            if gradients[2] is not None:
                slopes = rows.sign() if law.alpha == 1 else law.alpha * rows.sign() * rows.abs() ** (law.alpha - 1)
                gradients[2][part].addcmul_(slopes, of_powers.T @ powers)
    if own and gradients[1] is not None and law.alpha != 1:
        gradients[1] *= law.alpha * scale.to(wide) ** (law.alpha - 1)
    return losses, [None if g is None else g.to(t.dtype) for g, t in zip(gradients, scored, strict=True)]


def _column_weights(task: OvrTask, part: slice, wide: torch.dtype) -> Tensor | None:
    weights = None if task.column_weights is None else task.column_weights[part].to(wide)
    if task.mask is None or bool(task.mask[part].all()):
        return weights
    return task.mask[part].to(wide) if weights is None else weights * task.mask[part]


def tiled_stage(block: Block, task: OvrTask, losses: Tensor) -> Tensor | None:
    """Add the block's part of every loss to `losses` [N]; gradients take the place of the scores and of their powers. That of
    the positions' scale [N] is returned, where they have one each and it is wanted."""
    law, slope, wide = task.law, task.slope, losses.dtype
    own = block.scale.dim() == 2
    of_scale = torch.zeros_like(losses) if block.of_scale and not own else None
    height = len(losses) if losses.device.type != "cpu" else max(1, TILE // block.scores.shape[1])
    for top in range(0, len(losses), height):
        tile = slice(top, top + height)
        base = block.scale[tile].to(wide)
        base = (base ** (1 / law.alpha)).clamp_(min=SCALE_FLOOR) if own else base.unsqueeze(1)
        thresholds = block.thresholds[tile] if len(block.thresholds) > 1 else block.thresholds
        x = thresholds - block.scores[tile]
        s = base
        if slope:
            s = x.clamp(min=0).mul_(slope)
            s = s.add_(base) if law.alpha == 1 else s.add_(base**law.alpha).pow_(1 / law.alpha)
        x.div_(s)
        log_cdf, hazard = law.log_cdf_and_hazard(x)
        if block.column_weights is not None:
            log_cdf.mul_(block.column_weights)
            hazard.mul_(block.column_weights)
        losses[tile] -= log_cdf.sum(-1)
        _put_targets(losses[tile], log_cdf, hazard, x, block.targets[tile], law, task.column_weights is None)
        if not (block.of_scores or block.of_scale):
            continue
        if block.row_weights is not None:
            hazard.mul_(block.row_weights[tile].unsqueeze(1))
        hazard.div_(s)
        if block.of_scale:
            of_base = hazard * x
            if slope and law.alpha != 1:
                of_base.mul_((base / s) ** (law.alpha - 1))
            if not own:
                of_scale[tile] = of_base.sum(-1)
            else:
                block.scale[tile] = of_base if law.alpha == 1 else of_base / (law.alpha * base ** (law.alpha - 1))
        if block.of_scores:
            if slope:
                fall = x.clamp_(min=0).mul_(-slope / law.alpha)
                hazard.mul_((fall if law.alpha == 1 else fall.div_(s ** (law.alpha - 1))).add_(1.0))
            block.scores[tile] = hazard
    return of_scale


def _put_targets(
    losses: Tensor, log_cdf: Tensor, hazard: Tensor, x: Tensor, targets: Tensor, law: StableFamily, positive: bool
) -> None:
    """Let the right tokens of a tile count as such, or (not `positive`) not at all; in place."""
    rows = ((targets >= 0) & (targets < x.shape[1])).nonzero().squeeze(-1)
    if len(rows) == 0:
        return
    columns = targets[rows]
    losses[rows] += log_cdf[rows, columns]
    if not positive:
        hazard[rows, columns] = 0.0
        return
    log_sf, mirrored = law.log_cdf_and_hazard(-x[rows, columns].unsqueeze(-1))
    losses[rows] -= log_sf.squeeze(-1)
    hazard[rows, columns] = -mirrored.squeeze(-1)
