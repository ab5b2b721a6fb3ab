"""Ours: `train` with its defaults on the kept features, and `NumberRegressor` with its defaults. Nothing is chosen here: what a
benchmark has, everybody has."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """A rival of the mechanism in `rivals`: a graft made with `config`, trained by `settings` over `train`'s defaults.

    facts: a folder with kept features (`FactStore`) of the rows, which are then not read again.
    """

    make: MakeModel
    facts: Path
    config: dict[str, Any]
    settings: dict[str, Any]

    def __call__(self, training: NumberTable, validation: NumberTable, seed: int) -> Predictor:
        model = self.trained([training], [validation], seed)
        return lambda table: forecast(model, table)

    def trained(self, training: list[NumberTable], held: list[NumberTable], seed: int) -> CausalQwenForCausalLM:
        """One model of all these tables, each on an axis of its own where the settings say so."""
        model = self.make(**self.config)
        learned, kept = (
            [
                example
                for table in part
                for example in examples_of(model, table.prompts, table.values.tolist(), table.class_name)
            ]
            for part in (training, held)
        )
        settings = TrainSettings.from_dict({"seed": seed, **self.settings})
        with tempfile.TemporaryDirectory(dir=self.facts) as folder:
            work = Path(folder) / "run" / WORK
            work.mkdir(parents=True)
            for features in self.facts.resolve().glob("features-*"):
                (work / features.name).symlink_to(features)
            learn(model, learned, kept, work.parent, settings)
        return model


def forecast(model: CausalQwenForCausalLM, table: NumberTable) -> Forecast:
    """Quantiles as the model has them, recalibrated, and those of its own law (`raw`)."""
    found = model.predict_number(table.prompts, classes=table.class_name)
    quantiles, raw = (
        np.array([[p.quantile(level, raw=raw) for level in CRPS_LEVELS.tolist()] for p in found])
        for raw in (False, True)
    )
    of_new = model.value_axes.law(table.class_name)
    kept = (of_new.transform.kind, of_new.family)
    notes = {kind: float(kind in kept) for kind in (*TRANSFORMS, *FAMILIES)} | {"copies": float(model.copies)}
    log_prob = np.array([p.log_prob(value) for p, value in zip(found, table.values.tolist(), strict=True)])
    return Forecast(quantiles, log_prob=log_prob, raw=raw, notes=notes)


def fit_joint(graft: Graft, tables: dict[str, tuple[NumberTable, NumberTable]], seed: int) -> dict[str, Predictor]:
    """One model on the training rows of all tables at once (train, validation), each a class with an axis of its own,
    recalibrated for each on its own validation rows; a predictor per table."""
    named = {name: tuple(replace(part, class_name=name) for part in pair) for name, pair in tables.items()}
    model = graft.trained([pair[0] for pair in named.values()], [pair[1] for pair in named.values()], seed)

    def predictor(validation: NumberTable) -> Predictor:
        def predict(table: NumberTable) -> Forecast:
            return forecast(model, replace(table, class_name=validation.class_name))

        return predict

    return {name: predictor(pair[1]) for name, pair in named.items()}


@dataclass(frozen=True)
class TextRegressor:
    """`NumberRegressor` as a rival, on the texts that everybody reads, or on the columns that these were made of.

    It is given the rows to train and to validate on together, and holds some of them out by itself; so its intervals are
    recalibrated when it predicts.

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
            return Forecast(quantiles, log_prob=log_prob, calibrated=True)

        return predict


def _rows(*tables: NumberTable) -> list[str] | Columns:
    """All rows of the tables: their texts, or the columns that these were made of."""
    if tables[0].cells is None:
        return [prompt for table in tables for prompt in table.prompts]
    return {name: [cell for table in tables for cell in table.cells[name]] for name in tables[0].cells}
