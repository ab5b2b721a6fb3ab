"""lm-evaluation-harness on a grafted model: log-likelihoods of words, texts with their numbers, numbers as distributions."""

import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from causalqwen import CausalQwenForCausalLM, NumberPrediction
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.loading import load_model
from causalqwen_evals import rows


class Answer(str):
    """A generated text that knows how to `ask` for the number after its prompt, as a distribution, whether or not the text has
    one; anything else sees plain text."""

    ask: Callable[[], list[NumberPrediction]]

    def __new__(cls, text: str, ask: Callable[[], list[NumberPrediction]]) -> "Answer":
        answer = super().__new__(cls, text)
        answer.ask = ask
        return answer

    def __reduce__(self) -> tuple:
        return str, (str(self),)  # a cache keeps the text alone


@register_model("causalqwen")
class CausalQwenLM(HFLM):
    """lm-evaluation-harness's own backend for transformers, where it reads and writes tokens; scores and numbers are ours.

    Texts are read as the backbone reads them, numbers as digits, and a continuation's log-likelihood is that of its tokens
    given that they are words: the softmax of their scores without `<NUM>`'s. It is the backbone's, bit for bit, as long as
    nothing that text reads was trained.

    Args:
        pretrained: a grafted model, its folder, or its name on the hub.
        device, dtype: of a folder or a name; see `load_model`.
        kwargs: what `HFLM` takes: batch_size, max_length, ...
    """

    def __init__(
        self,
        pretrained: str | os.PathLike | CausalQwenForCausalLM,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        model: Any = pretrained
        if not isinstance(pretrained, CausalQwenForCausalLM):
            kind = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else None
            if os.path.isdir(pretrained) or str(pretrained).count("/") != 1:
                # lm-eval's command line says "cuda" where nobody says anything.
                has_it = device is not None and (torch.cuda.is_available() or not device.startswith("cuda"))
                model = load_model(Path(pretrained), device if has_it else "auto", kind)
            else:
                model = CausalQwenForCausalLM.from_pretrained(pretrained, dtype=kind or "auto").eval()
        super().__init__(pretrained=model, tokenizer=model.processor.tokenizer, backend="causal", **kwargs)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Scores [B, S, V] of the tokens of the matrix."""
        with torch.no_grad():
            chain = Chain(self.model, self.model.features(inps).last_hidden_state)
            return chain.words(chain.loc)

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Texts, with numbers as they are written; each an `Answer`.

        ValueError for a model whose context holds no digits: its numbers are no tokens.
        """
        if not self.model.config.context.writes:
            lacks = f"{self.model.config.context} has no tokens for the digits of a number"
            raise ValueError(f"{lacks}, and this harness reads tokens: graft with digits or both")
        texts, ask = super().generate_until(requests, disable_tqdm), self.model.predict_number
        return [Answer(text, partial(ask, request.args[0])) for text, request in zip(texts, requests, strict=True)]


def score_answer(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """`process_results` of a task about a number, whose rows have a `value`: see `score_number`. Of any other model than ours,
    and of what a cache kept, the number in the text counts."""
    (answer,) = results
    law = rows.law_of(answer.ask()[0]) if isinstance(answer, Answer) else None
    return rows.score_number(doc["value"], answer, law)


def dataset(kind: str, **settings: Any) -> dict[str, Dataset]:
    """`custom_dataset` of a task: {"test": the rows of that name in `causalqwen_evals.rows`}; metadata are left out."""
    known = inspect.signature(getattr(rows, kind)).parameters
    return {"test": Dataset.from_list(getattr(rows, kind)(**{k: v for k, v in settings.items() if k in known}))}
