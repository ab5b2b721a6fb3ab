"""Worlds beside each other: what changed, word by word, and the values with their intervals."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from causalqwen.decoding import Individual
from causalqwen.modeling import CausalQwenForCausalLM, World

LEVEL = 0.9
"""What the intervals beside values cover."""


@dataclass(frozen=True)
class WorldNumber:
    """A value in a world's text, its characters start to end (exclusive), and the law that `individual` has there.

    median, low, high: of the law, [low, high] its central interval of mass `LEVEL`; None where the value was forced.
    """

    value: float
    start: int
    end: int
    median: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.median is None:
            return "set"
        return f"{LEVEL:.0%}: {self.low:.4g} to {self.high:.4g}"


@dataclass(frozen=True)
class Segment:
    """Text that is "same", "gone" or "new", and the number that it is, where it is one that stands in the world."""

    kind: str
    text: str
    number: WorldNumber | None = None


def world_numbers(model: CausalQwenForCausalLM, world: World, individual: Individual) -> list[WorldNumber]:
    """The values of a world in their order, with the intervals of `model.value_predictions`."""
    predictions = model.value_predictions(world, individual)
    before, of_before, _ = model.encode_text(world.prompt, prompt=True)
    ids, values = torch.cat([before, world.tokens]), torch.cat([of_before, world.values])
    first = len(before)

    def characters(count: int) -> int:
        return len(model.processor.decode(ids[:count], numeric_values=values[:count]))

    numbers, origin = [], characters(first)
    for place in range(first, len(ids)):
        if ids[place] != model.config.num_token_id:
            continue
        end = place + 1
        while end - first in world.digits:
            end += 1
        span = (characters(place) - origin, characters(end) - origin)
        law = predictions.get(place - first)
        told = () if law is None else (law.median, *law.interval(LEVEL))
        numbers.append(WorldNumber(values[place].item(), *span, *told))
    return numbers


def word_changes(before: str, after: str) -> list[tuple[str, str]]:
    """`after` aligned with `before`, word by word: ("same" | "gone" | "new", text) pieces in their order.

    The pieces that are not gone make up `after`, those that are not new make up `before`.
    """
    old, new = (re.findall(r"\s*\S+|\s+$", text) for text in (before, after))
    pieces: list[tuple[str, str]] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            pieces.append(("same", "".join(new[c:d])))
            continue
        pieces += [("gone", "".join(old[a:b]))] * (b > a) + [("new", "".join(new[c:d]))] * (d > c)
    return pieces


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

    Behind each number its interval, in parentheses.
    """
    marks = {"same": ("", ""), "gone": ("[-", "-]"), "new": ("{+", "+}")}
    told, kind = "", "same"
    for segment in segments(before, after, numbers):
        if segment.kind != kind:
            told, kind = told + marks[kind][1] + marks[segment.kind][0], segment.kind
        told += segment.text + (f" ({segment.number})" if segment.number else "")
    return told + marks[kind][1]
