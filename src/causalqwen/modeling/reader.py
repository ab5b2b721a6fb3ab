"""What the whole backbone tells about a position: the features that numbers are read from in closed form.

    r = ( h_l at the position, for every third layer l, from the last one down
          mean of V_l over the positions that it sees, for every layer l,
          the first numbers that stand before it )

What leaves the last layer was trained to say the next token; what a sentence means in numbers stands earlier and elsewhere. The
mean of the values in the KV cache is what one attention query of zeros reads, and the tokens lie beside them, as one layer of
the cache more. So it keeps no state of its own, and is the same after a prefix that is cached, in pieces, and beside padding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

EVERY = 3
NUMBERS = 8
"""How many of the numbers before a position are read: the first ones, a block each."""

MARKS = {".": -1, ",": -2}
"""What stands for the digits of a token that is a mark, which a number may hold."""

_FARTHEST = 300  # digits from the point, which float64 holds


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


def seen_by_each(hidden: Tensor, total: int, mask: Any) -> Tensor:
    """Say which of `total` positions each of the last S sees, bool [B, S, total], S and B as of `hidden` [B, S, H].

    mask: [B, total], or [B, 1, S, >= total] as it is added to attention's scores, or allows, or such a one for each kind of
    layer; None for all that come before.
    """
    batch, length = hidden.shape[:2]
    mask = mask["full_attention"] if isinstance(mask, dict) else mask
    if mask is not None and mask.dim() == 4:
        allowed = mask[:, 0, :, :total]
        return (allowed if allowed.dtype == torch.bool else allowed >= 0).expand(batch, -1, -1)
    places = torch.arange(total, device=hidden.device)
    sees = (places <= places[total - length :, None]).expand(batch, -1, -1)
    return sees if mask is None else sees & mask[:, None, :total].bool()


class TokensRead(DynamicLayer):
    """The ids of all tokens of a cache, as a layer of it: whatever is done to the others is done to this one."""


def tokens_of(cache: Cache, ids: Tensor) -> Tensor:
    """The ids int64 [B, T] of all tokens of a cache, of which `ids` [B, S] were read last.

    ValueError where the backbone alone has read others before them.
    """
    tokens = cache.layers[-1]
    if not isinstance(tokens, TokensRead):
        tokens = TokensRead()
        cache.layers.append(tokens)
    column = ids[:, None, :, None]
    every = tokens.update(column, column)[0][:, 0, :, 0]
    if every.shape[1] != cache.get_seq_length():
        raise ValueError("numbers are read from all tokens of a text, and this cache was filled by the backbone alone")
    return every


def read_numbers(ids: Tensor, sees: Tensor, digits: Tensor) -> list[Tensor]:
    """The first `NUMBERS` numbers that stand before each position, in their order, a block [B, S, 2] each, float32:
    log(1 + number) and 1, or 0 and 0 where there are fewer.

    A number is a run of tokens of digits, its last point a decimal one, and is known once another token stands after it.

    ids: int64 [B, T]. sees: bool [B, S, T]. digits: int64 [3, V], see `CausalQwenProcessor.digits`.
    """
    values, lengths, opens = digits[:, ids.clamp(0, digits.shape[1] - 1)]
    lengths = lengths.masked_fill((ids < 0) | (ids >= digits.shape[1]) | ~sees.any(1), 0)
    digit, goes_on = lengths > 0, opens == 0
    inside = (lengths < 0) & goes_on & _beside(digit, -1) & _beside(digit & goes_on, 1)
    part = inside | digit
    run = (part & ~(_beside(part, -1) & goes_on)).cumsum(-1) * part
    places, written = torch.arange(ids.shape[1], device=ids.device).expand_as(ids), lengths.clamp(min=0).cumsum(-1)
    none = ids.new_zeros(len(ids), int(run.max()) + 1 + NUMBERS)  # run 0 is no number

    def last(of: Tensor) -> Tensor:
        return none.scatter_reduce(1, run, of, "amax")

    point = last(torch.where(inside & (lengths == MARKS["."]), written, 0))
    point = torch.where(point > 0, point, last(written))
    powers = 10.0 ** (point.gather(1, run) - written).double().clamp(-_FARTHEST, _FARTHEST)
    numbers = none.double().scatter_add(1, run, torch.where(digit, values * powers, 0.0))
    end, which = last(places), torch.arange(none.shape[1], device=ids.device)
    ended = end + (_beside(lengths, 1) < 0).gather(1, end)
    known = sees.gather(-1, end.unsqueeze(1).expand(-1, sees.shape[1], -1))
    known &= torch.where(sees, places.unsqueeze(1), -1).amax(-1, keepdim=True) > ended.unsqueeze(1)
    known &= ((which > 0) & (which <= run.amax(-1, keepdim=True))).unsqueeze(1)
    first = (~known).int().argsort(dim=-1, stable=True)[..., :NUMBERS]
    known = known.gather(-1, first)
    logs = numbers.clamp(max=10.0**_FARTHEST).log1p().unsqueeze(1).expand(-1, sees.shape[1], -1).gather(-1, first)
    return list(torch.stack([logs * known, known], dim=-1).float().unbind(-2))


def _beside(of: Tensor, step: int) -> Tensor:
    """What stands `step` (1 or -1) places further in each row [B, T], 0 beyond its ends."""
    return torch.nn.functional.pad(of, (1, 1))[:, 1 + step : 1 + step + of.shape[1]]
