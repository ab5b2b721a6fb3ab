"""Rows that are held out of the training rows, to choose by and to calibrate intervals."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Subset

from causalqwen.data import Example
from causalqwen.data.encoding import class_names
from causalqwen.training.features import grouped

FEWEST_HELD, HELD_SHARE = 20, 0.2
"""Fewer rows than that choose nothing; what is held out of the training rows where none were given."""

FEWEST_LEVELS, FEW_SHARE = 9, 0.25
"""Fewer rows than that calibrate nothing: the least n whose rank ceil((n + 1) 0.9) is at most n. What is held out where a fifth
would be too few to choose by."""

NEW_TEXTS = 0.05
"""Where fewer of the rows to come than that have a text of their own, a text that is known already tells of the next row."""


def some_of(examples: Sequence[Example], rows: list[int]) -> Any:
    """Some of the examples, which may lie on disk."""
    return Subset(examples, rows)  # type: ignore[arg-type]  # reads them by their places alone


def rows_together(examples: Sequence[Example]) -> list[list[int]]:
    """The rows that are held out together: those of one individual, of one group, and of one text those that name neither."""

    def whose(example: Example) -> Any:
        if example.individual is not None:
            return "individual", example.individual
        return (*example.input_ids, *example.numeric_values[:-1]) if example.group is None else example.group

    return grouped(map(whose, examples))


def left_out_together(examples: Sequence[Example]) -> list[list[int]]:
    """The rows that leave-one-out leaves out together: `rows_together`, but where texts come again each row alone. By Good and
    Turing a new row's text is one that is not among n with the probability n_1 / n, n_1 of them seen once; texts come again
    where that is below `NEW_TEXTS`."""
    groups = rows_together(examples)
    of_text = [rows for rows in groups if (first := examples[rows[0]]).individual is None and first.group is None]
    if sum(len(rows) == 1 for rows in of_text) >= NEW_TEXTS * sum(map(len, of_text)):
        return groups
    alone = {row for rows in of_text for row in rows}
    return [rows for rows in groups if rows[0] not in alone] + [[row] for row in sorted(alone)]


def hold_out(examples: Sequence[Example], seed: int) -> tuple[Sequence[Example], Sequence[Example]]:
    """Rows to train on, and rows to choose and calibrate by, drawn from the same ones as `rows_together` has them: a fifth of
    the rows at most, and a quarter of few, which calibrate alone (fewer than `FEWEST_HELD` that go together). None are held
    out of too few, or where groups are too large for that. A class that would be held out whole stays."""
    groups, held, taken = rows_together(examples), list[int](), 0
    few = len(groups) * HELD_SHARE < FEWEST_HELD
    share, fewest = (FEW_SHARE, FEWEST_LEVELS) if few else (HELD_SHARE, FEWEST_HELD)
    if len(groups) * share < fewest:
        return examples, []
    order = np.random.default_rng(seed).permutation(len(groups)).tolist()
    most = math.ceil(share * len(examples))
    for place in order:
        if len(held) + len(groups[place]) <= most and (not few or taken < FEWEST_HELD - 1):
            held += groups[place]
            taken += 1
    if known := class_names(examples):
        left = sorted(set(range(len(examples))) - set(held))
        lost = known - class_names(some_of(examples, left))
        held = [row for row in held if examples[row].class_name not in lost]
    if len(held) < fewest:
        return examples, []
    rest = sorted(set(range(len(examples))) - set(held))
    return some_of(examples, rest), some_of(examples, sorted(held))
