"""What transformers' decoding loops are given for a grafted model: processors, a log of values, drafts."""

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from causalqwen.decoding import ObservedNumber
from causalqwen.modeling.encoded import NumberText
from causalqwen.modeling.ends import NumberEnds, TextEnd, keep_numbers
from causalqwen.parts.copying import Candidates


class MaskFreeRows(LogitsProcessor):
    """-inf for rows of the vocabulary matrix that no token uses: no sampler and no beam ever takes one."""

    def __init__(self, vocabulary_mask: Tensor) -> None:
        self.vocabulary_mask = vocabulary_mask

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.vocabulary_mask.to(scores.device), -torch.inf)


class SamplerBesideNumber(LogitsProcessor):
    """Draws the token itself, so that a `<NUM>` column after the matrix does not disturb the backbone's own draws.

    torch.multinomial runs a race: with E_k standard exponential, token argmin_k E_k / p_k wins. Here it is run over the
    backbone's V columns alone, so that it consumes as much chance as theirs. Its winning time is Exp(1) whoever wins, and
    decides independently whether `<NUM>` is taken instead: P(NUM) = p_NUM, P(k) = (1 - p_NUM) p_k, as under the softmax.
    """

    def __init__(self) -> None:
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores.append(scores)
        tokens, of_number = scores[:, :-1], scores[:, -1]
        alone = (tokens == -torch.inf).all(-1)
        tokens = tokens.masked_fill(alone.unsqueeze(-1), 0.0)  # a race all the same: every row consumes as much chance
        probabilities = nn.functional.softmax(tokens, dim=-1)
        times = torch.empty_like(probabilities).exponential_(1)
        speed, winner = (probabilities / times).max(dim=-1)
        time, place = 1 / speed, winner.unsqueeze(-1)
        partition = (tokens.gather(-1, place) - probabilities.gather(-1, place).log()).squeeze(-1)
        num_prob = torch.sigmoid(of_number - partition)
        winner = torch.where(alone | (-torch.expm1(-time) < num_prob), tokens.shape[-1], winner)
        return torch.full_like(scores, -torch.inf).scatter_(-1, winner.unsqueeze(-1), 0.0)


class ValueLog:
    """The values that a decoding loop predicts, [B] each, by the place of their tokens; computed when they are asked for.

    Args:
        compute: the values that follow features [B, 1, H] of one position, whose indices are [B, 1].
        values: float64 [B, L], of the prompts; `start` is L. Later those of the text so far, [B, L'].
        at_once: compute every value as it comes, whether a number follows or not: none makes a step wait for the host then.
    """

    last: int = -1  # the place of the latest value
    follows: Tensor  # the features [B, 1, H] that it follows from
    positions: Tensor  # of what was read last, drafts too, among the tokens that are seen
    drafted: Tensor | None = None  # features [B, n, H] of that, while it is decided how far a draft is right
    numbers: Candidates | None = None  # those in the text so far, for a model that copies, as they are settled
    beams: int = 1  # so many rows in a row go on from one prompt, and may change places
    ids: Tensor | None = None
    readable: bool = True  # whether a value has an axis before a number stands there: not where classes' axes differ

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], values: Tensor, at_once: bool) -> None:
        self.compute, self.values, self.at_once = compute, values, at_once
        self.start = values.shape[1]
        self.kept: dict[int, Tensor | tuple[Tensor, Tensor]] = {}

    def offered(self, rows: slice = slice(None)) -> Candidates | None:
        """The numbers that the latest value of each of the rows may be a copy of."""
        return None if self.numbers is None else self.numbers.later()[rows]

    def append(self, place: int, features: Tensor, positions: Tensor) -> None:
        self.last, self.follows = place, features
        self.kept[place] = self.compute(features, positions) if self.at_once else (features, positions)

    def __getitem__(self, place: int) -> Tensor:
        kept = self.kept[place]
        if isinstance(kept, tuple):
            kept = self.kept[place] = self.compute(*kept)
        return kept

    def next_values(self, place: int) -> Tensor | None:
        """The values [B] that a token at `place`, which is not chosen yet, has if it is a number; None where none is known."""
        if place == self.last:
            return self[place]
        if self.drafted is None:
            return None
        at = self.drafted.shape[1] - 1 - (self.positions.shape[1] - place)
        return self.compute(self.drafted[:, at : at + 1], self.positions[:, place - 1 : place])

    def set(self, place: int, row: int, value: float) -> None:
        self.kept[place] = self[place].clone()
        self[place][row] = self.values[row, place] = value

    def follow_rows(self, input_ids: Tensor) -> None:
        """Beams change places between two steps: values follow the text, input_ids int64 [B, L], that a row goes on with."""
        if self.beams == 1:
            return
        before, self.ids = self.ids, input_ids.clone()
        if before is not None:
            rows = torch.arange(len(input_ids), device=input_ids.device) // self.beams
            same = (input_ids[:, None, : before.shape[1]] == before).all(-1) & (rows[:, None] == rows)
            self.values.copy_(self.values[same.int().argmax(-1).to(self.values.device)])

    def settle(self, place: int, is_number: Tensor, values: Tensor) -> None:
        """Write what was predicted for `place` into values [B, L], once its tokens are known: where one is a number."""
        if not (self.at_once or bool(is_number.any())):
            self.kept.pop(place, None)
            return
        if self.numbers is not None and place == self.last:
            self.numbers = self.numbers.with_number(self.follows[:, -1], self[place], is_number)
        values[:, place] = self[place]


def decided(scores: Tensor, tokens: dict[int, int]) -> Tensor:
    """Scores [B, V'] under which some rows can only go on with the tokens given for them."""
    if tokens:
        scores = scores.clone()
    for row, token in tokens.items():
        scores[row] = -torch.inf
        scores[row, token] = 0.0
    return scores


class WriteDigits(LogitsProcessor):
    """After each `<NUM>` that was chosen, or that ends a prompt, the tokens of its value, whatever was predicted.

    How much of a number is written is read from the text: beams may change places, and drafts be dropped. tokens_of: what
    writes a value after the ids of a row.
    """

    def __init__(
        self, num_token_id: int, log: ValueLog, tokens_of: Callable[[int, Sequence[int], float], list[int]]
    ) -> None:
        self.num_token_id, self.log, self.tokens_of = num_token_id, log, tokens_of
        self._known: dict[tuple[int, tuple[int, ...], float], list[int]] = {}
        self._longest = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return decided(scores, self.due(input_ids))

    def due(self, input_ids: Tensor) -> dict[int, int]:
        """The digits that must come next, of the rows that are within a number."""
        start, end = self.log.start - 1, self.log.values.shape[1]  # after the end are drafts, which hold no number
        numbers = (input_ids[:, start:end] == self.num_token_id).nonzero().tolist()
        due = {}
        for row, place in dict(numbers).items():  # the last of each row
            place += start
            written = input_ids.shape[1] - place - 1
            if 0 < self._longest <= written:  # all of them, whatever they are
                continue
            values = self.log[place] if place == self.log.last else self.log.values[:, place]
            key = row, tuple(input_ids[row, :place].tolist()), values[row].item()
            if key not in self._known:
                self._known[key] = self.tokens_of(*key)
                self._longest = max(self._longest, len(self._known[key]))
            if written < len(self._known[key]):
                due[row] = self._known[key][written]
        return due


class KeepNumbers(LogitsProcessor):
    """`keep_numbers` in a loop.

    Args:
        ends: what may follow a text; made where a number is near. writer: of digits, where they stand in the context. form_of:
            how a row's number after some ids is written, of no value for the shortest form. wanted, again: as there.
        ended: tokens after which nothing is decided any more.
    """

    def __init__(
        self,
        num_token_id: int,
        ends: Callable[[], NumberEnds],
        log: ValueLog,
        writer: WriteDigits | None,
        form_of: Callable[[int, Sequence[int]], NumberText],
        wanted: int,
        ended: Container[int],
        again: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.num_token_id, self.ends, self.log = num_token_id, ends, log
        self.writer, self.form_of, self.wanted, self.ended, self.again = writer, form_of, wanted, ended, again

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        numbers = (input_ids[:, : self.log.values.shape[1]] == self.num_token_id).nonzero().tolist()
        places = dict(numbers)  # the last of each row
        due = self.writer.due(input_ids) if self.writer is not None and places else {}

        def end_of(row: int) -> TextEnd | None:
            ids = input_ids[row].tolist()
            return None if row in due or ids[-1] in self.ended else self.end(row, ids, places.get(row))

        def value_of(row: int) -> float | None:
            values = self.log.next_values(input_ids.shape[1]) if self.log.readable else None
            return None if values is None else values[row].item()

        again = None if self.again is None else partial(self.again, input_ids)
        return keep_numbers(scores, self.num_token_id, self.wanted, places, end_of, value_of, again)

    def end(self, row: int, ids: list[int], place: int | None) -> TextEnd:
        values = [0.0] * len(ids)
        if place is not None:
            values[: place + 1] = self.log.values[row, : place + 1].tolist()
            if place == self.log.last:
                values[place] = self.log[place][row].item()
        return TextEnd(self.ends(), ids, values, place, lambda at: self.form_of(row, ids[:at]))


@dataclass(frozen=True)
class ForcedToken:
    """A token that an intervention sets after so many tokens of the answer, or as soon as it can.

    value: of a `<NUM>`. form: how it is written; None for the shortest form.
    """

    after: int
    token: int
    value: float | None = None
    form: ObservedNumber | None = None


class ForceTokens(LogitsProcessor):
    """Tokens in place of those that would come, one after the other; none breaks a number whose digits are being written, and
    no number stands where it would be read as another one. `generate` gives it its log, writer and keeper.

    places: of the tokens that were set, in the answer of each row, but for digits. forms: how numbers are written, by row and
    place in the text.
    """

    log: ValueLog
    keeper: KeepNumbers
    writer: WriteDigits | None = None

    def __init__(self, tokens: Sequence[ForcedToken]) -> None:
        self.tokens = tokens
        self.places: defaultdict[int, list[int]] = defaultdict(list)
        self.forms: dict[tuple[int, int], ObservedNumber] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows, place = input_ids.shape
        answer = place - self.log.start
        waiting = [row for row in range(rows) if any(token.after <= answer for token in self.left(row)[:1])]
        due = self.writer.due(input_ids) if waiting and self.writer is not None else {}
        now = {}
        for row in waiting:
            if row not in due and self._fits(row, input_ids[row].tolist()):
                forced = self._set(row, place)
                now[row] = forced.token
                if forced.value is not None:
                    self.log.set(place, row, forced.value)
        return decided(scores, now)

    def _fits(self, row: int, ids: list[int]) -> bool:
        """Whether the next token of a row, where it is a number, is read as its value there."""
        forced = self.left(row)[0]
        if forced.value is None:
            return True
        if forced.form is not None:
            self.forms[row, len(ids)] = forced.form
        numbers = [place for place, token in enumerate(ids) if token == forced.token]
        return self.keeper.end(row, ids, numbers[-1] if numbers else None).allows(forced.token, forced.value)

    def left(self, row: int) -> Sequence[ForcedToken]:
        """What was not set yet."""
        return self.tokens[len(self.places[row]) :]

    def _set(self, row: int, place: int) -> ForcedToken:
        """The next token of a row stands at `place` of the text."""
        forced = self.left(row)[0]
        self.places[row].append(place - self.log.start)
        if forced.form is not None:
            self.forms[row, place] = forced.form
        return forced

    def finish(self, row: int, ids: list[int], values: list[float]) -> None:
        """Add what a text broke off in at its full length: digits of its last number, and what was to be set by then."""
        start, length = self.log.start, len(ids)

        def write_digits() -> None:
            if self.writer is None or self.writer.num_token_id not in ids[start:]:
                return
            place = max(place for place in range(start, len(ids)) if ids[place] == self.writer.num_token_id)
            rest = self.writer.tokens_of(row, ids[:place], values[place])[len(ids) - place - 1 :]
            ids.extend(rest)
            values.extend([0.0] * len(rest))

        write_digits()
        while any(token.after < length - start for token in self.left(row)[:1]):
            forced = self._set(row, len(ids))
            ids.append(forced.token)
            values.append(forced.value or 0.0)
            write_digits()


class NumberFreeDrafts:
    """A candidate generator of transformers whose drafts end before a `<NUM>`: its value is not known in advance."""

    def __init__(self, generator: Any, num_token_id: int) -> None:
        self.generator, self.num_token_id = generator, num_token_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        drafted, logits = self.generator.get_candidates(input_ids, **kwargs)
        start = input_ids.shape[1]
        numbers = (drafted[0, start:] == self.num_token_id).nonzero()
        if len(numbers):
            length = int(numbers[0])
            drafted, logits = drafted[:, : start + length], None if logits is None else logits[:, :length]
        return drafted, logits
