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
from causalqwen.evaluation.figures import training_curves
from causalqwen.evaluation.people import HEARD, OPENINGS, other_world, people
from causalqwen.evaluation.quick import clear_model
from causalqwen.evaluation.report import (
    example_rows,
    read_records,
    table_rows,
    value_figures,
    write_report,
)
from causalqwen.modeling import DEFAULT_BACKBONE, CausalQwenForCausalLM
from causalqwen.modeling.backbones import resolve_device
from causalqwen.modeling.grafting import compare_with_backbone, prove
from causalqwen.training import METRICS, TrainSettings, train


def run_demo(
    output: Path,
    backbone: str = DEFAULT_BACKBONE,
    sizes: dict[str, int] | None = None,
    settings: TrainSettings | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Graft, train, score, generate, report; everything lies under `output`, the page at `report.html`.

    What is drawn at the start follows from a fixed seed. The model of an earlier demo is replaced; its kept features are used
    again where they still fit.
    """
    started = time.perf_counter()
    output = Path(output)
    (output / "data").mkdir(parents=True, exist_ok=True)
    say("1/6 boiling points: sentences, split by compound")
    records = split_by_entity(boiling_points(), sizes or SIZES)
    for name, part in records.items():
        write_sentences(output / "data" / f"{name}.jsonl", part)
    rows = {name: read_rows(output / "data" / f"{name}.jsonl") for name in records}

    say(f"2/6 grafting {backbone}")
    torch.manual_seed(0)
    model = CausalQwenForCausalLM.from_backbone(backbone, quiet=True).to(resolve_device("auto"))
    examples = {name: encode_rows(part, model.processor) for name, part in rows.items()}
    paragraphs = speech_paragraphs(numbers=False)[:24]
    proof = prove(model, paragraphs)
    before = {name: getattr(proof, name) for name in ("tokens", "identical_logits", "agreement")}

    say("3/6 training the value branch and <NUM> (the backbone's features are computed once, which takes longest)")
    folder = output / "model"
    clear_model(folder)
    train(model, examples["train"], examples["validation"], folder, settings, say=say)

    say("4/6 scoring held-out compounds, and the rivals on the same split")
    after = compare_with_backbone(model, paragraphs)
    result = evaluate(
        model,
        examples["test"],
        folder / "work",
        train_examples=examples["train"],
        validation_examples=examples["validation"],
    )
    metrics = result["metrics"]
    metrics["language"] = {"before": before, "after": after}

    say("5/6 three people, and what one would have said")
    persons, world = people(model), other_world(model)

    say("6/6 the report")
    metrics["seconds"] = time.perf_counter() - started
    write_metrics(output / "metrics.json", metrics)
    write_report(
        output / "report.html",
        title="Boiling points, read and written by a language model",
        lead=f"{backbone} with a number channel and an individual grafted onto it, trained on "
        f"{len(rows['train']):,} sentences; every figure below is from {len(rows['test'])} compounds it never saw.",
        facts=[f"{proof}.", *_facts(metrics)],
        rows=table_rows(metrics),
        table_note="Errors and CRPS in kelvin, lower is better; CRPS from 199 quantiles with one clip for all; log score "
        "is the mean log density, higher is better. Intervals of the model are recalibrated on validation rows, as those "
        f"of the rivals are; raw, they cover {_percent(metrics['coverage_raw'])}.",
        examples=example_rows(model, result["prompts"], result["values"]),
        examples_note="Twelve held-out compounds, taken at random.",
        calibration_note="A Cauchy law has heavy tails: raw, its 50% interval covers too little and its 90% one too much.",
        curves=training_curves(read_records(folder / METRICS)),
        numbers_use="Good for a number that a sentence asks for, where it matters how sure the answer is: a median to act on, "
        "and an interval that holds as often as it says.",
        people=persons,
        openings=OPENINGS,
        people_note="Each row is one person: a point drawn once from the law of who could be speaking, by the seed, and held "
        "for both texts, while noise is drawn anew at every token (`persona`). "
        "Good for varied texts out of one law, which can also be averaged over; not for a character with a biography.",
        world=world,
        heard=" ".join(HEARD),
        world_note="The speaker is inferred from what they were heard saying, and then the noise that makes them say just the "
        "observed words. With both kept, nothing changed gives the words back, and another beginning changes what follows from "
        "it. Good for asking what one cause did to one text, where sampling again would change everything at once.",
        footer=f"Made by `causalqwen demo` in {metrics['seconds'] / 60:.1f} minutes.",
        **value_figures(result["law"], result["values"], "K"),
    )
    example = records["test"][0]
    water = model.predict_number(PROMPT.format(name=example["name"], formula=example["formula"]))[0]
    say(f"for example, {example['name']} (observed {example['kelvin']} K): {water}")
    return metrics


def _percent(coverage: dict[str, float]) -> str:
    return ", ".join(f"{100 * share:.0f}% at {float(level):.0%}" for level, share in coverage.items())


def _facts(metrics: dict[str, Any]) -> list[str]:
    rivals = metrics["rivals"]
    gain = 1 - metrics["quantile_crps"] / rivals["constant_cauchy"]["quantile_crps"]
    before, after = (metrics["language"][key] for key in ("before", "after"))
    return [
        f"CRPS {metrics['quantile_crps']:.1f} K, {gain:.0%} below one Cauchy for all; median error "
        f"{metrics['median_error']:.1f} K against {rivals['ridge']['median_error']:.1f} K for ridge on the same features.",
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
