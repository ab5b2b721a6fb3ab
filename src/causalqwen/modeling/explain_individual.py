"""Where an individual lies among others, what shows it, and what they favour (theory 3.12)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from causalqwen.decoding import Individual
from causalqwen.distributions import upcast
from causalqwen.individuals.evidence import TokenEvidence, read_factor
from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.prediction import NumberPrediction, predict_values
from causalqwen.modeling.reading import CHUNK, EncodedText, encode_text, read_contexts, token_evidence, value_evidence
from causalqwen.modeling.voice_likelihood import WINDOW
from causalqwen.modeling.worlds import LEVEL


@dataclass(frozen=True)
class Said:
    """A token of an observed text. gain: what it says about the individual, log p(token | g) - log p(token | average), in nats;
    None where nothing comes before it. At a number: value, its law for an individual who knows values, and the average's."""

    text: str
    gain: float | None
    value: float = 0.0
    own: NumberPrediction | None = None
    nobodys: NumberPrediction | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """As plain data."""
        entry: dict[str, Any] = {"text": self.text, "gain": self.gain}
        if self.own is not None and self.nobodys is not None:
            entry |= {"value": self.value, "median": self.own.median, "interval": list(self.own.interval(LEVEL))}
            entry["nobodys_median"] = self.nobodys.median
        return entry


@torch.no_grad()
def what_told(
    model: GraftedModel, texts: Sequence[str], individual: Individual, shown: int = 600
) -> tuple[list[list[Said]], tuple[TokenEvidence, TokenEvidence]]:
    """The first `shown` tokens of the texts, each with what it shows; and the evidence of the words among them, for the
    population average and under the individual's voice."""
    chunk = CHUNK if individual.voice is None else WINDOW  # as when they were inferred
    limit = min(chunk, model.config.context_length or chunk)
    read_texts: list[EncodedText] = []
    contexts = []
    left = shown
    for text in texts:
        whole = encode_text(model, text)
        while left < len(whole.ids) and whole.digits[left]:  # a number is not cut
            left += 1
        encoded = whole.part(slice(left))
        left -= len(encoded.ids)
        read_texts.append(encoded)
        parts = [encoded.part(slice(start, start + limit)) for start in range(0, len(encoded.ids), limit)]
        contexts += [(part, 1) for part in parts if len(part.ids) > 1]
    read = read_contexts(model, contexts)
    kind = individual.evidence[-1].likelihood if individual.evidence else "softmax"
    likelihood = "ovr" if kind == "ovr" else "softmax"
    average = tokens = token_evidence(model, read, likelihood)
    if individual.voice is not None:
        tokens = token_evidence(model, read_contexts(model, contexts, individual.voice), likelihood)
    numbers = value_evidence(model, read)
    g, centre = individual.normal.to(model.device), torch.zeros_like(individual.normal, device=model.device)
    is_number = (read.targets == model.config.num_token_id) & model.reads_numbers
    gains = torch.zeros(len(read.targets), dtype=torch.float64, device=model.device)
    gains[~is_number] = tokens.each(g) - average.each(centre)
    gains[is_number] = numbers.each(g) - numbers.each(centre)
    at_numbers = read.features[is_number]
    laws: Iterator[tuple[NumberPrediction, NumberPrediction]] = iter(())
    if individual.knows_values:
        laws = zip(predict_values(model, at_numbers, individual), predict_values(model, at_numbers), strict=True)
    scored = iter(zip(gains.tolist(), is_number.tolist(), strict=True))
    by_text: list[list[Said]] = []
    for encoded in read_texts:
        by_text.append([])
        carried = 0.0  # by tokens within a character
        pieces = token_texts(model, encoded)
        for place, (text, value, is_digit) in enumerate(
            zip(pieces, encoded.values.tolist(), encoded.digits.tolist(), strict=True)
        ):
            if is_digit:  # part of its number
                continue
            if place % limit == 0:  # nothing before it was read
                by_text[-1].append(Said(text, None))
                continue
            gain, number = next(scored)
            gain, carried = (gain + carried, 0.0) if text else (0.0, gain + carried)
            by_text[-1].append(Said(text, gain, value, *next(laws, ())) if number else Said(text, gain))
    return by_text, (average, tokens)


def token_texts(model: GraftedModel, text: EncodedText) -> list[str]:
    """What each token adds to the text, [L]; one that ends within a character adds nothing, the one that completes it all. Of a
    `<NUM>` and the digits after it, the first adds the number, the others nothing."""
    numbers = (text.ids == model.config.num_token_id) & text.digits.any()
    texts, written, owner = [""] * len(text.ids), "", 0
    for place in range(len(text.ids)):
        owner = owner if text.digits[place] else place
        read = text.part(slice(place + 1)).part(~numbers[: place + 1])
        decoded = model.processor.decode(read.ids, numeric_values=read.values)
        if not decoded.endswith("\ufffd") or place == len(text.ids) - 1:
            texts[owner] += decoded[len(written) :]
            written = decoded
    return texts


@dataclass(frozen=True)
class Favoured:
    """A token of the vocabulary: its probability for the population average, and for the individual."""

    text: str
    nobodys: float
    own: float


@torch.no_grad()
def favoured_tokens(
    model: GraftedModel, evidence: tuple[TokenEvidence, TokenEvidence], individual: Individual, count: int = 12
) -> tuple[list[Favoured], list[Favoured]]:
    """The tokens whose probability an individual raises, and lowers, most, at a typical position of what was observed.

    There, p_k is the population average's mean softmax over the positions, and the individual adds W_k . (r * q(g)) to each
    score, r the root mean square of reach over the positions, to what their voice makes of them. evidence: of `what_told`.
    """
    average, spoken = evidence
    weight, mask = upcast(average.weight), average.mask
    p = _typical(average)
    typical = p if spoken is average else _typical(spoken)
    q = read_factor(spoken.law, individual.normal.to(p.device))[0]
    added = weight.double() @ (spoken.reach.double().square().mean(0).sqrt() * q)
    own = typical * (added - added[mask].max()).exp()
    own = own / own.sum()
    order = (own - p).argsort().tolist()

    def tell(token: int) -> Favoured:
        return Favoured(model.processor.tokenizer.decode([token]), p[token].item(), own[token].item())

    return [tell(token) for token in order[: -count - 1 : -1]], [tell(token) for token in order[:count]]


def _typical(evidence: TokenEvidence) -> Tensor:
    """The mean of the softmax over the positions, float64 [V]."""
    weight = upcast(evidence.weight)
    p = weight.new_zeros(len(weight), dtype=torch.float64)
    for loc in evidence.loc.split(evidence.positions_at_once):
        scores = F.linear(loc, weight, evidence.bias).masked_fill(~evidence.mask, -torch.inf)
        p += scores.softmax(-1).sum(0, dtype=torch.float64) / len(evidence)
    return p


def covariance_of(individual: Individual) -> Tensor:
    """The covariance of Phi^-1(e1), float64 [C, C]; 0 where the individual is known exactly."""
    if individual.precision is not None:
        return torch.cholesky_inverse(torch.linalg.cholesky(individual.precision))
    if individual.draws is not None:
        return torch.cov(individual.draws.double().T)
    return torch.zeros(len(individual.factor), len(individual.factor), dtype=torch.float64)


def telling_plane(means: Tensor, covariance: Tensor) -> tuple[Tensor, float]:
    """The two directions [C, 2] in which points [n, C] and the average (0) differ most beside a covariance [C, C].

    They maximize a^T B a / a^T S a, B the scatter of the points and 0 around their mean, S the covariance (I where that is 0),
    and have a^T S a = 1. Where B says nothing more, the one that is known best. Second: the share of tr(S^-1 B) they hold.
    """
    size = means.shape[1]
    identity = torch.eye(size, dtype=torch.float64)
    typical = covariance.diagonal().mean().item()
    spread = covariance + 1e-6 * typical * identity if typical > 0 else identity
    lower = torch.linalg.cholesky(spread)
    points = torch.cat([means, means.new_zeros(1, size)])
    points = torch.linalg.solve_triangular(lower, (points - points.mean(0)).T, upper=False)
    scatter = points @ points.T
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    known = inverse @ inverse.T  # v^T known v = |a|^2 where a = L^-T v has a^T S a = 1: long where little is left open
    undecided = 1e-6 * scatter.trace().clamp(min=1e-30) / known.trace()
    along = torch.linalg.eigh(scatter + undecided * known)[1][:, [-1, -2]]
    share = ((along.T @ scatter @ along).trace() / scatter.trace().clamp(min=1e-30)).item()
    directions = torch.linalg.solve_triangular(lower.T, along, upper=True)
    return directions * torch.where(means[0] @ directions < 0, -1.0, 1.0), share


@dataclass(frozen=True)
class Plane:
    """Individuals in the plane of `telling_plane`: points [n, 2], covariances [n, 2, 2] of what each may be, and its share.
    known: whether any has a width, which is then the unit."""

    points: Tensor
    covariances: Tensor
    share: float
    known: bool

    @property
    def plain(self) -> dict[str, Any]:
        """As plain data."""
        points = {name: getattr(self, name).tolist() for name in ("points", "covariances")}
        return points | {"share": self.share, "known": self.known}


def lie_among(people: Sequence[Individual]) -> Plane:
    """Where they lie beside each other and beside the population average, which is at the origin."""
    means = torch.stack([who.normal for who in people])
    inferred = [who for who in people if who.is_inferred]
    typical = sum((covariance_of(who) for who in inferred[1:]), covariance_of((inferred or people)[0]))
    plane, share = telling_plane(means, typical / max(len(inferred), 1))
    covariances = torch.stack([plane.T @ covariance_of(who) @ plane for who in people])  # C x C of one at a time
    return Plane(means @ plane, covariances, share, bool(inferred))
