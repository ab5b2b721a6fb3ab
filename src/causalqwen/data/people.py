"""People who are asked, and questions, as files hold them."""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from causalqwen.data.rows import Row, RowError, values_of_lines
from causalqwen.modeling.choices import Choice
from causalqwen.modeling.reading import Observation
from causalqwen.modeling.survey import Question

_SAID = {
    "text", "prompt", "value", "messages", "question", "answer", "context", "individual", "class", "options", "chosen",
}  # fmt: skip
_FIELDS = [field.name for field in dataclasses.fields(Question)]


def read_questions(path: str | os.PathLike) -> list[Question]:
    """The questions of a JSON lines file: {"prompt": ..., "name": ..., "options": ..., "max_new_tokens": ...}.

    Raises FileNotFoundError, or RowError for the first row that is no question, with file, row and field.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    questions = []
    for place, fields in values_of_lines(path):
        if not isinstance(fields, dict) or "prompt" not in fields:
            raise RowError(f'{place}, field prompt: expected an object such as {{"prompt": ...}}')
        if unknown := [field for field in fields if field not in _FIELDS]:
            raise RowError(f"{place}, field {unknown[0]}: a question has no such field; use {', '.join(_FIELDS)}")
        given = {field: value for field, value in fields.items() if value is not None}
        try:
            questions.append(Question(**given))
        except (TypeError, ValueError, OverflowError) as error:
            raise RowError(f"{place}, {error}") from None
    if not questions:
        raise RowError(f"{path} holds no questions")
    return questions


def people_of_rows(
    rows: Iterable[Row], processor: Any
) -> tuple[dict[str, list[Observation | Choice]], dict[str, dict[str, Any]], set[str]]:
    """What each individual of some rows said, the facts that their rows agree on, and of which kinds that was: "values",
    "words", "choices".

    A prompt with `value` says a number; with `options` and `chosen` it is a choice; a text, an answer in words and what an
    assistant says are words.

    Raises RowError for a row that names nobody, or in which they say nothing.
    """
    said: dict[str, list[Observation | Choice]] = {}
    facts: dict[str, dict[str, Any]] = {}
    kinds: set[str] = set()
    for row in rows:
        if row.individual is None:
            raise RowError(f"{row.place}, field individual: expected whose row it is")
        kind, observed = _observed(row, processor)
        kinds.add(kind)
        said.setdefault(row.individual, []).extend(observed)
        others = {
            field: _plain(value) for field, value in row.fields.items() if field not in _SAID and value is not None
        }
        known = facts.setdefault(row.individual, others)
        facts[row.individual] = {field: value for field, value in known.items() if others.get(field) == value}
    return said, facts, kinds


def _plain(value: Any) -> Any:
    """As JSON has it: a date of a Parquet file is a word."""
    return value if isinstance(value, str | int | float) else str(value)


def _observed(row: Row, processor: Any) -> tuple[str, list[Observation | Choice]]:
    if row.kind == "prompt" and row.fields.get("chosen") is not None:
        options = row.fields.get("options")
        if not isinstance(options, list | tuple):
            raise RowError(f"{row.place}, field options: expected a list of words, found {str(options)[:40]!r}")
        try:
            return "choices", [Choice(row.fields["prompt"], tuple(options), row.fields["chosen"])]
        except (TypeError, ValueError) as error:
            raise RowError(f"{row.place}, fields options and chosen: {error}") from None
    if row.asks_number:
        if row.value is None:
            raise RowError(f"{row.place}, field value: nothing was said here")
        return "values", [Observation(f" {row.value!r}", row.text(processor))]
    try:
        answers = row.answers(processor)
    except ValueError as error:
        raise RowError(f"{row.place}: {error}") from None
    if answers is None:
        return "words", [Observation(row.text(processor))]
    return "words", [Observation(through[len(before) :], before) for before, through in answers]
