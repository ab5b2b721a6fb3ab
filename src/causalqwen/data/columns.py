"""Rows of a table as texts and as numbers: text, category, number, date and missing columns (docs/tables.md).

A row's text is "column: value; column: value; target:", missing values left out. Its numbers are: of each number, the distance
from the column's median in quartile distances, clipped to 4, and its asinh, unclipped; of each date the same, and its place in
the year and in the week; of each category, indicators; and a flag for what is missing. Numbers that stand in texts are numbers
of the row too. Both follow from a `TableReader`, which is fitted once and is plain data. A value that no training row held is
read as the nearest one (`Column.nearest`), and a column that held one value is left out.
"""

import csv
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from difflib import get_close_matches
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from causalqwen.data.rows import arrow_for, lines_of, values_of_lines
from causalqwen.files import suffix_of
from causalqwen.numbers import NumberRules, find_numbers
from causalqwen.numbers.rules import SPACES
from causalqwen.numbers.table import AFTER, MONEY

KINDS = ("number", "date", "category", "text", "constant")
"""A constant column, which held one value in all training rows or none at all, says nothing: it is left out, whatever it holds
later."""
_SEASON = 31
"""Days beyond the dates that were seen, at most, in which the season of the last ones goes on."""
UNKNOWN = 0.5
"""How far outside a value counts that has no distance to those that were seen: a new category, or a missing value in a column
where none was missing."""
MOST_LEVELS = 24
"""The most frequent values of a category column that get an indicator, so many at most."""
FEWEST_OF_LEVEL = 5
"""Rows in which a value stands, at least, for an indicator of its own."""
MOST_PLACES = 6
"""Numbers in the texts of a column that are numbers of the row, from the first on, and beside them the greatest."""
FEWEST_WITH = 0.5
"""Share of the rows that have a number at a place, at least, for it to be a number of the row."""
_GREATEST = -1
_HALF = re.compile("[\ud800-\udfff]")
FAR = 1e150
"""No number is read as further from 0: its distance from others stays one that float64 holds."""
_DISTINCT = 0.2
"""Strings of a column that are fewer than this share of its rows are a category."""
_NUMBER = re.compile(r"[+-]?((0|[1-9]\d*|(?=\.\d))(\.\d*)?([eE][+-]?\d{1,3})?|inf|Infinity)", re.ASCII)
_SIGN, _GAP = "[-+−–‑]?", f"[ {SPACES}]?"
_MONEY = rf"(?:[A-Z]{{1,3}})?[$€£¥₹₽₩₺₫₪฿₴]|{MONEY}|[A-Z]{{1,3}}|kr\.?|zł|Kč|Ft|Rs\.?"
_AMOUNT = re.compile(
    rf"(?P<outer>{_SIGN}) ?(?:(?P<before>{_MONEY}){_GAP})?(?P<inner>{_SIGN}) ?"
    rf"(?P<digits>[.,]?\d(?:[\d.,'’ {SPACES}]*\d)?)(?:[.,][-–—]{{1,2}})?{_GAP}(?P<after>{_MONEY}|{AFTER.pattern})?",
    re.ASCII,
)
"""A cell that is an amount: signs, what stands before and behind, and digits with their marks."""
_RULES = {mark: NumberRules(kinds=("number", "lakh"), protected=(), decimal=mark) for mark in ".,"}
Decimals = str | dict[str, str]
"""The decimal mark of cells that are strings: "." or ",", of all columns or by column, or "auto"."""
_TRUTH = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}
_MISSING = re.compile(r"#N/A( N/A)?|#NA|-?1\.#(IND|QNAN)|-?(nan|NaN)|<NA>|N/A|n/a|NA|NULL|null|None|")
"""Cells of a CSV that stand for nothing, as pandas reads them."""
_INDEX = re.compile(r"__index_level_\d+__")
"""What pandas calls an index without a name in Parquet."""
_MOSTLY = 0.8
"""Cells of a text or category column that are numbers, to speak of it."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?)?(Z|[+-]\d{2}:?\d{2})?")

Columns = dict[str, list[Any]]
"""Values by column name: str, int, float, bool, datetime, or None for a missing one."""


class ColumnError(ValueError):
    """A column that cannot be used; the message names it."""


@dataclass(frozen=True)
class Column:
    """A column as the training rows know it.

    center, width: of a number, or of days since 1970. levels: values with an indicator. ends: the least and the greatest
    number, or days, of the training rows. seen: all values of a category, the most frequent first. place: of a number that
    stands in the texts of the column, counted from 0; -1 is the greatest of each text. decimal: the decimal mark of strings
    that are read as numbers; None where none is.
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

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> "Column":
        """A column from fields as JSON holds them."""
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in kept.items()}
        return cls(**fields)

    @property
    def size(self) -> int:
        """How many numbers it gives."""
        return {"number": 2, "date": 6, "category": len(self.levels)}.get(self.kind, 0) + self.missing

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.seen)

    def nearest(self, cell: Any) -> tuple[Any, float]:
        """The nearest value that the training rows held, and how far from it the cell lies: 0 for one that was seen.

        A number beyond `ends` is read as the nearer end, at the distance of their asinh (`_numbers`). So is a date, but as one
        of its weekday in the week at that end, and of its season too where it lies more than a month beyond a year and more
        (`_within`). A new category is read as the one that is spelled most alike, or as the most frequent one, `UNKNOWN` away;
        where some had no indicator, for they were rare, as one of those, and a rare one is nothing unseen. A missing value,
        where none was missing, is read as the median or the most frequent category, `UNKNOWN` away.
        """
        if self.kind in ("text", "constant") or (cell is None and self.missing):
            return cell, UNKNOWN if cell is None and self.kind == "text" and not self.missing else 0.0
        if self.kind == "category":
            if cell is not None and written(cell) in self._known:
                return cell, 0.0
            rare = self.seen[len(self.levels) :][::-1]
            if cell is None:
                return self.seen[0], UNKNOWN
            return _spelled_alike(written(cell), rare or self.seen), 0.0 if rare else UNKNOWN
        value = self.center if cell is None else float(cell) if self.kind == "number" else _days(cell)
        value = min(max(value, -FAR), FAR)
        held = min(max(value, self.ends[0]), self.ends[1])
        if cell is not None and held == value:
            return cell, 0.0
        near = held if self.kind == "number" else datetime(1970, 1, 1) + timedelta(days=_within(value, self.ends))
        away, at = (math.asinh((number - self.center) / self.width) for number in (value, held))
        return near, UNKNOWN if cell is None else abs(away - at)


@dataclass(frozen=True)
class TableReader:
    """How rows are read: the columns, what is asked for, and how many characters of a row are taken.

    target: None where the only column is a text that is taken as it is. inside: numbers that stand in texts.
    """

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
        decimal: Decimals = "auto",
    ) -> "TableReader":
        """From the training rows. text: columns that are texts, whatever they look like. decimal: of `decimals_of`.

        Raises ColumnError for a name in `text` that is no column, or a column of values that are neither of `KINDS`.
        """
        for name in text:
            if name not in table:
                raise ColumnError(f"there is no column {name!r}; the columns: {', '.join(table)}")
        marks = {} if target is None else decimals_of(table, decimal, text)
        columns = tuple(
            replace(_column(name, cells, name in text, target is None), decimal=marks.get(name))
            for name, cells in with_numbers(table, marks).items()
        )
        texts = (column for column in columns if column.kind == "text")
        inside = (number for text in texts for number in _inside(text, table[text.name], characters))
        return cls(columns, target, characters, tuple(inside))

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> "TableReader":
        """What `to_dict` gave."""
        columns, inside = (tuple(map(Column.from_dict, kept[name])) for name in ("columns", "inside"))
        return cls(columns, kept["target"], kept["characters"], inside)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    def remarks(self, table: Columns) -> list[str]:
        """A line for each column that is read otherwise than it stands: left out, or strings as numbers."""
        same = [column.name for column in self.columns if column.kind == "constant"]
        gone = [f"column {name!r} is left out: it says the same in all rows" for name in same]
        return gone + told_of_decimals(
            table, {name: known.decimal for name, known in self.known.items() if known.decimal}
        )

    def checked(self, table: Columns) -> Columns:
        """The table, its strings that are numbers as such. ColumnError for a column that is missing, that the training rows did
        not have, or of another kind."""
        known = self.known
        marks = {name: column.decimal for name, column in known.items() if column.decimal and name in table}
        table = with_numbers(table, marks)
        for name in known:
            if name not in table:
                raise ColumnError(f"column {name!r} is missing; it was there when the model was fitted")
        for name in table:
            if name not in known:
                raise ColumnError(f"column {name!r} was not there when the model was fitted; leave it out")
        for name, column in known.items():
            for row, cell in enumerate(table[name], start=1):
                if cell is not None and not _fits(cell, column.kind):
                    raise ColumnError(
                        f"column {name!r}, row {row}: expected a {column.kind}, as it was when the model was fitted, found "
                        f"{str(cell)[:40]!r}"
                    )
        return table

    def texts(self, table: Columns, *, exact: bool = False) -> list[str]:
        """The text of each row, cut behind `characters`, with values as they are read (`Column.nearest`); `exact`: with the
        numbers as they are, for a model that copies them."""
        if self.target is None:
            (column,) = self.columns
            return [written(cell)[: self.characters] if cell is not None else "?" for cell in table[column.name]]
        named, texts = [column for column in self.columns if column.kind != "constant"], []
        for row in range(len(next(iter(table.values()), []))):
            shown = []
            for column in named:
                cell = table[column.name][row]
                cell = cell if exact and column.kind == "number" else column.nearest(cell)[0]
                shown += [] if cell is None else [f"{column.name}: {written(cell)}"]
            texts.append(self.asked("; ".join(shown)[: self.characters]))
        return texts

    def asked(self, told: str) -> str:
        """The text of a row, and the question for its number."""
        return told if self.target is None else f"{told}; {self.target}:" if told else f"{self.target}:"

    @property
    def known(self) -> dict[str, Column]:
        """The columns by name."""
        return {column.name: column for column in self.columns}

    def outside(self, table: Columns) -> dict[str, np.ndarray]:
        """How far the values of each column lie outside those of the training rows, float64 [n] (`Column.nearest`); only of
        columns where some value does."""
        away: dict[str, np.ndarray] = {}
        for column, cells in self._cells(table):
            far = np.array([far for _, far in cells], dtype=float)
            if far.any():
                away[column.name] = np.maximum(far, away.get(column.name, 0.0))
        return away

    def numbers(self, table: Columns) -> np.ndarray:
        """The numbers of each row, float32 [n, K], `widths` of each column."""
        rows = len(next(iter(table.values()), []))
        parts = [_numbers(column, [cell for cell, _ in read]) for column, read in self._cells(table)]
        return np.concatenate([np.zeros((rows, 0), dtype=np.float32), *parts], axis=1)

    @property
    def widths(self) -> list[int]:
        """How many numbers each column gives that gives any, and each that stands in texts."""
        return [column.size for column in (*self.columns, *self.inside) if column.kind != "constant" and column.size]

    def _cells(self, table: Columns) -> Iterator[tuple[Column, list[tuple[Any, float]]]]:
        """Each column that says something, and the numbers that stand in texts, with `Column.nearest` of their cells."""
        standing = {column.name: _numbers_in(table[column.name], self.characters) for column in self.inside}
        for column in (*self.columns, *self.inside):
            if column.kind != "constant":
                inside = column.place is not None
                cells = _at_place(standing[column.name], column.place) if inside else table[column.name]
                yield column, [column.nearest(cell) for cell in cells]


def table_of(X: Any) -> Columns:
    """The columns of a list of strings ("text"), a dict of lists, a DataFrame of pandas or polars, or a 2-D array ("x0", "x1",
    ...; so are those of a DataFrame that are called 0, 1, ...).

    NaN, NaT, None, pandas' NA and empty strings are missing. ColumnError for a number that is infinite or too large for
    float64, and for a text that is none, by row, counted from 1; for columns of several lengths, and two of one name.
    """
    if isinstance(X, dict):
        pairs = [(str(name), list(cells)) for name, cells in X.items()]
    elif is_frame(X):
        named = [(name, f"x{name}" if isinstance(name, int) else str(name)) for name in X.columns]
        _once([told for _, told in named])
        pairs = [(told, list(X[name].tolist() if hasattr(X[name], "tolist") else X[name])) for name, told in named]
    else:
        array = X if isinstance(X, np.ndarray) else np.asarray(X, dtype=object)
        apart = [("text", array)] if array.ndim == 1 else [(f"x{place}", cells) for place, cells in enumerate(array.T)]
        moments = array.dtype.kind in "mM"  # which are numbers as Python has them, where they count nanoseconds
        pairs = [(name, list(cells) if moments else cells.tolist()) for name, cells in apart]
    _once([name for name, _ in pairs])
    if len(lengths := {len(cells): name for name, cells in pairs}) > 1:
        told = " and ".join(f"{length:,} in {name!r}" for length, name in lengths.items())
        raise ColumnError(f"the columns have different numbers of rows: {told}")
    return {name: _cells(name, cells) for name, cells in pairs}


def is_frame(X: Any) -> bool:
    """Whether X is a DataFrame."""
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def is_missing(cell: Any) -> bool:
    """Whether a value stands for nothing."""
    return _cell(cell) is None


def read_table(path: str | os.PathLike, known: Mapping[str, Column] | None = None) -> Columns:
    """`read_with_decimals`, with its strings that are numbers as such."""
    return table_of(with_numbers(*read_with_decimals(path, known)))


def read_with_decimals(
    path: str | os.PathLike, known: Mapping[str, Column] | None = None, decimal: Decimals = "auto"
) -> tuple[Columns, dict[str, str]]:
    """The columns of a Parquet or JSON lines file, and of a CSV where it is called neither (`suffix_of`).

    Cells of a CSV are missing where pandas has it so: empty, NA, NaN, null, and what it reads likewise. A column is one of
    numbers where all others are, without zeros before them (01234), and of truth where all are True or False.

    known: columns by name; these are read as such, whatever else the file holds, and a level of theirs is never missing.
    decimal: of `decimals_of`, whose answer for the other columns is returned too; they are strings still (`with_numbers`).

    Raises:
        FileNotFoundError: no such file. ColumnError: a file without rows, or one that cannot be read, by row and column;
            RowError: a line that is no text.
        ImportError: a Parquet file where pyarrow is not installed.
    """
    path, known = Path(path), known or {}
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    if suffix_of(path) == ".parquet":
        arrow = arrow_for(path)
        try:
            columns = arrow.parquet.read_table(path)
            _once(columns.column_names, path.name)
            dropped = [name for name in columns.column_names if _INDEX.fullmatch(name) and name not in known]
            table = columns.drop_columns(dropped).to_pydict()
        except (arrow.ArrowException, OSError, OverflowError) as error:
            raise ColumnError(f"{path.name}: {' '.join(str(error).split())}") from None
    elif suffix_of(path) == ".jsonl":
        table = _read_objects(path)
    else:
        table = _read_cells(path, known)
    if not table or not next(iter(table.values())):
        raise ColumnError(f"{path.name} holds no rows")
    table, is_csv = table_of(table), suffix_of(path) not in (".parquet", ".jsonl")
    others = {name: cells for name, cells in table.items() if name not in known}
    marks = decimals_of(others, decimal, plain=is_csv)
    marks = {name: mark for name, mark in marks.items() if mark == "," or any(map(_is_amount, table[name]))}
    typed = {name: _values(cells, known.get(name)) for name, cells in table.items() if is_csv and name not in marks}
    return table_of(table | typed), marks


def decimals_of(
    table: Columns, decimal: Decimals = "auto", text: Sequence[str] = (), *, plain: bool = False
) -> dict[str, str]:
    """The decimal mark of each column of strings that are numbers: 1.234,50 EUR; R1,500; 12,5 %; 1,5 kg.

    All cells have one unit, or none. Where all are numbers under one of the marks "." and "," alone, that is it. Where both
    are possible (1,288), it is the one that all other columns tell, if they tell one, or ".". Strings that are numbers as they
    stand (12.5) are left: plain takes these too, and a decimal comma those that it reads otherwise (34.000).

    decimal: "auto"; the mark of all columns; or marks by column, beside which the others are found. text: columns that stay
    texts. ValueError for another mark.
    """
    given = decimal if isinstance(decimal, dict) else {}
    if wrong := ({*given.values()} if isinstance(decimal, dict) else {decimal} - {"auto"}) - {".", ","}:
        raise ValueError(f"decimal: expected '.', ',' or 'auto', got {wrong.pop()!r}")
    marks = {name: mark for name, mark in given.items() if name in table and name not in text}
    read: dict[str, dict[str, list[Any]]] = {}
    for name, cells in table.items():
        there = [cell for cell in cells if cell is not None]
        if name in text or name in marks or not there or not all(isinstance(cell, str) for cell in there):
            continue
        under = {mark: values for mark in ".," if (values := _amounts(there, mark))}
        if under:
            read[name] = under
    standing = {name for name in read if not plain and not any(map(_is_amount, table[name]))}
    told = {mark for name, under in read.items() if len(under) == 1 and name not in standing for mark in under}
    usual = decimal if decimal in (".", ",") else told.pop() if len(told) == 1 else "."
    for name, under in read.items():
        if name in standing and not (usual == "," in under and any(cell and "." in cell for cell in table[name])):
            continue
        if usual in under or decimal not in (".", ","):
            marks[name] = str(usual) if usual in under else next(iter(under))
    return marks


def with_numbers(table: Columns, marks: Mapping[str, str]) -> Columns:
    """The table with the strings of these columns as numbers under their marks; one that is none stays."""
    read = dict(table)
    for name, mark in marks.items():
        found = (None if not isinstance(cell, str) else _amount(cell, mark) for cell in table[name])
        read[name] = [cell if amount is None else amount[0] for cell, amount in zip(table[name], found, strict=True)]
    return read


def told_of_decimals(table: Columns, marks: Mapping[str, str]) -> list[str]:
    """A line for each column of strings that is read as numbers, and what another mark would make of it."""
    lines, names = [], {".": "point", ",": "comma"}
    for name, mark in marks.items():
        there, other = [cell for cell in table[name] if isinstance(cell, str)], "," if mark == "." else "."
        apart = [cell for cell in there if _amount(cell, mark) and _amount(cell, mark) != _amount(cell, other)]
        for shown in (apart + [cell for cell in there if _is_amount(cell) and _amount(cell, mark)])[:1]:
            line = (
                f"column {name!r} is read with a decimal {names[mark]}: {shown!r} is {written(_amount(shown, mark)[0])}"
            )
            if apart and _amounts(there, other):
                line += f" (with a decimal {names[other]}, {shown!r} would be {written(_amount(shown, other)[0])})"
            lines.append(line)
    return lines


def _amounts(cells: Sequence[str], mark: str) -> list[float] | None:
    """What all cells say as numbers under a decimal mark, of one unit or none; None where one says none. Capitals that
    are no known currency are a unit only beside digits that have marks: A1 and SKU20 are no amounts."""
    values, beside, marked = list[float](), set[str](), False
    for cell in cells:
        if (found := _amount(cell, mark)) is None:
            return None
        values.append(found[0])
        beside |= {found[1]} - {""}
        marked |= any(sign in cell for sign in ".,'’")
    is_code = any(re.fullmatch("[A-Z]{1,3}", unit) and not re.fullmatch(MONEY, unit) for unit in beside)
    if len(beside) > 1 or (is_code and not marked):
        return None
    return values


def _is_amount(cell: Any) -> bool:
    """Whether a cell is a text that has to be read as an amount, if as a number at all: 12.5 stands as it is."""
    return isinstance(cell, str) and _number(cell) is None


def _amount(cell: str, mark: str) -> tuple[float, str] | None:
    """The number of a cell under a decimal mark, and what stands beside it; None where it says none."""
    cell = cell.strip()
    if mark == "." and (value := _number(cell)) is not None:
        return value, ""
    if not (found := _AMOUNT.fullmatch(cell)):
        return None
    outer, before, inner, digits, after = (
        found[name] or "" for name in ("outer", "before", "inner", "digits", "after")
    )
    if (before and after) or (outer and inner):
        return None
    if digits.isdigit() and (digits == "0" or digits[0] != "0"):
        value = float(digits)
    else:
        spans = find_numbers(digits.replace(" ", SPACES[0]), _RULES[mark])
        if [(span.start, span.end) for span in spans] != [(0, len(digits))]:
            return None
        value = spans[0].value
    return -value if (outer or inner) not in ("", "+") else value, before or after


def as_texts(names: Iterable[str | None]) -> dict[str, Column]:
    """Columns whose cells stand as they are, for `read_table`; None is none."""
    return {name: Column(name, "text") for name in names if name is not None}


def taken_from(table: Columns, name: str) -> list[Any]:
    """The column `name`, which the table then has no more. ColumnError where it is not there."""
    if name not in table:
        raise ColumnError(f"there is no column {name!r}; the columns: {', '.join(table)}")
    return table.pop(name)


def numbers_of(table: Columns, name: str) -> list[float]:
    """`taken_from` a column of numbers, none missing. ColumnError for a cell that is none, by row."""
    cells = taken_from(table, name)
    _check_numbers(name, cells)
    return [float(cell) for cell in cells]


def known_numbers_of(table: Columns, name: str) -> list[float | None]:
    """The same, where some may be missing, or all."""
    cells = taken_from(table, name) if name in table else [None] * len(next(iter(table.values()), []))
    _check_numbers(name, cells, some=True)
    return [None if cell is None else float(cell) for cell in cells]


def names_of(table: Columns, name: str) -> list[str]:
    """`taken_from` a column of names, none missing; 12 and 12.0 are one. ColumnError for a row without one."""
    cells = taken_from(table, name)
    if None in cells:
        raise ColumnError(f"column {name!r}, row {cells.index(None) + 1}: expected a name, found nothing")
    return [
        format(Decimal(str(cell)).normalize(), "f") if _NUMBER.fullmatch(str(cell)) else str(cell) for cell in cells
    ]


def mostly_numbers(table: Columns) -> list[str]:
    """A line for each column of strings of which most are numbers: what the first other one says."""
    lines = []
    for name, cells in table.items():
        there = [(row, cell) for row, cell in enumerate(cells, start=1) if isinstance(cell, str)]
        others = min(([(row, cell) for row, cell in there if _amount(cell, mark) is None] for mark in ".,"), key=len)
        if others and len(there) - len(others) >= _MOSTLY * len(there):
            (row, cell), numbers = others[0], f"{len(there) - len(others):,} of {len(there):,} cells are numbers"
            lines.append(f"column {name!r} is read as words: {numbers}, but row {row} says {cell[:40]!r}")
        elif (
            len(units := {found[1] for _, cell in there if (found := _amount(cell, ".") or _amount(cell, ","))} - {""})
            > 1
        ):
            lines.append(
                f"column {name!r} is read as words: its amounts are of several units, {', '.join(sorted(units))}"
            )
    return lines


def _check_numbers(name: str, cells: Sequence[Any], *, some: bool = False) -> None:
    """The first cell that is no number is told; where all are strings, one that does not say a number either, if there is."""
    wrong = [
        (row, cell) for row, cell in enumerate(cells, start=1) if not _is_number(cell) and not (some and cell is None)
    ]
    if wrong:
        worse = ((row, cell) for row, cell in wrong if not isinstance(cell, str) or _number(cell) is None)
        row, cell = next(worse, wrong[0])
        shown = "nothing" if cell is None else repr(str(cell)[:40])
        raise ColumnError(f"column {name!r}, row {row}: expected a number{'' if some else ' to learn'}, found {shown}")


def _is_number(cell: Any) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _once(names: Sequence[str], of: str = "") -> None:
    """ColumnError where a name is there twice."""
    if len(set(names)) < len(names):
        told = f"column {Counter(names).most_common(1)[0][0]!r} is there twice"
        raise ColumnError(f"{of}: {told}" if of else told)


def _read_objects(path: Path) -> Columns:
    rows: list[dict[str, Any]] = []
    for place, row in values_of_lines(path, ColumnError):
        if not isinstance(row, dict):
            raise ColumnError(f"{place}: expected an object of columns")
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _read_cells(path: Path, known: Mapping[str, Column]) -> Columns:
    with path.open(encoding="utf-8-sig", newline="") as file:
        written_lines, lines = list(lines_of(file, path)), list[list[str]]()
        marks = (mark for mark in ";\t" if "," not in written_lines[0]) if written_lines else ()
        parted = next((mark for mark in marks if all(mark in line for line in written_lines if line.strip())), ",")
        try:
            lines.extend(line for line in csv.reader(written_lines, strict=True, delimiter=parted) if line)
        except csv.Error as error:
            raise ColumnError(f"{path.name}, after row {max(0, len(lines) - 1)}: {error}") from None
    head, rows = (lines[0], lines[1:]) if lines else ([], [])
    for number, row in enumerate(rows, start=1):
        if len(row) != len(head):
            raise ColumnError(f"{path.name}, row {number}: {len(row)} cells, and the header has {len(head)}")
    _once(head, path.name)
    columns: Columns = {}
    for place, name in enumerate(head):
        levels = known[name].seen if name in known else ()
        gone = (_MISSING.fullmatch(cell := row[place].strip()) and cell not in levels for row in rows)
        columns[name] = [None if missing else row[place] for missing, row in zip(gone, rows, strict=True)]
    return columns


def _values(cells: Sequence[Any], known: Column | None) -> list[Any]:
    """Cells as what they say: numbers in a column that is known as one, unless they are read by its own mark, or if all of them
    are, whole ones if all of them are; likewise what is true."""
    kind = known and ("own" if known.decimal else known.kind)
    for read in (_number, lambda cell: _TRUTH.get(cell.strip())):
        said = [None if cell is None else read(cell) for cell in cells]
        every = all(cell is None or value is not None for cell, value in zip(cells, said, strict=True))
        if (kind is None and every) or (kind == "number" and any(value is not None for value in said)):
            if any(isinstance(value, float) for value in said):
                said = [value if value is None else float(value) for value in said]
            return [cell if value is None else value for cell, value in zip(cells, said, strict=True)]
    return list(cells)


def _number(cell: str) -> float | None:
    """What a cell says as a number; None for what is none, and for a code with zeros before it (01234)."""
    if not _NUMBER.fullmatch(cell := cell.strip()):
        return None
    return int(cell) if cell.lstrip("+-").isdigit() and len(cell) < 300 else float(cell)


def written(cell: Any) -> str:
    """A value as a text holds it: numbers to six digits, dates as ISO, white space as one space."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int | float):
        return str(int(cell)) if cell == int(cell) and abs(cell) < 1e15 else format(cell, ".6g")
    if isinstance(cell, date):
        text = cell.isoformat()
        return text.removesuffix("T00:00:00")
    return " ".join(str(cell).split())


def _cells(name: str, cells: Sequence[Any]) -> list[Any]:
    """A column's values as Python has them."""
    known = [_cell(cell) for cell in cells]
    for row, cell in enumerate(known, start=1):
        if isinstance(cell, float) and math.isinf(cell):
            raise ColumnError(f"column {name!r}, row {row}: a number is infinite; missing values are NaN")
        if isinstance(cell, int) and abs(cell) > sys.float_info.max:
            raise ColumnError(f"column {name!r}, row {row}: a number is too large for float64")
        if isinstance(cell, str) and not cell.isascii() and _HALF.search(cell):
            raise ColumnError(f"column {name!r}, row {row}: half of a surrogate pair is no character")
    return known


def _cell(cell: Any) -> Any:
    """A value as Python has it; None where it is missing."""
    if isinstance(cell, np.generic):
        if isinstance(cell, np.datetime64 | np.timedelta64):
            cell = cell.astype(f"{type(cell).__name__}[us]")  # whose nanoseconds Python does not have
        cell = cell.item()
    if isinstance(cell, Decimal):
        cell = None if cell.is_nan() else float(cell)
    if cell is None or (isinstance(cell, float) and math.isnan(cell)) or type(cell).__name__ in ("NaTType", "NAType"):
        return None
    if isinstance(cell, str):
        return cell if cell.strip() else None
    return cell


def _fits(cell: Any, kind: str) -> bool:
    if kind == "number":
        return isinstance(cell, int | float)
    if kind == "date":
        return _days(cell) is not None
    return isinstance(cell, str | int | float | date)


def _column(name: str, cells: Sequence[Any], is_text: bool, alone: bool) -> Column:
    """alone: there is no other, which a text is read for whatever it says."""
    there = [cell for cell in cells if cell is not None]
    missing = len(there) < len(cells)
    for row, cell in enumerate(cells, start=1):
        if cell is not None and not isinstance(cell, str | int | float | date):
            shown = f"{type(cell).__name__} {str(cell)[:40]!r}"
            raise ColumnError(f"column {name!r}, row {row}: expected text, a number or a date, found {shown}")
    is_number = not is_text and all(isinstance(cell, int | float) for cell in there)
    if not alone and (not there or (not missing and len(set(there if is_number else map(written, there))) == 1)):
        return Column(name, "constant")
    if is_text or not there:
        return Column(name, "text", missing=missing)
    if is_number:
        return _measured(name, "number", [float(cell) for cell in there], missing)
    days = [_days(cell) for cell in there]
    if all(day is not None for day in days):
        return _measured(name, "date", days, missing)
    counts = Counter(written(cell) for cell in there)
    if len(counts) > max(_DISTINCT * len(there), 2):
        return Column(name, "text", missing=missing)
    frequent = [level for level, count in counts.most_common(MOST_LEVELS) if count >= FEWEST_OF_LEVEL]
    seen = tuple(level for level, _ in counts.most_common())
    return Column(name, "category", missing=missing, levels=tuple(frequent), seen=seen)


@lru_cache(4096)
def _spelled_alike(told: str, seen: tuple[str, ...]) -> str:
    """The one of the texts seen that is most alike, or the first one."""
    return next(iter(get_close_matches(told, seen, 1)), seen[0])


def _measured(name: str, kind: str, there: list[float], missing: bool, place: int | None = None) -> Column:
    """A column of numbers, or of days."""
    ends = max(min(there), -FAR), min(max(there), FAR)
    return Column(name, kind, *_spread(there), missing, place=place, ends=ends)


def _inside(text: Column, cells: Sequence[Any], characters: int) -> Iterator[Column]:
    """The numbers in the texts of a column that are to be numbers of the row: those that vary, of many rows; and the greatest
    only where some text has more of them than one."""
    standing = _numbers_in(cells, characters)
    several = any(len(numbers) > 1 for numbers in standing)
    for place in (*range(MOST_PLACES), *[_GREATEST] * several):
        numbers = _at_place(standing, place)
        there = [number for number in numbers if number is not None]
        if len(there) >= FEWEST_WITH * len(cells) and len(set(there)) > 1:
            yield _measured(text.name, "number", there, len(there) < len(cells), place)


def _numbers_in(cells: Sequence[Any], characters: int) -> list[list[float]]:
    """The numbers of each text, as far as it is read; one that is cut there is none, nor are digits that float64 cannot hold,
    which the number channel refuses where it meets them."""
    standing: list[list[float]] = []
    for cell in cells:
        text = "" if cell is None else written(cell)[:characters]
        try:
            standing.append([number.value for number in find_numbers(text) if number.end < characters])
        except ValueError:
            standing.append([])
    return standing


def _at_place(standing: Sequence[Sequence[float]], place: int | None) -> list[float | None]:
    if place == _GREATEST:
        return [max(numbers, default=None) for numbers in standing]
    return [numbers[place] if len(numbers) > place else None for numbers in standing]


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and the distance of the quartiles, or the standard deviation where that is 0, or 1."""
    if not values:
        return 0.0, 1.0
    kept = np.clip(values, -FAR, FAR)
    low, middle, high = np.quantile(kept, [0.25, 0.5, 0.75]).tolist()
    width = high - low or (float(np.std(kept)) if kept.min() < kept.max() else 1.0)  # which rounding keeps from 0
    return middle, width if math.isfinite(width) and width > 1 / FAR else 1.0


def _days(cell: Any) -> float | None:
    """Days since 1970, UTC where no zone is said; None for what is no date."""
    if isinstance(cell, str):
        if not _DATE.fullmatch(cell.strip()):
            return None
        try:
            cell = datetime.fromisoformat(cell.strip())
        except ValueError:
            return None
    if isinstance(cell, datetime):
        moment = cell if cell.tzinfo else cell.replace(tzinfo=UTC)
        return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / 86400
    return float((cell - date(1970, 1, 1)).days) if isinstance(cell, date) else None


def _within(days: float, ends: tuple[float, float]) -> float:
    """A day within the ends: of whole weeks earlier or later, or of whole 52 weeks, or the nearer end where there are none."""
    held = min(max(days, ends[0]), ends[1])
    beyond, span = days - held, ends[1] - ends[0]
    step = 364 if abs(beyond) > _SEASON and span >= 364 else 7
    return days - math.copysign(step * math.ceil(abs(beyond) / step), beyond) if span >= step else held


def _numbers(column: Column, cells: Sequence[Any]) -> np.ndarray:
    """Float32 [n, column.size], the flag for what is missing last."""
    gone = np.array([cell is None for cell in cells], dtype=float)
    parts: list[np.ndarray] = []
    if column.kind == "category":
        place = {level: index for index, level in enumerate(column.levels)}
        indicators = np.zeros((len(cells), len(column.levels)))
        for row, cell in enumerate(cells):
            if cell is not None and (at := place.get(written(cell))) is not None:
                indicators[row, at] = 1.0
        parts = list(indicators.T)
    elif column.kind != "text":
        raw = [column.center if c is None else float(c) if column.kind == "number" else _days(c) for c in cells]
        values = np.array(raw, dtype=float).clip(-FAR, FAR)
        away = (values - column.center) / column.width
        parts = [away.clip(-4, 4), np.arcsinh(away)]
        if column.kind == "date":
            year, week = 2 * np.pi * values / 365.2425, 2 * np.pi * values / 7
            parts += [np.sin(year), np.cos(year), np.sin(week), np.cos(week)]
    parts += [gone] if column.missing else []
    made = np.stack(parts, axis=1) if parts else np.zeros((len(cells), 0))
    return made.astype(np.float32)
