"""The OvR loss of a linear head without ever holding a tokens x vocabulary matrix (theory 2.5).

    loc_S = loc W^T + b,   scale_S = scale (one per position) or |W| scale,   L = -log P_y - sum_{k != y} log(1 - P_k)

OvR has no normaliser, so a block of the vocabulary gives its part of the loss and of every gradient on its own: one pass
over blocks computes both. `impl="reference"` is the slow obvious form that the fast one is tested against.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from causalqwen.distributions import SCALE_FLOOR, StableFamily, get_family, upcast
from causalqwen.losses import IGNORE_INDEX, check_targets, graded_scale, ovr_loss, reduce_losses


def linear_ovr_loss(
    loc: Tensor,
    scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    thresholds: Tensor | float,
    targets: Tensor,
    *,
    family: str = "cauchy",
    slope: float = 0.0,
    vocabulary_mask: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    chunk_size: int = 4096,
    impl: str = "chunked",
) -> Tensor:
    """OvR loss of the scores W U' + b against thresholds; equals `ovr_loss` of their laws.

    Args:
        loc: [N, C]; scale: [N], the common scale of each position's scores, or [N, C], the scale of U', which gives
            every token its own scale |W_k| scale. Positive.
        weight: [V, C]; bias: [V] or None.
        thresholds: a number, [V], or [N, 1]. slope: see `graded_scale`.
        targets: int64 [N]; `ignore_index` for positions without a loss, `NO_TARGET` where none of the V tokens is right.
        vocabulary_mask: bool [V]; False rows take no part.
        reduction: "none" [N], "sum", or "mean" over positions that have a loss.
        chunk_size: rows of W at a time; memory grows with N x chunk_size.
        impl: "chunked" or "reference".

    Returns:
        float32 (float64 where an argument is). Gradients reach loc, scale, weight, bias and thresholds.
    """
    law = get_family(family)
    thresholds = torch.as_tensor(thresholds, dtype=upcast(loc).dtype, device=loc.device)
    if impl == "reference":
        if scale.dim() == 1:
            score_scale = scale.unsqueeze(-1)
        else:
            score_scale = law.linear_scale(upcast(scale), upcast(weight)).clamp(min=SCALE_FLOOR)
        return ovr_loss(
            F.linear(loc, weight, bias),
            score_scale,
            targets,
            thresholds,
            family=family,
            slope=slope,
            vocabulary_mask=vocabulary_mask,
            ignore_index=ignore_index,
            reduction=reduction,
        )
    if impl != "chunked":
        raise ValueError(f"unknown impl {impl!r}; use 'chunked' or 'reference'")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"unknown reduction {reduction!r}; use 'none', 'sum' or 'mean'")
    valid = targets != ignore_index
    check_targets(targets[valid], weight.shape[0], vocabulary_mask)
    losses = _ChunkedOvr.apply(
        loc[valid],
        scale[valid],
        weight,
        bias,
        thresholds[valid] if thresholds.dim() == 2 else thresholds,
        targets[valid],
        vocabulary_mask,
        law,
        slope,
        chunk_size,
        reduction == "none",
    )
    if reduction == "none":
        return losses.new_zeros(targets.shape).masked_scatter(valid, losses)
    return reduce_losses(losses, valid, reduction)


class _ChunkedOvr(torch.autograd.Function):
    """Per-position losses [N], or their sum []. For the sum, gradients are made in the forward pass and kept."""

    @staticmethod
    def forward(ctx: Any, loc, scale, weight, bias, thresholds, targets, mask, law, slope, chunk_size, per_position):
        ctx.settings = {"targets": targets, "mask": mask, "law": law, "slope": slope, "chunk_size": chunk_size}
        ctx.per_position = per_position
        ctx.wanted = ctx.needs_input_grad[:5]
        tensors = (loc, scale, weight, bias, thresholds)
        if per_position:
            losses, _ = _one_pass(*tensors, **ctx.settings, wanted=(False,) * 5)
            ctx.save_for_backward(*tensors)
            return losses
        losses, gradients = _one_pass(*tensors, **ctx.settings, wanted=ctx.wanted)
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        if ctx.per_position:
            _, gradients = _one_pass(*ctx.saved_tensors, **ctx.settings, wanted=ctx.wanted, row_weights=gradient)
        else:
            gradients = [None if g is None else g * gradient.to(g.dtype) for g in ctx.saved_tensors]
        return *gradients, None, None, None, None, None, None


def _one_pass(
    loc: Tensor,
    scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    thresholds: Tensor,
    *,
    targets: Tensor,
    mask: Tensor | None,
    law: StableFamily,
    slope: float,
    chunk_size: int,
    wanted: tuple[bool, ...],
    row_weights: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses [N] and the gradients of their (weighted) sum for the wanted ones of loc, scale, weight, bias, thresholds."""
    wide = upcast(loc).dtype
    losses = torch.zeros(loc.shape[0], dtype=wide, device=loc.device)
    inputs = (loc, scale, weight, bias, thresholds)
    gradients = [torch.zeros_like(t, dtype=wide) if w else None for t, w in zip(inputs, wanted, strict=True)]
    own_scale = scale.dim() == 2
    for start in range(0, weight.shape[0], chunk_size):
        block = slice(start, start + chunk_size)
        rows = weight[block]
        leaves = [F.linear(loc, rows, None if bias is None else bias[block]).to(wide)]
        if own_scale:
            leaves.append(law.linear_scale(scale.to(wide), rows.to(wide)).clamp(min=SCALE_FLOOR))
        else:
            leaves.append(scale.to(wide).unsqueeze(-1))
        leaves.append(thresholds[block] if thresholds.dim() == 1 else thresholds)
        needs = (wanted[0] or wanted[2] or wanted[3], wanted[1] or (own_scale and wanted[2]), wanted[4])
        leaves = [leaf.detach().requires_grad_(need) for leaf, need in zip(leaves, needs, strict=True)]
        with torch.enable_grad():
            part = _block_losses(leaves, targets - start, None if mask is None else mask[block], law, slope)
            total = (part if row_weights is None else part * row_weights).sum()
        losses += part.detach()
        if not total.requires_grad:
            continue
        made = iter(torch.autograd.grad(total, [leaf for leaf in leaves if leaf.requires_grad]))
        of_loc, of_scale, of_threshold = (next(made) if need else None for need in needs)
        if gradients[0] is not None:
            gradients[0] += of_loc @ rows.to(wide)
        if gradients[2] is not None:
            gradients[2][block] += of_loc.T @ loc.to(wide)
        if gradients[3] is not None:
            gradients[3][block] += of_loc.sum(0)
        if of_threshold is not None:
            (gradients[4][block] if thresholds.dim() == 1 else gradients[4]).add_(of_threshold)
        if of_scale is not None and not own_scale:
            gradients[1] += of_scale.sum(-1)
        elif of_scale is not None:
            _add_scale_gradients(gradients, of_scale, scale.to(wide), rows.to(wide), block, law)
    return losses, [None if g is None else g.to(t.dtype) for g, t in zip(gradients, inputs, strict=True)]


def _add_scale_gradients(gradients, of_scale, scale, rows, block, law) -> None:
    """Chain of_scale [N, v] through scale_S = (|W|^a scale^a)^(1/a) to scale [N, C] and to the rows of W [v, C]."""
    leaves = [t.detach().requires_grad_(g is not None) for t, g in ((scale, gradients[1]), (rows, gradients[2]))]
    with torch.enable_grad():
        scales = law.linear_scale(*leaves).clamp(min=SCALE_FLOOR)
    made = iter(torch.autograd.grad(scales, [leaf for leaf in leaves if leaf.requires_grad], of_scale))
    if gradients[1] is not None:
        gradients[1] += next(made)
    if gradients[2] is not None:
        gradients[2][block] += next(made)


def _block_losses(
    leaves: list[Tensor], targets: Tensor, mask: Tensor | None, law: StableFamily, slope: float
) -> Tensor:
    """This block's part of every position's loss [N]; `targets` count from the start of the block."""
    loc, scale, thresholds = leaves
    scale = graded_scale(loc, scale, thresholds, slope, law)
    log_not_p = law.log_cdf(thresholds, loc, scale)
    if mask is not None:
        log_not_p = log_not_p.masked_fill(~mask, 0.0)
    losses = -log_not_p.sum(-1)
    here = ((targets >= 0) & (targets < loc.shape[-1])).nonzero().squeeze(-1)
    if here.numel() == 0:
        return losses
    column = targets[here]
    at_target = [t.expand_as(loc)[here, column] for t in (thresholds, loc, scale)]
    return losses.index_add(0, here, log_not_p[here, column] - law.log_sf(*at_target))
