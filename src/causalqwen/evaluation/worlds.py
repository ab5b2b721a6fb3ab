"""Worlds beside each other."""

import difflib
import re


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


def mark_changes(before: str, after: str) -> str:
    """The same as one line of text: what is gone in [-...-], what is new in {+...+}, as in a word diff."""
    marks = {"same": ("", ""), "gone": ("[-", "-]"), "new": ("{+", "+}")}
    return "".join(marks[kind][0] + text + marks[kind][1] for kind, text in word_changes(before, after))
