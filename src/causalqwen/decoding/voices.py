"""Voices: where people who were observed differ at every depth of a backbone, learned from many of them (theory 3.17)."""

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from causalqwen.decoding.individual import Individual
from causalqwen.files import kind_of, load_tensors, save_tensors


@dataclass(frozen=True, eq=False)
class Voices:
    """How an individual's voice [L, H] follows from what they said, with L the layers of a backbone and H its hidden size.

        u = probes . (score - n expected) / (n + patience),   a = u / (1 + |u|^2 / reach^2)^(1/2),   voice = mean + a . loadings

    score: the gradient of the log-likelihood of n tokens by what is added after each layer, at `origin`. That is the posterior
    mean of a, where scores are linear in it and n tokens tell n / patience of what the prior tells, held within `reach`.

    Args:
        origin: [L, H], where gradients are taken: near the one voice that is best for all people.
        expected: [L, H], the mean gradient of a token there; 0 if it were exactly the best place.
        mean: [L, H], what people have in common.
        loadings, probes: [K, L, H], what each direction adds, and how it is inferred. patience: [K], in tokens, positive.
        reach: how far out a voice goes at most.
        people: how many they were learned from. gained: nats a token on people held out, by `mean` alone and by their voices.
    """

    origin: Tensor
    expected: Tensor
    mean: Tensor
    loadings: Tensor
    probes: Tensor
    patience: Tensor
    reach: float
    people: int = 0
    gained: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        size, layers = (len(self.loadings), *self.origin.shape), self.origin.shape
        shapes = tuple(getattr(self, name).shape for name in _TENSORS)
        if self.origin.dim() != 2 or shapes != (layers, layers, layers, size, size, size[:1]):
            raise ValueError(
                f"voices whose shapes do not fit: {[tuple(shape) for shape in shapes]}, expected [L, H] three times, [K, L, H]"
                " twice and [K]"
            )
        if not all(bool(getattr(self, name).isfinite().all()) for name in _TENSORS):
            raise ValueError("voices hold what is not finite")
        if not bool((self.patience > 0).all()) or not self.reach > 0:
            raise ValueError("patience and reach of voices are positive")
        object.__setattr__(self, "people", int(self.people))
        if self.gained is not None:
            alone, inferred = self.gained
            object.__setattr__(self, "gained", (float(alone), float(inferred)))

    def place(self, score: Tensor, tokens: int) -> Tensor:
        """a [K] of somebody whose n tokens have this score [L, H]."""
        beyond = score.to(self.probes) - tokens * self.expected
        u = self.probes.flatten(1) @ beyond.flatten() / (tokens + self.patience)
        return u / (1 + u.square().sum() / self.reach**2).sqrt()

    def heard(self, score: Tensor, tokens: int) -> Tensor:
        """Their voice [L, H]."""
        return self.mean + torch.einsum("k,klh->lh", self.place(score, tokens), self.loadings)

    def directions(self, tokens: int) -> float:
        """How many directions n tokens determine: sum of n / (n + patience)."""
        return (tokens / (tokens + self.patience)).sum().item()

    def to(self, device: torch.device) -> "Voices":
        """The same there, without gradients."""
        return replace(self, **{name: getattr(self, name).detach().to(device) for name in _TENSORS})

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file; it appears under its name only when it is complete."""
        about = {"reach": self.reach, "people": self.people, "gained": self.gained}
        save_tensors(path, "voices", about, {name: getattr(self, name).clone() for name in _TENSORS})

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Voices":
        """Read what `save` wrote; ValueError names a file that holds no voices."""
        about, tensors = load_tensors(path, "voices")
        try:
            given: dict[str, Any] = {**tensors, **about}
            return cls(**given)
        except (TypeError, ValueError) as error:  # of a later version
            raise ValueError(f"{path} holds no voices that can be read here: {error}") from None

    def __str__(self) -> str:
        layers, size = self.origin.shape
        text = f"{len(self.loadings)} directions at {layers} depths of {size}, learned from {self.people:,} people"
        if self.gained is not None:
            worth = "; to people held out worth {1:+.3f} nats a token, {0:+.3f} of them without knowing who speaks"
            text += worth.format(*self.gained)
        return f"Voices({text})"


def load_prior(path: str | os.PathLike) -> Individual | Voices:
    """What somebody can be inferred from: an individual, or voices. ValueError names a file that holds neither."""
    return Voices.load(path) if kind_of(path) == "voices" else Individual.load(path)


_TENSORS = ("origin", "expected", "mean", "loadings", "probes", "patience")


def check_voice(voice: Tensor, layers: int, size: int) -> None:
    """ValueError unless a voice belongs to a backbone with so many layers of that size."""
    if tuple(voice.shape[-2:]) != (layers, size):
        raise ValueError(
            f"a voice for {voice.shape[-2]} layers of {voice.shape[-1]} does not fit a backbone that has {layers} of {size}: "
            "a voice belongs to the backbone that it was inferred with"
        )
