"""By what a training stage samples wrong tokens."""

import numpy as np
import torch
from torch import Tensor

from causalqwen.distributions import upcast
from causalqwen.kernels import inclusion_probabilities
from causalqwen.losses import ovr_log_probs
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.training.features import TokenFacts


@torch.no_grad()
def token_importance(model: CausalQwenForCausalLM, features: Tensor) -> Tensor:
    """Root mean square of P_k [V] over features [N, H], the size of a token's gradient, and as much again spread over all.

    0 for `<NUM>` and unused rows; float64. Proportional to it, a sample varies least for its size (Neyman 1934).
    """
    action, lm_head = model.action, model.vocabulary()
    mass = torch.zeros(action.rows, dtype=torch.float64, device=model.device)
    for part in features.to(model.device, model.dtype).split(64):
        loc_U, scale_U = model.abduction(part)
        loc, scale = model.situate(loc_U, scale_U)
        scales = action.score_scale_of(scale, lm_head)[..., : action.rows]
        thresholds, law = model.thresholds(part, loc_U, scale_U, lm_head), action.law.name
        log_p, _ = ovr_log_probs(upcast(lm_head(loc)), scales, thresholds, family=law, slope=action.score_slope)
        mass += (2 * log_p).exp().sum(0)
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
