"""The training loss: one-vs-rest on every token, the value's likelihood on every number; scores of a predicted value.

Every token decides for itself whether its score passes its threshold:

    P_k = P(S_k > C_k),   S_k ~ S(loc_k, scale_k)                              (theory 2.5, 3.6)
    L_cls = -log P_y - sum_{k != y} log(1 - P_k)

There is no normaliser: the P_k need not sum to one, and a row of the vocabulary matrix that no token uses can simply be
left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from causalqwen.distributions import FAR, StableFamily, get_family, upcast, widen

IGNORE_INDEX = -100
"""Label of a position that has no loss."""

NO_TARGET = -1
"""Target of a position where none of the tokens is right: OvR then has negatives only."""


def graded_scale(loc: Tensor, scale: Tensor, thresholds: Tensor, slope: Tensor | float, law: StableFamily) -> Tensor:
    """(scale^a + slope max(C - loc, 0))^(1/a), shapes broadcast: a token's own noise grows as it falls short (theory 3.5).

    No order changes, and the tail of a Gaussian link becomes that of a softmax: log P_k ~ -(C_k - loc_k)/(2 slope). Finite
    where loc is -inf: such a token never decides.
    """
    if slope == 0.0:
        return scale
    loc, scale, thresholds = widen(loc, scale, thresholds)
    return law.root(scale**law.alpha + slope * (thresholds - loc).clamp(0, FAR))


def ovr_log_probs(
    loc: Tensor, scale: Tensor, thresholds: Tensor | float = 0.0, *, family: str = "cauchy", slope: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """log P_k and log(1 - P_k), both exact in their tails (theory 3.6): [..., V], float32 (float64 where an argument is).

    Args:
        loc, scale: [..., V] (scale may be [..., 1]: one scale per position); scale > 0.
        thresholds: C_k, broadcast against loc. slope: see `graded_scale`.
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
    reduction: str = "mean",
) -> Tensor:
    """L_cls of each position from the laws of all scores (theory 2.5). The slow obvious form; see `linear_ovr_loss`.

    Args:
        loc, scale, thresholds, slope: see `ovr_log_probs`.
        targets: int64 [...]; `IGNORE_INDEX` marks positions without a loss, `NO_TARGET` ones where no token is right.
        also_right: int64 [..., R], further right tokens, none named twice, `NO_TARGET` where there are fewer: with several
            right ones, L_cls = -sum_right log P_k - sum_wrong log(1 - P_k) (architecture 5.1).
        vocabulary_mask: bool [V]; False rows take no part (rows that no token uses).
        reduction: "none" [...], "sum", or "mean" over the positions that have a loss (0 where none has).

    Raises:
        ValueError: a target that is outside the vocabulary or masked out of it; an unknown family or reduction.
    """
    check_reduction(reduction)
    log_p, log_not_p = ovr_log_probs(loc, scale, thresholds, family=family, slope=slope)
    valid = targets != IGNORE_INDEX
    right = targets.unsqueeze(-1)
    if also_right is not None:
        right = torch.cat([right, also_right], dim=-1)
    check_targets(right[valid], loc.shape[-1], vocabulary_mask)
    if vocabulary_mask is not None:
        log_not_p = log_not_p.masked_fill(~vocabulary_mask, 0.0)
    index = right.clamp(min=0)
    of_right = (log_p.gather(-1, index) - log_not_p.gather(-1, index)).masked_fill(right == NO_TARGET, 0.0)
    losses = (-log_not_p.sum(-1) - of_right.sum(-1)).masked_fill(~valid, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / valid.sum().clamp(min=1)


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


def check_reduction(reduction: str) -> None:
    """Raise ValueError for an unknown one."""
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"unknown reduction {reduction!r}; use 'none', 'sum' or 'mean'")


@dataclass
class LossMasks:
    """Targets of a batch after the shift of a causal language model; all of shape [B, S-1].

    cls_mask: the next token counts in L_cls. is_number: it is moreover `<NUM>`. num_mask: with a finite value. also_right:
    int64 [B, S-1, R], further right tokens. num_items, num_numbers: what the two losses are divided by, counted over the whole
    accumulated batch; this batch's own where both are None, and the tokens for both where only they were counted.
    """

    targets: Tensor
    values: Tensor
    cls_mask: Tensor
    is_number: Tensor
    num_mask: Tensor
    also_right: Tensor | None = None
    num_items: Tensor | int | None = None
    num_numbers: Tensor | int | None = None


def shift_targets(
    labels: Tensor, numeric_labels: Tensor | None, attention_mask: Tensor | None, num_token_id: int
) -> LossMasks:
    """Shift labels by one and derive both masks (the comment in overview 2.5 asks for them by these names).

    Args:
        labels: int64 [B, S], unshifted, -100 where a token has no loss.
        numeric_labels: float [B, S], unshifted; None where there are no numbers.
        attention_mask: [B, S], 0 on padding; None for no padding. A label on padding never counts, and neither does one that
            padding would predict: the first token of a row that is padded on the left.
    """
    targets = labels[:, 1:]
    cls_mask = targets != IGNORE_INDEX
    if attention_mask is not None:
        real = attention_mask[:, -labels.shape[1] :].bool()
        cls_mask = cls_mask & real[:, 1:] & real[:, :-1]
    is_number = cls_mask & (targets == num_token_id)
    if numeric_labels is None:
        values = torch.zeros_like(targets, dtype=torch.float64)
        num_mask = torch.zeros_like(cls_mask)
    else:
        values = numeric_labels[:, 1:]
        num_mask = is_number & torch.isfinite(values)
    return LossMasks(targets.masked_fill(~cls_mask, IGNORE_INDEX), values, cls_mask, is_number, num_mask)


def gate(num_prob: Tensor, alpha: float, *, detach: bool = True) -> Tensor:
    """alpha + (1 - alpha) P_NUM, the weight of a number's likelihood (theory 3.7); ValueError for an alpha outside [0, 1].

    Detached by default: a gradient through the gate lowers P_NUM wherever the likelihood term is positive, that is, it
    teaches the model not to announce the numbers that it predicts badly. `detach=False` is the original design's formula.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"the gate's alpha must lie in [0, 1], got {alpha}")
    return alpha + (1 - alpha) * (num_prob.detach() if detach else num_prob)


def _mean_over_batch(total: Tensor, count: Tensor | int | None, local: Tensor) -> Tensor:
    """total / count, 0 where there is nothing to count; `count` spans the whole accumulated batch, `local` this part."""
    count = local if count is None else torch.as_tensor(count, device=total.device)
    return total / count.clamp(min=1)


@dataclass
class LossParts:
    """Total, classification and value part, each []."""

    total: Tensor
    cls: Tensor
    reg: Tensor


def total_loss(
    masks: LossMasks,
    rest_loss: Tensor,
    log_p_num: tuple[Tensor, Tensor],
    nll: Tensor,
    *,
    alpha: float = 1.0,
    detach_gate: bool = True,
    value_weight: float = 1.0,
) -> LossParts:
    """L = sum L_cls / n_tokens + lambda sum(gate NLL) / n_numbers, the second part 0 without numbers (theory 3.7).

    Where only the tokens of the accumulated batch were counted, as by transformers' Trainer, both sums are over n_tokens: of
    what this batch knows, nothing else adds up to the same loss however it is accumulated.

    Args:
        rest_loss: [B, S-1], what every token but `<NUM>` adds to L_cls.
        log_p_num: log P_NUM and log(1 - P_NUM), [B, S-1] each, for `<NUM>`'s own term and for the gate.
        nll: [n], the value's negative log-likelihood where `masks.num_mask` holds, in that order.
    """
    log_num, log_not_num = log_p_num
    cls = (rest_loss - torch.where(masks.is_number, log_num, log_not_num)).masked_fill(~masks.cls_mask, 0.0).sum()
    cls = _mean_over_batch(cls, masks.num_items, masks.cls_mask.sum())
    weights = gate(log_num[masks.num_mask].exp(), alpha, detach=detach_gate)
    count = masks.num_items if masks.num_numbers is None else masks.num_numbers
    reg = _mean_over_batch((weights * nll).sum(), count, masks.num_mask.sum()).to(cls.dtype)
    return LossParts(cls + value_weight * reg, cls, reg)


def cauchy_nll(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """log(pi scale) + log(1 + ((value - loc)/scale)^2), elementwise (theory 2.5). It is negative for small scales."""
    return -get_family("cauchy").log_prob(value, loc, scale)


def cauchy_crps(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """CRPS of Cauchy(loc, scale) at `value`: scale/pi (2 z atan z - ln(1+z^2) + 2 ln 2), z = (value - loc)/scale.

    Elementwise, in the units of `value`, lower is better (theory 3.11). Finite although the law has no mean.
    """
    return get_family("cauchy").crps(value, loc, scale)


def quantile_loss(value: Tensor, quantile: Tensor, level: Tensor) -> Tensor:
    """Pinball loss max(p (v - q), (p - 1)(v - q)) of the quantile q at level p, elementwise."""
    gap = value - quantile
    return torch.maximum(level * gap, (level - 1) * gap)


def quantile_crps(value: Tensor, quantiles: Tensor, levels: Tensor) -> Tensor:
    """CRPS from quantiles: twice the mean pinball loss over the levels (Gneiting and Ranjan 2011).

    value [...], quantiles [..., L], levels [L] evenly spaced inside (0, 1) -> [...], in the units of `value`. With the
    quantiles clipped to a common range this is finite for every law, and the same rule scores every rival.
    """
    return 2 * quantile_loss(value.unsqueeze(-1), quantiles, levels).mean(-1)
