"""Which stable law of values, Gauss's or Cauchy's? (10 minutes)

.venv/bin/python experiments/value_families.py --seeds 0 1

Boiling points behind prompts, on the frozen features of the default backbone; 320 compounds to learn from, 80 to choose the
state by, 240 held out, a line per law. Likelihood and CRPS of the same rows under each law; intervals are the law's own,
without recalibration.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import Row, encode_rows
from causalqwen.data.boiling_points import PROMPT, boiling_points
from causalqwen.data.splits import split_by_entity
from causalqwen.training import FactStore, TrainSettings, ValueStage, score_tokens
from causalqwen.training.run import learn
from causalqwen.training.stages import WORK

FAMILIES = ("gaussian", "cauchy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--facts", type=Path, help="folder where what is read stays")
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = split_by_entity(boiling_points(), {"train": 320, "validation": 80, "test": 240})
    columns = ("median_error", "quantile_crps", "log_score", "0.5", "0.9")
    print(f"{'law':12}" + "".join(f"{name:>26}" for name in columns), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        facts = given.facts or root / "facts"
        for family in FAMILIES:
            found: dict[str, list[float]] = {name: [] for name in columns}
            for seed in given.seeds:
                torch.manual_seed(0)  # one graft, whose features are read once
                model = CausalQwenForCausalLM.from_backbone("smollm2-135m", dtype=torch.float32, value_family=family)
                torch.manual_seed(seed)
                model.value_branch.residual.reset_parameters()
                rows = {
                    name: [
                        Row("prompt", "x", {"prompt": PROMPT.format(**record), "value": record["kelvin"]})
                        for record in part
                    ]
                    for name, part in parts.items()
                }
                examples = {name: encode_rows(part, model.processor) for name, part in rows.items()}
                work = root / f"{family}-{seed}" / WORK
                work.mkdir(parents=True)
                for part in examples.values():
                    FactStore.build(model, part, facts)
                for kept in facts.resolve().glob("features-*"):
                    (work / kept.name).symlink_to(kept)
                stage = ValueStage(epochs=20, center=True)
                settings = TrainSettings(seed=seed, values=stage, recalibrate=False, evaluations=10)
                learn(model, examples["train"], examples["validation"], work.parent, settings)
                store = FactStore.build(model, examples["test"], work)
                scores = score_tokens(model, store.blocks())["metrics"]
                scores |= scores["coverage_raw"]
                for name in columns:
                    found[name].append(scores[name])
            shown = ("  ".join(f"{value:.3f}" for value in found[name]) for name in columns)
            print(f"{family:12}" + "".join(f"{column:>26}" for column in shown), flush=True)


if __name__ == "__main__":
    main()
