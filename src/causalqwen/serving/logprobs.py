"""Log-probabilities in OpenAI's two shapes, and log P_k in a field of ours."""

import functools
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from causalqwen.modeling import CausalQwenProcessor
from causalqwen.modeling.alternatives import Likelihood
from causalqwen.modeling.processor import NUM_TOKEN

PlacedToken = tuple[int, int, tuple[Likelihood, ...] | None]
"""A token, where it starts in the choice's text, and what `likelihoods` gives for it; None for the first of a text."""

_LEAST = -9999.0  # OpenAI's, in place of an infinite one
_UNFINISHED = "\ufffd"
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
_KEPT = 1 << 13  # spellings of tokens: those of a whole vocabulary would take tens of megabytes
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def completion_logprobs(tokens: Sequence[PlacedToken], processor: CausalQwenProcessor) -> dict[str, Any]:
    """`logprobs` of a completion: `tokens`, `token_logprobs`, `top_logprobs` (the token among them), `text_offset`."""
    return {
        "tokens": [_spelled(processor, token)[0] for token, _, _ in tokens],
        "text_offset": [start for _, start, _ in tokens],
    } | _columns(tokens, processor, "log_prob")


def chat_logprobs(tokens: Sequence[PlacedToken], processor: CausalQwenProcessor) -> dict[str, Any]:
    """`logprobs` of a chat's answer: under `content` of each token `token`, `logprob`, `bytes` and `top_logprobs`."""

    def entry(word: Likelihood) -> dict[str, Any]:
        text, raw = _spelled(processor, word.token)
        return {"token": text, "logprob": max(word.log_prob, _LEAST), "bytes": raw}

    rows = [found for _, _, found in tokens if found is not None]
    return {"content": [entry(row[0]) | {"top_logprobs": list(map(entry, row[1:]))} for row in rows], "refusal": None}


def ovr_logprobs(tokens: Sequence[PlacedToken], processor: CausalQwenProcessor) -> dict[str, Any]:
    """log P_k of the same tokens, as a completion reports its own: `token_logprobs`, `top_logprobs`."""
    return _columns(tokens, processor, "log_ovr")


def _columns(tokens: Sequence[PlacedToken], processor: CausalQwenProcessor, of: str) -> dict[str, Any]:
    own: list[float | None] = []
    likeliest: list[dict[str, float] | None] = []
    for _, _, row in tokens:
        top: dict[str, float] = {}
        for word in () if row is None else (*row[1:], row[0]):  # of two that are spelled alike, the likelier
            top.setdefault(_spelled(processor, word.token)[0], max(getattr(word, of), _LEAST))
        own.append(None if row is None else max(getattr(row[0], of), _LEAST))
        likeliest.append(None if row is None else top)
    return {"token_logprobs": own, "top_logprobs": likeliest}


def _spelled(processor: CausalQwenProcessor, token: int) -> tuple[str, list[int] | None]:
    """A token's text and its bytes; of a part of a character the bytes are spelled, as OpenAI does: "bytes:\\xe4\\xbd"."""
    return (NUM_TOKEN, None) if token == processor.num_token_id else _spelled_word(processor.tokenizer, token)


@functools.lru_cache(maxsize=_KEPT)
def _spelled_word(tokenizer: PreTrainedTokenizerBase, token: int) -> tuple[str, list[int] | None]:
    # After a word: some tokenizers drop the space that a text begins with.
    word = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole, known = (str(tokenizer.decode(part, clean_up_tokenization_spaces=False)) for part in ([*word, token], word))
    text = whole[len(known) :]
    name = str(tokenizer.convert_ids_to_tokens(token))
    raw = list(text.encode())
    if _UNFINISHED in text:
        alone = _FALLBACK.fullmatch(name)
        raw = [int(alone[1], 16)] if alone else [_BYTES[letter] for letter in name if letter in _BYTES]
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text, raw
