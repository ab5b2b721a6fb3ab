"""Training runs that test_ranks compares: started by torchrun on two ranks, and called in the test's own process as one.

torchrun --nproc-per-node 2 ranks_worker.py MODEL OUTPUT
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch

from causalqwen.data import encode_rows, parse_row
from causalqwen.modeling.loading import load_model
from causalqwen.training import FactStore, HeadStage, LoraStage, TrainSettings, ValueStage, ranks, train
from causalqwen.training.trainer import TrainedForCausalLM

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

# 43 rows by 7: the second rank has no row of the last batch; and an accumulated batch is cut short.
CASES = {
    "values": TrainSettings(values=ValueStage(epochs=8, batch_size=7), logging_steps=1, evaluations=3),
    "individuals": TrainSettings(values=ValueStage(epochs=1, batch_size=5), logging_steps=1, evaluations=1),
    "classes": TrainSettings(
        values=ValueStage(epochs=1, batch_size=9), class_transforms=True, logging_steps=1, evaluations=1
    ),
    "heads": TrainSettings(
        values=None,
        heads=HeadStage(epochs=1, batch_size=7, accumulation=2, negatives=100, learning_rate=1e-3),
        logging_steps=1,
        evaluations=2,
    ),
    "lora": TrainSettings(
        values=None,
        lora=LoraStage(1, 7, 2, learning_rate=1e-3, dropout=0.0, whole_vocabulary=True, anchor=0.1),
        logging_steps=1,
        evaluations=2,
    ),
}


def sentences(count: int, seed: int) -> list[str]:
    """Texts of unequal lengths with none to three numbers."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for index in range(count):
        a, b = torch.randint(10, (2,), generator=generator).tolist()
        kinds = (
            f"The {WORDS[a]} of {WORDS[b]} is {100 * a + b + 0.5} in all.",
            f"From {a} to {b}, we count {10 * a} more.",
            f"No {WORDS[a]} without {WORDS[b]}.",
        )
        texts.append(kinds[index % 3])
    return texts


def examples(model, count: int, seed: int, people: bool = False, classes: bool = False):
    """Rows of `sentences`; with `people`, some of somebody's; with `classes`, those with one number apart from the others."""
    rows = []
    for index, text in enumerate(sentences(count, seed)):
        fields = {"text": text} | ({"individual": WORDS[index % 9]} if people and index % 4 else {})
        fields |= {"class": "some" if index % 3 else "one"} if classes else {}
        rows.append(parse_row(json.dumps(fields), "x"))
    return encode_rows(rows, model.processor)


def run_case(name: str, folder: Path, output: Path, *, fsdp: bool = False) -> None:
    """Train a fresh model as the case says, into `output`."""
    model = load_model(folder, "cpu")
    classes = name == "classes"
    rows = (
        examples(model, 43, 0, name == "individuals", classes),
        examples(model, 360 if classes else 13, 1, classes=classes),
    )
    settings = dataclasses.replace(CASES[name], fsdp=fsdp)
    if settings.lora is not None:
        settings = dataclasses.replace(
            settings, lora=dataclasses.replace(settings.lora, anchor_text=str(folder / "anchor.txt"))
        )
    train(model, *rows, output, settings)


def main(folder: Path, output: Path) -> None:
    """Every case with copies and with FSDP2, and what else takes two ranks to see, into `output/found-<rank>.json`."""
    for name in CASES:
        run_case(name, folder, output / f"{name}-ddp")
        run_case(name, folder, output / f"{name}-fsdp", fsdp=True)
    model = load_model(folder, "cpu")
    FactStore.build(model, examples(model, 43, 0), output / "facts")

    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trained = TrainedForCausalLM(model)
    spread = ranks.sharded(trained)
    held = sum(getattr(p, "_local_tensor", p).numel() for p in spread.parameters())
    left = sum(p.numel() for p in model.parameters() if p.dim())
    ranks.restore(trained, spread)
    found = {
        "parameters": sum(p.numel() for p in before.values()),
        "held": held,
        "left": left,
        "restored": all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters()),
    }
    other = load_model(folder, "cpu")
    with torch.no_grad():
        other.numeric_embedding.direction += ranks.rank()
    refused = {
        "start": lambda: train(other, examples(model, 43, 0), [], output / "refused"),
        "batch": lambda: train(model, [], [], output / "refused", TrainSettings(values=ValueStage(batch_size=1))),
        "dtypes": lambda: ranks.sharded(TrainedForCausalLM(load_model(folder, "cpu", torch.bfloat16))),
    }
    for name, refuse in refused.items():
        try:
            refuse()
        except ValueError as error:
            found[name] = str(error)
    (output / f"found-{ranks.rank()}.json").write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
