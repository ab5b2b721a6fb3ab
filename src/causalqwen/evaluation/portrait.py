"""A page about one individual: where they lie among others, what told so, and what they favour (theory 3.12)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from causalqwen.decoding import Individual
from causalqwen.distributions import upcast
from causalqwen.evaluation import pictures
from causalqwen.evaluation.report import write_page
from causalqwen.evaluation.worlds import LEVEL
from causalqwen.individuals import TokenEvidence, read_factor
from causalqwen.modeling import CausalQwenForCausalLM, NumberPrediction
from causalqwen.modeling.reading import EncodedText

_CONTEXT = 512
_SHOWN = {"tokens": 600, "coordinates": 20, "favoured": 12, "values": 12}


@dataclass(frozen=True)
class Said:
    """A token of an observed text: what it says about the individual, log p(token | g) - log p(token | nobody), in nats.

    gain: None where nothing comes before it. At a number: value, and its law for an individual who knows values, and nobody's.
    """

    text: str
    gain: float | None
    value: float = 0.0
    own: NumberPrediction | None = None
    nobodys: NumberPrediction | None = None


@torch.no_grad()
def what_told(
    model: CausalQwenForCausalLM, texts: Sequence[str], individual: Individual, shown: int = _SHOWN["tokens"]
) -> tuple[list[list[Said]], TokenEvidence]:
    """The first `shown` tokens of the texts, each with what it said, and the evidence of the words among them."""
    limit = min(_CONTEXT, model.config.context_length or _CONTEXT)
    read_texts: list[EncodedText] = []
    contexts = []
    left = shown
    for text in texts:
        whole = model.encode_text(text)
        while left < len(whole.ids) and whole.digits[left]:  # a number is not cut
            left += 1
        encoded = whole.part(slice(left))
        left -= len(encoded.ids)
        read_texts.append(encoded)
        parts = [encoded.part(slice(start, start + limit)) for start in range(0, len(encoded.ids), limit)]
        contexts += [(part, 1) for part in parts if len(part.ids) > 1]
    read = model.read(contexts)
    heard = individual.evidence[-1].likelihood if individual.evidence else "softmax"
    tokens = model.token_evidence(read, "ovr" if heard == "ovr" else "softmax")
    numbers = model.value_evidence(read)
    g, centre = individual.normal.to(model.device), torch.zeros_like(individual.normal, device=model.device)
    is_number = (read.targets == model.config.num_token_id) & model.reads_numbers
    gains = torch.zeros(len(read.targets), dtype=torch.float64, device=model.device)
    gains[~is_number] = tokens.each(g) - tokens.each(centre)
    gains[is_number] = numbers.each(g) - numbers.each(centre)
    at_numbers = read.features[is_number]
    laws: Iterator[tuple[NumberPrediction, NumberPrediction]] = iter(())
    if individual.knows_values:
        laws = zip(model.predict_values(at_numbers, individual), model.predict_values(at_numbers), strict=True)
    scored = iter(zip(gains.tolist(), is_number.tolist(), strict=True))
    said: list[list[Said]] = []
    for encoded in read_texts:
        said.append([])
        carried = 0.0  # by tokens within a character
        pieces = token_texts(model, encoded)
        for place, (text, value, is_digit) in enumerate(
            zip(pieces, encoded.values.tolist(), encoded.digits.tolist(), strict=True)
        ):
            if is_digit:  # part of its number
                continue
            if place % limit == 0:  # nothing before it was read
                said[-1].append(Said(text, None))
                continue
            gain, number = next(scored)
            gain, carried = (gain + carried, 0.0) if text else (0.0, gain + carried)
            said[-1].append(Said(text, gain, value, *next(laws, ())) if number else Said(text, gain))
    return said, tokens


def token_texts(model: CausalQwenForCausalLM, text: EncodedText) -> list[str]:
    """What each token adds to the text, [L]; one that ends within a character adds nothing, the one that completes it all.

    Of a `<NUM>` and the digits behind it, the first adds the number, the others nothing.
    """
    numbers = (text.ids == model.config.num_token_id) & text.digits.any()
    texts, told, owner = [""] * len(text.ids), "", 0
    for place in range(len(text.ids)):
        owner = owner if text.digits[place] else place
        read = text.part(slice(place + 1)).part(~numbers[: place + 1])
        decoded = model.processor.decode(read.ids, numeric_values=read.values)
        if not decoded.endswith("\ufffd") or place == len(text.ids) - 1:
            texts[owner] += decoded[len(told) :]
            told = decoded
    return texts


@dataclass(frozen=True)
class Favoured:
    """A token of the vocabulary: its probability for nobody in particular, and for the individual."""

    text: str
    nobodys: float
    own: float


@torch.no_grad()
def favoured_tokens(
    model: CausalQwenForCausalLM, evidence: TokenEvidence, individual: Individual, count: int = _SHOWN["favoured"]
) -> tuple[list[Favoured], list[Favoured]]:
    """The tokens whose probability an individual raises, and lowers, most, at a typical position of what was observed.

    There, p_k is the mean of nobody's softmax over the positions, and the individual adds W_k . (r * q(g)) to each score, r
    the root mean square of reach over the positions.
    """
    weight, mask = upcast(evidence.weight), evidence.mask
    p = weight.new_zeros(len(weight), dtype=torch.float64)
    for loc in evidence.loc.split(evidence.positions_at_once):
        scores = F.linear(loc, weight, evidence.bias).masked_fill(~mask, -torch.inf)
        p += scores.softmax(-1).sum(0, dtype=torch.float64) / len(evidence)
    q = read_factor(evidence.reader, individual.normal.to(p.device))[0]
    added = weight.double() @ (evidence.reach.double().square().mean(0).sqrt() * q)
    own = p * (added - added[mask].max()).exp()
    own = own / own.sum()
    order = (own - p).argsort().tolist()

    def tell(token: int) -> Favoured:
        return Favoured(model.processor.tokenizer.decode([token]), p[token].item(), own[token].item())

    return [tell(token) for token in order[: -count - 1 : -1]], [tell(token) for token in order[:count]]


def covariance_of(individual: Individual) -> Tensor:
    """Of the posterior of Phi^-1(e1), float64 [C, C]; 0 where the individual is known exactly."""
    if individual.precision is not None:
        return torch.cholesky_inverse(torch.linalg.cholesky(individual.precision))
    if individual.draws is not None:
        return torch.cov(individual.draws.double().T)
    return torch.zeros(len(individual.factor), len(individual.factor), dtype=torch.float64)


def telling_plane(means: Tensor, covariance: Tensor) -> tuple[Tensor, float]:
    """The two directions [C, 2] in which points [n, C] and nobody (0) differ most beside a covariance [C, C].

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


def _moved_values(said: Sequence[Sequence[Said]]) -> list[dict[str, Any]]:
    """The values of texts, those first that moved furthest beside their noise, with what stands before them."""
    rows = []
    for text in said:
        for place, piece in enumerate(text):
            if piece.own is not None and piece.nobodys is not None:
                before = "".join(earlier.text for earlier in text[max(place - 12, 0) : place])
                moved = abs(piece.own.loc - piece.nobodys.loc) / piece.own.scale
                rows.append({"piece": piece, "before": before, "interval": piece.own.interval(LEVEL), "moved": moved})
    return sorted(rows, key=lambda row: -row["moved"])


def write_portrait(
    path: Path,
    model: CausalQwenForCausalLM,
    individual: Individual,
    texts: Sequence[str],
    beside: Sequence[tuple[str, Individual]] = (),
) -> None:
    """The page of an individual abducted from texts, among others; it appears by rename.

    Raises ValueError for somebody of another size, by name.
    """
    size = len(individual.factor)
    for name, other in beside:
        if len(other.factor) != size:
            raise ValueError(f"{name} has {len(other.factor)} coordinates, and cannot stand beside one of {size}")
    name = individual.name or "this individual"
    people = [(name, individual), *beside]
    covariances = torch.stack([covariance_of(who) for _, who in people])
    means = torch.stack([who.normal for _, who in people])
    inferred = [who.is_inferred for _, who in people]
    typical = covariances[torch.tensor(inferred)].mean(0) if any(inferred) else covariances[0]
    plane, share = telling_plane(means, typical)
    widths = covariances[0].diagonal().sqrt()
    order = (means[0].abs() / widths.clamp(min=1e-12)).argsort(descending=True)[: _SHOWN["coordinates"]]
    said, evidence = what_told(model, texts, individual)
    pieces = [piece for text in said for piece in text]
    gains = [abs(piece.gain) for piece in pieces if piece.gain is not None]
    top = float(np.quantile(gains, 0.98)) or 1.0
    favoured = favoured_tokens(model, evidence, individual) if len(evidence) else ([], [])
    numbers = _moved_values(said)
    write_page(
        path, "portrait.html", title=name[:1].upper() + name[1:], width="58rem", about=str(individual),
        map=pictures.map_of_individuals(
            [name for name, _ in people], (means @ plane).numpy(), (plane.T @ covariances @ plane).numpy(), share, any(inferred)
        ),
        coordinates=pictures.coordinates(order.tolist(), means[0][order].numpy(), widths[order].numpy()),
        apart=int((means[0].abs() > 1.645 * widths).sum()), size=size, said=said, top=top, shown=len(pieces),
        total=sum(int((~model.encode_text(text).digits).sum()) for text in texts),
        gained=sum(piece.gain or 0.0 for piece in pieces),
        favoured=favoured, numbers=numbers[: _SHOWN["values"]], of_numbers=len(numbers),
    )  # fmt: skip
