"""Numbers in: e_i = embed(x_i) + phi(v_i), phi(v) = sign(v) ln(1 + |v|) w (theory 2.1, 3.1).

Beside the logarithm, which tells magnitudes, may stand the digits, as Fourier features: + B f(v). Or, as the architecture had
it (architecture 2.2.4), the embedding of `<NUM>` times sigmoid(v w + b), coordinate by coordinate.
"""

import math

import torch
from torch import Tensor, nn

from causalqwen.numbers import symlog

PERIODS = tuple(10.0**power for power in range(-1, 7))
"""p of `fourier_features`, 10^-1 to 10^6. v modulo 10^i tells the digit of 10^(i-1): from hundredths to hundred thousands."""


def fourier_features(values: Tensor) -> Tensor:
    """f(v): cos(2 pi v/p) for each p of `PERIODS`, then sin(2 pi v/p); float64 [..., 2n] of values [...] (Zhou et al. 2025).

    v is taken modulo p first, in float64, so that the pair of a small period is as right for a large value as that value is.
    Larger ones than 10^15, where a float64 has no tenths left, count as that.
    """
    periods = torch.tensor(PERIODS, dtype=torch.float64, device=values.device)
    values = values.double().clamp(-1e15, 1e15).unsqueeze(-1)
    angles = torch.remainder(values, periods) / periods * math.tau
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class FourierEncoding(nn.Module):
    """B f(v): `weight` is B [H, 2n], each column a direction as w is."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, 2 * len(PERIODS)))

    def forward(self, values: Tensor) -> Tensor:
        """B f(v) [..., H] of finite values [...], in the dtype of B."""
        return nn.functional.linear(fourier_features(values).to(self.weight.dtype), self.weight)


class NumericEmbedding(nn.Module):
    """Adds what `<NUM>` and its value contribute to the token embeddings.

    `<NUM>` is read at `num_token_id`. Where that is a row of the matrix, `row` is added to it (and starts at 0); where
    `<NUM>` stands behind the matrix, `row` is its embedding. `direction` is w. Positions without a number come out
    exactly as they went in.

    multiplied: multiply by sigmoid(v w + b) instead of adding phi(v); b, `gate_bias`, starts at 0.
    fourier: add B f(v) to phi(v); an unknown value adds neither.
    """

    def __init__(
        self, hidden_size: int, num_token_id: int, appended: bool, *, multiplied: bool = False, fourier: bool = False
    ) -> None:
        super().__init__()
        self.num_token_id = num_token_id
        self.appended = appended
        self.row = nn.Parameter(torch.zeros(hidden_size))
        self.direction = nn.Parameter(torch.zeros(hidden_size))
        self.gate_bias = nn.Parameter(torch.zeros(hidden_size)) if multiplied else None
        self.fourier = FourierEncoding(hidden_size) if fourier else None

    @property
    def directions(self) -> list[nn.Parameter]:
        """Along what a value moves the embedding: w, and B where there is one. `direction: false` of a stage keeps them."""
        return [self.direction] if self.fourier is None else [self.direction, self.fourier.weight]

    def gate(self, features: Tensor, input_ids: Tensor, numeric_values: Tensor | None) -> Tensor:
        """What the heads read, z [B, S, H], of what comes out of the backbone: the same. See `GatedFeatures`."""
        return features

    def forward(self, input_ids: Tensor, numeric_values: Tensor | None, embed_tokens: nn.Module) -> Tensor:
        """Embeddings [B, S, H] in the dtype of `embed_tokens`.

        Args:
            input_ids: int64 [B, S].
            numeric_values: float64 [B, S]; read at `<NUM>` only. NaN where a value is unknown, None where all are.
            embed_tokens: the backbone's own embedding.
        """
        is_number = (input_ids == self.num_token_id).unsqueeze(-1)
        known_ids = input_ids.masked_fill(is_number.squeeze(-1), 0) if self.appended else input_ids
        embeddings = embed_tokens(known_ids)
        of_number = self.row.to(embeddings.dtype)
        if not self.appended:
            of_number = embeddings + of_number
        if numeric_values is not None:
            # Values off `<NUM>` and unknown ones (NaN) count as 0; left in, they would reach w through the gradient.
            is_known = is_number.squeeze(-1) & numeric_values.isfinite()
            known = torch.where(is_known, numeric_values, 0.0)
            if self.gate_bias is None:
                magnitude = symlog(known).unsqueeze(-1).to(self.direction.dtype)
                of_number = of_number + (magnitude * self.direction).to(embeddings.dtype)
                if self.fourier is not None:  # f(0) is not 0
                    of_digits = self.fourier(known).masked_fill(~is_known.unsqueeze(-1), 0.0)
                    of_number = of_number + of_digits.to(embeddings.dtype)
            else:  # in the values' float64, which no product leaves
                gate = (known.unsqueeze(-1) * self.direction + self.gate_bias).sigmoid()
                of_number = of_number * gate.to(embeddings.dtype)
        return torch.where(is_number, of_number, embeddings)


class GatedFeatures(NumericEmbedding):
    """Numbers behind the backbone, the setting `number_embedding="features"`: `<NUM>` goes in as its row alone, and what comes
    out of the backbone there is z ∘ sigmoid(v w + b); b, `gate_bias`, starts at 0 (architecture 2.2.4).

    The architecture gates the last token of what is read; every token is the last one of its own context, so that every known
    `<NUM>` is gated. No later position sees the value: attention has passed already.
    """

    def forward(self, input_ids: Tensor, numeric_values: Tensor | None, embed_tokens: nn.Module) -> Tensor:
        """Embeddings [B, S, H], whatever the values are."""
        return super().forward(input_ids, None, embed_tokens)

    def gate(self, features: Tensor, input_ids: Tensor, numeric_values: Tensor | None) -> Tensor:
        """z [B, S, H], multiplied at `<NUM>` where its value is known; in the values' float64, which no product leaves."""
        if numeric_values is None:
            return features
        is_known = (input_ids == self.num_token_id) & numeric_values.isfinite()
        known = torch.where(is_known, numeric_values, 0.0).unsqueeze(-1)
        gated = features * (known * self.direction + self.gate_bias).sigmoid().to(features.dtype)
        return torch.where(is_known.unsqueeze(-1), gated, features)
