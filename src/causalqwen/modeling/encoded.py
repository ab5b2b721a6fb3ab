"""What the processor gives and takes: tokens with the values, and the written forms, of the numbers among them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import BatchEncoding

from causalqwen.numbers import format_number


def read_as_prompt(text: str) -> str:
    """A prompt without one space at its end, which the next word or `<NUM>` brings itself, unless that is all there is."""
    return text[:-1] if text.endswith(" ") and len(text) > 1 else text


class NumberText(str):
    """A number as it stands in a text, with the space that `<NUM>` absorbed, and the value that was read there."""

    value: float

    @classmethod
    def of(cls, text: str, value: float) -> "NumberText":
        made = cls(text)
        made.value = value
        return made


class NumericEncoding(BatchEncoding):
    """transformers' `BatchEncoding`, and how numbers were written: `processor.decode` gives the very text back; a value that
    was changed since is written anew.

    number_texts: of each row, its numbers as they stand there, left to right. digits: of each row, which tokens are digits
    after a `<NUM>`: they are read, not predicted.
    """

    number_texts: list[list[NumberText]]
    digits: list[list[bool]]

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"number_texts": self.number_texts, "digits": self.digits}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.number_texts, self.digits = state["number_texts"], state["digits"]


class TokenizedText(tuple[list[str], list[float]]):
    """Tokens and values of a text as the model reads it; printed as a table.

    tokens: `<NUM>` for a number. values: 0.0 off `<NUM>`. kinds, units: as of `NumberSpan`, "" off `<NUM>`.
    """

    kinds: list[str]
    units: list[str]

    def __str__(self) -> str:
        return "\n".join(
            f"{token:<16}{format_number(value) if kind else '':<16}{kind:<12}{unit}".rstrip()
            for token, value, kind, unit in zip(*self, self.kinds, self.units, strict=True)
        )


def announced(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, float]], num_token_id: int
) -> list[tuple[int, int | None, bool]]:
    """Plain ids with `<NUM>` before the first token of each span: id, index of the number on `<NUM>`, whether it is a digit."""
    tokens: list[tuple[int, int | None, bool]] = []
    number, end = 0, 0
    for token, (low, high) in zip(ids, offsets, strict=True):
        while number < len(spans) and high > spans[number][0]:
            tokens.append((num_token_id, number, False))
            end = spans[number][1]
            number += 1
        tokens.append((token, None, high > 0 and low < end))  # what a tokenizer adds itself lies at (0, 0)
    return tokens


def as_tensor(key: str, rows: list) -> Tensor:
    """Rows of one column, stacked; ValueError where their lengths differ."""
    if len({len(row) for row in rows}) > 1:
        raise ValueError("the texts have different numbers of tokens: pass padding=True to stack them")
    return torch.tensor(rows, dtype=torch.float64 if key == "numeric_values" else torch.int64)


def rows_of(encoding: "NumericEncoding") -> tuple[list, list, list[list[NumberText]], list[list[bool]]]:
    """Ids, values, written forms and digits of an encoding's rows, without their padding."""
    ids, mask, values = encoding["input_ids"], encoding["attention_mask"], encoding["numeric_values"]
    if isinstance(ids, Tensor):
        ids, mask, values = ids.tolist(), mask.tolist(), values.tolist()
    elif not ids or not isinstance(ids[0], list):
        ids, mask, values = [ids], [mask], [values]
    real = [[index for index, is_real in enumerate(row) if is_real] for row in mask]
    pick = [[[row[i] for i in keep] for row, keep in zip(rows, real, strict=True)] for rows in (ids, values)]
    return pick[0], pick[1], encoding.number_texts, encoding.digits
