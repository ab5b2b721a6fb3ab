"""How values are read where rows name individuals: passes, axis and law, by people held out (theory 3.14).

Ways to read values are each tried on kept features and scored by what was held out; of a fit, the scores alone remain.
"""

import copy
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from causalqwen.data import Example
from causalqwen.files import write_text
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.grafting import renew_values
from causalqwen.training import ranks
from causalqwen.training.axes import LearnedNumbers, fit_axes, numbers_learned
from causalqwen.training.batches import rows_of_people
from causalqwen.training.features import FactStore
from causalqwen.training.held_out import Drawn
from causalqwen.training.scores import joint_losses
from causalqwen.training.settings import ChosenStage, TrainSettings, ValueStage
from causalqwen.training.stages import TRAINERS, Run
from causalqwen.training.trainer import BriefTrainer, CausalTrainer

AXES = ("affine", "log")
FAMILIES = ("gaussian", "cauchy")
STAGE = ValueStage(epochs=12, learning_rate=1e-4)
FEWEST_UPDATES = 300
"""People are few, and each is one term of the loss: they are passed over until so many updates are made."""

SHARES = (0.1, 0.01)
"""Of the passes, that are tried beside all of them: few people in contexts of their own are soon learned by heart."""

FASTER = 3
"""A fit that is tried has so many times fewer updates, of a rate so many times larger (experiments 8.7)."""

PARTS, HELD_PEOPLE = 3, 30
"""Of so many parts of the people one is held out, then another, until so many people have been. Given evaluation rows are held
out instead."""

FEWEST_PEOPLE = 6
"""Fewer who said a number choose nothing."""

MOST_ROWS = 2048
"""Rows that a choice is made on, and by; of one person, no more than leave room for the fewest people. Their features are in
memory, once for each fold."""

EVALUATIONS = 12
CHOICE = "choice.json"
"""What was tried and chosen, beside the records of a run; what was chosen alone, in its work."""

_LEVEL = 1e-4  # what two models of which neither is better may differ by
_DIVERGED = 1e9  # the score of a row without one, above all others


@dataclass(frozen=True)
class Tried:
    """One way to read values: fields of the configuration, and the axis. scores: of everything held out, less is better.
    share: of the passes that the stage has."""

    config: dict[str, Any]
    axis: str
    scores: np.ndarray
    share: float = 1.0

    @property
    def mean(self) -> float:
        return float(self.scores.mean())

    @property
    def is_finite(self) -> bool:
        """Whether every row has a score."""
        return bool((self.scores < _DIVERGED).all())

    def to_dict(self) -> dict[str, Any]:
        """What a file says of it."""
        return self.config | {"axis": self.axis, "score": self.mean, "share_of_passes": self.share}


def clearly_better(plain: Tried, other: Tried) -> Tried:
    """The other of two where its mean score is lower by more than a standard error of the paired difference, else the plain
    one: a few hundred rows say little about far tails."""
    gain = plain.scores - other.scores
    return other if gain.mean() > max(gain.std() / math.sqrt(len(gain)), _LEVEL) else plain


@dataclass(frozen=True)
class Trial(Run):
    """A fit of which the scores alone remain. stores: the facts of its rows."""

    stores: tuple[FactStore, FactStore]
    watched: ClassVar[bool] = False
    trainer: ClassVar[type[CausalTrainer]] = BriefTrainer

    def train_facts(self) -> FactStore:
        return self.stores[0]

    def eval_facts(self) -> FactStore:
        return self.stores[1]


Fold = tuple[Sequence[Example], Sequence[Example]]
"""Rows that a fit is trained on, and rows that it is scored by."""


def is_open(model: CausalQwenForCausalLM, field: str) -> bool:
    """Whether a graft says nothing of a field: it was not given when it was made, and is the default."""
    config = model.config
    return field not in (config.given or ()) and getattr(config, field) == getattr(CausalQwenConfig, field)


def choosing(model: CausalQwenForCausalLM, settings: TrainSettings) -> bool:
    """Whether there is something to choose: a faithful graft whose values were never learned."""
    config = model.config
    fresh = config.value_range is None and config.start == "faithful" and config.value_branch
    return isinstance(settings.values, ChosenStage) and fresh


def better_for_most(plain: Tried, other: Tried) -> Tried:
    """The other of two where it is clearly better on average, and for more than half of the people by a standard error of that
    share too: one person whom nobody resembles can outweigh everybody else."""
    gains = np.sign(plain.scores - other.scores)
    most = gains.sum() > math.sqrt(np.count_nonzero(gains))
    return clearly_better(plain, other) if most else plain


@dataclass(frozen=True)
class ChoiceOfPeople:
    """A choice by rows that name individuals: by -log p, in nats a number, of what people held out said, e1 integrated out.

    The people of the evaluation rows choose where they are enough; else those of the training rows do, each part of them held
    out in turn, and all are trained on in the end.

    numbers: those of the training rows; certain: `certain_contexts` of them. work: where features are kept.
    """

    model: CausalQwenForCausalLM
    train_examples: Sequence[Example]
    eval_examples: Sequence[Example]
    numbers: LearnedNumbers
    certain: set[tuple[int, ...]]
    settings: TrainSettings
    work: Path
    say: Callable[[str], None]

    @cached_property
    def keeps_best(self) -> bool:
        """Where evaluation rows choose."""
        return len(self._told(self.eval_examples)) >= FEWEST_PEOPLE

    @cached_property
    def taught(self) -> list[list[int]]:
        """The rows of each individual of the training rows who said a number."""
        return self._told(self.train_examples)

    def made(self) -> Tried:
        """The way under which people held out are likeliest: fewer passes, another axis or law where most of them say so. A run
        that is taken up keeps what it chose."""
        kept = self.work / CHOICE
        if ranks.from_main(kept.exists()):
            chosen = json.loads(kept.read_text(encoding="utf-8"))
            return Tried(**chosen | {"scores": np.array(chosen["scores"])})
        axes, own = self.axes(), (self.model.config.value_family,)
        families = FAMILIES if is_open(self.model, "value_family") else own
        rows, held = self.folds[0]
        shares = self._shares(rows)
        ways = len(shares) + len(axes) + len(families) - 1
        turns = f"{len(self.folds)} parts of " if len(self.folds) > 1 else ""
        self.say(
            f"choosing how values are read: {ways} ways, by {turns}about {len(self._told(held)):,} people held out, in at most "
            f"{self.trial_of(rows).epochs} passes over {len(rows):,} rows"
        )
        best = self.tried(axes[0], {"value_family": families[0]})
        for share in shares:
            best = better_for_most(best, self.tried(best.axis, best.config, share))
        for axis in axes[1:]:
            best = better_for_most(best, self.tried(axis, best.config, best.share))
        for family in families[1:]:
            best = better_for_most(best, self.tried(best.axis, {"value_family": family}, best.share))
        self.tell(best)
        return best

    def _shares(self, rows: Sequence[Example]) -> list[float]:
        """Shares of the passes that are tried: none where people are drawn, because all together are not learned by heart."""
        found = {self.trial_of(rows).epochs: 1.0}
        if len(self.taught) == len(self._drawn(self.taught)):
            for share in SHARES:
                found.setdefault(self.trial_of(rows, share).epochs, share)
        return list(found.values())[1:]

    @property
    def has_enough(self) -> bool:
        return len(self.taught) >= FEWEST_PEOPLE

    @cached_property
    def folds(self) -> list[Fold]:
        people, others = self._drawn(self.taught), self._nobodys(self.train_examples)
        if self.keeps_best:
            return [
                (
                    _rows(self.train_examples, [*people, others]),
                    _rows(self.eval_examples, self._drawn(self._told(self.eval_examples))),
                )
            ]
        parts, folds, held = [people[place::PARTS] for place in range(PARTS)], [], 0
        for part in parts:
            if held < HELD_PEOPLE:
                rest = [person for other in parts if other is not part for person in other]
                folds.append((_rows(self.train_examples, [*rest, others]), _rows(self.train_examples, part)))
                held += len(part)
        return folds

    def stage_of(self, rows: Sequence[Example], share: float = 1.0) -> ValueStage:
        terms = len(rows_of_people([example.individual for example in rows])[0])
        updates = math.ceil(terms / STAGE.batch_size)
        epochs = max(STAGE.epochs, math.ceil(FEWEST_UPDATES / updates))
        return dataclasses.replace(STAGE, epochs=math.ceil(share * epochs))

    def trial_of(self, rows: Sequence[Example], share: float = 1.0) -> ValueStage:
        stage = self.stage_of(rows, share / FASTER)
        return dataclasses.replace(stage, learning_rate=FASTER * stage.learning_rate)

    def scores_of(self, model: CausalQwenForCausalLM, held: Sequence[Example], store: FactStore) -> np.ndarray:
        """For each person, the mean over numbers that are no part of a template."""
        certain = LearnedNumbers.of(held, model.config.num_token_id, self.certain).certain
        owners = [example.individual for example in held]
        losses, values, whose = joint_losses(model, store, owners, ~certain)
        _, places, counts = whose.unique(return_inverse=True, return_counts=True)
        axis, together = model.value_transform, counts[places] > 1
        # Values together have a density on the axis, where the support holds them, also if one alone is an atom.
        slope = axis.log_slope(axis.support.held(values))
        lost = losses - torch.where(together, slope, axis.log_jacobian(values))
        return (torch.zeros(len(counts)).double().index_add_(0, places, lost) / counts).numpy()

    def stores(self, model: CausalQwenForCausalLM, fold: Fold) -> tuple[FactStore, FactStore]:
        """Opened once: all ways to read values share the features."""
        train, held = (self._store(model, rows) for rows in fold)
        return train, held

    def _store(self, model: CausalQwenForCausalLM, rows: Sequence[Example]) -> FactStore:
        if id(rows) not in self._opened:
            whole = rows.examples if isinstance(rows, Drawn) else rows
            scored = whole is self.eval_examples
            store = FactStore.build(model, whole, self.work, title="reading rows", rest=scored)
            store = store.of_some(rows.indices) if isinstance(rows, Drawn) else store
            self._opened[id(rows)] = store
        return self._opened[id(rows)]

    @cached_property
    def _opened(self) -> dict[int, FactStore]:
        return {}

    def _told(self, examples: Sequence[Example]) -> list[list[int]]:
        """The rows of each individual who said a number that is no part of a template."""
        num_id, groups = self.model.config.num_token_id, rows_of_people([example.individual for example in examples])
        return [
            rows
            for rows in groups[0][: groups[1]]
            if any(words not in self.certain for words, _ in numbers_learned((examples[row] for row in rows), num_id))
        ]

    def _nobodys(self, examples: Sequence[Example]) -> list[int]:
        """Rows of nobody's, `MOST_ROWS` at most."""
        found = [row for row, example in enumerate(examples) if example.individual is None]
        if len(found) <= MOST_ROWS:
            return found
        return np.random.default_rng(self.settings.seed).choice(found, MOST_ROWS, replace=False).tolist()

    def _drawn(self, people: list[list[int]]) -> list[list[int]]:
        """A draw from the rows of people, `MOST_ROWS` at most: those of people drawn, of at least `FEWEST_PEOPLE`."""
        random, most = np.random.default_rng(self.settings.seed), MOST_ROWS // FEWEST_PEOPLE
        taken, rows = list[list[int]](), 0
        for person in random.permutation(len(people)).tolist():
            of = people[person]
            of = of if len(of) <= most else random.choice(of, most, replace=False).tolist()
            if rows + len(of) > MOST_ROWS:
                break
            taken.append(of)
            rows += len(of)
        return taken

    def axes(self) -> tuple[str, ...]:
        """Those to choose from, with symlog in place of log where values may be 0, unless the settings name one."""
        if self.settings.value_transform != "auto":
            return (self.settings.value_transform,)
        positive = (self.settings.support_of(self.numbers.values).low or 0.0) > 0
        return tuple("symlog" if kind == "log" and not positive else kind for kind in AXES)

    def renewed(self, config: dict[str, Any]) -> CausalQwenForCausalLM:
        """A model that shares the backbone, with other value parts."""
        shared = (self.model.backbone, self.model.processor)
        model = copy.deepcopy(self.model, {id(kept): kept for kept in shared})
        apply(model, config, self.settings.seed)
        return model

    def tried(self, axis: str, config: dict[str, Any], share: float = 1.0) -> Tried:
        """The scores of one way, the same on every rank."""
        made = Tried(config, axis, ranks.from_main(self._fit(axis, config, share)), share)
        self.known.append(made)
        self.say(f"  {described(made)}: " + (f"{made.mean:.4f}" if made.is_finite else "no finite score"))
        return made

    @cached_property
    def known(self) -> list[Tried]:
        """What was tried, in its order."""
        return []

    def _fit(self, axis: str, config: dict[str, Any], share: float) -> np.ndarray:
        folder = self.work / "trial"
        stages = {"heads": None, "lora": None, "backbone": None, "report_to": (), "evaluations": EVALUATIONS}
        scores = []
        for fold in self.folds:
            rows, held = fold
            model = self.renewed(config)
            fit_axes(model.config, self.numbers, axis, self.settings)
            only: dict[str, Any] = stages | {"values": self.trial_of(rows, share)}
            settings = dataclasses.replace(self.settings, **only)
            try:
                stores = self.stores(model, fold)
                run = Trial(model, rows, held if self.keeps_best else [], folder, settings, {}, stores)
                TRAINERS["values"](run)
                scores.append(self.scores_of(model.eval(), held, stores[1]))
            finally:
                if ranks.rank() == 0:
                    shutil.rmtree(folder, ignore_errors=True)
                ranks.barrier()
        return np.nan_to_num(np.concatenate(scores), nan=_DIVERGED, posinf=_DIVERGED, neginf=_DIVERGED)

    def tell(self, best: Tried) -> None:
        """Say what is chosen, and write it to the run's folder."""
        worst = max((one for one in self.known if one.is_finite), key=lambda one: one.mean, default=best)
        self.say(
            f"chosen: {described(best)}; people held out at {best.mean:.3f} nats a number, the worst tried "
            f"({described(worst)}) {worst.mean:.3f}"
        )
        if ranks.rank() == 0:
            chosen = dataclasses.asdict(best) | {"scores": best.scores.tolist()}
            write_text(self.work / CHOICE, json.dumps(chosen) + "\n")
            told = {"chosen": best.to_dict(), "tried": [one.to_dict() for one in self.known]}
            write_text(self.work.parent / CHOICE, json.dumps(told, indent=1) + "\n")


def _rows(examples: Sequence[Example], people: list[list[int]]) -> Sequence[Example]:
    """The rows of some people, in their order."""
    rows = sorted(row for person in people for row in person)
    return examples if len(rows) == len(examples) else Drawn(examples, rows)


def apply(model: CausalQwenForCausalLM, config: dict[str, Any], seed: int) -> None:
    """Give a model the value parts of a choice, at their start."""
    torch.manual_seed(seed)
    renew_values(model, **config)


def described(tried: Tried) -> str:
    """In words."""
    return f"{tried.axis} axis, {tried.config['value_family']} law" + f", {tried.share:.0%} of the passes" * (
        tried.share != 1
    )
