"""Rows that are kept as they come: their file appears when the last one is there, and a stopped run is taken up."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from causalqwen.data import RowError
from causalqwen.data.rows import arrow_for
from causalqwen.files import batches, json_line, put, suffix_of, write_text, writing

_ROWS_AT_ONCE = 4096  # of a table, when it is written


@dataclass(frozen=True)
class Answers:
    """A row for each item of `source`: what `answer` says of a batch of them.

    options: what rows depend on beside the items; kept beside them. belongs: whether a row that was kept is that of an item.
    total, doing: the progress bar's.
    """

    options: dict[str, Any]
    source: Iterator[Any]
    answer: Callable[[list[Any]], list[dict[str, Any]]]
    belongs: Callable[[dict[str, Any], Any], bool]
    batch_size: int
    total: int | None
    doing: str


def write_kept(output: Path, answers: Answers, *, resume: bool) -> int:
    """Answers to a file (`.parquet`, `.csv`, else JSON lines). Returns the rows.

    Rows are kept in `output`.part.jsonl, a batch at a time. With `resume`, rows that are kept there are held against the items.

    Raises:
        ValueError: an unfinished run beside `output` (without `resume`), or one of other options or items; whatever `answer`
            raises: the rows before stay kept, if there are any.
    """
    part, note = (output.with_name(f"{output.name}.part.{kind}") for kind in ("jsonl", "json"))
    options = json.dumps(answers.options)
    if part.exists() and not resume:
        raise ValueError(f"{part} holds an unfinished run; resume it, or remove that file")
    if part.exists() and note.read_bytes() != options.encode():
        raise ValueError(f"{part} belongs to another model or other options; it cannot be resumed with these")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(note, options)
    count = _take_up(part, answers) if part.exists() else 0
    try:
        bar = tqdm(total=answers.total, initial=count, desc=answers.doing, unit="row")
        with part.open("a", encoding="utf-8") as file, bar:
            for batch in batches(answers.source, answers.batch_size):
                rows = answers.answer(batch)
                file.writelines(map(json_line, rows))
                file.flush()
                count += len(batch)
                bar.update(len(batch))
    except ValueError as error:
        if count:
            kind = RowError if isinstance(error, RowError) else ValueError  # others are made of more than a message
            raise kind(f"{error}; the {count} rows before it are kept in {part}, for --resume") from None
        part.unlink()
        note.unlink()
        raise
    _WRITERS.get(suffix_of(output), put)(part, output)
    part.unlink(missing_ok=True)
    note.unlink()
    return count


def _take_up(part: Path, answers: Answers) -> int:
    """How many rows of `part` stand, in whole batches; what lies after them is cut off, and `source` moves to the next one."""
    with part.open("rb+") as file:
        complete = sum(line.endswith(b"\n") for line in file)
        whole = complete - complete % answers.batch_size
        file.seek(0)
        for number, line in enumerate(tqdm(islice(file, whole), desc="rows kept", total=whole, leave=False), start=1):
            item, kept = next(answers.source, None), None
            with suppress(ValueError):  # a damaged line
                kept = json.loads(line.decode())
            if item is None or not isinstance(kept, dict) or not answers.belongs(kept, item):
                raise ValueError(
                    f"row {number} of {part} is not that of the rows to write; it cannot be resumed with these"
                )
        file.truncate(file.tell())
    return whole


def _write_parquet(lines: Path, output: Path) -> None:
    """JSON lines as a table whose columns are those of all rows; it appears by rename. A column that Parquet cannot hold, of
    several types, empty objects, or whole numbers beyond 64 bits, is JSON text."""
    pa = arrow_for(output)
    kinds: dict[str, Any] = {}
    for rows in _parts(lines):
        for name in dict.fromkeys(name for row in rows for name in row):
            kinds[name] = _kind_of(pa, [row.get(name) for row in rows], kinds.get(name, pa.null()))
    for rows in _parts(lines):
        for name in [name for name, kind in kinds.items() if not _holds(pa, kind, [row.get(name) for row in rows])]:
            kinds[name] = None
    schema = pa.schema([(name, pa.string() if kind is None else kind) for name, kind in kinds.items()])
    with writing(output) as part, pa.parquet.ParquetWriter(part, schema) as writer:
        for rows in _parts(lines):
            for row in rows:
                as_text = {
                    name: row[name] for name, kind in kinds.items() if kind is None and row.get(name) is not None
                }
                row |= {name: json.dumps(cell, ensure_ascii=False) for name, cell in as_text.items()}
            writer.write_table(pa.Table.from_pylist(rows, schema))


def _parts(lines: Path) -> Iterator[list[dict[str, Any]]]:
    with lines.open(encoding="utf-8") as file:
        yield from ([json.loads(line) for line in batch] for batch in batches(file, _ROWS_AT_ONCE))


def _kind_of(pa: Any, cells: list[Any], known: Any) -> Any:
    """The type of a column that was `known` so far, with some more cells; None for one of several."""
    try:
        both = [pa.schema([("column", kind)]) for kind in (known, pa.array(cells).type)]
        return pa.unify_schemas(both, promote_options="permissive").field("column").type
    except (pa.ArrowException, OverflowError, TypeError):  # of None, which was no type before
        return None


def _holds(pa: Any, kind: Any, cells: list[Any]) -> bool:
    """Whether a column of Parquet holds these; floats that were met later do not hold every whole number."""
    try:
        pa.array(cells, kind)
    except (pa.ArrowException, OverflowError):
        return False
    return kind is not None and "struct<>" not in str(kind)


def _write_csv(lines: Path, output: Path) -> None:
    """JSON lines of the same fields as CSV; what is nested stays JSON. It appears by rename."""
    with writing(output) as part, part.open("w", encoding="utf-8", newline="") as out:
        writer, rows = csv.writer(out), (row for rows in _parts(lines) for row in rows)
        for number, row in enumerate(rows):
            if number == 0:
                writer.writerow(row)
            cells = row.values()
            writer.writerow(json.dumps(v, ensure_ascii=False) if isinstance(v, dict | list) else v for v in cells)


_WRITERS = {".parquet": _write_parquet, ".csv": _write_csv}
