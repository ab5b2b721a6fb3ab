"""Worlds beside each other, as text and as a page: what changed, word by word, and each number with its interval."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from causalqwen.decoding import Individual
from causalqwen.evaluation.page import figure, number_row, write_page
from causalqwen.modeling import Intervention, Observation, World
from causalqwen.modeling.worlds import WorldNumber, word_changes


@dataclass(frozen=True)
class Segment:
    """Text that is "same", "gone" or "new", and the number that it is, where it is one that stands in the world."""

    kind: str
    text: str
    number: WorldNumber | None = None


def segments(before: str, after: str, numbers: Sequence[WorldNumber] = ()) -> list[Segment]:
    """`word_changes`, cut further where the numbers of `after` stand."""
    pieces, end, upcoming = [], 0, list(numbers)
    for kind, text in word_changes(before, after):
        if kind == "gone":
            pieces.append(Segment(kind, text))
            continue
        at, end = end, end + len(text)
        while upcoming and upcoming[0].end <= end:
            number = upcoming.pop(0)
            if number.start > at:
                pieces.append(Segment(kind, after[at : number.start]))
            pieces.append(Segment(kind, after[max(at, number.start) : number.end], number))
            at = number.end
        if at < end:
            pieces.append(Segment(kind, after[at:end]))
    return pieces


def mark_changes(before: str, after: str, numbers: Sequence[WorldNumber] = ()) -> str:
    """The same as one line of text: what is gone in [-...-], what is new in {+...+}, as in a word diff.

    After each number its interval, in parentheses.
    """
    marks = {"same": ("", ""), "gone": ("[-", "-]"), "new": ("{+", "+}")}
    written, kind = "", "same"
    for segment in segments(before, after, numbers):
        if segment.kind != kind:
            written, kind = written + marks[kind][1] + marks[segment.kind][0], segment.kind
        written += segment.text + (f" ({segment.number})" if segment.number else "")
    return written + marks[kind][1]


Predicted = tuple[World, list[WorldNumber]]
"""A world and its numbers."""


def write_worlds(
    path: Path,
    observed: Observation,
    interventions: Sequence[Intervention],
    people: Sequence[tuple[str, Individual]],
    worlds: Sequence[Sequence[Sequence[Predicted]]],
    noise: str,
) -> None:
    """Write the page of individuals by interventions; it appears by rename.

    Args:
        interventions: the columns; the first is the world that was. people: names and individuals, the rows.
        worlds: of each individual, under each intervention, the samples. noise: "abduct" or "redraw".
    """
    labels = ["as it was", *(f"edit {place}" for place in range(1, len(interventions)))]
    columns = []
    for label, edit in zip(labels, interventions, strict=True):
        prompt = segments(observed.prompt, edit.prompt_from(observed.prompt))
        columns.append({"label": label, "prompt": prompt, "set": _what_is_set(edit)})
    rows, numbers = [], []
    for (name, who), of_person in zip(people, worlds, strict=True):
        cells = []
        for label, cell in zip(labels, of_person, strict=True):
            texts = _distinct(cell)
            cells.append(
                [{"pieces": segments(observed.text, *predicted), "times": times} for predicted, times in texts]
            )
            numbers += [
                (place, number_row(f"{name} · {label} · {place + 1}", number.value, number.law, times))
                for (_, of_text), times in texts
                for place, number in enumerate(of_text)
            ]
        tokens, values = sum(e.tokens for e in who.evidence), sum(e.values for e in who.evidence)
        known = f"inferred from {tokens:,} tokens and {values:,} values" if who.evidence else "known exactly"
        rows.append({"name": name, "about": known, "cells": cells})
    numbers.sort(key=lambda row: row[0])  # the first values of all texts first
    write_page(
        path, "worlds.html", title="What they would have said", width="84rem", kept=noise == "abduct",
        prompt=observed.prompt, text=observed.text, columns=columns, rows=rows,
        numbers=[row for _, row in numbers] if any("median" in row for _, row in numbers) else [],
    )  # fmt: skip


def _what_is_set(edit: Intervention) -> list[str]:
    """Lines that say what is forced in the text itself, in its order."""
    lines = {place: f"“{text}”" for place, text in edit.tokens.items()}
    lines |= {place: f"do({figure(value, 12)})" for place, value in edit.values.items()}
    speaker = [] if edit.model is None else [f"spoken by {Path(edit.model.name_or_path).name}"]
    return [*speaker, *(f"after {place} tokens: {lines[place]}" for place in sorted(lines))]


def _distinct(cell: Sequence[Predicted]) -> list[tuple[tuple[str, list[WorldNumber]], str]]:
    """The different texts of a cell in their order, each with its numbers, and in how many of several worlds it stands."""
    first = {world.text: numbers for world, numbers in reversed(cell)}
    times = Counter(world.text for world, _ in cell)
    of_all = f" of {len(cell)} worlds" if len(cell) > 1 else ""
    return [((text, first[text]), of_all and f"{count}{of_all}") for text, count in times.items()]
