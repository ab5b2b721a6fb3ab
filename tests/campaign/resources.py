"""What a process holds stays the same, however often it is asked: memory, open files, threads, temporary files."""

import gc
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.decoding import PRESETS

from . import Bounds, Tally

_GROWTH = 8 << 20
"""Bytes that a process may grow by between a tenth of the way and its end: what allocators keep, and no leak of 10,000 asks."""
PROMPTS = ["It is 5 and then", "A new year of 1,272.50", "We have come a long way"]


def asks(model: CausalQwenForCausalLM) -> dict[str, Callable[[int], object]]:
    """What is asked again and again, each by a number."""
    inputs = model.processor(PROMPTS, padding=True, padding_side="left", return_tensors="pt")

    def generate(preset: str) -> Callable[[int], object]:
        samples = {"do_sample": True} if preset == "softmax" else {}
        return lambda seed: model.generate(
            **inputs,
            max_new_tokens=4,
            causal_decoding=CausalDecoding.preset(preset, **({} if preset == "standard" else {"seed": seed})),
            **samples,
        )

    presets = {f"generate, {preset}": generate(preset) for preset in PRESETS}
    return presets | {
        "predict_number": lambda seed: model.predict_number([f"The {seed}th one is"]),
        "processor": lambda seed: model.processor.decode(model.processor(f"{seed} and {seed / 7}")),
    }


def held() -> dict[str, int]:
    """Bytes of memory, descriptors, threads, and files in the folder of temporary files.

    Memory is what no file holds as well (a system short of memory drops pages of weights that are mapped),
    resident or swapped out.
    """
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory": sum(int(status[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }


def run(bounds: Bounds, model: CausalQwenForCausalLM) -> Tally:
    """One ask at a draw, each of the table in turn; what is held is taken at a tenth of the way and at the end."""
    tally, table, early = Tally(), asks(model), None
    temporary, tempfile.tempdir = tempfile.tempdir, None
    with tempfile.TemporaryDirectory(prefix="campaign-") as own, torch.no_grad():
        tempfile.tempdir = own
        try:
            for number, _ in bounds.draws():
                what = list(table)[number % len(table)]
                table[what](number)
                tally.tried[what] += 1
                if number == max(bounds.count // 10, len(table)):
                    early = held()
            late = held()
        finally:
            tempfile.tempdir = temporary
    if early is not None:
        for name, least in early.items():
            tally.tried[f"held: {name}"] = late[name]
            if late[name] > least + (_GROWTH if name == "memory" else 0):
                tally.find(
                    f"held: {name}",
                    f"{least:,} at draw {max(bounds.count // 10, len(table))}, {late[name]:,} at the end",
                )
    return tally
