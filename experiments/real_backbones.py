"""Does everything work on a real Qwen as it is stored, and what does it give beside the default? (an hour on two cores)

Every command once, each in a process of its own: graft, train stage 1 on 800 sentences with boiling points,
evaluate on 400 others, predict, generate under each preset, infer an individual from a speech, a world beside the one that was.
The same sentences for every backbone, defaults throughout. Figures go to OUTPUT/figures.json as they come.

    .venv/bin/python experiments/real_backbones.py --output runs/backbones --backbone smollm2-135m --backbone PATH_OF_A_QWEN
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from causalqwen.data.boiling_points import PROMPT, boiling_points, write_sentences
from causalqwen.data.splits import split_by_entity
from causalqwen.data.texts import HELD_OUT_YEARS, speeches
from causalqwen.decoding import PRESETS

SIZES = {"train": 800, "validation": 200, "test": 400}
WORDS = "When she opened the old book in the attic, she"
OBSERVED = (
    "The committee met again in the spring, and",
    " they agreed that the old bridge had to be repaired before winter.",
)
OTHER = "The committee never met again, and"


def causalqwen(*arguments: object) -> tuple[dict[str, Any], float]:
    """What a command tells, and its seconds."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "causalqwen_cli", *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout), time.perf_counter() - started


def run(backbone: str, data: Path, output: Path) -> dict[str, Any]:
    """Every command on one backbone."""
    found: dict[str, Any] = {"seconds": {}}

    def do(what: str, *arguments: object) -> dict[str, Any]:
        told, seconds = causalqwen(*arguments)
        found["seconds"][what] = round(seconds, 1)
        print(f"  {what}: {seconds:.0f} s", flush=True)
        return told

    model, trained, who = output / "model", output / "trained", output / "who.safetensors"
    rows = {name: data / f"{name}.jsonl" for name in SIZES}
    graft = do("graft", "graft", "--backbone", backbone, "--output", model)
    found["graft"] = {name: graft[name] for name in ("tokens", "identical_logits", "agreement", "parameters")}
    do("train", "train", "--model", model, "--train", rows["train"], "--eval", rows["validation"], "--output", trained)
    scored = ("--data", rows["test"], "--train", rows["train"], "--validation", rows["validation"])
    metrics = do("evaluate", "evaluate", "--model", trained, *scored, "--output", output / "scores")["metrics"]
    names = ("quantile_crps", "median_error", "log_score", "coverage", "num_f1", "backbone_agreement")
    found["values"] = {name: metrics[name] for name in names}
    found["rivals"] = {name: scores["quantile_crps"] for name, scores in metrics["rivals"].items()}
    do("predict", "predict", "--model", trained, "--input", rows["test"], "--output", output / "predictions.jsonl")
    found["texts"] = {}
    asked = ("generate", "--model", trained, "--seed", 7, "--max-new-tokens", 24)
    for preset in PRESETS:
        told = do(f"generate {preset}", *asked, "--prompt", WORDS, "--preset", preset)
        found["texts"][preset] = told["text"][len(WORDS) :]
    numbers = PROMPT.format(name="ethanol", formula="C2H6O")
    found["number"] = do("generate a number", *asked, "--prompt", numbers, "--preset", "standard")["text"]
    do("abduct", "abduct", "--model", trained, "--text", data / "speech.txt", "--output", who, "--name", "the speaker")
    told = do(
        "counterfactual", "counterfactual", "--model", trained, "--individual", who, "--prompt", OBSERVED[0], "--text",
        OBSERVED[1], "--edit", OBSERVED[0], "--edit", OTHER,
    )  # fmt: skip
    found["worlds"] = [world["text"] for world in told["worlds"]]
    found["the world that was is the text"] = found["worlds"][0] == OBSERVED[1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", action="append", required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    data = given.output / "data"
    data.mkdir(parents=True, exist_ok=True)
    for name, part in split_by_entity(boiling_points(), SIZES).items():
        write_sentences(data / f"{name}.jsonl", part)
    words = re.findall(r"\S+\s*", speeches(HELD_OUT_YEARS))[:700]  # about a thousand tokens
    (data / "speech.txt").write_text("".join(words), encoding="utf-8")
    figures = given.output / "figures.json"
    found = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    for backbone in given.backbone:
        name = Path(backbone).name
        if name not in found:
            print(backbone, flush=True)
            found[name] = run(backbone, data, given.output / name)
            figures.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
