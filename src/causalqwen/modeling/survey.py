"""A survey: what people of a population answer, each from who they are and from noise of their own (theory 3.15)."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
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
depend, in the last bit, on whether it lies in the rest behind the last whole vector, or of a thread's share. Here no rest is
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
            told = getattr(self, field)
            if not isinstance(told, str) or (field == "prompt" and not told.strip()):
                raise ValueError(f"field {field}: expected text, found {told!r}")
        object.__setattr__(self, "name", self.name or self.prompt)
        most = self.max_new_tokens
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ValueError(f"field max_new_tokens: expected a whole number from 1 on, found {most!r}")
        if self.options is None:
            return
        if most is not None:
            raise ValueError("field max_new_tokens: it is for a text, and the question has options; give one of them")
        if isinstance(self.options, str) or not isinstance(self.options, Mapping | Iterable):
            raise ValueError(f"field options: expected a list, or numbers by words, found {self.options!r}")
        if not isinstance(self.options, Mapping):
            object.__setattr__(self, "options", tuple(self.options))
            if any(isinstance(option, str) for option in self.options):
                return check_options(self.options)  # type: ignore[arg-type]
        given = list(self.options.values() if isinstance(self.options, Mapping) else self.options)
        numbers = [
            number
            for number in given
            if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
        ]
        if len(set(numbers)) < max(2, len(given)):
            raise ValueError(f"field options: expected two finite numbers or more, no two alike, found {given}")

    @property
    def values(self) -> list[float] | None:
        """The numbers that its options are, or stand for."""
        if self.options is None or (self.options and isinstance(next(iter(self.options)), str)):
            return [float(number) for number in self.options.values()] if isinstance(self.options, Mapping) else None
        return [float(number) for number in self.options]

    @property
    def kind(self) -> str:
        """What its answer is: "number", "values", "words" or "text"."""
        if self.max_new_tokens is not None:
            return "text"
        if self.options is None:
            return "number"
        return "words" if self.values is None else "values"


class Asked(Protocol):
    """A question as the model read it; family: by which it reads e1."""

    @property
    def family(self) -> StableFamily: ...

    def answers(self, q: Tensor, knows: Tensor, uniform: Tensor) -> list[Any]:
        """One of each of n people with Q(e1) = q [n, 1, C] and uniform numbers [n] for the noise.

        knows: bool [n], whose numbers follow from who they are."""

    def integrated(self, q: Tensor, knows: Tensor) -> list[Any]:
        """The answer of each of n people, of whom each of q [n, m, C] is equally likely, with the noise integrated out."""


@dataclass
class AskedNumber:
    """A number.

    centre, loadings [C], noise: where nobody in particular has it on its axis, what a unit of Q(e1) adds, and the noise that is
    left. plain: loc and scale of whoever's numbers are not known, with all of U integrated out.
    """

    centre: float
    loadings: Tensor
    noise: float
    plain: tuple[float, float]
    law: ValueLaw
    family: StableFamily

    @classmethod
    def read(cls, model: GraftedModel, question: "Question", prompt: str) -> "AskedNumber":
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
        return cls(loc, loadings, noise.item(), (loc, scale), model.value_law, model.action.value_law)

    def laws(self, q: Tensor, knows: Tensor) -> tuple[Tensor, Tensor]:
        """loc [n, m] and scale [n, 1] on the axis."""
        known, (loc, scale) = knows.unsqueeze(-1), self.plain
        locs = torch.where(known, self.centre + (q * self.loadings).sum(-1), loc)
        return locs, torch.where(known, self.noise, scale).double()

    def answers(self, q: Tensor, knows: Tensor, uniform: Tensor) -> list[Any]:
        """A draw of the law of each, as the model has it (not recalibrated)."""
        locs, scales = self.laws(q, knows)
        return self.law.quantile(locs.squeeze(-1), scales.squeeze(-1), uniform, raw=True).tolist()

    def integrated(self, q: Tensor, knows: Tensor) -> list[Any]:
        """Medians."""
        locs, scales = self.laws(q, knows)
        half = torch.tensor(0.5, dtype=torch.float64)
        return self.law.transform.inverse(mixed_quantiles(self.law.stable, locs, scales.squeeze(-1), half)).tolist()


@dataclass
class AskedValues:
    """A choice among numbers: each takes what lies nearer to it than to the others."""

    number: AskedNumber
    options: list[Any]
    values: Tensor

    @classmethod
    def read(cls, model: GraftedModel, question: "Question", prompt: str) -> "AskedValues":
        """As `AskedNumber.read`."""
        values = torch.tensor(question.values, dtype=torch.float64)
        return cls(AskedNumber.read(model, question, prompt), list(question.options), values)

    @property
    def family(self) -> StableFamily:
        return self.number.family

    def probabilities(self, q: Tensor, knows: Tensor) -> Tensor:
        """[n, m, O]."""
        locs, scales = (column.unsqueeze(-1) for column in self.number.laws(q, knows))
        ascending, order = self.values.sort()
        middle = (ascending[1:] + ascending[:-1]) / 2
        below = self.number.law.cdf(locs, scales, middle)
        ends = torch.zeros_like(locs), torch.ones_like(locs)
        return torch.diff(below, prepend=ends[0], append=ends[1], dim=-1)[..., order.argsort()]

    def answers(self, q: Tensor, knows: Tensor, uniform: Tensor) -> list[Any]:
        """A draw of the law of each."""
        return _taken(self.options, self.probabilities(q, knows).squeeze(1), uniform)

    def integrated(self, q: Tensor, knows: Tensor) -> list[Any]:
        """The probability of each option."""
        return _told(self.options, self.probabilities(q, knows).mean(1))


@dataclass
class AskedWords:
    """A choice among words."""

    options: list[str]
    branches: Branches
    family: StableFamily

    @classmethod
    def read(cls, model: GraftedModel, question: "Question", prompt: str) -> "AskedWords":
        """As `read_options`."""
        options = [str(option) for option in question.options]
        return cls(options, read_options(model, prompt, options).cpu(), model.action.law)

    def answers(self, q: Tensor, knows: Tensor, uniform: Tensor) -> list[Any]:
        """A draw of the law of each."""
        return _taken(self.options, self.branches.log_probs(q).exp().squeeze(1), uniform)

    def integrated(self, q: Tensor, knows: Tensor) -> list[Any]:
        """The probability of each option."""
        return _told(self.options, self.branches.log_probs(q).exp().mean(1))


def _taken(options: Sequence[Any], probabilities: Tensor, uniform: Tensor) -> list[Any]:
    """The option of each row of probabilities [n, O] that a uniform number [n] falls on."""
    places = (probabilities.cumsum(-1) < uniform.unsqueeze(-1)).sum(-1).clamp(max=len(options) - 1)
    return [options[place] for place in places.tolist()]


def _told(options: Sequence[Any], probabilities: Tensor) -> list[Any]:
    return [dict(zip(options, row, strict=True)) for row in probabilities.tolist()]


_READ: dict[str, Callable[[GraftedModel, Question, str], Asked]] = {
    "number": AskedNumber.read,
    "values": AskedValues.read,
    "words": AskedWords.read,
}


class Survey:
    """A population that is asked: rows of answers. An answer does not depend on who else is asked, nor on the order.

    Which of somebody's draws speaks follows from (seed, name, draw), and the noise of an answer from (seed, name, draw, name of
    the question).

    Args:
        questions: their names differ from each other and from those of the facts.
        draws: how often each person answers each question; 0 for medians and probabilities, with everything integrated out.
        seed: of all draws.

    Raises:
        ValueError: no questions, two of one name, or one called like a fact; a text with `draws` 0; a fact in a prompt that is
            known of some and not of others; people of another causal size.
    """

    def __init__(
        self,
        model: GraftedModel,
        population: Population,
        questions: Sequence[Question] | Question,
        draws: int = 1,
        seed: int = 0,
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
        self.knows = torch.tensor(population.knows_values)
        named = {question.name: question for question in self.questions}
        self._read = lru_cache(_READ_PROMPTS)(lambda name, prompt: _READ[named[name].kind](model, named[name], prompt))

    def items(self) -> Iterator[tuple[int, int]]:
        """(place of a person, draw) of every row, in order."""
        return product(range(len(self.population)), range(max(self.draws, 1)))

    @torch.no_grad()
    def rows(self, items: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Some of the rows."""
        rows: list[dict[str, Any]] = []
        for part in batches(items, _ROWS["drawn" if self.draws else "integrated"]):
            columns = self._answers(part)
            for place, (person, draw) in enumerate(part):
                row = {"person": self.population.names[person]} | ({"draw": draw} if self.draws > 1 else {})
                row |= {fact: known[person] for fact, known in self.population.facts.items()}
                rows.append(row | {name: column[place] for name, column in columns.items()})
        return rows

    def _answers(self, items: Sequence[tuple[int, int]]) -> dict[str, list[Any]]:
        """Columns of answers of `_ROWS` rows at most."""
        rows, people = _ROWS["drawn" if self.draws else "integrated"], [person for person, _ in items]
        keys = [(self.seed, self.population.names[person], draw) for person, draw in items]
        which: Tensor | None = None
        if self.draws:
            which = (_uniform(keys, INDIVIDUAL_STREAM, WHOLE_TEXT) * self.population.draws.shape[1]).long()

        def picked(draws: Tensor) -> Tensor:
            rows = draws[people] if which is None else draws[people, which].unsqueeze(1)
            return rows.double()

        g, known = picked(self.population.draws), self.knows[people]
        g_of_numbers = g if self.population.numbers is None else picked(self.population.numbers)
        read: dict[str, Tensor] = {}
        read_of_numbers = read if g_of_numbers is g else {}
        columns: dict[str, list[Any]] = {}
        for question in self.questions:
            answers: list[Any] = [None] * len(items)
            noise = [(*key, question.name) for key in keys]
            groups: dict[str, list[int]] = {}
            for place, person in enumerate(people):
                groups.setdefault(self._filled(question.prompt, person), []).append(place)
            for prompt, places in groups.items():
                if question.kind == "text":
                    told = [self._text(question, prompt, people[at], g[at, 0], noise[at]) for at in places]
                else:
                    asked = self._read(question.name, prompt)
                    full = places + places[-1:] * (rows - len(places))
                    of_words = question.kind == "words"
                    q = _q_of(asked.family, g, read) if of_words else _q_of(asked.family, g_of_numbers, read_of_numbers)
                    q = q[full]
                    if self.draws:
                        told = asked.answers(q, known[full], _uniform([noise[at] for at in full], NOISE_STREAM, 0))
                    else:
                        told = asked.integrated(q, known[full])
                for place, answer in zip(places, told, strict=False):
                    answers[place] = answer
            columns[question.name] = answers
        return columns

    def _filled(self, prompt: str, person: int) -> str:
        return fill(prompt, {field: of_people[person] for field, of_people in self._known.items()})

    def _text(self, question: Question, prompt: str, person: int, g: Tensor, key: Sequence[Any]) -> str:
        """What somebody writes, as the preset `persona` does."""
        model, processor = self.model, self.model.processor
        who = Individual.from_normal(g, self.population.names[person])
        plan = CausalDecoding.preset("persona", individual=who, seed=seed_of(*key))
        inputs = processor(prompt, prompt=True, return_tensors="pt").to(model.device)
        start = inputs["input_ids"].shape[1]
        said = model.generate(
            **inputs,
            causal_decoding=plan,
            max_new_tokens=question.max_new_tokens,
        )
        written = said.sequences[0, start:], said.numeric_values[0, start:]
        return processor.decode(*written, skip_special_tokens=True).strip()


def _uniform(keys: Sequence[Sequence[Any]], stream: int, position: int) -> Tensor:
    """A uniform number of each key, float64 [n]."""
    return uniform_draws(torch.tensor([seed_of(*key) for key in keys]), stream, position, 1).squeeze(-1)


def _q_of(family: StableFamily, g: Tensor, known: dict[str, Tensor]) -> Tensor:
    """Q(e1) of g = Phi^-1(e1), float64 [n, m, C], in pieces of one size each (see `_ROWS`); what is known already is kept."""
    if family.name not in known:
        flat = g.flatten()
        filled = torch.nn.functional.pad(flat, (0, -len(flat) % _PIECE))
        pieces = [family.quantile_of_normal(piece) for piece in filled.split(_PIECE)]
        known[family.name] = torch.cat(pieces)[: len(flat)].view_as(g)
    return known[family.name]


def survey_rows(
    model: GraftedModel,
    population: Population,
    questions: Sequence[Question] | Question,
    *,
    draws: int = 1,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """The rows of `CausalQwenForCausalLM.survey`, one by one; `PEOPLE_AT_ONCE` are held at a time."""
    asked = Survey(model, population, questions, draws, seed)
    for items in batches(asked.items(), PEOPLE_AT_ONCE):
        yield from asked.rows(items)


def survey(
    model: GraftedModel,
    population: Population,
    questions: Sequence[Question] | Question,
    *,
    draws: int = 1,
    seed: int = 0,
) -> Any:
    """Ask everybody every question: a pandas.DataFrame of people x questions, with an index of person (and draw).

    An answer is a number, an option or a text. With `draws` 0 nothing is drawn: who somebody is and the noise are
    integrated out, so that a number is its median, and options are a dictionary of their probabilities. A prompt is read
    once for all people. Answers depend neither on the order of people and questions, nor on who else is asked what. See
    `Survey`.

    Raises:
        ImportError: pandas is not installed. ValueError: see `Survey`; a number is asked of a model that copies, or that
            has not learned values.
    """
    with extra("tables", "a survey's table"):
        import pandas
    rows = list(survey_rows(model, population, questions, draws=draws, seed=seed))
    return pandas.DataFrame(rows).set_index(["person", "draw"] if draws > 1 else "person")
