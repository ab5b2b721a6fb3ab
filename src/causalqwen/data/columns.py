"""Rows of a table as texts and as numbers: text, category, number, date and missing columns (docs/tables.md).

Both follow from a `TableReader`, which is fitted once and is plain data. A value that no training row held is read as the
nearest one (`Column.nearest`), and a column that held one value is left out.
"""

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from difflib import get_close_matches
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from causalqwen.data.cells import (
    Columns,
    as_python,
    days,
    decimals_of,
    is_amount,
    number,
    told_of_decimals,
    with_numbers,
    written,
)  # fmt: skip
from causalqwen.data.rows import arrow_for, csv_rows, lines_of, values_of_lines
from causalqwen.files import suffix_of
from causalqwen.numbers import find_numbers

UNKNOWN = 0.5
"""How far outside a new category counts, or a missing value in a column where none was missing."""
FAR = 1e150
"""No number is read as further from 0: its distance from others stays one that float64 holds."""
_SEASON = 31  # days beyond the dates that were seen, at most, in which the season of the last ones goes on
_MOST_LEVELS, _FEWEST_OF_LEVEL = 24, 5  # of a category: values with an indicator, and rows in which such a value stands
_MOST_PLACES = 6  # numbers in a text that are numbers of the row, from the first on
_GREATEST = -1  # and beside them the greatest
_FEWEST_WITH = 0.5  # of the rows have a number at a place, at least, for it to be a number of the row
_DISTINCT = 0.2  # of the rows: strings of a column that are fewer are a category
_TRUTH = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}
_MISSING = re.compile(r"#N/A( N/A)?|#NA|-?1\.#(IND|QNAN)|-?(nan|NaN)|<NA>|N/A|n/a|NA|NULL|null|None|")
"""Cells of a CSV that stand for nothing, as pandas reads them."""


class ColumnError(ValueError):
    """A column that cannot be used; the message names it."""


@dataclass(frozen=True)
class Column:
    """A column as the training rows know it.

    kind: number, date, category, text; or constant, which held one value in all training rows or none at all, says nothing, and
    is left out whatever it holds later. center, width: of a number, or of days since 1970. levels: values with an indicator.
    ends: the least and the greatest number, or days, of the training rows. seen: all values of a category, the most frequent
    first. place: of a number that stands in the texts of the column, counted from 0; -1 is the greatest of each text. decimal:
    the decimal mark of strings that are read as numbers; None where none is.
    """

    name: str
    kind: str
    center: float = 0.0
    width: float = 1.0
    missing: bool = False
    levels: tuple[str, ...] = ()
    place: int | None = None
    ends: tuple[float, float] = (-FAR, FAR)
    seen: tuple[str, ...] = ()
    decimal: str | None = None

    @property
    def size(self) -> int:
        """How many numbers it gives."""
        return {"number": 2, "date": 6, "category": len(self.levels)}.get(self.kind, 0) + self.missing

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.seen)

    def nearest(self, cell: Any) -> tuple[Any, float]:
        """The nearest value that the training rows held, and how far from it the cell lies: 0 for one that was seen.

        A number beyond `ends` is read as the nearer end, at the distance of their asinh (`numbers`), and a date as one of its
        weekday near that end (`_within`). A new category is read as the one that is spelled most alike, of the rare ones that
        have no indicator where there are some, which is nothing unseen. A missing value, where none was missing, is read as the
        median or the most frequent category.
        """
        if self.kind in ("text", "constant") or (cell is None and self.missing):
            return cell, UNKNOWN if cell is None and self.kind == "text" and not self.missing else 0.0
        if self.kind == "category":
            if cell is None:
                return self.seen[0], UNKNOWN
            if written(cell) in self._known:
                return cell, 0.0
            rare = self.seen[len(self.levels) :][::-1]
            return _spelled_alike(written(cell), rare or self.seen), 0.0 if rare else UNKNOWN
        value = self.center if cell is None else float(cell) if self.kind == "number" else days(cell)
        value = min(max(value, -FAR), FAR)
        held = min(max(value, self.ends[0]), self.ends[1])
        if cell is not None and held == value:
            return cell, 0.0
        near = held if self.kind == "number" else datetime(1970, 1, 1) + timedelta(days=_within(value, self.ends))
        away, at = (math.asinh((one - self.center) / self.width) for one in (value, held))
        return near, UNKNOWN if cell is None else abs(away - at)

    def numbers(self, cells: Sequence[Any]) -> np.ndarray:
        """What cells as they are read say as numbers, float32 [n, size]: of a number its distance from the median in quartile
        distances, clipped to 4, and its asinh, unclipped; of a date the same, and its place in the year and in the week; of a
        category indicators; and last a flag for what is missing."""
        parts: list[np.ndarray] = []
        if self.kind == "category":
            said = np.array([cell if cell is None else written(cell) for cell in cells], dtype=object)
            parts = [said == level for level in self.levels]
        elif self.kind != "text":
            raw = [self.center if c is None else float(c) if self.kind == "number" else days(c) for c in cells]
            values = np.array(raw, dtype=float).clip(-FAR, FAR)
            away = (values - self.center) / self.width
            parts = [away.clip(-4, 4), np.arcsinh(away)]
            if self.kind == "date":
                year, week = 2 * np.pi * values / 365.2425, 2 * np.pi * values / 7
                parts += [np.sin(year), np.cos(year), np.sin(week), np.cos(week)]
        if self.missing:
            parts.append(np.array([cell is None for cell in cells]))
        return np.array(parts, dtype=float).reshape(len(parts), len(cells)).T.astype(np.float32)


@dataclass(frozen=True)
class TableReader:
    """How rows are read: the columns, what is asked for, how many characters of a row are taken, and the numbers that stand in
    texts. target: None where the only column is a text that is taken as it is."""

    columns: tuple[Column, ...]
    target: str | None
    characters: int = 2000
    inside: tuple[Column, ...] = ()

    @classmethod
    def fit(
        cls,
        table: Columns,
        target: str | None,
        text: Sequence[str] = (),
        characters: int = 2000,
        decimal: str | dict[str, str] = "auto",
    ) -> "TableReader":
        """From the training rows. text: columns that are texts, whatever they look like. decimal: of `decimals_of`. ColumnError
        for a name in `text` that is no column, or a column of values of no kind."""
        for name in text:
            _check_there(table, name)
        marks = {} if target is None else decimals_of(table, decimal, text)
        columns = tuple(
            replace(_column(name, cells, name in text, target is None), decimal=marks.get(name))
            for name, cells in with_numbers(table, marks).items()
        )
        texts = [column.name for column in columns if column.kind == "text"]
        inside = tuple(number for name in texts for number in _inside(name, table[name], characters))
        return cls(columns, target, characters, inside)

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> "TableReader":
        """What `to_dict` gave."""
        return TypeAdapter(cls).validate_python(kept)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @property
    def known(self) -> dict[str, Column]:
        """The columns by name."""
        return {column.name: column for column in self.columns}

    def remarks(self, table: Columns) -> list[str]:
        """A line for each column that is read otherwise than it stands: left out, or strings as numbers."""
        same = (column.name for column in self.columns if column.kind == "constant")
        lines = [f"column {name!r} is left out: it says the same in all rows" for name in same]
        return lines + told_of_decimals(table, {one.name: one.decimal for one in self.columns if one.decimal})

    def checked(self, table: Columns) -> Columns:
        """The table, its strings that are numbers as such. ColumnError for a column that is missing, that the training rows did
        not have, or of another kind."""
        known, fitted = self.known, "when the model was fitted"
        table = with_numbers(table, {name: one.decimal for name, one in known.items() if one.decimal and name in table})
        if gone := [name for name in known if name not in table]:
            raise ColumnError(f"column {gone[0]!r} is missing; it was there {fitted}")
        if new := [name for name in table if name not in known]:
            raise ColumnError(f"column {new[0]!r} was not there {fitted}; leave it out")
        for name, column in known.items():
            for row, cell in enumerate(table[name], start=1):
                if cell is not None and not _fits(cell, column.kind):
                    expected = f"expected a {column.kind}, as it was {fitted}, found {str(cell)[:40]!r}"
                    raise ColumnError(f"column {name!r}, row {row}: {expected}")
        return table

    def texts(self, table: Columns, *, exact: bool = False) -> list[str]:
        """The text of each row, cut after `characters`, with values as they are read (`Column.nearest`); `exact`: with the
        numbers as they are, for a model that copies them."""
        if self.target is None:
            (column,) = self.columns
            return [written(cell)[: self.characters] if cell is not None else "?" for cell in table[column.name]]
        shown: list[list[str]] = [[] for _ in next(iter(table.values()), [])]
        for column in self.columns:
            for cells, cell in zip(shown, table[column.name] if column.kind != "constant" else (), strict=False):
                near = cell if exact and column.kind == "number" else column.nearest(cell)[0]
                cells += [] if near is None else [f"{column.name}: {written(near)}"]
        return [self.asked("; ".join(cells)[: self.characters]) for cells in shown]

    def asked(self, text: str) -> str:
        """The text of a row, and the question for its number."""
        return text if self.target is None else f"{text}; {self.target}:" if text else f"{self.target}:"

    def outside(self, table: Columns) -> dict[str, np.ndarray]:
        """How far the values of each column lie outside those of the training rows, float64 [n] (`Column.nearest`); only of
        columns where some value does."""
        away: dict[str, np.ndarray] = {}
        for column, cells in self._read(table):
            far = np.array([far for _, far in cells], dtype=float)
            if far.any():
                away[column.name] = np.maximum(far, away.get(column.name, 0.0))
        return away

    def numbers(self, table: Columns) -> np.ndarray:
        """The numbers of each row, float32 [n, K], `widths` of each column."""
        rows = len(next(iter(table.values()), []))
        parts = [column.numbers([cell for cell, _ in cells]) for column, cells in self._read(table)]
        return np.concatenate([np.zeros((rows, 0), dtype=np.float32), *parts], axis=1)

    @property
    def widths(self) -> list[int]:
        """How many numbers each column gives that gives any, and each that stands in texts."""
        return [column.size for column in (*self.columns, *self.inside) if column.kind != "constant" and column.size]

    def _read(self, table: Columns) -> Iterator[tuple[Column, list[tuple[Any, float]]]]:
        """Each column that says something, and the numbers that stand in texts, with `Column.nearest` of their cells."""
        standing = {name: _numbers_in(table[name], self.characters) for name in {column.name for column in self.inside}}
        for column in (*self.columns, *self.inside):
            if column.kind != "constant":
                cells = table[column.name] if column.place is None else standing[column.name][column.place]
                yield column, [column.nearest(cell) for cell in cells]


# ---- what is there ---------------------------------------------------------------------------------------------------


def table_of(X: Any) -> Columns:
    """The columns of a list of strings ("text"), a dict of lists, a DataFrame of pandas or polars, or a 2-D array ("x0", "x1",
    ...; so are those of a DataFrame that are called 0, 1, ...), missing values None (`as_python`). ColumnError for a number
    that is infinite or too large for float64, and for a text that is none, by row; for columns of several lengths, and two of
    one name."""
    if isinstance(X, dict):
        pairs = [(str(name), list(cells)) for name, cells in X.items()]
    elif is_frame(X):
        named = [(name, f"x{name}" if isinstance(name, int) else str(name)) for name in X.columns]
        _once([name for _, name in named])
        pairs = [(shown, list(X[name])) for name, shown in named]
    else:
        array = X if isinstance(X, np.ndarray) else np.asarray(X, dtype=object)
        return table_of(
            {"text": array} if array.ndim == 1 else {f"x{place}": cells for place, cells in enumerate(array.T)}
        )
    _once([name for name, _ in pairs])
    if len(lengths := {len(cells): name for name, cells in pairs}) > 1:
        counted = " and ".join(f"{length:,} in {name!r}" for length, name in lengths.items())
        raise ColumnError(f"the columns have different numbers of rows: {counted}")
    return {name: _cells(name, cells) for name, cells in pairs}


def is_frame(X: Any) -> bool:
    """Whether X is a DataFrame."""
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def _once(names: Sequence[str], of: str = "") -> None:
    """ColumnError where a name is there twice."""
    if len(set(names)) < len(names):
        raise ColumnError(f"{of}column {Counter(names).most_common(1)[0][0]!r} is there twice")


def _cells(name: str, cells: Sequence[Any]) -> list[Any]:
    """A column's values as Python has them."""
    known = [as_python(cell) for cell in cells]
    for row, cell in enumerate(known, start=1):
        wrong = ""
        if isinstance(cell, float) and math.isinf(cell):
            wrong = "a number is infinite; missing values are NaN"
        elif isinstance(cell, int) and abs(cell) > sys.float_info.max:
            wrong = "a number is too large for float64"
        elif isinstance(cell, str) and re.search("[\ud800-\udfff]", cell):
            wrong = "half of a surrogate pair is no character"
        if wrong:
            raise ColumnError(f"column {name!r}, row {row}: {wrong}")
    return known


def read_table(path: str | os.PathLike, known: Mapping[str, Column] | None = None) -> Columns:
    """`read_with_decimals`, with its strings that are numbers as such."""
    return table_of(with_numbers(*read_with_decimals(path, known)))


def read_with_decimals(
    path: str | os.PathLike, known: Mapping[str, Column] | None = None, decimal: str | dict[str, str] = "auto"
) -> tuple[Columns, dict[str, str]]:
    """The columns of a Parquet or JSON lines file, and of a CSV where it is called neither (`suffix_of`), of which a column is
    one of numbers where all cells are that are there, and of truth where all are True or False.

    known: columns by name; these are read as such, whatever else the file holds, and a level of theirs is never missing.
    decimal: of `decimals_of`, whose answer for the other columns is returned too; they are strings still (`with_numbers`).

    Raises FileNotFoundError, ColumnError for a file without rows or one that cannot be read, by row and column, RowError for a
    line that is no text, and ImportError for a Parquet file where pyarrow is not installed.
    """
    path, known = Path(path), known or {}
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    read = {".parquet": _read_parquet, ".jsonl": _read_objects}.get(suffix_of(path), _read_csv)
    table = read(path, known)
    if not table or not next(iter(table.values())):
        raise ColumnError(f"{path.name} holds no rows")
    table, is_csv = table_of(table), read is _read_csv
    others = {name: cells for name, cells in table.items() if name not in known}
    marks = decimals_of(others, decimal, plain=is_csv)
    marks = {name: mark for name, mark in marks.items() if mark == "," or any(map(is_amount, table[name]))}
    typed = {name: _values(cells, known.get(name)) for name, cells in table.items() if is_csv and name not in marks}
    return table_of(table | typed), marks


def _read_parquet(path: Path, known: Mapping[str, Column]) -> Columns:
    arrow = arrow_for(path)
    try:
        columns = arrow.parquet.read_table(path)
        _once(columns.column_names, f"{path.name}: ")
        index = re.compile(r"__index_level_\d+__")  # what pandas calls one without a name
        dropped = [name for name in columns.column_names if index.fullmatch(name) and name not in known]
        return columns.drop_columns(dropped).to_pydict()
    except (arrow.ArrowException, OSError, OverflowError) as error:
        raise ColumnError(f"{path.name}: {' '.join(str(error).split())}") from None


def _read_objects(path: Path, known: Mapping[str, Column]) -> Columns:
    rows: list[dict[str, Any]] = []
    for place, row in values_of_lines(path, ColumnError):
        if not isinstance(row, dict):
            raise ColumnError(f"{place}: expected an object of columns")
        rows.append(row)
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _read_csv(path: Path, known: Mapping[str, Column]) -> Columns:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = list(lines_of(file, path))
    marks = (mark for mark in ";\t" if "," not in lines[0]) if lines else ()
    parted = next((mark for mark in marks if all(mark in line for line in lines if line.strip())), ",")
    rows = list(csv_rows(lines, path.name, ColumnError, parted))

    def cell(row: dict[str, str], name: str) -> str | None:
        is_level = name in known and row[name].strip() in known[name].seen
        return row[name] if is_level or not _MISSING.fullmatch(row[name].strip()) else None

    return {name: [cell(row, name) for row in rows] for name in (rows[0] if rows else ())}


def _values(cells: Sequence[Any], known: Column | None) -> list[Any]:
    """Cells as what they say: numbers in a column that is known as one, unless they are read by its own mark, or if all of them
    are, whole ones if all of them are; likewise what is true."""
    kind = known and ("own" if known.decimal else known.kind)
    for read in (number, lambda cell: _TRUTH.get(cell.strip())):
        said = [None if cell is None else read(cell) for cell in cells]
        every = all(cell is None or value is not None for cell, value in zip(cells, said, strict=True))
        if (kind is None and every) or (kind == "number" and any(value is not None for value in said)):
            if any(isinstance(value, float) for value in said):
                said = [value if value is None else float(value) for value in said]
            return [cell if value is None else value for cell, value in zip(cells, said, strict=True)]
    return list(cells)


def as_texts(names: Iterable[str | None]) -> dict[str, Column]:
    """Columns whose cells stand as they are, for `read_table`; None is none."""
    return {name: Column(name, "text") for name in names if name is not None}


def _check_there(table: Columns, name: str) -> None:
    if name not in table:
        raise ColumnError(f"there is no column {name!r}; the columns: {', '.join(table)}")


def numbers_of(table: Columns, name: str, *, some: bool = False) -> list[Any]:
    """The column `name` as numbers, which the table then has no more; `some`: None where they are missing, or where there is no
    such column. ColumnError for a cell that is no number, by row."""
    if not some:
        _check_there(table, name)
    cells = table.pop(name) if name in table else [None] * len(next(iter(table.values()), []))
    is_number = [
        (isinstance(cell, int | float) and not isinstance(cell, bool)) or (some and cell is None) for cell in cells
    ]
    wrong = [row for row, fine in enumerate(is_number) if not fine]
    if wrong:  # where all are strings, one that does not say a number either, if there is
        worse = (row for row in wrong if not isinstance(cells[row], str) or number(cells[row]) is None)
        row = next(worse, wrong[0])
        shown = "nothing" if cells[row] is None else repr(str(cells[row])[:40])
        expected = f"expected a number{'' if some else ' to learn'}, found {shown}"
        raise ColumnError(f"column {name!r}, row {row + 1}: {expected}")
    return [None if cell is None else float(cell) for cell in cells]


def names_of(table: Columns, name: str) -> list[str]:
    """The column `name` as names, none missing, which the table then has no more; 12 and 12.0 are one. ColumnError for a row
    without one."""
    _check_there(table, name)
    cells = table.pop(name)
    if None in cells:
        raise ColumnError(f"column {name!r}, row {cells.index(None) + 1}: expected a name, found nothing")
    names = map(str, cells)
    return [format(Decimal(name).normalize(), "f") if number(name) is not None else name for name in names]


# ---- what a column is ------------------------------------------------------------------------------------------------


def _fits(cell: Any, kind: str) -> bool:
    if kind == "date":
        return days(cell) is not None
    return isinstance(cell, int | float if kind == "number" else str | int | float | date)


def _column(name: str, cells: Sequence[Any], is_text: bool, alone: bool) -> Column:
    """alone: there is no other, which a text is read for whatever it says."""
    there = [cell for cell in cells if cell is not None]
    missing = len(there) < len(cells)
    for row, cell in enumerate(cells, start=1):
        if cell is not None and not _fits(cell, "text"):
            shown = f"{type(cell).__name__} {str(cell)[:40]!r}"
            raise ColumnError(f"column {name!r}, row {row}: expected text, a number or a date, found {shown}")
    is_number = not is_text and all(isinstance(cell, int | float) for cell in there)
    if not alone and (not there or (not missing and len(set(there if is_number else map(written, there))) == 1)):
        return Column(name, "constant")
    if is_text or not there:
        return Column(name, "text", missing=missing)
    if is_number:
        return _measured(name, "number", [float(cell) for cell in there], missing)
    moments = [days(cell) for cell in there]
    if None not in moments:
        return _measured(name, "date", moments, missing)
    counts = Counter(map(written, there)).most_common()
    if len(counts) > max(_DISTINCT * len(there), 2):
        return Column(name, "text", missing=missing)
    frequent = tuple(level for level, count in counts[:_MOST_LEVELS] if count >= _FEWEST_OF_LEVEL)
    return Column(name, "category", missing=missing, levels=frequent, seen=tuple(level for level, _ in counts))


@lru_cache(4096)
def _spelled_alike(name: str, seen: tuple[str, ...]) -> str:
    """The one of the texts seen that is most alike, or the first one."""
    return next(iter(get_close_matches(name, seen, 1)), seen[0])


def _measured(name: str, kind: str, there: Sequence[float], missing: bool, place: int | None = None) -> Column:
    """A column of numbers, or of days, as wide as its quartiles are apart, or its standard deviation, or 1."""
    kept = np.clip(there, -FAR, FAR)
    low, middle, high = np.quantile(kept, [0.25, 0.5, 0.75]).tolist()
    width = high - low or (float(np.std(kept)) if kept.min() < kept.max() else 1.0)  # which rounding keeps from 0
    width = width if math.isfinite(width) and width > 1 / FAR else 1.0
    return Column(name, kind, middle, width, missing, place=place, ends=(float(kept.min()), float(kept.max())))


def _inside(name: str, cells: Sequence[Any], characters: int) -> Iterator[Column]:
    """The numbers in the texts of a column that are to be numbers of the row: those that vary, of many rows; and the greatest
    only where some text has more of them than one."""
    standing = _numbers_in(cells, characters)
    for place, numbers in standing.items():
        there = [value for value in numbers if value is not None]
        varies = len(there) >= _FEWEST_WITH * len(cells) and len(set(there)) > 1
        if varies and (place != _GREATEST or any(value is not None for value in standing[1])):
            yield _measured(name, "number", there, len(there) < len(cells), place)


def _numbers_in(cells: Sequence[Any], characters: int) -> dict[int, list[float | None]]:
    """The numbers of each text by their place, as far as it is read; one that is cut there is none, nor are digits that float64
    cannot hold, which the number channel refuses where it meets them."""
    standing: list[list[float]] = []
    for cell in cells:
        text = "" if cell is None else written(cell)[:characters]
        try:
            standing.append([found.value for found in find_numbers(text) if found.end < characters])
        except ValueError:
            standing.append([])
    places = range(_MOST_PLACES)
    first = {place: [found[place] if len(found) > place else None for found in standing] for place in places}
    return first | {_GREATEST: [max(found, default=None) for found in standing]}


def _within(days: float, ends: tuple[float, float]) -> float:
    """A day within the ends: of whole weeks earlier or later, or of whole 52 weeks, which keep the season, where it lies more
    than a month beyond a year or more; or the nearer end where there are none."""
    held = min(max(days, ends[0]), ends[1])
    beyond, span = days - held, ends[1] - ends[0]
    step = 364 if abs(beyond) > _SEASON and span >= 364 else 7
    return days - math.copysign(step * math.ceil(abs(beyond) / step), beyond) if span >= step else held
