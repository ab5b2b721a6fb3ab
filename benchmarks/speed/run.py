"""All of it, kept part by part."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.generation import random_qwen, score_generation, score_ways
from benchmarks.speed.losses import SHARE, SOFTMAX, LossSize, loss_cases, score_losses
from benchmarks.speed.training import score_epochs, score_tokenizer
from causalqwen.files import write_text
from causalqwen.modeling import DEFAULT_BACKBONE, CausalQwenForCausalLM, CausalQwenProcessor
from causalqwen.modeling.backbones import resolve_device

_CURVES = [SOFTMAX, "documents", "equal, Cauchy", "equal, Gaussian", f"equal, 1/{SHARE} of the negatives"]


@dataclass(frozen=True)
class Sizes:
    """How large the cases are.

    loss: of one batch. growth: what it is varied to, by axis. lengths: tokens to write at each batch size, of the backbone and
    of a random one of the 0.5B shape (None to leave that out). ways: tokens at batch 1. rows: of an epoch. whole: what is
    compiled first too, and memory, which takes a process for each case.
    """

    loss: LossSize
    growth: dict[str, list[LossSize]]
    lengths: dict[int, int]
    large: dict[int, int] | None
    ways: int
    rows: int
    whole: bool


_BASE = LossSize(vocabulary=49152, hidden=576)
FULL = Sizes(
    loss=LossSize(),
    growth={
        "tokens": [replace(_BASE, tokens=tokens) for tokens in (256, 1024, 4096)],
        "vocabulary": [replace(_BASE, vocabulary=vocabulary) for vocabulary in (16384, 49152, 151936)],
        "hidden": [replace(_BASE, hidden=hidden) for hidden in (576, 896, 1536)],
        "dtype": [replace(_BASE, dtype=dtype) for dtype in ("float32", "bfloat16")],
    },
    lengths={1: 48, 8: 48, 64: 16},
    large={1: 12, 8: 12},
    ways=96,
    rows=96,
    whole=True,
)
"""Sizes of the figures that the documentation states."""

_TOY = LossSize(tokens=64, vocabulary=4096, hidden=32, dtype="float32")
QUICK = Sizes(
    loss=_TOY,
    growth={"tokens": [_TOY, replace(_TOY, tokens=128)], "dtype": [_TOY, replace(_TOY, dtype="bfloat16")]},
    lengths={1: 4, 2: 4},
    large=None,
    ways=4,
    rows=8,
    whole=False,
)
"""Sizes small enough for a minute: figures of nothing, but every case runs."""


@dataclass(frozen=True)
class _Run:
    """What all parts are given."""

    output: Path
    repeats: int
    backbone: str
    device: str
    sizes: Sizes
    say: Callable[[str], None]

    def losses(self, size: LossSize, names: list[str]) -> dict[str, Any]:
        return score_losses(replace(size, device=self.device), names, self.repeats, memory=self.sizes.whole)

    def graft(self, **settings: Any) -> Any:
        return CausalQwenForCausalLM.from_backbone(self.backbone, **settings)


def _loss(run: _Run) -> list[dict[str, Any]]:
    names = [
        name
        for name in loss_cases(LossSize(16, 512, 16, device=run.device))
        if run.sizes.whole or "compiled" not in name
    ]
    rows = []
    for frozen in (False, True):
        run.say(f"loss and gradients, the weight {'frozen' if frozen else 'trained'}")
        rows.append(run.losses(replace(run.sizes.loss, frozen=frozen), names))
    return rows


def _growth(run: _Run) -> dict[str, list[dict[str, Any]]]:
    growth = {}
    for axis, sizes in run.sizes.growth.items():
        run.say(f"growth with {axis}")
        growth[axis] = [run.losses(size, _CURVES) for size in sizes]
    return growth


def _generate(run: _Run) -> list[dict[str, Any]]:
    name = "SmolLM2-135M" if run.backbone == DEFAULT_BACKBONE else Path(run.backbone).name
    models: list[tuple[str, Callable[[], Any], dict[int, int]]] = [
        (name, run.graft, run.sizes.lengths),
        (f"{name}, a scale for each coordinate", lambda: _as_trained(run.graft()), run.sizes.lengths),
        (f"{name}, the documents' scale", partial(run.graft, start="documents"), run.sizes.lengths),
    ]
    if run.sizes.large is not None:
        large: Any = partial(random_qwen, CausalQwenProcessor.from_pretrained(run.backbone).tokenizer)
        models.append(("Qwen2 0.5B shape, random", large, run.sizes.large))
        documents = partial(large, start="documents")
        models.append(("Qwen2 0.5B shape, random, the documents' scale", documents, run.sizes.large))
    rows = []
    for called, make, lengths in models:
        model = make().to(run.device)
        for batch, tokens in lengths.items():
            run.say(f"generate: {called}, batch {batch}")
            rows.append({**score_generation(model, batch, tokens, run.repeats), "model": called})
        del model
    return rows


@torch.no_grad()
def _as_trained(model: CausalQwenForCausalLM) -> CausalQwenForCausalLM:
    """A graft whose scale_U differs from coordinate to coordinate, as it does once abduction was trained."""
    bias: torch.Tensor = model.abduction.get_parameter("scale_net.bias")
    bias.add_(0.3 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(0)))
    return model


def _ways(run: _Run) -> dict[str, Any]:
    run.say("generate with drafts, and compiled")
    return score_ways(run.graft().to(run.device), run.sizes.ways, run.repeats, compiled=run.sizes.whole)


def _epochs(run: _Run) -> dict[str, Any]:
    run.say("an epoch of heads on kept features, and of LoRA")
    return score_epochs(run.backbone, run.output / "work", run.sizes.rows, run.repeats, run.device)


def _tokenizer(run: _Run) -> dict[str, Any]:
    run.say("tokenizer")
    return score_tokenizer(run.backbone, run.repeats)


PARTS: dict[str, Callable[[_Run], Any]] = {
    "loss": _loss, "growth": _growth, "generate": _generate, "ways": _ways, "epochs": _epochs, "tokenizer": _tokenizer,
}  # fmt: skip


def measure(
    output: Path,
    parts: Sequence[str] = tuple(PARTS),
    repeats: int = 3,
    *,
    backbone: str = DEFAULT_BACKBONE,
    device: str = "auto",
    sizes: Sizes = FULL,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The parts asked for; results are written to `output/speed.json` as they come, and kept for parts not asked for.

    device: "auto" for an accelerator where there is one, or a torch device. ValueError for an unknown part.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"unknown parts {', '.join(unknown)}; known: {', '.join(PARTS)}")
    run = _Run(output, repeats, backbone, resolve_device(device), sizes, say)
    output.mkdir(parents=True, exist_ok=True)
    file = output / "speed.json"
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    results["threads"] = torch.get_num_threads()
    on_gpu = torch.device(run.device).type == "cuda"
    for part in PARTS:
        if part in parts:
            results[part] = PARTS[part](run)
            name = torch.cuda.get_device_name(run.device) if on_gpu else run.device
            results.setdefault("devices", {})[part] = name
            write_text(file, json.dumps(results, indent=1) + "\n")
    return results
