"""How values are read where rows name individuals: passes, axis and law, by people held out (theory 3.14)."""

import copy
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from causalqwen.data import Example
from causalqwen.files import load_tensors, save_tensors, write_text
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.grafting import renew_values
from causalqwen.training import ranks
from causalqwen.training.axes import LearnedNumbers, fit_axes, numbers_learned
from causalqwen.training.batches import rows_of_people
from causalqwen.training.features import FactStore
from causalqwen.training.held_out import some_of
from causalqwen.training.levels_of_people import HeldPerson, people_of
from causalqwen.training.scores import joint_losses
from causalqwen.training.settings import ChosenStage, TrainSettings, ValueStage
from causalqwen.training.stages import TRAINERS, Run

AXES, FAMILIES = ("affine", "log"), ("gaussian", "cauchy")
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

FEWEST_PEOPLE, MOST_ROWS = 6, 2048
"""Fewer people who said a number choose nothing. The most rows that a choice is made on, and by, of one person no more than
leave room for the fewest people: their features are in memory, once for each fold."""

EVALUATIONS, CHOICE, PEOPLE = 12, "choice.json", "people.safetensors"
_LEVEL = 1e-4  # what two models of which neither is better may differ by
_DIVERGED = 1e9  # the score of a row without one, above all others


@dataclass(frozen=True)
class Tried:
    """One way to read values. scores: of everything held out, less is better. share: of the passes that the stage has. people:
    of the training rows, as fits without them predict them."""

    family: str
    axis: str
    scores: np.ndarray
    share: float = 1.0
    people: tuple[HeldPerson, ...] = field(default=(), repr=False)

    @property
    def mean(self) -> float:
        return float(self.scores.mean())

    @property
    def is_finite(self) -> bool:
        """Whether every row has a score."""
        return bool((self.scores < _DIVERGED).all())

    def to_dict(self) -> dict[str, Any]:
        """What a file says of it."""
        way = {"value_family": self.family, "axis": self.axis}
        return way | {"score": self.mean, "share_of_passes": self.share}

    def __str__(self) -> str:
        return f"{self.axis} axis, {self.family} law" + f", {self.share:.0%} of the passes" * (self.share != 1)


def clearly_better(plain: Tried, other: Tried) -> Tried:
    """The other of two where its mean score is lower by more than a standard error of the paired difference, else the plain
    one: a few hundred rows say little about far tails."""
    gain = plain.scores - other.scores
    return other if gain.mean() > max(gain.std() / math.sqrt(len(gain)), _LEVEL) else plain


def better_for_most(plain: Tried, other: Tried) -> Tried:
    """The other of two where it is clearly better on average, and for more than half of the people by a standard error of that
    share too: one person whom nobody resembles can outweigh everybody else."""
    gains = np.sign(plain.scores - other.scores)
    most = gains.sum() > math.sqrt(np.count_nonzero(gains))
    return clearly_better(plain, other) if most else plain


def is_open(model: CausalQwenForCausalLM, field: str) -> bool:
    """Whether a graft says nothing of a field: it was not given when it was made, and is the default."""
    config = model.config
    return field not in (config.given or ()) and getattr(config, field) == getattr(CausalQwenConfig, field)


def choosing(model: CausalQwenForCausalLM, settings: TrainSettings) -> bool:
    """Whether there is something to choose: a faithful graft whose values were never learned."""
    config = model.config
    fresh = config.value_range is None and config.start == "faithful" and config.value_branch
    return isinstance(settings.values, ChosenStage) and fresh


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

    @property
    def has_enough(self) -> bool:
        return len(self.taught) >= FEWEST_PEOPLE

    @cached_property
    def known(self) -> list[Tried]:
        """What was tried, in its order."""
        return []

    def made(self) -> Tried:
        """The way under which people held out are likeliest: fewer passes, another axis or law where most of them say so. A run
        that is taken up keeps what it chose."""
        kept = self.work / CHOICE
        if ranks.from_main(kept.exists()):
            chosen = json.loads(kept.read_text(encoding="utf-8"))["chosen"]
            about, tensors = load_tensors(self.work / PEOPLE, "people held out")
            columns = [name for name in HeldPerson.__annotations__ if name != "name"]
            people = tuple(
                HeldPerson(name, **{column: tensors[f"{column} {place}"] for column in columns})
                for place, name in enumerate(about["names"])
            )
            score, share = np.array([chosen["score"]]), chosen["share_of_passes"]
            return Tried(chosen["value_family"], chosen["axis"], score, share, people)
        axes, own = self.axes(), self.model.config.value_family
        families = FAMILIES if is_open(self.model, "value_family") else (own,)
        rows, held = self.folds[0]
        passes = {self.stage_of(rows, faster=FASTER).epochs: 1.0}
        if len(self.taught) == len(self._drawn(self.taught)):  # all together are not learned by heart
            for share in SHARES:
                passes.setdefault(self.stage_of(rows, share, FASTER).epochs, share)
        changes: list[dict[str, Any]] = [{"share": share} for share in [*passes.values()][1:]]
        changes += [*({"axis": axis} for axis in axes[1:]), *({"family": family} for family in families[1:])]
        turns = f"{len(self.folds)} parts of " if len(self.folds) > 1 else ""
        self.say(
            f"choosing how values are read: {1 + len(changes)} ways, by {turns}about {len(self._told(held)):,} people held "
            f"out, in at most {next(iter(passes))} passes over {len(rows):,} rows"
        )
        best = self.tried(families[0], axes[0], 1.0)
        for change in changes:
            way: dict[str, Any] = {"family": best.family, "axis": best.axis, "share": best.share} | change
            best = better_for_most(best, self.tried(**way))
        self.tell(best)
        return best

    @cached_property
    def folds(self) -> list[tuple[Sequence[Example], Sequence[Example]]]:
        """Rows that a fit is trained on, and rows that it is scored by."""
        people, others = self._drawn(self.taught), self._nobodys()
        if self.keeps_best:
            held = self._drawn(self._told(self.eval_examples))
            return [(_rows(self.train_examples, [*people, others]), _rows(self.eval_examples, held))]
        parts, folds, count = [people[place::PARTS] for place in range(PARTS)], [], 0
        for part in parts:
            if count < HELD_PEOPLE:
                rest = [person for other in parts if other is not part for person in other]
                folds.append((_rows(self.train_examples, [*rest, others]), _rows(self.train_examples, part)))
                count += len(part)
        return folds

    @cached_property
    def stores(self) -> list[tuple[FactStore, FactStore]]:
        """The facts of each fold's rows: all ways to read values share the features."""

        def opened(rows: Sequence[Example]) -> FactStore:
            whole: Any = rows.dataset if isinstance(rows, Subset) else rows
            scored = whole is self.eval_examples
            store = FactStore.build(self.model, whole, self.work, title="reading rows", rest=scored)
            return store.of_some(rows.indices) if isinstance(rows, Subset) else store

        return [(opened(rows), opened(held)) for rows, held in self.folds]

    def stage_of(self, rows: Sequence[Example], share: float = 1.0, faster: int = 1) -> ValueStage:
        """The stage of values on rows, with a share of its passes; of fewer updates, and a rate as much larger, if `faster`."""
        terms = len(rows_of_people([example.individual for example in rows])[0])
        epochs = max(STAGE.epochs, math.ceil(FEWEST_UPDATES / math.ceil(terms / STAGE.batch_size)))
        return dataclasses.replace(
            STAGE, epochs=math.ceil(share / faster * epochs), learning_rate=faster * STAGE.learning_rate
        )

    def scores_of(self, model: CausalQwenForCausalLM, held: Sequence[Example], store: FactStore) -> np.ndarray:
        """For each person, the mean over numbers that are no part of a template."""
        losses, values, whose = joint_losses(model, store, *self._owners(model, held))
        _, places, counts = whose.unique(return_inverse=True, return_counts=True)
        axis, together = model.value_transform, counts[places] > 1
        # Values together have a density on the axis, where the support holds them, also if one alone is an atom.
        slope = axis.log_slope(axis.support.held(values))
        lost = losses - torch.where(together, slope, axis.log_jacobian(values))
        return (torch.zeros(len(counts)).double().index_add_(0, places, lost) / counts).numpy()

    def _told(self, examples: Sequence[Example]) -> list[list[int]]:
        """The rows of each individual who said a number that is no part of a template."""
        groups, people = rows_of_people([example.individual for example in examples])

        def has_said(rows: list[int]) -> bool:
            numbers = numbers_learned((examples[row] for row in rows), self.model.config.num_token_id)
            return any(words not in self.certain for words, _ in numbers)

        return [rows for rows in groups[:people] if has_said(rows)]

    def _nobodys(self) -> list[int]:
        """Training rows of nobody's, `MOST_ROWS` at most."""
        found = [row for row, example in enumerate(self.train_examples) if example.individual is None]
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

    def tried(self, family: str, axis: str, share: float) -> Tried:
        """The scores of one way, the same on every rank."""
        scores, people = self._fit(family, axis, share)
        made = Tried(family, axis, ranks.from_main(scores), share, people)
        self.known.append(made)
        self.say(f"  {made}: " + (f"{made.mean:.4f}" if made.is_finite else "no finite score"))
        return made

    def _fit(self, family: str, axis: str, share: float) -> tuple[np.ndarray, tuple[HeldPerson, ...]]:
        """The scores of a fit to each fold, of models that share the backbone, and training people who were held out; nothing
        else of it remains."""
        folder, scores, people = self.work / "trial", [], list[HeldPerson]()
        others = {"heads": None, "lora": None, "backbone": None, "report_to": (), "evaluations": EVALUATIONS}
        shared = {id(kept): kept for kept in (self.model.backbone, self.model.processor)}
        for (rows, held), stores in zip(self.folds, self.stores, strict=True):
            model = copy.deepcopy(self.model, dict(shared))
            apply(model, {"value_family": family}, self.settings.seed)
            fit_axes(model.config, self.numbers, axis, self.settings)
            only: dict[str, Any] = others | {"values": self.stage_of(rows, share, FASTER)}
            settings = dataclasses.replace(self.settings, **only)
            try:
                TRAINERS["values"](Run(model, rows, held if self.keeps_best else [], folder, settings, {}, stores))
                scores.append(self.scores_of(model.eval(), held, stores[1]))
                if not self.keeps_best:
                    people += people_of(model, stores[1], *self._owners(model, held))
            finally:
                if ranks.rank() == 0:
                    shutil.rmtree(folder, ignore_errors=True)
                ranks.barrier()
        found = np.nan_to_num(np.concatenate(scores), nan=_DIVERGED, posinf=_DIVERGED, neginf=_DIVERGED)
        return found, tuple(people)

    def _owners(self, model: CausalQwenForCausalLM, rows: Sequence[Example]) -> tuple[list[str | None], torch.Tensor]:
        """Whose each row is, and which of the rows' numbers are no part of a template."""
        certain = LearnedNumbers.of(rows, model.config.num_token_id, self.certain).certain
        return [example.individual for example in rows], ~certain

    def tell(self, best: Tried) -> None:
        """Say what is chosen, and write it to the run's folder, and to its work, from where a run that is taken up reads it."""
        worst = max((one for one in self.known if one.is_finite), key=lambda one: one.mean, default=best)
        self.say(
            f"chosen: {best}; people held out at {best.mean:.3f} nats a number, the worst tried ({worst}) {worst.mean:.3f}"
        )
        if ranks.rank() == 0:
            of_people = {
                f"{name} {place}": tensor
                for place, person in enumerate(best.people)
                for name, tensor in vars(person).items()
                if name != "name"
            }
            names = [person.name for person in best.people]
            save_tensors(self.work / PEOPLE, "people held out", {"names": names}, of_people)
            choice = {"chosen": best.to_dict(), "tried": [one.to_dict() for one in self.known]}
            for folder in (self.work, self.work.parent):
                write_text(folder / CHOICE, json.dumps(choice, indent=1) + "\n")


def _rows(examples: Sequence[Example], people: list[list[int]]) -> Sequence[Example]:
    """The rows of some people, in their order."""
    rows = sorted(row for person in people for row in person)
    return examples if len(rows) == len(examples) else some_of(examples, rows)


def apply(model: CausalQwenForCausalLM, config: dict[str, Any], seed: int) -> None:
    """Give a model the value parts of a choice, at their start."""
    torch.manual_seed(seed)
    renew_values(model, **config)
