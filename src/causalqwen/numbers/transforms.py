"""Monotone maps between values in the data's units and the axis on which the value head is linear (theory 3.8).

    x = t(v) = (s(v) - center) / width,   s(v) = v ("identity", "affine") or sign(v) ln(1 + |v|) ("symlog")

Quantiles go through t exactly, so medians and intervals are exact; densities carry the Jacobian t'(v).
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

_KINDS = ("identity", "affine", "symlog")
_LARGEST_LOG = 709.0  # exp of more leaves float64


def symlog(values: Tensor) -> Tensor:
    """sign(v) ln(1 + |v|): odd, increasing, the identity near 0, logarithmic far away (theory 3.1)."""
    return torch.sign(values) * torch.log1p(values.abs())


@dataclass(frozen=True)
class ValueTransform:
    """t of the module's docstring. `identity` is the specification; `fit` sets center and width from training values."""

    kind: str = "identity"
    center: float = 0.0
    width: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"unknown value transform {self.kind!r}; use one of {', '.join(_KINDS)}")
        if not self.width > 0:
            raise ValueError(f"the width of a value transform must be positive, got {self.width}")
        if self.kind == "identity" and (self.center != 0.0 or self.width != 1.0):
            raise ValueError("the identity transform has center 0 and width 1; use kind='affine' for others")

    @classmethod
    def fit(cls, kind: str, values: Tensor) -> "ValueTransform":
        """Robust fit: center = median of s(v), width = half the interquartile range (a Cauchy's scale).

        Values that hardly vary fall back to their largest deviation, then to width 1. ValueError on an empty tensor or
        one that holds NaN or infinities.
        """
        if kind == "identity":
            return cls()
        if values.numel() == 0:
            raise ValueError("cannot fit a value transform: the training rows hold no number")
        if not bool(torch.isfinite(values).all()):
            raise ValueError("cannot fit a value transform to values that are not finite")
        axis = cls(kind)._shape(values.to(torch.float64)).flatten()
        low, center, high = torch.quantile(axis[:: 1 + len(axis) // 1_000_000], _QUARTILES).tolist()
        width = (high - low) / 2
        if width <= 0:
            width = float((axis - center).abs().max()) or 1.0
        return cls(kind, center, width)

    @property
    def is_affine(self) -> bool:
        """Whether t is a straight line: then a stable law stays one in the data's units."""
        return self.kind != "symlog"

    def _shape(self, values: Tensor) -> Tensor:
        return symlog(values) if self.kind == "symlog" else values

    def forward(self, values: Tensor) -> Tensor:
        """t(v), float64, elementwise."""
        return (self._shape(values.to(torch.float64)) - self.center) / self.width

    def inverse(self, axis: Tensor) -> Tensor:
        """t^-1(x), float64, elementwise, clamped to what float64 can hold."""
        axis = axis.to(torch.float64) * self.width + self.center
        if self.kind == "symlog":
            return torch.sign(axis) * torch.expm1(axis.abs().clamp(max=_LARGEST_LOG))
        return axis.clamp(-torch.finfo(torch.float64).max, torch.finfo(torch.float64).max)

    def log_jacobian(self, values: Tensor) -> Tensor:
        """log t'(v), float64: what a log density on the axis gains when it is stated in the data's units."""
        slope = -torch.log1p(values.to(torch.float64).abs()) if self.kind == "symlog" else torch.zeros_like(values)
        return slope.to(torch.float64) - torch.log(torch.tensor(self.width, dtype=torch.float64))

    def to_dict(self) -> dict:
        """Plain data for a configuration file."""
        return asdict(self)


_QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
