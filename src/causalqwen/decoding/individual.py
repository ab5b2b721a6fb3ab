"""An individual: a point e1 of the unit cube that says who is speaking, whatever the context (theory 3.9)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from causalqwen.distributions import INDIVIDUAL_STREAM, WHOLE_TEXT, check_seed, uniform_draws
from causalqwen.files import load_tensors, save_tensors


@dataclass(frozen=True)
class Observed:
    """What an individual was inferred from.

    tokens, values, choices: how many were observed. gained: by how many nats they are likelier from this individual than from
    the prior's mean. directions: how many directions of e1 they determine. spread: the standard deviation of Phi^-1(e1) of the
    prior. likelihood, method: as `model.abduct` was asked.
    """

    tokens: int
    values: int
    gained: float
    directions: float
    spread: float
    likelihood: str
    method: str = "mode"
    choices: int = 0


@dataclass(frozen=True, eq=False)
class Individual:
    """One individual. In a context with loc_U, scale_U it is U = loc_U + scale_U Q(e1), coordinate by coordinate.

    Args:
        factor: e1, float64 [C], inside (0, 1).
        precision: how well it is known, where it was inferred (`model.abduct`): Phi^-1(e1) ~ N(Phi^-1(factor),
            precision^-1), float64 [C, C].
        evidence: what it was inferred from.
        draws: the posterior as equally likely Phi^-1(e1), float64 [m, C], where it was integrated or sampled.
        line: what observed values say, for an integral on a line, float64 [3, n]: their residuals, sizes and noise scales
            (`line_posterior`). Further values then count as if all had been observed at once.
        voice: what is added after each layer of the backbone wherever this one speaks, float32 [L, H] (theory 3.17); None
            for nothing. `Voices` infers it, and it belongs to the backbone that they were learned with.
    """

    factor: Tensor
    name: str = ""
    precision: Tensor | None = None
    evidence: tuple[Observed, ...] = field(default=())
    draws: Tensor | None = None
    line: Tensor | None = None
    voice: Tensor | None = None

    def __post_init__(self) -> None:
        factor = torch.as_tensor(self.factor, dtype=torch.float64)
        if factor.dim() != 1:
            raise ValueError(f"an individual is one vector [C], got the shape {tuple(factor.shape)}")
        if not bool(((factor > 0) & (factor < 1)).all()):
            raise ValueError("an individual's coordinates must lie strictly between 0 and 1")
        object.__setattr__(self, "factor", factor)
        if self.precision is not None and self.precision.shape != (len(factor), len(factor)):
            raise ValueError(f"the precision of {len(factor)} coordinates has the shape {tuple(self.precision.shape)}")
        if self.draws is not None and (self.draws.dim() != 2 or self.draws.shape[1] != len(factor)):
            raise ValueError(f"draws of {len(factor)} coordinates have the shape {tuple(self.draws.shape)}")
        if self.line is not None and (self.line.dim() != 2 or self.line.shape[0] != 3):
            raise ValueError(f"evidence of values on a line has the shape {tuple(self.line.shape)}, expected (3, n)")
        if self.voice is not None:
            voice = self.voice.detach().float()
            if voice.dim() != 2 or not voice.numel() or not bool(voice.isfinite().all()):
                raise ValueError(f"a voice is one finite vector for each layer [L, H], got {tuple(voice.shape)}")
            object.__setattr__(self, "voice", voice)

    def check_size(self, causal_size: int) -> None:
        """ValueError unless this is an individual of models of that causal size."""
        if len(self.factor) != causal_size:
            raise ValueError(
                f"{self} does not fit a model whose causal size is {causal_size}; "
                "an individual belongs to models of its own size"
            )

    @classmethod
    def from_seed(cls, seed: int, causal_size: int, name: str = "") -> "Individual":
        """The individual that `individual="sequence", seed=seed` draws for its first returned sequence."""
        draws = uniform_draws(torch.tensor([check_seed(seed)]), INDIVIDUAL_STREAM, WHOLE_TEXT, causal_size)
        return cls(draws[0], name or f"seed {seed}")

    @classmethod
    def from_normal(cls, normal: Tensor, name: str = "", **known: Any) -> "Individual":
        """The individual at Phi^-1(e1) = `normal`, float64 [C]. Beyond 7.9 float64 cannot tell e1 from the cube's border."""
        factor = torch.special.ndtr(normal.detach().cpu().double())
        return cls(factor.clamp(1e-15, 1 - 1e-15), name, **known)

    @classmethod
    def nobody(cls, causal_size: int) -> "Individual":
        """The centre of the cube, U = loc_U: what the context alone makes likeliest."""
        return cls(torch.full((causal_size,), 0.5, dtype=torch.float64), "the population average")

    @property
    def normal(self) -> Tensor:
        """Phi^-1(e1), float64 [C]."""
        return torch.special.ndtri(self.factor)

    @property
    def is_inferred(self) -> bool:
        """Whether it was inferred from observations, and is known up to a width."""
        return self.precision is not None or self.draws is not None

    @property
    def knows_values(self) -> bool:
        """Whether its numbers follow from it: it is known exactly, or was inferred from numbers alone (theory 3.14)."""
        if self.voice is not None:
            return False
        return not self.is_inferred or {seen.likelihood for seen in self.evidence} == {"values"}

    def likely(self, count: int, seed: int = 0) -> Tensor:
        """Phi^-1(e1) of the individuals that this may be, float64 [m, C]: the draws that are kept, or `count` draws of the
        posterior's Gaussian. ValueError where it was not inferred."""
        if self.draws is not None:
            return self.draws.double()
        if self.precision is None:
            raise ValueError(
                f"{self.name or 'this individual'} is known exactly: it was not inferred from observations"
            )
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(len(self.factor), count, generator=generator, dtype=torch.float64)
        upper = torch.linalg.cholesky(self.precision).mT
        return self.normal + torch.linalg.solve_triangular(upper, normal, upper=True).T

    def draw(self, seed: int) -> "Individual":
        """One of the individuals that it may be. ValueError where none was inferred."""
        likely = self.likely(1, seed)
        place = int(torch.randint(len(likely), (), generator=torch.Generator().manual_seed(seed)))
        return Individual.from_normal(likely[place], f"{self.name or 'unnamed'}, draw {seed}", voice=self.voice)

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file; it appears under its name only when it is complete."""
        known = {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}
        about = {"name": self.name, "evidence": [vars(e) for e in self.evidence]}
        save_tensors(path, "individual", about, known)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Individual":
        """Read what `save` wrote; ValueError names a file that holds no individual."""
        about, tensors = load_tensors(path, "individual")
        try:
            evidence = tuple(Observed(**each) for each in about.get("evidence", []))
            return cls(name=about.get("name", ""), evidence=evidence, **tensors)
        except (TypeError, ValueError) as error:  # of a later version
            raise ValueError(f"{path} holds no individual that can be read here: {error}") from None

    def __str__(self) -> str:
        head = f"Individual({self.name or 'unnamed'}, {len(self.factor)} coordinates"
        if self.voice is not None:
            head += ", heard at every depth"
        if not self.evidence:
            return head + ")"
        tokens, values = sum(e.tokens for e in self.evidence), sum(e.values for e in self.evidence)
        choices = sum(e.choices for e in self.evidence)
        counts = {"tokens": tokens, "values": values, "choices": choices}
        seen = [f"{count:,} {kind}" for kind, count in counts.items() if count]
        gained, last = sum(e.gained for e in self.evidence), self.evidence[-1]
        text = (
            f"{head}, inferred from {' and '.join(seen)}: {gained:.1f} nats gained on them "
            f"({gained / max(tokens + values + choices, 1):.3f} each), {last.directions:.0f} directions determined"
        )
        if last.directions < 0.5:
            text += ": hardly apart from the population average"
        if not self.knows_values:
            text += "; between words and numbers nothing was learned, so their numbers are the population average's"
        return text + ")"


def voices_of(people: Sequence[Individual]) -> Tensor | None:
    """The voice of each [n, L, H], 0 for one who has none; None where none has one. ValueError for different backbones."""
    spoken = [person.voice for person in people if person.voice is not None]
    if any(voice.shape != spoken[0].shape for voice in spoken):
        raise ValueError("the individuals have voices of different backbones")
    silent = torch.zeros_like(spoken[0]) if spoken else None
    return torch.stack([silent if person.voice is None else person.voice for person in people]) if spoken else None
