"""From rows to tokens, values and batches."""

import json
import math
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from causalqwen.data.rows import Row, RowError, Rows, checked_rows
from causalqwen.losses import IGNORE_INDEX, NO_TARGET
from causalqwen.modeling import CausalQwenProcessor


@dataclass(frozen=True)
class Example:
    """A row as the model reads it: ids and values of one length, and whose they are, if anybody's."""

    input_ids: list[int]
    numeric_values: list[float]
    individual: str | None = None
    value_from: int = 0  # the first place whose value is learned and scored; what stands before it is only read
    learned: list[bool] | None = (
        None  # which tokens are labels, the first, which nothing predicts, left aside; None for all
    )
    also_right: tuple[tuple[int, int], ...] | None = (
        None  # (place, token), ascending: as right as the token at that place
    )
    class_name: str | None = None  # of which kind its numbers are, where the row says so
    group: str | None = None  # rows of one are held out together

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def positions(self) -> int:
        """How many tokens are labels."""
        return len(self) - 1 if self.learned is None else sum(self.learned[1:])

    @property
    def numeric_labels(self) -> list[float]:
        """The values that are learned and scored, NaN where one is only read."""
        values = [math.nan] * self.value_from + self.numeric_values[self.value_from :]
        if self.learned is None:
            return values
        return [value if learned else math.nan for value, learned in zip(values, self.learned, strict=True)]


def encode_rows(
    rows: Rows, processor: CausalQwenProcessor, max_length: int | None = None, *, assistant_only: bool = False
) -> list[Example]:
    """Examples of rows, or of dictionaries of their fields (`checked_rows`), in their order. A prompt row becomes its prompt
    followed by `<NUM>` with its value, and so does a question with a number for its answer; numbers in the prompt are read, not
    learned. Of a question with an answer in words, only the answer is learned; of several answers the first, and where another
    parts from it, that one's token is right too. Digits in the context (`modeling.context`) are read, not learned.

    assistant_only: of messages, learn only what the assistant says (transformers' `assistant_only_loss`).

    Raises RowError for a number in a text that float64 cannot hold, a text without tokens, one longer than `max_length` tokens,
    a further answer that parts from the first at a number of its own, or (`assistant_only`) messages without the assistant, or
    a chat template that renders a turn otherwise once others follow it.
    """
    examples = []
    for row in checked_rows(rows):
        try:
            encoded = processor(row.text(processor), prompt=row.asks_number)
            learned = _learned(row, encoded["input_ids"], processor, assistant_only)
            also_right = _also_right(row, encoded, learned, processor)
        except ValueError as error:
            raise RowError(f"{row.place}, field {row.kind}: {error}") from None
        ids, values, digits = list(encoded["input_ids"]), list(encoded["numeric_values"]), encoded.digits[0]
        if any(digits):  # after a `<NUM>`, which has been learned as a value already
            learned = [label and not digit for label, digit in zip(learned or [True] * len(ids), digits, strict=True)]
        value_from = len(ids) if row.asks_number else 0
        if row.asks_number and row.value is not None:
            ids.append(processor.num_token_id)
            values.append(row.value)
            learned = learned and [*learned, True]
        if not ids:
            raise RowError(f"{row.place}, field {row.kind}: the text has no tokens")
        if max_length is not None and len(ids) > max_length:
            raise RowError(f"{row.place}: {len(ids)} tokens, but the context of this model holds {max_length}")
        examples.append(
            Example(ids, values, row.individual, value_from, learned, also_right, row.class_name, row.group)
        )
    return examples


def _learned(row: Row, ids: Sequence[int], processor: CausalQwenProcessor, assistant_only: bool) -> list[bool] | None:
    """Which of the row's tokens are answers, where only answers are learned."""
    spans = row.answers(processor) if row.kind == "question" or assistant_only else None
    if spans is None:
        return None
    learned = [False] * len(ids)
    for before, through in spans:
        first, last = (_shared(ids, processor(text)["input_ids"]) for text in (before, through))
        learned[first:last] = [True] * (last - first)
    return learned


def _shared(ids: Sequence[Any], others: Sequence[Any]) -> int:
    """How many tokens two texts have in common from the start."""
    parted = (place for place, (left, right) in enumerate(zip(ids, others, strict=False)) if left != right)
    return next(parted, min(len(ids), len(others)))


def _also_right(
    row: Row, taught: Mapping[str, Any], learned: list[bool] | None, processor: CausalQwenProcessor
) -> tuple[tuple[int, int], ...] | None:
    """Where each further answer parts from the taught one, and its token there: the children of the taught answer's path in
    the prefix tree of all answers. One that is the start of another has no token there."""
    children = set()
    for index, text in enumerate(row.other_texts(), start=1):
        other = processor(text)
        path, other_path = (list(zip(of["input_ids"], of["numeric_values"], strict=True)) for of in (taught, other))
        place = _shared(path, other_path)
        if place == min(len(path), len(other_path)):
            continue
        token, _ = other_path[place]
        if token == processor.num_token_id:
            raise ValueError(f"answer[{index}] parts from answer[0] at a number; another answer has words there")
        if not learned[place]:
            raise ValueError(f"answer[{index}] changes the tokens of the question, which are only read")
        children.add((place, token))
    return tuple(sorted(children)) or None


class EncodedRows(Sequence[Example]):
    """The examples of `encode_rows`, in order, kept on disk: for rows that do not fit into memory.

    They lie as JSON, memory-mapped, in an unnamed temporary file (in TMPDIR), which is gone with the process; in memory are 8
    bytes a row. Raises as `encode_rows` does, and RowError for rows without any.
    """

    def __init__(
        self, rows: Rows, processor: CausalQwenProcessor, max_length: int | None = None, *, assistant_only: bool = False
    ) -> None:
        self._ends, self._classes = array("q", [0]), dict[str | None, None]()
        with tempfile.TemporaryFile() as file:
            for row in checked_rows(rows):
                (example,) = encode_rows([row], processor, max_length, assistant_only=assistant_only)
                self._ends.append(self._ends[-1] + file.write(json.dumps(vars(example)).encode()))
                self._classes[example.class_name] = None
            if len(self) == 0:
                raise RowError("there are no rows to encode")
            file.flush()
            self._bytes = np.memmap(file, np.uint8, mode="r")

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def class_names(self) -> list[str]:
        """All that rows name, in the order in which they first did."""
        return [name for name in self._classes if name is not None]

    def __getitem__(self, index: Any) -> Any:
        """The example at `index`, one at a time."""
        place = range(len(self))[index]
        fields = json.loads(self._bytes[self._ends[place] : self._ends[place + 1]].tobytes())
        also_right = fields["also_right"] and tuple(map(tuple, fields["also_right"]))
        return Example(**fields | {"also_right": also_right})


def most_also_right(examples: Iterable[Example]) -> int:
    """The most further right tokens that one place of these examples has."""
    return max((max(Counter(at for at, _ in e.also_right).values()) for e in examples if e.also_right), default=0)


def number_classes(examples: Iterable[Example], num_token_id: int) -> list[str | None]:
    """The class of every number that is learned and scored, in the order of the examples."""
    # The first token is never predicted.
    return [
        example.class_name
        for example in examples
        for token, value in zip(example.input_ids[1:], example.numeric_labels[1:], strict=True)
        if token == num_token_id and math.isfinite(value)
    ]


def class_names(examples: Sequence[Example]) -> set[str]:
    """The classes that examples name, without decoding those on disk."""
    if isinstance(examples, EncodedRows):
        return set(examples.class_names)
    return {example.class_name for example in examples if example.class_name is not None}


def collate(examples: Sequence[Example], pad_token_id: int) -> dict[str, Tensor]:
    """A batch padded on the right: input_ids, attention_mask, numeric_values, labels, numeric_labels [B, S].

    Every token is a label but the first, which nothing predicts, padding, and what is only read. Where some row has further
    right tokens, `also_right` [B, S, R] holds them, `NO_TARGET` where there are fewer.
    """

    def padded(rows: Iterable[Sequence[Any]], padding: float, dtype: torch.dtype) -> Tensor:
        parts = [torch.tensor(row, dtype=dtype) for row in rows]
        return pad_sequence(parts, batch_first=True, padding_value=padding)

    input_ids = padded((example.input_ids for example in examples), pad_token_id, torch.int64)
    learned = padded((example.learned or [True] * len(example) for example in examples), False, torch.bool)
    labels = input_ids.masked_fill(~learned, IGNORE_INDEX)
    labels[:, 0] = IGNORE_INDEX
    batch = {
        "input_ids": input_ids,
        "attention_mask": padded(([1] * len(example) for example in examples), 0, torch.int64),
        "numeric_values": padded((example.numeric_values for example in examples), 0.0, torch.float64),
        "labels": labels,
        "numeric_labels": padded((example.numeric_labels for example in examples), 0.0, torch.float64),
    }
    if most := most_also_right(examples):
        batch["also_right"] = torch.full((*input_ids.shape, most), NO_TARGET)
        for row, example in enumerate(examples):
            counts = Counter[int]()
            for at, token in example.also_right or ():
                batch["also_right"][row, at, counts[at]] = token
                counts[at] += 1
    return batch
