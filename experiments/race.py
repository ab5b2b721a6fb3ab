"""How near is the race of the scores to the softmax? (theory 3.5; a minute for 20 positions, seven for 200, on one core)

At held-out positions, with everything of U' integrated out: the probability that token k wins,

    P(k) = integral of f_k(m) prod_{j != k} F_j(m) dm,   S_k ~ N(loc_k, own_k^2),

by a sum over a grid of scores, and its divergence from the softmax of the backbone's scores, both ways, and that of the
normalised P_k. By default own_k is the model's own; `--sigma`, `--beta` and `--offset` (of the threshold beside the
log-partition of loc/T) try another link. Then the decisions of a preset are drawn at some of the positions and counted: their
chi-square against the softmax and against the integral, tokens of fewer than five expected draws together.

    .venv/bin/python experiments/race.py --model DIR --positions 20
    .venv/bin/python experiments/race.py --model DIR --positions 200 --counted 20 --draws 100000    (hours, minutes on a GPU)
"""

import argparse

import torch
from scipy import stats
from torch import Tensor
from tqdm.auto import tqdm

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.data.texts import HELD_OUT_YEARS, speeches
from causalqwen.decoding import BoundDecoding
from causalqwen.modeling.chain import Chain

WINDOW, FIRST, NODES, ROWS = 256, 64, 96, 256


def wins(loc: Tensor, own: Tensor) -> Tensor:
    """Probabilities float64 [V] that S_k ~ N(loc_k, own_k^2) is the highest, loc and own [V]."""
    best = loc.argmax()
    low, high = loc[best] - 6 * own[best], (loc + 7 * own).max()
    grid = torch.linspace(low.item(), high.item(), NODES, dtype=torch.float32, device=loc.device)
    z = (grid - loc.float()[:, None]) / own.float()[:, None]
    log_below = torch.special.log_ndtr(z)
    log_rest = log_below.sum(0, dtype=torch.float64) - log_below
    mass = (log_rest - z.square() / 2 - own.log()[:, None]).exp().sum(-1)
    return mass / mass.sum()


def divergence(p: Tensor, q: Tensor) -> float:
    """KL(p || q), nats."""
    return torch.special.xlogy(p, p / q.clamp(min=1e-300)).sum().item()


def chi_square(counts: Tensor, p: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom."""
    expected = counts.sum() * p
    often = expected >= 5
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    return ((observed - expected).square() / expected.clamp(min=1e-9)).sum().item(), len(observed) - 1


@torch.no_grad()
def features_of(model: CausalQwenForCausalLM, count: int) -> Tensor:
    """Features of `count` positions of held-out speeches, [count, H], each with at least 64 tokens before it."""
    ids = model.processor(speeches(HELD_OUT_YEARS), return_tensors="pt")["input_ids"][0].to(model.device)
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(count):
        start = int(torch.randint(len(ids) - WINDOW, (1,), generator=generator))
        place = int(torch.randint(FIRST, WINDOW, (1,), generator=generator))
        found.append(model.features(ids[None, start : start + place]).last_hidden_state[0, -1])
    return torch.stack(found)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--positions", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--sigma", type=float, help="scale at the threshold")
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--offset", type=float, default=-0.6)
    parser.add_argument("--counted", type=int, default=1, help="positions at which decisions are drawn")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--preset", default="sample")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    T = given.temperature
    model = CausalQwenForCausalLM.from_pretrained(given.model).eval().to(given.device)
    words, found = model.vocabulary(), []
    size, device = model.config.causal_size, model.device
    bound = BoundDecoding.bind(CausalDecoding(own="token", temperature=T, seed=0), 1, size, device)
    drawing = BoundDecoding.bind(CausalDecoding.preset(given.preset, temperature=T, seed=1), ROWS, size, device)
    for index, z in enumerate(tqdm(features_of(model, given.positions), desc="integrals")):
        chain = Chain(model, z[None, None], bound.at(torch.zeros(1, 1, dtype=torch.int64, device=device)), words=words)
        loc = chain.scores.masked(chain.loc_S, -torch.inf)[0, 0].double()
        own = chain.own()[0, 0].double()
        loc, own = loc[taken := loc > -torch.inf], own[taken]
        softmax = (loc / T).softmax(-1)
        threshold = chain.threshold.item()
        if given.sigma is not None:
            threshold = T * (loc / T).logsumexp(-1).item() + T * given.offset
            own = (T**2 * given.sigma**2 + T * given.beta * (threshold - loc).clamp(min=0)).sqrt()
        race, passing = wins(loc, own), torch.special.log_ndtr((loc - threshold) / own).softmax(-1)
        variation = (race - softmax).abs().sum().item() / 2
        found.append([divergence(softmax, race), divergence(race, softmax), variation, divergence(softmax, passing)])
        if index < given.counted:
            counts = torch.zeros(taken.shape, dtype=torch.float64, device=device)
            rows = z.expand(ROWS, 1, -1)
            for first in tqdm(range(0, given.draws, ROWS), desc="draws", leave=False):
                places = first + torch.arange(ROWS, device=device)[:, None]  # another position draws anew
                chosen = Chain(model, rows, drawing.at(places), words=words).decision_scores().argmax(-1).flatten()
                counts += torch.bincount(chosen[: given.draws - first], minlength=len(counts))
            told = []
            for p in (softmax, race):
                statistic, freedom = chi_square(counts[taken], p)
                told.append(f"{statistic:.0f} of {freedom} (p = {stats.chi2.sf(statistic, freedom):.3g})")
            print(f"{given.draws} draws of {given.preset}: chi-square to softmax and integral " + ", ".join(told))
    columns = ("KL(softmax || race)", "KL(race || softmax)", "total variation", "KL(softmax || normalised P)")
    for name, column in zip(columns, torch.tensor(found).T, strict=True):
        print(f"{name}: mean {column.mean():.5f}, median {column.median():.5f}, greatest {column.max():.5f}")


if __name__ == "__main__":
    main()
