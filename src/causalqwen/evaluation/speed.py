"""What the graft costs: each case beside its rival in one process, alternating, as ratios of medians.

A time alone says how fast a machine is; a ratio, taken in turns, says what the code costs.
"""

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, Qwen2Config

from causalqwen.data import collate, encode_rows, parse_row
from causalqwen.data.boiling_points import boiling_points, split_by_compound, write_sentences
from causalqwen.data.texts import speech_paragraphs
from causalqwen.decoding import PRESETS, CausalDecoding
from causalqwen.kernels import linear_ovr_loss, sample_negatives
from causalqwen.modeling import DEFAULT_BACKBONE, CausalQwenForCausalLM
from causalqwen.training import FactStore
from causalqwen.training.run import token_importance
from causalqwen.training.trainer import TrainedForCausalLM, collate_facts

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
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


# ---- the loss --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossSize:
    """tokens x vocabulary x hidden size; frozen: the weight takes no gradient."""

    tokens: int = 1024
    vocabulary: int = 151936
    hidden: int = 896
    dtype: str = "bfloat16"
    frozen: bool = False


def loss_cases(size: LossSize) -> dict[str, Callable[[], None]]:
    """Loss and gradients of one batch: the documents' scale (one per token), the equal one, softmax, and rivals."""
    dtype = getattr(torch, size.dtype)
    generator = torch.Generator().manual_seed(0)
    loc = torch.empty(size.tokens, size.hidden, dtype=dtype).normal_(generator=generator).requires_grad_(True)
    weight = torch.empty(size.vocabulary, size.hidden, dtype=dtype).normal_(std=0.05, generator=generator)
    weight.requires_grad_(not size.frozen)
    common = (torch.rand(size.tokens, generator=generator) + 0.5).requires_grad_(True)
    own = (torch.rand(size.tokens, size.hidden, generator=generator) * 0.02 + 0.01).requires_grad_(True)
    targets = torch.randint(size.vocabulary, (size.tokens,), generator=generator)
    importance = torch.rand(size.vocabulary, generator=generator) + 0.1

    def case(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for leaf in (loc, weight, common, own):
                leaf.grad = None
            loss().backward()

        return run

    def ovr(scale: Tensor, threshold: float, **settings: Any) -> Callable[[], None]:
        return case(lambda: linear_ovr_loss(loc, scale, weight, None, threshold, targets, **settings))

    cases = {
        SOFTMAX: case(lambda: F.cross_entropy(F.linear(loc, weight), targets)),
        "documents": ovr(own, 50.0),
        "equal, Cauchy": ovr(common, 6.0),
        "equal, Gaussian": ovr(common, 6.0, family="gaussian", slope=0.5),
        f"equal, 1/{SHARE} of the negatives": case(
            lambda: linear_ovr_loss(
                loc,
                common,
                weight,
                None,
                6.0,
                targets,
                family="gaussian",
                slope=0.5,
                negatives=sample_negatives(importance, size.vocabulary // SHARE, generator),
            )
        ),
        "documents, plain torch": ovr(own, 50.0, impl="reference"),
    }
    if hasattr(F, "linear_cross_entropy"):
        cases["torch linear_cross_entropy"] = case(lambda: F.linear_cross_entropy(loc, weight, targets))
    return cases


def peak_memory(size: LossSize, name: str) -> float:
    """Bytes that one case adds to a process of its own at most, beside its inputs."""
    task = json.dumps({"size": asdict(size), "case": name})
    done = subprocess.run([sys.executable, "-m", __name__, task], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith(field)).split()[1])


def _measure_memory(size: LossSize, name: str) -> float:
    loss_cases(replace(size, tokens=16, vocabulary=512))[name]()  # the libraries' own buffers
    case = loss_cases(size)[name]
    gc.collect()
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
        result["bytes"] = {
            name: peak_memory(size, name) for name in tqdm(cases, desc="memory, one process each", leave=False)
        }
        result["memory_ratio"] = {name: taken / result["bytes"][SOFTMAX] for name, taken in result["bytes"].items()}
    return result


# ---- generation ------------------------------------------------------------------------------------------------------


def random_qwen(tokenizer: Any, **settings: Any) -> CausalQwenForCausalLM:
    """A grafted Qwen2 of the 0.5B shape with random weights."""
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    backbone = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    backbone.generation_config.eos_token_id = backbone.generation_config.pad_token_id = None
    return CausalQwenForCausalLM.from_backbone(backbone, tokenizer=tokenizer, **settings)


def score_generation(model: CausalQwenForCausalLM, batch: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of every preset, and of no plan, over those of the backbone's own greedy `generate`."""
    words = speech_paragraphs(numbers=False)[:batch]
    tokenizer = model.processor.tokenizer
    texts = [" ".join(text.split()[: 12 + 3 * row]) for row, text in enumerate(words)]
    made = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    inputs: Any = {name: made[name] for name in ("input_ids", "attention_mask")}
    # No end of text instead of a minimum of new tokens, which is a processor that looks at every score.
    fixed: dict[str, Any] = {
        "max_new_tokens": tokens,
        "eos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id or 0,
    }

    backbone: Any = model.backbone

    def plan(name: str) -> Callable[[], None]:
        decoding = CausalDecoding.preset(name, seed=1)
        return lambda: model.generate(**inputs, **fixed, causal_decoding=decoding)

    cases: dict[str, Callable[[], None]] = {
        "backbone": lambda: backbone.generate(**inputs, **fixed, do_sample=False),
        "no plan": lambda: model.generate(**inputs, **fixed, do_sample=False),
        **{name: plan(name) for name in PRESETS},
    }
    seconds = alternate(cases, repeats)
    return {
        "model": model.name_or_path or model.config.name_or_path,
        "score_scale": model.config.score_scale,
        "batch": batch,
        "tokens_per_second": {name: batch * tokens / taken for name, taken in seconds.items()},
        "speed_ratio": {name: seconds["backbone"] / taken for name, taken in seconds.items()},
    }


# ---- training --------------------------------------------------------------------------------------------------------


def score_epochs(work: Path, rows: int, repeats: int) -> dict[str, Any]:
    """One epoch over the same rows in batches of 16: heads on kept features, and LoRA through the backbone."""
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    write_sentences(work / "rows.jsonl", split_by_compound(boiling_points(), {"train": rows})["train"])
    lines = (work / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    model = CausalQwenForCausalLM.from_backbone(DEFAULT_BACKBONE)
    examples = encode_rows([parse_row(line, "rows") for line in lines], model.processor)
    store = FactStore.build(model, examples, work)
    importance = token_importance(model, store.facts)
    pad = model.processor.tokenizer.pad_token_id
    negatives = model.action.rows // SHARE
    heads = (model.abduction, model.action.b_noise, model.action.threshold, model.action.shift)
    numbers = (model.value_branch, model.action.value_head, model.action.num_row, model.action.num_bias)

    def epoch(trained: TrainedForCausalLM, parts: tuple, kept: bool) -> Callable[[], None]:
        def run() -> None:
            model.requires_grad_(False)
            for part in parts:
                part.requires_grad_(True)
            adapters = [p for n, p in model.backbone.named_parameters() if "lora_" in n]
            for parameter in adapters:
                parameter.requires_grad_(not kept)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
            trained.train()
            for start in range(0, rows, 16):
                batch = range(start, min(start + 16, rows))
                inputs = (
                    collate_facts([store[i] for i in batch]) if kept else collate([examples[i] for i in batch], pad)
                )
                trained(**inputs).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return run

    sampled = {"negatives": negatives, "importance": importance}
    cases = {
        "heads, whole vocabulary": epoch(TrainedForCausalLM(model, heads=True), heads + numbers, True),
        f"heads, 1/{SHARE} of the negatives": epoch(
            TrainedForCausalLM(model, heads=True, **sampled), heads + numbers, True
        ),
        "numbers alone": epoch(TrainedForCausalLM(model), numbers, True),
    }
    lora = {
        "LoRA, whole vocabulary": epoch(TrainedForCausalLM(model, True), numbers, False),
        "LoRA, numbers alone": epoch(TrainedForCausalLM(model, False), numbers, False),
    }
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    inject_adapter_in_model(config, model.backbone)
    seconds = alternate(cases | lora, repeats)
    reference = seconds["LoRA, whole vocabulary"]
    return {
        "rows": rows,
        "tokens": len(store.facts),
        "seconds": seconds,
        "times_faster": {name: reference / taken for name, taken in seconds.items()},
    }


def score_tokenizer(repeats: int) -> dict[str, Any]:
    """Text to tensors, numbers found, against the bare fast tokenizer on the same paragraphs."""
    processor = CausalQwenForCausalLM.from_backbone(DEFAULT_BACKBONE).processor
    texts = speech_paragraphs() * 4
    cases = {
        "tokenizer": lambda: processor.tokenizer(texts, return_tensors="pt", padding=True),
        "processor": lambda: processor(texts, return_tensors="pt", padding=True),
    }
    seconds = alternate(cases, repeats)
    return {"texts": len(texts), "seconds": seconds, "speed_ratio": seconds["tokenizer"] / seconds["processor"]}


# ---- all of it -------------------------------------------------------------------------------------------------------

PARTS = ("loss", "growth", "generate", "epochs", "tokenizer")
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
        made = file.with_suffix(".part")
        made.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        made.replace(file)

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
        small = CausalQwenForCausalLM.from_backbone(DEFAULT_BACKBONE)
        small.generation_config.eos_token_id = None
        makers: list[tuple[str, int, Callable[[], CausalQwenForCausalLM]]] = [
            ("SmolLM2-135M", 48, lambda: CausalQwenForCausalLM.from_backbone(DEFAULT_BACKBONE)),
            (
                "SmolLM2-135M, the documents' scale",
                48,
                lambda: CausalQwenForCausalLM.from_backbone(DEFAULT_BACKBONE, start="documents"),
            ),
            ("Qwen2 0.5B shape, random", 12, lambda: random_qwen(small.processor.tokenizer)),
            (
                "Qwen2 0.5B shape, random, the documents' scale",
                12,
                lambda: random_qwen(small.processor.tokenizer, start="documents"),
            ),
        ]
        for name, tokens, make in makers:
            model = make()
            for batch in (1, 8):
                say(f"generate: {name}, batch {batch}")
                rows.append({**score_generation(model, batch, tokens, repeats), "model": name})
            del model
        keep("generate", rows)
    if "epochs" in parts:
        say("an epoch of heads on kept features, and of LoRA")
        keep("epochs", score_epochs(output / "work", rows=96, repeats=repeats))
    if "tokenizer" in parts:
        say("tokenizer")
        keep("tokenizer", score_tokenizer(repeats))
    return found


def speed_table(found: dict[str, Any]) -> str:
    """The results as text."""
    lines = []
    for row in found.get("loss", []):
        weight = "frozen" if row["frozen"] else "trained"
        lines.append(f"{row['tokens']:,} x {row['vocabulary']:,} x {row['hidden']}, {row['dtype']}, weight {weight}")
        for name, ratio in row["time_ratio"].items():
            memory = f"{row['memory_ratio'][name]:6.2f} x memory" if "memory_ratio" in row else ""
            lines.append(f"  {name:36} {ratio:6.2f} x time {memory}")
    for row in found.get("generate", []):
        lines.append(f"generate, {row['model']}, batch {row['batch']}: tokens/s over the backbone's greedy generate")
        lines.append("  " + "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["speed_ratio"].items()))
    if "epochs" in found:
        lines.append("an epoch, times faster than LoRA on the whole vocabulary")
        lines += [f"  {name:36} {ratio:6.1f}" for name, ratio in found["epochs"]["times_faster"].items()]
    if "tokenizer" in found:
        lines.append(f"text to tensors: {found['tokenizer']['speed_ratio']:.2f} x the bare tokenizer's speed")
    return "\n".join(lines)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(_measure_memory(LossSize(**given["size"]), given["case"]))
