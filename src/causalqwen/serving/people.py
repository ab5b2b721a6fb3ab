"""`/v1/individuals`: who somebody is, drawn, inferred, mixed or saved; where each lies, and which words were evidence.

A request describes whom it means, so that nothing is kept between two of them but what making them anew would give:

    "ann"                                                       whom the server knows by this name
    {"seed": 7}                                                 `Individual.from_seed`
    {"observations": [...], "likelihood": "softmax"}            `model.abduct`
    {"mix": [one, other], "share": 0.3}                         `mix`
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, field_validator, model_validator

from causalqwen.decoding import Individual, mix
from causalqwen.individuals.evidence import LIKELIHOODS
from causalqwen.modeling import CausalQwenForCausalLM, Choice, Observation
from causalqwen.modeling.explain_individual import favoured_tokens, lie_among, what_told
from causalqwen.modeling.reading import encode_text
from causalqwen.serving.calls import Task
from causalqwen.serving.requests import Seed, Strict
from causalqwen.serving.settings import ApiError, ServerSettings, individual_of

MOST_PEOPLE = 32
"""Individuals of one request."""

_NAME = re.compile(r"\w[\w .-]{0,63}")


class SaidText(Strict):
    """An `Observation`."""

    text: Annotated[str, Field(min_length=1)]
    prompt: str = ""

    @property
    def observed(self) -> Observation:
        return Observation(self.text, self.prompt)


class Chosen(Strict):
    """A `Choice`."""

    prompt: str
    options: list[str]
    chosen: str

    @model_validator(mode="after")
    def _check_options(self) -> "Chosen":
        _ = self.observed
        return self

    @property
    def observed(self) -> Choice:
        return Choice(self.prompt, tuple(self.options), self.chosen)


def _kind_of(observation: Any) -> str:
    if not isinstance(observation, dict | BaseModel):
        return "<text>"
    given = observation if isinstance(observation, dict) else vars(observation)
    return "<said>" if given.get("options") is None else "<choice>"


Observed = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[SaidText, Tag("<said>")] | Annotated[Chosen, Tag("<choice>")],
    Discriminator(_kind_of),
]


class Described(Strict):
    """An individual by how they come about; exactly one of seed, observations and mix."""

    seed: Seed | None = None
    observations: Annotated[list[Observed], Field(min_length=1)] | None = None
    likelihood: Literal[LIKELIHOODS] = "softmax"  # type: ignore[valid-type]
    mix: Annotated[list["Who"], Field(min_length=2, max_length=2)] | None = None
    share: Annotated[float, Field(ge=0, le=1)] = 0.5
    name: Annotated[str, Field(max_length=200)] = ""

    @model_validator(mode="after")
    def _check_kind(self) -> "Described":
        if sum(given is not None for given in (self.seed, self.observations, self.mix)) != 1:
            raise ValueError("give a name, or exactly one of seed, observations and mix")
        return self

    @property
    def texts(self) -> list[str]:
        """What was observed of them with nothing before it."""
        return [text for text in self.observations or [] if isinstance(text, str)]


Who = Annotated[
    Annotated[str, Tag("<name>")] | Annotated[Described, Tag("<described>")],
    Discriminator(lambda given: "<name>" if isinstance(given, str) else "<described>"),
]
Described.model_rebuild()


class TaskRequest(Strict):
    """What requests for some work share."""

    path: ClassVar[str]
    made: ClassVar[str]

    model: str
    stream: bool = False

    def work(self, people: "People", task: Task) -> None:
        """Tell the parts of the answer."""
        raise NotImplementedError


class IndividualsRequest(TaskRequest):
    """Individuals: drawn, inferred, mixed, saved."""

    path, made = "individuals", "list"

    individuals: Annotated[list[Who], Field(min_length=1, max_length=MOST_PEOPLE)]
    words: bool = False
    save: str | None = None

    @field_validator("save")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and not _NAME.fullmatch(name):
            found = name if len(name) <= 64 else f"{name[:61]}..."
            what = "1 to 64 letters, digits, spaces, dots, hyphens and underscores, a letter or a digit first"
            raise ValueError(f"{found!r} cannot be saved under; a name has {what}")
        return name

    @model_validator(mode="after")
    def _check_saved(self) -> "IndividualsRequest":
        if self.save is not None and len(self.individuals) != 1:
            raise ValueError("save names one individual: give no other")
        return self

    def work(self, people: "People", task: Task) -> None:
        """Tell of each of them, then where they lie."""
        made = []
        for index, who in enumerate(self.individuals):
            made.append(people.find(who))
            entry = {"index": index} | about(made[-1]) | ({"name": who} if isinstance(who, str) else {})
            if self.words and isinstance(who, Described) and who.texts:
                entry |= _words(people.model, who.texts, made[-1])
            task.tell({"data": [entry]})
        if self.save is not None:
            people.save(made[0], self.save)
        task.tell({"plane": lie_among(made).plain})


class People:
    """The model, and individuals as requests describe them; those who were asked for last are kept.

    Used by the thread that owns the model alone.
    """

    def __init__(self, model: CausalQwenForCausalLM, settings: ServerSettings) -> None:
        self.model, self.settings = model, settings
        self._made = lru_cache(2 * MOST_PEOPLE)(lambda who: self._make(Described.model_validate_json(who)))

    def find(self, who: str | Described) -> Individual:
        """Whoever is meant. ApiError 400 for a name that no individual has, ValueError for what none can be inferred from."""
        if isinstance(who, str):
            return individual_of(who, self.settings, "individual")
        return self._made(who.model_dump_json())

    def save(self, individual: Individual, name: str) -> None:
        """Under a name that no individual has, where the server is set to keep people: in their folder."""
        folder = self.settings.keep
        if folder is None:
            message = "this server saves no individuals: start `causalqwen explore --individuals FOLDER`"
            raise ApiError(400, message, param="save")
        if name in self.settings.individuals or (folder / f"{name}.safetensors").exists():
            raise ApiError(400, f"somebody is called {name!r} already", param="save")
        kept = replace(individual, name=name)
        kept.save(folder / f"{name}.safetensors")
        self.settings.individuals[name] = kept

    def _make(self, who: Described) -> Individual:
        model, size = self.model, self.model.config.causal_size
        if who.seed is not None:
            return Individual.from_seed(who.seed, size, who.name)
        if who.mix is not None:
            first, second = map(self.find, who.mix)
            made = mix(first, second, who.share)
            return replace(made, name=who.name or made.name)
        observed = [given if isinstance(given, str) else given.observed for given in who.observations or []]
        tokens = sum(len(encode_text(model, words).ids) for given in observed for words in _words_of(given))
        if tokens > self.settings.max_heard:
            message = f"the observations have {tokens} tokens, this server reads {self.settings.max_heard} at once"
            raise ApiError(400, message, param="observations")
        return model.abduct(observed, likelihood=who.likelihood, name=who.name)


def _words_of(observation: str | Observation | Choice) -> list[str]:
    """All that is read of it."""
    if isinstance(observation, Choice):
        return [observation.prompt, *observation.options]
    return [observation] if isinstance(observation, str) else [observation.prompt, observation.text]


def about(individual: Individual) -> dict[str, Any]:
    """An individual as plain data."""
    return {
        "name": individual.name,
        "about": str(individual),
        "inferred": individual.is_inferred,
        "knows_values": individual.knows_values,
        "evidence": [vars(seen) for seen in individual.evidence],
    }


def _words(model: CausalQwenForCausalLM, texts: list[str], individual: Individual) -> dict[str, Any]:
    """How much each word is evidence of them, and which they favour and avoid."""
    explained, evidence = what_told(model, texts, individual)
    favoured, avoided = favoured_tokens(model, evidence, individual) if len(evidence[0]) else ([], [])
    tokens = {"favoured": list(map(vars, favoured)), "avoided": list(map(vars, avoided))}
    return {"words": [[word.plain for word in text] for text in explained]} | tokens
