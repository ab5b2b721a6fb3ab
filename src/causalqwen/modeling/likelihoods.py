"""How likely tokens are where they stand, with nothing drawn: to the backbone, and one against the rest."""

from dataclasses import dataclass

import torch
from torch import Tensor

from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.chain import POSITIONS_AT_ONCE, Chain


@dataclass(frozen=True)
class Likelihood:
    """A token at a place, in nats.

    log_prob: of a word, given that a word comes, the backbone's own softmax over all rows of its matrix; of `<NUM>`, its share
    of the softmax over all tokens (theory 2.5). log_ovr: log P_k against its own threshold.
    """

    token: int
    log_prob: float
    log_ovr: float


@torch.no_grad()
def likelihoods(model: GraftedModel, features: Tensor, tokens: Tensor, count: int) -> list[tuple[Likelihood, ...]]:
    """Behind each of the features [n, H]: the token int64 [n] that stands there, then the `count` likeliest words in order."""
    found = []
    for start in range(0, len(tokens), POSITIONS_AT_ONCE):
        part = slice(start, start + POSITIONS_AT_ONCE)
        found += _of_part(model, Chain(model, features[part]), tokens[part].unsqueeze(-1), count)
    return found


def _of_part(model: GraftedModel, chain: Chain, stands: Tensor, count: int) -> list[tuple[Likelihood, ...]]:
    words = chain.words(chain.loc).float().log_softmax(-1)
    in_use, number = chain.action.rest_in_use, model.config.num_token_id
    usable = words if in_use is None else words.masked_fill(~in_use, -torch.inf)
    shown = torch.cat([stands, usable.topk(min(count, usable.shape[-1]), dim=-1).indices], dim=-1)
    log_probs = words.gather(-1, shown.clamp(max=words.shape[-1] - 1))
    scores = chain.scores
    if bool((stands == number).any()):
        shares = scores.masked(scores.loc, -torch.inf).float().log_softmax(-1)[:, number, None]
        log_probs[:, :1] = torch.where(stands == number, shares, log_probs[:, :1])
    columns = shown.tolist(), log_probs.tolist(), scores.at(shown).log_p()[0].tolist()
    return [tuple(map(Likelihood, *row)) for row in zip(*columns, strict=True)]
