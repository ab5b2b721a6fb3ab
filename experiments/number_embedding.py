"""Numbers added to the embedding, or multiplied into the features behind the backbone: which can be read? (20 minutes)

The molar mass stands in the prompt, the boiling point is asked: "Molar mass 92.14, boiling point", or, where the number comes
last, "Boiling point behind the molar mass: 92.14". Stage 1 alone, so that the frozen backbone reads `<NUM>` as it starts; 320
compounds to learn from, 160 held out, three seeds of the direction w. Beside it the median of the training values, for whom the
mass does not count.

    .venv/bin/python experiments/number_embedding.py
"""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from chemicals.identifiers import search_chemical

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import Row, encode_rows
from causalqwen.data.boiling_points import boiling_points
from causalqwen.data.splits import split_by_entity
from causalqwen.training import TrainSettings, ValueStage, train

SEEDS = (0, 1, 2)
PROMPTS = {"before": "Molar mass {:.2f}, boiling point", "last": "Boiling point behind the molar mass: {:.2f}"}
"""By where the number stands."""


def rows(records: list[dict[str, Any]], prompt: str) -> list[Row]:
    """A prompt per compound."""
    prompts = [prompt.format(search_chemical(record["name"]).MW) for record in records]
    made = zip(prompts, records, strict=True)
    return [Row("prompt", "x", {"prompt": prompt, "value": record["kelvin"]}) for prompt, record in made]


def main() -> None:
    torch.set_num_threads(1)
    parts = split_by_entity(boiling_points(), {"train": 320, "test": 160})
    kelvins = {name: torch.tensor([record["kelvin"] for record in part]) for name, part in parts.items()}
    constant = (kelvins["test"] - kelvins["train"].median()).abs().median().item()
    print(f"the median of all: median error {constant:.1f} K", flush=True)
    print(f"{'form, number':20}   median error, K (seeds)        CRPS, K (seeds)")
    for form, place in itertools.product(("added", "features"), PROMPTS):
        errors, scores = [], []
        for seed in SEEDS:
            torch.manual_seed(seed)
            model = CausalQwenForCausalLM.from_backbone(
                "smollm2-135m", dtype=torch.float32, number_embedding=form, number_context="value"
            )
            examples = {name: encode_rows(rows(part, PROMPTS[place]), model.processor) for name, part in parts.items()}
            settings = TrainSettings(seed=seed, values=ValueStage(epochs=60), recalibrate=False, evaluations=1)
            with tempfile.TemporaryDirectory() as folder:
                found = train(model, examples["train"], examples["test"], Path(folder) / "run", settings)
            errors.append(found["median_error"])
            scores.append(found["quantile_crps"])
        shown = ["  ".join(f"{x:6.1f}" for x in column) for column in (errors, scores)]
        print(f"{form + ', ' + place:20}   {shown[0]:30} {shown[1]}", flush=True)


if __name__ == "__main__":
    main()
