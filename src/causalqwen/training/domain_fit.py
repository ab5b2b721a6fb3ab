"""A domain's abduction network in closed form: one step of natural gradient within its limit (theory 3.10).

    g = W'(p - e_y)     the gradient, by loc_U, of the nats of the next token y under p, the softmax over loc_S      [C]
    d = W'(p - e_k)     the same of a token k that is drawn from p; the mean of d d' is the Fisher information of loc_U
    A = -(S + s I)^-1 G (X + s' I)^-1      S = mean d d',  G = mean g x',  X = mean x x',  x = (z / rms(z), 1)

loc_D = loc_U + ω A x, with the largest ω at which D <= limit at each position. Of a network with hidden layers, z is what the
last one gives. The factors are those of Martens and Grosse (2015), arXiv 1503.05671; s and s' are those of `DAMPINGS` under
which positions held out are likeliest, and so is the step's length.
"""

from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from causalqwen.data.texts import FITTED_YEARS, speech_paragraphs
from causalqwen.distributions import upcast
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.abduction import DomainNetwork, LawOfU
from causalqwen.training import ranks
from causalqwen.training.anchor import text_chunks
from causalqwen.training.features import FactStore

DAMPINGS = (1.0, 3.0, 10.0), (0.03, 0.1, 0.3)
"""Of S and of X, in their mean diagonals. Plain gradients, S damped further, cost other text more (experiments 10.6)."""

_POSITIONS = 8192  # of the rows
_HELD_OUT = 5  # one in so many chooses
_AT_ONCE = 512
_LENGTH, _LEAST = (
    10.0,
    1e-5,
)  # of a step, in moves of about the limit: the longest is ended by it at nearly all positions
_OTHER_TOKENS = 1024


@torch.no_grad()
def fit_domain(model: CausalQwenForCausalLM, store: FactStore, seed: int) -> str:
    """Fit the network of the domain that is asked to the words of rows; a line that says what it wins on positions held out,
    and what it costs elsewhere.

    The network stays 0 where nothing tried is likelier than the base. ValueError for rows without a word to learn from.
    """
    network = model.abduction.asked
    assert network is not None and network.limit is not None
    z, y = _words_of(model, store, seed)
    held = len(z) // _HELD_OUT
    base = _nats(model, None, z[:held], y[:held])
    scale = LawOfU(model.abduction, z.to(model.device)).scale.mean(0).cpu()
    inner = network.residual.inner(z[held:].to(model.device)).cpu()
    size = inner.square().mean().sqrt().clamp(min=1e-12)
    x = F.pad(inner / size, (0, 1), value=1.0).double()
    gradients, drawn = gradients_of_loc(model, z[held:], y[held:], seed)
    information, moment, slope = (a.T @ b / len(x) for a, b in ((drawn, drawn), (x, x), (gradients, x)))
    last = network.residual.last

    def attempt(of_scores: float, of_features: float, length: float) -> tuple[float, Tensor]:
        moves = natural_step(slope, information, moment, of_scores, of_features) / scale.double().unsqueeze(-1)
        away = (x @ moves.T).square().mean().clamp(min=1e-300).sqrt()
        moves = (moves * length * network.limit**0.5 / away).float()
        _write(last, moves, size)
        return _nats(model, network, z[:held], y[:held]), moves

    first, length = (DAMPINGS[0][1], DAMPINGS[1][1]), _LENGTH
    found = [(base, torch.zeros(len(scale), x.shape[1])), attempt(*first, length)]
    while (
        length > _LEAST and (shorter := attempt(*first, length / 4))[0] < found[-1][0]
    ):  # the limit is far: scale_U is wide
        length /= 4
        found.append(shorter)
    found += [attempt(*dampings, length) for dampings in product(*DAMPINGS) if dampings != first]
    best = min(found, key=lambda tried: tried[0])
    _write(last, best[1], size)
    other, kept = _elsewhere(model, network)
    return (
        f"the domain takes {base - best[0]:.3f} nats a token off {held:,} words held out, and "
        f"{-other:+.3f} off another text, where {kept:.1%} of the decisions stay"
    )


def _words_of(model: CausalQwenForCausalLM, store: FactStore, seed: int) -> tuple[Tensor, Tensor]:
    """Features float32 [n, H] and tokens [n] of positions before words, row after row in an order that is drawn."""
    targets = np.asarray(store.facts.targets)
    rows = np.random.default_rng(seed).permutation(len(store))
    places = np.concatenate([np.arange(*store.offsets[row : row + 2]) for row in rows])
    places = places[targets[places] != model.config.num_token_id][:_POSITIONS]
    if len(places) < _HELD_OUT:
        raise ValueError("heads: these rows have no words for a domain to learn from")
    return torch.from_numpy(store.facts.features[places]), torch.from_numpy(targets[places].astype(np.int64))


def _scores(model: CausalQwenForCausalLM, loc: Tensor) -> Tensor:
    """loc_S [n, V] of the tokens in use, float32; the others have none."""
    words = model.vocabulary()
    return upcast(words(loc.to(words.weight.dtype))).masked_fill(~model.action.rest_mask, -torch.inf)


def gradients_of_loc(model: CausalQwenForCausalLM, z: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """g and d, float64 [n, C] each."""
    words, made = model.vocabulary(), []
    generator = torch.Generator(model.device).manual_seed(seed)
    parts = list(zip(z.split(_AT_ONCE), y.to(model.device).split(_AT_ONCE), strict=True))
    for part, targets in tqdm(parts, desc="fitting a domain", leave=False, disable=ranks.rank() > 0):
        p = _scores(model, LawOfU(model.abduction, part.to(model.device)).loc).softmax(-1)
        mean = upcast(p.to(words.weight.dtype) @ words.weight)
        others = torch.multinomial(p, 1, generator=generator).squeeze(-1)
        made.append(torch.stack([mean - words.rows_at(ids) for ids in (targets, others)]).double().cpu())
    gradients, drawn = torch.cat(made, dim=1)
    return gradients, drawn


def natural_step(slope: Tensor, information: Tensor, moment: Tensor, of_scores: float, of_features: float) -> Tensor:
    """A [C, X] from G [C, X], S [C, C], X [X, X] and what is added to the diagonals, in shares of their means."""
    left, right = (
        matrix + damping * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=matrix.dtype)
        for matrix, damping in ((information, of_scores), (moment, of_features))
    )
    return torch.linalg.solve(right, torch.linalg.solve(left, -slope).T).T


def _write(layer: torch.nn.Linear, moves: Tensor, size: Tensor) -> None:
    """Let a(z) be moves x, and leave the scale as it is."""
    layer.weight.zero_()
    layer.bias.zero_()
    layer.weight[: len(moves)].copy_(moves[:, :-1] / size)
    layer.bias[: len(moves)].copy_(moves[:, -1])


def _loc(model: CausalQwenForCausalLM, network: DomainNetwork | None, z: Tensor) -> Tensor:
    base = LawOfU(model.abduction, z)
    return base.loc if network is None else network.moved(base).loc


def _nats(model: CausalQwenForCausalLM, network: DomainNetwork | None, z: Tensor, y: Tensor) -> float:
    """Mean nats of tokens y [n] after features z [n, H]."""
    total = 0.0
    for part, targets in zip(z.split(_AT_ONCE), y.split(_AT_ONCE), strict=True):
        scores = _scores(model, _loc(model, network, part.to(model.device)))
        total += F.cross_entropy(scores, targets.to(model.device), reduction="sum").item()
    return total / len(z)


def _elsewhere(model: CausalQwenForCausalLM, network: DomainNetwork) -> tuple[float, float]:
    """Nats that a token of a speech costs more under the domain, and how many decisions stay."""
    text = "\n".join(speech_paragraphs(FITTED_YEARS[-1], numbers=False))
    parts = torch.cat(text_chunks(model, text))[:_OTHER_TOKENS].to(model.device).split(_AT_ONCE)
    z = torch.cat([upcast(model.features(ids.unsqueeze(0)).last_hidden_state[0, :-1]) for ids in parts])
    y = torch.cat([ids[1:] for ids in parts])
    decisions = (_scores(model, _loc(model, which, z)).argmax(-1) for which in (None, network))
    kept = torch.eq(*decisions).float().mean().item()
    return _nats(model, network, z, y) - _nats(model, None, z, y), kept
