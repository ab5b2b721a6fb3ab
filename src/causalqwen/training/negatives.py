"""By what a training stage samples wrong tokens."""

import numpy as np
import torch
from torch import Tensor

from causalqwen.kernels import inclusion_probabilities
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.chain import Chain
from causalqwen.training.features import TokenFacts


@torch.no_grad()
def token_importance(model: CausalQwenForCausalLM, features: Tensor) -> Tensor:
    """Root mean square of P_k [V] over features [N, H], the size of a token's gradient, and as much again spread over all.

    0 for `<NUM>` and unused rows; float64. Proportional to it, a sample varies least for its size (Neyman 1934).
    """
    action, words = model.action, model.vocabulary()
    mass = torch.zeros(action.rows, dtype=torch.float64, device=model.device)
    for part in features.to(model.device, model.dtype).split(64):
        mass += (2 * Chain(model, part, words=words).word_scores.log_p()[0]).exp().sum(0)
    mass = (mass / len(features)).sqrt() * action.rest_mask
    return mass + action.rest_mask * mass.sum() / action.rest_mask.sum()


def sampling_of_negatives(
    model: CausalQwenForCausalLM, facts: TokenFacts, size: int, positions: int = 512
) -> Tensor | None:
    """`inclusion_probabilities` [V] of `size` wrong tokens, by their importance at some of the positions; None for size 0."""
    if not size:
        return None
    chosen = np.linspace(0, len(facts) - 1, min(positions, len(facts))).astype(int)
    return inclusion_probabilities(token_importance(model, torch.from_numpy(facts.features[chosen])), size)
