"""What a graft leaves of a backbone's language, what its one-vs-rest probabilities mean, and how individuals write: fluency
against diversity per sampler, and whether texts of one individual resemble each other."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from causalqwen.decoding import BoundDecoding, CausalDecoding, Individual
from causalqwen.distributions import upcast
from causalqwen.extras import extra
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.chain import Chain
from causalqwen.training import text_chunks

with extra("evaluate", "scoring texts"):
    from sacrebleu.metrics import BLEU
    from sklearn.feature_extraction.text import TfidfVectorizer

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
    log_sum, tops = column.pop("log_sum"), {link: column.pop(f"{link}_top") for link in ("ovr", "backbone")}
    result: dict[str, Any] = {"tokens": total, "reliability": {}}
    result |= {name: whole.double().mean().item() for name, whole in column.items()}
    result["nll_gap"] = result["ovr_nll"] - result["backbone_nll"]
    low, high = map(math.log, SUM_RANGE)
    result["sum_within"] = ((log_sum > low) & (log_sum < high)).double().mean().item()
    result["sum_quantiles"] = torch.quantile(log_sum.exp(), torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])).tolist()
    for link, ece, accuracy in (("ovr", "ece", "accuracy"), ("backbone", "backbone_ece", "backbone_accuracy")):
        result[ece], result["reliability"][link] = calibration_error(tops[link], column[accuracy])
    return result


def _score_positions(chain: Chain, theirs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    theirs, target = upcast(theirs), targets[:, None]
    scores, choice, backbone_choice = chain.scores, chain.scores.decide(), theirs.argmax(-1)
    log_partition = theirs.logsumexp(-1)
    logits = scores.masked(upcast(scores.loc), -torch.inf)
    log_p = scores.masked(scores.log_p()[0], -torch.inf)
    log_sum = log_p.exp().sum(-1).log()
    return {
        "agreement": choice == backbone_choice,
        "accuracy": choice == targets,
        "backbone_accuracy": backbone_choice == targets,
        "backbone_nll": log_partition - theirs.gather(-1, target).squeeze(-1),
        "softmax_nll": logits.logsumexp(-1) - logits.gather(-1, target).squeeze(-1),
        "ovr_nll": log_sum - log_p.gather(-1, target).squeeze(-1),
        "log_sum": log_sum,
        "ovr_top": log_p.gather(-1, choice[:, None]).squeeze(-1).exp(),
        "backbone_top": (theirs.amax(-1) - log_partition).exp(),
    }


def calibration_error(probability: Tensor, right: Tensor) -> tuple[float, list[list[float]]]:
    """Expected calibration error over 15 equal bins (Naeini et al. 2015), and each bin's mean p, share right, and count."""
    index = (probability * BINS).long().clamp(max=BINS - 1)
    bins = []
    for place in index.unique():
        inside = index == place
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
        picks = Chain(model, features, drawn, words).decision_scores()[:, 0].argmax(-1).cpu()
        distances.append((torch.bincount(picks, minlength=len(p)) / draws - p).abs().sum().item() / 2)
        picked = torch.multinomial(p, draws, replacement=True, generator=generator)
        errors.append((torch.bincount(picked, minlength=len(p)) / draws - p).abs().sum().item() / 2)
    return {"total_variation": float(np.mean(distances)), "sampling_error": float(np.mean(errors))}


# ---- texts -----------------------------------------------------------------------------------------------------------


SWEEP: dict[str, list[dict[str, Any]]] = {
    "top-p": [{"top_p": p} for p in (0.5, 0.7, 0.8, 0.9, 0.95)],
    "temperature": [{"temperature": t} for t in (0.5, 0.7, 0.85, 1.0)],
    "sample": [{"temperature": t} for t in (0.5, 0.7, 0.85, 1.0)],
    "persona": [{"temperature": t} for t in (0.5, 0.7, 0.85, 1.0)],
}
"""What is compared: transformers' two usual samplers, and the two presets that draw all noise, each over its own dial."""

_PERMUTATIONS = 2000  # of individuals, under which nobody differs


def text_curves(
    model: CausalQwenForCausalLM,
    prompts: Sequence[str],
    *,
    new_tokens: int = 40,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Texts from each sampler and setting: fluency (`perplexity`, the backbone's) against diversity.

    distinct_1, distinct_2: different words and pairs of words over all of them, over all texts; self_bleu: mean BLEU of each
    text against the others (lower is more diverse). The same prompts and seeds for all.
    """
    points = []
    seeds = [seed * 1000 + row for row in range(len(prompts))]
    for name, setting in ((name, setting) for name, settings in SWEEP.items() for setting in settings):
        if name in ("top-p", "temperature"):
            plan = CausalDecoding.preset("softmax", seed=seed, temperature=setting.get("temperature", 1.0))
            texts = _write(model, prompts, plan, new_tokens, top_k=0, top_p=setting.get("top_p", 1.0))
        else:
            texts = _write(model, prompts, CausalDecoding.preset(name, seed=seeds, **setting), new_tokens)
        point = {"sampler": name, **setting, **score_texts(model, prompts, texts)}
        say(f"{name} {setting}: perplexity {point['perplexity']:.2f}, distinct-2 {point['distinct_2']:.3f}")
        points.append(point)
    return points


def _write(
    model: CausalQwenForCausalLM, prompts: Sequence[str], plan: CausalDecoding, new_tokens: int, **settings: Any
) -> list[str]:
    """One continuation per prompt, without the prompt; no text ends early."""
    inputs = model.processor(list(prompts), prompt=True, padding=True, padding_side="left", return_tensors="pt")
    settings |= {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "causal_decoding": plan}
    made, start = model.generate(**inputs.to(model.device), **settings), inputs["input_ids"].shape[1]
    return model.processor.batch_decode(
        made.sequences[:, start:], made.numeric_values[:, start:], skip_special_tokens=True
    )


def score_texts(model: CausalQwenForCausalLM, prompts: Sequence[str], texts: Sequence[str]) -> dict[str, float]:
    """perplexity, distinct_1, distinct_2 and self_bleu of continuations."""
    bleu, similar = BLEU(effective_order=True), [0.0]
    if len(texts) > 1:
        others = ([*texts[:at], *texts[at + 1 :]] for at in range(len(texts)))
        similar = [bleu.sentence_score(*pair).score / 100 for pair in zip(texts, others, strict=True)]

    def distinct(size: int) -> float:
        lines = [text.split() for text in texts]
        grams = [tuple(line[i : i + size]) for line in lines for i in range(len(line) - size + 1)]
        return len(set(grams)) / max(len(grams), 1)

    return {
        "perplexity": backbone_perplexity(model, prompts, texts),
        "distinct_1": distinct(1),
        "distinct_2": distinct(2),
        "self_bleu": float(np.mean(similar)),
    }


@torch.no_grad()
def backbone_perplexity(model: CausalQwenForCausalLM, prompts: Sequence[str], texts: Sequence[str]) -> float:
    """exp of the backbone's mean nats per token of the texts, each after its prompt."""
    tokenizer = model.processor.tokenizer
    total, count = 0.0, 0
    for prompt, text in zip(prompts, texts, strict=True):
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        ids = torch.tensor([tokenizer(prompt + text, add_special_tokens=False)["input_ids"]], device=model.device)
        log_p = upcast(model.backbone(input_ids=ids).logits[0, start - 1 : -1]).log_softmax(-1)
        total -= log_p.gather(-1, ids[0, start:, None]).sum().item()
        count += ids.shape[1] - start
    return math.exp(total / max(count, 1))


def perplexity_ratios(points: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Perplexities of each sampler over top-p's at equal distinct-2, interpolated in log perplexity along the curves.

    Returns, per sampler, `at`: its curve where top-p stands at p = 0.9, and `along`: the geometric mean over its points of
    their perplexity over top-p's curve; None where the curves do not overlap there.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    for p in points:
        curves.setdefault(p["sampler"], []).append((p["distinct_2"], math.log(p["perplexity"])))
    (anchor,) = [p for p in points if p["sampler"] == "top-p" and p["top_p"] == 0.9]

    def gaps(curve: list[tuple[float, float]], others: list[tuple[float, float]]) -> list[float]:
        """How far a curve lies above each point that it passes, in log perplexity."""
        along, heights = np.array(sorted(curve)).T
        passed = [(at, height) for at, height in others if along[0] <= at <= along[-1]]
        return [float(np.interp(at, along, heights)) - height for at, height in passed]

    def ratio(differences: list[float]) -> float | None:
        return math.exp(float(np.mean(differences))) if differences else None

    at = [(anchor["distinct_2"], math.log(anchor["perplexity"]))]
    return {
        sampler: {
            "at": ratio(gaps(curve, at)),
            "along": ratio([-gap for gap in gaps(curves["top-p"], sorted(curve))]),
        }
        for sampler, curve in curves.items()
    }


def individual_resemblance(
    model: CausalQwenForCausalLM,
    prompts: Sequence[str],
    *,
    setting: dict[str, Any] | None = None,
    individuals: int = 16,
    new_tokens: int = 40,
    seed: int = 0,
) -> dict[str, float]:
    """Do texts of one individual, on different prompts, resemble each other more than those of different individuals?

    Every individual continues every prompt. Resemblance is the cosine of character 2-4-gram tf-idf vectors.

    Returns:
        difference: mean resemblance of two texts on different prompts by the same individual, less that by different ones;
        null_std and p_value: its spread, and how often it is as large, when individuals are exchanged at random within each
        prompt (the null: who speaks makes no difference).
    """
    if len(prompts) < 2 or individuals < 2:
        raise ValueError("resemblance needs two prompts and two individuals")
    seeds = [seed * 1000 + person for person in range(individuals)]
    texts = []
    for place, prompt in enumerate(prompts):
        # The noise of a persona is fresh for each text; the individual is held by its seed.
        people = [Individual.from_seed(s, model.config.causal_size) for s in seeds]
        noises = [10**6 + s + 100 * place for s in seeds]
        plan = CausalDecoding.preset("persona", individual=people, seed=noises, **(setting or {}))
        texts += _write(model, [prompt] * individuals, plan, new_tokens)
    vectors = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True).fit_transform(texts)
    cosine = (vectors @ vectors.T).toarray().reshape(len(prompts), individuals, len(prompts), individuals)
    pairs = [(a, b, cosine[a, :, b] - cosine[a, :, b].mean()) for a, b in combinations(range(len(prompts)), 2)]

    def gap(order: np.ndarray) -> float:
        same = np.mean([pair[order[a], order[b]].mean() for a, b, pair in pairs])
        return float(same * individuals / (individuals - 1))  # same less different: each pair's mean is 0

    generator = np.random.default_rng(seed)
    difference = gap(np.tile(np.arange(individuals), (len(prompts), 1)))
    null = [gap(np.stack([generator.permutation(individuals) for _ in prompts])) for _ in range(_PERMUTATIONS)]
    return {
        "difference": difference,
        "null_std": float(np.std(null)),
        "p_value": (1 + sum(value >= difference for value in null)) / (1 + _PERMUTATIONS),
    }


def opening_words(text: str, count: int, words: int = 12) -> list[str]:
    """Prompts of one length: the first words of up to `count` paragraphs, spread over the text.

    A text without long paragraphs is cut into pieces of 30 words instead.
    """
    paragraphs = [line.split() for line in text.splitlines() if len(line.split()) > 2 * words]
    if len(paragraphs) < 2:
        flow = text.split()
        paragraphs = [flow[start : start + 30] for start in range(0, len(flow), 30)]
    step = max(1, len(paragraphs) // count)
    return [" ".join(paragraph[:words]) for paragraph in paragraphs[::step][:count]]


# ---- all of it -------------------------------------------------------------------------------------------------------


def evaluate_language(
    model: CausalQwenForCausalLM,
    text: str,
    *,
    texts: int = 24,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All of the above on one text; `texts`: how many prompts to continue, 0 for none."""
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
            metrics["resemblance"] = {"persona": individual_resemblance(model, prompts[:12], seed=seed)}
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
