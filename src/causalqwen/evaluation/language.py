"""What a graft leaves of a backbone's language, and what its one-vs-rest probabilities mean."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from causalqwen.decoding import BoundDecoding, CausalDecoding
from causalqwen.distributions import upcast
from causalqwen.evaluation.texts import (
    individual_resemblance,
    opening_words,
    perplexity_ratios,
    text_curves,
)
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.chain import Chain
from causalqwen.training import text_chunks

BINS = 15
SUM_RANGE = (0.8, 1.25)


# ---- probabilities ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def score_language(model: CausalQwenForCausalLM, text: str) -> dict[str, Any]:
    """Decisions and probabilities on plain text, as the backbone reads it (numbers are digits).

    Returns:
        tokens, agreement (with the backbone's argmax), accuracy and backbone_accuracy; backbone_nll, softmax_nll (loc_S with
        `<NUM>`'s score) and ovr_nll (P_k over their sum), mean nats; ece, the expected calibration error of the chosen
        token's P over 15 bins, and backbone_ece of its softmax; sum_quantiles (5, 25, 50, 75, 95%) of sum_k P_k and
        sum_within, its share within 0.8 to 1.25; and `reliability`, for a picture: per link, mean
        probability, share that came true, and count of each bin.
    """
    was_training = model.training
    model.eval()
    chunks = text_chunks(model, text)
    total, done = sum(len(ids) - 1 for ids in chunks), 0
    # Filled, not gathered: small results that stay would pin the memory of the large ones around them.
    column: dict[str, Tensor] = {}
    words = model.vocabulary()
    for ids in tqdm(chunks, desc="scoring the language", unit="chunk", leave=False):
        ids = ids.to(model.device)
        hidden = model.features(ids[None]).last_hidden_state[0, :-1]
        theirs = model.backbone(input_ids=ids[None]).logits[0, :-1]
        for part in zip(hidden.split(128), theirs.split(128), ids[1:].split(128), strict=True):
            for name, tensor in _score_positions(Chain(model, part[0], words=words), *part[1:]).items():
                whole = column.setdefault(name, torch.empty(total, dtype=tensor.dtype))
                whole[done : done + len(tensor)] = tensor
            done += len(part[0])
    model.train(was_training)
    right, log_sum = column["right"], column["ovr_log_sum"]
    (ece, reliable), (low, high) = calibration_error(column["ovr_top"], right), map(math.log, SUM_RANGE)
    result: dict[str, Any] = {
        "tokens": len(right),
        "agreement": column["agrees"].double().mean().item(),
        "accuracy": right.double().mean().item(),
        "backbone_accuracy": column["backbone_right"].double().mean().item(),
        "backbone_nll": column["backbone_nll"].double().mean().item(),
        "softmax_nll": column["softmax_nll"].double().mean().item(),
        "ovr_nll": (log_sum - column["ovr_log_p"]).double().mean().item(),
        "ece": ece,
        "sum_within": ((log_sum > low) & (log_sum < high)).double().mean().item(),
        "sum_quantiles": torch.quantile(
            column["ovr_log_sum"].exp(), torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
        ).tolist(),
    }
    result["nll_gap"] = result["ovr_nll"] - result["backbone_nll"]
    result["backbone_ece"], bins = calibration_error(column["backbone_top"], column["backbone_right"])
    reliability = {"backbone": bins, "ovr": reliable}
    return result | {"reliability": reliability}


def _score_positions(chain: Chain, theirs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    theirs, target = upcast(theirs), targets[:, None]
    scores, choice, backbone_choice = chain.scores, chain.scores.decide(), theirs.argmax(-1)
    log_partition = theirs.logsumexp(-1)
    logits = scores.masked(upcast(scores.loc), -torch.inf)
    made = {
        "agrees": choice == backbone_choice,
        "right": choice == target.squeeze(-1),
        "backbone_right": backbone_choice == target.squeeze(-1),
        "backbone_nll": log_partition - theirs.gather(-1, target).squeeze(-1),
        "softmax_nll": logits.logsumexp(-1) - logits.gather(-1, target).squeeze(-1),
        "backbone_top": (theirs.amax(-1) - log_partition).exp(),
    }
    log_p = scores.masked(scores.log_p()[0], -torch.inf)
    made["ovr_log_p"] = log_p.gather(-1, target).squeeze(-1)
    made["ovr_log_sum"] = log_p.exp().sum(-1).log()
    made["ovr_top"] = log_p.gather(-1, choice[:, None]).squeeze(-1).exp()
    return made


def calibration_error(probability: Tensor, right: Tensor) -> tuple[float, list[list[float]]]:
    """Expected calibration error over 15 equal bins (Naeini et al. 2015), and each bin's mean p, share right, and count."""
    index = (probability * BINS).long().clamp(max=BINS - 1)
    bins = []
    for place in range(BINS):
        inside = index == place
        if bool(inside.any()):
            bins.append([probability[inside].mean().item(), right[inside].double().mean().item(), inside.sum().item()])
    return sum(count * abs(p - share) for p, share, count in bins) / len(probability), bins


@torch.no_grad()
def choice_diversity(
    model: CausalQwenForCausalLM, text: str, *, positions: int = 300, draws: int = 400, seed: int = 0
) -> dict[str, float]:
    """How `sample` chooses, against softmax sampling.

    Returns:
        total_variation: between `draws` choices and the softmax, mean over `positions` places of the text;
        sampling_error: the same for as many softmax samples, which no sampler can undercut on average.
    """
    generator = torch.Generator().manual_seed(seed)
    chunks = text_chunks(model, text)
    chosen = torch.randperm(len(chunks), generator=generator)[: max(1, positions // 4)].tolist()
    features = []
    for ids in (chunks[index].to(model.device) for index in chosen):
        z = model.features(ids[None]).last_hidden_state[0, :-1]
        features.append(
            z[torch.randperm(len(z), generator=generator)[: math.ceil(positions / len(chosen))].to(z.device)]
        )
    z = torch.cat(features)[:positions]
    words, distances, errors = model.vocabulary(), [], []
    for place, features in enumerate(z):
        features = features.to(model.abduction.loc_net.weight.dtype).expand(draws, 1, -1)
        plain = Chain(model, features[:1], words=words).scores
        p = plain.masked(upcast(plain.loc), -torch.inf)[0, 0].softmax(-1).cpu()
        plan = CausalDecoding.preset("sample", seed=10**9 + seed * 10**7 + place * draws)
        bound = BoundDecoding.bind(plan, draws, model.config.causal_size, z.device, copies=draws)
        drawn = bound.at(torch.zeros(draws, 1, dtype=torch.int64, device=z.device))
        picks = Chain(model, features, drawn, words).ranked()[:, 0].argmax(-1).cpu()
        distances.append((torch.bincount(picks, minlength=len(p)) / draws - p).abs().sum().item() / 2)
        picked = torch.multinomial(p, draws, replacement=True, generator=generator)
        errors.append((torch.bincount(picked, minlength=len(p)) / draws - p).abs().sum().item() / 2)
    return {"total_variation": float(np.mean(distances)), "sampling_error": float(np.mean(errors))}


def evaluate_language(
    model: CausalQwenForCausalLM,
    text: str,
    *,
    texts: int = 24,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All of the above on one text, and `evaluation.texts`; `texts`: how many prompts to continue, 0 for none."""
    say("decisions and probabilities")
    metrics = score_language(model, text)
    say("choices of the preset sample")
    metrics["sample"] = choice_diversity(model, text, seed=seed)
    if texts:
        say("texts: perplexity against diversity")
        prompts = opening_words(text, texts)
        metrics["curves"] = text_curves(model, prompts, seed=seed, say=say)
        metrics["perplexity_at_equal_diversity"] = perplexity_ratios(metrics["curves"])
        if len(prompts) > 1:
            say("texts of the same individual")
            metrics["resemblance"] = {
                preset: individual_resemblance(model, prompts[:12], preset=preset, seed=seed) for preset in ("persona",)
            }
    return metrics


def language_facts(metrics: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    m, drawn = metrics, metrics["sample"]
    facts = [
        f"On {m['tokens']:,} tokens the decision is the backbone's on {m['agreement']:.2%}; accuracy {m['accuracy']:.2%} "
        f"against {m['backbone_accuracy']:.2%}, softmax NLL {m['softmax_nll']:.4f} against {m['backbone_nll']:.4f} nats.",
        f"Normalised one-vs-rest NLL less the backbone's: {m['nll_gap']:+.4f} nats; the probabilities sum to 0.8 to 1.25 on "
        f"{m['sum_within']:.1%}; calibration error of the chosen token {m['ece']:.4f} (the backbone's softmax: "
        f"{m['backbone_ece']:.4f}).",
        f"sample: total variation {drawn['total_variation']:.3f} to the softmax; as many softmax samples have "
        f"{drawn['sampling_error']:.3f} themselves.",
    ]
    for sampler, ratio in m.get("perplexity_at_equal_diversity", {}).items():
        if sampler != "top-p":
            at, along = (f"{r:.2f}" if r else "not to be had" for r in (ratio["at"], ratio["along"]))
            facts.append(
                f"{sampler}: perplexity over that of top-p at equal distinct-2: {at} at p = 0.9, {along} along the curve."
            )
    for preset, test in m.get("resemblance", {}).items():
        facts.append(
            f"{preset}: texts of one individual resemble each other by {test['difference']:.4f} more than those of different "
            f"ones (null: 0 with a standard deviation of {test['null_std']:.4f}; p = {test['p_value']:.4f})."
        )
    return facts
