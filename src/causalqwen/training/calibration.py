"""Calibration: one-vs-rest probabilities that mean something, from a few thousand tokens of text.

Nothing that decides is touched: thresholds stay the same for all tokens of a position, so every decision stays the
backbone's. Fitted are (theory 3.5):

- the threshold, by a `PartitionEstimate`, in closed form;
- `score_noise` and `score_slope`, a token's own noise: what the link asks for beside U and the noise.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from causalqwen.core import Chain
from causalqwen.distributions import StableFamily, upcast
from causalqwen.losses import ovr_log_probs
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.action import PartitionEstimate
from causalqwen.modeling.grafting import FAITHFUL_LINK

_TOP, _BINS, _WIDTH = 32, 512, 0.1
_SOLVED = 256  # positions whose thresholds are solved for exactly


@dataclass(frozen=True)
class CalibrationSettings:
    """How to calibrate.

    Args:
        anchors: tokens that `PartitionEstimate` sums exactly. chunk: tokens per forward pass.
    """

    anchors: int = 1024
    chunk: int = 512


@dataclass
class ScoreSummary:
    """What the fit needs to know of the scores of N positions. Locations count from the position's log-partition.

    features, loc: [N, H], [N, C]. log_partition [N]. target [N]: location of the token that came. top [N, 32]: the largest
    locations; counts [N, 512]: how many of the rest lie in each bin, of width 0.1, below 0. scale [N]: what U and the noise
    give scale_S. mass [V]: mean softmax probability of each token.
    """

    features: Tensor
    loc: Tensor
    log_partition: Tensor
    target: Tensor
    top: Tensor
    counts: Tensor
    scale: Tensor
    mass: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def tail_locations(self) -> Tensor:
        """Centres of the bins."""
        return -(torch.arange(_BINS, device=self.top.device) + 0.5) * _WIDTH


@torch.no_grad()
def text_chunks(model: CausalQwenForCausalLM, text: str, chunk: int = 512) -> list[Tensor]:
    """The text as the backbone itself reads it (numbers are digits), int64 [<= chunk] each."""
    tokenizer = model.processor.tokenizer
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    limit = model.config.context_length or chunk
    chunks = [part for part in ids.split(min(chunk, limit)) if len(part) > 1]
    if not chunks:
        raise ValueError("the text has no two tokens: nothing to learn from")
    return chunks


@torch.no_grad()
def summarize_scores(model: CausalQwenForCausalLM, chunks: Sequence[Tensor]) -> ScoreSummary:
    """One pass of the backbone over the text; progress on stderr."""
    action, words = model.action, model.vocabulary()
    used = action.rest_mask
    mass = torch.zeros(action.rows, dtype=torch.float64, device=model.device)
    columns: dict[str, list[Tensor]] = {}
    for ids in tqdm(chunks, desc="reading the text", unit="chunk", leave=False):
        ids = ids.to(model.device)
        hidden = model.features(ids[None]).last_hidden_state[0, :-1]
        for features, target in zip(hidden.split(128), ids[1:].split(128), strict=True):
            chain = Chain(model, features, words=words)
            scores = upcast(words(chain.loc)).masked_fill(~used, -torch.inf)
            log_partition = scores.logsumexp(-1, keepdim=True)
            scores -= log_partition
            mass += scores.exp().sum(0, dtype=torch.float64)
            top = scores.topk(_TOP, dim=-1).values
            counts = torch.zeros(len(scores), _BINS, device=scores.device)
            counts.scatter_add_(1, _bins(scores), used.to(counts).expand_as(scores))
            counts.scatter_add_(1, _bins(top), torch.full_like(top, -1.0))
            made = {
                "features": upcast(features),
                "loc": upcast(chain.loc),
                "log_partition": log_partition.squeeze(-1),
                "target": scores.gather(-1, target[:, None]).squeeze(-1),
                "top": top,
                "counts": counts,
                "scale": action.scales.bound(action, chain.scale, words),
            }
            for name, tensor in made.items():
                columns.setdefault(name, []).append(tensor)
    return ScoreSummary(**{name: torch.cat(parts) for name, parts in columns.items()}, mass=mass / mass.sum())


def _bins(loc: Tensor) -> Tensor:
    return (loc.clamp(min=-_BINS * _WIDTH) / -_WIDTH).long().clamp(max=_BINS - 1)


def calibrate(
    model: CausalQwenForCausalLM,
    text: str,
    settings: CalibrationSettings | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Calibrate `model` in place on plain text; seconds beyond reading, for ten thousand tokens on two cores.

    Returns:
        tokens; score_noise and score_slope; on the calibration text itself the median sum of P_k, the share of positions
        where it is within 0.8 to 1.25, and normalised NLL less the backbone's (`nll_gap`).

    Raises:
        ValueError: a text without two tokens; a model whose scale is the documents' (its probabilities are not free).
    """
    settings = settings or CalibrationSettings()
    model.config.require("calibration")  # the documents' scale moves decisions
    was_training = model.training
    model.eval()
    say("reading the text")
    chunks = text_chunks(model, text, settings.chunk)
    facts = summarize_scores(model, chunks)
    _set_link(model, facts)
    _fit_threshold(model, facts, settings.anchors)
    link = {"score_noise": model.action.score_noise, "score_slope": model.action.score_slope}
    report = {"tokens": len(facts), **link, **_sums(model, facts)}
    model.train(was_training)
    return report


@torch.no_grad()
def _fit_threshold(model: CausalQwenForCausalLM, facts: ScoreSummary, anchors: int) -> None:
    """Fit the threshold in closed form: the log-partition of each position, and what lets the P_k sum to 1 beside it.

    Anchors are the tokens that carry most probability; the log mass of the rest is a ridge regression on the features.
    """
    action, lm_head = model.action, model.vocabulary()
    anchors = min(anchors, int((facts.mass > 0).sum()))  # never a row that no token uses
    partition = PartitionEstimate(facts.features.shape[1], anchors).to(model.device)
    partition.anchor_ids = facts.mass.topk(anchors).indices.sort().values
    partition.rest.weight.zero_()
    partition.rest.bias.fill_(-torch.inf)
    parts = zip(facts.features.split(4096), facts.loc.split(4096), strict=True)
    known = torch.cat([partition(*part, lm_head) for part in parts])
    log_rest = facts.log_partition + torch.log1p(-(known.squeeze(-1) - facts.log_partition).exp().clamp(max=1 - 1e-6))
    mean, std = facts.features.mean(0), facts.features.std(0, correction=0).clamp(min=1e-6)
    design = F.pad((facts.features - mean) / std, (0, 1), value=1.0).double()
    penalty = 10 * torch.eye(design.shape[1], dtype=torch.float64, device=design.device)
    penalty[-1, -1] = 0
    solution = torch.linalg.solve(design.T @ design + penalty, design.T @ log_rest.double()).float()
    partition.rest.weight.copy_(solution[:-1] / std)
    partition.rest.bias.copy_(solution[-1] - (solution[:-1] * mean / std).sum())
    action.partition = partition
    model.config.anchor_tokens = anchors
    action.shift.weight.zero_()
    action.shift.bias.zero_()
    some = slice(0, None, max(1, len(facts) // _SOLVED))
    solved = solved_thresholds(facts, some, action.score_noise, action.score_slope, action.law)
    action.threshold.fill_(solved.median().item())


@torch.no_grad()
def _set_link(model: CausalQwenForCausalLM, facts: ScoreSummary) -> None:
    """Own noise at which P_k is nearly the softmax's probability (`FAITHFUL_LINK`), whatever U and the noise take of it."""
    action, a = model.action, model.action.law.alpha
    if action.law.name not in FAITHFUL_LINK:
        return
    scale, slope, _ = FAITHFUL_LINK[action.law.name]
    action.score_noise = max(scale**a - facts.scale.median().item() ** a, 0.0) ** (1 / a)
    action.score_slope = slope
    model.config.score_noise, model.config.score_slope = action.score_noise, slope


@torch.no_grad()
def _sums(model: CausalQwenForCausalLM, facts: ScoreSummary) -> dict[str, float]:
    """How the P_k sum on the text itself, and the normalised NLL less the backbone's."""
    action, lm_head, parts = model.action, model.vocabulary(), []
    for start in range(0, len(facts), 4096):
        index = slice(start, start + 4096)
        features = facts.features[index]
        thresholds = action.thresholds(features, facts.loc[index], lm_head).squeeze(-1) - facts.log_partition[index]
        parts.append(link_terms(facts, index, thresholds, action.score_noise, action.score_slope, action.law))
    log_p, log_sum = (torch.cat(column) for column in zip(*parts, strict=True))
    return {
        "sum_median": log_sum.exp().median().item(),
        "sum_within": ((log_sum > math.log(0.8)) & (log_sum < math.log(1.25))).float().mean().item(),
        "nll_gap": (log_sum - log_p + facts.target).mean().item(),
    }


def link_terms(
    facts: ScoreSummary,
    index: Tensor | slice,
    thresholds: Tensor,
    noise: Tensor | float,
    slope: Tensor | float,
    law: StableFamily,
) -> tuple[Tensor, Tensor]:
    """log P of the tokens that came and log sum_k P_k at some positions, [n]; thresholds [n] count from the log-partition."""
    thresholds = thresholds.unsqueeze(-1)
    scale = (facts.scale[index].unsqueeze(-1) ** law.alpha + noise**law.alpha) ** (1 / law.alpha)

    def log_p(loc: Tensor) -> Tensor:
        return ovr_log_probs(loc, scale, thresholds, family=law.name, slope=slope)[0]

    tail = (log_p(facts.tail_locations().expand(len(thresholds), -1)).exp() * facts.counts[index]).sum(-1)
    log_sum = (tail + log_p(facts.top[index]).exp().sum(-1)).log()
    return log_p(facts.target[index].unsqueeze(-1)).squeeze(-1), log_sum


@torch.no_grad()
def solved_thresholds(facts: ScoreSummary, some: slice, noise: float, slope: float, law: StableFamily) -> Tensor:
    """The thresholds of some positions, less the log-partition, at which the P_k sum to 1, by halving; [n]."""
    low, high = (torch.full_like(facts.target[some], edge) for edge in (-50.0, 50.0))
    while bool((link_terms(facts, some, high, noise, slope, law)[1] > 0).any()):
        high = high * 2
    for _ in range(60):
        middle = (low + high) / 2
        above = link_terms(facts, some, middle, noise, slope, law)[1] > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return high
