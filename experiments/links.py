"""What does one-vs-rest cost against a softmax, by family and by how scales grow? (about 2 minutes)

Held-out speeches; at every position the threshold is the one at which the probabilities sum to 1. Normalised NLL less the
backbone's, and the calibration error of the largest probability.

    .venv/bin/python experiments/links.py
"""

import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.data.texts import HELD_OUT_YEARS, speeches
from causalqwen.distributions import get_family
from causalqwen.evaluation.language import calibration_error
from causalqwen.losses import ovr_log_probs
from causalqwen.training.calibration import ScoreSummary, link_terms, summarize_scores, text_chunks

LINKS = [
    ("cauchy", 0.01, 0.0), ("cauchy", 1.0, 0.0), ("cauchy", 10.0, 0.0),
    *(("gaussian", scale, 0.0) for scale in (1.0, 2.0, 2.5, 3.0, 4.0)),
    *(("gaussian", scale, 0.56) for scale in (0.5, 0.8, 1.2)),
]  # fmt: skip


@torch.no_grad()
def solve(facts: ScoreSummary, scale: float, slope: float, family: str) -> torch.Tensor:
    """Thresholds, less the log-partition, by halving."""
    law = get_family(family)
    low, high = (
        torch.full_like(facts.target, -60.0),
        torch.full_like(facts.target, 60.0 + 6e4 * scale * (family == "cauchy")),
    )
    for _ in range(60):
        middle = (low + high) / 2
        above = link_terms(facts, slice(None), middle, scale, slope, law)[1] > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return middle


def main() -> None:
    model = CausalQwenForCausalLM.from_backbone("smollm2-135m")
    chunks = text_chunks(model, speeches(HELD_OUT_YEARS))[::3]
    facts = summarize_scores(model, chunks)
    facts.scale = torch.zeros_like(facts.scale)
    right = facts.target >= facts.top[:, 0]
    print(f"{len(facts)} positions\n{'family':10}{'scale':>8}{'slope':>8}{'NLL gap':>10}{'ECE':>8}")
    for family, scale, slope in LINKS:
        law, thresholds = get_family(family), solve(facts, scale, slope, family)
        log_p, log_sum = link_terms(facts, slice(None), thresholds, scale, slope, law)
        own = torch.full((len(facts), 1), scale)
        top, _ = ovr_log_probs(facts.top[:, :1], own, thresholds[:, None], family=family, slope=slope)
        gap = (log_sum - log_p + facts.target).mean().item()
        error, _ = calibration_error(top.squeeze(1).exp(), right)
        print(f"{family:10}{scale:8.2f}{slope:8.2f}{gap:10.3f}{error:8.3f}", flush=True)


if __name__ == "__main__":
    main()
