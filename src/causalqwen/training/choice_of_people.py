"""How values are read where rows name individuals: axis and law, by people held out (theory 3.14)."""

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from causalqwen.data import Example
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.training.axes import LearnedNumbers
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

FEWEST_PEOPLE, FEWEST_HELD = 6, 20
"""Fewer people than that, or fewer evaluation rows, choose nothing."""

MOST_ROWS = 2048
"""Rows of whole people that a choice is made on, and by."""


def better_for_most(plain: Tried, other: Tried) -> Tried:
    """The other of two where it is clearly better on average, and for more than half of the people by a standard error of that
    share too: one person whom nobody resembles can outweigh everybody else."""
    gains = np.sign(plain.scores - other.scores)
    most = gains.sum() > math.sqrt(np.count_nonzero(gains))
    return clearly_better(plain, other) if most else plain


class ChoiceOfPeople(Trials):
    """Of rows that name individuals: by -log p of what each person held out said, with e1 integrated out, in nats a number.

    Evaluation rows choose where they are given; else the people of the training rows do, each part of them held out in turn,
    and all are trained on in the end.
    """

    @property
    def keeps_best(self) -> bool:
        return bool(len(self.eval_examples))

    def made(self) -> Tried:
        """The way under which people held out are likeliest: fewer passes, another axis or law where most of them say so."""
        axes, families = self.axes(AXES), self.open("value_family", FAMILIES)
        rows, held = self.folds[0]
        self.say(
            f"choosing how values are read: {len(SHARES) + len(axes) + len(families) - 1} ways, each by {len(self.folds)} "
            f"times about {len(_people(held)):,} people held out, and at most {self.trial_of({}, rows).epochs} passes over "
            f"{len(rows):,} rows"
        )
        best = self.tried(axes[0], {"value_family": families[0]})
        for share in SHARES:
            best = better_for_most(best, self.tried(best.axis, best.config, share))
        for axis in axes[1:]:
            best = better_for_most(best, self.tried(axis, best.config, best.share))
        for family in families[1:]:
            best = better_for_most(best, self.tried(best.axis, {"value_family": family}, best.share))
        self.tell(best, "people held out at {:.3f} nats a number")
        return best

    @property
    def has_enough(self) -> bool:
        return len(self.eval_examples) >= FEWEST_HELD or (
            not len(self.eval_examples) and len(_people(self.train_examples)) >= FEWEST_PEOPLE
        )

    @cached_property
    def folds(self) -> list[Fold]:
        people = self._drawn(self.train_examples)
        if len(self.eval_examples):
            return [(_rows(self.train_examples, people), _rows(self.eval_examples, self._drawn(self.eval_examples)))]
        parts, folds, held = [people[place::PARTS] for place in range(PARTS)], [], 0
        for part in parts:
            if held < HELD_PEOPLE:
                rest = [person for other in parts if other is not part for person in other]
                folds.append((_rows(self.train_examples, rest), _rows(self.train_examples, part)))
                held += len(part)
        return folds

    def stage_of(self, config: dict[str, Any], rows: Sequence[Example], share: float = 1.0) -> ValueStage:
        updates = math.ceil(len(_people(rows)) / STAGE.batch_size)
        epochs = max(STAGE.epochs, math.ceil(FEWEST_UPDATES / updates))
        return dataclasses.replace(STAGE, epochs=math.ceil(share * epochs))

    def trial_of(self, config: dict[str, Any], rows: Sequence[Example], share: float = 1.0) -> ValueStage:
        stage = self.stage_of(config, rows, share / FASTER)
        return dataclasses.replace(stage, learning_rate=FASTER * stage.learning_rate)

    def scores_of(self, model: CausalQwenForCausalLM, held: Sequence[Example], store: FactStore) -> np.ndarray:
        """Of each person, and of each row of nobody's, the mean over numbers that are no part of a template."""
        certain = LearnedNumbers.of(held, model.config.num_token_id, self.certain).certain
        owners = [example.individual for example in held]
        losses, values, whose = joint_losses(model, store, owners, ~certain)
        _, places, counts = whose.unique(return_inverse=True, return_counts=True)
        axis, together = model.value_transform, (whose >= 0) & (counts[places] > 1)
        # Values together have a density on the axis, also where one alone is an atom with a probability.
        lost = losses - torch.where(together, axis.log_slope(values), axis.log_jacobian(values))
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

    def _drawn(self, examples: Sequence[Example]) -> list[list[int]]:
        """The rows of so many people, drawn, that they are about `MOST_ROWS` at most."""
        people, taken, rows = _people(examples), list[list[int]](), 0
        for person in np.random.default_rng(self.settings.seed).permutation(len(people)).tolist():
            if taken and rows + len(people[person]) > MOST_ROWS:
                break
            taken.append(people[person])
            rows += len(people[person])
        return taken


def _people(examples: Sequence[Example]) -> list[list[int]]:
    """The rows of each individual, and each row of nobody's."""
    return rows_of_people([example.individual for example in examples])[0]


def _rows(examples: Sequence[Example], people: list[list[int]]) -> Sequence[Example]:
    """Those of some people, in their order."""
    rows = sorted(row for person in people for row in person)
    return examples if len(rows) == len(examples) else Drawn(examples, rows)
