"""All of it: every method on every table with every seed, each result in a file of its own."""

import hashlib
import importlib.util
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
from benchmarks.numbers.ours import Graft, TextRegressor, fit_joint
from benchmarks.numbers.parts import MakeModel, Parts, examples_of, prepare
from benchmarks.numbers.regression import (
    fit_mlp,
    fit_ngboost,
    fit_quantile_boosting,
    fit_training_quantiles,
)
from benchmarks.numbers.scores import conformal_interval
from benchmarks.numbers.tables import Records, real_table
from causalqwen.evaluation.rivals import Predictor, Rival, central, fit_ngram_ridge
from causalqwen.files import writing
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.backbones import resolve_device
from causalqwen.parts.value_axes import EACH_CLASS
from causalqwen.training import LEVELS, FactStore

REGRESSIONS: dict[str, Rival] = {
    "constant": fit_training_quantiles,
    "ngram-ridge": fit_ngram_ridge,
    "mlp": fit_mlp,
    "boosting": fit_quantile_boosting,
    "boosting-numbers": partial(fit_quantile_boosting, numbers=True),
    "ngboost-normal": partial(fit_ngboost, law="Normal"),
    "ngboost-laplace": partial(fit_ngboost, law="Laplace"),
}
DIGITS: dict[str, dict[str, Any]] = {"lora-digits": {}, "lora-digits-ntl": {"ntl": 0.3}}
"""Settings of `DigitWriter`."""
REGRESSOR = "regressor"
JOINT = "causalqwen-joint"
GRAFTS: dict[str, dict[str, Any]] = {"causalqwen": {}, JOINT: EACH_CLASS}
"""What each has over the defaults of `train`: one model for all tables has an axis for each of them."""
METHODS = (*REGRESSIONS, *DIGITS, REGRESSOR, *GRAFTS)
FORMAT = 3
"""Number of the format of results: one more wherever a method, or what is kept of it, changes."""
_TEXT_ALONE = ("constant", "ngram-ridge", "boosting", "boosting-numbers", *DIGITS, REGRESSOR)
"""Methods to which the kept features cost nothing."""


def graft(backbone: str, **config: Any) -> CausalQwenForCausalLM:
    """A graft whose start values never vary, so that all of them read the same features."""
    torch.manual_seed(0)
    return CausalQwenForCausalLM.from_backbone(backbone, **config).to(resolve_device("auto"))


@dataclass
class Benchmark:
    """What is compared, and where it is kept.

    Args:
        output: folder for results and kept features. tables: their names; the joint model is one for all of these.
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
            ValueError: an unknown method or table. ImportError: a package that is not installed, before anything is fitted.
        """
        if unknown := [method for method in methods if method not in METHODS]:
            raise ValueError(f"unknown methods {', '.join(unknown)}; known: {', '.join(METHODS)}")
        for name in self.tables:
            self.records(name)  # an unknown table, or one whose package is missing, is told before anything is fitted
        if any(method.startswith("ngboost") for method in methods) and importlib.util.find_spec("ngboost") is None:
            raise ImportError("two of the rivals are the package `ngboost`: pip install 'causalqwen[benchmark]'")
        for name in self.tables:
            for seed in range(seeds):
                for method in methods:
                    if method != JOINT and not self.file(name, method, seed).exists():
                        self.say(f"{name}, seed {seed}: {method}")
                        parts, started = self.parts(name), time.perf_counter()
                        predict = self._rival(method, parts)(parts.train, parts.validation, seed)
                        self._keep(name, method, seed, predict, time.perf_counter() - started)
        if JOINT in methods:
            for seed in range(seeds):
                if not all(self.file(name, JOINT, seed).exists() for name in self.tables):
                    self._run_joint(seed)

    def file(self, name: str, method: str, seed: int) -> Path:
        """Where a result lies; its name holds a hash of all that it depends on."""
        made: dict[str, Any] = {"format": FORMAT, "backbone": self.backbone, "method": method, "seed": seed}
        made |= {"config": self.config, "bf16": self.bf16, "settings": DIGITS.get(method, GRAFTS.get(method))}
        made |= {"text": list(self.text)} if method == REGRESSOR else {}
        read = {table: self.records(table)[1] for table in (self.tables if method == JOINT else [name])}
        key = json.dumps([made, read], sort_keys=True, default=str)  # a cell may be a date
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
            self._parts[name] = prepare(name, unit, records, self._reader(), self.output / "facts" / name)
        return self._parts[name]

    def _reader(self) -> CausalQwenForCausalLM:
        """The graft whose kept features serve all methods: those that copy need the numbers in the prompts too."""
        model = self.make(**self.config | {"copy_numbers": True})
        model.bf16 = self.bf16
        return model

    def _rival(self, method: str, parts: Parts) -> Rival:
        if method in REGRESSIONS:
            return REGRESSIONS[method]
        if method in DIGITS:
            return DigitWriter(partial(self.make, **self.config), bf16=self.bf16, **DIGITS[method])
        if method == REGRESSOR:
            return TextRegressor(self.backbone, self.config, self.text, self.bf16, self.output / "rows")
        return self._graft(parts.facts, method)

    def _graft(self, facts: Path, method: str) -> Graft:
        return Graft(self.make, facts, self.config, GRAFTS[method] | {"bf16": self.bf16})

    def _run_joint(self, seed: int) -> None:
        """One model for all tables; a result for each, with its share of the seconds by rows."""
        self.say(f"{', '.join(self.tables)}, seed {seed}: {JOINT}")
        facts = self.output / "facts" / "-".join(["joint", *self.tables])
        pairs = {name: (self.parts(name).train, self.parts(name).validation) for name in self.tables}
        model = self._reader()
        for part in (0, 1):
            tables = {name: pair[part] for name, pair in pairs.items()}
            examples = {name: examples_of(model, t.prompts, t.values.tolist()) for name, t in tables.items()}
            FactStore.build(model, [example for these in examples.values() for example in these], facts)
        started = time.perf_counter()
        predictors = fit_joint(self._graft(facts, JOINT), pairs, seed)
        seconds, rows = time.perf_counter() - started, sum(len(pair[0]) for pair in pairs.values())
        for name, predict in predictors.items():
            self._keep(name, JOINT, seed, predict, seconds * len(pairs[name][0]) / rows)

    def _keep(self, name: str, method: str, seed: int, predict: Predictor, seconds: float) -> None:
        """Ask a fitted rival about the test rows, and about the validation rows for the conformal intervals; write it down."""
        parts, file = self.parts(name), self.file(name, method, seed)
        started = time.perf_counter()
        forecast = predict(parts.test)
        asking = (time.perf_counter() - started) / len(parts.test)
        held = predict(parts.validation)
        arrays: dict[str, Any] = {"quantiles": forecast.quantiles, "values": parts.test.values}
        arrays |= {} if forecast.log_prob is None else {"log_prob": forecast.log_prob}
        arrays |= {} if forecast.raw is None else {"raw": forecast.raw}
        for level in LEVELS:
            own = central(forecast.quantiles, level)
            ends = central(held.quantiles, level), parts.validation.values, own
            arrays[f"conformal_{level}"] = (
                own if forecast.calibrated else conformal_interval(*ends, level, parts.transform)
            )
        if method not in _TEXT_ALONE:
            read = parts.facts_seconds if method in GRAFTS else parts.prompt_seconds
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
