"""What somebody's words say about their voice (theory 3.17)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from causalqwen.core import Chain
from causalqwen.distributions import upcast
from causalqwen.losses import NO_TARGET
from causalqwen.modeling.reading import EncodedText

if TYPE_CHECKING:
    from causalqwen.modeling.model import CausalQwenForCausalLM

WINDOW = 256
"""Tokens of a text that a voice is heard by at a time."""
_AT_ONCE = 4


class Words:
    """Contexts of one length S, and the words in them that somebody chose: ids, values [B, S]; targets [B, S - 1], NO_TARGET
    where somebody else spoke, a number stands, or its digits follow."""

    def __init__(self, model: "CausalQwenForCausalLM", contexts: Sequence[tuple[EncodedText, int]]) -> None:
        self.ids, self.values, digits = (
            torch.stack(column).to(model.device) for column in zip(*(text for text, _ in contexts), strict=True)
        )
        self.targets = self.ids[:, 1:].masked_fill(digits[:, 1:], NO_TARGET)
        self.targets.masked_fill_(self.targets == model.config.num_token_id, NO_TARGET)
        for row, (_, first) in zip(self.targets, contexts, strict=True):
            row[: first - 1] = NO_TARGET

    @property
    def count(self) -> Tensor:
        """Of each row, int64 [B]."""
        return (self.targets != NO_TARGET).sum(1)


def log_likelihood(model: "CausalQwenForCausalLM", words: Words, voice: Tensor | None) -> Tensor:
    """sum log softmax(loc_S)[y] over the words of each row, under a voice [L, H] or [B, L, H]: [B], with gradients to it."""
    features = model.features(words.ids, numeric_values=words.values, voice=voice).last_hidden_state[:, :-1]
    chain = Chain(model, features)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        scores = upcast(chain.words(chain.loc))
    in_use = model.action.rest_in_use
    scores = scores if in_use is None else scores.masked_fill(~in_use, -torch.inf)
    lost = F.cross_entropy(scores.flatten(0, 1), words.targets.flatten(), ignore_index=NO_TARGET, reduction="none")
    return -lost.view_as(words.targets).sum(1)


@torch.no_grad()
def told(model: "CausalQwenForCausalLM", contexts: Sequence[tuple[EncodedText, int]], voice: Tensor | None) -> float:
    """`log_likelihood` of all contexts under a voice [L, H]."""
    if voice is not None:
        voice = voice.to(model.device)
    return float(sum(log_likelihood(model, Words(model, batch), voice).double().sum() for batch in _batches(contexts)))


def score(
    model: "CausalQwenForCausalLM", contexts: Sequence[tuple[EncodedText, int]], voice: Tensor
) -> tuple[Tensor, Tensor]:
    """Of each context, under a voice [L, H]: the gradient of `log_likelihood` by what is added behind each layer, [n, L, H],
    and the count of its words [n]. Contexts of one length that stand side by side are read together."""
    gradients, counts = [], []
    for batch in _batches(contexts):
        words = Words(model, batch)
        added = voice.to(model.device).expand(len(batch), *voice.shape).clone().requires_grad_(True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(log_likelihood(model, words, added).sum(), added)
        gradients.append(gradient)
        counts.append(words.count)
    return torch.cat(gradients), torch.cat(counts)


def _batches(contexts: Sequence[tuple[EncodedText, int]]) -> list[list[tuple[EncodedText, int]]]:
    batches: list[list[tuple[EncodedText, int]]] = []
    for context in contexts:
        last = batches[-1] if batches else []
        if last and len(last) < _AT_ONCE and len(last[0][0].ids) == len(context[0].ids):
            last.append(context)
        else:
            batches.append([context])
    return batches
