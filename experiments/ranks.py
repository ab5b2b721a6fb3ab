"""How far are two ranks from one, with copies of the model (DDP) and with its parameters spread (FSDP2)? (15 minutes)

    python experiments/ranks.py
    python experiments/ranks.py --stages lora --dtype float64

50 updates of each stage on SmolLM2-135M and boiling points, over gloo on this machine's CPU, dropout left out. The learning
rates are low: with batches of four rows and the ordinary ones, gradients leap, and differences of rounding grow tenfold
every ten updates; in float64 rounding is next to nothing. `halves` is the control: one process that accumulates two rows and
two, the same sums in another order.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import encode_rows, parse_row
from causalqwen.data.boiling_points import boiling_points, sentence
from causalqwen.training import HeadStage, LoraStage, TrainSettings, ValueStage, ranks, train
from causalqwen.training.trainer import TrainedForCausalLM

EVERY = {"logging_steps": 1, "evaluations": 1}
STAGES = {
    "values": TrainSettings(values=ValueStage(2, 4, learning_rate=1e-4), **EVERY),
    "heads": TrainSettings(values=None, heads=HeadStage(2, 4, learning_rate=1e-5), **EVERY),
    "lora": TrainSettings(values=None, lora=LoraStage(2, 4, learning_rate=1e-4, dropout=0.0), **EVERY),
}


def run(output: Path, stages: list[str], dtype: str, *, fsdp: bool = False, halves: bool = False) -> int:
    """The stages from the start, into folders of `output`; returns how many parameters this rank holds in the last one."""
    for name in stages:
        settings = STAGES[name]
        torch.manual_seed(0)  # the ranks start from one model
        settings_of_model = {"value_branch_dropout": 0.0, "number_context": "value"}
        model = CausalQwenForCausalLM.from_backbone("smollm2-135m", **settings_of_model).to(getattr(torch, dtype))
        texts = [sentence(record) for record in boiling_points()[::50][:100]]
        rows = encode_rows([parse_row(json.dumps({"text": text}), "row") for text in texts], model.processor)
        if halves:
            stage = dataclasses.replace(getattr(settings, name), batch_size=2, accumulation=2)
            settings = dataclasses.replace(settings, **{name: stage})
        train(model, rows, [], output / name, dataclasses.replace(settings, fsdp=fsdp))
    trained = TrainedForCausalLM(model)
    held = ranks.sharded(trained) if fsdp else trained
    return sum(getattr(p, "_local_tensor", p).numel() for p in held.parameters())


def losses(folder: Path) -> list[float]:
    """The loss of every update."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


def compare(stages: list[str], dtype: str) -> None:
    """Prints how far each way of training is from one process."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        parameters = run(root / "one", stages, dtype)
        print(
            f"{'stage':10}{'way':>8}{'updates':>9}{'first loss':>12}{'last loss':>12}{'largest difference':>20}",
            flush=True,
        )
        for way in ("halves", "ddp", "fsdp"):
            if way == "halves":
                run(root / way, stages, dtype, halves=True)
            else:
                command = [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node",
                    "2",
                    __file__,
                ]
                command += ["--stages", *stages, "--dtype", dtype, "--output", str(root / way), "--way", way]
                subprocess.run(command, check=True)
            for name in stages:
                one, two = losses(root / "one" / name), losses(root / way / name)
                difference = max(abs(a - b) for a, b in zip(one, two, strict=True))
                print(f"{name:10}{way:>8}{len(two):9}{two[0]:12.4f}{two[-1]:12.4f}{difference:20.1e}", flush=True)
            if way == "halves":
                continue
            held = json.loads((root / way / "held.json").read_text())
            print(f"parameters per rank under {way}: {held:,} of {parameters:,}, {held / parameters:.2%}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)  # of one rank
    parser.add_argument("--way", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.output is None:
        compare(given.stages, given.dtype)
        return
    count = run(given.output, given.stages, given.dtype, fsdp=given.way == "fsdp")
    if ranks.rank() == 0:
        (given.output / "held.json").write_text(json.dumps(count))
    ranks.leave()


if __name__ == "__main__":
    main()
