"""How values are read, where nobody said so: axis, law, loss, members and copying, chosen by rows held out (theory 3.8).

A handful of value branches are trained on kept features, in a fixed order, and the one whose held-out CRPS is lowest is taken.
The choice is a matter of minutes beside the reading of the rows; `causalqwen train` says beforehand how many fits it may take.
"""

import dataclasses
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from causalqwen.data import Example
from causalqwen.data.encoding import class_names
from causalqwen.losses import quantile_crps
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.chain import Chain
from causalqwen.numbers import CRPS_LEVELS, symlog
from causalqwen.numbers.law import rows_of_classes
from causalqwen.parts.copying import Candidates
from causalqwen.parts.value_axes import fits_each_class
from causalqwen.training.axes import LearnedNumbers
from causalqwen.training.candidates import numbers_of
from causalqwen.training.features import FactStore
from causalqwen.training.settings import ChosenStage, TrainSettings, ValueStage
from causalqwen.training.trials import EVALUATIONS, FAMILIES, LESS_DROPOUT, Drawn, Fold, Trials, Tried, clearly_better

AXES = ("affine", "log", "quantile")
READER = {"copy_numbers": True}
"""The graft that reads rows for all that are tried: the numbers in them too."""

BRANCH: dict[str, Any] = {"value_branch_dropout": 0.5, "value_branch_members": 4, "value_loss": "crps"}
"""Settings of every graft that is tried, which are not chosen between (experiments 13)."""

STAGE = ValueStage(epochs=12, center=True)
CLASS_STAGE = ValueStage(epochs=36, learning_rate=2e-4, center=True)
"""Where classes have axes of their own: several are learned more slowly than one."""

TIMES_LONGER = 5
"""Passes where less dropout is tried."""

REGRESSION_RATE = 3e-4
"""Where the start is a regression already."""

FEWEST_UPDATES = 156
"""Few rows are passed over more often, until so many updates are made: those of 12 passes over 800 rows."""

MOST_ROWS, MOST_HELD = 2048, 1024
"""Rows that a choice is made on, and by; the chosen one is then trained on all."""

FEWEST_HELD, HELD_SHARE = 20, 0.2
"""Fewer rows than that choose nothing; what is held out of the training rows where none were given."""

FEWEST_LEVELS, FEW_SHARE = 9, 0.25
"""Fewer rows than that calibrate nothing: the least n whose rank ceil((n + 1) 0.9) is at most n. What is held out where a fifth
would be too few to choose by."""

_ERRORS = 3
"""By so many standard errors more values have to stand in their own contexts than in others before copying is tried."""


def say_again(examples: Sequence[Example], num_token_id: int) -> bool:
    """Whether values stand in their contexts more often than by chance, which is how often they stand in those of other rows
    with as many numbers: said - by_chance > 3 sqrt(said + by_chance)."""
    places = [numbers_of(example, num_token_id) for example in examples]
    standing = [[example.numeric_values[at] for at in of] for example, of in zip(examples, places, strict=True)]
    order = sorted(np.random.default_rng(0).permutation(len(examples)).tolist(), key=lambda row: len(standing[row]))
    said = by_chance = 0
    for row, another in zip(order, [*order[-1:], *order[:-1]], strict=True):
        other = standing[another][:-1]
        for count, at in enumerate(places[row]):
            value = examples[row].numeric_labels[at]
            said += value in standing[row][:count]
            by_chance += value in other[:count]
    return said - by_chance > _ERRORS * math.sqrt(said + by_chance)


def choosing(model: CausalQwenForCausalLM, settings: TrainSettings) -> bool:
    """Whether there is something to choose: a faithful graft whose values were never learned."""
    config = model.config
    fresh = config.value_range is None and config.start == "faithful" and config.value_branch
    return isinstance(settings.values, ChosenStage) and fresh


def rows_together(examples: Sequence[Example]) -> list[list[int]]:
    """The rows that are held out together: those of one individual, of one group, and of one text those that name neither."""
    together: dict[Any, list[int]] = {}
    for index, example in enumerate(examples):
        whose = ("individual", example.individual) if example.individual is not None else example.group
        text = (*example.input_ids, *example.numeric_values[:-1])
        together.setdefault(text if whose is None else whose, []).append(index)
    return list(together.values())


def hold_out(examples: Sequence[Example], seed: int) -> tuple[Sequence[Example], Sequence[Example]]:
    """Rows to train on, and rows to choose and calibrate by, drawn from the same ones as `rows_together` has them: a fifth of
    the rows at most, and a quarter of few, which calibrate alone (fewer than `FEWEST_HELD` that go together). None are held
    out of too few, or where groups are too large for that. A class that would be held out whole stays."""
    groups, held, taken = rows_together(examples), list[int](), 0
    few = len(groups) * HELD_SHARE < FEWEST_HELD
    share, fewest = (FEW_SHARE, FEWEST_LEVELS) if few else (HELD_SHARE, FEWEST_HELD)
    if len(groups) * share < fewest:
        return examples, []
    order = np.random.default_rng(seed).permutation(len(groups)).tolist()
    most = math.ceil(share * len(examples))
    for place in order:
        if len(held) + len(groups[place]) <= most and (not few or taken < FEWEST_HELD - 1):
            held += groups[place]
            taken += 1
    if known := class_names(examples):
        left = sorted(set(range(len(examples))) - set(held))
        lost = known - class_names(Drawn(examples, left))
        held = [row for row in held if examples[row].class_name not in lost]
    if len(held) < fewest:
        return examples, []
    rest = sorted(set(range(len(examples))) - set(held))
    return Drawn(examples, rest), Drawn(examples, sorted(held))


@dataclass(frozen=True)
class HeldNumbers:
    """Numbers of one class to choose by: the features before each [n, H], its value float64 [n], and the numbers that it may be
    a copy of; class_name None where all have one axis."""

    features: Tensor
    values: Tensor
    candidates: Candidates | None = None
    class_name: str | None = None

    @torch.no_grad()
    def located(self, model: CausalQwenForCausalLM) -> tuple[Any, Tensor, Tensor]:
        """The law of the values under a model, and its loc and scale [n], float64."""
        features = self.features.to(model.device, model.abduction.loc_net.weight.dtype)
        loc, scale = Chain(model, features).value()
        offered = self.candidates.to(model.device) if model.copies and self.candidates is not None else None
        law = model.copy_law(features, offered, model.value_axes.law(self.class_name)).to("cpu")
        return law, loc.double().cpu(), scale.double().cpu()

    def recalibrate(self, model: CausalQwenForCausalLM) -> None:
        """Fit the levels of the model's intervals on these numbers alone; of a model that copies, on those that are none of the
        context's, because the levels are a new number's."""
        law, loc, scale = self.located(model)
        new = ~law.stands(self.values)
        set_levels(model, None)
        if bool(new.any()):
            of_new = model.value_axes.law(self.class_name)
            set_levels(model, of_new.fit_interval_kinds(loc[new], scale[new], self.values[new]))

    def quantiles(self, model: CausalQwenForCausalLM, *, raw: bool = False) -> Tensor:
        """The quantiles [n, 199] at `CRPS_LEVELS`, recalibrated unless `raw`."""
        law, loc, scale = self.located(model)
        return law.beside_levels().quantile(loc.unsqueeze(-1), scale.unsqueeze(-1), CRPS_LEVELS, raw=raw)

    def relative_crps(self, model: CausalQwenForCausalLM) -> np.ndarray:
        """CRPS [n] of the model, recalibrated on these numbers, over the mean distance of the values from their median: in the
        data's units and on the log scale, the mean of both."""
        self.recalibrate(model)
        quantiles = model.value_axes.law(self.class_name).clip(self.quantiles(model))
        scores = []
        for shape in (torch.clone, torch.log if bool((self.values > 0).all()) else symlog):
            values = shape(self.values)
            spread = (values - values.median()).abs().mean().clamp(min=1e-300)
            scores.append(
                quantile_crps(values, shape(quantiles.clamp(min=_floor(self.values, quantiles))), CRPS_LEVELS) / spread
            )
        return torch.stack(scores).mean(0).numpy()


def _floor(values: Tensor, quantiles: Tensor) -> float:
    """Positive values are scored on their logarithm, and a quantile that is not positive as a tenth of the least."""
    return values.min().item() / 10 if bool((values > 0).all()) else quantiles.min().item()


def set_levels(model: CausalQwenForCausalLM, kinds: list[tuple[float, list[float]]] | None) -> None:
    """Tell a model the levels of its intervals, of each kind of numbers, by ascending scale; None for none."""
    config = model.config
    config.interval_levels, config.interval_kinds, config.class_interval_levels = None, [], {}
    if kinds:
        config.interval_levels, config.interval_kinds = kinds[0][1], kinds[1:]


def held_numbers(
    model: CausalQwenForCausalLM, examples: Sequence[Example], store: FactStore, certain: Set[tuple[int, ...]]
) -> list[HeldNumbers]:
    """The numbers of examples that are no part of a template, of each class where classes have axes of their own."""
    numbers = LearnedNumbers.of(examples, model.config.num_token_id, certain)
    rows = np.flatnonzero(
        (np.asarray(store.facts.targets) == model.config.num_token_id) & np.isfinite(store.facts.values)
    )
    keep, offered = ~numbers.certain, None
    if store.facts.numbers is not None:
        offered = Candidates(**store.facts.numbers.candidates())[torch.from_numpy(rows)]
    groups: Any = rows_of_classes(numbers.classes) if model.value_axes.apart else {None: torch.arange(len(rows))}
    made = []
    for name, of in groups.items():
        of = of[keep[of]]
        if len(of):
            at = rows[of.numpy()]
            features, values = store.facts.tensor("features")[at], torch.from_numpy(store.facts.values[at])
            made.append(HeldNumbers(features, values, None if offered is None else offered[of], name))
    return made


@dataclass(frozen=True)
class Choice(Trials):
    """A choice by rows that name nobody: by the CRPS of every number held out."""

    branch: ClassVar[dict[str, Any]] = BRANCH

    @property
    def has_enough(self) -> bool:
        return len(self.eval_examples) >= FEWEST_HELD

    @cached_property
    def folds(self) -> list[Fold]:
        return [self._rows]

    def scores_of(self, model: CausalQwenForCausalLM, held: Sequence[Example], store: FactStore) -> np.ndarray:
        """`HeldNumbers.relative_crps`, of all classes."""
        return np.concatenate([one.relative_crps(model) for one in held_numbers(model, held, store, self.certain)])

    def made(self) -> Tried:
        """The way to read values whose held-out score is best.

        Of each family the best axis; Cauchy tails, a start at a regression, more passes with less dropout, copying, and the
        likelihood as the loss, where each is clearly better.
        (Log scores do not compare: an atom has a probability, not a density.)
        """
        axes, families = self.axes(AXES), self.open("value_family", FAMILIES)
        copies, losses = self._copying(), self.open("value_loss", ("crps", "nll"))
        fits = len(axes) * (len(families) + len(self._straight()))
        more, longer = len(self._longer()) + (copies is None) + len(losses) - 1, bool(self._longer())
        passes = self.stage.epochs
        self.say(
            f"choosing how values are read: at most {fits} fits of {passes} passes, and {more} of "
            f"{passes * (TIMES_LONGER if longer else 1)}, over {len(self._rows[0]):,} of {len(self.train_examples):,} rows, by "
            f"{len(self._rows[1]):,} rows held out"
        )
        own = self.model.config.value_branch_direct
        base = {"value_loss": losses[0], "copy_numbers": bool(copies), "value_branch_direct": own}
        self._read(copies is not False)
        of_families = []
        for family in families:
            tried = [self.tried(axis, base | {"value_family": family}) for axis in axes]
            of_families.append(min(tried, key=lambda one: one.mean))
        best = of_families[0]
        for other in of_families[1:]:
            best = clearly_better(best, other)
        for straight in self._straight():
            config = best.config | {"value_branch_direct": straight}
            tried = [self.tried(best.axis, config)]
            if clearly_better(best, tried[0]) is not best:  # else it is hardly better on the other axes
                tried += [self.tried(axis, config) for axis in axes if axis != best.axis]
            better = [one for one in tried if clearly_better(best, one) is one]
            best = min(better, key=lambda one: one.mean, default=best)
        for longer_one in self._longer():
            best = clearly_better(best, self.tried(best.axis, best.config | longer_one | {"value_branch_direct": own}))
        if copies is None:
            best = clearly_better(best, self.tried(best.axis, best.config | READER))
        for loss in losses[1:]:
            best = clearly_better(best, self.tried(best.axis, best.config | {"value_loss": loss}))
        self.tell(best, "held-out CRPS {:.3f} of the values' own spread")
        return best

    def stage_of(self, config: dict[str, Any], rows: Sequence[Example], share: float = 1.0) -> ValueStage:
        """More passes, where they were better, of as many updates as on `MOST_ROWS`."""
        stage = self.stage
        if config.items() >= LESS_DROPOUT.items():
            more = TIMES_LONGER * min(1.0, MOST_ROWS / len(rows))
            stage = dataclasses.replace(stage, epochs=max(stage.epochs, round(more * stage.epochs)))
        return dataclasses.replace(stage, learning_rate=REGRESSION_RATE) if config["value_branch_direct"] else stage

    def trial_of(self, config: dict[str, Any], rows: Sequence[Example], share: float = 1.0) -> ValueStage:
        """The same, which ends where it has not become better for a third of it."""
        return dataclasses.replace(self.stage_of(config, rows, share), patience=EVALUATIONS // 3)

    @property
    def stage(self) -> ValueStage:
        stage = CLASS_STAGE if fits_each_class(self.settings) else STAGE
        updates = math.ceil(len(self.train_examples) / stage.batch_size)
        return dataclasses.replace(stage, epochs=max(stage.epochs, math.ceil(FEWEST_UPDATES / updates)))

    def _straight(self) -> tuple[bool, ...]:
        """Whether a branch that reads features straight too is tried: unless every one does already."""
        return (True,) if self.is_open("value_branch_direct") and not fits_each_class(self.settings) else ()

    def _longer(self) -> tuple[dict[str, Any], ...]:
        """Whether more passes with less dropout are tried: unless the graft says how much there is."""
        return (LESS_DROPOUT,) if self.is_open("value_branch_dropout") and not fits_each_class(self.settings) else ()

    def _copying(self) -> bool | None:
        """Whether a number may be the context's: as the graft says, False where no value is, None to try."""
        if not self.is_open("copy_numbers"):
            return self.model.copies
        return None if say_again(self._rows[0], self.model.config.num_token_id) else False

    @cached_property
    def _rows(self) -> tuple[Sequence[Example], Sequence[Example]]:
        """Some rows to train on, and some to choose by."""
        generator = np.random.default_rng(self.settings.seed)
        parts = []
        for examples, most in ((self.train_examples, MOST_ROWS), (self.eval_examples, MOST_HELD)):
            if len(examples) > most:
                examples = Drawn(examples, sorted(generator.permutation(len(examples))[:most].tolist()))
            parts.append(examples)
        return parts[0], parts[1]

    def _read(self, numbers: bool) -> None:
        """Keep the features of all rows, and of those that are chosen on; numbers: with what a model that copies needs, which
        serves the others too."""
        reader = self.renewed(READER if numbers else {})
        whole = self.train_examples, self.eval_examples
        for examples, rows, scored in zip(whole, self._rows, (False, True), strict=True):
            store = FactStore.build(reader, examples, self.work, title="reading rows", rest=scored)
            if isinstance(rows, Drawn) and rows is not examples:
                store.take(reader, rows, rows.indices, self.work)

    def stores(self, model: CausalQwenForCausalLM, fold: Fold) -> tuple[FactStore, FactStore]:
        """Opened once: all ways to read values share the features."""
        if model.copies not in self._opened:
            train_rows, held_rows = fold
            train = FactStore.build(model, train_rows, self.work, rest=False)
            self._opened[model.copies] = (train, FactStore.build(model, held_rows, self.work))
        return self._opened[model.copies]

    @cached_property
    def _opened(self) -> dict[bool, tuple[FactStore, FactStore]]:
        return {}
