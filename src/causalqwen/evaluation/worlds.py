"""Worlds beside each other, as text: what changed, word by word, and each number with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass

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

    Behind each number its interval, in parentheses.
    """
    marks = {"same": ("", ""), "gone": ("[-", "-]"), "new": ("{+", "+}")}
    told, kind = "", "same"
    for segment in segments(before, after, numbers):
        if segment.kind != kind:
            told, kind = told + marks[kind][1] + marks[segment.kind][0], segment.kind
        told += segment.text + (f" ({segment.number})" if segment.number else "")
    return told + marks[kind][1]
