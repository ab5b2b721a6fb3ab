"""Generation: every preset against the backbone's own greedy `generate`."""

from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig, Qwen2Config

from benchmarks.speed.losses import alternate
from causalqwen.data.texts import speech_paragraphs
from causalqwen.decoding import PRESETS, CausalDecoding
from causalqwen.modeling import CausalQwenForCausalLM


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


def compiled_steps(backend: str = "inductor") -> dict[str, Any]:
    """Arguments of `generate` for decoding steps compiled by torch.compile over a static cache, on the CPU too."""
    settings = CompileConfig(backend=backend, mode="default", fullgraph=False)
    settings._compile_all_devices = True  # type: ignore[assignment]  # transformers' own switch: it compiles on accelerators alone otherwise
    return {"cache_implementation": "static", "compile_config": settings}


def score_generation(model: CausalQwenForCausalLM, batch: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of every preset, and of no plan, over those of the backbone's own greedy `generate`."""
    of_backbone, of_plan = _generators(model, batch, tokens)
    cases: dict[str, Callable[[], Any]] = {
        "backbone": of_backbone(do_sample=False),
        "backbone, sampled": of_backbone(do_sample=True, top_k=0),
        "no plan": of_plan(None, do_sample=False),
        **{name: of_plan(name) for name in PRESETS},
    }
    return _timed(model, cases, batch, tokens, repeats)


def score_ways(model: CausalQwenForCausalLM, tokens: int, repeats: int, *, compiled: bool = True) -> dict[str, Any]:
    """Other ways to walk, at batch 1: four tokens of the text drafted ahead (`prompt_lookup_num_tokens`), compiled steps."""
    of_backbone, of_plan = _generators(model, 1, tokens)
    cases: dict[str, Callable[[], Any]] = {"backbone": of_backbone(do_sample=False)}
    ways: list[tuple[str, dict[str, Any]]] = [("drafts", {"prompt_lookup_num_tokens": 4})]
    for label, way in ways + [("compiled", compiled_steps())] * compiled:
        cases[f"backbone, {label}"] = of_backbone(do_sample=False, **way)
        cases |= {f"{name}, {label}": of_plan(name, **way) for name in ("standard", "persona")}
    return _timed(model, cases, 1, tokens, repeats)


def _generators(model: CausalQwenForCausalLM, batch: int, tokens: int) -> tuple[Callable, Callable]:
    """What makes cases for the backbone (arguments), and for the graft (preset or None, arguments)."""
    words = islice(cycle(speech_paragraphs(numbers=False)), batch)
    tokenizer = model.processor.tokenizer
    texts = [" ".join(text.split()[: 4 + row % 8]) for row, text in enumerate(words)]
    made = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    made = made.to(model.device)
    # No end of text instead of a minimum of new tokens, which is a processor that looks at every score.
    fixed: dict[str, Any] = {
        **{name: made[name] for name in ("input_ids", "attention_mask")},
        "max_new_tokens": tokens,
        "eos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id or 0,
    }

    backbone: Any = model.backbone

    def of_backbone(**way: Any) -> Callable[[], Any]:
        return partial(backbone.generate, **fixed, **way)

    def of_plan(name: str | None, **way: Any) -> Callable[[], Any]:
        plan = None if name is None else CausalDecoding.preset(name, seed=1)
        return partial(model.generate, **fixed, **way, causal_decoding=plan)

    return of_backbone, of_plan


def _timed(
    model: CausalQwenForCausalLM, cases: dict[str, Callable[[], Any]], batch: int, tokens: int, repeats: int
) -> dict[str, Any]:
    seconds = alternate(cases, repeats)
    return {
        "model": model.name_or_path or model.config.name_or_path,
        "score_scale": model.config.score_scale,
        "batch": batch,
        "tokens_per_second": {name: batch * tokens / taken for name, taken in seconds.items()},
        "speed_ratio": {name: seconds["backbone"] / taken for name, taken in seconds.items()},
    }
