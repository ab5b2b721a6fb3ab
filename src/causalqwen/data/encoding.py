"""From rows to tokens, values and batches."""

import math
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from causalqwen.data.rows import Row, RowError
from causalqwen.losses import IGNORE_INDEX
from causalqwen.modeling import CausalQwenProcessor


@dataclass(frozen=True)
class Example:
    """A row as the model reads it: ids and values of one length, and whose they are, if anybody's.

    value_from: the first place whose value is learned and scored; what stands before it is only read.
    learned: which tokens are labels, the first, which nothing predicts, left aside; None for all. The others are only read.
    """

    input_ids: list[int]
    numeric_values: list[float]
    individual: str | None = None
    value_from: int = 0
    learned: list[bool] | None = None

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
    rows: Sequence[Row],
    processor: CausalQwenProcessor,
    max_length: int | None = None,
    *,
    assistant_only: bool = False,
) -> list[Example]:
    """Examples of rows, in their order. A prompt row becomes its prompt followed by `<NUM>` with its value, and so does a
    question with a number for its answer; numbers in the prompt are read, not learned. Of a question with an answer in words,
    only the answer is learned. Digits in the context (`modeling.context`) are read, not learned.

    Args:
        assistant_only: of messages, learn only what the assistant says (transformers' `assistant_only_loss`).

    Raises:
        RowError: a number in a text that float64 cannot hold, a text without tokens, one longer than `max_length` tokens, or
            (`assistant_only`) messages without the assistant, or a chat template that renders a turn otherwise once others
            follow it.
    """
    examples = []
    for row in rows:
        try:
            encoded = processor(row.text(processor), prompt=row.asks_number)
            learned = _learned(row, encoded["input_ids"], processor, assistant_only)
            learned = _without_digits(learned, encoded.digits[0])
        except ValueError as error:
            raise RowError(f"{row.place}, field {row.kind}: {error}") from None
        ids, values = list(encoded["input_ids"]), list(encoded["numeric_values"])
        value_from = len(ids) if row.asks_number else 0
        if row.asks_number and row.value is not None:
            ids.append(processor.num_token_id)
            values.append(row.value)
            learned = learned and [*learned, True]
        if not ids:
            raise RowError(f"{row.place}, field {row.kind}: the text has no tokens")
        if max_length is not None and len(ids) > max_length:
            raise RowError(f"{row.place}: {len(ids)} tokens, but the context of this model holds {max_length}")
        examples.append(Example(ids, values, row.individual, value_from, learned))
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


def _without_digits(learned: list[bool] | None, digits: list[bool]) -> list[bool] | None:
    """The same without digits behind a `<NUM>`: it has been learned as a value already."""
    if not any(digits):
        return learned
    return [one and not digit for one, digit in zip(learned or [True] * len(digits), digits, strict=True)]


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts have in common from the start."""
    parted = (place for place, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other)
    return next(parted, min(len(ids), len(others)))


class EncodedRows(Sequence[Example]):
    """The examples of `encode_rows`, in order, kept on disk: for rows that do not fit into memory.

    Tokens and values lie memory-mapped in unnamed temporary files (in TMPDIR), which are gone with the process; in memory are
    17 bytes a row. Raises as `encode_rows` does, and RowError for rows without any.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        processor: CausalQwenProcessor,
        max_length: int | None = None,
        *,
        assistant_only: bool = False,
    ) -> None:
        self._offsets, self._value_from, self._owners = array("q", [0]), array("i"), array("i")
        self._whole = array("b")
        names: dict[str, int] = {}
        with (
            tempfile.TemporaryFile() as ids,
            tempfile.TemporaryFile() as values,
            tempfile.TemporaryFile() as learned,
        ):
            for row in rows:
                (example,) = encode_rows([row], processor, max_length, assistant_only=assistant_only)
                ids.write(np.array(example.input_ids, dtype=np.int32).tobytes())
                values.write(np.array(example.numeric_values, dtype=np.float64).tobytes())
                learned.write(np.array(example.learned or [True] * len(example), dtype=bool).tobytes())
                self._whole.append(example.learned is None)
                self._offsets.append(self._offsets[-1] + len(example))
                self._value_from.append(example.value_from)
                owner = example.individual
                self._owners.append(-1 if owner is None else names.setdefault(owner, len(names)))
            if len(self) == 0:
                raise RowError("there are no rows to encode")
            self._ids, self._values = _mapped(ids, np.int32), _mapped(values, np.float64)
            self._learned = _mapped(learned, np.bool_)
        self._names = list(names)

    def __len__(self) -> int:
        return len(self._value_from)

    def __getitem__(self, index: Any) -> Any:
        """The example at `index`, one at a time."""
        place = range(len(self))[index]
        part = slice(self._offsets[place], self._offsets[place + 1])
        owner = self._owners[place]
        name = None if owner < 0 else self._names[owner]
        learned = None if self._whole[place] else self._learned[part].tolist()
        return Example(self._ids[part].tolist(), self._values[part].tolist(), name, self._value_from[place], learned)


def _mapped(file: IO[bytes], dtype: type) -> np.ndarray:
    file.flush()
    return np.memmap(file, dtype, mode="r")


def collate(examples: Sequence[Example], pad_token_id: int) -> dict[str, Tensor]:
    """A batch padded on the right: input_ids, attention_mask, numeric_values, labels, numeric_labels [B, S].

    Every token is a label but the first, which nothing predicts, padding, and what is only read.
    """
    length = max(len(example) for example in examples)
    shape = (len(examples), length)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    numeric_values, numeric_labels = torch.zeros(2, *shape, dtype=torch.float64)
    for row, example in enumerate(examples):
        input_ids[row, : len(example)] = torch.tensor(example.input_ids)
        numeric_values[row, : len(example)] = torch.tensor(example.numeric_values, dtype=torch.float64)
        numeric_labels[row, : len(example)] = torch.tensor(example.numeric_labels, dtype=torch.float64)
        attention_mask[row, : len(example)] = 1
    labels = input_ids.masked_fill(attention_mask == 0, IGNORE_INDEX)
    for row, example in enumerate(examples):
        if example.learned is not None:
            labels[row, : len(example)].masked_fill_(~torch.tensor(example.learned), IGNORE_INDEX)
    labels[:, 0] = IGNORE_INDEX
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "numeric_values": numeric_values,
        "labels": labels,
        "numeric_labels": numeric_labels,
    }
