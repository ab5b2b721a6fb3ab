"""Tiny backbones of several families, and the real default one."""

import logging
import os
import shutil
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each process: two that share two cores crawl
    os.environ["OMP_NUM_THREADS"] = "1"
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported, which torch may do

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from causalqwen import ActionNetwork, CausalQwenConfig, CausalQwenForCausalLM
from causalqwen.data.texts import speech_paragraphs
from causalqwen.numbers import find_numbers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
logging.getLogger("causalqwen").setLevel("WARNING")  # a graft need not prove itself each time
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))

# `make test` meets the same examples each time; `make check-full` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_addoption(parser) -> None:
    parser.addoption("--snapshots-update", action="store_true", help="write tests/snapshots anew")


FAMILIES = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig}
FREE_ROWS = {"qwen2": 8, "qwen3": 1, "llama": 0, "mistral": 0}
TIED = {"qwen2": True, "qwen3": False, "llama": True, "mistral": False}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a speech; about 400 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(speech_paragraphs(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|im_end|>",
        chat_template="{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def make_backbone(family: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **overrides):
    """A random decoder of a family, 2 layers, 32 wide, whose logits spread over a few nats."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tokenizer) + FREE_ROWS[family],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": TIED[family],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 2,
        **overrides,
    }
    config = FAMILIES[family](**settings)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request) -> str:
    return request.param


def action_of(size: int, rows: int, **settings) -> tuple[ActionNetwork, torch.nn.Linear]:
    """An action network, without noise unless settings say so, and an lm_head of so many rows, which `<NUM>` stands behind."""
    config = CausalQwenConfig(
        text_config=Qwen2Config(hidden_size=size, vocab_size=rows), **{"initial_noise": 0.0} | settings
    )
    return ActionNetwork(config), torch.nn.Linear(size, rows)


def graft_tiny(family: str, tokenizer: PreTrainedTokenizerFast, **settings) -> CausalQwenForCausalLM:
    """A grafted tiny model whose value head has seen nothing, but gives values of some size."""
    backbone = make_backbone(family, tokenizer)
    torch.manual_seed(1)
    return CausalQwenForCausalLM.from_backbone(backbone, tokenizer=tokenizer, **settings)


@pytest.fixture
def tiny(family, tiny_tokenizer) -> CausalQwenForCausalLM:
    """A fresh grafted model of each family."""
    return graft_tiny(family, tiny_tokenizer)


@pytest.fixture
def tiny_llama(tiny_tokenizer) -> CausalQwenForCausalLM:
    return graft_tiny("llama", tiny_tokenizer)


@pytest.fixture
def tiny_qwen(tiny_tokenizer) -> CausalQwenForCausalLM:
    return graft_tiny("qwen2", tiny_tokenizer)


@pytest.fixture(scope="session")
def smollm2() -> CausalQwenForCausalLM:
    """The real default backbone, grafted; tests must leave it as they found it. `make backbone` fetches it."""
    return CausalQwenForCausalLM.from_backbone("smollm2-135m")


@pytest.fixture
def smollm2_folder(smollm2) -> Path:
    from causalqwen.modeling.backbones import default_backbone_path

    return default_backbone_path()


def broken_numbers(processor, ids: list[int], values: list[float]) -> list[float]:
    """Values of a text's `<NUM>` that the reader does not find where they stand, as one number each; ids without padding."""

    def shown(count: int) -> str:
        return processor.decode(ids[:count], values[:count], skip_special_tokens=True)

    text = shown(len(ids))
    spans = {span.start: span for span in find_numbers(text, processor.number_rules)}
    broken = []
    for place, token in enumerate(ids):
        if token == processor.num_token_id:
            start = len(shown(place))
            span = spans.get(start) or spans.get(start + text[start:].startswith(" "))
            if span is None or span.value != values[place]:
                broken.append(values[place])
    return broken
