"""How individuals write: fluency against diversity per sampler, and whether texts of one individual resemble each other."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from causalqwen.decoding import CausalDecoding, Individual
from causalqwen.distributions import upcast
from causalqwen.extras import extra
from causalqwen.modeling import CausalQwenForCausalLM

with extra("evaluate", "scoring texts"):
    from sacrebleu.metrics import BLEU
    from sklearn.feature_extraction.text import TfidfVectorizer

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
    for name, settings in SWEEP.items():
        for setting in settings:
            texts = continue_texts(model, prompts, name, setting, new_tokens=new_tokens, seed=seed)
            point = {"sampler": name, **setting, **score_texts(model, prompts, texts)}
            say(f"{name} {setting}: perplexity {point['perplexity']:.2f}, distinct-2 {point['distinct_2']:.3f}")
            points.append(point)
    return points


def continue_texts(
    model: CausalQwenForCausalLM,
    prompts: Sequence[str],
    sampler: str,
    setting: dict[str, Any],
    *,
    new_tokens: int,
    seed: int | Sequence[int],
) -> list[str]:
    """One continuation per prompt, without the prompt; no text ends early. Presets use a seed per row."""
    inputs = model.processor(list(prompts), prompt=True, padding=True, padding_side="left", return_tensors="pt").to(
        model.device
    )
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    if sampler in ("top-p", "temperature"):
        plan = CausalDecoding.preset("softmax", seed=seed, temperature=setting.get("temperature", 1.0))
        settings |= {"top_k": 0, "top_p": setting.get("top_p", 1.0)}
    else:
        seeds = seed if not isinstance(seed, int) else [seed * 1000 + row for row in range(len(prompts))]
        plan = CausalDecoding.preset(sampler, seed=seeds, **setting)
    made = model.generate(**inputs, **settings, causal_decoding=plan)
    start = inputs["input_ids"].shape[1]
    return model.processor.batch_decode(
        made.sequences[:, start:], made.numeric_values[:, start:], skip_special_tokens=True
    )


def score_texts(model: CausalQwenForCausalLM, prompts: Sequence[str], texts: Sequence[str]) -> dict[str, float]:
    """perplexity, distinct_1, distinct_2 and self_bleu of continuations."""
    words = [text.split() for text in texts]
    bleu = BLEU(effective_order=True)
    similar = []
    for index, text in enumerate(texts if len(texts) > 1 else []):
        others = [other for place, other in enumerate(texts) if place != index]
        similar.append(bleu.sentence_score(text, others).score / 100)

    def distinct(size: int) -> float:
        grams = [tuple(line[i : i + size]) for line in words for i in range(len(line) - size + 1)]
        return len(set(grams)) / max(len(grams), 1)

    return {
        "perplexity": backbone_perplexity(model, prompts, texts),
        "distinct_1": distinct(1),
        "distinct_2": distinct(2),
        "self_bleu": float(np.mean(similar)) if similar else 0.0,
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


def perplexity_ratios(
    points: Sequence[dict[str, Any]], rival: tuple[str, str, float] = ("top-p", "top_p", 0.9)
) -> dict[str, dict[str, float | None]]:
    """Perplexities of each sampler over the rival's at equal distinct-2, interpolated in log perplexity along the curves.

    Returns, per sampler, `at`: its curve where the rival's own setting stands, and `along`: the geometric mean over its
    points of their perplexity over the rival's curve; None where the curves do not overlap there.
    """
    name, dial, setting = rival
    curves = {
        sampler: sorted((p["distinct_2"], math.log(p["perplexity"])) for p in points if p["sampler"] == sampler)
        for sampler in dict.fromkeys(p["sampler"] for p in points)
    }
    (anchor,) = [p for p in points if p["sampler"] == name and p.get(dial) == setting]

    def gap(curve: list[tuple[float, float]], diversity: float, fluency: float) -> float | None:
        """How far a curve lies above a point, in log perplexity; None where it does not pass it."""
        if not curve[0][0] <= diversity <= curve[-1][0]:
            return None
        along, heights = np.array(curve).T
        return float(np.interp(diversity, along, heights)) - fluency

    ratios: dict[str, dict[str, float | None]] = {}
    for sampler, curve in curves.items():
        at = gap(curve, anchor["distinct_2"], math.log(anchor["perplexity"]))
        along = [g for g in (gap(curves[name], *point) for point in curve) if g is not None]
        ratios[sampler] = {
            "at": None if at is None else math.exp(at),
            "along": math.exp(-float(np.mean(along))) if along else None,
        }
    return ratios


def individual_resemblance(
    model: CausalQwenForCausalLM,
    prompts: Sequence[str],
    *,
    preset: str = "persona",
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
        plan = CausalDecoding.preset(preset, individual=people, seed=noises, **(setting or {}))
        inputs = model.processor([prompt] * individuals, prompt=True, return_tensors="pt").to(model.device)
        made = model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, causal_decoding=plan)
        start = inputs["input_ids"].shape[1]
        texts += model.processor.batch_decode(
            made.sequences[:, start:], made.numeric_values[:, start:], skip_special_tokens=True
        )
    vectors = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True).fit_transform(texts)
    cosine = (vectors @ vectors.T).toarray().reshape(len(prompts), individuals, len(prompts), individuals)
    pairs = [
        cosine[a, :, b, :] - cosine[a, :, b, :].mean() for a in range(len(prompts)) for b in range(a + 1, len(prompts))
    ]
    first = [a for a in range(len(prompts)) for _ in range(a + 1, len(prompts))]
    second = [b for a in range(len(prompts)) for b in range(a + 1, len(prompts))]

    def gap(order: np.ndarray) -> float:
        same = np.mean([pair[order[a], order[b]].mean() for pair, a, b in zip(pairs, first, second, strict=True)])
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
