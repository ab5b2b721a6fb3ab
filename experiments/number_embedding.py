"""Numbers added to or multiplied into the embedding: which can be read? (10 minutes)

The molar mass stands in the prompt, the boiling point is asked: "Molar mass 92.14, boiling point". Stage 1 alone, so that the
frozen backbone reads `<NUM>` as it starts; 320 compounds to learn from, 160 held out, three seeds of the direction w, of length
0.2 and 1. Beside it prompts without the mass, and the median of the training values.

    .venv/bin/python experiments/number_embedding.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from chemicals.identifiers import search_chemical

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import Row, encode_rows
from causalqwen.data.boiling_points import boiling_points, split_by_compound
from causalqwen.training import TrainSettings, ValueStage, train

FORMS = [
    ("added", 0.2, True),
    ("multiplied", 0.2, True),
    ("added", 1.0, True),
    ("multiplied", 1.0, True),
    ("added", 0.2, False),
]
SEEDS = (0, 1, 2)


def rows(records: list[dict[str, Any]], with_mass: bool) -> list[Row]:
    """A prompt per compound."""
    masses = [search_chemical(record["name"]).MW for record in records]
    prompts = [f"Molar mass {mass:.2f}, boiling point" if with_mass else "Boiling point" for mass in masses]
    made = zip(prompts, records, strict=True)
    return [Row("prompt", "x", {"prompt": prompt, "value": record["kelvin"]}) for prompt, record in made]


def main() -> None:
    torch.set_num_threads(1)
    parts = split_by_compound(boiling_points(), {"train": 320, "test": 160})
    kelvins = {name: torch.tensor([record["kelvin"] for record in part]) for name, part in parts.items()}
    constant = (kelvins["test"] - kelvins["train"].median()).abs().median().item()
    print(f"the median of all: median error {constant:.1f} K", flush=True)
    print(f"{'form':12}{'|w|':>5}{'mass':>6}   median error, K (seeds)        CRPS, K (seeds)")
    for form, length, with_mass in FORMS:
        errors, scores = [], []
        for seed in SEEDS if with_mass else SEEDS[:1]:
            torch.manual_seed(seed)
            model = CausalQwenForCausalLM.from_backbone(
                "smollm2-135m", dtype=torch.float32, number_embedding=form, initial_direction=length
            )
            examples = {name: encode_rows(rows(part, with_mass), model.processor) for name, part in parts.items()}
            settings = TrainSettings(seed=seed, values=ValueStage(epochs=60), recalibrate=False, evaluations=1)
            with tempfile.TemporaryDirectory() as folder:
                found = train(model, examples["train"], examples["test"], Path(folder) / "run", settings)
            errors.append(found["median_error"])
            scores.append(found["quantile_crps"])
        shown = ["  ".join(f"{x:6.1f}" for x in column) for column in (errors, scores)]
        print(f"{form:12}{length:5.1f}{'yes' if with_mass else 'no':>6}   {shown[0]:30} {shown[1]}", flush=True)


if __name__ == "__main__":
    main()
