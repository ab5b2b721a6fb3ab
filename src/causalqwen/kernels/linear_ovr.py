"""The OvR loss of a linear head without ever holding a tokens x vocabulary matrix (theory 2.5).

    loc_S = loc W^T + b,   scale_S = scale (one per position) or |W| scale,   L = -log P_y - sum_{k != y} log(1 - P_k)

OvR has no normaliser, so a block of the vocabulary gives its part of the loss and of every gradient on its own: one pass over
blocks computes both, its derivatives written out. `impl="reference"` is the slow form that the others are tested against.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from causalqwen.distributions import SCALE_FLOOR, get_family, upcast
from causalqwen.kernels.chunked import OvrTask, Scored, Stage, one_pass, tiled_stage
from causalqwen.kernels.compiled_ovr import compiled_stage
from causalqwen.losses import IGNORE_INDEX, NO_TARGET, check_reduction, check_targets, graded_scale, ovr_loss


@dataclass
class Negatives:
    """A weighted sample of the wrong tokens.

    Token k is taken with probability pi_k and counts 1/pi_k times (Horvitz and Thompson 1952): the loss and every gradient
    are those of the whole vocabulary in expectation. pi_k = min(1, c q_k), so the tokens that matter are taken always, and the
    rest thinly. ids: int64 [M], ascending. weights: float32 [M], 1/pi_k.
    """

    ids: Tensor
    weights: Tensor


def inclusion_probabilities(importance: Tensor, size: int) -> Tensor:
    """pi [V] = min(1, c q), c such that they sum to `size`; float64. ValueError for a size that tokens of q > 0 cannot give.

    importance q: [V], the order of magnitude of what each token adds to the gradient, such as the root mean square of its
    probability plus a floor; tokens of importance 0 are never taken and never count.
    """
    q = importance.double()
    possible = int((q > 0).sum())
    if not 1 <= size <= possible:
        raise ValueError(f"{size} negatives of {possible} tokens that may be taken; give 1 to {possible}")
    ordered = q.sort(descending=True).values
    # With the i likeliest taken always, c = (size - i) / sum of the others; i is the first whose next one stays below 1.
    rest = ordered.flip(0).cumsum(0).flip(0)
    taken = torch.arange(len(q), device=q.device)
    certain = int(((size - taken) * ordered >= rest).long()[:size].cumprod(0).sum())
    if certain >= size:
        return (q >= ordered[size - 1]).double()
    return (q * (size - certain) / rest[certain]).clamp(max=1.0)


def sample_negatives(pi: Tensor, generator: torch.Generator | None = None) -> Negatives:
    """Tokens by systematic sampling, one uniform number, none twice; as many as pi [V] (`inclusion_probabilities`) sums to."""
    order = torch.randperm(len(pi), generator=generator).to(pi.device)  # else neighbours would come together, or never
    ends = pi[order].cumsum(0) + torch.rand((), generator=generator, dtype=torch.float64).to(pi.device)
    hit = ends.floor() > torch.cat([ends[:1] - pi[order[:1]], ends[:-1]]).floor()
    ids = order[hit].sort().values
    return Negatives(ids, pi[ids].reciprocal().float())


IMPLEMENTATIONS = ("auto", "chunked", "compiled", "triton", "reference")


@torch.compiler.disable  # blocks and library products: there is nothing to fuse, and the graph simply goes on after it
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
    also_right: Tensor | None = None,
    vocabulary_mask: Tensor | None = None,
    negatives: Negatives | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """OvR loss of the scores W U' + b against thresholds; equals `ovr_loss` of their laws.

    Products run in the dtype of `loc` and `weight` (under autocast in autocast's), all else in float32.

    Args:
        loc: [N, C]; scale: [N], the common scale of each position's scores, or [N, C], the scale of U', which gives
            every token its own scale |W_k| scale. Positive.
        weight: [V, C]; bias: [V] or None.
        thresholds: a number, [V], or [N, 1]. slope: see `graded_scale`.
        targets, also_right, vocabulary_mask, reduction: see `ovr_loss`; int64 [N], int64 [N, R], bool [V].
        negatives: a weighted sample of the wrong tokens (`sample_negatives`), among which no right one counts.
        chunk_size: rows of W at a time; memory grows with N x chunk_size. None: four million scores (67 on a GPU),
            or half as many and their scales.
        impl: "chunked", blocks in plain torch; "compiled", the same with what lies between the products fused by
            torch.compile (a C++ compiler on the CPU, ten seconds the first time); "triton", as CUDA kernels; or
            "reference". "auto" takes "triton" for CUDA where it can, else "chunked".

    Returns:
        float32 (float64 where an argument is). Gradients reach loc, scale, weight, bias and thresholds.

    Raises:
        ValueError: a target outside the vocabulary; an unknown impl or reduction; a weight that is sharded.
    """
    law = get_family(family)
    if isinstance(weight, DTensor):
        raise ValueError(
            "the weight is a sharded DTensor: compute the loss inside the FSDP unit that gathers it, or hand it full_tensor()"
        )
    check_reduction(reduction)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"unknown impl {impl!r}; use one of {', '.join(IMPLEMENTATIONS)}")
    thresholds = torch.as_tensor(thresholds, dtype=upcast(loc).dtype, device=loc.device)
    device = loc.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        loc, weight, bias = (t if t is None else t.to(dtype) for t in (loc, weight, bias))
    valid = targets != IGNORE_INDEX
    check_targets(targets[valid], weight.shape[0], vocabulary_mask)
    with torch.autocast(device, enabled=False):
        if impl == "reference":
            if negatives is not None:
                raise ValueError("the reference has no sample of negatives: it is the whole vocabulary")
            own = law.linear_scale(upcast(scale), upcast(weight)).clamp(min=SCALE_FLOOR) if scale.dim() == 2 else None
            return ovr_loss(
                F.linear(loc, weight, bias),
                scale.unsqueeze(-1) if own is None else own,
                targets,
                thresholds,
                family=family,
                slope=slope,
                also_right=also_right,
                vocabulary_mask=vocabulary_mask,
                reduction=reduction,
            )
        if not bool(valid.all()):
            loc, scale, targets = loc[valid], scale[valid], targets[valid]
            also_right = None if also_right is None else also_right[valid]
            thresholds = thresholds[valid] if thresholds.dim() == 2 else thresholds
        task = OvrTask(targets, law, slope, vocabulary_mask, chunk_size)
        share = {"none": None, "sum": 1.0, "mean": 1.0 / max(len(targets), 1)}[reduction]
        scored = Scored(loc, scale, weight, bias, thresholds)
        if negatives is None:
            losses = _LinearOvr.apply(*scored, task, impl, share)
        else:
            losses = _sampled_loss(scored, task, negatives, impl, share)
        if also_right is not None:
            check_targets(also_right, weight.shape[0], vocabulary_mask)
            places, columns = (also_right != NO_TARGET).nonzero(as_tuple=True)
            named = also_right[places, columns]
            log_p, log_not_p = _of_pairs(scored, task, places, named, weight[named])
            if negatives is not None:  # as often as the sample has counted them among the wrong ones
                counted = log_not_p.new_zeros(len(weight))
                counted[negatives.ids.to(counted.device)] = negatives.weights.to(counted)
                log_not_p = log_not_p * counted[named]
            losses = _added(losses, places, log_not_p - log_p, share)
    return losses.new_zeros(valid.shape).masked_scatter(valid, losses) if share is None else losses


def _sampled_loss(scored: Scored, task: OvrTask, negatives: Negatives, impl: str, share: float | None) -> Tensor:
    """-log P_y exactly, and the wrong tokens of the sample by their weights."""
    loc, scale, weight, bias, thresholds = scored
    ids = negatives.ids.to(weight.device)
    place = torch.full((len(weight) + 1,), NO_TARGET, device=weight.device)  # one more: NO_TARGET is the last
    place[ids] = torch.arange(len(ids), device=weight.device)
    kept = None if task.mask is None else task.mask[ids]
    wrong = OvrTask(place[task.targets], task.law, task.slope, kept, task.chunk_size, negatives.weights.to(loc.device))
    some = (None if bias is None else bias[ids], thresholds[ids] if thresholds.dim() == 1 else thresholds)
    right = (task.targets != NO_TARGET).nonzero().squeeze(-1)
    targets = task.targets[right]
    both = torch.cat([ids, targets])  # for one gradient as large as W
    sampled, of_targets = weight[both].split([len(ids), len(targets)])
    losses = _LinearOvr.apply(loc, scale, sampled, *some, wrong, impl, share)

    passed, _ = _of_pairs(scored, task, right, targets, of_targets)
    return _added(losses, right, -passed, share)


def _of_pairs(scored: Scored, task: OvrTask, places: Tensor, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """log P and log(1 - P) [n] of single tokens at single positions, int64 [n] each; rows: W[tokens]."""
    loc, scale, _, bias, thresholds = scored
    rows = upcast(rows)
    at = (upcast(loc[places]) * rows).sum(-1) + (0.0 if bias is None else bias[tokens])
    own = scale[places]
    if scale.dim() == 2:
        own = task.law.root((upcast(own) ** task.law.alpha * rows.abs() ** task.law.alpha).sum(-1))
    threshold = thresholds
    if thresholds.dim():
        threshold = thresholds[tokens] if thresholds.dim() == 1 else thresholds[places].squeeze(-1)
    own = graded_scale(at, own.clamp(min=SCALE_FLOOR), threshold, task.slope, task.law)
    return task.law.log_sf(threshold, at, own), task.law.log_cdf(threshold, at, own)


def _added(losses: Tensor, places: Tensor, terms: Tensor, share: float | None) -> Tensor:
    """The losses of all positions [N], or `share` times their sum [], with what single positions add."""
    return losses.index_add(0, places, terms) if share is None else losses + share * terms.sum()


def _stage_of(impl: str, loc: Tensor) -> Stage:
    """The stage of an implementation, imported where it is used: Triton need not be there."""
    if impl == "auto":
        with_triton = loc.is_cuda and loc.dtype != torch.float64 and importlib.util.find_spec("triton") is not None
        impl = "triton" if with_triton else "chunked"
    if impl == "triton":
        from causalqwen.kernels.triton_ovr import triton_stage

        return triton_stage
    return compiled_stage if impl == "compiled" else tiled_stage


class _LinearOvr(torch.autograd.Function):
    """Losses of the positions [N], or `share` times their sum [] where a share is given.

    Gradients are made beside the losses, and multiplied by what comes back unless that is 1. Where positions have losses of
    their own and something is shared by all of them (weight, bias, thresholds of tokens), or backward comes a second time,
    they are made in a second pass instead.
    """

    @staticmethod
    def forward(ctx: Any, loc, scale, weight, bias, thresholds, task, impl, share):
        ctx.task, ctx.stage = task, _stage_of(impl, loc)
        ctx.wanted = ctx.needs_input_grad[:5]
        scored = Scored(loc, scale, weight, bias, thresholds)
        ctx.share = share
        shared = ctx.wanted[2] or ctx.wanted[3] or (ctx.wanted[4] and thresholds.dim() < 2)
        wanted = (False,) * 5 if share is None and shared else ctx.wanted
        weights = None if share is None or share == 1.0 else torch.full((len(loc),), share, device=loc.device)
        losses, gradients = one_pass(scored, task, wanted, weights, ctx.stage)
        ctx.save_for_backward(*scored)
        ctx.gradients = gradients if wanted == ctx.wanted else None
        return losses if share is None else losses.sum() * share

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        # Handed over, not kept: autograd would copy what somebody else still holds, and dW is as large as W.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            scored = Scored(*ctx.saved_tensors)
            weights = gradient if ctx.share is None else (gradient * ctx.share).expand(len(scored.loc))
            gradients = one_pass(scored, ctx.task, ctx.wanted, weights, ctx.stage)[1]
        elif ctx.share is None:
            gradients = [g if g is None else g.mul_(gradient.view(-1, *[1] * (g.dim() - 1))) for g in gradients]
        elif gradient.device.type != "cpu" or gradient != 1:
            gradients = [g if g is None else g.mul_(gradient) for g in gradients]
        return *gradients, None, None, None
