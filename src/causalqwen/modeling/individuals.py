"""Individuals of a grafted model: who wrote what was observed, and under which noise (theory 3.12, 3.13)."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from causalqwen.decoding.draws import BoundDecoding
from causalqwen.decoding.individual import Individual, Observed
from causalqwen.decoding.plan import CausalDecoding, ObservedNoise, ObservedNumber
from causalqwen.decoding.population import KEPT, Population, seed_of
from causalqwen.decoding.voices import Voices, check_voice
from causalqwen.distributions import upcast
from causalqwen.individuals.evidence import LIKELIHOODS, ValueEvidence
from causalqwen.individuals.marginal import line_posterior, loading_sizes
from causalqwen.individuals.observed_noise import ROUNDINGS, observed_normals
from causalqwen.individuals.posterior import find_posterior, likeliest_population
from causalqwen.modeling.backbones import reading
from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.chain import POSITIONS_AT_ONCE, Chain
from causalqwen.modeling.choices import Choice, choice_evidence
from causalqwen.modeling.layer_shift import depths_of
from causalqwen.modeling.reading import (
    NOTHING_OBSERVED,
    EncodedText,
    Observation,
    Reading,
    contexts_of,
    read_contexts,
    read_each,
    token_evidence,
    value_evidence,
)
from causalqwen.modeling.voice_likelihood import log_p_of, scores, windows_of

Observations = str | Observation | Choice | Sequence[str | Observation | Choice]
"""What somebody said and chose."""

_SAME_VALUE = 1e-4
"""Relative, on the value axis: loc_Y differs by less between batches of other shapes, in float32."""

_EXPLAINED = 64  # positions whose scores are held at once
_ON_LINE = 201  # draws along a line, an odd number: the median is one of them


@dataclass(frozen=True)
class Share:
    """A token of a text, and how much of what varies there is who speaks: in [0, 1], the rest is noise (theory 3.14)."""

    text: str
    who: float


@dataclass(frozen=True)
class Abduction:
    """How somebody is inferred: the settings of `abduct`."""

    prior: Individual | None = None
    spread: float | None = None
    likelihood: str = "softmax"
    method: str = "auto"

    def checked(self, model: GraftedModel) -> "Abduction":
        """With the method that "auto" is for this model. ValueError for settings that do not go together."""
        prior, of_values, method = self.prior, self.likelihood == "values", self.method
        if self.likelihood not in LIKELIHOODS:
            raise ValueError(f"unknown likelihood {self.likelihood!r}; use one of {', '.join(LIKELIHOODS)}")
        if self.spread is not None and not self.spread > 0:
            raise ValueError(f"the prior's spread must be positive, got {self.spread}")
        on_line = of_values and self.spread is None and (prior is None or prior.line is not None)
        if method == "auto":
            method = "quadrature" if on_line and model.action.value_law.alpha != 2 else "mode"
        if method not in ("mode", "quadrature"):
            raise ValueError(f"unknown method {method!r}; use 'auto', 'mode' or 'quadrature'")
        if method == "quadrature" and not on_line:
            raise ValueError(
                "method 'quadrature' is for likelihood 'values' without a spread, and without a prior of another method"
            )
        if method == "quadrature" and model.config.value_crossing > 1:
            raise ValueError(
                "method 'quadrature' needs individuals on one line, and this model's cross in several directions"
            )
        if prior is not None:
            prior.check_size(model.config.causal_size)
        if prior is not None and prior.voice is not None:
            raise ValueError(f"{prior} has a voice, to which nothing is added: give all that they said at once")
        if prior is not None and prior.draws is not None and prior.precision is None and method != "quadrature":
            raise ValueError(
                f"{prior} is known by draws and no width (method 'quadrature', a population, a mixture), to which words or "
                "another method could not add: infer it by method 'mode'; to one of 'quadrature' give numbers, with "
                "likelihood 'values'"
            )
        if of_values and not model.reads_numbers:
            raise ValueError("likelihood 'values' hears numbers, and this model has not learned values yet: train it")
        if of_values and prior is not None and not prior.knows_values:
            raise ValueError(f"{prior} was inferred from words: how far their numbers follow from them is not known")
        if self.spread is not None and prior is not None and prior.precision is not None:
            raise ValueError("a prior that was inferred brings its own width: leave spread out")
        return replace(self, method=method)

    def infer(self, model: GraftedModel, read: Reading, choices: Sequence[Choice], name: str) -> Individual:
        """Who said what was read and made the choices."""
        prior, of_values = self.prior, self.likelihood == "values"
        values = value_evidence(model, read)
        if of_values and not len(values):
            raise ValueError("the observations hold no number, and likelihood 'values' hears nothing else")
        if self.method == "quadrature":
            return _on_line(values, name, prior)
        tokens = token_evidence(model, read[:0] if of_values else read, "softmax" if of_values else self.likelihood)
        chosen = choice_evidence(model, [] if of_values else choices)
        mean = torch.zeros(model.config.causal_size, dtype=torch.float64) if prior is None else prior.normal
        precision: Tensor | float | None = None if self.spread is None else self.spread**-2
        if prior is not None and prior.precision is not None:
            precision = prior.precision.to(model.device)
        elif of_values and self.spread is None:
            precision = 1.0
        widest = model.action.scales.widest
        posterior = find_posterior([tokens, values, chosen], mean.to(model.device), precision, widest=widest)
        width = posterior.prior_precision.diagonal().mean().item() ** -0.5
        found = posterior.gained, posterior.directions, width
        observed = Observed(len(tokens), len(values), *found, self.likelihood, self.method, choices=len(chosen))
        before, label = ((), name) if prior is None else (prior.evidence, name or prior.name)
        known = {"precision": posterior.precision.cpu(), "evidence": (*before, observed)}
        return Individual.from_normal(posterior.mode, label, **known)


@torch.no_grad()
def abduct(
    model: GraftedModel,
    observations: Observations,
    *,
    prior: Individual | Voices | None = None,
    spread: float | None = None,
    likelihood: str = "softmax",
    method: str = "auto",
    name: str = "",
) -> Individual:
    """The individual who wrote the observed texts: the posterior of e1.

    With g = Phi^-1(e1): log p(g | texts) = log p(texts | g) - |g|^2 / (2 spread^2), found by Fisher scoring on features
    that are computed once (theory 3.12). Long texts are read `reading.CHUNK` tokens at a time.

    Args:
        prior: somebody known already, to be known better: evidence adds up. Or `Voices` that were learned from many people
            (`training.learn_voices`): the individual is then inferred from words at every depth of the backbone (theory 3.17),
            e1 is inferred given that; spread, likelihood and method are refused.
        spread: the prior's standard deviation of g; None for the one under which the texts are likeliest, at most that of
            score scale.
        likelihood: of the tokens: "softmax" over loc_S, or "ovr", the product of one-vs-rest probabilities. Values
            count by their density under what is left to the noise. "values": the numbers alone, as rows of one
            individual do in training; e1 is uniform then unless a spread is given. Choices are words: they are read by the
            softmax of their options, and not at all by "values".
        method: "mode", the mode and width of the posterior; "quadrature", the exact posterior of values on a line
            (theory 3.14), for "values" alone; "auto", the mode, or the quadrature where values alone speak and their
            law is not Gaussian.

    Raises:
        ValueError: nothing observed; a prior of another model's size, or from words where values alone count; a spread
            beside a prior that has a width; a method that is unknown, or does not fit.
    """
    if isinstance(prior, Voices):
        if spread is not None or likelihood != "softmax" or method != "auto":
            raise ValueError(
                "a voice is inferred by a softmax of words, in one step: leave spread, likelihood and method out"
            )
        return _by_voice(model, observations, prior, name)
    way = Abduction(prior, spread, likelihood, method).checked(model)
    (observed,) = _read_people(model, [observations])
    return way.infer(model, *observed, name)


def _by_voice(model: GraftedModel, observations: Observations, voices: Voices, name: str) -> Individual:
    """Somebody inferred at every depth, by the score of their words at the origin of `voices`; then e1, given their voice."""
    check_voice(voices.origin, *depths_of(model.backbone))
    texts, choices = _texts_and_choices(observations)
    if choices:
        raise ValueError("a voice is inferred from words: leave choices out, or the voices")
    was_training = model.training
    model.eval()
    try:
        with reading(model), torch.inference_mode(False):
            contexts = [context for windows in windows_of(model, texts) for context in windows]
            score, tokens = torch.zeros_like(voices.origin), 0
            for gradients, counts in scores(model, contexts, voices.origin):
                score, tokens = score + gradients.sum(0).to(score), tokens + int(counts.sum())
            if not tokens:
                raise ValueError("the observations hold no word that something comes before: no voice can be inferred")
            voice = voices.heard(score, tokens)
            gained = log_p_of(model, contexts, voice) - log_p_of(model, contexts, None)
            read = read_contexts(model, contexts, voice)
    finally:
        model.train(was_training)
    who = Abduction(method="mode").infer(model, read, [], name)
    (by_e1,) = who.evidence
    directions = voices.directions(tokens) + by_e1.directions
    observed = replace(by_e1, method="voice", gained=gained + by_e1.gained, directions=directions)
    return replace(who, voice=voice.cpu(), evidence=(observed,))


@torch.no_grad()
def abduct_people(
    model: GraftedModel,
    observations: Mapping[str, Observations],
    *,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    prior: Individual | None = None,
    likelihood: str = "softmax",
) -> Population:
    """Infer several people by their names, each as `abduct` does, as a population that can be asked (`survey`). facts: what
    else is known of each. Where somebody's words are observed and numbers too, the numbers also tell by themselves
    (`Population.numbers`)."""
    if isinstance(prior, Voices):
        raise ValueError(
            "a prior of several people is an individual: somebody with a voice is inferred alone, by `abduct`"
        )
    way = Abduction(prior, likelihood=likelihood).checked(model)
    by_numbers = None
    if likelihood != "values" and model.reads_numbers:
        known = prior if prior is not None and prior.knows_values else None
        by_numbers = Abduction(known, likelihood="values").checked(model)
    observed, people, numbers = zip(observations, _read_people(model, observations.values()), strict=True), {}, {}

    def kept(person: Individual) -> Individual:  # a width is C x C
        return replace(person, precision=None, line=None, draws=person.likely(KEPT, seed_of(0, person.name)))

    for name, (read, choices) in tqdm(observed, "inferring people", len(observations), leave=False):
        people[name] = kept(way.infer(model, read, choices, name))
        if by_numbers is not None and len(value_evidence(model, read)):
            numbers[name] = kept(by_numbers.infer(model, read, choices, name))
    return Population.of(people, facts, numbers=numbers)


def _read_people(model: GraftedModel, people: Iterable[Observations]) -> list[tuple[Reading, list[Choice]]]:
    """What each of several people said, and the choices that each made. Contexts that they share are read once."""
    contexts, ends, choices = [], [0], []
    for observations in people:
        texts, chosen = _texts_and_choices(observations)
        choices.append(chosen)
        contexts += contexts_of(model, texts)
        ends.append(len(contexts))
        if ends[-1] == ends[-2] and not choices[-1]:
            raise ValueError(NOTHING_OBSERVED)
    read = read_each(model, contexts)
    nothing = Reading.nothing(model)
    parts = [Reading.all_of([nothing, *read[start:end]]) for start, end in itertools.pairwise(ends)]
    return list(zip(parts, choices, strict=True))


def _texts_and_choices(observations: Observations) -> tuple[list[str | Observation], list[Choice]]:
    given = [observations] if isinstance(observations, str | Observation | Choice) else list(observations)
    choices = [item for item in given if isinstance(item, Choice)]
    return [item for item in given if not isinstance(item, Choice)], choices


@torch.no_grad()
def abduct_population(
    model: GraftedModel,
    observations: Mapping[str, str | Observation | Sequence[str | Observation]],
    *,
    likelihood: str = "softmax",
    name: str = "",
) -> Individual:
    """What a person is like before they say anything: the law of e1, learned from the words of several people by their names.

    Its mean is what these people share, and its width is how much they differ (`likeliest_population`). As a prior of
    `abduct` it stands for a new person of their kind; `draw(seed)` makes such a person up. ValueError for fewer than two
    people, or one who said no words.
    """
    if len(observations) < 2:
        raise ValueError(f"a population is learned from two people or more, got {len(observations)}")
    average = torch.zeros(model.config.causal_size, dtype=torch.float64, device=model.device)
    evidence = []
    for who, observed in tqdm(observations.items(), desc="reading people", leave=False):
        words = token_evidence(model, read_contexts(model, contexts_of(model, observed)), likelihood)
        if not len(words):
            raise ValueError(f"no words of {who} to learn from")
        evidence.append(words.evaluate(average, True)[1:])
    mean, spread = likeliest_population(*zip(*evidence, strict=True), widest=model.action.scales.widest)
    precision = torch.eye(len(mean), dtype=torch.float64) * spread**-2
    return Individual.from_normal(mean, name or f"one like {len(observations)} people", precision=precision)


def _on_line(values: ValueEvidence, name: str, prior: Individual | None) -> Individual:
    """The posterior of values alone under a law that is not Gaussian: draws along the line, the median its factor. What a
    prior observed on the line is observed again with them."""
    row, law = values.row.double(), values.law
    residuals = values.values.double() - values.loc.double() @ row - values.bias
    sizes = loading_sizes(law, values.reach.double() * row) * values.reach[:, 0].sign()
    new = torch.stack([residuals, sizes, values.scale.double()]).cpu()
    signs, unit, before = row.sign().cpu(), torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    line = new
    if prior is not None and prior.line is not None:
        line, before = torch.cat([prior.line, new], dim=1), signs[0] * law.quantile(prior.factor[0])
    places = line_posterior(law, line[0], line[1], line[2], _ON_LINE)
    now, was = (law.log_prob(new[0], new[1] * t, new[2]).sum().item() for t in (places[_ON_LINE // 2], before))
    # Q(e1_c) = sign(W_c) t: one side of it is exact, the other follows by symmetry
    along = torch.special.ndtri(law.cdf(-places.abs(), 0 * unit, unit)) * -places.sign()
    g = signs * along.unsqueeze(-1)
    evidence, label = ((), name) if prior is None else (prior.evidence, name or prior.name)
    observed = Observed(0, len(values), now - was, 1.0, 1.0, "values", "quadrature")
    return Individual.from_normal(g[_ON_LINE // 2], label, evidence=(*evidence, observed), draws=g, line=line)


@torch.no_grad()
def shares(model: GraftedModel, observation: str | Observation) -> list[Share]:
    """How much of the variation of each token's score, or value, is who speaks.

    At a token y: sum_c |W_yc scale_U,c|^a over scale_S,y^a, a the law's index, what the token's own noise adds included; at
    a number sum_c |W_reg,c scale_c|^a over that of U', as the value head reads them.
    """
    observation = Observation(observation) if isinstance(observation, str) else observation
    read = read_contexts(model, contexts_of(model, observation))
    parts = zip(Chain(model, read.features).parts(), read.targets.split(POSITIONS_AT_ONCE), strict=True)
    share = torch.cat([share_of_who(model, part, targets) for part, targets in parts])
    rows = zip(read.targets.tolist(), read.values.tolist(), share.tolist(), strict=True)
    return [Share(model.processor.decode([token], [value]), who) for token, value, who in rows]


def share_of_who(model: GraftedModel, chain: Chain, tokens: Tensor) -> Tensor:
    """`shares` at positions [n] where the tokens int64 [n] stand: [n], in [0, 1]."""
    action = model.action
    rows = upcast(chain.words.rows_of_all()[0][tokens]).abs() ** action.law.alpha
    who = (rows * upcast(chain.scale_U) ** action.law.alpha).sum(-1)
    total = chain.scores.graded().gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    share = who / total**action.law.alpha
    numbers = (tokens == model.config.num_token_id) & model.reads_numbers
    if bool(numbers.any()):
        law = action.value_law
        loadings, left = chain.value_loadings()
        of_who, of_noise = loading_sizes(law, loadings) ** law.alpha, left**law.alpha
        share = torch.where(numbers, of_who / (of_who + of_noise), share)
    return share


@torch.no_grad()
def abduct_noise(
    model: GraftedModel,
    observation: Observation,
    individual: Individual | None = None,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> ObservedNoise:
    """Draw the own noise under which `individual` wrote the text, given the text (`individuals.observed_noise`).

    The noise that all tokens share stays integrated out, and without an individual who speaks, too: both are part of each
    token's own. temperature: of the plan that the noise will be given to. ValueError for no prompt, temperature 0, a text
    beyond the context, or a vocabulary whose scores have no own noise, or are not Gaussian.
    """
    model.config.require("a text under observed noise")
    if not temperature:
        raise ValueError("at temperature 0 nothing is drawn, and no noise explains a text: give one above 0")
    if not observation.prompt:
        raise ValueError("a text alone has no first token to explain: give the prompt before it")
    contexts = contexts_of(model, observation, 2**31)
    if len(contexts) > 1:
        raise ValueError("the text is longer than the context of this model: its noise cannot be found in one piece")
    read = read_contexts(model, contexts, None if individual is None else individual.voice)
    text, first = contexts[0]
    seen = ~model.config.context.hidden(text.ids == model.config.num_token_id)
    after = seen[first - 1 : -1]  # of the tokens that something is decided after: one position each
    tokens, chosen = text.ids[first:][after], (~text.digits[first:][after]).nonzero().squeeze(-1)
    positions = int(seen[:first].sum()) - 1 + torch.arange(len(tokens), device=model.device)
    plan = CausalDecoding(individual=individual or "marginal", own="token", temperature=temperature, seed=seed)
    bound = BoundDecoding.bind(plan, 1, model.config.causal_size, model.device)

    def chain(features: Tensor, places: Tensor) -> Chain:
        return Chain(model, features[None], bound.at(positions[places.to(model.device)][None]))

    nothing = torch.zeros(0, dtype=torch.int64)
    found: list[tuple[Tensor, ...]] = [(nothing, nothing, nothing.double())]
    for part in torch.arange(len(chosen)).split(_EXPLAINED):
        scored = chain(read.features[part], chosen[part])
        loc, own = (column[0] for column in scored.of_held())
        rows, others, normals = observed_normals(loc, own, read.targets[part], seed, positions[chosen[part]])
        found.append((chosen[part][rows.cpu()], others.cpu(), normals.cpu()))
    places, exceptions, normals = (torch.cat(column) for column in zip(*found, strict=True))
    values, value_normals, slack = torch.zeros(3, len(tokens), dtype=torch.float64)
    numbers = (tokens == model.config.num_token_id).nonzero().squeeze(-1)
    if len(numbers):
        of_numbers = chain(read.features[read.targets == model.config.num_token_id], numbers)
        loc_Y, scale_Y = (column[0].double().cpu() for column in of_numbers.value())
        values[numbers] = model.value_transform.forward(text.values[first:][after][numbers])
        value_normals[numbers] = (values[numbers] - loc_Y) / scale_Y
        same = max(_SAME_VALUE, ROUNDINGS * torch.finfo(read.features.dtype).eps)
        slack[numbers] = same * (1 + values[numbers].abs() + loc_Y.abs())
    index = (after.cumsum(0) - 1).tolist()
    written = written_numbers(model, observation.text, text.part(slice(first, None)))
    known = {index[place]: number for place, number in written.items()}
    return ObservedNoise(
        seed, temperature, places, exceptions, normals, len(tokens), values, value_normals, slack, known
    )


def written_numbers(model: GraftedModel, text: str, encoded: EncodedText) -> dict[int, ObservedNumber]:
    """The numbers of a text as they were written, by the index of their `<NUM>` in it."""
    places = (encoded.ids == model.config.num_token_id).nonzero().squeeze(-1).tolist()
    forms = model.processor(text, add_special_tokens=False).number_texts[0] if places else []
    return {at: ObservedNumber(form.value, form, encoded.digits_of(at)) for at, form in zip(places, forms, strict=True)}
