"""The value read from the whole backbone: ridge in the space of a kernel over blocks of features (theory 3.8)."""

from typing import Any

import torch
from torch import Tensor, nn

from causalqwen.distributions import StableFamily, upcast

_NOISE = 0.05
"""The share of the scale that is noise: from texts that name no individual a value cannot tell who speaks from noise."""


class KernelReader(nn.Module):
    """(loc, log scale) = b + sum_i a_i k(x, x_i) on the value axis, as the law of U that the value head reads.

        k(x, x_i) = sum_b s_b (exp(-w_b d_b) - 1) + sum_b l_b <x_b, x_ib> + s (exp(-sum_b a_b d_b) - 1)
        loc_U = (loc - b_reg) W_reg / |W_reg|^2,   scale_U = scale / |W_reg|_a

    d_b = |x_b - x_ib|^2, of block b of r, standardised. W_reg U + b_reg has this loc and scale. r [R] stands after z in the
    features [..., H + R] (`read_backbone`).

    Args:
        hidden_size: H. causal_size: C. blocks: the widths of r's blocks, together R. rows: how many x_i are kept, of those
            with a share. shape: s_b "alone", w_b "narrow", l_b "linear" and a_b "along" as lists, and s "together".
    """

    mean: Tensor
    inverse: Tensor
    support: Tensor
    weights: Tensor
    bias: Tensor
    bounds: Tensor
    along: Tensor
    shift: Tensor
    unit: Tensor

    IN_FLOAT32 = ("mean", "inverse", "weights", "bias", "bounds", "along", "shift", "unit")

    def __init__(self, hidden_size: int, causal_size: int, blocks: list[int], rows: int, shape: dict[str, Any]) -> None:
        super().__init__()
        self.hidden_size, self.blocks, self.rows, width = hidden_size, blocks, rows, sum(blocks)
        self.parts = list(zip(*(shape[name] for name in ("alone", "narrow", "linear", "along")), strict=True))
        self.used, self.together = [any((alone, *of)) for alone, _, *of in self.parts], shape["together"]
        kept = sum(block for block, used in zip(blocks, self.used, strict=True) if used)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("inverse", torch.zeros(width))  # 1 / spread; 0 for what never varied
        self.register_buffer("support", torch.zeros(rows, kept, dtype=torch.int16))  # float16, which no loader casts
        self.register_buffer("weights", torch.zeros(2, rows))
        self.register_buffer("bias", torch.zeros(2))
        self.register_buffer("bounds", torch.tensor([[-torch.inf] * 2, [torch.inf] * 2]))  # of loc and log scale
        self.register_buffer("along", torch.zeros(causal_size))
        self.register_buffer("shift", torch.zeros(1))
        self.register_buffer("unit", torch.ones(1))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move everything, and cast nothing: `told` computes in the dtype of what it reads."""

        def moved(tensor: Tensor) -> Tensor:
            made: Tensor = fn(tensor)
            return made if made.dtype == tensor.dtype else tensor.to(made.device)

        return super()._apply(moved, recurse)

    def kernels(self, x: Tensor, support: Tensor) -> Tensor:
        """k [..., n] of standardised rows x [..., R] with others [n, those of R in blocks that have a share]."""
        of_blocks = zip(self.parts, self.used, x.split(self.blocks, -1), strict=True)
        looked_at = [(*of, part) for of, used, part in of_blocks if used]
        others = support.split([part.shape[-1] for *_, part in looked_at], -1)
        made = apart = x.new_zeros(*x.shape[:-1], len(support))
        for (alone, narrow, linear, along, part), other in zip(looked_at, others, strict=True):
            products = part @ other.T
            squares = part.square().sum(-1, keepdim=True) + other.square().sum(-1)
            distances = (squares - 2 * products).clamp(min=0)
            # What is near 1 in all blocks would drown in rounding beside it.
            made = made + alone * (-narrow * distances).expm1() + linear * products
            apart = apart + along * distances
        return made + self.together * (-apart).expm1()

    def read(self, features: Tensor) -> Tensor:
        """loc and log scale [..., 2] on the value axis, float32, of features [..., H + R]."""
        if features.shape[-1] != self.hidden_size + len(self.mean):
            raise ValueError("this model reads numbers from the whole backbone, and was given its last layer alone")
        return self.told(features[..., self.hidden_size :])

    def told(self, r: Tensor) -> Tensor:
        """loc and log scale [..., 2] on the value axis, of r [..., R], in its dtype, float32 at least."""
        r = upcast(r)
        x = (r - self.mean.to(r)) * self.inverse.to(r)
        made = self.kernels(x, self.support.view(torch.float16).to(r))
        made = (made.double() @ self.weights.double().T + self.bias).to(r)
        low, high = self.bounds.to(r)
        return torch.minimum(torch.maximum(made, low), high)

    def forward(self, features: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """z and r [..., H + R] -> the law of U that the value head reads, float32; loc_U and scale_U [..., C] are not read."""
        loc, log_scale = self.read(features).unsqueeze(-2).unbind(-1)
        return (loc - self.shift) * self.along, (log_scale.exp() * self.unit).expand_as(scale)

    def standardize(self, features: Tensor) -> Tensor:
        """z [..., H] as its kernel reads it, in units of about a standard deviation."""
        size = self.hidden_size
        return (features - self.mean[:size].to(features)) * self.inverse[:size].to(features) * size**0.5

    def split(self, features: Tensor, scale: Tensor, noise: Tensor, law: StableFamily) -> tuple[Tensor, Tensor]:
        """What an individual reaches and what noise does, both [..., C], together the scale [..., C]."""
        return scale * (1 - _NOISE**law.alpha) ** (1 / law.alpha), scale * _NOISE
