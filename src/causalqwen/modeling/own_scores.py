"""A score matrix of the model's own at C = H: the backbone's lm_head may be tied to its embedding (overview 2.4)."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from causalqwen.modeling.vocabulary import effective_linear

if TYPE_CHECKING:
    from causalqwen.modeling.model import CausalQwenForCausalLM


@torch.no_grad()
def own_scores(model: "CausalQwenForCausalLM") -> None:
    """Give a model W_cls [V, H] and b_cls [V] of its own, `score_head`, which start as the backbone's lm_head, b_cls at 0 where
    that has none; a checkpoint keeps them. The embedding, and with it every feature, stays when they are trained."""
    weight, bias = effective_linear(model.backbone.get_output_embeddings())
    rows, size = weight.shape
    own = nn.utils.skip_init(nn.Linear, size, rows, dtype=weight.dtype, device=weight.device)  # draws nothing
    own.weight.copy_(weight)
    if bias is None:
        own.bias.zero_()
    else:
        own.bias.copy_(bias)
    model.score_head = own
    model.config.own_scores = True
