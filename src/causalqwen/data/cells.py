"""What the cells of a table say: Python's values, days, and strings that are numbers, as 1.234,50 EUR (docs/tables.md)."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np

from causalqwen.extras import extra
from causalqwen.numbers import NumberRules, find_numbers
from causalqwen.numbers.rules import SPACES
from causalqwen.numbers.table import AFTER, MONEY

with extra("tables", "a table"):
    import pandas as pd

Columns = dict[str, list[Any]]
"""Values by column name: str, int, float, bool, datetime, or None for a missing one."""

_NUMBER = re.compile(r"[+-]?((0|[1-9]\d*|(?=\.\d))(\.\d*)?([eE][+-]?\d{1,3})?|inf|Infinity)", re.ASCII)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?)?(Z|[+-]\d{2}:?\d{2})?")
_SIGN, _GAP = "[-+−–‑]?", f"[ {SPACES}]?"
_MONEY = rf"(?:[A-Z]{{1,3}})?[$€£¥₹₽₩₺₫₪฿₴]|{MONEY}|[A-Z]{{1,3}}|kr\.?|zł|Kč|Ft|Rs\.?"
_AMOUNT = re.compile(
    rf"(?P<outer>{_SIGN}) ?(?:(?P<before>{_MONEY}){_GAP})?(?P<inner>{_SIGN}) ?"
    rf"(?P<digits>[.,]?\d(?:[\d.,'’ {SPACES}]*\d)?)(?:[.,][-–—]{{1,2}})?{_GAP}(?P<after>{_MONEY}|{AFTER.pattern})?",
    re.ASCII,
)
_RULES = {mark: NumberRules(kinds=("number", "lakh"), protected=(), decimal=mark) for mark in ".,"}
_MOSTLY = 0.8  # of the strings of a column are numbers, to speak of it


def as_python(cell: Any) -> Any:
    """A value as Python has it; None where it is missing: None, NaN, NaT, pandas' NA, an empty string."""
    if (pd.api.types.is_scalar(cell) and pd.isna(cell)) or (isinstance(cell, str) and not cell.strip()):
        return None
    if isinstance(cell, np.datetime64 | np.timedelta64):
        cell = cell.astype(f"{type(cell).__name__}[us]")  # whose nanoseconds Python does not have
    if isinstance(cell, np.generic):
        cell = cell.item()
    return float(cell) if isinstance(cell, Decimal) else cell


def written(cell: Any) -> str:
    """A value as a text holds it: numbers to six digits, dates as ISO, white space as one space."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int | float):
        return str(int(cell)) if cell == int(cell) and abs(cell) < 1e15 else format(cell, ".6g")
    if isinstance(cell, date):
        return cell.isoformat().removesuffix("T00:00:00")
    return " ".join(str(cell).split())


def days(cell: Any) -> float | None:
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


def number(cell: str) -> float | None:
    """What a string says as a number; None for what is none, and for a code with zeros before it (01234)."""
    if not _NUMBER.fullmatch(cell := cell.strip()):
        return None
    return int(cell) if cell.lstrip("+-").isdigit() and len(cell) < 300 else float(cell)


def is_amount(cell: Any) -> bool:
    """Whether a cell is a string that has to be read as an amount, if as a number at all: 12.5 stands as it is."""
    return isinstance(cell, str) and number(cell) is None


def decimals_of(
    table: Columns, decimal: str | dict[str, str] = "auto", text: Sequence[str] = (), *, plain: bool = False
) -> dict[str, str]:
    """The decimal mark of each column of strings that are numbers: 1.234,50 EUR; R1,500; 12,5 %; 1,5 kg.

    All cells have one unit, or none. Where all are numbers under one of the marks "." and "," alone, that is it. Where both
    are possible (1,288), it is the one that all other columns tell, if they tell one, or ".". Strings that are numbers as they
    stand (12.5) are left: plain takes these too, and a decimal comma those that it reads otherwise (34.000).

    decimal: "auto"; the mark of all columns; or marks by column, beside which the others are found. text: columns that stay
    texts. ValueError for another mark.
    """
    given, of_all = (decimal, "auto") if isinstance(decimal, dict) else ({}, decimal)
    if wrong := ({*given.values()} | {of_all} - {"auto"}) - {".", ","}:
        raise ValueError(f"decimal: expected '.', ',' or 'auto', got {wrong.pop()!r}")
    marks = {name: mark for name, mark in given.items() if name in table and name not in text}
    possible: dict[str, list[str]] = {}
    for name, cells in table.items():
        there = [cell for cell in cells if cell is not None]
        if not there or name in text or name in marks or not all(isinstance(cell, str) for cell in there):
            continue
        if under := [mark for mark in ".," if _are_amounts(there, mark)]:
            possible[name] = under
    standing = {name for name in possible if not plain and not any(map(is_amount, table[name]))}
    shown = {under[0] for name, under in possible.items() if len(under) == 1 and name not in standing}
    usual = of_all if of_all != "auto" else shown.pop() if len(shown) == 1 else "."
    for name, under in possible.items():
        if name in standing and not (usual == "," in under and any(cell and "." in cell for cell in table[name])):
            continue
        if usual in under or of_all == "auto":
            marks[name] = usual if usual in under else under[0]
    return marks


def with_numbers(table: Columns, marks: Mapping[str, str]) -> Columns:
    """The table with the strings of these columns as numbers under their marks; one that is none stays."""

    def read(cell: Any, mark: str) -> Any:
        return found[0] if isinstance(cell, str) and (found := _amount(cell, mark)) else cell

    return table | {name: [read(cell, mark) for cell in table[name]] for name, mark in marks.items()}


def told_of_decimals(table: Columns, marks: Mapping[str, str]) -> list[str]:
    """A line for each column of strings that is read as numbers, and what another mark would make of it."""
    lines, names = [], {".": "point", ",": "comma"}
    for name, mark in marks.items():
        strings, other = [cell for cell in table[name] if isinstance(cell, str)], "," if mark == "." else "."
        there = [cell for cell in strings if _amount(cell, mark)]
        apart = [cell for cell in there if _amount(cell, mark) != _amount(cell, other)]
        for shown in [*apart, *filter(is_amount, there)][:1]:
            said = f"{shown!r} is {written(_amount(shown, mark)[0])}"
            if apart and _are_amounts(strings, other):
                said += f" (with a decimal {names[other]}, {shown!r} would be {written(_amount(shown, other)[0])})"
            lines.append(f"column {name!r} is read with a decimal {names[mark]}: {said}")
    return lines


def mostly_numbers(table: Columns) -> list[str]:
    """A line for each column of strings of which most are numbers: what the first other one says, or their units."""
    lines = []
    for name, cells in table.items():
        there = [(row, cell) for row, cell in enumerate(cells, start=1) if isinstance(cell, str)]
        others = min(([(row, cell) for row, cell in there if not _amount(cell, mark)] for mark in ".,"), key=len)
        found = [_amount(cell, ".") or _amount(cell, ",") for _, cell in there]
        units = {amount[1] for amount in found if amount} - {""}
        if others and len(there) - len(others) >= _MOSTLY * len(there):
            (row, cell), numbers = others[0], f"{len(there) - len(others):,} of {len(there):,} cells are numbers"
            lines.append(f"column {name!r} is read as words: {numbers}, but row {row} says {cell[:40]!r}")
        elif len(units) > 1:
            lines.append(
                f"column {name!r} is read as words: its amounts are of several units, {', '.join(sorted(units))}"
            )
    return lines


def _are_amounts(cells: Sequence[str], mark: str) -> bool:
    """Whether all cells say numbers under a decimal mark, of one unit or none. Capitals that are no known currency are a unit
    only beside digits that have marks: A1 and SKU20 are no amounts."""
    if not all(_amount(cell, mark) for cell in cells):
        return False
    units = {_amount(cell, mark)[1] for cell in cells} - {""}
    is_code = any(re.fullmatch("[A-Z]{1,3}", unit) and not re.fullmatch(MONEY, unit) for unit in units)
    return len(units) < 2 and (not is_code or any(sign in cell for cell in cells for sign in ".,'’"))


def _amount(cell: str, mark: str) -> tuple[float, str] | None:
    """The number of a cell under a decimal mark, and what stands beside it; None where it says none."""
    cell = cell.strip()
    if mark == "." and (value := number(cell)) is not None:
        return value, ""
    if not (found := _AMOUNT.fullmatch(cell)):
        return None
    outer, before, inner, digits, after = found.groupdict("").values()
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
