"""Value, digits, or both: what should the context hold of a number, before a frozen backbone? (reading: 2 minutes)

Reading: mean nats of the backbone's softmax on the token right after a number and on all tokens that are no part of one, in a
speech of 2012 and in boiling-point sentences. No training. Copying: questions whose context holds the answer, 400 to learn
from and 100 held out, stage 1 alone; beside it the lowest CRPS of a forecast that does not read the context. With `--choose`
the context holds two or three numbers; with `--copy` a number may be one of them (`copy_numbers`). "exact" is the share of
held-out answers with a relative error below 1e-4.

Learning: two tasks in which numbers of the prompt tell the answer, 300 rows to learn from and 150 held out: twice a number,
and the votes for a film (their decimal logarithm) from its year, minutes, rating and budget. Stage 1 alone; from there LoRA
with the directions of numbers trained too; from there LoRA with those as they started. Beside it the training values as a
forecast for all. The backbone computes in bfloat16 (three quarters of an hour of one core).

    .venv/bin/python experiments/number_context.py reading
    .venv/bin/python experiments/number_context.py copying --epochs 30
    .venv/bin/python experiments/number_context.py copying --choose --copy
    .venv/bin/python experiments/number_context.py learning
"""

import argparse
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from benchmarks.numbers.tables import parts_of
from causalqwen import CausalQwenForCausalLM
from causalqwen.data import Row, encode_rows
from causalqwen.data.boiling_points import boiling_points, sentence
from causalqwen.data.splits import split_by_entity
from causalqwen.data.synthetic import BEST_CRPS, choices, questions
from causalqwen.data.texts import speech_paragraphs
from causalqwen.numbers import find_numbers
from causalqwen.training import LoraStage, TrainSettings, ValueStage, train

CONTEXTS = ("value", "digits", "both")


def grafted(context: str, copy: bool = False, seed: int = 0) -> CausalQwenForCausalLM:
    """The default backbone; w is drawn from the same seed for all."""
    torch.manual_seed(seed)
    settings = {"number_context": context, "copy_numbers": copy}
    return CausalQwenForCausalLM.from_backbone("smollm2-135m", dtype=torch.float32, **settings)


@torch.no_grad()
def nats(model: CausalQwenForCausalLM, text: str) -> tuple[list[float], list[float]]:
    """On each token right after a number, and on each token but the first that is no part of one."""
    inputs = model.processor(text, return_tensors="pt")
    ids, num = inputs["input_ids"][0].tolist(), model.config.num_token_id
    log_p = model(**inputs).logits[0, :, : model.config.text_config.vocab_size].log_softmax(-1)
    of_number = [token == num or digit for token, digit in zip(ids, inputs.digits[0], strict=True)]
    places = [place for place in range(1, len(ids)) if not of_number[place]]
    found = {place: -log_p[place - 1, ids[place]].item() for place in places}
    return [found[place] for place in places if of_number[place - 1]], list(found.values())


def reading() -> None:
    texts = {
        "speech": [p for p in speech_paragraphs(2012) if find_numbers(p)],
        "sentences": [sentence(r) for r in split_by_entity(boiling_points(), {"some": 60})["some"]],
    }
    print(f"{'context':10}" + "".join(f"{name + ', ' + of:>24}" for name in texts for of in ("after", "all words")))
    for context in CONTEXTS:
        model, shown = grafted(context), ""
        for part in texts.values():
            found = [nats(model, text) for text in tqdm(part, desc=context, leave=False)]
            for column in zip(*found, strict=True):
                flat = [x for row in column for x in row]
                shown += f"{sum(flat) / len(flat):17.3f} ({len(flat):4})"
        print(f"{context:10}{shown}", flush=True)


def copying(given: argparse.Namespace) -> None:
    make = choices if given.choose else questions
    made = {"train": make(given.train_rows, seed=0), "test": make(given.test_rows, seed=1)}
    rows = {name: [Row("question", "x", fields) for fields in part] for name, part in made.items()}
    print(f"{'context':10}{'median error':>14}{'CRPS':>10}{'exact':>10}    (without the context: CRPS {BEST_CRPS:.2f})")
    for context in given.contexts:
        model = grafted(context, given.copy)
        examples = {name: encode_rows(part, model.processor) for name, part in rows.items()}
        settings = TrainSettings(seed=0, values=ValueStage(epochs=given.epochs), recalibrate=False, evaluations=1)
        with tempfile.TemporaryDirectory() as folder:
            found = train(model, examples["train"], examples["test"], Path(folder) / "run", settings)
        told = model.predict_number([row.text(model.processor) for row in rows["test"]])
        exact = [abs(p.median - row.value) <= 1e-4 * abs(row.value) for p, row in zip(told, rows["test"], strict=True)]
        share = sum(exact) / len(exact)
        print(f"{context:10}{found['median_error']:14.3f}{found['quantile_crps']:10.3f}{share:10.1%}", flush=True)


def twice(given: argparse.Namespace) -> list[list[Row]]:
    """Rows to learn from, and held-out ones: "The price of the item is 42.5 dollars. Twice that is", 85."""
    parts = [questions(given.train_rows, seed=0), questions(given.test_rows, seed=1)]
    made = [[{"prompt": f"{r['context']} Twice that is", "value": 2 * r["answer"]} for r in part] for part in parts]
    return [[Row("prompt", "x", fields) for fields in part] for part in made]


def votes(given: argparse.Namespace) -> list[list[Row]]:
    """Films; a value is the decimal logarithm of the votes."""
    parts = parts_of("movies", (given.train_rows, 0, given.test_rows))
    made = [
        [{"prompt": r["prompt"], "value": round(math.log10(r["value"]), 3)} for r in parts[part]]
        for part in ("train", "test")
    ]
    return [[Row("prompt", "x", fields) for fields in part] for part in made]


TASKS = {"twice": twice, "votes": votes}


def learning(given: argparse.Namespace) -> None:
    stage_1 = TrainSettings(values=ValueStage(epochs=given.epochs), recalibrate=False, evaluations=1)
    arms = {"frozen": stage_1}
    for name, direction in (("lora, w too", True), ("lora alone", False)):
        lora = LoraStage(epochs=given.lora_epochs, batch_size=8, learning_rate=5e-4, direction=direction)
        arms[name] = replace(stage_1, values=None, lora=lora, value_transform="keep")
    for task in given.tasks:
        parts = TASKS[task](given)
        known, held_out = (torch.tensor([row.value for row in part], dtype=torch.float64) for part in parts)
        error = (held_out - known.median()).abs().median()
        crps = (held_out[:, None] - known).abs().mean() - (known[:, None] - known).abs().mean() / 2
        print(f"{task}: {len(known)} to learn from, {len(held_out)} held out")
        print(f"{'context':10}{'trained':14}{'seed':>5}{'median error':>14}{'CRPS':>10}{'CPU s':>10}")
        print(f"{'-':10}{'constant':14}{'-':>5}{error:14.4f}{crps:10.4f}", flush=True)
        for seed in given.seeds:
            for context in given.contexts:
                with tempfile.TemporaryDirectory() as folder:
                    for arm, settings in arms.items():
                        begun = time.process_time()
                        if arm == "frozen":
                            model = grafted(context, seed=seed)
                        else:
                            model = CausalQwenForCausalLM.from_pretrained(Path(folder) / "frozen")
                        examples = [encode_rows(part, model.processor) for part in parts]
                        found = train(model, *examples, Path(folder) / arm, replace(settings, seed=seed, bf16=True))
                        shown = f"{found['median_error']:14.4f}{found['quantile_crps']:10.4f}"
                        print(f"{context:10}{arm:14}{seed:5}{shown}{time.process_time() - begun:10.0f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("reading", "copying", "learning"))
    parser.add_argument("--epochs", type=int, default=30, help="of stage 1")
    parser.add_argument("--lora-epochs", type=int, default=3)
    parser.add_argument("--train-rows", type=int, help="400; 300 for learning")
    parser.add_argument("--test-rows", type=int, help="100; 150 for learning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of learning")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="of learning")
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=CONTEXTS)
    parser.add_argument("--choose", action="store_true", help="two or three numbers in the context")
    parser.add_argument("--copy", action="store_true", help="a number may be one of the context")
    given = parser.parse_args()
    rows = (300, 150) if given.part == "learning" else (400, 100)
    given.train_rows, given.test_rows = given.train_rows or rows[0], given.test_rows or rows[1]
    if given.part == "reading":
        reading()
    elif given.part == "copying":
        copying(given)
    else:
        learning(given)


if __name__ == "__main__":
    main()
