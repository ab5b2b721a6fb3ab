"""Ours: stage 1 of `train` on the kept features, whose transform and tail index the validation rows choose."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from causalqwen.evaluation.numbers_benchmark.parts import MakeModel, examples_of
from causalqwen.evaluation.numbers_benchmark.scores import crps_log
from causalqwen.evaluation.rivals import Forecast, NumberTable, Predictor, crps_of
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.numbers import CRPS_LEVELS, symlog
from causalqwen.training import TrainSettings, train
from causalqwen.training.stages import WORK

TRANSFORMS = ("affine", "symlog", "quantile")
FAMILIES = ("cauchy", "gaussian")


@dataclass(frozen=True)
class Graft:
    """A rival of the mechanism in `rivals`: a graft made with `config`, its stage 1 trained by `settings`.

    facts: a folder with kept features (`FactStore`) of the rows, which are then not read again.
    """

    make: MakeModel
    facts: Path
    config: dict[str, Any]
    settings: dict[str, Any]

    def __call__(self, training: NumberTable, validation: NumberTable, seed: int) -> Predictor:
        model = self.trained(training, [validation], seed)
        return lambda table: forecast(model, table)

    def trained(self, training: NumberTable, held: list[NumberTable], seed: int) -> CausalQwenForCausalLM:
        """The model, of every transform and every family that `config` leaves open, whose `relative_crps` on the validation
        rows of each table is least on average. (Log scores do not compare: an atom has a probability, not a density.)"""
        families = [self.config["value_family"]] if "value_family" in self.config else FAMILIES
        kinds = [(transform, family) for transform in TRANSFORMS for family in families]
        models = (self._trained(*kind, training, _joined(held), seed) for kind in kinds)
        return min(models, key=lambda model: _finite(sum(relative_crps(model, table) for table in held)))

    def _trained(
        self, transform: str, family: str, training: NumberTable, validation: NumberTable, seed: int
    ) -> CausalQwenForCausalLM:
        model = self.make(**self.config | {"value_family": family})
        if model.value_branch is not None:
            torch.manual_seed(seed)
            for member in (model.value_branch.residual, *model.value_branch.others):
                member.reset_parameters()
        learned, held = (examples_of(model, part.prompts, part.values.tolist()) for part in (training, validation))
        settings = TrainSettings.from_dict({"seed": seed, "value_transform": transform, **self.settings})
        with tempfile.TemporaryDirectory(dir=self.facts) as folder:
            work = Path(folder) / "run" / WORK
            work.mkdir(parents=True)
            for kept in self.facts.resolve().glob("features-*"):
                (work / kept.name).symlink_to(kept)
            train(model, learned, held, work.parent, settings)
        return model


def _finite(score: float) -> float:
    """Infinite in place of NaN, which no score is below."""
    return math.inf if math.isnan(score) else score


def relative_crps(model: CausalQwenForCausalLM, table: NumberTable) -> float:
    """CRPS of the model, recalibrated on a table, over the mean distance of its values from their median: in the data's units
    and on the log scale, the mean of both."""
    recalibrated(model, table)
    quantiles, values = forecast(model, table).quantiles, table.values
    found = (crps_of(quantiles, values, model.value_law).mean(), crps_log(quantiles, values, model.value_law).mean())
    logged = symlog(torch.from_numpy(values)).numpy()
    spread = (float(np.abs(column - np.median(column)).mean()) for column in (values, logged))
    return sum(float(crps) / max(width, 1e-300) for crps, width in zip(found, spread, strict=True)) / 2


def recalibrated(model: CausalQwenForCausalLM, validation: NumberTable) -> None:
    """Fit the levels of the model's intervals on these validation rows alone."""
    loc, scale = located(model, validation)
    law, values = model.value_law, torch.from_numpy(validation.values)
    model.config.interval_levels = list(law.fit_interval_levels(loc, scale, values))


@torch.no_grad()
def located(model: CausalQwenForCausalLM, table: NumberTable) -> tuple[torch.Tensor, torch.Tensor]:
    """loc and scale [n] of the value behind each row's features, float64."""
    features = torch.from_numpy(table.features).to(model.device, model.abduction.loc_net.weight.dtype)
    loc, scale = model.value_parameters(features, *model.abduction(features))
    return loc.double().cpu(), scale.double().cpu()


def forecast(model: CausalQwenForCausalLM, table: NumberTable) -> Forecast:
    """Quantiles as the model has them, recalibrated, and those of its own law (`raw`)."""
    law = model.value_law
    loc, scale = (column.unsqueeze(-1) for column in located(model, table))
    log_prob = law.log_prob(loc[:, 0], scale[:, 0], torch.from_numpy(table.values))
    quantiles, raw = (law.quantile(loc, scale, CRPS_LEVELS, raw=raw).numpy() for raw in (False, True))
    notes = {kind: float(kind in (law.transform.kind, law.family)) for kind in (*TRANSFORMS, *FAMILIES)}
    return Forecast(quantiles, log_prob=log_prob.numpy(), raw=raw, notes=notes)


def fit_joint(graft: Graft, tables: dict[str, tuple[NumberTable, NumberTable]], seed: int) -> dict[str, Predictor]:
    """One model on the training rows of all tables at once (train, validation), recalibrated for each on its own validation
    rows; a predictor per table."""
    learned = _joined([training for training, _ in tables.values()])
    model = graft.trained(learned, [validation for _, validation in tables.values()], seed)

    def predictor(validation: NumberTable) -> Predictor:
        def predict(table: NumberTable) -> Forecast:
            recalibrated(model, validation)
            return forecast(model, table)

        return predict

    return {name: predictor(validation) for name, (_, validation) in tables.items()}


def _joined(tables: list[NumberTable]) -> NumberTable:
    prompts = [prompt for table in tables for prompt in table.prompts]
    columns = [np.concatenate([getattr(table, name) for table in tables]) for name in ("features", "values")]
    return NumberTable(prompts, *columns)
