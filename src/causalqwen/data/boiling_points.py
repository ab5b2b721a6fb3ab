"""Boiling points with names, written as sentences: real text with a real number in it.

Source: the table of C. L. Yaws in the Python package `chemicals` (MIT licence), 3 K to 5,869 K.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from causalqwen.files import writing
from causalqwen.numbers import find_numbers

SENTENCE = "The boiling point of {name} ({formula}) is {value} K."
PROMPT = "The boiling point of {name} ({formula}) is"


def boiling_points() -> list[dict[str, Any]]:
    """One record per compound: name, formula, kelvin, and `skeleton`, which stereoisomers of a compound share.

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
            "skeleton": compound.InChI_key.split("-")[0],
        }
        if len(find_numbers(sentence(record))) == 1:
            records.append(record)
    return records


def sentence(record: dict[str, Any]) -> str:
    """The record as a sentence that holds its boiling point."""
    return SENTENCE.format(name=record["name"], formula=record["formula"], value=f"{record['kelvin']:.8g}")


def split_by_compound(
    records: Sequence[dict[str, Any]], sizes: dict[str, int], seed: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Disjoint parts of about these sizes; records with one skeleton never fall into two parts.

    The order is that of a hash of the skeleton, so that a part does not change when other records come or go.
    ValueError where there are fewer records than asked for.
    """
    if len(records) < sum(sizes.values()):
        raise ValueError(f"{sum(sizes.values())} records asked for, {len(records)} there")

    def rank(record: dict[str, Any]) -> tuple[str, str]:
        key = f"{seed}/{record['skeleton']}".encode()
        return hashlib.sha256(key).hexdigest(), record["name"]

    ordered, parts, start = sorted(records, key=rank), {}, 0
    for name, size in sizes.items():
        end = start + size
        while 0 < end < len(ordered) and ordered[end]["skeleton"] == ordered[end - 1]["skeleton"]:
            end += 1
        parts[name] = ordered[start:end]
        start = end
    return parts


def write_sentences(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """A JSONL file of sentences (`text` rows); appears by rename."""
    with writing(path) as part, part.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps({"text": sentence(record), "compound": record["name"]}, ensure_ascii=False) + "\n")
