"""All of it, kept part by part."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from causalqwen.evaluation.speed.generation import random_qwen, score_generation, score_ways
from causalqwen.evaluation.speed.losses import SHARE, SOFTMAX, LossSize, loss_cases, score_losses
from causalqwen.evaluation.speed.training import score_epochs, score_tokenizer
from causalqwen.files import write_text
from causalqwen.modeling import DEFAULT_BACKBONE, CausalQwenForCausalLM

PARTS = ("loss", "growth", "generate", "ways", "epochs", "tokenizer")
_CURVES = [SOFTMAX, "documents", "equal, Cauchy", "equal, Gaussian", f"equal, 1/{SHARE} of the negatives"]


def benchmark_speed(
    output: Path, parts: tuple[str, ...] = PARTS, repeats: int = 3, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """The parts asked for; results are written to `output/speed.json` as they come, and kept for parts not asked for."""
    output.mkdir(parents=True, exist_ok=True)
    file = output / "speed.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found["threads"] = torch.get_num_threads()

    def keep(part: str, result: Any) -> None:
        found[part] = result
        write_text(file, json.dumps(found, indent=1) + "\n")

    if "loss" in parts:
        rows = []
        for frozen in (False, True):
            say(f"loss and gradients, the weight {'frozen' if frozen else 'trained'}")
            size = LossSize(frozen=frozen)
            names = list(loss_cases(LossSize(16, 512, 16)))
            rows.append(score_losses(size, names, repeats, memory=True))
        keep("loss", rows)
    if "growth" in parts:
        base = LossSize(vocabulary=49152, hidden=576)
        sizes = {
            "tokens": [replace(base, tokens=tokens) for tokens in (256, 1024, 4096)],
            "vocabulary": [replace(base, vocabulary=vocabulary) for vocabulary in (16384, 49152, 151936)],
            "hidden": [replace(base, hidden=hidden) for hidden in (576, 896, 1536)],
            "dtype": [replace(base, dtype=dtype) for dtype in ("float32", "bfloat16")],
        }
        growth = {}
        for axis, values in sizes.items():
            say(f"growth with {axis}")
            growth[axis] = [score_losses(size, _CURVES, repeats, memory=True) for size in values]
        keep("growth", growth)
    if "generate" in parts:
        rows = []
        for name, make, lengths in _models():
            model = make()
            for batch, tokens in lengths.items():
                say(f"generate: {name}, batch {batch}")
                rows.append({**score_generation(model, batch, tokens, repeats), "model": name})
                keep("generate", rows)
            del model
    if "ways" in parts:
        say("generate with drafts, and compiled")
        keep("ways", score_ways(CausalQwenForCausalLM.from_backbone(DEFAULT_BACKBONE), 96, repeats))
    if "epochs" in parts:
        say("an epoch of heads on kept features, and of LoRA")
        keep("epochs", score_epochs(output / "work", rows=96, repeats=repeats))
    if "tokenizer" in parts:
        say("tokenizer")
        keep("tokenizer", score_tokenizer(repeats))
    return found


def _models() -> list[tuple[str, Callable[[], CausalQwenForCausalLM], dict[int, int]]]:
    """Name, maker, and the tokens to write at each batch size."""
    small: Any = partial(CausalQwenForCausalLM.from_backbone, DEFAULT_BACKBONE)
    large: Any = partial(random_qwen, small().processor.tokenizer)
    return [
        ("SmolLM2-135M", small, {1: 48, 8: 48, 64: 16}),
        ("SmolLM2-135M, the documents' scale", partial(small, start="documents"), {1: 48, 8: 48, 64: 16}),
        ("Qwen2 0.5B shape, random", large, {1: 12, 8: 12}),
        ("Qwen2 0.5B shape, random, the documents' scale", partial(large, start="documents"), {1: 12, 8: 12}),
    ]


def speed_table(found: dict[str, Any]) -> str:
    """The results as text."""
    lines = []
    for row in found.get("loss", []):
        weight = "frozen" if row["frozen"] else "trained"
        lines.append(f"{row['tokens']:,} x {row['vocabulary']:,} x {row['hidden']}, {row['dtype']}, weight {weight}")
        for name, ratio in row["time_ratio"].items():
            memory = f"{row['memory_ratio'][name]:6.2f} x memory" if "memory_ratio" in row else ""
            lines.append(f"  {name:36} {ratio:6.2f} x time {memory}")
    for row in found.get("generate", []) + [found[part] for part in ("ways",) if part in found]:
        lines.append(f"generate, {row['model']}, batch {row['batch']}: tokens/s over the backbone's greedy generate")
        lines.append("  " + "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["speed_ratio"].items()))
    if "epochs" in found:
        lines.append("an epoch, times faster than LoRA on the whole vocabulary")
        lines += [f"  {name:36} {ratio:6.1f}" for name, ratio in found["epochs"]["times_faster"].items()]
    if "tokenizer" in found:
        lines.append(f"text to tensors: {found['tokenizer']['speed_ratio']:.2f} x the bare tokenizer's speed")
    return "\n".join(lines)
