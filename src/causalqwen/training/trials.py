"""Ways to read values, each tried on kept features and scored by what was held out; of a fit, the scores alone are kept."""

import copy
import dataclasses
import hashlib
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
from causalqwen.files import write_text, writing
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.grafting import renew_values
from causalqwen.training import ranks
from causalqwen.training.axes import LearnedNumbers, fit_axes
from causalqwen.training.features import FactStore
from causalqwen.training.settings import TrainSettings, ValueStage
from causalqwen.training.stages import TRAINERS, Run
from causalqwen.training.trainer import BriefTrainer, CausalTrainer

FAMILIES = ("gaussian", "cauchy")
LESS_DROPOUT = {"value_branch_dropout": 0.2}
"""What follows closely from the text is learned in many passes, with little dropout; other values are not (experiments 16)."""

EVALUATIONS = 12
CHOICE = "choice.json"
"""What was tried and chosen, beside the records of a run."""

_LEVEL = 1e-4  # what two models of which neither is better may differ by
_DIVERGED = 1e9  # the score of a row without one, above all others


class Drawn(Sequence[Example]):
    """Some of the examples, which may lie on disk."""

    def __init__(self, examples: Sequence[Example], indices: list[int]) -> None:
        self.examples, self.indices = examples, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.examples[self.indices[index]]


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
        share = {} if self.share == 1 else {"share_of_passes": self.share}
        return self.config | {"axis": self.axis, "score": self.mean} | share


def clearly_better(plain: Tried, other: Tried) -> Tried:
    """The other of two where its mean score is lower by more than a standard error of the paired difference, else the plain
    one: a few hundred rows say little about far tails."""
    gain = plain.scores - other.scores
    return other if gain.mean() > max(gain.std() / math.sqrt(len(gain)), _LEVEL) else plain


@dataclass(frozen=True)
class Trial(Run):
    """A fit of which the scores alone are kept. stores: the facts of its rows."""

    stores: tuple[FactStore, FactStore]
    watched: ClassVar[bool] = False
    trainer: ClassVar[type[CausalTrainer]] = BriefTrainer

    def train_facts(self) -> FactStore:
        return self.stores[0]

    def eval_facts(self) -> FactStore:
        return self.stores[1]


Fold = tuple[Sequence[Example], Sequence[Example]]
"""Rows that a fit is trained on, and rows that it is scored by."""


@dataclass(frozen=True)
class Trials:
    """The trials for a model on a run's rows. numbers: those of the training rows; certain: `certain_contexts` of them.
    work: where features are kept, and each fit's scores, so that a killed run goes on."""

    model: CausalQwenForCausalLM
    train_examples: Sequence[Example]
    eval_examples: Sequence[Example]
    numbers: LearnedNumbers
    certain: set[tuple[int, ...]]
    settings: TrainSettings
    work: Path
    say: Callable[[str], None]

    branch: ClassVar[dict[str, Any]] = {}
    """Settings of every graft that is tried, which are not chosen between."""

    @property
    def keeps_best(self) -> bool:
        """Whether a fit ends with the state that was best on the rows that it is scored by."""
        return True

    @property
    def has_enough(self) -> bool:
        """Whether there are rows enough to choose by."""
        raise NotImplementedError

    def made(self) -> Tried:
        """The way to read values that is best on what was held out."""
        raise NotImplementedError

    @cached_property
    def folds(self) -> list[Fold]:
        """Each way is tried on each of them."""
        raise NotImplementedError

    def stage_of(self, config: dict[str, Any], rows: Sequence[Example], share: float = 1.0) -> ValueStage:
        """The settings of training with what is chosen, on these rows: `share` of its passes."""
        raise NotImplementedError

    def trial_of(self, config: dict[str, Any], rows: Sequence[Example], share: float = 1.0) -> ValueStage:
        """The settings of training in a fit that is only tried: the same, where nothing shorter tells as much."""
        return self.stage_of(config, rows, share)

    def scores_of(self, model: CausalQwenForCausalLM, held: Sequence[Example], store: FactStore) -> np.ndarray:
        """What the held-out rows say of a fit, [n]: less is better."""
        raise NotImplementedError

    def stores(self, model: CausalQwenForCausalLM, fold: Fold) -> tuple[FactStore, FactStore]:
        """The stores of both parts of a fold."""
        raise NotImplementedError

    def is_open(self, field: str) -> bool:
        """Whether the graft says nothing of a field: it was not given when it was made, and is the default."""
        config = self.model.config
        return field not in (config.given or ()) and getattr(config, field) == getattr(CausalQwenConfig, field)

    def open(self, field: str, known: tuple[str, ...]) -> tuple[str, ...]:
        """Those to choose from: all, where the graft says nothing."""
        return known if self.is_open(field) else (getattr(self.model.config, field),)

    def axes(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """Those to choose from, with symlog in place of log where values may be 0, unless the settings name one."""
        if self.settings.value_transform != "auto":
            return (self.settings.value_transform,)
        positive = (self.settings.support_of(self.numbers.values).low or 0.0) > 0
        return tuple("symlog" if kind == "log" and not positive else kind for kind in known)

    def renewed(self, config: dict[str, Any]) -> CausalQwenForCausalLM:
        """A model that shares the backbone, with other value parts."""
        shared = (self.model.backbone, self.model.processor)
        model = copy.deepcopy(self.model, {id(kept): kept for kept in shared})
        apply(model, config, self.settings.seed)
        return model

    def tried(self, axis: str, config: dict[str, Any], share: float = 1.0) -> Tried:
        """The scores of one way, from an earlier run where it got so far."""
        config = {name: value for name, value in self.branch.items() if self.is_open(name)} | config
        name = "-".join([axis, *(f"{config[key]}" for key in sorted(config)), *([f"{share}"] if share != 1 else [])])
        fits = [self.trial_of(config, rows, share) for rows, _ in self.folds]  # another version's may be others
        key = hashlib.sha256(f"{self.key} {fits}".encode()).hexdigest()[:12]
        file = self.work / "choice" / f"{name} {key}.npy"
        if not ranks.from_main(file.exists()):
            scores = self._fit(axis, config, share, file.with_name(f"{name} fit"))
            if ranks.rank() == 0:
                with writing(file) as part, part.open("wb") as target:
                    np.save(target, scores)
            ranks.barrier()
        self.known[name] = Tried(config, axis, np.load(file), share)
        made = self.known[name]
        self.say(f"  {described(made)}: " + (f"{made.mean:.4f}" if made.is_finite else "no finite score"))
        return made

    @cached_property
    def key(self) -> str:
        """A key of the rows that are tried on: scores of others are not taken up."""
        digest = hashlib.sha256()
        for part in self.folds:
            for example in (*part[0], *part[1]):
                digest.update(repr((example.input_ids, example.numeric_values, example.individual)).encode())
        return digest.hexdigest()

    @cached_property
    def known(self) -> dict[str, Tried]:
        """What was tried, by name."""
        return {}

    def _fit(self, axis: str, config: dict[str, Any], share: float, folder: Path) -> np.ndarray:
        stages = {"heads": None, "lora": None, "backbone": None, "report_to": (), "evaluations": EVALUATIONS}
        scores = []
        for fold in self.folds:
            rows, held = fold
            model = self.renewed(config)
            fit_axes(model.config, self.numbers, axis, self.settings)
            only: dict[str, Any] = stages | {"values": self.trial_of(config, rows, share)}
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

    def tell(self, best: Tried, score: str) -> None:
        """Say what is chosen, and write it to the run's folder; score: what `{:.3f}` of the scores means, in words."""
        worst = max((one for one in self.known.values() if one.is_finite), key=lambda one: one.mean, default=best)
        self.say(
            f"chosen: {described(best)}; {score.format(best.mean)}, the worst tried ({described(worst)}) {worst.mean:.3f}"
        )
        if ranks.rank() == 0:
            told = {"chosen": best.to_dict(), "tried": [one.to_dict() for one in self.known.values()]}
            write_text(self.work.parent / CHOICE, json.dumps(told, indent=1) + "\n")


def apply(model: CausalQwenForCausalLM, config: dict[str, Any], seed: int) -> None:
    """Give a model the value parts of a choice, at their start."""
    torch.manual_seed(seed)
    renew_values(model, **config)


def described(tried: Tried) -> str:
    """In words."""
    config = tried.config
    loss = f", {config['value_loss']} loss" if "value_loss" in config else ""
    straight = ", from a ridge regression" if config.get("value_branch_direct") else ""
    longer = ", more passes and less dropout" if config.items() >= LESS_DROPOUT.items() else ""
    copies = ", copying" if config.get("copy_numbers") else ""
    shorter = f", {tried.share:.0%} of the passes" if tried.share != 1 else ""
    return f"{tried.axis} axis, {config['value_family']} law{loss}{straight}{longer}{copies}{shorter}"
