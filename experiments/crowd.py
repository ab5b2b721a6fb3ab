"""A survey of very many people: how many are asked a second, and whether memory grows (two minutes; experiments 8.12).

    .venv/bin/python experiments/crowd.py --model runs/demo/model [--people 100000] [--output runs/crowd]

The people are drawn from the law. Ten of twenty questions are answered by numbers, ten by options.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from large_table import run

LIQUIDS = (
    "ethanol",
    "acetone",
    "toluene",
    "hexane",
    "glycerol",
    "chloroform",
    "pyridine",
    "aniline",
    "octane",
    "phenol",
)
COMMAND = [sys.executable, "-m", "causalqwen_cli"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="A model that has learned values.")
    parser.add_argument("--people", type=int, default=100_000)
    parser.add_argument("--output", type=Path, default=Path("runs/crowd"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    people, questions = given.output / "people.safetensors", given.output / "questions.jsonl"
    numbers = [{"name": f"{name}, K", "prompt": f"The boiling point of {name} is"} for name in LIQUIDS]
    opinions = [
        {
            "name": name,
            "prompt": f"Would you rather keep {name} in a kitchen or in a laboratory? In a",
            "options": ["kitchen", "laboratory"],
        }
        for name in LIQUIDS
    ]
    questions.write_text("".join(json.dumps(one) + "\n" for one in [*numbers, *opinions]), encoding="utf-8")
    status, _ = run(
        [*COMMAND, "population", "--model", str(given.model), "--drawn", str(given.people), "--output", str(people)],
        None,
    )
    assert status == 0
    command = [
        *COMMAND,
        "survey",
        "--model",
        str(given.model),
        "--population",
        str(people),
        "--questions",
        str(questions),
    ]
    started = time.monotonic()
    status, memory = run([*command, "--output", str(given.output / "answers.parquet")], None)
    seconds = time.monotonic() - started
    assert status == 0
    parts = ", ".join(f"{memory[int(len(memory) * share)]:,.0f}" for share in (0.1, 0.25, 0.5, 0.75, 0.99))
    print(
        f"{given.people:,} people, {len(numbers) + len(opinions)} questions, {seconds:,.0f} s with loading: "
        f"{given.people / seconds:,.0f} people a second; memory {parts} MB, at most {max(memory):,.0f}"
    )


if __name__ == "__main__":
    main()
