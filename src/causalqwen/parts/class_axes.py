"""A value axis for each class of numbers (theory 3.8): which models have them, how they are read, what rows have to say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from causalqwen.numbers import ValueLaw
from causalqwen.numbers.law import ClassLaws
from causalqwen.parts.one_axis import OneAxis


@dataclass(frozen=True)
class ClassAxes(OneAxis):
    """Every number is of a class that has an axis."""

    @property
    def known(self) -> list[str]:
        return list(self.config.class_values or {})

    @property
    def apart(self) -> list[str]:
        return self.known

    def check(self, name: str | None) -> str | None:
        """The class that `name` stands for. ValueError for one that is not known, or for none."""
        name = super().check(name)
        if name is None:
            raise ValueError(
                "the classes of this model's numbers have axes of their own: name one of "
                f"{', '.join(self.known)}, for each number or as the model's number_class"
            )
        return name

    def axis(self, name: str | None) -> dict[str, Any]:
        axis: dict[str, Any] = self.config.class_values[self.check(name)]
        return axis

    def coded(self, codes: Tensor | None) -> ValueLaw | ClassLaws:
        if codes is None:
            return self.law()
        return ClassLaws(tuple(self.law(name) for name in self.known), codes)


EACH_CLASS = {"class_transforms": True}
"""The setting of a run that fits an axis to each class's own values."""


def fits_each_class(settings: Any) -> bool:
    """Whether a run of these settings (`TrainSettings`) does so."""
    return EACH_CLASS.items() <= vars(settings).items()


def value_axes(config: Any, own: str | None = None) -> OneAxis:
    """The part for the classes of numbers: one axis for all, or one for each. own: the class of those that name none."""
    return ClassAxes(config, own) if config.class_values else OneAxis(config, own)


def keep_axes(config: Any, axes: dict[str, dict[str, Any]]) -> None:
    """Write the axes of classes, as `OneAxis.axis` tells each, into a configuration; none for one axis."""
    config.class_values = axes


def check_named(names: Sequence[str | None], known: Sequence[str] | None, individuals: bool) -> None:
    """ValueError where rows cannot be learned on the axes of the classes `known`; None where all have one axis.

    names: the class of every number in the rows. individuals: whether a row names one.
    """
    if known is None:
        return
    if not known:
        raise ValueError("class_transforms: no row with a number names a class")
    for name in dict.fromkeys(names):
        if name not in known:
            reason = (
                "a row with a number names no class" if name is None else f"no training row is of the class {name!r}"
            )
            raise ValueError(f"class_transforms: {reason}; an axis was fitted for {', '.join(known)}")
    if individuals:
        raise ValueError("class_transforms: rows that name individuals have one axis for all")
