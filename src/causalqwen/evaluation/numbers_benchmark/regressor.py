"""Ours for scikit-learn: `NumberRegressor` with its defaults, on the texts that everybody reads, or on the columns that these
were made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from causalqwen.data.columns import Columns
from causalqwen.evaluation.number_table import NumberTable
from causalqwen.evaluation.rivals import Forecast, Predictor
from causalqwen.numbers import CRPS_LEVELS
from causalqwen.sklearn import NumberRegressor


@dataclass(frozen=True)
class TextRegressor:
    """A rival of the mechanism in `rivals`. It is given the rows to train and to validate on together, and holds some of them
    out by itself; so its intervals are recalibrated when it predicts.

    backbone: its name. config: of its graft. text: columns that are texts. bf16: as `TrainSettings` has it. rows: a folder for
    what was read.
    """

    backbone: str
    config: dict[str, Any]
    text: Sequence[str]
    bf16: bool
    rows: Path

    def __call__(self, training: NumberTable, validation: NumberTable, seed: int) -> Predictor:
        known = [_rows(table) for table in (training, validation)]
        texts = list(self.text) if training.cells else None
        kept: dict[str, Any] = {"bf16": self.bf16, "cache_dir": str(self.rows), "random_state": seed}
        made = NumberRegressor(self.backbone, config=self.config, text_columns=texts, **kept)
        made.fit(_joined(*known), np.concatenate([training.values, validation.values]))

        def predict(table: NumberTable) -> Forecast:
            rows = _rows(table)
            quantiles = np.stack(made.predict(rows, "quantiles", CRPS_LEVELS.tolist()), axis=1)
            predictions = made.predict(rows, "full")["predictions"]
            told = zip(predictions, table.values.tolist(), strict=True)
            return Forecast(quantiles, log_prob=np.array([one.log_prob(value) for one, value in told]), calibrated=True)

        return predict


def _rows(table: NumberTable) -> list[str] | Columns:
    return table.prompts if table.cells is None else table.cells


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, dict):
        return {name: [*cells, *second[name]] for name, cells in first.items()}
    return [*first, *second]
