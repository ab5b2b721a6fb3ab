"""A number ends where it ends: no token may follow, or stand before it, with which the text is read as another number.

The reader itself (`find_numbers`) is asked, token by token, about the likeliest tokens only: a text without numbers costs
nothing, and what the grammar reads is stated in one place.
"""

import itertools
import math
import string
from collections.abc import Callable, Container, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from causalqwen.modeling.encoded import NumberText
from causalqwen.numbers import NumberSpan, find_numbers

_NEAR = 32  # characters after a number in which the reader may still make another one of it
_TOKENS = 48  # before a number, and after it, that are read with it
_FEW = 12  # before one after which many tokens are asked about
MANY = 128  # of the tokens that are sampled from after a number, the likeliest, as far as
_NATS = 12.0  # the likeliest of all has no more than e^12 times their probability
_UNFINISHED = "\ufffd"
_STAND_INS = (5.0, 12.5, 1234.5678)  # for a number whose value is not known yet: of few digits, and of many
_PAIRED = ("{0}a = 5 b{0}", "{0}x^2 + 5{0}", r"{0}\alpha = 5{0}")


class NumberEnds:
    """What the number rules of a `CausalQwenProcessor` say about the tokens that may follow a text.

    `closing`: tokens that may end a passage in which no number is read, however far before them it began (code).
    """

    def __init__(self, processor: Any) -> None:
        self.processor, self.number = processor, processor.num_token_id
        tokenizer = processor.tokenizer
        self.special = frozenset(tokenizer.all_special_ids)
        closing = {mark for mark in string.punctuation for text in _PAIRED if not self.read(text.format(mark))}
        named = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self._pieces: dict[int, str] = {}
        self.closing = frozenset(token for token, name in enumerate(named) if closing.intersection(name or ""))

    def read(self, text: str) -> list[NumberSpan] | None:
        """The numbers of a text; None where one is too large."""
        try:
            return find_numbers(text, self.processor.number_rules)
        except ValueError:
            return None

    def text(self, ids: Sequence[int], values: Sequence[float], forms: Sequence[str] = ()) -> str:
        """A text as it is shown. Where its digits are tokens, these alone say what it is."""
        if self.processor.context.writes:
            ids, values = [token for token in ids if token != self.number], ()
        return self.processor.decode(ids, values or [0.0] * len(ids), forms, skip_special_tokens=True)

    def fitting(self, ids: Sequence[int], values: Sequence[float], forms: Sequence[NumberText]) -> list[NumberText]:
        """How the numbers of a text are written: those of the forms that are read as their value there, none for the others."""
        places, kept = [place for place, token in enumerate(ids) if token == self.number], list[NumberText]()
        for place, form in zip(places, forms, strict=False):
            before = self.text(ids[:place], values[:place], kept) if form else ""
            is_read = form and (form.value != values[place] or self.processor.reads(before, form, form.value))
            kept.append(form if is_read else NumberText.of("", math.nan))
        return kept

    def piece(self, token: int) -> str:
        """What a token adds to a text; it holds U+FFFD where it is a part of a character."""
        if token not in self._pieces:
            decode = self.processor.tokenizer.decode
            self._pieces[token] = decode([*self._anchor, token])[len(decode(self._anchor)) :]
        return self._pieces[token]

    @cached_property
    def _anchor(self) -> list[int]:
        anchor: list[int] = self.processor.tokenizer("a", add_special_tokens=False)["input_ids"]
        return anchor


class TextEnd:
    """The end of a text, and the tokens that may follow it: those that leave its numbers what they are.

    place: where its last number began, None for none. forms: how one at a place is written, of no value for the shortest form.
    """

    def __init__(
        self,
        ends: NumberEnds,
        ids: Sequence[int],
        values: Sequence[float],
        place: int | None,
        forms: Callable[[int], NumberText] = lambda place: NumberText.of("", math.nan),
    ) -> None:
        self.ends, self.ids, self.values, self.place, self.forms = ends, ids, values, place, forms

    @cached_property
    def recent(self) -> "ReadText":
        """The last number and what follows it, with a little before."""
        few = ReadText(self, (self.place or 0) - _FEW)
        return few if few.after is not None else ReadText(self, (self.place or 0) - _TOKENS)

    @cached_property
    def last(self) -> "ReadText":
        """What `<NUM>` would follow."""
        return self.recent if self.is_near else ReadText(self, len(self.ids) - _TOKENS)

    @cached_property
    def whole(self) -> "ReadText":
        return ReadText(self, 0)

    @cached_property
    def is_near(self) -> bool:
        """Whether a number stands so close that any token may make another one of it."""
        if self.place is None or len(self.ids) > self.place + 2 * _TOKENS:
            return False
        after = self.recent.after
        return after is not None and "\n" not in after and (len(after) <= _NEAR or " " not in after)

    @cached_property
    def closing(self) -> frozenset[int]:
        """The tokens that may end what began before the last number."""
        closing = self.ends.closing
        is_open = self.place is not None and any(known in closing for known in self.ids[: self.place])
        return closing if is_open else frozenset()

    def allows(self, token: int, value: float | None = None) -> bool:
        """Whether a token may follow; of `<NUM>`, with its value, where that is known."""
        if token == self.ends.number:
            form = self.forms(len(self.ids))
            return all(self.last.allows_number(number, form) for number in (_STAND_INS if value is None else (value,)))
        if token in self.ends.special:
            return True
        if self.is_near and not self.recent.allows(token):
            return False
        return token not in self.closing or self.whole.allows(token)

    def may_bar(self, token: int) -> bool:
        """Whether `allows` has to be asked about a token."""
        return token == self.ends.number or self.is_near or token in self.closing

    def restrict(self, scores: Tensor, wanted: int, value: Callable[[], float | None]) -> bool:
        """Set tokens that may not follow to -inf in scores [V'], as many as a decision can meet; whether the best was one.

        wanted: how many of the best allowed tokens a decision may fall on. Close to a number all others are taken out then,
        unasked, unless it is one.
        """

        def allowed(token: int) -> bool:
            return self.allows(token, value() if token == self.ends.number else None)

        if wanted == 1:
            barred = False
            while self.may_bar(best := int(scores.max(-1).indices)) and not allowed(best) and scores[best] > -torch.inf:
                scores[best], barred = -torch.inf, True
            return barred
        likely = float(scores.max()) - _NATS
        if not self.is_near:
            few = [self.ends.number, *self.closing]
            asked = [token for token, score in zip(few, scores[few].tolist(), strict=True) if score >= likely]
            scores[[token for token in asked if not allowed(token)]] = -torch.inf
            return False
        found = scores.topk(min(2 * MANY, len(scores)))
        likeliest = found.indices[found.values >= likely].tolist()
        kept = list(itertools.islice(filter(allowed, likeliest), wanted))
        of_kept = scores[kept].clone()
        scores.fill_(-torch.inf)[kept] = of_kept
        return False


class ReadText:
    """A text from a place on as the reader reads it.

    after: what follows its last number; None where no number is read there, or another one than was predicted.
    """

    def __init__(self, end: TextEnd, start: int) -> None:
        self.ends, start = end.ends, max(0, start)
        self.ids, self.values = list(end.ids[start:]), list(end.values[start:])
        places = [place for place, token in enumerate(end.ids) if token == self.ends.number and place >= start]
        self.forms = self.ends.fitting(self.ids, self.values, [end.forms(place) for place in places])
        self.text = self.ends.text(self.ids, self.values, self.forms)
        self.kept: list[NumberSpan] = []
        self.after: str | None = None
        if end.place is None or end.place < start:
            return
        count = end.place - start
        before = len(self.ends.text(self.ids[:count], self.values[:count], self.forms))
        spans = self.ends.read(self.text) or []
        which = next((which for which, span in enumerate(spans) if span.start >= before), None)
        if which is not None and spans[which].value == end.values[end.place]:
            self.kept, self.after = spans[: which + 1], self.text[spans[which].end :]

    def allows(self, token: int) -> bool:
        """Whether the numbers are the same with a token after them."""
        text, piece = self.text, self.ends.piece(token)
        if _UNFINISHED in text[-1:] + piece:
            return self._keeps(self.ends.text([*self.ids, token], [*self.values, 0.0], self.forms))
        return self._keeps(text + piece)

    def allows_number(self, value: float, form: NumberText) -> bool:
        """Whether a number is read after the text with this value, and those before it as they are."""
        processor = self.ends.processor
        if form.value == value and processor.reads(self.text, form, value):
            text = self.text + form
        elif processor.context.writes:
            tokens = processor.tokens_of(self.ids, value)
            text = self.ends.text([*self.ids, *tokens], [*self.values, *[0.0] * len(tokens)])
        else:
            text = self.text + processor.spaced_number(self.text, value)
        spans = self.ends.read(text)
        if not spans or spans[-1].value != value or spans[-1].end != len(text):
            return False
        start = spans[-1].start
        return start >= len(self.text) and not text[len(self.text) : start].strip(" ") and self._keeps(text)

    def _keeps(self, text: str) -> bool:
        spans = self.ends.read(text)
        return spans is not None and [span[:4] for span in spans[: len(self.kept)]] == [span[:4] for span in self.kept]


def keep_numbers(
    scores: Tensor,
    number: int,
    wanted: int,
    places: Container[int],
    end_of: Callable[[int], TextEnd | None],
    value_of: Callable[[int], float | None],
    again: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Scores [B, V'] with -inf for tokens that would make another number of one in the text, and for `<NUM>` where its number
    would not be read.

    number: `<NUM>`. wanted: how many of the best tokens a decision may fall on. places: rows whose text holds a number. end_of:
    the end of a row's text, None where its next token is not decided. value_of: of `<NUM>` in a row, None where it is not known
    yet. again: all scores, where those that lose were not asked for.
    """
    best = scores.max(-1).indices.tolist() if wanted == 1 else None
    kept, every = scores, None
    for row in range(len(scores)):
        if best is not None and best[row] != number and row not in places:
            continue
        end = end_of(row)
        if end is None or (best is not None and not end.may_bar(best[row])):
            continue
        kept = scores.clone() if kept is scores else kept
        value = partial(value_of, row)
        if end.restrict(kept[row], wanted, value) and again is not None:
            every = again() if every is None else every
            kept[row] = every[row].to(kept.dtype)
            end.restrict(kept[row], wanted, value)
    return kept
