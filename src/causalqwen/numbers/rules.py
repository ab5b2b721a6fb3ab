"""Which numbers of a text are read: the part of the grammar that a checkpoint carries."""

from dataclasses import asdict, dataclass
from typing import Any

KINDS = ("number", "scientific", "percent", "currency", "range", "lakh", "scaled", "chinese", "fraction", "english")
"""What a number may be: 42 · 6e23 · 5% · $5 · 3-4 · 12,34,567 · 3.5 million, $85K · 3.5万, 三百二十 · 1/2, ½ · twenty-one."""

PROTECTED = ("code", "address", "date", "time", "version", "phone")
"""What stays text before any number is looked for: `x = 5` in backticks · https://a.b/5 · 2024-01-05 · 12:30 · 1.2.3 ·
555-1234. Identifiers (x1, COVID-19, 1,2-dichloroethane, 007) always do."""

SPACES = "\u00a0\u202f\u2009"
"""No-break, narrow no-break and thin space: between the thousands of a number."""


@dataclass(frozen=True)
class NumberRules:
    """The choices of the grammar.

    Args:
        kinds: of `KINDS`. A number of a kind that is off is text, the whole of it: 3.5万 without "chinese", 2 1/2 without
            "fraction". Without "percent", "currency" or "range" such a number is a "number": what no other kind claims.
        protected: of `PROTECTED`.
        decimal: the decimal mark, "." or ",".
        groups: marks that may stand between thousands, one kind per number; the other mark of the two, apostrophes and the
            no-break spaces by default.

    Raises:
        ValueError: an unknown name or mark.
    """

    kinds: tuple[str, ...] = KINDS[:-2]
    protected: tuple[str, ...] = PROTECTED
    decimal: str = "."
    groups: str | None = None

    def __post_init__(self) -> None:
        for field, known in (("kinds", KINDS), ("protected", PROTECTED)):
            names = tuple(getattr(self, field))
            if unknown := [str(name) for name in names if name not in known]:
                raise ValueError(f"unknown {field} of number rules: {', '.join(unknown)}; known: {', '.join(known)}")
            object.__setattr__(self, field, names)
        if self.decimal not in (".", ","):
            raise ValueError(f"the decimal mark of number rules is '.' or ',', not {self.decimal!r}")
        if self.groups is None:
            object.__setattr__(self, "groups", (",'’" if self.decimal == "." else ".'’") + SPACES)
        if wrong := set(str(self.groups)) - (set(" ,.'’" + SPACES) - {self.decimal}):
            raise ValueError(f"thousands cannot be set apart by {''.join(sorted(wrong))!r} beside {self.decimal!r}")

    @classmethod
    def of(cls, rules: "NumberRules | dict[str, Any] | None") -> "NumberRules":
        """Rules from plain data; the default ones for None."""
        if isinstance(rules, NumberRules):
            return rules
        try:
            return cls(**(rules or {}))
        except TypeError as error:
            raise ValueError(f"number rules {rules!r}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a configuration file."""
        return asdict(self)
