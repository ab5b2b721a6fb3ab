"""Value, digits, or both: what should the context hold of a number, before a frozen backbone? (reading: 2 minutes)

Reading: mean nats of the backbone's softmax on the token right after a number and on all tokens that are no part of one, in a
speech of 2012 and in boiling-point sentences. No training. Copying: questions whose context holds the answer, 400 to learn
from and 100 held out, stage 1 alone; beside it the lowest CRPS of a forecast that does not read the context. With `--choose`
the context holds two or three numbers; with `--copy` a number may be one of them (`copy_numbers`). "exact" is the share of
held-out answers with a relative error below 1e-4.

    .venv/bin/python experiments/number_context.py reading
    .venv/bin/python experiments/number_context.py copying --epochs 30
    .venv/bin/python experiments/number_context.py copying --choose --copy
"""

import argparse
import tempfile
from pathlib import Path

import torch
from tqdm.auto import tqdm

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import Row, encode_rows
from causalqwen.data.boiling_points import boiling_points, sentence
from causalqwen.data.splits import split_by_entity
from causalqwen.data.synthetic import BEST_CRPS, choices, questions
from causalqwen.data.texts import speech_paragraphs
from causalqwen.numbers import find_numbers
from causalqwen.training import TrainSettings, ValueStage, train

CONTEXTS = ("value", "digits", "both")


def grafted(context: str, copy: bool = False) -> CausalQwenForCausalLM:
    """The default backbone; w is drawn from the same seed for all."""
    torch.manual_seed(0)
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


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("reading", "copying"))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--train-rows", type=int, default=400)
    parser.add_argument("--test-rows", type=int, default=100)
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=CONTEXTS)
    parser.add_argument("--choose", action="store_true", help="two or three numbers in the context")
    parser.add_argument("--copy", action="store_true", help="a number may be one of the context")
    given = parser.parse_args()
    if given.part == "reading":
        reading()
    else:
        copying(given)


if __name__ == "__main__":
    main()
