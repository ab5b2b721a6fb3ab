"""All of it, kept part by part."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from causalqwen.evaluation.speed.generation import random_qwen, score_generation, score_ways
from causalqwen.evaluation.speed.losses import SHARE, SOFTMAX, LossSize, loss_cases, score_losses
from causalqwen.evaluation.speed.training import score_epochs, score_tokenizer
from causalqwen.files import write_text
from causalqwen.modeling import DEFAULT_BACKBONE, CausalQwenForCausalLM, CausalQwenProcessor
from causalqwen.modeling.backbones import resolve_device

PARTS = ("loss", "growth", "generate", "ways", "epochs", "tokenizer")
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

    @classmethod
    def full(cls) -> "Sizes":
        """Those of the figures that the documentation states."""
        base = LossSize(vocabulary=49152, hidden=576)
        growth = {
            "tokens": [replace(base, tokens=tokens) for tokens in (256, 1024, 4096)],
            "vocabulary": [replace(base, vocabulary=vocabulary) for vocabulary in (16384, 49152, 151936)],
            "hidden": [replace(base, hidden=hidden) for hidden in (576, 896, 1536)],
            "dtype": [replace(base, dtype=dtype) for dtype in ("float32", "bfloat16")],
        }
        return cls(LossSize(), growth, {1: 48, 8: 48, 64: 16}, {1: 12, 8: 12}, 96, 96, True)

    @classmethod
    def quick(cls) -> "Sizes":
        """Small enough for a minute: figures of nothing, but every case runs."""
        base = LossSize(tokens=64, vocabulary=4096, hidden=32, dtype="float32")
        growth = {"tokens": [base, replace(base, tokens=128)], "dtype": [base, replace(base, dtype="bfloat16")]}
        return cls(base, growth, {1: 4, 2: 4}, None, 4, 8, False)


def benchmark_speed(
    output: Path,
    parts: tuple[str, ...] = PARTS,
    repeats: int = 3,
    *,
    backbone: str = DEFAULT_BACKBONE,
    device: str = "auto",
    sizes: Sizes | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The parts asked for; results are written to `output/speed.json` as they come, and kept for parts not asked for.

    device: "auto" for an accelerator where there is one, or a torch device. sizes: the full ones by default.
    """
    sizes = sizes or Sizes.full()
    device = resolve_device(device)
    output.mkdir(parents=True, exist_ok=True)
    file = output / "speed.json"
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    results["threads"] = torch.get_num_threads()
    on_gpu = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else device

    def keep(part: str, result: Any) -> None:
        results[part] = result
        results.setdefault("devices", {})[part] = name
        write_text(file, json.dumps(results, indent=1) + "\n")

    if "loss" in parts:
        rows = []
        for frozen in (False, True):
            say(f"loss and gradients, the weight {'frozen' if frozen else 'trained'}")
            names = [
                name
                for name in loss_cases(LossSize(16, 512, 16, device=device))
                if sizes.whole or "compiled" not in name
            ]
            rows.append(
                score_losses(replace(sizes.loss, frozen=frozen, device=device), names, repeats, memory=sizes.whole)
            )
        keep("loss", rows)
    if "growth" in parts:
        growth = {}
        for axis, values in sizes.growth.items():
            say(f"growth with {axis}")
            growth[axis] = [
                score_losses(replace(size, device=device), _CURVES, repeats, memory=sizes.whole) for size in values
            ]
        keep("growth", growth)
    if "generate" in parts:
        rows = []
        for called, make, lengths in _models(backbone, sizes):
            model = make().to(device)
            for batch, tokens in lengths.items():
                say(f"generate: {called}, batch {batch}")
                rows.append({**score_generation(model, batch, tokens, repeats), "model": called})
                keep("generate", rows)
            del model
    if "ways" in parts:
        say("generate with drafts, and compiled")
        whole = CausalQwenForCausalLM.from_backbone(backbone)
        keep("ways", score_ways(whole.to(device), sizes.ways, repeats, compiled=sizes.whole))
    if "epochs" in parts:
        say("an epoch of heads on kept features, and of LoRA")
        keep("epochs", score_epochs(backbone, output / "work", sizes.rows, repeats, device))
    if "tokenizer" in parts:
        say("tokenizer")
        keep("tokenizer", score_tokenizer(backbone, repeats))
    return results


def _models(backbone: str, sizes: Sizes) -> list[tuple[str, Callable[[], Any], dict[int, int]]]:
    """Name, maker, and the tokens to write at each batch size."""
    name = "SmolLM2-135M" if backbone == DEFAULT_BACKBONE else Path(backbone).name
    small: Any = partial(CausalQwenForCausalLM.from_backbone, backbone)
    models = [
        (name, small, sizes.lengths),
        (f"{name}, a scale for each coordinate", lambda: _as_trained(small()), sizes.lengths),
        (f"{name}, the documents' scale", partial(small, start="documents"), sizes.lengths),
    ]
    if sizes.large is not None:
        large: Any = partial(random_qwen, CausalQwenProcessor.from_pretrained(backbone).tokenizer)
        models.append(("Qwen2 0.5B shape, random", large, sizes.large))
        documents = partial(large, start="documents")
        models.append(("Qwen2 0.5B shape, random, the documents' scale", documents, sizes.large))
    return models


@torch.no_grad()
def _as_trained(model: CausalQwenForCausalLM) -> CausalQwenForCausalLM:
    """A graft whose scale_U differs from coordinate to coordinate, as it does once abduction was trained."""
    bias: torch.Tensor = model.abduction.get_parameter("scale_net.bias")
    bias.add_(0.3 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(0)))
    return model


def speed_table(results: dict[str, Any]) -> str:
    """The results as text."""
    lines = [f"{part}: on {device}" for part, device in results.get("devices", {}).items() if device != "cpu"]
    for row in results.get("loss", []):
        weight = "frozen" if row["frozen"] else "trained"
        lines.append(f"{row['tokens']:,} x {row['vocabulary']:,} x {row['hidden']}, {row['dtype']}, weight {weight}")
        for name, ratio in row["time_ratio"].items():
            memory = f"{row['memory_ratio'][name]:6.2f} x memory" if "memory_ratio" in row else ""
            lines.append(f"  {name:36} {ratio:6.2f} x time {memory}")
    for row in results.get("generate", []) + [results[part] for part in ("ways",) if part in results]:
        lines.append(f"generate, {row['model']}, batch {row['batch']}: tokens/s over the backbone's greedy generate")
        lines.append("  " + "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["speed_ratio"].items()))
    if "epochs" in results:
        lines.append("an epoch, times faster than LoRA on the whole vocabulary")
        lines += [f"  {name:36} {ratio:6.1f}" for name, ratio in results["epochs"]["times_faster"].items()]
    if "tokenizer" in results:
        lines.append(f"text to tensors: {results['tokenizer']['speed_ratio']:.2f} x the bare tokenizer's speed")
    return "\n".join(lines)
