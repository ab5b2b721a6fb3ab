"""Numbers behind the backbone: z ∘ sigmoid(v w + b) at `<NUM>` (architecture 2.2.4), the setting `number_embedding="features"`.

The architecture gates the last token of what is read; every token is the last one of its own context, so that every known
`<NUM>` is gated. No later position sees the value: attention has passed already.
"""

import torch
from torch import Tensor, nn

from causalqwen.modeling.embedding import NumericEmbedding


class GatedFeatures(NumericEmbedding):
    """`<NUM>` goes in as its row alone, and what comes out of the backbone there is multiplied; b, `gate_bias`, starts at 0."""

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
