"""A campaign: what could break this library is drawn at random, tried and counted.

    PYTHONPATH=tests python -m campaign --size 0.01 --seed 7 --part texts

One number, the size, bounds the count and the seconds of each part together (`PARTS` in `__main__`). Each draw has a seed of
its own, which a finding names: `--part texts --seed 7 --only 1234` draws that one again. tests/test_campaign.py runs a little
of each part.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tqdm import tqdm


@dataclass
class Bounds:
    """How far a part goes: at most so many draws, from `seed`, and no further one after so many seconds. only: this one."""

    count: int
    seconds: float
    seed: int = 0
    only: int | None = None

    def draws(self) -> Iterator[tuple[int, random.Random]]:
        """Each draw's number, and its own source of chance."""
        end = time.monotonic() + self.seconds
        for number in tqdm(range(self.count) if self.only is None else [self.only], disable=None):
            if time.monotonic() > end:
                return
            yield number, random.Random(f"{self.seed}/{number}")


@dataclass
class Tally:
    """Of each thing that was tried: how often, how often it was refused with a clear error, and what was found."""

    tried: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    found: dict[str, list[str]] = field(default_factory=dict)

    def find(self, what: str, told: str) -> None:
        """Note something that should not be."""
        self.found.setdefault(what, []).append(told)

    def table(self) -> str:
        """A row for each thing that was tried, and below it the first findings."""
        rows = [
            f"| {what} | {count:,} | {self.refused[what]:,} | {len(self.found.get(what, ())):,} |"
            for what, count in sorted(self.tried.items())
        ]
        told = [f"{what}: {one}" for what, findings in sorted(self.found.items()) for one in findings[:5]]
        return "\n".join(["| tried | times | refused | found |", "|---|---|---|---|", *rows, *told])


def is_clear(error: BaseException, *names: str) -> bool:
    """Whether an error is one that users are meant to see: of a kind that the command line tells, in one line, and with one of
    these names, of a file or a field, in it."""
    told = str(error)
    return isinstance(error, ValueError | OSError) and "\n" not in told and any(name in told for name in names)
