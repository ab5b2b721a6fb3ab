"""The demo: boiling points from sentences, on a real language model, in minutes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from causalqwen.data import encode_rows, read_rows
from causalqwen.data.boiling_points import PROMPT, SIZES, boiling_points, write_sentences
from causalqwen.data.splits import split_by_entity
from causalqwen.data.texts import speech_paragraphs
from causalqwen.evaluation.evaluate import evaluate, write_metrics
from causalqwen.evaluation.page import example_rows, write_page
from causalqwen.evaluation.plots import value_figures
from causalqwen.evaluation.quick import OBSERVED, OPENINGS, clear_model, other_world, people
from causalqwen.modeling import DEFAULT_BACKBONE, CausalQwenForCausalLM
from causalqwen.modeling.backbones import resolve_device
from causalqwen.modeling.grafting import compare_with_backbone, prove
from causalqwen.training import train


def run_demo(
    output: Path, backbone: str = DEFAULT_BACKBONE, say: Callable[[str], None] = lambda message: None
) -> dict[str, Any]:
    """Graft, train, score, generate, report; everything lies under `output`, the page at `report.html`.

    What is drawn at the start follows from a fixed seed. The model of an earlier demo is replaced; its kept features are used
    again where they still fit.
    """
    started, output = time.perf_counter(), Path(output)
    say("1/6 boiling points: sentences, split by compound")
    records, rows = split_by_entity(boiling_points(), SIZES), {}
    for name, part in records.items():
        write_sentences(output / "data" / f"{name}.jsonl", part)
        rows[name] = read_rows(output / "data" / f"{name}.jsonl")

    say(f"2/6 grafting {backbone}")
    torch.manual_seed(0)
    model = CausalQwenForCausalLM.from_backbone(backbone, quiet=True).to(resolve_device("auto"))
    examples = {name: encode_rows(part, model.processor) for name, part in rows.items()}
    paragraphs = speech_paragraphs(numbers=False)[:24]
    proof = prove(model, paragraphs)

    say("3/6 learning numbers (the sentences are read once, which takes longest)")
    folder = output / "model"
    clear_model(folder)
    train(model, [*examples["train"], *examples["validation"]], [], folder, say=say)

    say("4/6 scoring held-out compounds, and the rivals on the same split")
    known = {f"{part}_examples": examples[part] for part in ("train", "validation")}
    result = evaluate(model, examples["test"], folder / "work", **known)
    metrics = result["metrics"]
    before = {name: getattr(proof, name) for name in ("tokens", "identical_logits", "agreement")}
    metrics["language"] = {"before": before, "after": compare_with_backbone(model, paragraphs)}

    say("5/6 three people, and what one would have said")
    shown: dict[str, Any] = {"people": people(model), "openings": OPENINGS}
    shown |= {"world": other_world(model), "observed": " ".join(OBSERVED)}

    say("6/6 the report")
    metrics["seconds"] = time.perf_counter() - started
    write_metrics(output / "metrics.json", metrics)
    shown |= {"backbone": backbone, "sizes": {name: len(part) for name, part in rows.items()}}
    shown |= value_figures(result["law"], result["values"], "K")
    shown["examples"] = example_rows(model, result["prompts"], result["values"])
    facts = [f"{proof}.", *_facts(metrics)]
    write_page(output / "report.html", "demo.html", facts=facts, metrics=metrics, **shown)
    example = records["test"][0]
    (found,) = model.predict_number(PROMPT.format(**example))
    say(f"for example, {example['name']} (observed {example['kelvin']} K): {found}")
    return metrics


def _facts(metrics: dict[str, Any]) -> list[str]:
    rivals = metrics["rivals"]
    best = min(rivals, key=lambda name: rivals[name]["quantile_crps"])
    before, after = (metrics["language"][key] for key in ("before", "after"))
    return [
        f"CRPS {metrics['quantile_crps']:.1f} K, median error {metrics['median_error']:.1f} K; the strongest rival, "
        f"{best.replace('_', ' ')}, has {rivals[best]['quantile_crps']:.1f} and {rivals[best]['median_error']:.1f}.",
        f"Text without numbers is untouched: on {after['tokens']:,} tokens of a speech, all logits equal the backbone's to "
        f"the last bit on {before['identical_logits']:,} positions before training and {after['identical_logits']:,} after; "
        f"the decision is the backbone's on {after['agreement']:.2%}.",
        f"<NUM> is announced with precision {metrics['num_precision']:.3f} and recall {metrics['num_recall']:.3f}.",
        f"All one-vs-rest probabilities of a position sum to {metrics['ovr_sum_median']:.2f} at the median of the held-out "
        "sentences.",
    ]


def summary(metrics: dict[str, Any]) -> str:
    """The figures of a demo as a few lines."""
    return "\n".join(f"  - {fact}" for fact in _facts(metrics))
