"""What the whole backbone tells about a position: the features that numbers are read from in closed form.

    r = ( h_l at the position, for every third layer l, from the last one down
          mean of V_l over the positions that it sees, for every layer l )

What leaves the last layer was trained to say the next token; what a sentence means in numbers stands earlier and elsewhere. The
mean of the values in the KV cache is what one attention query of zeros reads. So it keeps no state of its own, and is the same
behind a prefix that is cached, in pieces, and beside padding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from causalqwen.modeling.context import sequence_starts

EVERY = 3


def read_backbone(hidden: Sequence[Tensor], values: Sequence[Tensor], sees: Tensor) -> list[Tensor]:
    """The blocks of r, [B, S, width] each, in the dtype of what they are read from.

    hidden: [B, S, H], what leaves each layer. values: [B, heads, T, D], each layer's in the KV cache. sees: bool [B, S, T].
    ValueError where a layer keeps a window alone, and the text is longer.
    """
    if any(layer.shape[2] < sees.shape[-1] for layer in values):
        raise ValueError(
            "a layer of this backbone keeps a window of its text alone: numbers cannot be read from all of it"
        )
    weights = sees.float() / sees.sum(-1, keepdim=True).clamp(min=1)
    means = [(weights[:, None] @ layer[:, :, : sees.shape[-1]].float()).to(layer.dtype) for layer in values]
    return [*hidden[::-EVERY], *(mean.transpose(1, 2).flatten(2) for mean in means)]


def seen_by_each(hidden: Tensor, total: int, mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """Say which of `total` positions each of the last S sees, bool [B, S, total], S and B as of `hidden` [B, S, H].

    mask: [B, total], or [B, 1, S, >= total] as it is added to attention's scores, or allows; None for all that come before.
    position_ids: where sequences that are packed into one row begin, if there is no mask.
    """
    batch, length = hidden.shape[:2]
    if mask is not None and mask.dim() == 4:
        allowed = mask[:, 0, :, :total]
        return (allowed if allowed.dtype == torch.bool else allowed >= 0).expand(batch, -1, -1)
    places = torch.arange(total, device=hidden.device)
    sees = (places <= places[total - length :, None]).expand(batch, -1, -1)
    if mask is not None:
        return sees & mask[:, None, :total].bool()
    if position_ids is not None and length == total:
        sequence = sequence_starts(position_ids).cumsum(-1)
        sees = sees & (sequence[:, :, None] == sequence[:, None])
    return sees
