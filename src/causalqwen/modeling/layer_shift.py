"""An individual at more than one depth: a voice is added after each layer of a frozen backbone (theory 3.17)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from causalqwen.decoding.voices import check_voice

_SPEAKING: ContextVar[object] = ContextVar("speaking", default=None)
"""Whose forward pass this is: layers are shared by threads, and a voice is added in its own pass alone."""


def decoder_layers(backbone: PreTrainedModel) -> list[torch.nn.Module]:
    """Its layers, first to last, whatever the family calls them."""
    names = backbone._no_split_modules or ()
    found = {name: module for name, module in backbone.named_modules() if type(module).__name__ in names}
    return [module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)]


def depths_of(backbone: PreTrainedModel) -> tuple[int, int]:
    """The shape [L, H] of a voice: layers, none where a backbone does not say what they are, and the size of each."""
    return len(decoder_layers(backbone)), backbone.config.get_text_config().hidden_size


@contextmanager
def speaking(backbone: PreTrainedModel, voice: Tensor) -> Iterator[None]:
    """While the block runs, what leaves layer l is h_l + voice_l at every position; voice [L, H], or [B, L, H] by row, with
    gradients. ValueError where it is of another backbone."""
    layers, own = decoder_layers(backbone), object()
    check_voice(voice, *depths_of(backbone))
    rows = voice if voice.dim() == 3 else voice.unsqueeze(0)

    def adding(added: Tensor) -> Callable:
        def hook(_: Any, __: Any, out: Any) -> Any:
            if _SPEAKING.get() is not own:
                return out
            hidden = out[0] if isinstance(out, tuple) else out
            moved = hidden + added.to(hidden.device, hidden.dtype)
            return (moved, *out[1:]) if isinstance(out, tuple) else moved

        return hook

    handles = [layer.register_forward_hook(adding(rows[:, at, None])) for at, layer in enumerate(layers)]
    token = _SPEAKING.set(own)
    try:
        yield
    finally:
        _SPEAKING.reset(token)
        for handle in handles:
            handle.remove()
