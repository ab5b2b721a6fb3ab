"""Decision rules on scores."""

import torch
from torch import Tensor

from causalqwen.distributions import SCALE_FLOOR


def decision_scores(
    loc: Tensor,
    scale: Tensor,
    thresholds: Tensor,
    *,
    decision: str = "ovr",
    vocabulary_mask: Tensor | None = None,
) -> Tensor:
    """Scores, in float32, whose argmax is the decision (theory 3.6).

    "ovr": (loc - C) / max(scale, floor), increasing in P_k at every distance from the threshold, where P_k itself
    saturates. One scale and one threshold for all tokens of a position ([..., 1]) change no order, so loc is returned
    as it is: the decision then equals the backbone's to the last bit. "loc": loc.

    Args:
        loc: [..., V]; scale, thresholds: [..., V] or [..., 1].
        vocabulary_mask: bool [V]; False rows get -inf.
    """
    loc = loc.to(torch.float32)
    if decision == "ovr" and (scale.shape[-1] > 1 or thresholds.shape[-1] > 1):
        scores = (loc - thresholds) / scale.to(torch.float32).clamp(min=SCALE_FLOOR)
    else:
        scores = loc
    return scores if vocabulary_mask is None else scores.masked_fill(~vocabulary_mask, -torch.inf)


def decide(scores: Tensor) -> Tensor:
    """argmax over the vocabulary, ties to the lowest id; scores [..., V] -> int64 [...]."""
    return scores.argmax(dim=-1)
