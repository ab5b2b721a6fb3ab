"""Rows of a data file (JSON lines, CSV or Parquet), read as a stream and checked one by one.

    {"text": "Water boils at 373.15 K."}                       numbers stand inside
    {"prompt": "The boiling point of water is", "value": 373.15}
    {"messages": [{"role": "user", "content": "..."}, ...]}    rendered by the backbone's chat template
    {"question": "At how many kelvins?", "answer": 373.15}     or an answer in words, or a list of them, the first of which
                                                               is taught; "context" may stand before it

`"individual": "name"` beside them says whose row it is: rows of one individual share U's factor in training (theory 3.14).
`"class": "name"` says of which kind its numbers are: each class's intervals are recalibrated on its own rows, and each may
have an axis of its own (theory 3.8).
`"group": "name"` says which rows belong together: none of them are held out from the others.
Other fields of a row are kept and written back by `predict`. In CSV an empty cell is a field that is not there, and the
column `value` holds numbers.
"""

import csv
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from causalqwen.extras import extra
from causalqwen.files import suffix_of


class RowError(ValueError):
    """A row that cannot be used; the message names the file, the row and the field."""


@dataclass(frozen=True)
class Row:
    """One checked row. `place` names it in messages ("train.jsonl, row 3"); `fields` is what the file held."""

    kind: str  # "text", "prompt", "messages" or "question"
    place: str
    fields: dict[str, Any]

    @property
    def value(self) -> float | None:
        """The known value of a row that asks for a number, if it has one."""
        value = self.fields.get("answer" if self.kind == "question" else "value")
        return None if value is None or self.in_words else float(value)

    @property
    def in_words(self) -> list[str]:
        """A question's answers in words, the one that is taught first; none of a row that asks for a number."""
        answer = self.fields.get("answer") if self.kind == "question" else None
        return [answer] if isinstance(answer, str) else answer if isinstance(answer, list) else []

    @property
    def asks_number(self) -> bool:
        """Whether a number follows its text: a prompt, or a question whose answer is not in words."""
        return self.kind == "prompt" or (self.kind == "question" and not self.in_words)

    @property
    def individual(self) -> str | None:
        """Whose row it is, where the file says so."""
        return self._name("individual")

    @property
    def class_name(self) -> str | None:
        """The kind of its numbers, where the file says so."""
        return self._name("class")

    @property
    def group(self) -> str | None:
        """With which rows it is held out, where the file says so."""
        return self._name("group")

    def _name(self, field: str) -> str | None:
        name = self.fields.get(field)
        return None if name is None else str(name)

    def text(self, processor: Any) -> str:
        """The text of the row without the value that follows it."""
        if self.kind == "messages":
            return processor.apply_chat_template(self.fields["messages"], tokenize=False)
        if self.kind == "question":
            return self._question() if self.asks_number else f"{self._question()} {self.in_words[0]}"
        return self.fields[self.kind]

    def other_texts(self) -> list[str]:
        """The text of the row with each of the further answers that are right, in their order."""
        return [f"{self._question()} {answer}" for answer in self.in_words[1:]]

    def _question(self) -> str:
        context = self.fields.get("context")
        return f"{context + chr(10) if context else ''}Question: {self.fields['question']}\nAnswer:"

    def answers(self, processor: Any) -> list[tuple[str, str]] | None:
        """Where the answers lie: the text up to each, and through it; None for a row that is not made of them.

        Raises ValueError for messages in which the assistant says nothing, or whose turns do not follow one after the other.
        """
        if self.kind == "question":
            return None if self.asks_number else [(self._question(), self.text(processor))]
        if self.kind != "messages":
            return None
        messages, answers = self.fields["messages"], []
        whole = self.text(processor)
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                before = processor.apply_chat_template(messages[:place], tokenize=False, add_generation_prompt=True)
                through = processor.apply_chat_template(messages[: place + 1], tokenize=False)
                if not whole.startswith(through) or not through.startswith(before):
                    reason = (
                        "the chat template does not write turns one after the other, so that none can be told apart"
                    )
                    raise ValueError(reason)
                answers.append((before, through))
        if not answers:
            raise ValueError("the assistant says nothing here, and with assistant_only_loss nothing else is learned")
        return answers


Rows = Iterable[Row | dict[str, Any]]
"""Rows, or dictionaries of their fields, as a `datasets.Dataset` has them."""


def read_rows(path: str | os.PathLike, *, values_required: bool = False) -> list[Row]:
    """All rows of a file, as `stream_rows` reads them."""
    return list(stream_rows(path, values_required=values_required))


def stream_rows(path: str | os.PathLike, *, values_required: bool = False) -> Iterator[Row]:
    """The rows of a JSON lines, CSV (`.csv`) or Parquet (`.parquet`) file, one at a time; blank lines are skipped.

    Rows are counted from 1 as lines are, those of Parquet by themselves. The file's name is checked when it is called.
    values_required: refuse prompt rows without a value (training and evaluation need one).

    Raises FileNotFoundError, RowError for the first row that cannot be used or a file without rows, and ImportError for a
    Parquet file where pyarrow is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    if suffix_of(path) == ".parquet":
        arrow_for(path)  # a missing library is named now, not with the first row
    return _stream(path, values_required)


def _stream(path: Path, values_required: bool) -> Iterator[Row]:
    place = None
    readers = {".csv": _read_csv, ".parquet": _read_parquet}
    for place, fields in readers.get(suffix_of(path), _read_jsonl)(path):
        yield check_row(fields, place, values_required=values_required)
    if place is None:
        raise RowError(f"{path} holds no rows")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for place, line in _placed_lines(path):
        yield place, _fields_of(line, place)


def _read_csv(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, cells in enumerate(csv_rows(lines_of(file, path), path.name), start=1):
            place, fields = f"{path.name}, row {number}", dict[str, Any]((n, cell) for n, cell in cells.items() if cell)
            if "value" in fields:
                try:
                    fields["value"] = float(fields["value"])
                except ValueError:
                    raise RowError(f"{place}, field value: expected a number, found {fields['value'][:40]}") from None
            yield place, fields


def csv_rows(
    lines: Iterable[str], name: str, kind: type[ValueError] = RowError, delimiter: str = ","
) -> Iterator[dict[str, str]]:
    """The rows of a CSV by its header, blank lines skipped. An error of that kind names the file, and a row that has more or
    fewer cells than the header, or after which a quote stays open, or a column that is there twice."""
    reader, number = filter(None, csv.reader(lines, strict=True, delimiter=delimiter)), 0
    try:
        header = next(reader, [])
        if twice := [column for place, column in enumerate(header) if column in header[:place]]:
            raise kind(f"{name}: column {twice[0]!r} is there twice")
        for number, cells in enumerate(reader, start=1):
            if len(cells) != len(header):
                raise kind(f"{name}, row {number}: {len(cells)} cells, and the header has {len(header)}")
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise kind(f"{name}, after row {number}: {error}") from None


def lines_of(file: Iterator[str], path: Path) -> Iterator[str]:
    """The lines of an open text file; RowError that names the first that is no UTF-8."""
    try:
        yield from file
    except UnicodeDecodeError as error:
        with path.open("rb") as lines:  # a text file is decoded some lines ahead
            number = next(
                n for n, line in enumerate(lines, start=1) if line.decode("utf-8", "replace").encode() != line
            )
        raise RowError(f"{path.name}, line {number}: not UTF-8 text ({error.reason})") from None


def _placed_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a text file that are not blank, each after its place ("asked.jsonl, row 3")."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            if line.strip():
                yield f"{path.name}, row {number}", line


def values_of_lines(path: Path, kind: type[ValueError] = RowError) -> Iterator[tuple[str, Any]]:
    """The values of a JSON lines file, each with its place; blank lines are skipped. kind: of the error that tells of a line
    that is none."""
    for place, line in _placed_lines(path):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise kind(f"{place}: not JSON ({error})") from None
        yield place, value


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    arrow, number = arrow_for(path), 0
    try:
        with arrow.parquet.ParquetFile(path) as file:
            rows = (fields for batch in file.iter_batches(batch_size=1024) for fields in batch.to_pylist())
            for number, fields in enumerate(rows, start=1):
                yield f"{path.name}, row {number}", fields
    except (arrow.ArrowException, OSError) as error:
        raise RowError(f"{path.name}, after row {number}: {' '.join(str(error).split())}") from None


def arrow_for(path: Path) -> Any:
    """The library pyarrow, with its `parquet`. ImportError that names the file where it is not installed."""
    with extra("parquet", f"{path.name}, a Parquet file,"):
        import pyarrow.parquet
    return pyarrow


def parse_row(line: str, place: str, *, values_required: bool = False) -> Row:
    """One row from a line of JSON; RowError names `place` and the field."""
    return check_row(_fields_of(line, place), place, values_required=values_required)


def _fields_of(line: str, place: str) -> Any:
    def refuse(constant: str) -> None:
        raise RowError(f"{place}: {constant} is not a finite number")

    try:
        return json.loads(line, parse_constant=refuse)
    except RowError:
        raise
    except json.JSONDecodeError as error:
        raise RowError(f"{place}: not JSON ({error.msg.removesuffix(' at')} at character {error.pos})") from None
    except ValueError:  # Python refuses integers of thousands of digits
        raise RowError(f"{place}: it holds a number that is too large for float64") from None
    except RecursionError:
        raise RowError(f"{place}: it is nested too deeply") from None


def check_row(fields: Any, place: str, *, values_required: bool = False) -> Row:
    """The row that these fields are; RowError names `place` and the field. A field that is None is not there."""
    if not isinstance(fields, dict):
        raise RowError(f'{place}: expected an object such as {{"text": ...}}, found {type(fields).__name__}')
    fields = {name: _plain(cell, name) for name, cell in fields.items()}
    kinds = [kind for kind in ("text", "prompt", "messages", "question") if fields.get(kind) is not None]
    if len(kinds) != 1:
        found = f"found {', '.join(kinds)}" if kinds else f"found {', '.join(fields) or 'no fields'}"
        raise RowError(f"{place}: expected exactly one of the fields text, prompt, messages and question; {found}")
    kind = kinds[0]
    if kind == "messages":
        _check_messages(fields["messages"], place)
    elif not isinstance(fields[kind], str):
        raise RowError(f"{place}, field {kind}: expected text, found {type(fields[kind]).__name__}")
    elif not fields[kind].strip():
        raise RowError(f"{place}, field {kind}: the text is empty")
    if kind == "question":
        _check_question(fields, place, values_required)
    _check_value(fields.get("value"), place, "value")
    for name in ("individual", "class", "group"):
        given = fields.get(name)
        if not isinstance(given, str | int | None) or isinstance(given, bool) or given == "":
            raise RowError(f"{place}, field {name}: expected a name, found {_shown(given)}")
    if kind == "prompt" and values_required and fields.get("value") is None:
        reason = f"a prompt needs the value that follows it here; found {', '.join(fields)}"
        raise RowError(f"{place}, field value: {reason}")
    return Row(kind, place, fields)


def kept_beside(fields: dict[str, Any], made: Collection[str]) -> dict[str, Any]:
    """Fields as they stand beside others that are made: one that is called as these is `input_NAME`."""
    names = {name: name for name in fields}
    for name in names:
        while names[name] in made or (names[name] != name and names[name] in fields):
            names[name] = f"input_{names[name]}"
    return {names[name]: cell for name, cell in fields.items()}


def checked_rows(rows: Rows) -> Iterator[Row]:
    """Rows as they are, and dictionaries of fields (a `datasets.Dataset`, a list) as rows, counted from 1; RowError for one
    that cannot be used."""
    for number, row in enumerate(rows, start=1):
        yield row if isinstance(row, Row) else check_row(row, f"row {number}")


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:40]


def _plain(cell: Any, name: str) -> Any:
    """A number of numpy as Python has it, and a decimal one that is learned."""
    if isinstance(cell, Decimal) and name in ("value", "answer"):
        return math.nan if cell.is_nan() else float(cell)
    return cell.item() if isinstance(cell, np.number) else cell


def _check_question(fields: dict[str, Any], place: str, answer_required: bool) -> None:
    if not isinstance(fields.get("context"), str | None):
        raise RowError(f"{place}, field context: expected text, found {_shown(fields['context'])}")
    answer = fields.get("answer")
    if answer is None and answer_required:
        raise RowError(f"{place}, field answer: a question needs its answer here")
    if isinstance(answer, list):
        _check_answers(answer, place)
    elif isinstance(answer, str):
        if not answer.strip():
            raise RowError(f"{place}, field answer: the text is empty")
    else:
        _check_value(answer, place, "answer")


def _check_answers(answers: list[Any], place: str) -> None:
    if not answers:
        raise RowError(f"{place}, field answer: a list of answers needs one at least")
    seen = set()
    for index, answer in enumerate(answers):
        if not isinstance(answer, str):
            raise RowError(f"{place}, field answer[{index}]: expected text, found {_shown(answer)}")
        if not answer.strip():
            raise RowError(f"{place}, field answer[{index}]: the text is empty")
        if answer.strip() in seen:
            raise RowError(f"{place}, field answer[{index}]: {_shown(answer)} stands there already")
        seen.add(answer.strip())


def _check_value(value: Any, place: str, name: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"{place}, field {name}: expected a number, found {_shown(value)}")
    if value != value:
        raise RowError(f"{place}, field {name}: NaN is not a finite number")
    if abs(value) > sys.float_info.max:
        raise RowError(f"{place}, field {name}: the number is too large for float64")


def _check_messages(messages: Any, place: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise RowError(f"{place}, field messages: expected a list of messages with role and content")
    for index, message in enumerate(messages):
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise RowError(f"{place}, field messages[{index}]: expected text under role and content")
