"""Observed texts as a grafted model reads them, and what they say about an individual (theory 3.12)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causalqwen.decoding import CausalDecoding
from causalqwen.distributions import upcast
from causalqwen.individuals import TokenEvidence, ValueEvidence
from causalqwen.modeling.action import ActionNetwork
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.processor import CausalQwenProcessor


@dataclass(frozen=True)
class Observation:
    """A text that somebody wrote, after a prompt that somebody else did ("" for none): only `text` speaks for them."""

    text: str
    prompt: str = ""


class EncodedText(NamedTuple):
    """A text as the model reads it: ids int64 [L], values float64 [L] (0 off `<NUM>`), digits bool [L].

    digits: the tokens behind a `<NUM>` that write its value (none where `<NUM>` stands for a number alone). They are read, but
    nobody chooses them.
    """

    ids: Tensor
    values: Tensor
    digits: Tensor

    @classmethod
    def of(cls, ids: Any, values: Any, digits: Any) -> "EncodedText":
        """From three lists."""
        kinds = torch.int64, torch.float64, torch.bool
        return cls(
            *(torch.tensor(column, dtype=dtype) for column, dtype in zip((ids, values, digits), kinds, strict=True))
        )

    def part(self, places: slice | Tensor) -> "EncodedText":
        """Some of its tokens."""
        return EncodedText(*(column[places] for column in self))

    def digits_of(self, place: int) -> list[int]:
        """The tokens that write the number at `place`."""
        end = place + 1 + int(self.digits[place + 1 :].long().cumprod(0).sum())
        return list(self.ids[place + 1 : end].tolist())

    def then(self, other: "EncodedText") -> "EncodedText":
        """This text and another behind it."""
        return EncodedText(*(torch.cat(pair) for pair in zip(self, other, strict=True)))


@dataclass
class Reading:
    """Observed tokens: features [N, H] of what comes before each, the tokens themselves int64 [N], values float64 [N]."""

    features: Tensor
    targets: Tensor
    values: Tensor

    def __getitem__(self, places: slice) -> "Reading":
        return Reading(self.features[places], self.targets[places], self.values[places])


class ReadingMixin:
    """`read` and the evidence in what was read."""

    config: CausalQwenConfig
    processor: CausalQwenProcessor
    action: ActionNetwork

    @property
    def reads_numbers(self) -> bool:
        """Whether numbers in a text are `<NUM>` to this model: once its values were trained; before, they are digits."""
        return self.config.value_range is not None

    def _contexts(self, observations: Any, chunk: int) -> list[tuple[EncodedText, int]]:
        """Everything observed, each context with the index of the first token that speaks for somebody."""
        given = [observations] if isinstance(observations, str | Observation) else list(observations)
        limit = getattr(self.config.text_config, "max_position_embeddings", None) or chunk
        contexts = []
        for one in given:
            observation = Observation(one) if isinstance(one, str) else one
            prompt, text = self.encode_text(observation.prompt, prompt=True), self.encode_text(observation.text)
            length = len(prompt.ids)
            if length >= limit - 1:
                raise ValueError(f"the prompt has {length} tokens, but the context of this model holds {limit}")
            room = max(min(chunk, limit) - length, 2)
            for start in range(0, len(text.ids), room):
                first = max(length, 1)  # nothing predicts the first token of all
                contexts.append((prompt.then(text.part(slice(start, start + room))), first))
        return [(context, first) for context, first in contexts if not bool(context.digits[first:].all())]

    def encode_text(self, text: str, *, prompt: bool = False) -> EncodedText:
        """A text without special tokens; digits are words until values are trained."""
        if not text:
            return EncodedText.of([], [], [])
        if self.reads_numbers:
            found = self.processor(text, prompt=prompt, add_special_tokens=False)
            if self.config.num_token_id in found["input_ids"]:
                self.config.require(
                    "a text with numbers that somebody said, or that a world holds,", copy_numbers=False
                )
            return EncodedText.of(found["input_ids"], found["numeric_values"], found.digits[0])
        text = text[:-1] if prompt and text.endswith(" ") else text
        ids = self.processor.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return EncodedText.of(ids, [0.0] * len(ids), [False] * len(ids))

    def read(self, contexts: list[tuple[EncodedText, int]]) -> Reading:
        """Everything observed as the backbone reads it, a context at a time: what somebody chose, and what came before it.

        Raises ValueError where nothing comes before any token.
        """
        if not contexts:
            raise ValueError("the observations hold no token that something comes before: nothing can be learned")
        columns: list[tuple[Tensor, ...]] = []
        known: dict[tuple, Tensor] = {}  # the last token is never read: repeated measures share all before it
        was_training = self.training
        self.eval()
        for context, first in contexts:
            before = (first, *context.ids[:-1].tolist(), *context.values[:-1].tolist())
            ids, values, digits = (column.to(self.device) for column in context)
            if before not in known:
                hidden = self.features(ids[None, :-1], numeric_values=values[None, :-1]).last_hidden_state[0]
                known[before] = hidden[first - 1 :]
            said = ~digits[first:]
            if (
                self.config.hides_numbers
            ):  # of two numbers that share a token the second follows from nothing that is seen
                said &= ids[first - 1 : -1] != self.config.num_token_id
            columns.append((known[before][said], ids[first:][said], values[first:][said]))
        self.train(was_training)
        return Reading(*(torch.cat(column) for column in zip(*columns, strict=True)))

    def _situated(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
        """loc_U, scale_U [N, C] and the gain of what is drawn [N, 1]."""
        loc, scale = self.abduction(features)
        return loc, scale, self.action.draw_gain(features, loc, self.vocabulary())

    def token_evidence(self, read: Reading, likelihood: str = "softmax") -> TokenEvidence:
        """The words among what was read."""
        action, rows = self.action, self.vocabulary()
        words = read.targets != self.config.num_token_id
        z, targets = read.features[words], read.targets[words]
        loc, scale, gain = self._situated(z)
        reader = self._readers(CausalDecoding())[0]
        settings: dict[str, Any] = {}
        if likelihood == "ovr":
            left = action.noise.expand_as(scale)
            if action.score_scale != "equal":
                raise ValueError("likelihood 'ovr' is there for the score scale 'equal'; use 'softmax'")
            settings = {
                "law": action.law,
                "scale": action.num_scale(left, rows),
                "thresholds": self.thresholds(z, loc, scale, rows).squeeze(-1),
                "slope": action.score_slope,
            }
        return TokenEvidence(
            upcast(loc),
            upcast(scale * gain),
            targets,
            rows.weight,
            None if rows.bias is None else upcast(rows.bias),
            action.rest_mask,
            reader,
            likelihood,
            **settings,
        )

    def value_evidence(self, read: Reading) -> ValueEvidence:
        """The numbers among what was read; none before values are trained."""
        numbers = (read.targets == self.config.num_token_id) & self.reads_numbers
        z = read.features[numbers]
        loc, scale = self.as_values_read(z, *self.abduction(z))
        left = self.value_loadings(loc, scale)[1]
        values = read.values[numbers]
        if len(values):
            values = self.value_transform.forward(values)
        reader = self._readers(CausalDecoding())[1]
        row, bias = (one[0].double() for one in self.action.value_linear)
        return ValueEvidence(loc, scale, values, row, bias, left, reader)

    def _score_rows(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """W [V', C], b and the rows in use, `<NUM>`'s row where it is; it takes part only once it was trained."""
        action, rows = self.action, self.vocabulary()
        weight, bias = upcast(rows.weight), None if rows.bias is None else upcast(rows.bias)
        if action.num_token_id is None:
            return weight, bias, action.vocabulary_mask
        bias = weight.new_zeros(len(weight)) if bias is None else bias.clone()
        if action.num_appended:
            weight = torch.cat([weight, upcast(rows.number_row())[None]])
            bias = torch.cat([bias, action.num_bias[None].to(bias.dtype)])
        else:
            weight = weight.clone()
            weight[action.num_token_id] = rows.number_row()
            bias[action.num_token_id] += action.num_bias
        return weight, bias, action.vocabulary_mask
