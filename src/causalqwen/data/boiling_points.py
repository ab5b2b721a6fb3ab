"""Boiling points with names, written as sentences: real text with a real number in it.

Source: the table of C. L. Yaws in the Python package `chemicals` (MIT licence), 3 K to 5,869 K. A few hundred of its rows come
along (`boiling_points.csv`, see `boiling_points.md`).
"""

import csv
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from causalqwen.extras import extra
from causalqwen.files import json_line, write_text
from causalqwen.numbers import find_numbers

SENTENCE = "The boiling point of {name} ({formula}) is {value} K."
PROMPT = "The boiling point of {name} ({formula}) is"
SIZES = {"train": 3600, "validation": 700, "test": 900}
"""Rows of the demo's parts of the table; the rows after them (`split_by_entity`) come along."""


def boiling_points() -> list[dict[str, Any]]:
    """One record per compound: name, formula, kelvin, and `entity`, the skeleton that stereoisomers of a compound share.

    Left out: compounds without a name, all but the first of those that share a name, and those whose name reads as if it
    held another number (catalogue numbers). ImportError where `chemicals` is not installed.
    """
    with extra("demo", "the table of boiling points"):
        from chemicals.identifiers import search_chemical
        from chemicals.phase_change import Tb_sources
    records, names = [], set()
    for number, kelvin in sorted(Tb_sources["YAWS"]["Tb"].dropna().items()):
        try:
            compound = search_chemical(number)
        except ValueError:
            continue
        name = compound.common_name
        if name == number or not any(letter.isalpha() for letter in name) or name.lower() in names:
            continue
        names.add(name.lower())
        record = {"name": name, "formula": compound.formula, "kelvin": round(float(kelvin), 4)}
        record["entity"] = compound.InChI_key.split("-")[0]
        if len(find_numbers(sentence(record))) == 1:
            records.append(record)
    return records


def sample_of_boiling_points() -> list[dict[str, Any]]:
    """The 600 records that come along, as `boiling_points` gives them; none of them is in the demo's parts."""
    lines = files(__package__).joinpath("boiling_points.csv").read_text(encoding="utf-8").splitlines()
    return [row | {"kelvin": float(row["kelvin"])} for row in csv.DictReader(lines)]


def sentence(record: dict[str, Any]) -> str:
    """The record as a sentence that holds its boiling point."""
    return SENTENCE.format(name=record["name"], formula=record["formula"], value=f"{record['kelvin']:.8g}")


def write_sentences(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """A JSONL file of sentences (`text` rows); appears by rename."""
    lines = [json_line({"text": sentence(record), "compound": record["name"]}) for record in records]
    write_text(path, "".join(lines))
