"""A page of worlds: individuals by interventions."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from causalqwen.decoding import Individual
from causalqwen.evaluation.page import figure, number_row, write_page
from causalqwen.evaluation.worlds import segments
from causalqwen.modeling import Intervention, Observation, World
from causalqwen.modeling.worlds import WorldNumber

HOW = {
    "abduct": "The noise that explains the observed text is kept: the world that was gives it back.",
    "redraw": "The noise is drawn anew in every world.",
}

Told = tuple[World, list[WorldNumber]]
"""A world and its numbers."""


def write_worlds(
    path: Path,
    observed: Observation,
    interventions: Sequence[Intervention],
    people: Sequence[tuple[str, Individual]],
    worlds: Sequence[Sequence[Sequence[Told]]],
    noise: str,
) -> None:
    """The page; it appears by rename.

    Args:
        interventions: the columns; the first is the world that was. people: names and individuals, the rows.
        worlds: of each individual, under each intervention, the samples. noise: "abduct" or "redraw".
    """
    labels = column_labels(len(interventions))
    columns = [
        {"label": label, "prompt": segments(observed.prompt, one.prompt_from(observed.prompt)), "set": what_is_set(one)}
        for label, one in zip(labels, interventions, strict=True)
    ]
    rows = [
        {"name": name, "about": _about(who), "cells": [_cell(observed.text, cell) for cell in of_person]}
        for (name, who), of_person in zip(people, worlds, strict=True)
    ]
    numbers = [
        (index, number_row(f"{name} · {label} · {index + 1}", number.value, number.law, times))
        for (name, _), of_person in zip(people, worlds, strict=True)
        for label, cell in zip(labels, of_person, strict=True)
        for times, (_, of_text) in zip(_times(cell), _distinct(cell), strict=True)
        for index, number in enumerate(of_text)
    ]
    numbers.sort(key=lambda row: row[0])  # the first values of all texts first
    write_page(
        path, "worlds.html", title="What they would have said", width="84rem", how=HOW[noise], kept=noise == "abduct",
        prompt=observed.prompt, text=observed.text, columns=columns, rows=rows,
        numbers=[row for _, row in numbers] if any("median" in row for _, row in numbers) else [],
    )  # fmt: skip


def column_labels(count: int) -> list[str]:
    """Short names of the interventions."""
    return ["as it was", *(f"edit {place}" for place in range(1, count))]


def what_is_set(intervention: Intervention) -> list[str]:
    """What is forced in the text itself, a line each, in its order."""
    lines = {place: f"“{text}”" for place, text in intervention.tokens.items()}
    lines |= {place: f"do({figure(value, 12)})" for place, value in intervention.values.items()}
    speaker = [] if intervention.model is None else [f"spoken by {Path(intervention.model.name_or_path).name}"]
    return [*speaker, *(f"behind {place} tokens: {lines[place]}" for place in sorted(lines))]


def _about(who: Individual) -> str:
    tokens, values = sum(e.tokens for e in who.evidence), sum(e.values for e in who.evidence)
    return f"inferred from {tokens:,} tokens and {values:,} values" if who.evidence else "known exactly"


def _distinct(cell: Sequence[Told]) -> list[Told]:
    """The worlds of a cell whose texts differ, in their order."""
    by_text: dict[str, Told] = {}
    for world, numbers in cell:
        by_text.setdefault(world.text, (world, numbers))
    return list(by_text.values())


def _times(cell: Sequence[Told]) -> list[str]:
    """In how many of its worlds a cell has each of its texts; nothing where it has one world."""
    times = Counter(world.text for world, _ in cell)
    return [f"{times[world.text]} of {len(cell)} worlds" if len(cell) > 1 else "" for world, _ in _distinct(cell)]


def _cell(text: str, cell: Sequence[Told]) -> list[dict]:
    return [
        {"pieces": segments(text, world.text, numbers), "times": times}
        for times, (world, numbers) in zip(_times(cell), _distinct(cell), strict=True)
    ]
