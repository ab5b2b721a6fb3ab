"""Settings as they must be: types and ranges by annotations, names by the nearest known one."""

import difflib
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, get_origin

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

Count = Annotated[int, Field(ge=1)]
"""A whole number from 1 on."""
Whole = Annotated[int, Field(ge=0)]
"""A whole number from 0 on."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""


def one_of(names: Collection[str]) -> AfterValidator:
    """Beside `str` in an annotation: one of these names, as they are when it is checked."""

    def check(name: str) -> str:
        if name not in names:
            *first, last = map(repr, names)
            raise PydanticCustomError("one_of", f"input should be {', '.join(first)} or {last}")
        return name

    return AfterValidator(check)


_ANY = ConfigDict(arbitrary_types_allowed=True)


@functools.cache
def _adapters(kind: type) -> dict[str, TypeAdapter]:
    own = vars(kind).get("__annotations__", {})
    return {name: TypeAdapter(hint, config=_ANY) for name, hint in own.items() if get_origin(hint) is not ClassVar}


def check_values(kind: type, values: Mapping[str, Any], place: str = "") -> None:
    """ValueError that names the field, and what was found there, unless every value is what `kind` annotates it as. Fields of
    its bases, and names that it does not annotate, are not looked at."""
    hints = vars(kind).get("__annotations__", {})
    for name, adapter in _adapters(kind).items():
        if name not in values:
            continue
        value = values[name]
        if isinstance(value, tuple) and get_origin(hints[name]) is not tuple:
            value = list(value)
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            first, *others = [
                found for found in errors if len(found["loc"]) == max(len(found["loc"]) for found in errors)
            ]
            known = value if isinstance(value, Mapping) else ()
            inside = "".join(f"[{part!r}]" for part in first["loc"] if isinstance(part, int) or part in known)
            shown = repr(first["input"])
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            what = first["msg"][0].lower() + first["msg"][1:]
            what += "".join(" or " + other["msg"].removeprefix("Input should be ") for other in others)
            raise ValueError(f"{place}{name}{inside}: {what}, got {shown}") from None


def check_fields(settings: Any) -> None:
    """`check_values` of a dataclass and its bases; lists become the tuples that they stand for."""
    for kind in reversed(type(settings).__mro__[:-1]):
        for name, hint in vars(kind).get("__annotations__", {}).items():
            if get_origin(hint) is tuple and isinstance(getattr(settings, name), list):
                object.__setattr__(settings, name, tuple(getattr(settings, name)))
        check_values(kind, vars(settings))


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say after an unknown name: the known one that it may be meant for, three that it is a part of, or all of them."""
    known, low = list(known), name.lower()
    close = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(low, known, n=1)
    close = close or [candidate for candidate in known if len(low) > 2 and low in candidate.lower()][:3]
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
