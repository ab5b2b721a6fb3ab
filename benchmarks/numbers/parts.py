"""A table made ready: its split, encoded and read once, for every rival alike."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from causalqwen.data import Example, Row, encode_rows
from causalqwen.data.columns import Columns
from causalqwen.evaluation.number_table import NumberTable
from causalqwen.extras import extra
from causalqwen.files import write_text
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.numbers import ValueLaw, ValueTransform, symlog
from causalqwen.training import FactStore

with extra("benchmark", "the benchmark of numbers"):
    from scipy import stats

MakeModel = Callable[..., CausalQwenForCausalLM]
"""A graft with these settings, start values always the same."""

_BATCH = 32
"""Prompts in a pass that is timed."""


@dataclass(frozen=True)
class Parts:
    """The three parts of one table. facts: the folder of what the backbone said about all their tokens. facts_seconds: what
    that took for one row; prompt_seconds: what a bare pass takes."""

    name: str
    unit: str
    train: NumberTable
    validation: NumberTable
    test: NumberTable
    facts: Path
    facts_seconds: float
    prompt_seconds: float

    @property
    def law(self) -> ValueLaw:
        """Whose `clip` is the one for all: the training range widened by its own width."""
        return ValueLaw(value_range=(float(self.train.values.min()), float(self.train.values.max())))


def spread_transform(values: Any) -> ValueTransform:
    """t of the rivals: symlog where |skewness| of symlog(v) is below that of v, else affine; centre and width fitted to the
    training values [n]."""
    values = torch.as_tensor(values, dtype=torch.float64)
    logged = abs(stats.skew(symlog(values).numpy())) < abs(stats.skew(values.numpy()))
    return ValueTransform.fit("symlog" if logged else "affine", values)


def examples_of(model: CausalQwenForCausalLM, prompts: Sequence[str], values: Sequence[float]) -> list[Example]:
    """Prompt rows, encoded, of which the value alone is learned: what is kept of them is one position each."""
    rows = [
        Row("prompt", f"row {index}", {"prompt": prompt, "value": float(value)})
        for index, (prompt, value) in enumerate(zip(prompts, values, strict=True), start=1)
    ]
    examples = encode_rows(rows, model.processor)
    return [replace(example, learned=[False] * (len(example) - 1) + [True]) for example in examples]


def prepare(
    name: str, unit: str, records: dict[str, list[dict[str, Any]]], model: CausalQwenForCausalLM, folder: Path
) -> Parts:
    """Read the records (train, validation, test) of a table with `model`, or take what was read from `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    clock, tables = folder / "seconds.json", {}
    # By the folder of features, which another backbone does not share.
    seconds: dict[str, float] = json.loads(clock.read_text(encoding="utf-8")) if clock.exists() else {}

    def took(what: str, started: float, rows: int) -> None:
        seconds[what] = (time.perf_counter() - started) / rows
        write_text(clock, json.dumps(seconds) + "\n")

    for part in ("train", "validation", "test"):
        prompts = [record["prompt"] for record in records[part]]
        examples = examples_of(model, prompts, [record["value"] for record in records[part]])
        known, started = set(folder.glob("features-*")), time.perf_counter()
        store = FactStore.build(model, examples, folder, title=f"{name}, {part}")
        if store.folder not in known:
            took(f"facts {store.folder.name}", started, len(examples))
        at, cells = np.isfinite(store.facts.values), _cells(records[part])
        features, values = (np.array(column[at]) for column in (store.facts.features, store.facts.values))
        tables[part] = NumberTable(prompts, features, values, cells)
    asking = f"prompt {store.folder.name}"
    if asking not in seconds:
        some, started = prompts[: 2 * _BATCH], time.perf_counter()
        model.predict_number(some, batch_size=_BATCH)
        took(asking, started, len(some))
    reading = seconds.get(f"facts {store.folder.name}", seconds[asking])  # a run stopped before it was written down
    return Parts(name, unit, **tables, facts=folder, facts_seconds=reading, prompt_seconds=seconds[asking])


def _cells(records: Sequence[dict[str, Any]]) -> Columns | None:
    """The columns that records were made of; None where they were not made of any."""
    if not records or "cells" not in records[0]:
        return None
    return {name: [record["cells"][name] for record in records] for name in records[0]["cells"]}
