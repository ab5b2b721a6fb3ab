"""The numbers that rows teach, and the axis that is fitted to them."""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from causalqwen.data import Example, number_classes
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.numbers import ValueTransform, finest_place
from causalqwen.numbers.law import rows_of_classes
from causalqwen.parts.value_axes import check_named
from causalqwen.training.settings import TrainSettings

_CERTAIN, _WORDS, _TIMES = 0.95, 4, 8


def numbers_learned(examples: Iterable[Example], num_token_id: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """The last tokens before every number that is learned, and its value, in the order of the examples. The first token is
    never predicted, so a number that stands there is none of them."""
    for example in examples:
        labels = example.numeric_labels
        for place in range(1, len(example)):
            if example.input_ids[place] == num_token_id and math.isfinite(labels[place]):
                yield tuple(example.input_ids[max(0, place - _WORDS) : place]), labels[place]


def certain_contexts(examples: Iterable[Example], num_token_id: int) -> set[tuple[int, ...]]:
    """Words after which these rows have always the same number: it is certain from them, part of a template. None, where
    nothing else is learned."""
    counts: defaultdict[tuple[int, ...], Counter[float]] = defaultdict(Counter)
    for words, value in numbers_learned(examples, num_token_id):
        counts[words][value] += 1
    certain = {
        words
        for words, values in counts.items()
        if values.total() >= _TIMES and max(values.values()) >= _CERTAIN * values.total()
    }
    return certain if len(certain) < len(counts) else set()


@dataclass(frozen=True)
class LearnedNumbers:
    """Numbers that rows teach: values float64 [n]; certain bool [n], part of a template; classes, one for each, or None."""

    values: Tensor
    certain: Tensor
    classes: list[str | None]

    @classmethod
    def of(cls, examples: Sequence[Example], num_token_id: int, certain: Set[tuple[int, ...]]) -> "LearnedNumbers":
        """The axes of examples; certain: `certain_contexts` of the training rows."""
        pairs = [(value, words in certain) for words, value in numbers_learned(examples, num_token_id)]
        values, of_template = zip(*pairs, strict=True) if pairs else ((), ())
        classes = number_classes(examples, num_token_id)
        return cls(torch.tensor(values, dtype=torch.float64), torch.tensor(of_template, dtype=torch.bool), classes)

    def axis(self, kind: str, settings: TrainSettings) -> dict[str, Any]:
        """What a configuration says of these values, by its names. The axis is fitted to those that are no part of a template;
        a `Support` holds all of them."""
        fitted = self.values[~self.certain]
        fitted = fitted if len(fitted) else self.values
        return {
            "value_transform": ValueTransform.fit(kind, fitted, settings.support_of(self.values)).to_dict(),
            "value_range": [fitted.min().item(), fitted.max().item()],
            "value_place": finest_place(self.values),
        }

    def class_axes(self, kind: str, settings: TrainSettings) -> dict[str, dict[str, Any]]:
        """`axis` of each class's numbers, by its name; symlog in place of log where a class has too few to show that they are
        positive."""
        axes = {}
        for name, of in rows_of_classes(self.classes).items():
            one = LearnedNumbers(self.values[of], self.certain[of], [name] * len(of))
            positive = (settings.support_of(one.values).low or 0.0) > 0
            axes[name] = one.axis("symlog" if kind == "log" and not positive else kind, settings)
        return axes


def fit_axes(config: Any, numbers: LearnedNumbers, kind: str, settings: TrainSettings) -> None:
    """Write the axis of a kind, and those of classes where they have axes of their own, into a configuration."""
    if kind == "keep" or not len(numbers.values):
        return
    for name, value in numbers.axis(kind, settings).items():
        setattr(config, name, value)
    config.class_values = numbers.class_axes(kind, settings) if settings.class_transforms else {}


def set_levels(model: CausalQwenForCausalLM, kinds: list[tuple[float, list[float]]] | None) -> None:
    """Tell a model the levels of its intervals, of each kind of numbers, by ascending scale; None for none."""
    config = model.config
    config.interval_levels, config.interval_kinds, config.class_interval_levels = None, [], {}
    config.individual_levels = None
    if kinds:
        config.interval_levels, config.interval_kinds = kinds[0][1], kinds[1:]


def fit_levels(
    model: CausalQwenForCausalLM, of_rows: Sequence[Tensor], classes: Sequence[str | None], known: Iterable[str]
) -> None:
    """Fit the levels of a model's intervals, of all numbers and of each class. of_rows: loc, scale and value [n], float64;
    classes: one for each; known: the names of all classes, of which some have no levels of their own."""
    law = model.value_axes.laws(classes) if model.value_axes.apart else model.value_law
    loc, scale, value = of_rows
    set_levels(model, law.fit_interval_kinds(loc, scale, value))
    levels = law.fit_class_interval_levels(loc, scale, value, classes)
    model.config.class_interval_levels = dict.fromkeys(sorted(known)) | levels


def as_it_was(settings: TrainSettings, model: CausalQwenForCausalLM) -> TrainSettings:
    """Settings where nothing is chosen: an affine axis, or that of values which were learned before."""
    if settings.value_transform != "auto":
        return settings
    anew = model.config.value_range is None or settings.class_transforms
    return dataclasses.replace(settings, value_transform="affine" if anew else "keep")


def check_classes(
    model: CausalQwenForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    numbers: LearnedNumbers,
    settings: TrainSettings,
) -> None:
    """ValueError for a number of no class, or of one that will have no axis, where classes have axes of their own."""
    known = None
    if settings.class_transforms:
        known = sorted({name for name in numbers.classes if name is not None})
    elif settings.value_transform in ("keep", "auto") or not len(numbers.values):
        known = model.value_axes.apart or None
    of_rows = [*numbers.classes, *number_classes(eval_examples, model.config.num_token_id)]
    check_named(of_rows, known, any(example.individual is not None for example in train_examples))
