"""Numbers in: e_i = embed(x_i) + phi(v_i), phi(v) = sign(v) ln(1 + |v|) w (theory 2.1, 3.1).

Or, as the architecture had it (architecture 2.2.4), the embedding of `<NUM>` times sigmoid(v w + b), coordinate by coordinate.
"""

import torch
from torch import Tensor, nn

from causalqwen.numbers import symlog


class NumericEmbedding(nn.Module):
    """Adds what `<NUM>` and its value contribute to the token embeddings.

    `<NUM>` is read at `num_token_id`. Where that is a row of the matrix, `row` is added to it (and starts at 0); where
    `<NUM>` stands behind the matrix, `row` is its embedding. `direction` is w. Positions without a number come out
    exactly as they went in.

    multiplied: multiply by sigmoid(v w + b) instead of adding phi(v); b, `gate_bias`, starts at 0.
    """

    def __init__(self, hidden_size: int, num_token_id: int, appended: bool, *, multiplied: bool = False) -> None:
        super().__init__()
        self.num_token_id = num_token_id
        self.appended = appended
        self.row = nn.Parameter(torch.zeros(hidden_size))
        self.direction = nn.Parameter(torch.zeros(hidden_size))
        self.gate_bias = nn.Parameter(torch.zeros(hidden_size)) if multiplied else None

    def forward(self, input_ids: Tensor, numeric_values: Tensor | None, embed_tokens: nn.Module) -> Tensor:
        """Embeddings [B, S, H] in the dtype of `embed_tokens`.

        Args:
            input_ids: int64 [B, S].
            numeric_values: float64 [B, S]; read at `<NUM>` only, 0 everywhere where None.
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
            known = torch.where(is_number.squeeze(-1) & numeric_values.isfinite(), numeric_values, 0.0)
            if self.gate_bias is None:
                magnitude = symlog(known).unsqueeze(-1).to(self.direction.dtype)
                of_number = of_number + (magnitude * self.direction).to(embeddings.dtype)
            else:  # in the values' float64, which no product leaves
                gate = (known.unsqueeze(-1) * self.direction + self.gate_bias).sigmoid()
                of_number = of_number * gate.to(embeddings.dtype)
        return torch.where(is_number, of_number, embeddings)
