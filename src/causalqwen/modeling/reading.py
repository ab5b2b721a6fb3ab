"""Observed texts as a grafted model reads them, and what they say about an individual (theory 3.12)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causalqwen.distributions import upcast
from causalqwen.individuals.evidence import TokenEvidence, ValueEvidence
from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.encoded import read_as_prompt


@dataclass(frozen=True)
class Observation:
    """A text that somebody wrote, after a prompt that somebody else did ("" for none): only `text` speaks for them."""

    text: str
    prompt: str = ""


class EncodedText(NamedTuple):
    """A text as the model reads it: ids int64 [L], values float64 [L] (0 off `<NUM>`), digits bool [L].

    digits: the tokens after a `<NUM>` that write its value (none where `<NUM>` stands for a number alone). They are read, but
    no individual chooses them.
    """

    ids: Tensor
    values: Tensor
    digits: Tensor

    @classmethod
    def of(cls, ids: Any, values: Any, digits: Any) -> "EncodedText":
        rest = torch.tensor(values, dtype=torch.float64), torch.tensor(digits, dtype=torch.bool)
        return cls(torch.tensor(ids, dtype=torch.int64), *rest)

    def part(self, places: slice | Tensor) -> "EncodedText":
        return EncodedText(*(column[places] for column in self))

    def digits_of(self, place: int) -> list[int]:
        """The tokens that write the number at `place`."""
        end = place + 1 + int(self.digits[place + 1 :].long().cumprod(0).sum())
        return list(self.ids[place + 1 : end].tolist())

    def then(self, other: "EncodedText") -> "EncodedText":
        return EncodedText(*(torch.cat(pair) for pair in zip(self, other, strict=True)))


@dataclass
class Reading:
    """Observed tokens: features [N, H] of what comes before each, the tokens themselves int64 [N], values float64 [N]."""

    features: Tensor
    targets: Tensor
    values: Tensor

    def __getitem__(self, places: slice) -> "Reading":
        return Reading(self.features[places], self.targets[places], self.values[places])

    @classmethod
    def all_of(cls, parts: "Sequence[Reading]") -> "Reading":
        columns = zip(*((part.features, part.targets, part.values) for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))

    @classmethod
    def nothing(cls, model: GraftedModel) -> "Reading":
        none = torch.zeros(0, device=model.device)
        width = model.config.hidden_size + sum((model.config.value_kernel or {"blocks": []})["blocks"])
        features = torch.zeros(0, width, dtype=model.dtype, device=model.device)
        return cls(features, none.long(), none.double())


NOTHING_OBSERVED = (
    "the observations hold no token that something comes before: nothing can be learned; give a text of two words or more, or "
    "what came before it as its prompt"
)
CHUNK = 512  # tokens of a long text that are read at a time


def contexts_of(model: GraftedModel, observations: Any, chunk: int = CHUNK) -> list[tuple[EncodedText, int]]:
    """Everything observed, `chunk` tokens at a time, each context with the index of the first token that speaks for them."""
    given = [observations] if isinstance(observations, str | Observation) else list(observations)
    limit = model.config.context_length or chunk
    contexts = []
    for item in given:
        observation = Observation(item) if isinstance(item, str) else item
        prompt, text = encode_text(model, observation.prompt, prompt=True), encode_text(model, observation.text)
        length = len(prompt.ids)
        if length >= limit - 1:
            raise ValueError(f"the prompt has {length} tokens, but the context of this model holds {limit}")
        room = max(min(chunk, limit) - length, 2)
        for start in range(0, len(text.ids), room):
            first = max(length, 1)  # nothing predicts the first token of all
            contexts.append((prompt.then(text.part(slice(start, start + room))), first))
    return [(context, first) for context, first in contexts if not bool(context.digits[first:].all())]


def encode_text(model: GraftedModel, text: str, *, prompt: bool = False) -> EncodedText:
    """A text without special tokens; digits are words until values are trained."""
    if not text:
        return EncodedText.of([], [], [])
    if model.reads_numbers:
        encoding = model.processor(text, prompt=prompt, add_special_tokens=False)
        if model.config.num_token_id in encoding["input_ids"]:
            model.config.require("a text with numbers that somebody said, or that a world holds,")
        return EncodedText.of(encoding["input_ids"], encoding["numeric_values"], encoding.digits[0])
    text = read_as_prompt(text) if prompt else text
    ids = model.processor.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return EncodedText.of(ids, [0.0] * len(ids), [False] * len(ids))


def read_contexts(model: GraftedModel, contexts: list[tuple[EncodedText, int]], voice: Tensor | None = None) -> Reading:
    """Everything observed as the backbone reads it. voice: whose, [L, H]. ValueError where nothing comes before any token."""
    if not contexts:
        raise ValueError(NOTHING_OBSERVED)
    return Reading.all_of(read_each(model, contexts, voice))


def read_each(
    model: GraftedModel, contexts: list[tuple[EncodedText, int]], voice: Tensor | None = None
) -> list[Reading]:
    """Each context as the backbone reads it; contexts that differ in nothing but their last token are read once."""
    columns: list[Reading] = []
    known: dict[tuple, Tensor] = {}  # the last token is never read: repeated measures share all before it
    was_training = model.training
    model.eval()
    for context, first in contexts:
        before = (first, *context.ids[:-1].tolist(), *context.values[:-1].tolist())
        ids, values, digits = (column.to(model.device) for column in context)
        if before not in known:
            given = {"numeric_values": values[None, :-1], "voice": voice}
            hidden = model.features(ids[None, :-1], **given).last_hidden_state[0]
            known[before] = hidden[first - 1 :]
        chosen = ~digits[first:]
        if model.config.context.hides:  # of two numbers that share a token the second follows from nothing that is seen
            chosen &= ids[first - 1 : -1] != model.config.num_token_id
        columns.append(Reading(known[before][chosen], ids[first:][chosen], values[first:][chosen]))
    model.train(was_training)
    return columns


def token_evidence(model: GraftedModel, read: Reading, likelihood: str = "softmax") -> TokenEvidence:
    """The words among what was read."""
    action, words = model.action, read.targets != model.config.num_token_id
    chain = Chain(model, read.features[words])
    settings: dict[str, Any] = {}
    if likelihood == "ovr":
        model.config.require("the likelihood 'ovr' of words")
        settings = {"known": lambda part: (chain[part].known(), 0.0), "thresholds": chain.threshold.squeeze(-1)}
    weight, bias = chain.words.weight, chain.words.bias
    of_rows = weight, None if bias is None else upcast(bias), action.rest_mask, action.law
    return TokenEvidence(
        upcast(chain.loc_U), upcast(chain.scale_U), read.targets[words], *of_rows, likelihood, **settings
    )


def value_evidence(model: GraftedModel, read: Reading) -> ValueEvidence:
    """The numbers among what was read; none before values are trained."""
    numbers = (read.targets == model.config.num_token_id) & model.reads_numbers
    chain, values = Chain(model, read.features[numbers]), read.values[numbers]
    if len(values):
        values = model.value_transform.forward(values)
    row, bias = (column[0].double() for column in model.action.value_linear)
    loc, scale = chain.read_by_values()
    reach, left = chain.value_reach(scale)[0], chain.value_loadings()[1]
    return ValueEvidence(loc, reach, values, row, bias, left, model.action.value_law)
