"""Numbers in: e_i = embed(x_i) + phi(v_i), phi(v) = sign(v) ln(1 + |v|) w (theory 2.1, 3.1)."""

import torch
from torch import Tensor, nn

from causalqwen.numbers import symlog


class NumericEmbedding(nn.Module):
    """Adds what `<NUM>` and its value contribute to the token embeddings.

    `<NUM>` is read at `num_token_id`. Where that is a row of the matrix, `row` is added to it (and starts at 0); where
    `<NUM>` stands after the matrix, `row` is its embedding. `direction` is w. Positions without a number come out
    exactly as they went in.
    """

    def __init__(self, hidden_size: int, num_token_id: int, appended: bool) -> None:
        super().__init__()
        self.num_token_id = num_token_id
        self.appended = appended
        self.row = nn.Parameter(torch.zeros(hidden_size))
        self.direction = nn.Parameter(torch.zeros(hidden_size))

    def known(self, input_ids: Tensor, numeric_values: Tensor) -> tuple[Tensor, Tensor]:
        """Where a `<NUM>` has a value, bool [B, S], and the values, 0 elsewhere: a NaN would reach w through its gradient."""
        is_known = (input_ids == self.num_token_id) & numeric_values.isfinite()
        known = torch.where(is_known, numeric_values, 0.0)
        return is_known, known

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
        is_number = input_ids == self.num_token_id
        embeddings = embed_tokens(input_ids.masked_fill(is_number, 0) if self.appended else input_ids)
        of_number = self.row.to(embeddings.dtype)
        if not self.appended:
            of_number = embeddings + of_number
        if numeric_values is not None:
            magnitude = symlog(self.known(input_ids, numeric_values)[1]).unsqueeze(-1).to(self.direction.dtype)
            of_number = of_number + (magnitude * self.direction).to(embeddings.dtype)
        return torch.where(is_number.unsqueeze(-1), of_number, embeddings)


class GatedFeatures(NumericEmbedding):
    """Numbers after the backbone, the setting `number_embedding="features"`: `<NUM>` goes in as its row alone, and what comes
    out of the backbone there is z ∘ sigmoid(v w + b); b, `gate_bias`, starts at 0 (architecture 2.2.4).

    The architecture gates the last token of what is read; every token is the last one of its own context, so that every known
    `<NUM>` is gated. No later position sees the value: attention has passed already.
    """

    def __init__(self, hidden_size: int, num_token_id: int, appended: bool) -> None:
        super().__init__(hidden_size, num_token_id, appended)
        self.gate_bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, input_ids: Tensor, numeric_values: Tensor | None, embed_tokens: nn.Module) -> Tensor:
        """Embeddings [B, S, H], whatever the values are."""
        return super().forward(input_ids, None, embed_tokens)

    def gate(self, features: Tensor, input_ids: Tensor, numeric_values: Tensor | None) -> Tensor:
        """z [B, S, H], multiplied at `<NUM>` where its value is known; in the values' float64, which no product leaves."""
        if numeric_values is None:
            return features
        is_known, known = self.known(input_ids, numeric_values)
        gate = (known.unsqueeze(-1) * self.direction + self.gate_bias).sigmoid()
        return torch.where(is_known.unsqueeze(-1), features * gate.to(features.dtype), features)
