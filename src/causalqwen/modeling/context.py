"""Masks and positions of a context in which the backbone does not see some of the tokens (theory 2.1)."""

import torch
from torch import Tensor


def without(hidden: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention mask [B, L] and position_ids int64 [B, L] of a context in which some tokens are not seen.

    position_ids count the tokens that are seen; one that is not has the position of the last that is, 0 before the first.

    Args:
        hidden: bool [B, S], of the last S tokens. attention_mask: [B, L], L >= S; None for L = S and no padding.
    """
    mask = torch.ones_like(hidden, dtype=torch.int64) if attention_mask is None else attention_mask.clone()
    mask[:, mask.shape[1] - hidden.shape[1] :].masked_fill_(hidden, 0)
    return mask, (mask.long().cumsum(-1) - 1).clamp(min=0)


def sequence_starts(position_ids: Tensor) -> Tensor:
    """Where sequences that are packed into one row begin, bool [B, S]: wherever position_ids do not go on by one."""
    return torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1


def seen_positions(position_ids: Tensor, hidden: Tensor) -> Tensor:
    """position_ids [B, S] of a context in which some tokens are not seen (bool [B, S]), sequence by sequence: less as many as
    are hidden there so far, 0 at least."""
    before = hidden.long().cumsum(-1)
    outside = torch.where(sequence_starts(position_ids), before - hidden.long(), 0).cummax(-1).values
    return (position_ids - (before - outside)).clamp(min=0)


def packed_mask(position_ids: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What is added to attention scores, [B, 1, S, S], where rows hold several sequences: 0 for a token's own, seen, earlier
    tokens and itself, the least number elsewhere. None where every row is one sequence."""
    starts = sequence_starts(position_ids)
    if not bool(starts.any()):
        return None
    sequence, places = starts.cumsum(-1), torch.arange(hidden.shape[1], device=hidden.device)
    earlier = (places <= places.unsqueeze(-1)) & (sequence.unsqueeze(1) == sequence.unsqueeze(2)) & ~hidden.unsqueeze(1)
    allowed = earlier | (places == places.unsqueeze(-1))
    return (
        torch.zeros(allowed.shape, dtype=dtype, device=hidden.device)
        .masked_fill(~allowed, torch.finfo(dtype).min)
        .unsqueeze(1)
    )
