"""Where rows are read, and in which precision."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

_FEWEST_COLUMNS = 256


def resolve_device(device: str) -> str:
    """ "auto" is an accelerator where there is one; else what is said, a torch device. ValueError for "cuda" where none is."""
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device}: no CUDA device is here, or this torch is built without CUDA")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def bf16_pays(model: PreTrainedModel) -> bool:
    """Whether this machine takes the backbone's products several times as fast in bfloat16: its weights are float32, wide
    enough that products are what takes the time, and the processor (avx512_bf16, amx_bf16) or GPU multiplies bfloat16."""
    if model.dtype != torch.float32 or model.config.hidden_size < _FEWEST_COLUMNS:
        return False
    if model.device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities()
    return model.device.type == "cpu" and bool(has.get("avx512_bf16") or has.get("amx_bf16"))


@contextmanager
def reading(model: Any, bf16: bool | None = None) -> Iterator[None]:
    """Rows are read in bfloat16 meanwhile, or not; by default where that pays. No weight changes."""
    before, model.bf16 = model.bf16, bf16_pays(model) if bf16 is None else bf16
    try:
        yield
    finally:
        model.bf16 = before


@contextmanager
def casting_once(model: PreTrainedModel) -> Iterator[None]:
    """Meanwhile a reading in bfloat16 casts each weight once, and not at every call: torch keeps what autocast has made of a
    parameter that requires a gradient until the outermost autocast ends, also where that one casts nothing itself. No weight
    may change, and half of their memory is taken again. Not for a generator, which may be left standing."""
    with torch.autocast(model.device.type, enabled=False):
        yield
