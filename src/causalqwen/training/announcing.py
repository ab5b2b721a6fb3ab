"""When a number comes: `<NUM>`'s row, from where one stands in the rows, and from plain text, where none does (theory 3.2)."""

import numpy as np
import torch
from torch import Tensor

from causalqwen.data.texts import speech_paragraphs
from causalqwen.distributions import upcast
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.chain import Chain
from causalqwen.training.anchor import text_chunks
from causalqwen.training.features import FactStore, TokenFacts, facts_of, known_of_number

PLAIN_TOKENS = 4096
"""Tokens of text without numbers that stand beside the rows: rows of one template alone say nothing about any other text."""

_CHUNK, _YEARS = 512, (1941, 1962, 1985, 2002)
_MARGIN = 8.0
_MOST, _STEPS, _PENALTY, _PLAIN = 4096, 200, 1e-3, 10.0


@torch.no_grad()
def _plain_facts(model: CausalQwenForCausalLM) -> TokenFacts:
    """The facts of `PLAIN_TOKENS` of speeches' paragraphs that hold no number, as many of each speech."""
    each = PLAIN_TOKENS // len(_YEARS) // _CHUNK
    chunks = [
        chunk.to(model.device)
        for year in _YEARS
        for chunk in text_chunks(model, "\n".join(speech_paragraphs(year, numbers=False)), _CHUNK)[:each]
    ]
    z = torch.cat([model.features(ids[None]).last_hidden_state[0, :-1] for ids in chunks])
    ids = torch.cat([ids[1:] for ids in chunks])
    return facts_of(model, z, ids, torch.full_like(ids, torch.nan, dtype=torch.float64), rest=False)


def _spread(places: np.ndarray) -> np.ndarray:
    """`_MOST` of the places at most, evenly."""
    return places[:: -(-len(places) // _MOST)] if len(places) else places


def announce(model: CausalQwenForCausalLM, store: FactStore) -> None:
    """Fit W_NUM and b_NUM, which `Chain.number` reads, while everything else stands still. Minimised is

        mean over the rows' positions of -log P + 10 times that over plain text of -log(1 - P_NUM) + λ sum_i (W_NUM,i sd_i)^2,

    P = P_NUM where a number comes and 1 - P_NUM elsewhere, sd_i of loc_U,i over plain text, λ = 1e-3. Over plain text the
    threshold counts as 8 nats lower: other text lies nearer to the rows than this one does. It is a regression of one event on
    the features z, by L-BFGS. Of many positions, 4,096 with a number and as many without stand for all.
    """
    row, bias = model.action.num_row, model.action.num_bias
    is_number = np.asarray(store.facts.targets) == model.config.num_token_id
    taken, weights = [], []
    for places in (np.flatnonzero(is_number), np.flatnonzero(~is_number)):
        some = _spread(places)
        taken.append(some)
        weights.append(np.full(len(some), len(places) / max(len(some), 1) / len(is_number)))
    parts = [store.facts[np.concatenate(taken)], _plain_facts(model)]
    weights.append(np.full(len(parts[1]), _PLAIN / len(parts[1])))

    def joined(name: str) -> Tensor:
        return torch.cat([part.tensor(name) for part in parts]).to(model.device)

    z, scale, words = joined("features"), joined("num_scale"), model.vocabulary()
    threshold = Chain(model, z, words=words).threshold.squeeze(-1).detach().clone()
    threshold[len(z) - len(parts[1]) :] -= _MARGIN  # other text is nearer to the rows than this text is
    comes = torch.arange(len(z), device=z.device) < len(taken[0])
    with torch.no_grad():  # always from the same start: a run that is taken up comes to the same
        spread = upcast(Chain(model, z[len(z) - len(parts[1]) :], words=words).loc_U).std(0)
        row.copy_(words.weight.float().mean(0)) if model.config.num_token_appended else row.zero_()
        bias.zero_()
    for one in (row, bias):
        one.requires_grad_(True)
    was_training = model.training
    model.eval()
    weight = torch.from_numpy(np.concatenate(weights)).to(z)
    optimizer = torch.optim.LBFGS([row, bias], max_iter=_STEPS, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        chain = Chain(model, z, words=words)
        known_of_number(chain, scale, threshold)
        log_p, log_not = chain.number.log_p()
        return _PENALTY * (row * spread).square().sum() - (weight * torch.where(comes, log_p, log_not)).sum()

    def closure() -> Tensor:
        row.grad, bias.grad = torch.autograd.grad(made := loss(), (row, bias))
        return made

    optimizer.step(closure)  # type: ignore[arg-type]
    row.grad = bias.grad = None
    model.train(was_training)
