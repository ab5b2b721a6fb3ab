"""All of it: every method on every table with every seed, each result in a file of its own."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.numbers.digits import DigitWriter
from benchmarks.numbers.ours import Graft, TextRegressor
from benchmarks.numbers.parts import MakeModel, Parts, prepare
from benchmarks.numbers.regression import fit_mlp, fit_quantile_boosting, fit_training_quantiles
from benchmarks.numbers.tables import Records, real_table
from causalqwen.evaluation.rivals import Predictor, Rival, fit_ngram_ridge
from causalqwen.files import writing
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.backbones import resolve_device

REGRESSIONS: dict[str, Rival] = {
    "constant": fit_training_quantiles,
    "ngram-ridge": fit_ngram_ridge,
    "mlp": fit_mlp,
    "boosting": fit_quantile_boosting,
    "boosting-numbers": partial(fit_quantile_boosting, numbers=True),
}
METHODS = (*REGRESSIONS, "lora-digits", "regressor", "causalqwen")
FORMAT = 4
"""Number of the format of results: one more wherever a method, or what is kept of it, changes."""
_ON_FEATURES = ("mlp", "causalqwen")
"""Methods whose seconds include those of reading the features."""


def graft(backbone: str, **config: Any) -> CausalQwenForCausalLM:
    """A graft whose start values never vary, so that all of them read the same features."""
    torch.manual_seed(0)
    return CausalQwenForCausalLM.from_backbone(backbone, **config).to(resolve_device("auto"))


@dataclass
class Benchmark:
    """What is compared, and where it is kept.

    Args:
        output: folder for results and kept features. tables: their names.
        backbone: its name, for the key of a result. make: a graft over it, see `graft`.
        table: unit and records of a name, see `real_table`. config: of every graft (`CausalQwenConfig`).
        text: columns of a table of one's own that are texts, whatever they look like.
        bf16: read with the backbone in bfloat16 (`TrainSettings.bf16`), for all alike.
    """

    output: Path
    tables: Sequence[str]
    backbone: str
    make: MakeModel
    table: Callable[[str], tuple[str, Records]] = real_table
    config: dict[str, Any] = field(default_factory=dict)
    text: Sequence[str] = ()
    bf16: bool = False
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        if "copy_numbers" in self.config:
            raise ValueError("ours chooses by itself whether numbers are copied: leave copy_numbers out")
        self._records: dict[str, tuple[str, Records]] = {}
        self._parts: dict[str, Parts] = {}

    def run(self, methods: Sequence[str], seeds: int) -> None:
        """Compute whatever of it has no result yet; each appears by rename, so that a stopped run goes on where it stopped.

        Raises:
            ValueError: an unknown method or table. ImportError: a table's package that is not installed.
        """
        if unknown := [method for method in methods if method not in METHODS]:
            raise ValueError(f"unknown methods {', '.join(unknown)}; known: {', '.join(METHODS)}")
        for name in self.tables:
            self.records(name)  # an unknown table, or one whose package is missing, is told before anything is fitted
        for name in self.tables:
            for seed in range(seeds):
                for method in methods:
                    if not self.file(name, method, seed).exists():
                        self.say(f"{name}, seed {seed}: {method}")
                        parts, started = self.parts(name), time.perf_counter()
                        predict = self._rival(method, parts)(parts.train, parts.validation, seed)
                        self._keep(name, method, seed, predict, time.perf_counter() - started)

    def file(self, name: str, method: str, seed: int) -> Path:
        """Where a result lies; its name holds a hash of all that it depends on."""
        made: dict[str, Any] = {"format": FORMAT, "backbone": self.backbone, "method": method, "seed": seed}
        made |= {"config": self.config, "bf16": self.bf16, "text": list(self.text) if method == "regressor" else None}
        key = json.dumps([made, self.records(name)[1]], sort_keys=True, default=str)  # a cell may be a date
        return self.output / "results" / f"{name}-{method}-{seed}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.npz"

    def records(self, name: str) -> tuple[str, Records]:
        """Unit and records of a table, read once."""
        if name not in self._records:
            self._records[name] = self.table(name)
        return self._records[name]

    def parts(self, name: str) -> Parts:
        """A table ready to be learned, read once by the graft that all methods share."""
        if name not in self._parts:
            unit, records = self.records(name)
            model = self.make(**self.config | {"copy_numbers": True})  # who copies needs the numbers in the prompts too
            model.bf16 = self.bf16
            self._parts[name] = prepare(name, unit, records, model, self.output / "facts" / name)
        return self._parts[name]

    def _rival(self, method: str, parts: Parts) -> Rival:
        if method in REGRESSIONS:
            return REGRESSIONS[method]
        if method == "lora-digits":
            return DigitWriter(partial(self.make, **self.config), bf16=self.bf16)
        if method == "regressor":
            return TextRegressor(self.backbone, self.config, self.text, self.bf16, self.output / "rows")
        return Graft(self.make, parts.facts, self.config, self.bf16)

    def _keep(self, name: str, method: str, seed: int, predict: Predictor, seconds: float) -> None:
        """Ask a fitted rival about the test rows; write it down."""
        parts, file = self.parts(name), self.file(name, method, seed)
        started = time.perf_counter()
        forecast = predict(parts.test)
        asking = (time.perf_counter() - started) / len(parts.test)
        arrays: dict[str, Any] = {"quantiles": forecast.quantiles, "values": parts.test.values}
        arrays |= {} if forecast.log_prob is None else {"log_prob": forecast.log_prob}
        arrays |= {} if forecast.raw is None else {"raw": forecast.raw}
        if method in _ON_FEATURES:
            read = parts.facts_seconds if method == "causalqwen" else parts.prompt_seconds
            seconds += read * (len(parts.train) + len(parts.validation))
            asking += parts.prompt_seconds
        about = {
            "table": name, "unit": parts.unit, "method": method, "seed": seed, "range": parts.law.value_range,
            "sizes": [len(parts.train), len(parts.validation), len(parts.test)],
            "train_seconds": seconds, "predict_seconds": 1000 * asking, "notes": forecast.notes,
        }  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        with writing(file) as part, part.open("wb") as target:
            np.savez_compressed(target, about=json.dumps(about), **arrays)
