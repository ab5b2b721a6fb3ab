"""One-vs-rest classification: every token decides for itself whether its score passes its threshold.

    P_k = P(S_k > C_k),   S_k ~ S(loc_k, scale_k)                              (theory 2.5, 3.6)
    L_cls = -log P_y - sum_{k != y} log(1 - P_k)

There is no normaliser: the P_k need not sum to one, and a row of the vocabulary matrix that no token uses can simply be
left out.

With a `slope`, a token's own noise grows with how far its location falls short of the threshold (theory 3.5):

    scale_k^a  ->  scale_k^a + slope max(C_k - loc_k, 0)

No order changes, and the tail of a Gaussian link becomes that of a softmax: log P_k ~ -(C_k - loc_k)/(2 slope).
"""

import torch
from torch import Tensor

from causalqwen.distributions import FAR, StableFamily, get_family, upcast, widen

IGNORE_INDEX = -100
"""Label of a position that has no loss."""

NO_TARGET = -1
"""Target of a position where none of the tokens is right: OvR then has negatives only."""


def graded_scale(loc: Tensor, scale: Tensor, thresholds: Tensor, slope: Tensor | float, law: StableFamily) -> Tensor:
    """(scale^a + slope max(C - loc, 0))^(1/a), shapes broadcast; `scale` itself without a slope (theory 3.5). Finite where
    loc is -inf: such a token never decides."""
    if slope == 0.0:
        return scale
    loc, scale, thresholds = widen(loc, scale, thresholds)
    return law.root(scale**law.alpha + slope * (thresholds - loc).clamp(0, FAR))


def ovr_log_probs(
    loc: Tensor, scale: Tensor, thresholds: Tensor | float = 0.0, *, family: str = "cauchy", slope: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """log P_k and log(1 - P_k), both exact in their tails (theory 3.6).

    Args:
        loc, scale: [..., V] (scale may be [..., 1]: one scale per position); scale > 0.
        thresholds: C_k, broadcast against loc.
        slope: growth of a token's own noise below its threshold, see `graded_scale`.

    Returns:
        two tensors [..., V], float32 (float64 where an argument is).
    """
    law = get_family(family)
    loc = upcast(loc)
    thresholds = torch.as_tensor(thresholds, dtype=loc.dtype, device=loc.device)
    scale = graded_scale(loc, scale, thresholds, slope, law)
    return law.log_sf(thresholds, loc, scale), law.log_cdf(thresholds, loc, scale)


def ovr_loss(
    loc: Tensor,
    scale: Tensor,
    targets: Tensor,
    thresholds: Tensor | float = 0.0,
    *,
    family: str = "cauchy",
    slope: float = 0.0,
    also_right: Tensor | None = None,
    vocabulary_mask: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
) -> Tensor:
    """L_cls of each position from the laws of all scores (theory 2.5). The slow obvious form; see `linear_ovr_loss`.

    Args:
        loc: [..., V]; scale: [..., V] or [..., 1], positive.
        targets: int64 [...]; `ignore_index` marks positions without a loss, `NO_TARGET` ones where no token is right.
        thresholds: C_k, broadcast against loc. slope: see `graded_scale`.
        also_right: int64 [..., R], further right tokens, none named twice, `NO_TARGET` where there are fewer: with several
            right ones, L_cls = -sum_right log P_k - sum_wrong log(1 - P_k) (architecture 5.1).
        vocabulary_mask: bool [V]; False rows take no part (rows that no token uses).
        reduction: "none" [...], "sum", or "mean" over the positions that have a loss (0 where none has).

    Raises:
        ValueError: a target that is outside the vocabulary or masked out of it; an unknown family or reduction.
    """
    log_p, log_not_p = ovr_log_probs(loc, scale, thresholds, family=family, slope=slope)
    valid = targets != ignore_index
    check_targets(targets[valid], loc.shape[-1], vocabulary_mask)
    if vocabulary_mask is not None:
        log_not_p = log_not_p.masked_fill(~vocabulary_mask, 0.0)
    right = targets.unsqueeze(-1)
    if also_right is not None:
        check_targets(also_right[valid], loc.shape[-1], vocabulary_mask)
        right = torch.cat([right, also_right], dim=-1)
    index = right.clamp(min=0)
    of_right = (log_p.gather(-1, index) - log_not_p.gather(-1, index)).masked_fill(right == NO_TARGET, 0.0)
    losses = (-log_not_p.sum(-1) - of_right.sum(-1)).masked_fill(~valid, 0.0)
    return reduce_losses(losses, valid, reduction)


def check_targets(targets: Tensor, vocabulary_size: int, vocabulary_mask: Tensor | None) -> None:
    """Raise ValueError for a target that is neither `NO_TARGET` nor a row of the vocabulary that counts."""
    targets = targets[targets != NO_TARGET]
    if targets.numel() == 0:
        return
    low, high = targets.aminmax()
    if low < 0 or high >= vocabulary_size:
        raise ValueError(f"targets lie in [{low}, {high}], outside the vocabulary of {vocabulary_size} rows")
    if vocabulary_mask is not None and not bool(vocabulary_mask[targets].all()):
        bad = targets[~vocabulary_mask[targets]][0].item()
        raise ValueError(f"target {bad} is a row of the vocabulary matrix that no token uses")


def reduce_losses(losses: Tensor, valid: Tensor, reduction: str) -> Tensor:
    """Reduce losses that are already 0 where not `valid`: "none", "sum", or "mean" over the valid ones."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":
        return losses.sum() / valid.sum().clamp(min=1)
    raise ValueError(f"unknown reduction {reduction!r}; use 'none', 'sum' or 'mean'")
