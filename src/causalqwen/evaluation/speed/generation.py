"""Generation: every preset against the backbone's own greedy `generate`."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from causalqwen.data.texts import speech_paragraphs
from causalqwen.decoding import PRESETS, CausalDecoding
from causalqwen.evaluation.speed.turns import alternate
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
        "backbone, sampled": lambda: backbone.generate(**inputs, **fixed, do_sample=True, top_k=0),
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
