"""Ours: stage 1 of `train` on the kept features, whose transform and tail index the validation rows choose."""

import copy
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from causalqwen.core import Chain
from causalqwen.evaluation.numbers_benchmark.parts import MakeModel, examples_of
from causalqwen.evaluation.numbers_benchmark.scores import crps_log
from causalqwen.evaluation.rivals import Forecast, NumberTable, Predictor, crps_of
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.numbers import CRPS_LEVELS, ValueLaw, symlog
from causalqwen.numbers.copies import CopyLaw
from causalqwen.training import TrainSettings, train
from causalqwen.training.stages import WORK

TRANSFORMS = ("affine", "symlog", "quantile")
FAMILIES = ("gaussian", "cauchy")
_DIVERGED = 1e9
"""The score of a row without one, above all others."""

_LEVEL = 1e-4
"""What two models of which neither is better may differ by, relative CRPS."""

Scored = tuple[np.ndarray, CausalQwenForCausalLM]


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
        model = self.trained([training], [validation], seed)
        return lambda table: forecast(model, table)

    def trained(self, training: list[NumberTable], held: list[NumberTable], seed: int) -> CausalQwenForCausalLM:
        """One model of all these tables, each on an axis of its own where `class_transforms` says so.

        It is that of the transform whose `relative_crps` on the validation rows is least; with Cauchy tails, and then with
        copying, where `config` leaves them open and they are clearly better: a few hundred rows say little about far tails,
        and in most tables a number of the text is the value by chance alone. (Log scores do not compare: an atom has a
        probability, not a density.)"""

        def fitted(transforms: Sequence[str], **config: Any) -> Scored:
            start = self.make(**self.config | config)
            models = [self._trained(start, transform, training, held, seed) for transform in transforms]
            found = [(np.concatenate([relative_crps(model, table) for table in held]), model) for model in models]
            return min(found, key=lambda scored: _finite(scored[0]).mean())

        families = [self.config["value_family"]] if "value_family" in self.config else FAMILIES
        best, *others = [fitted(TRANSFORMS, value_family=family, copy_numbers=False) for family in families]
        for other in others:
            best = clearly_better(best, other)
        if self.config.get("copy_numbers"):
            kept: Any = best[1].config
            best = clearly_better(best, fitted([kept.value_transform["kind"]], value_family=kept.value_family))
        return best[1]

    def _trained(
        self,
        start: CausalQwenForCausalLM,
        transform: str,
        training: list[NumberTable],
        validation: list[NumberTable],
        seed: int,
    ) -> CausalQwenForCausalLM:
        model = copy.deepcopy(start, {id(kept): kept for kept in (start.backbone, start.processor)})
        torch.manual_seed(seed)
        model.value_reader.start_anew()
        learned, held = (
            [
                one
                for table in part
                for one in examples_of(model, table.prompts, table.values.tolist(), table.class_name)
            ]
            for part in (training, validation)
        )
        settings = TrainSettings.from_dict({"seed": seed, "value_transform": transform, **self.settings})
        with tempfile.TemporaryDirectory(dir=self.facts) as folder:
            work = Path(folder) / "run" / WORK
            work.mkdir(parents=True)
            for kept in self.facts.resolve().glob("features-*"):
                (work / kept.name).symlink_to(kept)
            train(model, learned, held, work.parent, settings, save=False)
        return model


def clearly_better(plain: Scored, other: Scored) -> Scored:
    """The other of two models with their scores [n] on the same rows (lower is better) where its mean is lower by more than a
    standard error of the paired difference, else the plain one."""
    gain = _finite(plain[0]) - _finite(other[0])
    return other if gain.mean() > max(gain.std() / math.sqrt(len(gain)), _LEVEL) else plain


def _finite(scores: np.ndarray) -> np.ndarray:
    return np.nan_to_num(scores, nan=_DIVERGED, posinf=_DIVERGED)


def relative_crps(model: CausalQwenForCausalLM, table: NumberTable) -> np.ndarray:
    """CRPS [n] of the model, recalibrated on a table, over the mean distance of its values from their median: in the data's
    units and on the log scale, the mean of both."""
    recalibrated(model, table)
    quantiles, values = forecast(model, table).quantiles, table.values
    law = model.value_law_of(table.class_name)
    found = (crps_of(quantiles, values, law), crps_log(quantiles, values, law))
    logged = symlog(torch.from_numpy(values)).numpy()
    spread = (float(np.abs(column - np.median(column)).mean()) for column in (values, logged))
    relative = [crps / max(width, 1e-300) for crps, width in zip(found, spread, strict=True)]
    return np.mean(relative, axis=0)


def recalibrated(model: CausalQwenForCausalLM, validation: NumberTable) -> None:
    """Fit the levels of the model's intervals on these validation rows alone; of a model that copies, on those whose value is
    none of the context's, because the levels are a new number's."""
    law, loc, scale = located(model, validation)
    values = torch.from_numpy(validation.values)
    new = ~law.stands(values) if isinstance(law, CopyLaw) else torch.ones_like(values, dtype=torch.bool)
    model.config.interval_levels, model.config.class_interval_levels = None, {}
    if bool(new.any()):
        of_new = model.value_law_of(validation.class_name)
        model.config.interval_levels = list(of_new.fit_interval_levels(loc[new], scale[new], values[new]))


@torch.no_grad()
def located(model: CausalQwenForCausalLM, table: NumberTable) -> tuple[ValueLaw | CopyLaw, torch.Tensor, torch.Tensor]:
    """The law of the values behind each row's features, and its loc and scale [n], float64."""
    features = torch.from_numpy(table.features).to(model.device, model.abduction.loc_net.weight.dtype)
    loc, scale = Chain(model, features).value()
    candidates = None if table.candidates is None else table.candidates.to(model.device)
    law: Any = model.copy_law(features, candidates, model.value_law_of(table.class_name)).to("cpu")
    return law, loc.double().cpu(), scale.double().cpu()


def forecast(model: CausalQwenForCausalLM, table: NumberTable) -> Forecast:
    """Quantiles as the model has them, recalibrated, and those of its own law (`raw`)."""
    law, loc, scale = located(model, table)
    log_prob = law.log_prob(loc, scale, torch.from_numpy(table.values))
    wide = law.beside_levels()
    loc, scale = loc.unsqueeze(-1), scale.unsqueeze(-1)
    quantiles, raw = (wide.quantile(loc, scale, CRPS_LEVELS, raw=raw).numpy() for raw in (False, True))
    of_new = model.value_law_of(table.class_name)
    kept = (of_new.transform.kind, of_new.family)
    notes = {kind: float(kind in kept) for kind in (*TRANSFORMS, *FAMILIES)}
    notes["copies"] = float(model.config.copy_numbers)
    return Forecast(quantiles, log_prob=log_prob.numpy(), raw=raw, notes=notes)


def fit_joint(graft: Graft, tables: dict[str, tuple[NumberTable, NumberTable]], seed: int) -> dict[str, Predictor]:
    """One model on the training rows of all tables at once (train, validation), each a class with an axis of its own,
    recalibrated for each on its own validation rows; a predictor per table."""
    named = {name: tuple(replace(part, class_name=name) for part in pair) for name, pair in tables.items()}
    model = graft.trained([pair[0] for pair in named.values()], [pair[1] for pair in named.values()], seed)

    def predictor(validation: NumberTable) -> Predictor:
        def predict(table: NumberTable) -> Forecast:
            recalibrated(model, validation)
            return forecast(model, replace(table, class_name=validation.class_name))

        return predict

    return {name: predictor(pair[1]) for name, pair in named.items()}
