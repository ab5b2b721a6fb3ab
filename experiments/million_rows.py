"""`causalqwen predict` over a million rows, killed five times on the way: is each row there once, and does memory stay flat?

.venv/bin/python experiments/million_rows.py [--rows 1000000] [--kills 5] [--output runs/million]   (half an hour on two cores)

The backbone is tiny and random (two layers, 64 wide) with the default backbone's tokenizer: what is measured is the way there
and back, not the model.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from causalqwen import CausalQwenForCausalLM
from causalqwen.modeling.backbones import resolve_backbone

WORDS = "the boiling point of water ethanol iron in a deep cold sea at noon measured twice by hand is said to be"


def make_model(folder: Path) -> None:
    """A tiny random Llama, grafted."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve_backbone("smollm2-135m"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    backbone = LlamaForCausalLM(config)
    model = CausalQwenForCausalLM.from_backbone(backbone, tokenizer=tokenizer, number_context="value")
    model.save_pretrained(folder)


def make_rows(path: Path, count: int) -> None:
    """Prompts of 4 to 20 words, one in ten with a number, and a text with numbers now and then."""
    chance, known = random.Random(0), WORDS.split()
    with path.open("w", encoding="utf-8") as file:
        for index in tqdm(range(count), desc="writing rows", leave=False):
            words = " ".join(chance.choices(known, k=chance.randint(4, 20)))
            fate = chance.random()
            row = {"text": f"{words} {index}.5, then {index % 97}"} if fate < 0.02 else {"prompt": words}
            if fate > 0.9:
                row = {"prompt": f"{words}, not {index}, but", "value": float(index)}
            file.write(json.dumps({"id": index} | row) + "\n")


def rows_in(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(line.endswith(b"\n") for line in file)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/million"))
    given = parser.parse_args()
    shutil.rmtree(given.output, ignore_errors=True)
    given.output.mkdir(parents=True)
    model, source, output = given.output / "model", given.output / "rows.jsonl", given.output / "predictions.jsonl"
    part = output.with_name("predictions.jsonl.part.jsonl")
    make_model(model)
    make_rows(source, given.rows)
    command = [sys.executable, "-m", "causalqwen_cli", "predict", "--model", str(model), "--input", str(source)]
    command += ["--output", str(output), "--batch-size", "128", "--resume"]
    chance = random.Random(1)
    stops = sorted(chance.uniform(0, 0.98) for _ in range(given.kills))
    size = (
        source.stat().st_size * 2.6
    )  # about what the predictions take, to know where a run stands without counting lines
    start = time.monotonic()
    for stop in [*stops, None]:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        watched, memory = psutil.Process(process.pid), []
        while process.poll() is None:
            time.sleep(1)
            if part.exists():
                memory.append(watched.memory_info().rss / 2**20 if watched.is_running() else 0)
                if stop is not None and part.stat().st_size > stop * size:
                    process.kill()
                    process.wait()
        memory = [value for value in memory if value]
        parts = [memory[int(len(memory) * share)] for share in (0.1, 0.5, 0.9)] if memory else []
        done = rows_in(output if output.exists() else part)
        told = "killed" if stop is not None else f"ended with {process.returncode}"
        print(f"{told} at {done:,} rows; memory {', '.join(f'{value:.0f}' for value in parts)} MB", flush=True)
    seconds = time.monotonic() - start
    with output.open(encoding="utf-8") as file, source.open(encoding="utf-8") as rows:
        pairs = zip(map(json.loads, file), map(json.loads, rows), strict=True)
        whole = all(found | row == found and ("median" in found or "numbers" in found) for found, row in pairs)
    print(
        f"each row once, in order: {'yes' if whole else 'NO'}; {given.rows / seconds:,.0f} rows a second over all runs"
    )


if __name__ == "__main__":
    main()
