"""The quick demo: from a bare install to a number, three people and another world, in one to three minutes.

It is made of what everybody calls: graft, train, predict, generate, abduct. `evaluation.demo` is the whole of it, with scores.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch

from causalqwen.data import encode_rows, read_rows
from causalqwen.data.boiling_points import PROMPT, sample_of_boiling_points, sentence, write_sentences
from causalqwen.data.splits import split_by_entity
from causalqwen.data.texts import speech_paragraphs
from causalqwen.decoding import CausalDecoding
from causalqwen.modeling import DEFAULT_BACKBONE, CausalQwenForCausalLM, Intervention, NumberPrediction, Observation
from causalqwen.modeling.backbones import resolve_device
from causalqwen.modeling.grafting import prove
from causalqwen.modeling.prediction import describe
from causalqwen.numbers.law import LEVELS
from causalqwen.numbers.rendering import brief
from causalqwen.training import METRICS, train

SIZES = {"train": 500, "validation": 100}
ASKED: dict[str, Any] = {"name": "toluene", "formula": "C7H8", "kelvin": 383.78}
"""A compound of the whole table that is not in the sample."""

OPENINGS = ("When I was a child, my grandmother", "The best thing about a small town is")
"""Prompts on which a small model speaks sensibly."""

OBSERVED = ("My friends, we have come a long way together.", "My friends, let us go on.")
SAID = Observation(" and we shall not turn back now.", prompt="We have come a long way,")
EDITED = "They have come a long way,"
"""What a speaker said before, what is asked about, and the prompt in whose place another one is put."""


def people(
    model: CausalQwenForCausalLM, openings: Sequence[str] = OPENINGS, max_new_tokens: int = 32
) -> list[dict[str, Any]]:
    """Whom the seeds 1, 2 and 3 draw (`persona`): `seed`, and `texts`, how they went on from each prompt."""
    seeds, texts = [1, 2, 3], []
    for opening in openings:
        plan = CausalDecoding.preset("persona", seed=seeds)
        inputs = model.processor([opening] * len(seeds), prompt=True, return_tensors="pt").to(model.device)
        made = model.generate(**inputs, max_new_tokens=max_new_tokens, causal_decoding=plan)
        written = model.processor.batch_decode(made.sequences, made.numeric_values, skip_special_tokens=True)
        texts.append([" ".join(text[len(opening) :].split()) for text in written])
    return [{"seed": seed, "texts": of_seed} for seed, *of_seed in zip(seeds, *texts, strict=True)]


def other_world(model: CausalQwenForCausalLM) -> dict[str, str]:
    """`said` after `prompt` (`SAID`), and what its speaker, inferred from `OBSERVED`, would have said: `unchanged` with nothing
    changed, `edited` after `edited_prompt`. The noise that explains the text is kept: nothing changed gives it back."""
    speaker = model.abduct(list(OBSERVED), name="the speaker")
    edits = [Intervention(), Intervention(prompt=EDITED)]
    (unchanged,), (edited,) = model.counterfactual_samples(SAID, edits, individual=speaker)
    made = {"unchanged": unchanged.text, "edited_prompt": EDITED, "edited": edited.text}
    return {"prompt": SAID.prompt, "said": SAID.text} | made


def sketch(prediction: NumberPrediction, width: int = 60) -> str:
    """A line of text that shows how probable each of `width` equal pieces of the 90% interval is; below them its ends, and the
    median at its place.

    Probabilities are the model's own law's (`NumberPrediction.cdf`); the interval is recalibrated where levels were fitted.
    """
    heights = " ▁▂▃▄▅▆▇█"
    low, high = prediction.interval(0.9)
    masses = [after - before for before, after in pairwise(map(prediction.cdf, np.linspace(low, high, width + 1)))]
    most = max(masses) or 1.0
    bars = "".join(heights[round(mass / most * (len(heights) - 1))] for mass in masses)
    ends, middle = (brief(low), brief(high)), f"^ {brief(prediction.median)}"
    place = round((prediction.median - low) / ((high - low) or 1.0) * (width - 1))
    place = min(max(place, len(ends[0]) + 1), width - len(ends[1]) - len(middle) - 1)
    scale = ends[0].ljust(place) + middle
    return f"{bars}\n{scale.ljust(width - len(ends[1]))}{ends[1]}"


def in_intervals(prediction: NumberPrediction, *, raw: bool = False) -> str:
    """The central intervals at `LEVELS` in words: "Intervals: 50% 84 to 85, ..."."""
    ends = (f"{level:.0%} {' to '.join(map(brief, prediction.interval(level, raw=raw)))}" for level in LEVELS)
    return f"Intervals: {', '.join(ends)}"


def quick_demo(
    output: Path, backbone: str = DEFAULT_BACKBONE, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Graft, learn one kind of number from a few hundred sentences that come along, and ask; `tell` gets each part
    as it is done. The data and the model lie under `output`; the model of an earlier demo there is replaced.

    Returns:
        proof, prediction (`describe`), people, world, and the seconds that each part took.
    """
    output, clock = Path(output), time.perf_counter()
    seconds: dict[str, float] = {}

    def took(part: str, title: str, *lines: str) -> None:
        nonlocal clock
        seconds[part], clock = time.perf_counter() - clock, time.perf_counter()
        tell(_part(title, *lines))

    torch.manual_seed(0)
    model = CausalQwenForCausalLM.from_backbone(backbone, quiet=True).to(resolve_device("auto"))
    proof = prove(model, speech_paragraphs(numbers=False)[:2])
    took("graft", "1. The graft", f"{proof}.")
    number, lines = _learn_a_number(model, output)
    took("number", "2. A number, and how sure the model is of it", *lines)
    persons = people(model, openings=OPENINGS[:1])
    went_on = (f"{person['seed']}. ... {person['texts'][0]} ..." for person in persons)
    took("people", "3. Three people", f"Each is drawn once, and goes on from: {OPENINGS[0]} ...", *went_on)
    world = other_world(model)
    same = "the same words" if world["unchanged"] == world["said"] else "{prompt}{unchanged}".format(**world)
    lines = [
        f"Somebody who said {' '.join(OBSERVED)!r} says:",
        "{prompt}{said}".format(**world),
        f"With nothing changed, and the noise kept that explains it: {same}",
        "With another beginning, and all else kept: {edited_prompt}{edited}".format(**world),
    ]
    took("counterfactual", "4. What would have been said", *lines)
    lines = [
        f"causalqwen generate --model {output / 'model'} --preset persona --seed 4 --prompt 'The old man'",
        "causalqwen demo: all of this learned from more, and scored (pip install 'causalqwen[demo]')",
        "causalqwen fit: numbers from a table of your own (pip install 'causalqwen[tables]')",
        f"This took {sum(seconds.values()):.0f} seconds. The model is in {output / 'model'}. To see it in a browser:",
        f"causalqwen explore --model {output / 'model'}",
    ]
    tell(_part("Where to look next", *lines))
    return {"proof": asdict(proof)} | number | {"people": persons, "world": world, "seconds": seconds}


def _learn_a_number(model: CausalQwenForCausalLM, output: Path) -> tuple[dict[str, Any], list[str]]:
    """The prediction and the median error of a model that has just learned boiling points, and lines that tell them."""
    parts, rows = split_by_entity(sample_of_boiling_points(), SIZES), {}
    for name, part in parts.items():
        write_sentences(output / "data" / f"{name}.jsonl", part)
        rows[name] = encode_rows(read_rows(output / "data" / f"{name}.jsonl"), model.processor)
    clear_model(output / "model")
    metrics = train(model, rows["train"], rows["validation"], output / "model")
    asked = PROMPT.format(**ASKED)
    (prediction,) = model.predict_number(asked)
    described = {"prompt": asked} | describe(prediction, ASKED["kelvin"])
    return {"prediction": described, "median_error": metrics["median_error"]}, [
        f"Learned just now from {len(rows['train'])} sentences such as: {sentence(parts['train'][0])}",
        f"{asked} {brief(prediction.median)} K. {in_intervals(prediction)}. It is {brief(ASKED['kelvin'])} K.",
        *sketch(prediction).splitlines(),
        f"On {len(rows['validation'])} compounds that were held out half of its medians miss by less than "
        f"{metrics['median_error']:.0f} K.",
    ]


def clear_model(folder: Path) -> None:
    """Make room for another training where there was one; its kept features stay, to be used where they still fit."""
    for stale in ("config.json", METRICS, "work/settings.json"):
        (folder / stale).unlink(missing_ok=True)
    shutil.rmtree(folder / "work" / "values", ignore_errors=True)


def _part(title: str, *lines: str) -> str:
    """Lines are wrapped, but for pictures and for what is to be copied."""
    wrapped = (
        f"   {line}"
        if line.startswith((" ", "causalqwen generate", "causalqwen explore"))
        else fill(line, 100, initial_indent="   ", subsequent_indent="     ")
        for line in lines
    )
    return "\n".join([title, *wrapped, ""])
