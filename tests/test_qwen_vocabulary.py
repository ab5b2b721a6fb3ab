"""Qwen's own vocabulary, as it comes in the wheel `dashscope`: 151,643 ranks and 22 control tokens."""

from importlib.metadata import files

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from transformers.convert_slow_tokenizer import TikTokenConverter

from causalqwen import CausalDecoding, CausalQwenForCausalLM

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "The price is 1,272.50 dollars, 价格是99.9元。",
    "def f(x1): return x1 + 3.5  # 2024-01-05",
    "温度 -5 度，湿度 60%，<NUM> 只是文字",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    path = next(file.locate() for file in files("dashscope") if file.name == "qwen.tiktoken")
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [f"<|control_{i}|>" for i in range(19)]
    converted = TikTokenConverter(str(path), PATTERN, extra_special_tokens=controls).converted()
    return PreTrainedTokenizerFast(tokenizer_object=converted, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


@pytest.fixture(scope="module")
def model(tokenizer) -> CausalQwenForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.3,
        bos_token_id=None, eos_token_id=151_643, pad_token_id=151_643,
    )  # fmt: skip
    return CausalQwenForCausalLM.from_backbone(AutoModelForCausalLM.from_config(config).eval(), tokenizer=tokenizer)


def test_num_is_the_first_free_row_of_qwen(model, tokenizer):
    assert len(tokenizer) == 151_665
    assert model.config.num_token_id == 151_665
    assert model.config.free_token_ids == list(range(151_666, 151_936))
    assert model.config.vocab_size == 151_936


@pytest.mark.parametrize("text", TEXTS)
def test_texts_survive_the_round_trip(model, text):
    encoded = model.processor(text)
    assert 151_665 in encoded["input_ids"] and max(encoded["input_ids"]) == 151_665
    assert model.processor.decode(encoded) == text


def test_no_decision_sampler_or_beam_takes_a_row_that_no_token_uses(model):
    with torch.no_grad():
        model.get_output_embeddings().weight[151_666:] *= 50  # training never touched them; make them loud
    inputs = model.processor(["价格是"], return_tensors="pt")
    with torch.no_grad():
        assert (model(**inputs).logits.argmax(-1) > 151_665).any()
    settings = {"max_new_tokens": 8, "eos_token_id": None}
    made = [
        model.generate(**inputs, causal_decoding=CausalDecoding.preset("causal", seed=1), **settings).sequences,
        model.generate(**inputs, do_sample=True, top_k=50, **settings),
        model.generate(**inputs, do_sample=False, num_beams=2, **settings),
    ]
    for sequences in made:
        assert sequences.max() <= 151_665
