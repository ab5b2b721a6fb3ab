"""What each observation says about somebody, and a page about one individual: where they lie among others, what shows it, and
what they favour (theory 3.12, 3.14, 3.15)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from causalqwen.decoding import Individual
from causalqwen.evaluation.page import number_row, write_page
from causalqwen.modeling import CausalQwenForCausalLM, Choice, NumberPrediction, Observation
from causalqwen.modeling.choices import read_options
from causalqwen.modeling.explain_individual import Said, covariance_of, favoured_tokens, lie_among, what_told
from causalqwen.modeling.reading import contexts_of, encode_text, read_contexts, token_evidence, value_evidence
from causalqwen.modeling.voice_likelihood import windows_of
from causalqwen.modeling.worlds import LEVEL
from causalqwen.numbers import ValueLaw
from causalqwen.numbers.rendering import brief

_COORDINATES, _VALUES, _EVIDENCE = 20, 12, 40
"""How many of each a page shows."""


@dataclass(frozen=True)
class Evidence:
    """One observation: what was asked and said, of what kind, and log p(it | who) - log p(it | average), in nats.

    own, nobodys: of a choice the probability that each gives it, of a number its median and interval; empty for words.
    """

    asked: str
    said: str
    kind: str
    gain: float
    own: str = ""
    nobodys: str = ""


@torch.no_grad()
def evidence_of_each(
    model: CausalQwenForCausalLM, individual: Individual, observations: Sequence[Observation | Choice]
) -> list[Evidence]:
    """Each of the observations, those first that say most. For an individual inferred from numbers alone, words say nothing."""
    words_count = not (individual.is_inferred and individual.knows_values)
    found = []
    for said in observations:
        evidence_of: Any = _of_choice if isinstance(said, Choice) else _of_text
        found.append(evidence_of(model, individual, said, words_count))
    return sorted(found, key=lambda evidence: -abs(evidence.gain))


def _of_choice(model: CausalQwenForCausalLM, individual: Individual, choice: Choice, words_count: bool) -> Evidence:
    taken = choice.options.index(choice.chosen)

    def log_p(who: Individual) -> float:
        branches = read_options(model, choice.prompt, choice.options, who.voice)
        return branches.log_probs(model.action.law.quantile(who.factor.to(model.device)))[taken].item()

    nobodys = log_p(Individual.nobody(len(individual.factor)))
    own = log_p(individual) if words_count else nobodys
    chances = (f"{torch.tensor(at).exp().item():.0%}" for at in (own, nobodys))
    return Evidence(choice.prompt, choice.chosen, "choice", own - nobodys, *chances)


def _of_text(model: CausalQwenForCausalLM, individual: Individual, said: Observation, words_count: bool) -> Evidence:
    contexts = contexts_of(model, [said]) if individual.voice is None else windows_of(model, [said])[0]
    if not contexts:  # a single token that nothing comes before
        return Evidence(said.prompt, said.text.strip(), "words", 0.0)
    read = read_contexts(model, contexts)
    numbers, is_number = value_evidence(model, read), read.targets == model.config.num_token_id
    g = individual.normal.to(model.device)
    nobody, gain = torch.zeros_like(g), 0.0
    if len(numbers):
        gain += (numbers.each(g) - numbers.each(nobody)).sum().item()
    if words_count and not bool(is_number.all()):
        nobodys = tokens = token_evidence(model, read)
        if individual.voice is not None:
            tokens = token_evidence(model, read_contexts(model, contexts, individual.voice))
        gain += (tokens.each(g) - nobodys.each(nobody)).sum().item()
    if len(numbers) != 1 or not bool(is_number.all()):
        return Evidence(said.prompt, said.text.strip(), "words", gain)
    features = read.features[is_number]
    laws = (model.predict_values(features, who)[0] for who in (individual, None))
    return Evidence(said.prompt, said.text.strip(), "number", gain, *map(_median_and_interval, laws))


def _median_and_interval(law: NumberPrediction) -> str:
    low, high = law.interval(LEVEL)
    return f"{brief(law.median)} ({brief(low)} to {brief(high)})"


def _moved_values(said: Sequence[Sequence[Said]]) -> list[tuple[str, Said]]:
    """The values of texts, those first that moved furthest beside their noise, each after what stands before it."""
    moved = [
        ("".join(earlier.text for earlier in text[max(place - 12, 0) : place]), piece)
        for text in said
        for place, piece in enumerate(text)
        if piece.own is not None and piece.nobodys is not None
    ]
    return sorted(moved, key=lambda pair: -abs(pair[1].own.loc - pair[1].nobodys.loc) / pair[1].own.scale)


def write_portrait(
    path: Path,
    model: CausalQwenForCausalLM,
    individual: Individual,
    texts: Sequence[str],
    beside: Sequence[tuple[str, Individual]] = (),
    observed: Sequence[Observation | Choice] = (),
) -> None:
    """Write the page of an individual abducted from texts, and from the answers and choices that were `observed`, among others;
    it appears by rename.

    Raises ValueError for somebody of another size, by name.
    """
    size = len(individual.factor)
    for name, other in beside:
        if len(other.factor) != size:
            raise ValueError(f"{name} has {len(other.factor)} coordinates, and cannot stand beside one of {size}")
    name = individual.name or "this individual"
    people = [(name, individual), *beside]
    normal, widths = individual.normal, covariance_of(individual).diagonal().sqrt()
    furthest = (normal.abs() / widths.clamp(min=1e-12)).argsort(descending=True)[:_COORDINATES].tolist()
    coordinates = []
    for at in furthest:  # what is known of each is drawn as a number is: its posterior
        width = max(widths[at].item(), 1e-9)
        posterior = NumberPrediction(normal[at].item(), width, None, ValueLaw(family="gaussian"))
        coordinates.append(number_row(str(at), 0.0, posterior))
    said, evidence = what_told(model, texts, individual) if texts else ([], ())
    each = evidence_of_each(model, individual, observed)
    favoured = favoured_tokens(model, evidence, individual) if evidence and len(evidence[0]) else ([], [])
    moved = _moved_values(said)
    write_page(
        path, "portrait.html", title=name[:1].upper() + name[1:], width="58rem", about=str(individual),
        names=[name for name, _ in people], plane=lie_among([who for _, who in people]).plain,
        coordinates=coordinates, apart=int((normal.abs() > 1.645 * widths).sum()), size=size, shown=sum(map(len, said)),
        total=sum(int((~encode_text(model, text).digits).sum()) for text in texts),
        portrait={
            "name": name, "words": [[piece.plain for piece in text] for text in said],
            "favoured": [vars(token) for token in favoured[0]], "avoided": [vars(token) for token in favoured[1]],
        },
        numbers=[
            number_row(f"… {before}", piece.value, piece.own, f"the average's median {brief(piece.nobodys.median)}")
            for before, piece in moved[:_VALUES]
        ],
        of_numbers=len(moved),
        each=each[:_EVIDENCE], of_each=len(each), gained_each=sum(evidence.gain for evidence in each),
    )  # fmt: skip
