"""A population: people who are known, each with a width and with facts, to be asked (theory 3.15)."""

import hashlib
import json
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from causalqwen.decoding.individual import Individual, Observed
from causalqwen.distributions import INDIVIDUAL_STREAM, WHOLE_TEXT, check_seed, uniform_draws
from causalqwen.files import load_tensors, save_tensors

KEPT = 32
"""Draws that are kept of somebody who was inferred."""

_COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"\s*(.+?)\s*(==|!=|<=|>=|<|>)\s*(.+?)\s*")


def seed_of(*key: Any) -> int:
    """A seed of 64 bits for whatever a key of words and numbers names, the same everywhere (blake2b)."""
    encoded = json.dumps(key, ensure_ascii=False, default=str).encode()
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True, eq=False)
class Population:
    """n people who can be asked (`model.survey`).

    Args:
        names: of each, no two alike.
        draws: Phi^-1(e1) that each may have, equally likely, float32 [n, m, C]; m = 1 where they are known exactly.
        facts: what is known of each besides ("age", "sex"), a list of n by name; None where it is not known.
        evidence: what each was inferred from, n; nothing by default.
        numbers: posterior draws inferred from numbers alone, [n, m, C], for people whose words were observed too. Questions
            for a number use them, because no link between words and numbers is learned. None: as `draws`.
    """

    names: Sequence[str]
    draws: Tensor
    facts: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    evidence: Sequence[tuple[Observed, ...]] = ()
    numbers: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "evidence", self.evidence or [()] * len(self.names))
        if self.draws.dim() != 3 or len(self.draws) != len(self.names) or not len(self.names):
            raise ValueError(f"{len(self.names)} people have draws of the shape {tuple(self.draws.shape)}")
        if self.numbers is not None and self.numbers.shape != self.draws.shape:
            raise ValueError(
                f"numbers tell of the shape {tuple(self.numbers.shape)}, draws are {tuple(self.draws.shape)}"
            )
        if len(set(self.names)) < len(self.names):
            twice = next(name for place, name in enumerate(self.names) if name in self.names[:place])
            raise ValueError(f"two people are called {twice!r}")
        facts = {f"the fact {fact!r}": known for fact, known in self.facts.items()}
        for what, column in {**facts, "the evidence": self.evidence}.items():
            if len(column) != len(self.names):
                raise ValueError(f"{what} is given for {len(column)} people, and they are {len(self.names)}")

    @classmethod
    def of(
        cls,
        people: Mapping[str, Individual],
        facts: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        numbers: Mapping[str, Individual] | None = None,
    ) -> "Population":
        """Individuals by their names. facts: of each, by the same names. numbers: who some of them are as their numbers alone
        tell. Of whoever was inferred, `KEPT` draws are kept, by seed and name."""
        if not people:
            raise ValueError("a population needs one person at least")
        if voiced := [name for name, person in people.items() if person.voice is not None]:
            raise ValueError(
                f"{voiced[0]} has a voice, and surveys read each question once for everybody: leave them out"
            )
        numbers = numbers or {}
        inferred = any(person.is_inferred for person in (*people.values(), *numbers.values()))

        def rows(individuals: Mapping[str, Individual]) -> Tensor:
            made = []
            for name, person in individuals.items():
                likely = person.likely(KEPT, seed_of(seed, name)) if person.is_inferred else person.normal.unsqueeze(0)
                spread = torch.linspace(0, len(likely) - 1, KEPT if inferred else 1, dtype=torch.float64).round().long()
                made.append(likely[spread].float())
            return torch.stack(made)

        facts = facts or {}
        columns = dict.fromkeys(fact for name in people for fact in facts.get(name, {}))
        by_fact = {fact: [facts.get(name, {}).get(fact) for name in people] for fact in columns}
        evidence = [
            person.evidence + (numbers[name].evidence if name in numbers else ()) for name, person in people.items()
        ]
        of_numbers = rows({name: numbers.get(name, person) for name, person in people.items()}) if numbers else None
        return cls(list(people), rows(people), by_fact, evidence, of_numbers)

    @classmethod
    def drawn(cls, count: int, causal_size: int, seed: int = 0) -> "Population":
        """People of whom nothing is known, drawn from the law: person j is `Individual.from_seed(seed + j)`."""
        seeds = torch.arange(count) + check_seed(seed)
        normal = torch.special.ndtri(uniform_draws(seeds, INDIVIDUAL_STREAM, WHOLE_TEXT, causal_size))
        return cls([f"seed {own}" for own in seeds.tolist()], normal.float().unsqueeze(1))

    @property
    def is_inferred(self) -> list[bool]:
        """Whether each person was inferred: there are several draws of them, or evidence."""
        differ = (self.draws != self.draws[:, :1]).flatten(1).any(1).tolist()
        return [bool(seen) or several for seen, several in zip(self.evidence, differ, strict=True)]

    @property
    def knows_values(self) -> list[bool]:
        """See `Individual.knows_values`; where `numbers` are apart, of whom some were observed."""
        kinds = ({observed.likelihood for observed in seen} for seen in self.evidence)
        of_values = (used == {"values"} or (self.numbers is not None and "values" in used) for used in kinds)
        return [not inferred or known for inferred, known in zip(self.is_inferred, of_values, strict=True)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> Individual:
        """Somebody by name. KeyError for an unknown name."""
        place = {known: place for place, known in enumerate(self.names)}[name]
        known, draws = self.part([place]), self.draws[place].double()
        kept = {"draws": draws if known.is_inferred[0] else None}
        return Individual.from_normal(draws.mean(0), name, evidence=known.evidence[0], **kept)

    def __str__(self) -> str:
        known = f"; {', '.join(self.facts)} are known of them" if self.facts else ""
        return f"Population({len(self):,} people, {self.draws.shape[1]} draws of each{known})"

    def part(self, places: slice | Sequence[int]) -> "Population":
        """Some of them, by their places."""
        chosen = range(len(self))[places] if isinstance(places, slice) else places
        facts = {fact: [known[place] for place in chosen] for fact, known in self.facts.items()}
        names, evidence = [self.names[place] for place in chosen], [self.evidence[place] for place in chosen]
        numbers = None if self.numbers is None else self.numbers[list(chosen)]
        return Population(names, self.draws[list(chosen)], facts, evidence, numbers)

    def where(self, *conditions: str) -> "Population":
        """The people of whom every condition holds, such as "age > 60" or "sex == woman".

        A condition compares a fact, or `name`, with a number or a word by ==, !=, <, <=, > or >=. Of whom a fact is not known
        is left out. ValueError for a condition that cannot be read, a fact that no individual has, or if none is left.
        """
        places: Sequence[int] = range(len(self))
        for condition in conditions:
            read = _CONDITION.fullmatch(condition)
            if read is None:
                raise ValueError(f"the condition {condition!r} is not FACT == VALUE (or !=, <, <=, >, >=)")
            fact, compare, wanted = read.groups()
            known = {"name": self.names, **self.facts}.get(fact)
            if known is None:
                raise ValueError(
                    f"{condition!r}: no fact is called {fact!r}; known are {', '.join(['name', *self.facts])}"
                )
            places = [place for place in places if _holds(known[place], compare, wanted, condition)]
        if not places:
            raise ValueError(f"of nobody among {len(self)} people holds {' and '.join(conditions)}")
        return self.part(places)

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file; it appears under its name only when it is complete."""
        evidence = [[vars(observed) for observed in of_person] for of_person in self.evidence]
        about = {"names": list(self.names), "facts": dict(self.facts), "evidence": evidence}
        tensors = {"draws": self.draws} | ({} if self.numbers is None else {"numbers": self.numbers})
        save_tensors(path, "population", about, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Population":
        """Read what `save` wrote; ValueError names a file that holds no population."""
        about, tensors = load_tensors(path, "population")
        try:
            evidence = [tuple(Observed(**each) for each in of_person) for of_person in about["evidence"]]
            of_numbers = tensors.get("numbers")
            return cls(about["names"], tensors["draws"], about["facts"], evidence, of_numbers)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no whole population: {error}") from None


def _holds(known: Any, compare: str, wanted: str, condition: str) -> bool:
    """Whether a fact compares so with what a condition says: as numbers where both are, else as words; no word lies above
    or below a number."""
    if known is None:
        return False
    number, limit = _number(known), _number(wanted)
    if number is not None and limit is not None:
        return bool(_COMPARISONS[compare](number, limit))
    if number is not None and not isinstance(known, str):
        raise ValueError(f"{condition!r}: the fact is a number, and {wanted!r} is none")
    if limit is not None and compare not in ("==", "!="):
        return False
    return bool(_COMPARISONS[compare](str(known), wanted.strip("\"'")))


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
