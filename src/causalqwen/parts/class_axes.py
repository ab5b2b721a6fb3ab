"""A value axis for each class of numbers (theory 3.8)."""

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
