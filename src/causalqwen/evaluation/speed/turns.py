"""Taking turns."""

import gc
import statistics
import time
from collections.abc import Callable

import torch
from tqdm.auto import tqdm


def alternate(cases: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each case; the cases take turns, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in tqdm(range(repeats + 1), desc="taking turns", leave=False):
        for name, case in cases.items():
            gc.collect()
            started = time.perf_counter()
            case()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # what was asked of a GPU is still under way
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}
