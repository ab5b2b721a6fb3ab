"""What each thing that somebody said, and each choice that they made, told about them (theory 3.12, 3.14, 3.15)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from causalqwen.decoding import Individual
from causalqwen.modeling import CausalQwenForCausalLM, Choice, NumberPrediction, Observation
from causalqwen.modeling.choices import read_options
from causalqwen.modeling.reading import contexts_of, read_contexts, token_evidence, value_evidence
from causalqwen.modeling.voice_likelihood import windows_of
from causalqwen.modeling.worlds import LEVEL
from causalqwen.numbers.rendering import brief


@dataclass(frozen=True)
class Heard:
    """One observation: what was asked and said, of what kind, and log p(it | who) - log p(it | nobody), in nats.

    own, nobodys: of a choice the probability that each gives it, of a number its median and interval; empty for words.
    """

    asked: str
    said: str
    kind: str
    gain: float
    own: str = ""
    nobodys: str = ""


@torch.no_grad()
def what_each_told(
    model: CausalQwenForCausalLM, individual: Individual, observations: Sequence[Observation | Choice]
) -> list[Heard]:
    """Each of the observations, those first that told most. For an individual who knows numbers alone, words told nothing."""
    found = [
        _of_choice(model, individual, one) if isinstance(one, Choice) else _of_text(model, individual, one)
        for one in observations
    ]
    return sorted(found, key=lambda heard: -abs(heard.gain))


def _of_choice(model: CausalQwenForCausalLM, individual: Individual, choice: Choice) -> Heard:
    taken = choice.options.index(choice.chosen)

    def log_p(who: Individual) -> float:
        branches = read_options(model, choice.prompt, choice.options, who.voice)
        return branches.log_probs(model.action.law.quantile(who.factor.to(model.device)))[taken].item()

    nobodys = log_p(Individual.nobody(len(individual.factor)))
    heard = not (individual.is_inferred and individual.knows_values)
    own = log_p(individual) if heard else nobodys
    chances = (f"{torch.tensor(one).exp().item():.0%}" for one in (own, nobodys))
    return Heard(choice.prompt, choice.chosen, "choice", own - nobodys, *chances)


def _of_text(model: CausalQwenForCausalLM, individual: Individual, said: Observation) -> Heard:
    contexts = contexts_of(model, [said]) if individual.voice is None else windows_of(model, [said])[0]
    if not contexts:  # a single token that nothing comes before
        return Heard(said.prompt, said.text.strip(), "words", 0.0)
    read = read_contexts(model, contexts)
    numbers, is_number = value_evidence(model, read), read.targets == model.config.num_token_id
    g = individual.normal.to(model.device)
    nobody, gain = torch.zeros_like(g), 0.0
    if len(numbers):
        gain += (numbers.each(g) - numbers.each(nobody)).sum().item()
    words_count = not (individual.is_inferred and individual.knows_values)
    if words_count and not bool(is_number.all()):
        nobodys = tokens = token_evidence(model, read)
        if individual.voice is not None:
            tokens = token_evidence(model, read_contexts(model, contexts, individual.voice))
        gain += (tokens.each(g) - nobodys.each(nobody)).sum().item()
    if len(numbers) != 1 or not bool(is_number.all()):
        return Heard(said.prompt, said.text.strip(), "words", gain)
    features = read.features[is_number]
    laws = (model.predict_values(features, who)[0] for who in (individual, None))
    return Heard(said.prompt, said.text.strip(), "number", gain, *map(_told, laws))


def _told(law: NumberPrediction) -> str:
    low, high = law.interval(LEVEL)
    return f"{brief(law.median)} ({brief(low)} to {brief(high)})"
