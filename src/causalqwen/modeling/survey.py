"""A survey: what people of a population answer, each from who they are and from noise of their own (theory 3.15)."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from causalqwen.core import Chain
from causalqwen.decoding import CausalDecoding, Population, QuantileReader
from causalqwen.distributions import NOISE_STREAM, WHOLE_TEXT, check_seed, uniform_draws
from causalqwen.individuals import Branches
from causalqwen.modeling.choices import check_options, last_features, read_options
from causalqwen.modeling.prediction import mixed_quantiles
from causalqwen.modeling.reading import encode_text, reads_numbers
from causalqwen.numbers import ValueLaw

if TYPE_CHECKING:
    from causalqwen.modeling.model import CausalQwenForCausalLM

PEOPLE_AT_ONCE = 1024


@dataclass(frozen=True)
class Question:
    """What everybody is asked.

    Args:
        prompt: the text that an answer follows; "{age}" stands for a fact of whoever is asked.
        options: words to choose from; or numbers, or words that stand for numbers ({"never": 1, "often": 2}), of which the value
            head says how likely each is. None where any number may follow.
        name: of its column; the prompt by default.
        max_new_tokens: the answer is a text of so many tokens at most.
    """

    prompt: str
    options: tuple[str, ...] | tuple[float, ...] | Mapping[str, float] | None = None
    name: str = ""
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.prompt)
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise ValueError("a question's prompt is empty")
        if self.options is not None and self.max_new_tokens is not None:
            raise ValueError(f"{self.name!r} has options, and max_new_tokens is for a text: give one of them")
        if self.options is not None and not isinstance(self.options, Mapping):
            object.__setattr__(self, "options", tuple(self.options))
            if any(isinstance(option, str) for option in self.options):
                check_options(self.options)
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"{self.name!r}: a text has one token at least, not {self.max_new_tokens}")
        if self.values is not None and len(set(self.values)) < max(2, len(self.values)):
            raise ValueError(f"{self.name!r} needs two numbers or more to choose from, no two alike")

    @property
    def values(self) -> list[float] | None:
        """The numbers that its options are, or stand for."""
        if self.options is None or self.options and isinstance(next(iter(self.options)), str):
            return [float(one) for one in self.options.values()] if isinstance(self.options, Mapping) else None
        return [float(one) for one in self.options]

    @property
    def kind(self) -> str:
        """"number", "values", "words" or "text": a row of the table of readings."""
        if self.max_new_tokens is not None:
            return "text"
        if self.options is None:
            return "number"
        return "words" if self.values is None else "values"


class Asked(Protocol):
    """A question as the model read it."""

    def answers(self, g: Tensor, uniform: Tensor) -> list[Any]:
        """One of each of n people, who is at g [n, C], with noise by uniform numbers [n]."""

    def integrated(self, g: Tensor) -> list[Any]:
        """Of each of n people, who are at one of g [n, m, C], with the noise integrated out."""


@dataclass
class AskedNumber:
    """A number: where nobody in particular has it on its axis, what a unit of Q(e1) adds [C], and the noise that is left."""

    centre: float
    loadings: Tensor
    noise: float
    law: ValueLaw

    def locs(self, g: Tensor) -> Tensor:
        """Where each has it on its axis [...]; g [..., C]."""
        return self.centre + self.law.stable.quantile(torch.special.ndtr(g.double())) @ self.loadings

    def answers(self, g: Tensor, uniform: Tensor) -> list[float]:
        """Of the law of each."""
        locs = self.locs(g)
        return self.law.quantile(locs, torch.full_like(locs, self.noise), uniform).tolist()

    def integrated(self, g: Tensor) -> list[float]:
        """Medians."""
        axis = mixed_quantiles(self.law.stable, self.locs(g), self.noise, torch.tensor(0.5, dtype=torch.float64))
        return self.law.transform.inverse(axis).tolist()


@dataclass
class AskedValues(AskedNumber):
    """A choice among numbers: each takes what lies nearer to it than to the others."""

    options: list[Any]
    values: list[float]

    def probabilities(self, g: Tensor) -> Tensor:
        """[..., O]."""
        locs = self.locs(g).unsqueeze(-1)
        order = torch.tensor(self.values, dtype=torch.float64).argsort()
        ascending = torch.tensor(self.values, dtype=torch.float64)[order]
        middle = ((ascending[1:] + ascending[:-1]) / 2).expand(*locs.shape[:-1], -1)
        below = self.law.cdf(locs, torch.full_like(locs, self.noise), middle)
        cells = torch.diff(below, prepend=torch.zeros_like(locs), append=torch.ones_like(locs), dim=-1)
        return cells[..., order.argsort()]

    def answers(self, g: Tensor, uniform: Tensor) -> list[Any]:
        """Of the law of each."""
        return _taken(self.options, self.probabilities(g), uniform)

    def integrated(self, g: Tensor) -> list[dict[Any, float]]:
        """The probability of each option."""
        return _told(self.options, self.probabilities(g).mean(1))


@dataclass
class AskedWords:
    """A choice among words."""

    options: list[str]
    branches: Branches
    reader: QuantileReader

    def probabilities(self, g: Tensor) -> Tensor:
        """[..., O]."""
        return self.branches.log_probs(self.reader(torch.special.ndtr(g.double()))).exp()

    def answers(self, g: Tensor, uniform: Tensor) -> list[str]:
        """Of the law of each."""
        return _taken(self.options, self.probabilities(g), uniform)

    def integrated(self, g: Tensor) -> list[dict[str, float]]:
        """The probability of each option."""
        return _told(self.options, self.probabilities(g).mean(1))


def _taken(options: Sequence[Any], probabilities: Tensor, uniform: Tensor) -> list[Any]:
    """The option of each row of probabilities [n, O] that a uniform number [n] falls on."""
    places = (probabilities.cumsum(-1) < uniform.unsqueeze(-1)).sum(-1).clamp(max=len(options) - 1)
    return [options[place] for place in places.tolist()]


def _told(options: Sequence[Any], probabilities: Tensor) -> list[dict[Any, float]]:
    return [dict(zip(options, row, strict=True)) for row in probabilities.tolist()]
