"""A weighted sample of the wrong tokens: given its thresholds OvR has no normaliser, so a part of the sum stands for all.

Token k is taken with probability pi_k and counts 1/pi_k times (Horvitz and Thompson 1952): the loss and every gradient
are those of the whole vocabulary in expectation. pi_k = min(1, c q_k), so the tokens that matter are taken always, and the
rest thinly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Negatives:
    """ids: int64 [M], ascending. weights: float32 [M], one over the probability that a token is taken."""

    ids: Tensor
    weights: Tensor


def inclusion_probabilities(importance: Tensor, size: int) -> Tensor:
    """pi [V] = min(1, c q), c such that they sum to `size`; float64.

    importance q: [V], the order of magnitude of what each token adds to the gradient, such as the root mean square of its
    probability plus a floor; tokens of importance 0 are never taken and never count.

    Raises:
        ValueError: a size that is not within 1 to the number of tokens of positive importance.
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
