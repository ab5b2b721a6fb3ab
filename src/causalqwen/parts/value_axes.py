"""One value axis for all numbers and interval levels for each class of them, or an axis for each class (theory 3.8)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from causalqwen.numbers import ClassLaws, ValueLaw, ValueTransform


@dataclass(frozen=True)
class ValueAxes:
    """The laws of values in the data's units, by the class of a number.

    config: a `CausalQwenConfig`. own: the class of numbers for which no other is given; None for none.
    """

    config: Any
    own: str | None = None

    @property
    def known(self) -> list[str]:
        """The classes that may be named."""
        return self.apart or list(self.config.class_interval_levels or {})

    @property
    def apart(self) -> list[str]:
        """The classes that have axes of their own, in their order."""
        return list(self.config.class_values or {})

    def check(self, name: str | None) -> str | None:
        """The class that `name` stands for. ValueError for one that is not known, or for none where each has an axis."""
        name = self.own if name is None else name
        if name is not None and name not in self.known:
            known = ", ".join(self.known) or "none"
            raise ValueError(f"unknown class {name!r}; the classes of this model's numbers: {known}")
        if name is None and self.apart:
            raise ValueError(
                "the classes of this model's numbers have axes of their own: name one of "
                f"{', '.join(self.known)}, for each number or as the model's number_class"
            )
        return name

    def axis(self, name: str | None) -> dict[str, Any]:
        """value_transform, value_range and value_place of a class."""
        if self.apart:
            axis: dict[str, Any] = self.config.class_values[self.check(name)]
            return axis
        return {key: getattr(self.config, key) for key in ("value_transform", "value_range", "value_place")}

    def law(self, name: str | None = None) -> ValueLaw:
        """The law of a class; with the model's own levels where it had too few rows for others."""
        own, axis = (self.config.class_interval_levels or {}).get(self.check(name) or ""), self.axis(name)
        levels, kinds = (own, []) if own else (self.config.interval_levels, self.config.interval_kinds)
        span = axis["value_range"]
        return ValueLaw(
            ValueTransform(**(axis["value_transform"] or {})),
            self.config.value_family,
            (span[0], span[1]) if span else None,
            tuple(levels) if levels else None,
            tuple((least, tuple(of_kind)) for least, of_kind in kinds or ()),
        )

    def laws(self, names: Sequence[str | None]) -> ValueLaw | ClassLaws:
        """The laws of each row's class."""
        distinct = list(dict.fromkeys(names)) or self.known[:1] or [None]
        laws = tuple(self.law(name) for name in distinct)
        if all(law == laws[0] for law in laws):
            return laws[0]
        place = {name: index for index, name in enumerate(distinct)}
        return ClassLaws(laws, torch.tensor([place[name] for name in names]))

    def coded(self, codes: Tensor | None) -> ValueLaw | ClassLaws:
        """The law of values to be learned; codes int64 [n]: where classes have axes, the place of each one's in `known`."""
        if codes is None or not self.apart:
            return self.law()
        return ClassLaws(tuple(self.law(name) for name in self.known), codes)


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
