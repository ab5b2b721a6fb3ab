"""The quick demo: from a bare install to a number, three people and another world, in about a minute.

It is made of what everybody calls: graft, train, predict, generate, abduct. `evaluation.demo` is the whole of it, with scores.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from causalqwen.data import encode_rows, read_rows
from causalqwen.data.boiling_points import PROMPT, sample_of_boiling_points, sentence, write_sentences
from causalqwen.data.splits import split_by_entity
from causalqwen.data.texts import speech_paragraphs
from causalqwen.evaluation.people import HEARD, OPENINGS, other_world, people
from causalqwen.evaluation.sketch import sketch
from causalqwen.modeling import DEFAULT_BACKBONE, CausalQwenForCausalLM
from causalqwen.modeling.backbones import resolve_device
from causalqwen.modeling.grafting import prove
from causalqwen.modeling.prediction import describe
from causalqwen.numbers.law import LEVELS
from causalqwen.numbers.rendering import brief
from causalqwen.training import METRICS, TrainSettings, ValueStage, train

SIZES = {"train": 500, "validation": 100}
SETTINGS = TrainSettings(values=ValueStage(epochs=25, batch_size=16))
ASKED: dict[str, Any] = {"name": "toluene", "formula": "C7H8", "kelvin": 383.78}
"""A compound of the whole table that is not in the sample."""


def quick_demo(
    output: Path,
    backbone: str = DEFAULT_BACKBONE,
    sizes: dict[str, int] | None = None,
    settings: TrainSettings = SETTINGS,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Graft, learn one kind of number from a few hundred sentences that come along, and ask; `tell` gets each part
    as it is done. The data and the model lie under `output`; the model of an earlier demo there is replaced.

    Returns:
        proof, prediction (`describe`), people, world, and the seconds that each part took.
    """
    output, clock = Path(output), time.perf_counter()
    folder, seconds = output / "model", {}

    def took(part: str) -> None:
        nonlocal clock
        seconds[part], clock = time.perf_counter() - clock, time.perf_counter()

    torch.manual_seed(0)
    model = CausalQwenForCausalLM.from_backbone(backbone, quiet=True).to(resolve_device("auto"))
    proof = prove(model, speech_paragraphs(numbers=False)[:2])
    took("graft")
    tell(_part("1. The graft", f"{proof}."))

    parts = split_by_entity(sample_of_boiling_points(), sizes or SIZES)
    for name, part in parts.items():
        write_sentences(output / "data" / f"{name}.jsonl", part)
    rows = {name: encode_rows(read_rows(output / "data" / f"{name}.jsonl"), model.processor) for name in parts}
    clear_model(folder)
    metrics = train(model, rows["train"], rows["validation"], folder, settings)
    asked = PROMPT.format(**ASKED)
    (prediction,) = model.predict_number(asked)
    took("number")
    known = sentence(parts["train"][0])
    intervals = ", ".join(f"{level:.0%} {' to '.join(map(brief, prediction.interval(level)))}" for level in LEVELS)
    tell(
        _part(
            "2. A number, and how sure the model is of it",
            f"Learned just now from {len(rows['train'])} sentences such as: {known}",
            f"{asked} {brief(prediction.median)} K. Intervals: {intervals}. It is {brief(ASKED['kelvin'])} K.",
            *sketch(prediction).splitlines(),
            f"On {len(rows['validation'])} compounds that were held out half of its medians miss by less than "
            f"{metrics['median_error']:.0f} K.",
        )
    )

    persons = people(model, openings=OPENINGS[:1])
    took("people")
    tell(
        _part(
            "3. Three people",
            f"Each is drawn once, and goes on from: {OPENINGS[0]} ...",
            *(f"{person.seed}. ... {person.texts[0]} ..." for person in persons),
        )
    )

    world = other_world(model)
    took("counterfactual")
    same = "the same words" if world.unchanged == world.said else f"{world.prompt}{world.unchanged}"
    tell(
        _part(
            "4. What would have been said",
            f"Somebody who was heard saying {' '.join(HEARD)!r} says:",
            f"{world.prompt}{world.said}",
            f"With nothing changed, and the noise kept that explains it: {same}",
            f"With another beginning, and all else kept: {world.edited_prompt}{world.edited}",
        )
    )
    tell(
        _part(
            "Where to look next",
            f"causalqwen generate --model {folder} --preset persona --seed 4 --prompt 'The old man'",
            "causalqwen demo: all of this learned from more, and scored (pip install 'causalqwen[demo]')",
            "causalqwen fit: numbers from a table of your own (pip install 'causalqwen[tables]')",
            f"This took {sum(seconds.values()):.0f} seconds. The model is in {folder}.",
        )
    )
    return {
        "proof": asdict(proof),
        "prediction": {"prompt": asked} | describe(prediction, ASKED["kelvin"]),
        "median_error": metrics["median_error"],
        "people": [asdict(person) for person in persons],
        "world": asdict(world),
        "seconds": seconds,
    }


def clear_model(folder: Path) -> None:
    """Make room for another training where there was one; its kept features stay, to be used where they still fit."""
    for stale in ("config.json", METRICS, "work/settings.json"):
        (folder / stale).unlink(missing_ok=True)
    for file in sorted((folder / "work").glob("values/**/*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def _part(title: str, *lines: str) -> str:
    """Lines are wrapped, but for pictures and for what is to be copied."""
    whole = (line.startswith((" ", "causalqwen generate")) for line in lines)
    told = (
        f"   {line}" if keep else fill(line, 100, initial_indent="   ", subsequent_indent="     ")
        for line, keep in zip(lines, whole, strict=True)
    )
    return "\n".join([title, *told, ""])
