"""Arithmetic of individuals, in normal scores g = Phi^-1(e1), which are N(0, I) over people (theory 3.16).

Voices (theory 3.17) are added as they are: whoever has none, as the population average, counts as 0 beside one who has.

What is not known of people who were inferred is kept as draws around the result: of a mixture or a mean as much as of those
who enter it, on average. Different people are taken to be independent of each other.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from causalqwen.decoding.individual import Individual, voices_of
from causalqwen.decoding.population import Population

_DRAWS = 200


def mix(individual: Individual, other: Individual, share: float = 0.5) -> Individual:
    """Somebody in between, `share` of the way from `individual` to `other`.

        g = ((1 - t) g1 + t g2) / ((1 - t)^2 + t^2 + 2 t (1 - t) max(r, 0))^(1/2),   r the cosine of g1 and g2

    Without the root a mixture of two strangers would be nearer to the population average than people are. ValueError for a
    share outside [0, 1] (beyond an end lies `move`), or sizes that differ.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"a share lies between 0 and 1, got {share}; beyond one of the two lies `move`")
    left, right, parts = *_normals([individual, other]), [(individual, 1 - share), (other, share)]
    lengths = (left.norm() * right.norm()).item()
    cosine = max((left @ right).item() / lengths, 0.0) if lengths > 0 else 0.0
    size = math.sqrt((1 - share) ** 2 + share**2 + 2 * share * (1 - share) * cosine)
    name = f"{1 - share:.0%} {_called(individual)}, {share:.0%} {_called(other)}"
    return _speaking(_made(torch.lerp(left, right, share) / size, parts, name), parts)


def move(individual: Individual, start: Individual, end: Individual, amount: float = 1.0) -> Individual:
    """`individual`, with its width, moved along the difference of two others, g + amount (g_end - g_start), as they are
    likeliest. ValueError for sizes that differ."""
    g, first, last = _normals([individual, start, end])
    name = f"{_called(individual)} {amount:+g} of the way from {_called(start)} to {_called(end)}"
    made = _made(g + amount * (last - first), [(individual, 1.0), (start, 0.0), (end, 0.0)], name)
    return _speaking(made, [(individual, 1.0), (end, amount), (start, -amount)])


def mean(people: Sequence[Individual] | Population) -> Individual:
    """What several have in common, the mean of g; of n strangers 1/n^(1/2) as far from the population average as each of them
    is. ValueError for no individual, or sizes that differ."""
    several = [people[name] for name in people.names] if isinstance(people, Population) else list(people)
    if not several:
        raise ValueError("a mean needs one individual at least")
    parts = [(individual, 1 / len(several)) for individual in several]
    return _speaking(_made(torch.stack(_normals(several)).mean(0), parts, f"the mean of {len(several)}"), parts)


def nearest(
    individual: Individual, people: Mapping[str, Individual] | Population, count: int = 1
) -> list[tuple[str, float]]:
    """Names of those who are most like `individual`, with how far away each is, nearest first.

    The distance is |g - g'| / (2 C)^(1/2), C the coordinates: two strangers drawn from the law are 1 apart on average. Who was
    inferred from little lies near the average: compare people of whom equally much is known. Between two who have voices it is
    |v - v'| / (|v|^2 + |v'|^2)^(1/2), the voice being what is known of them. ValueError where some have one and others none.
    """
    names = list(people.names) if isinstance(people, Population) else list(people)
    if not names:
        raise ValueError("no individual to compare with")
    met = [people[name] for name in names]
    if individual.voice is None and all(other.voice is None for other in met):
        g, *others = _normals([individual, *met])
        far = (torch.stack(others) - g).norm(dim=-1) / math.sqrt(2 * len(g))
    else:
        far = torch.tensor([_apart(individual, other) for other in met])
    places = far.argsort(stable=True)[:count].tolist()
    return [(names[place], far[place].item()) for place in places]


def _apart(individual: Individual, other: Individual) -> float:
    if individual.voice is None or other.voice is None:
        silent, voiced = (individual, other) if individual.voice is None else (other, individual)
        raise ValueError(
            f"{_called(silent)} has no voice and {_called(voiced)} has one, which cannot be compared: infer both from their "
            "words with the same voices (`causalqwen abduct --prior voices.safetensors`), or both without"
        )
    sizes = individual.voice.square().sum() + other.voice.square().sum()
    return float((individual.voice - other.voice).norm() / sizes.sqrt().clamp(min=1e-12))


def _speaking(made: Individual, parts: Sequence[tuple[Individual, float]]) -> Individual:
    """With the sum of share_i voice_i, where anybody has a voice."""
    parts = [(person, share) for person, share in parts if person.voice is not None and share != 0]
    voices_of([person for person, _ in parts])  # of one backbone
    voice: Any = sum(share * person.voice for person, share in parts)
    return replace(made, voice=voice) if parts and bool(voice.any()) else made


def _called(individual: Individual) -> str:
    return individual.name or "unnamed"


def _normals(people: Sequence[Individual]) -> list[Tensor]:
    for person in people[1:]:
        person.check_size(len(people[0].factor))
    return [person.normal for person in people]


def _made(normal: Tensor, parts: Sequence[tuple[Individual, float]], name: str) -> Individual:
    """The one at `normal`, with what is not known of those who enter it: sum of share_i^(1/2) (draw of i - g_i)."""
    shares: dict[Individual, float] = {}  # of each once: no individual is independent of itself
    for person, share in parts:
        shares[person] = shares.get(person, 0.0) + share
    evidence = tuple(dict.fromkeys(seen for person in shares for seen in person.evidence))
    if not any(person.is_inferred for person in shares):
        return Individual.from_normal(normal, name, evidence=evidence)
    draws = normal.expand(_DRAWS, -1).clone()
    for place, (person, share) in enumerate(shares.items()):
        if person.is_inferred and share > 0:
            likely, generator = person.likely(_DRAWS), torch.Generator().manual_seed(place)
            order = torch.randperm(_DRAWS, generator=generator)  # draws along a line come in its order
            places = torch.linspace(0, len(likely) - 1, _DRAWS, dtype=torch.float64).round().long()[order]
            draws += math.sqrt(share) * (likely[places] - person.normal)
    return Individual.from_normal(normal, name, evidence=evidence, draws=draws)
