"""What somebody's words say about their voice (theory 3.17)."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from causalqwen.distributions import upcast
from causalqwen.losses import NO_TARGET
from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.reading import EncodedText, Observation, contexts_of, encode_text

WINDOW = 256  # tokens of a text that a voice is inferred from at a time, after their prompt
_AT_ONCE = 4

Context = tuple[EncodedText, int]
"""A text that is read at once, and its first token that speaks for somebody."""


def windows_of(model: GraftedModel, observations: Iterable[str | Observation]) -> list[list[Context]]:
    """Windows of each text, `WINDOW` tokens at a time, each after the text's prompt; those alone in which somebody chose a
    word."""
    found = []
    for item in observations:
        before = 0 if isinstance(item, str) else len(encode_text(model, item.prompt, prompt=True).ids)
        contexts = contexts_of(model, item, before + WINDOW)
        found.append([context for context in contexts if int(Words(model, [context]).count)])
    return found


class Words:
    """Contexts, and the words in them that somebody chose: ids, values [B, S]; targets [B, S - 1], NO_TARGET where somebody
    else spoke, a number or its digits stand, or nothing does: shorter ones are padded after their end, which is not read."""

    def __init__(self, model: GraftedModel, contexts: Sequence[Context]) -> None:
        targets = []
        for text, first in contexts:
            own = text.ids.masked_fill(text.digits | (text.ids == model.config.num_token_id), NO_TARGET)
            own[:first] = NO_TARGET
            targets.append(own[1:])
        self.ids, self.values = (
            pad_sequence([getattr(text, name) for text, _ in contexts], batch_first=True).to(model.device)
            for name in ("ids", "values")
        )
        self.targets = pad_sequence(targets, batch_first=True, padding_value=NO_TARGET).to(model.device)

    @property
    def count(self) -> Tensor:
        """Words of each row, int64 [B]."""
        return (self.targets != NO_TARGET).sum(1)


def log_likelihood(model: GraftedModel, words: Words, voice: Tensor | None) -> Tensor:
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
def log_p_of(model: GraftedModel, contexts: Sequence[Context], voice: Tensor | None) -> float:
    """`log_likelihood` of all contexts under a voice [L, H]."""
    if voice is not None:
        voice = voice.to(model.device)
    return float(sum(log_likelihood(model, Words(model, batch), voice).double().sum() for batch in _batches(contexts)))


def scores(model: GraftedModel, contexts: Sequence[Context], voice: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradient of `log_likelihood` by what is added after each layer, [n, L, H], and the count of their words [n], of some
    contexts at a time, under a voice [L, H]."""
    for batch in _batches(contexts):
        words = Words(model, batch)
        added = voice.to(model.device).expand(len(batch), *voice.shape).clone().requires_grad_(True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(log_likelihood(model, words, added).sum(), added)
        yield gradient, words.count


def _batches(contexts: Sequence[Context]) -> list[Sequence[Context]]:
    """A few side by side, of about one length."""
    order = sorted(contexts, key=lambda context: -len(context[0].ids))
    return [order[start : start + _AT_ONCE] for start in range(0, len(order), _AT_ONCE)]
