"""Questions with options: how likely each is under an individual, and what a choice says about one (theory 3.15)."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from causalqwen.decoding import Individual
from causalqwen.individuals.evidence import Branches, ChoiceEvidence
from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.reading import EncodedText, encode_text


@dataclass(frozen=True)
class Choice:
    """Somebody was asked `prompt` and took one of the `options`: an observation for `abduct`."""

    prompt: str
    options: tuple[str, ...]
    chosen: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(self.options))
        check_options(self.options)
        if self.chosen not in self.options:
            raise ValueError(f"{self.chosen!r} is none of the options {', '.join(self.options)}")


@dataclass(frozen=True)
class ChoicePrediction:
    """How likely each option is; the probabilities sum to 1, in the order of the options."""

    options: tuple[str, ...]
    probabilities: tuple[float, ...]

    @property
    def likeliest(self) -> str:
        """The option with the greatest probability; the first of several."""
        return self.options[max(range(len(self.options)), key=self.probabilities.__getitem__)]

    def log_prob(self, option: str) -> float:
        """log P(option). ValueError for what is no option."""
        if option not in self.options:
            raise ValueError(f"{option!r} is none of the options {', '.join(self.options)}")
        return math.log(self.probabilities[self.options.index(option)])

    def __str__(self) -> str:
        return ", ".join(f"{option} {p:.3g}" for option, p in zip(self.options, self.probabilities, strict=True))


def check_options(options: Sequence[str]) -> None:
    """ValueError unless they are two or more, of one line of text each, no two alike."""
    words = [option.strip() for option in options if isinstance(option, str) and "\n" not in option.strip()]
    if len(words) < max(len(options), 2) or not all(words) or len(set(words)) < len(words):
        raise ValueError(f"a choice needs two options or more, each a line of text, no two alike; got {list(options)}")


@torch.no_grad()
def predict_choice(
    model: GraftedModel, prompts: str | Sequence[str], options: Sequence[str], *, individual: Individual | None = None
) -> list[ChoicePrediction]:
    """Which of the options follows each prompt, as `individual` would say it; the population average by default.

    Options are what may be written after the prompt, each to the end of its line. At every token where they part, a
    softmax over loc_S of the tokens that they go on with says how likely each branch is. What is not known about somebody who
    was inferred is integrated out. ValueError for an empty prompt, fewer than two options or two that are alike.
    """
    check_options(options)
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if individual is None:
        individual = Individual.nobody(model.config.causal_size)
    individual.check_size(model.config.causal_size)
    g = individual.likely(200) if individual.is_inferred else individual.normal.unsqueeze(0)
    q = model.action.law.quantile_of_normal(g.to(model.device))
    read = [read_options(model, prompt, options, individual.voice) for prompt in prompts]
    return [ChoicePrediction(tuple(options), tuple(branches.log_probs(q).exp().mean(0).tolist())) for branches in read]


def choice_evidence(model: GraftedModel, choices: Sequence[Choice]) -> ChoiceEvidence:
    """What choices say about whoever made them."""
    read = [read_options(model, choice.prompt, choice.options) for choice in choices]
    return ChoiceEvidence(read, [choice.options.index(choice.chosen) for choice in choices], model.action.law)


@torch.no_grad()
def read_options(model: GraftedModel, prompt: str, options: Sequence[str], voice: Tensor | None = None) -> Branches:
    """The branches of the options after a prompt, under a voice [L, H]. Raises ValueError for an empty prompt."""
    before = encode_text(model, prompt, prompt=True)
    if not len(before.ids):
        raise ValueError("the prompt of a choice is empty")
    written = [_ids_after(model, prompt, option) for option in options]
    forks = sorted({way[:length] for way in written for length in range(len(way))}, key=lambda way: (len(way), way))
    scores, reaches, sizes, steps = [], [], [], []
    for fork in forks:
        onward = sorted({way[len(fork)] for way in written if way[: len(fork)] == fork})
        if len(onward) == 1:
            continue
        text = before.then(EncodedText.of(fork, [0.0] * len(fork), [False] * len(fork)))
        chain = Chain(model, last_features(model, text, voice))
        words = chain.words
        rows, bias = words.weight[onward].double(), 0.0 if words.bias is None else words.bias[onward].double()
        scores.append(chain.loc_U[0].double() @ rows.T + bias)
        reaches.append(chain.scale_U[0].double() * rows)
        sizes.append(len(onward))
        steps += [(*fork, token) for token in onward]
    paths = torch.tensor([[way[: len(step)] == step for step in steps] for way in written], device=model.device)
    return Branches(torch.cat(scores), torch.cat(reaches), sizes, paths)


@torch.no_grad()
def last_features(model: GraftedModel, text: EncodedText, voice: Tensor | None = None) -> Tensor:
    """z [1, H] where a text ends, under a voice [L, H]. ValueError where it is longer than the context."""
    limit = model.config.context_length
    if limit is not None and len(text.ids) > limit:
        raise ValueError(f"the prompt has {len(text.ids)} tokens, but the context of this model holds {limit}")
    was_training = model.training
    model.eval()
    ids, values, _ = (column.to(model.device) for column in text)
    hidden: Tensor = model.features(ids[None], numeric_values=values[None], voice=voice).last_hidden_state[:, -1]
    model.train(was_training)
    return hidden


def _ids_after(model: GraftedModel, prompt: str, option: str) -> tuple[int, ...]:
    """The tokens of an option as it stands after a prompt, through the end of its line."""
    last, first = (prompt.rstrip(" ") or prompt)[-1], option.strip()[0]
    joined = last.isspace() or any(unicodedata.east_asian_width(character) in "WF" for character in (last, first))
    text = f"{'' if joined else ' '}{option.strip()}\n"
    return tuple(model.processor.tokenizer(text, add_special_tokens=False)["input_ids"])
