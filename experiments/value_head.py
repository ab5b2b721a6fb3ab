"""What makes the value branch learn? (about 10 minutes)

Boiling points, 3,600 compounds to train, 700 to choose by, 900 held out; one thing is changed at a time. Median error and
CRPS (199 quantiles) in kelvin, mean log density, and the raw coverage of the 90% interval, one seed.

    .venv/bin/python experiments/value_head.py
"""

import dataclasses
import shutil
import tempfile
from pathlib import Path

import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import encode_rows, read_rows
from causalqwen.data.boiling_points import boiling_points, split_by_compound, write_sentences
from causalqwen.evaluation.demo import SIZES
from causalqwen.training import FactStore, TrainSettings, ValueStage, score_tokens, train

KEPT = Path("runs/experiments")
VARIANTS = {
    "as shipped": ({}, {}, {}),
    "features not standardized": ({}, {"standardize": False}, {}),
    "one hidden layer": ({"value_branch_layers": 1}, {}, {}),
    "symlog": ({}, {}, {"value_transform": "symlog"}),
    "no value branch": ({"value_branch": False}, {}, {}),
}


def main() -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    parts = split_by_compound(boiling_points(), SIZES)
    for name, records in parts.items():
        write_sentences(KEPT / f"{name}.jsonl", records)
    print(f"{'':28}{'median error':>14}{'CRPS':>14}{'log score':>16}{'inside 90%':>12}")
    for title, (config, stage, settings) in VARIANTS.items():
        torch.manual_seed(0)
        model = CausalQwenForCausalLM.from_backbone("smollm2-135m", **config)
        with torch.no_grad():  # one direction of numbers for all, so that the kept features serve every run
            model.numeric_embedding.direction.zero_()
        rows = {n: encode_rows(read_rows(KEPT / f"{n}.jsonl"), model.processor) for n in parts}
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            # Kept features do not depend on what is varied here: every run starts from the same folder of them.
            work = Path(folder) / "work"
            (KEPT / "features").mkdir(exist_ok=True)
            work.mkdir()
            for kept in (KEPT / "features").iterdir():
                (work / kept.name).symlink_to(kept.resolve())
            values = dataclasses.replace(ValueStage(), **stage)
            chosen = TrainSettings(values=values, **settings)
            train(model, rows["train"], rows["validation"], Path(folder), chosen)
            scores = score_tokens(model, FactStore.build(model, rows["test"], work).blocks())["metrics"]
            for made in work.glob("features-*"):
                if not made.is_symlink():
                    shutil.move(made, KEPT / "features" / made.name)
        cells = [scores[key] for key in ("median_error", "quantile_crps", "log_score")]
        inside = scores["coverage_raw"]["0.9"]
        print(f"{title:28}{cells[0]:>14.1f}{cells[1]:>14.1f}{cells[2]:>16.2f}{inside:>12.1%}", flush=True)


if __name__ == "__main__":
    main()
