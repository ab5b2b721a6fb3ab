"""An individual: a point e1 of the unit cube that says who is speaking, whatever the context (theory 3.9)."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from causalqwen.distributions import INDIVIDUAL_STREAM, WHOLE_TEXT, uniform_draws
from causalqwen.files import writing


@dataclass(frozen=True)
class Observed:
    """What an individual was inferred from: tokens and values observed, nats that they gained, directions they determine.

    spread: the prior's standard deviation of Phi^-1(e1) that was taken. likelihood: the tokens'.
    """

    tokens: int
    values: int
    gained: float
    directions: float
    spread: float
    likelihood: str


@dataclass(frozen=True, eq=False)
class Individual:
    """One individual. In a context with loc_U, scale_U it is U = loc_U + scale_U Q(e1), coordinate by coordinate.

    Args:
        factor: e1, float64 [C], inside (0, 1).
        name: how it is called in listings; empty by default.
        precision: how well it is known, where it was inferred (`model.abduct`): Phi^-1(e1) ~ N(Phi^-1(factor),
            precision^-1), float64 [C, C]. evidence: and from what.
    """

    factor: Tensor
    name: str = ""
    precision: Tensor | None = None
    evidence: tuple[Observed, ...] = field(default=())

    def __post_init__(self) -> None:
        factor = torch.as_tensor(self.factor, dtype=torch.float64)
        if factor.dim() != 1:
            raise ValueError(f"an individual is one vector [C], got the shape {tuple(factor.shape)}")
        if not bool(((factor > 0) & (factor < 1)).all()):
            raise ValueError("an individual's coordinates must lie strictly between 0 and 1")
        object.__setattr__(self, "factor", factor)
        if self.precision is not None and self.precision.shape != (len(factor), len(factor)):
            raise ValueError(f"the precision of {len(factor)} coordinates has the shape {tuple(self.precision.shape)}")

    @classmethod
    def from_seed(cls, seed: int, causal_size: int, name: str = "") -> "Individual":
        """The individual that `individual="sequence", seed=seed` draws for its first returned sequence."""
        draws = uniform_draws(torch.tensor([seed]), INDIVIDUAL_STREAM, WHOLE_TEXT, causal_size)
        return cls(draws[0], name or f"seed {seed}")

    @classmethod
    def nobody(cls, causal_size: int) -> "Individual":
        """The centre of the cube, U = loc_U: what the context alone makes likeliest."""
        return cls(torch.full((causal_size,), 0.5, dtype=torch.float64), "nobody in particular")

    @property
    def normal(self) -> Tensor:
        """Phi^-1(e1), float64 [C]."""
        return torch.special.ndtri(self.factor)

    def draw(self, seed: int) -> "Individual":
        """One of the individuals that it may be: a draw of the posterior's Gaussian. ValueError where none was inferred."""
        if self.precision is None:
            raise ValueError(
                f"{self.name or 'this individual'} is known exactly: it was not inferred from observations"
            )
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(len(self.factor), 1, generator=generator, dtype=torch.float64)
        upper = torch.linalg.cholesky(self.precision).mT
        away = torch.linalg.solve_triangular(upper, normal, upper=True).squeeze(-1)
        return Individual(torch.special.ndtr(self.normal + away), f"{self.name or 'unnamed'}, draw {seed}")

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file; it appears under its name only when it is complete."""
        header = {"kind": "individual", "name": self.name, "evidence": [vars(e) for e in self.evidence]}
        tensors = {"factor": self.factor.contiguous()}
        if self.precision is not None:
            tensors["precision"] = self.precision.contiguous()
        with writing(Path(path)) as part:
            save_file(tensors, part, metadata={"causalqwen": json.dumps(header)})

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Individual":
        """Read what `save` wrote; ValueError names a file that holds no individual."""
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("causalqwen", "{}"))
                if header.get("kind") != "individual":
                    raise ValueError(f"{path} holds no individual")
                precision = file.get_tensor("precision") if "precision" in file.keys() else None  # noqa: SIM118
                evidence = tuple(Observed(**e) for e in header.get("evidence", []))
                return cls(file.get_tensor("factor"), header.get("name", ""), precision, evidence)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error

    def __str__(self) -> str:
        head = f"Individual({self.name or 'unnamed'}, {len(self.factor)} coordinates"
        if not self.evidence:
            return head + ")"
        tokens, values = sum(e.tokens for e in self.evidence), sum(e.values for e in self.evidence)
        seen = [f"{tokens:,} tokens"] * bool(tokens) + [f"{values:,} values"] * bool(values)
        gained, last = sum(e.gained for e in self.evidence), self.evidence[-1]
        return (
            f"{head}, inferred from {' and '.join(seen)}: {gained:.1f} nats gained on them "
            f"({gained / max(tokens + values, 1):.3f} each), {last.directions:.0f} directions determined)"
        )
