"""Models that were saved before give what they gave: see `pins.py`, which makes the pins."""

import json
from typing import Any

import pytest

from pins import CASES, PINS, measure


def same(now: Any, pinned: Any, near: float = 2e-4) -> bool:
    """Equal, but for the last digits of floats, in which processors differ."""
    if isinstance(pinned, dict):
        return now.keys() == pinned.keys() and all(same(now[key], pinned[key]) for key in pinned)
    if isinstance(pinned, list):
        return len(now) == len(pinned) and all(same(*pair, near) for pair in zip(now, pinned, strict=True))
    return now == pytest.approx(pinned, rel=near, abs=2e-5) if isinstance(pinned, float) else now == pinned


SLOW = CASES.keys() - {"ordinary", "documents", "copying", "classes", "both"}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in CASES])
def test_what_was_saved_gives_what_it_gave(name, tmp_path):
    pinned = json.loads((PINS / f"{name}.json").read_text(encoding="utf-8"))
    now = json.loads(json.dumps(measure(name, tmp_path)))
    near = dict.fromkeys(pinned, 2e-4) | {"steps, values": 1e-2}  # L-BFGS ends elsewhere on another processor
    assert [key for key in pinned if not same(now.get(key), pinned[key], near[key])] == []
    assert now.keys() == pinned.keys()
