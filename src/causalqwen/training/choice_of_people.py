"""How values are read where rows name individuals: passes, axis and law, by people held out (theory 3.14)."""

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from causalqwen.data import Example
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.training.axes import LearnedNumbers, numbers_learned
from causalqwen.training.batches import rows_of_people
from causalqwen.training.features import FactStore
from causalqwen.training.scores import joint_losses
from causalqwen.training.settings import ValueStage
from causalqwen.training.trials import FAMILIES, Drawn, Fold, Trials, Tried, clearly_better

AXES = ("affine", "log")
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
"""Rows that a choice is made on, and by; of one person, no more than leave room for the fewest people."""


def better_for_most(plain: Tried, other: Tried) -> Tried:
    """The other of two where it is clearly better on average, and for more than half of the people by a standard error of that
    share too: one person whom nobody resembles can outweigh everybody else."""
    gains = np.sign(plain.scores - other.scores)
    most = gains.sum() > math.sqrt(np.count_nonzero(gains))
    return clearly_better(plain, other) if most else plain


class ChoiceOfPeople(Trials):
    """A choice by rows that name individuals: by -log p, in nats a number, of what people held out said, e1 integrated out.

    The people of the evaluation rows choose where they are enough; else those of the training rows do, each part of them held
    out in turn, and all are trained on in the end.
    """

    @cached_property
    def keeps_best(self) -> bool:
        """Where evaluation rows choose."""
        return len(self._told(self.eval_examples)) >= FEWEST_PEOPLE

    @cached_property
    def taught(self) -> list[list[int]]:
        """The rows of each individual of the training rows who said a number."""
        return self._told(self.train_examples)

    def made(self) -> Tried:
        """The way under which people held out are likeliest: fewer passes, another axis or law where most of them say so."""
        axes, families = self.axes(AXES), self.open("value_family", FAMILIES)
        rows, held = self.folds[0]
        shares = self._shares(rows)
        ways = len(shares) + len(axes) + len(families) - 1
        turns = f"{len(self.folds)} parts of " if len(self.folds) > 1 else ""
        self.say(
            f"choosing how values are read: {ways} ways, by {turns}about {len(self._told(held)):,} people held out, in at most "
            f"{self.trial_of({}, rows).epochs} passes over {len(rows):,} rows"
        )
        best = self.tried(axes[0], {"value_family": families[0]})
        for share in shares:
            best = better_for_most(best, self.tried(best.axis, best.config, share))
        for axis in axes[1:]:
            best = better_for_most(best, self.tried(axis, best.config, best.share))
        for family in families[1:]:
            best = better_for_most(best, self.tried(best.axis, {"value_family": family}, best.share))
        self.tell(best, "people held out at {:.3f} nats a number")
        return best

    def _shares(self, rows: Sequence[Example]) -> list[float]:
        """Shares of the passes that are tried: none where people are drawn, because all together are not learned by heart."""
        found = {self.trial_of({}, rows).epochs: 1.0}
        if len(self.taught) == len(self._drawn(self.taught)):
            for share in SHARES:
                found.setdefault(self.trial_of({}, rows, share).epochs, share)
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

    def stage_of(self, config: dict[str, Any], rows: Sequence[Example], share: float = 1.0) -> ValueStage:
        terms = len(rows_of_people([example.individual for example in rows])[0])
        updates = math.ceil(terms / STAGE.batch_size)
        epochs = max(STAGE.epochs, math.ceil(FEWEST_UPDATES / updates))
        return dataclasses.replace(STAGE, epochs=math.ceil(share * epochs))

    def trial_of(self, config: dict[str, Any], rows: Sequence[Example], share: float = 1.0) -> ValueStage:
        stage = self.stage_of(config, rows, share / FASTER)
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
            if isinstance(rows, Drawn):
                store.take(model, rows, rows.indices, self.work)
                store = FactStore.build(model, rows, self.work, rest=scored)
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


def _rows(examples: Sequence[Example], people: list[list[int]]) -> Sequence[Example]:
    """The rows of some people, in their order."""
    rows = sorted(row for person in people for row in person)
    return examples if len(rows) == len(examples) else Drawn(examples, rows)
