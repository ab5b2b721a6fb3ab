"""Loss and gradients: time against softmax cross-entropy, and peak memory: on a processor each case in a process of its own."""

import gc
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from causalqwen.kernels import inclusion_probabilities, linear_ovr_loss, sample_negatives

SOFTMAX = "softmax cross-entropy"
SHARE = 16  # sampled negatives: one of so many tokens


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


@dataclass(frozen=True)
class LossSize:
    """tokens x vocabulary x hidden size; frozen: the weight takes no gradient. device: where all of it lies."""

    tokens: int = 1024
    vocabulary: int = 151936
    hidden: int = 896
    dtype: str = "bfloat16"
    frozen: bool = False
    device: str = "cpu"

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"


def loss_cases(size: LossSize) -> dict[str, Callable[[], None]]:
    """Loss and gradients of one batch: the documents' scale (one per token), the equal one, softmax, and rivals. On a GPU,
    where the default is Triton's kernel, the blocks in plain torch too."""
    dtype, on_gpu = getattr(torch, size.dtype), size.on_gpu
    generator = torch.Generator().manual_seed(0)
    loc = torch.empty(size.tokens, size.hidden, dtype=dtype).normal_(generator=generator)
    weight = torch.empty(size.vocabulary, size.hidden, dtype=dtype).normal_(std=0.05, generator=generator)
    common = torch.rand(size.tokens, generator=generator) + 0.5
    own = torch.rand(size.tokens, size.hidden, generator=generator) * 0.02 + 0.01
    targets = torch.randint(size.vocabulary, (size.tokens,), generator=generator)
    loc, weight, common, own, targets = (leaf.to(size.device) for leaf in (loc, weight, common, own, targets))
    for leaf, trained in ((loc, True), (weight, not size.frozen), (common, True), (own, True)):
        leaf.requires_grad_(trained)
    importance = torch.rand(size.vocabulary, generator=generator) + 0.1
    pi = inclusion_probabilities(importance, size.vocabulary // SHARE)

    def case(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for leaf in (loc, weight, common, own):
                leaf.grad = None
            loss().backward()

        return run

    def ovr(scale: Tensor, threshold: float, **settings: Any) -> Callable[[], None]:
        return case(lambda: linear_ovr_loss(loc, scale, weight, None, threshold, targets, **settings))

    gaussian: dict[str, Any] = {"family": "gaussian", "slope": 0.5}
    forms: dict[str, dict[str, str]] = {"": {}, ", compiled": {"impl": "compiled"}}
    if on_gpu:
        forms[", blocks"] = {"impl": "chunked"}
    cases = {SOFTMAX: case(lambda: F.cross_entropy(F.linear(loc, weight), targets))}
    for form, impl in forms.items():
        cases[f"documents{form}"] = ovr(own, 50.0, **impl)
        cases[f"equal, Cauchy{form}"] = ovr(common, 6.0, **impl)
        cases[f"equal, Gaussian{form}"] = ovr(common, 6.0, **gaussian, **impl)

    def sampled() -> Tensor:
        negatives = sample_negatives(pi, generator)
        return linear_ovr_loss(loc, common, weight, None, 6.0, targets, **gaussian, negatives=negatives)

    cases[f"equal, 1/{SHARE} of the negatives"] = case(sampled)
    cases["documents, plain torch"] = ovr(own, 50.0, impl="reference")
    if shutil.which("g++") is None:
        cases = {name: case for name, case in cases.items() if "compiled" not in name}
    if hasattr(F, "linear_cross_entropy"):
        cases["torch linear_cross_entropy"] = case(lambda: F.linear_cross_entropy(loc, weight, targets))
    return cases


def peak_memory(size: LossSize, name: str) -> float:
    """Bytes that one case adds at most, beside its inputs: to a process of its own, or on a GPU to what torch holds there."""
    if size.on_gpu:
        return _measure_memory(size, name)
    task = json.dumps({"size": asdict(size), "case": name})
    done = subprocess.run([sys.executable, __file__, task], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith(field)).split()[1])


def _measure_memory(size: LossSize, name: str) -> float:
    loss_cases(replace(size, tokens=16, vocabulary=512))[name]()  # the libraries' own buffers
    case = loss_cases(size)[name]
    gc.collect()
    if size.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        case()
        return float(torch.cuda.max_memory_allocated() - held)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
    before = _status("VmRSS")
    case()
    return _status("VmHWM") - before


def score_losses(size: LossSize, names: list[str], repeats: int, memory: bool) -> dict[str, Any]:
    """Seconds, and bytes where `memory`, of the named cases."""
    cases = {name: case for name, case in loss_cases(size).items() if name in names}
    seconds = alternate(cases, repeats)
    result: dict[str, Any] = {**asdict(size), "seconds": seconds}
    result["time_ratio"] = {name: taken / seconds[SOFTMAX] for name, taken in seconds.items()}
    if memory and sys.platform == "linux":
        result["bytes"] = {name: peak_memory(size, name) for name in tqdm(cases, desc="memory", leave=False)}
        result["memory_ratio"] = {name: taken / result["bytes"][SOFTMAX] for name, taken in result["bytes"].items()}
    return result


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(_measure_memory(LossSize(**given["size"]), given["case"]))
