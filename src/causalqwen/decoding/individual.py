"""An individual: a point e1 of the unit cube that says who is speaking, whatever the context (theory 3.9)."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from causalqwen.distributions import INDIVIDUAL_STREAM, WHOLE_TEXT, uniform_draws


@dataclass(frozen=True, eq=False)
class Individual:
    """One individual. In a context with loc_U, scale_U it is U = loc_U + scale_U Q(e1), coordinate by coordinate.

    Args:
        factor: e1, float64 [C], inside (0, 1).
        name: how it is called in listings; empty by default.
    """

    factor: Tensor
    name: str = ""

    def __post_init__(self) -> None:
        factor = torch.as_tensor(self.factor, dtype=torch.float64)
        if factor.dim() != 1:
            raise ValueError(f"an individual is one vector [C], got the shape {tuple(factor.shape)}")
        if not bool(((factor > 0) & (factor < 1)).all()):
            raise ValueError("an individual's coordinates must lie strictly between 0 and 1")
        object.__setattr__(self, "factor", factor)

    @classmethod
    def from_seed(cls, seed: int, causal_size: int, name: str = "") -> "Individual":
        """The individual that `individual="sequence", seed=seed` draws for its first returned sequence."""
        draws = uniform_draws(torch.tensor([seed]), INDIVIDUAL_STREAM, WHOLE_TEXT, causal_size)
        return cls(draws[0], name or f"seed {seed}")

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file; it appears under its name only when it is complete."""
        path = Path(path)
        part = path.with_name(path.name + ".part")
        metadata = {"causalqwen": json.dumps({"kind": "individual", "name": self.name})}
        save_file({"factor": self.factor.contiguous()}, part, metadata=metadata)
        part.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Individual":
        """Read what `save` wrote; ValueError names a file that holds no individual."""
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("causalqwen", "{}"))
                if header.get("kind") != "individual":
                    raise ValueError(f"{path} holds no individual")
                return cls(file.get_tensor("factor"), header.get("name", ""))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error

    def __str__(self) -> str:
        return f"Individual({self.name or 'unnamed'}, {len(self.factor)} coordinates)"
