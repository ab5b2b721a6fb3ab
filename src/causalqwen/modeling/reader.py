"""What the whole backbone tells about a position: the features that numbers are read from in closed form.

    r = ( h_l at the position, for every third layer l, the last among them
          mean of V_l over the positions that it sees, for every layer l )

What leaves the last layer was trained to say the next token; what a sentence means in numbers stands earlier and elsewhere. The
mean of the values in the KV cache is what one attention query of zeros reads. So it keeps no state of its own, and is the same
behind a prefix that is cached, in pieces, and beside padding.
"""

from typing import Any

import torch
from torch import Tensor

from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.outputs import CACHE

EVERY = 3


@torch.no_grad()
def read_backbone(
    model: GraftedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    numeric_values: Tensor,
    rows: Tensor,
    places: Tensor,
    cache: Any = None,
) -> list[Tensor]:
    """The blocks of r, float32 [N, width] each, at N positions of a batch: `rows` and `places` int64 [N], places counted within
    input_ids [B, S].

    attention_mask: [B, S], or [B, P + S] behind a cache of P positions (a transformers cache; it grows by S).
    ValueError where a layer keeps a window alone, and the text is longer.
    """
    out = model.features(
        input_ids, attention_mask, numeric_values, cache=cache, use_cache=True, output_hidden_states=True
    )
    hidden, values = out.hidden_states[1:], [layer.values for layer in out[CACHE].layers]
    if any(layer.shape[2] != attention_mask.shape[1] for layer in values):
        raise ValueError(
            "a layer of this backbone keeps a window of its text alone: numbers cannot be read from all of it"
        )
    taken = range(len(hidden) - 1, -1, -EVERY)
    last = [out.last_hidden_state if index == len(hidden) - 1 else hidden[index] for index in reversed(taken)]
    ends = places + values[0].shape[2] - input_ids.shape[1]  # counted from the cache's start
    seen = model.seen(input_ids, attention_mask, None, cache)[0]
    seen = attention_mask if seen is None else seen
    return [layer[rows, places].float() for layer in last] + [mean_values(v, seen, rows, ends) for v in values]


def mean_values(values: Tensor, seen: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Mean over the seen positions up to `ends` [N] of values [B, heads, T, D] -> float32 [N, heads D]; seen [B, T]."""
    counted = seen[:, -values.shape[2] :].to(torch.float32)
    sums = (values.float() * counted[:, None, :, None]).cumsum(2)
    counts = counted.cumsum(1)[rows, ends].clamp(min=1)
    return (sums[rows, :, ends] / counts[:, None, None]).flatten(1)
