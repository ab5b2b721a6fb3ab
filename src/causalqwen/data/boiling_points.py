"""Boiling points with names, written as sentences: real text with a real number in it.

Source: the table of C. L. Yaws in the Python package `chemicals` (MIT licence), 3 K to 5,869 K.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from causalqwen.files import writing
from causalqwen.numbers import find_numbers

SENTENCE = "The boiling point of {name} ({formula}) is {value} K."
PROMPT = "The boiling point of {name} ({formula}) is"


def boiling_points() -> list[dict[str, Any]]:
    """One record per compound: name, formula, kelvin, and `entity`, the skeleton that stereoisomers of a compound share.

    Left out: compounds without a name, all but the first of those that share a name, and those whose name reads as if it
    held another number (catalogue numbers). ImportError where `chemicals` is not installed.
    """
    try:
        from chemicals.identifiers import search_chemical
        from chemicals.phase_change import Tb_sources
    except ImportError as error:
        raise ImportError(
            "the boiling points come from the package `chemicals`: pip install causalqwen[demo]"
        ) from error
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
        record = {
            "name": name,
            "formula": compound.formula,
            "kelvin": round(float(kelvin), 4),
            "entity": compound.InChI_key.split("-")[0],
        }
        if len(find_numbers(sentence(record))) == 1:
            records.append(record)
    return records


def sentence(record: dict[str, Any]) -> str:
    """The record as a sentence that holds its boiling point."""
    return SENTENCE.format(name=record["name"], formula=record["formula"], value=f"{record['kelvin']:.8g}")


def write_sentences(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """A JSONL file of sentences (`text` rows); appears by rename."""
    with writing(path) as part, part.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps({"text": sentence(record), "compound": record["name"]}, ensure_ascii=False) + "\n")
