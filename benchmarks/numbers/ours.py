"""Ours: `train` with its defaults on the kept features, and `NumberRegressor` with its defaults. Nothing is chosen here: what a
benchmark has, everybody has."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.numbers.parts import MakeModel, examples_of
from causalqwen.data.columns import Columns
from causalqwen.evaluation.number_table import NumberTable
from causalqwen.evaluation.rivals import Forecast, Predictor
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.numbers import CRPS_LEVELS
from causalqwen.numbers.transforms import TRANSFORMS
from causalqwen.sklearn import NumberRegressor
from causalqwen.training import TrainSettings
from causalqwen.training.choice_of_people import FAMILIES
from causalqwen.training.run import learn
from causalqwen.training.stages import WORK


@dataclass(frozen=True)
class Graft:
    """A rival of the mechanism in `rivals`: a graft made with `config`, trained by `train`'s defaults.

    facts: a folder with kept features (`FactStore`) of the rows, which are then not read again.
    """

    make: MakeModel
    facts: Path
    config: dict[str, Any]
    bf16: bool

    def __call__(self, training: NumberTable, validation: NumberTable, seed: int) -> Predictor:
        model = self.make(**self.config)
        learned, held = (examples_of(model, part.prompts, part.values.tolist()) for part in (training, validation))
        with tempfile.TemporaryDirectory(dir=self.facts) as folder:
            work = Path(folder) / "run" / WORK
            work.mkdir(parents=True)
            for features in self.facts.resolve().glob("features-*"):
                (work / features.name).symlink_to(features)
            learn(model, learned, held, work.parent, TrainSettings(seed=seed, bf16=self.bf16))
        return lambda table: forecast(model, table)


def forecast(model: CausalQwenForCausalLM, table: NumberTable) -> Forecast:
    """Quantiles as the model has them, recalibrated, and those of its own law (`raw`)."""
    found = model.predict_number(table.prompts)
    quantiles, raw = (
        np.array([[p.quantile(level, raw=raw) for level in CRPS_LEVELS.tolist()] for p in found])
        for raw in (False, True)
    )
    of_new = model.value_axes.law()
    kept = (of_new.transform.kind, of_new.family)
    notes = {kind: float(kind in kept) for kind in (*TRANSFORMS, *FAMILIES)} | {"copies": float(model.copies)}
    log_prob = np.array([p.log_prob(value) for p, value in zip(found, table.values.tolist(), strict=True)])
    return Forecast(quantiles, log_prob=log_prob, raw=raw, notes=notes)


@dataclass(frozen=True)
class TextRegressor:
    """`NumberRegressor` as a rival, on the texts that everybody reads, or on the columns that these were made of.

    It is given the rows to train and to validate on together, and holds some of them out by itself.

    backbone: its name. config: of its graft. text: columns that are texts. bf16: as `TrainSettings` has it. rows: a folder for
    what was read.
    """

    backbone: str
    config: dict[str, Any]
    text: Sequence[str]
    bf16: bool
    rows: Path

    def __call__(self, training: NumberTable, validation: NumberTable, seed: int) -> Predictor:
        texts = list(self.text) if training.cells else None
        kept: dict[str, Any] = {"bf16": self.bf16, "cache_dir": str(self.rows), "random_state": seed}
        made = NumberRegressor(self.backbone, config=self.config, text_columns=texts, **kept)
        made.fit(_rows(training, validation), np.concatenate([training.values, validation.values]))

        def predict(table: NumberTable) -> Forecast:
            rows = _rows(table)
            quantiles = np.stack(made.predict(rows, "quantiles", CRPS_LEVELS.tolist()), axis=1)
            predictions = made.predict(rows, "full")["predictions"]
            pairs = zip(predictions, table.values.tolist(), strict=True)
            log_prob = np.array([prediction.log_prob(value) for prediction, value in pairs])
            return Forecast(quantiles, log_prob=log_prob)

        return predict


def _rows(*tables: NumberTable) -> list[str] | Columns:
    """All rows of the tables: their texts, or the columns that these were made of."""
    if tables[0].cells is None:
        return [prompt for table in tables for prompt in table.prompts]
    return {name: [cell for table in tables for cell in table.cells[name]] for name in tables[0].cells}
