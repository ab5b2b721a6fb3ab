"""A survey: what people of a population answer, each from who they are and from noise of their own (theory 3.15)."""

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from causalqwen.decoding import CausalDecoding, Individual, Population
from causalqwen.decoding.population import seed_of
from causalqwen.distributions import (
    INDIVIDUAL_STREAM,
    NOISE_STREAM,
    WHOLE_TEXT,
    StableFamily,
    check_seed,
    uniform_draws,
)
from causalqwen.extras import extra
from causalqwen.files import batches
from causalqwen.individuals.evidence import Branches
from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.choices import check_options, last_features, read_options
from causalqwen.modeling.prediction import mixed_quantiles
from causalqwen.modeling.reading import EncodedText
from causalqwen.numbers import ValueLaw

logger = logging.getLogger(__name__)

PEOPLE_AT_ONCE = 1024
"""Rows of answers that are held at a time."""

_ROWS = {"drawn": 64, "integrated": 16}
"""Rows of every tensor that answers are computed from, filled up where there are fewer: what torch gives for an element may
depend, in the last bit, on whether it lies in the rest after the last whole vector, or of a thread's share. Here no rest is
left, and no tensor of them is large enough to be shared among threads."""

_PIECE, _READ_PROMPTS = 8192, 4096
_FIELD = re.compile(r"\{([^{}]+)\}")


def fill(prompt: str, known: Mapping[str, Any]) -> str:
    """A prompt with each known field within braces replaced; whatever else stands in braces, and they, stay as they are."""
    return _FIELD.sub(lambda at: str(known.get(at[1], at[0])), prompt)


@dataclass(frozen=True)
class Question:
    """What everybody is asked.

    Args:
        prompt: the text that an answer follows; "{age}" stands for a fact of whoever is asked, "{name}" for their name. Braces
            around anything else are text as they stand.
        options: words to choose from; or numbers, or words that stand for numbers ({"never": 1, "often": 2}), whose
            probabilities are the value head's. None where the answer is any number.
        name: of the column of answers; the prompt by default.
        max_new_tokens: given where the answer is a text, which has so many tokens at most.
    """

    prompt: str
    options: tuple[str, ...] | tuple[float, ...] | Mapping[str, float] | None = None
    name: str = ""
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in ("prompt", "name"):
            text = getattr(self, field)
            if not isinstance(text, str) or (field == "prompt" and not text.strip()):
                raise ValueError(f"field {field}: expected text, found {text!r}")
        object.__setattr__(self, "name", self.name or self.prompt)
        most = self.max_new_tokens
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ValueError(f"field max_new_tokens: expected a whole number from 1 on, found {most!r}")
        if self.options is None:
            return
        if most is not None:
            raise ValueError("field max_new_tokens: it is for a text, and the question has options; give one of them")
        if isinstance(self.options, str) or not isinstance(self.options, Iterable):
            raise ValueError(f"field options: expected a list, or numbers by words, found {self.options!r}")
        if not isinstance(self.options, Mapping):
            object.__setattr__(self, "options", tuple(self.options))
            if any(isinstance(option, str) for option in self.options):
                return check_options(self.options)  # type: ignore[arg-type]
        given = list(self.options.values() if isinstance(self.options, Mapping) else self.options)
        numbers = [number for number in given if isinstance(number, int | float) and not isinstance(number, bool)]
        if len(set(filter(math.isfinite, numbers))) < max(2, len(given)):
            raise ValueError(f"field options: expected two finite numbers or more, no two alike, found {given}")

    @property
    def values(self) -> list[float] | None:
        """The numbers that its options are, or stand for."""
        options = self.options.values() if isinstance(self.options, Mapping) else self.options
        return (
            None if options is None or any(isinstance(option, str) for option in options) else list(map(float, options))
        )

    @property
    def kind(self) -> str:
        """What its answer is: "number", "values", "words" or "text"."""
        if self.max_new_tokens is not None:
            return "text"
        if self.options is None:
            return "number"
        return "words" if self.values is None else "values"


Questions = Sequence[Question] | Question


class Asked(Protocol):
    """A question as the model read it."""

    def answers(self, q: Tensor, knows: Tensor, uniform: Tensor | None) -> list[Any]:
        """The answer of each of n people with Q(e1) = q [n, 1, C] and uniform numbers [n] for the noise; or with the noise
        integrated out, and who each is over q [n, m, C]: a median, or the probability of each option.

        knows: bool [n], whose numbers follow from who they are."""


@dataclass
class AskedNumber:
    """A number.

    centre, loadings [C], noise: where the population average has it on its axis, what a unit of Q(e1) adds, and the noise that
    is left. plain: loc and scale of whoever's numbers are not known, with all of U integrated out.
    """

    centre: float
    loadings: Tensor
    noise: float
    plain: tuple[float, float]
    law: ValueLaw

    @classmethod
    def read(cls, model: GraftedModel, question: Question, prompt: str) -> "AskedNumber":
        """ValueError for a model that copies, or that has not learned values."""
        model.config.require("a number that a survey asks for")
        if not model.reads_numbers:
            raise ValueError(
                f"{question.name!r} asks for a number, and this model has not learned values yet: train it"
            )
        written = model.processor(prompt, prompt=True)  # as `predict_number` reads one
        ids, values = written["input_ids"], written["numeric_values"]
        text = EncodedText.of(ids, values, [False] * len(ids))
        chain = Chain(model, last_features(model, text))
        loadings, noise = (column[0].double().cpu() for column in chain.value_loadings())
        loc, scale = (column.item() for column in chain.value())
        factor = (model.config.individual_levels or {}).get("noise", 1.0)
        return cls(loc, loadings, factor * noise.item(), (loc, scale), model.value_law)

    def laws(self, q: Tensor, knows: Tensor) -> tuple[Tensor, Tensor]:
        """loc [n, m] and scale [n, 1] on the axis."""
        known, (loc, scale) = knows.unsqueeze(-1), self.plain
        locs = torch.where(known, self.centre + (q * self.loadings).sum(-1), loc)
        return locs, torch.where(known, self.noise, scale).double()

    def answers(self, q: Tensor, knows: Tensor, uniform: Tensor | None) -> list[Any]:
        """By the law of each, without levels of intervals."""
        locs, scales = self.laws(q, knows)
        if uniform is not None:
            return self.law.quantile(locs.squeeze(-1), scales.squeeze(-1), uniform, raw=True).tolist()
        half = torch.tensor(0.5, dtype=torch.float64)
        return self.law.transform.inverse(mixed_quantiles(self.law.stable, locs, scales.squeeze(-1), half)).tolist()


@dataclass
class AskedOptions(ABC):
    """A choice."""

    options: list[Any]

    @abstractmethod
    def probabilities(self, q: Tensor, knows: Tensor) -> Tensor:
        """Of each option, [n, m, O]."""

    def answers(self, q: Tensor, knows: Tensor, uniform: Tensor | None) -> list[Any]:
        p = self.probabilities(q, knows)
        if uniform is None:
            return [dict(zip(self.options, row, strict=True)) for row in p.mean(1).tolist()]
        places = (p.squeeze(1).cumsum(-1) < uniform.unsqueeze(-1)).sum(-1).clamp(max=len(self.options) - 1)
        return [self.options[place] for place in places.tolist()]


@dataclass
class AskedValues(AskedOptions):
    """A choice among numbers: each takes what lies nearer to it than to the others."""

    number: AskedNumber
    values: Tensor

    @classmethod
    def read(cls, model: GraftedModel, question: Question, prompt: str) -> "AskedValues":
        values = torch.tensor(question.values, dtype=torch.float64)
        return cls(list(question.options), AskedNumber.read(model, question, prompt), values)

    def probabilities(self, q: Tensor, knows: Tensor) -> Tensor:
        locs, scales = (column.unsqueeze(-1) for column in self.number.laws(q, knows))
        ascending, order = self.values.sort()
        middle = (ascending[1:] + ascending[:-1]) / 2
        below = self.number.law.cdf(locs, scales, middle)
        ends = torch.zeros_like(locs), torch.ones_like(locs)
        return torch.diff(below, prepend=ends[0], append=ends[1], dim=-1)[..., order.argsort()]


@dataclass
class AskedWords(AskedOptions):
    """A choice among words."""

    branches: Branches

    @classmethod
    def read(cls, model: GraftedModel, question: Question, prompt: str) -> "AskedWords":
        options = [str(option) for option in question.options]
        return cls(options, read_options(model, prompt, options).cpu())

    def probabilities(self, q: Tensor, knows: Tensor) -> Tensor:
        return self.branches.log_probs(q).exp()


_READ: dict[str, Any] = {"number": AskedNumber, "values": AskedValues, "words": AskedWords}


class Survey:
    """A population that is asked: rows of answers. An answer does not depend on who else is asked, nor on the order.

    Which of somebody's draws speaks follows from (seed, name, draw), and the noise of an answer from (seed, name, draw, name of
    the question). draws: how often each person answers each question, 0 as in `survey`.

    Raises:
        ValueError: no questions, two of one name, or one called like a fact; a text with `draws` 0; a fact in a prompt that is
            known of some and not of others; people of another causal size.
    """

    def __init__(
        self, model: GraftedModel, population: Population, questions: Questions, draws: int = 1, seed: int = 0
    ) -> None:
        self.model, self.population, self.draws, self.seed = model, population, draws, check_seed(seed)
        self.questions = [questions] if isinstance(questions, Question) else list(questions)
        if not self.questions:
            raise ValueError("a survey needs one question at least")
        if draws < 0:
            raise ValueError(f"draws are a whole number from 0 on, not {draws}")
        size = population.draws.shape[-1]
        if size != model.config.causal_size:
            raise ValueError(f"{population} has {size} coordinates of each, and this model {model.config.causal_size}")
        self._known: dict[str, Sequence[Any]] = {"name": population.names, **population.facts}
        taken = {"person", "draw", *population.facts}
        for question in self.questions:
            if question.name in taken:
                raise ValueError(f"two columns would be called {question.name!r}: give the question another name")
            taken.add(question.name)
            if question.kind == "text" and draws == 0:
                raise ValueError(f"{question.name!r} asks for a text, and texts are drawn: ask for draws of 1 or more")
            for fact in _FIELD.findall(question.prompt):
                if None in (known := self._known.get(fact, ())):
                    who = population.names[known.index(None)]
                    raise ValueError(f"{question.name!r} asks by the fact {fact!r}, which is not known of {who}")
                if fact not in self._known and (close := get_close_matches(fact.lower(), self._known, n=1)):
                    logger.warning(f"{question.name!r}: {{{fact}}} is asked as it stands; did you mean {{{close[0]}}}?")
        self.knows, self._rows = torch.tensor(population.knows_values), _ROWS["drawn" if draws else "integrated"]
        named = {question.name: question for question in self.questions}
        self._read = lru_cache(_READ_PROMPTS)(
            lambda name, prompt: _READ[named[name].kind].read(model, named[name], prompt)
        )

    def items(self) -> Iterator[tuple[int, int]]:
        """(place of a person, draw) of every row, in order."""
        return product(range(len(self.population)), range(max(self.draws, 1)))

    @torch.no_grad()
    def rows(self, items: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Some of the rows."""
        rows: list[dict[str, Any]] = []
        for part in batches(items, self._rows):
            columns = self._answers(part)
            for place, (person, draw) in enumerate(part):
                row = {"person": self.population.names[person]} | ({"draw": draw} if self.draws > 1 else {})
                row |= {fact: known[person] for fact, known in self.population.facts.items()}
                rows.append(row | {name: column[place] for name, column in columns.items()})
        return rows

    def _answers(self, items: Sequence[tuple[int, int]]) -> dict[str, list[Any]]:
        """Columns of answers of `_ROWS` rows at most."""
        population, people = self.population, [person for person, _ in items]
        keys = [(self.seed, population.names[person], draw) for person, draw in items]
        which: Tensor | None = None
        if self.draws:
            which = (_uniform(keys, INDIVIDUAL_STREAM, WHOLE_TEXT) * population.draws.shape[1]).long()

        @cache
        def g(of_numbers: bool) -> Tensor:
            known = population.numbers if of_numbers and population.numbers is not None else population.draws
            return (known[people] if which is None else known[people, which].unsqueeze(1)).double()

        @cache
        def q(of_numbers: bool) -> Tensor:
            law = self.model.action.value_law if of_numbers else self.model.action.law
            made, fitted = _q_of(law, g(of_numbers)), self.model.config.individual_levels
            if not of_numbers or fitted is None:
                return made
            known = population.draws if population.numbers is None else population.numbers
            middle = _q_of(law, known[people].double().mean(1, keepdim=True))
            return middle + fitted["who"] * (made - middle)

        columns: dict[str, list[Any]] = {}
        for question in self.questions:
            answers = columns[question.name] = [None] * len(items)
            noise = [(*key, question.name) for key in keys]
            groups: dict[str, list[int]] = {}
            for place, person in enumerate(people):
                known = {field: of_people[person] for field, of_people in self._known.items()}
                groups.setdefault(fill(question.prompt, known), []).append(place)
            for prompt, places in groups.items():
                if question.kind == "text":
                    found = [self._text(question, prompt, people[at], g(False)[at, 0], noise[at]) for at in places]
                else:
                    full = places + places[-1:] * (self._rows - len(places))
                    uniform = _uniform([noise[at] for at in full], NOISE_STREAM, 0) if self.draws else None
                    asked, who = self._read(question.name, prompt), q(question.kind != "words")[full]
                    found = asked.answers(who, self.knows[people][full], uniform)
                for place, answer in zip(places, found, strict=False):
                    answers[place] = answer
        return columns

    def _text(self, question: Question, prompt: str, person: int, g: Tensor, key: Sequence[Any]) -> str:
        """What somebody writes, as the preset `persona` does."""
        model, processor = self.model, self.model.processor
        who = Individual.from_normal(g, self.population.names[person])
        plan = CausalDecoding.preset("persona", individual=who, seed=seed_of(*key))
        inputs = processor(prompt, prompt=True, return_tensors="pt").to(model.device)
        start = inputs["input_ids"].shape[1]
        generated = model.generate(**inputs, causal_decoding=plan, max_new_tokens=question.max_new_tokens)
        written = generated.sequences[0, start:], generated.numeric_values[0, start:]
        return processor.decode(*written, skip_special_tokens=True).strip()


def _uniform(keys: Sequence[Sequence[Any]], stream: int, position: int) -> Tensor:
    """A uniform number of each key, float64 [n]."""
    return uniform_draws(torch.tensor([seed_of(*key) for key in keys]), stream, position, 1).squeeze(-1)


def _q_of(family: StableFamily, g: Tensor) -> Tensor:
    """Q(e1) of g = Phi^-1(e1), float64 [n, m, C], in pieces of one size each (see `_ROWS`)."""
    flat = g.flatten()
    filled = torch.nn.functional.pad(flat, (0, -len(flat) % _PIECE))
    pieces = [family.quantile_of_normal(piece) for piece in filled.split(_PIECE)]
    return torch.cat(pieces)[: len(flat)].view_as(g)


def survey_rows(
    model: GraftedModel, population: Population, questions: Questions, **drawn: int
) -> Iterator[dict[str, Any]]:
    """The rows of `CausalQwenForCausalLM.survey`, one by one; `PEOPLE_AT_ONCE` are held at a time. drawn: draws and seed."""
    asked = Survey(model, population, questions, **drawn)
    for items in batches(asked.items(), PEOPLE_AT_ONCE):
        yield from asked.rows(items)


def survey(model: GraftedModel, population: Population, questions: Questions, *, draws: int = 1, seed: int = 0) -> Any:
    """Ask everybody every question: a pandas.DataFrame of people x questions, with an index of person (and draw).

    An answer is a number, an option or a text. With `draws` 0 nothing is drawn: who somebody is and the noise are
    integrated out, so that a number is its median, and options are a dictionary of their probabilities. A prompt is read
    once for all people.

    Raises:
        ImportError: pandas is not installed. ValueError: see `Survey`; a number is asked of a model that copies, or that
            has not learned values.
    """
    with extra("tables", "a survey's table"):
        import pandas
    rows = list(survey_rows(model, population, questions, draws=draws, seed=seed))
    return pandas.DataFrame(rows).set_index(["person", "draw"] if draws > 1 else "person")
