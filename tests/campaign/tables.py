"""Regressors of random tables, asked about rows like those they learned from and about rows unlike them: columns that were
constant, new categories, missing values, values far outside. What is predicted is in order, moves no further than it may, and
is nowhere surer than of the nearest row that was like them."""

import datetime
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from causalqwen.sklearn import NumberRegressor

from . import Bounds, Tally

LEVELS = (0.5, 0.8, 0.9, 0.99)
_DAY = datetime.date(2022, 3, 7)
_WORDS = ("red", "old", "oak", "chair", "lamp", "desk", "round", "tall", "no name", "椅子")


def _dates(chance: random.Random, n: int) -> list[datetime.date]:
    span = chance.choice([1, 5, 40, 900])
    return [_DAY + datetime.timedelta(chance.randrange(span + 1)) for _ in range(n)]


def _numbers(chance: random.Random, n: int) -> list[float]:
    size, shape = 10.0 ** chance.randrange(-6, 9), chance.choice(["gauss", "lognormvariate", "rare"])
    if shape == "rare":
        return [float(chance.random() < 0.05) * size for _ in range(n)]
    return [getattr(chance, shape)(0, 1) * size for _ in range(n)]


def _categories(chance: random.Random, n: int) -> list[str]:
    levels = [f"{chance.choice(_WORDS)} {place}" for place in range(chance.choice([2, 4, 8]))]
    return [chance.choice(levels) for _ in range(n)]


def _texts(chance: random.Random, n: int) -> list[str]:
    with_number = chance.random() < 0.5
    return [
        " ".join(chance.choices(_WORDS, k=chance.randrange(1, 5))) + f", {chance.gauss(50, 9):.1f} kg" * with_number
        for _ in range(n)
    ]


KINDS: dict[str, Callable[[random.Random, int], list[Any]]] = {
    "number": _numbers,
    "hour": lambda chance, n: [chance.randrange(24) for _ in range(n)],
    "truth": lambda chance, n: [chance.random() < 0.5 for _ in range(n)],
    "date": _dates,
    "moment": lambda chance, n: [pd.Timestamp(day) + pd.Timedelta(chance.randrange(24), "h") for day in _dates(chance, n)],
    "date as text": lambda chance, n: [day.isoformat() for day in _dates(chance, n)],
    "month": lambda chance, n: [chance.choice(["Jan", "Feb", "Mar", "Apr"]) for _ in range(n)],
    "category": _categories,
    "text": _texts,
    "nothing": lambda chance, n: [None] * n,
}  # fmt: skip


def table(chance: random.Random, n: int) -> tuple[pd.DataFrame, np.ndarray]:
    """A table of columns of some kinds, constant or missing in part at times, and values that follow some of them."""
    columns: dict[str, list[Any]] = {}
    says = np.zeros(n)
    for place in range(chance.randrange(1, 6)):
        name = chance.choice([*KINDS])
        cells = KINDS[name](chance, n)
        how = chance.choice(["plain"] * 4 + ["constant", "missing", "constant, missing"])
        cells = [cells[0]] * n if how.startswith("constant") else cells
        columns[f"{place}, {name}, {how}"] = [
            None if how.endswith("missing") and chance.random() < 0.2 else cell for cell in cells
        ]
        codes, _ = pd.factorize(pd.Series(cells, dtype=object), sort=name != "nothing")
        says += chance.choice([0, 1, 1, 3]) * codes / max(1, codes.max())
    if not any(name.endswith("plain") for name in columns):
        columns["sure, number, plain"] = [chance.gauss(0, 1) for _ in range(n)]
        says += np.array(columns["sure, number, plain"])
    y = says + np.array([chance.gauss(0, 0.2) for _ in range(n)])
    shape = chance.choice(["straight", "exp", "zeros", "counts", "large"])
    if shape == "zeros":
        y = np.where([chance.random() < 0.6 for _ in range(n)], 0.0, np.exp(2 * y))
    y = {"exp": np.exp(y), "counts": np.rint(np.exp(y)), "large": 1e9 * y}.get(shape, y)
    frame = pd.DataFrame({name: pd.Series(cells, dtype=object) for name, cells in columns.items()})
    return frame.infer_objects(), y


def changes(chance: random.Random, name: str, cells: pd.Series) -> Iterator[tuple[str, Any, Any]]:
    """What a cell may hold later, and what it is nearest to: how, the cell, the nearest one (None: whatever is read)."""
    _, kind, how = name.split(", ", 2)
    there = [cell for cell in cells if not pd.isna(cell)]
    if not there or (how == "constant" and chance.random() < 0.5):
        yield "constant", chance.choice(["something new", 7.5, datetime.date(2030, 1, 1), None, 1e300]), "same"
        return
    if how == "constant":
        yield "constant", KINDS[kind](chance, 1)[0], "same"
        return
    if not how.endswith("missing"):
        yield "missing", None, None
    if kind in ("number", "hour"):
        least, greatest = min(there), max(there)
        by = chance.choice([1e-3, 0.3, 2.0, 1e3]) * (greatest - least + 1e-3 * abs(greatest) + 1e-9)
        yield "beyond", greatest + by, greatest
        yield "beyond", least - by, least
        yield "huge", chance.choice([-1, 1]) * 1e300, None
    elif kind in ("date", "moment", "date as text"):
        days = chance.choice([1, 6, 200, 5000])
        last, first = pd.Timestamp(max(there)), pd.Timestamp(min(there))
        for moved in (last + pd.Timedelta(days, "D"), first - pd.Timedelta(days, "D")):
            yield "beyond", moved.isoformat() if kind == "date as text" else moved, None
    elif kind in ("category", "month"):
        yield "new", chance.choice(["never seen", "June 7", "red"]), None
    elif kind == "text":
        yield "new", chance.choice(["漢字 9", "x", "999999.5 kg of it", "nothing like it " * 40]), "anything"


def look(made: NumberRegressor, rows: pd.DataFrame, y: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
    """What is predicted of rows, and what is wrong with it by itself."""
    full = made.predict(rows, "full")
    intervals = np.stack([made.predict_interval(rows, level) for level in LEVELS])
    found = {"median": full["median"], "mean": full["mean"], "widths": intervals[..., 1] - intervals[..., 0]}
    wrong = []
    if not all(np.isfinite(one).all() for one in (*found.values(), intervals)):
        wrong.append("not finite")
    ends = np.concatenate([intervals[::-1, :, 0], found["median"][None], intervals[:, :, 1]])
    if (np.diff(ends, axis=0) < 0).any():
        wrong.append("out of order")
    width = y.max() - y.min()
    slack = 1e-9 * (np.abs(y).max() + width)
    for name in ("median", "mean"):
        if ((found[name] < y.min() - width - slack) | (found[name] > y.max() + width + slack)).any():
            wrong.append(f"{name} beyond the range")
    return found, wrong


def run(bounds: Bounds, backbone: str) -> Tally:
    """A table for each draw."""
    tally = Tally()
    for number, chance in bounds.draws():
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            made = NumberRegressor(backbone, cache_dir=folder)
            _try(made, number, chance, tally)
    return tally


def _try(made: NumberRegressor, number: int, chance: random.Random, tally: Tally) -> None:
    n = chance.choice([24, 40, 80])
    frame, y = table(chance, n)
    made.fit(frame, y)
    row = frame.iloc[[chance.randrange(n)]].astype(object)
    asked, told = [], list[tuple[str, str, Any]]()
    for name in frame.columns:
        for how, cell, near in changes(chance, name, frame[name]):
            if near is None:
                near = made.reader_.known[name].nearest(cell)[0]
            moved, nearest = row.copy(), row.copy()
            moved[name] = pd.Series([cell], dtype=object, index=row.index)
            if near not in ("same", "anything"):
                nearest[name] = pd.Series([near], dtype=object, index=row.index)
            asked += [moved, nearest]
            told.append((name, how, near))
    found, wrong = look(made, pd.concat([row, *asked], ignore_index=True), y)
    tally.tried["tables"] += 1
    for what in wrong:
        tally.find("tables", f"draw {number}: {what}, of {[*frame.columns]}")
    slack = 1e-9 * np.abs(y).max()
    for place, (name, how, near) in enumerate(told):
        what = f"{name.split(', ')[1]}: {how}"
        tally.tried[what] += 1
        now, was = ({key: one[..., 2 * place + at] for key, one in found.items()} for at in (1, 2))
        if near == "anything":
            continue
        if (now["widths"] < was["widths"] - slack).any():
            tally.find(what, f"draw {number}, {name!r}: widths {now['widths']}, and {was['widths']} of the nearest")
        if abs(now["median"] - was["median"]) > slack:
            tally.find(what, f"draw {number}, {name!r}: median {now['median']}, and {was['median']} of the nearest")
