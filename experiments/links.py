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

import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.data.texts import HELD_OUT_YEARS, speeches
from causalqwen.distributions import get_family
from causalqwen.evaluation.language import calibration_error
from causalqwen.losses import ovr_log_probs
from causalqwen.training.calibration import (
    ScoreSummary,
    link_terms,
    solved_thresholds,
    summarize_scores,
    text_chunks,
)

LINKS = [
    ("cauchy", 0.01, 0.0), ("cauchy", 1.0, 0.0), ("cauchy", 10.0, 0.0),
    *(("gaussian", scale, 0.0) for scale in (1.0, 2.0, 2.5, 3.0, 4.0)),
    *(("gaussian", scale, 0.56) for scale in (0.5, 0.8, 1.2)),
]  # fmt: skip


@torch.no_grad()
def least_divergence(facts: ScoreSummary, family: str, sum_to_one: bool) -> float:
    """Mean over positions of the least KL(softmax || normalised OvR) on a grid of scales, and of thresholds.

    sum_to_one: at each scale the threshold is the one at which the probabilities sum to 1.
    """
    loc = torch.cat([facts.top, facts.tail_locations().expand(len(facts), -1)], dim=-1)
    weight = torch.cat([torch.ones_like(facts.top), facts.counts], dim=-1)
    wanted = (loc + weight.log()).log_softmax(-1)
    entropy = -(wanted.exp() * (wanted - weight.log()).nan_to_num(neginf=0.0, posinf=0.0, nan=0.0)).sum(-1)
    best = torch.full_like(entropy, torch.inf)
    law = get_family(family)
    fixed = [torch.full_like(facts.target, c) for c in torch.arange(-40.0, 12.0, 0.25).tolist()]
    for scale in torch.logspace(-6, 1.5, 46).tolist():
        tried = [solved_thresholds(facts, slice(None), scale, 0.0, law)] if sum_to_one else fixed
        for thresholds in tried:
            own = torch.full_like(loc[:, :1], scale)
            log_p, _ = ovr_log_probs(loc, own, thresholds[:, None], family=family)
            cost = (log_p + weight.log()).logsumexp(-1) - (wanted.exp() * log_p).sum(-1) - entropy
            best = torch.minimum(best, cost.nan_to_num(nan=torch.inf))
    return best.mean().item()


def main() -> None:
    model = CausalQwenForCausalLM.from_backbone("smollm2-135m")
    chunks = text_chunks(model, speeches(HELD_OUT_YEARS))[::3]
    facts = summarize_scores(model, chunks)
    facts.scale = torch.zeros_like(facts.scale)
    right = facts.target >= facts.top[:, 0]
    for size, factor in (("49k", 1.0), ("152k", 151_665 / 49_152)):
        softmax_nll = -facts.target + torch.log1p((factor - 1) * (1 - facts.top.exp().sum(-1)).clamp(min=0))
        facts.counts *= factor
        print(f"vocabulary of {size}, {len(facts)} positions")
        print(f"{'family':10}{'scale':>8}{'slope':>8}{'NLL gap':>10}{'ECE':>8}{'log P':>12}")
        for family, scale, slope in LINKS:
            law = get_family(family)
            thresholds = solved_thresholds(facts, slice(None), scale, slope, law)
            log_p, log_sum = link_terms(facts, slice(None), thresholds, scale, slope, law)
            own = torch.full((len(facts), 1), scale)
            top, _ = ovr_log_probs(facts.top[:, :1], own, thresholds[:, None], family=family, slope=slope)
            gap = (log_sum - log_p - softmax_nll).mean().item()
            error, _ = calibration_error(top.squeeze(1).exp(), right)
            far = ovr_log_probs(torch.tensor([-30.0]), torch.tensor([scale]), family=family, slope=slope)[0].item()
            print(f"{family:10}{scale:8.2f}{slope:8.2f}{gap:10.3f}{error:8.3f}{far:12.1f}", flush=True)
        few = ScoreSummary(**{k: v if k == "mass" else v[::8] for k, v in vars(facts).items()})
        for family in ("cauchy", "gaussian"):
            free, bound = (least_divergence(few, family, sum_to_one) for sum_to_one in (False, True))
            print(f"least divergence, {family}: {free:.3f} nats, with the sum at 1 {bound:.3f}", flush=True)


if __name__ == "__main__":
    main()
