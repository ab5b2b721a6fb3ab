"""What does one-vs-rest cost against a softmax, by family, by how scales grow, and by the size of the vocabulary? (5 minutes)

Held-out speeches; at every position the threshold is the one at which the probabilities sum to 1. Normalised NLL less the
backbone's, the calibration error of the largest probability, and the heaviness of the tail: log P of a token 30 logits short
of its threshold.

Below it, a bound: threshold and scale are chosen for each position by its own softmax, so that the divergence
KL(softmax || normalised OvR) is least, whatever the sum or with the sum at 1. No rule that gives all tokens of a position one
threshold and one scale has less.

152k is no measurement on a larger model. Every token but the 32 likeliest of a position counts 3.1 times, in the softmax too.

    .venv/bin/python experiments/links.py
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from causalqwen import CausalQwenForCausalLM
from causalqwen.data.texts import HELD_OUT_YEARS, speeches
from causalqwen.distributions import upcast
from causalqwen.evaluation.language import calibration_error
from causalqwen.losses import ovr_log_probs
from causalqwen.modeling.chain import Chain
from causalqwen.training import text_chunks

LINKS = [
    ("cauchy", 0.01, 0.0), ("cauchy", 1.0, 0.0), ("cauchy", 10.0, 0.0),
    *(("gaussian", scale, 0.0) for scale in (1.0, 2.0, 2.5, 3.0, 4.0)),
    *(("gaussian", scale, 0.56) for scale in (0.5, 0.8, 1.2)),
]  # fmt: skip


TOP, BINS, WIDTH = 32, 512, 0.1
TAIL = -(torch.arange(BINS) + 0.5) * WIDTH


@dataclass
class Scores:
    """What is needed of the scores of N positions, as logits less the log-partition.

    target [N]: of the token that came. top [N, 32]: the largest. counts [N, 512]: how many others lie in each bin of `TAIL`.
    """

    target: Tensor
    top: Tensor
    counts: Tensor

    def log_terms(self, thresholds: Tensor, family: str, scale: float, slope: float) -> tuple[Tensor, Tensor, Tensor]:
        """log P [N] of the tokens that came and of the likeliest, and log sum_k P_k [N], at thresholds [N]."""
        loc = torch.cat([self.target[:, None], self.top, TAIL.expand(len(self.target), -1)], dim=-1)
        own = torch.full_like(self.target[:, None], scale)
        log_p, _ = ovr_log_probs(loc, own, thresholds[:, None], family=family, slope=slope)
        counts = torch.cat([torch.ones_like(self.top), self.counts], dim=-1)
        return log_p[:, 0], log_p[:, 1], (log_p[:, 1:] + counts.log()).logsumexp(-1)

    def thresholds(self, family: str, scale: float, slope: float) -> Tensor:
        """The thresholds [N] at which the P_k sum to 1, by halving."""
        low, high = (torch.full_like(self.target, edge) for edge in (-50.0, 50.0))
        while bool((self.log_terms(high, family, scale, slope)[2] > 0).any()):
            high = high * 2
        for _ in range(60):
            middle = (low + high) / 2
            above = self.log_terms(middle, family, scale, slope)[2] > 0
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return high


@torch.no_grad()
def scores_of(model: CausalQwenForCausalLM, chunks: list[Tensor]) -> Scores:
    """Of all positions of the text."""
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for ids in chunks:
        hidden = model.features(ids[None]).last_hidden_state[0, :-1]
        for features, target in zip(hidden.split(128), ids[1:].split(128), strict=True):
            rest = Chain(model, features).word_scores
            scores = rest.masked(upcast(rest.loc), -torch.inf).log_softmax(-1)
            sorted_ = scores.sort(-1, descending=True).values
            counts = torch.zeros(len(scores), BINS)
            others = sorted_[:, TOP:]
            bins = (others.clamp(min=-BINS * WIDTH) / -WIDTH).long().clamp(max=BINS - 1)
            counts.scatter_add_(1, bins, (others > -torch.inf).float())
            columns.append((scores.gather(-1, target[:, None])[:, 0], sorted_[:, :TOP], counts))
    return Scores(*(torch.cat(parts) for parts in zip(*columns, strict=True)))


@torch.no_grad()
def least_divergence(few: Scores, family: str, sum_to_one: bool) -> float:
    """Mean over positions of the least KL(softmax || normalised OvR) on a grid of scales, and of thresholds.

    sum_to_one: at each scale the threshold is the one at which the probabilities sum to 1.
    """
    loc = torch.cat([few.top, TAIL.expand(len(few.target), -1)], dim=-1)
    weight = torch.cat([torch.ones_like(few.top), few.counts], dim=-1)
    wanted = (loc + weight.log()).log_softmax(-1)
    entropy = -(wanted.exp() * (wanted - weight.log()).nan_to_num(neginf=0.0, posinf=0.0, nan=0.0)).sum(-1)
    best = torch.full_like(entropy, torch.inf)
    fixed = [torch.full_like(few.target, c) for c in torch.arange(-40.0, 12.0, 0.25).tolist()]
    for scale in torch.logspace(-6, 1.5, 46).tolist():
        tried = [few.thresholds(family, scale, 0.0)] if sum_to_one else fixed
        for thresholds in tried:
            own = torch.full_like(loc[:, :1], scale)
            log_p, _ = ovr_log_probs(loc, own, thresholds[:, None], family=family)
            cost = (log_p + weight.log()).logsumexp(-1) - (wanted.exp() * log_p).sum(-1) - entropy
            best = torch.minimum(best, cost.nan_to_num(nan=torch.inf))
    return best.mean().item()


def main() -> None:
    model = CausalQwenForCausalLM.from_backbone("smollm2-135m")
    chunks = text_chunks(model, speeches(HELD_OUT_YEARS))[::3]
    facts = scores_of(model, chunks)
    right = facts.target >= facts.top[:, 0]
    for size, factor in (("49k", 1.0), ("152k", 151_665 / 49_152)):
        softmax_nll = -facts.target + torch.log1p((factor - 1) * (1 - facts.top.exp().sum(-1)).clamp(min=0))
        facts.counts *= factor
        print(f"vocabulary of {size}, {len(facts.target)} positions")
        print(f"{'family':10}{'scale':>8}{'slope':>8}{'NLL gap':>10}{'ECE':>8}{'log P':>12}")
        for family, scale, slope in LINKS:
            thresholds = facts.thresholds(family, scale, slope)
            log_p, top, log_sum = facts.log_terms(thresholds, family, scale, slope)
            gap = (log_sum - log_p - softmax_nll).mean().item()
            error, _ = calibration_error(top.exp(), right)
            far = ovr_log_probs(torch.tensor([-30.0]), torch.tensor([scale]), family=family, slope=slope)[0].item()
            print(f"{family:10}{scale:8.2f}{slope:8.2f}{gap:10.3f}{error:8.3f}{far:12.1f}", flush=True)
        few = Scores(*(column[::8] for column in (facts.target, facts.top, facts.counts)))
        for family in ("cauchy", "gaussian"):
            free, bound = (least_divergence(few, family, sum_to_one) for sum_to_one in (False, True))
            print(f"least divergence, {family}: {free:.3f} nats, with the sum at 1 {bound:.3f}", flush=True)


if __name__ == "__main__":
    main()
