"""`python -m campaign`: the parts one after the other, their tables on stdout; status 1 where something was found."""

import argparse
import contextlib
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

from . import Bounds, Tally

# At size 1: draws, and seconds. A draw of texts is 200 of them, one of tensors 500 elements, one of tables
# a regressor, and one of vLLM 64 requests.
PARTS = {
    "texts": (50_000, 10_800),
    "tensors": (20_000, 3_600),
    "files": (10_000, 7_200),
    "tables": (1_000, 3_600),
    "processes": (200, 7_200),
    "resources": (10_000, 3_600),
    "vllm": (157, 7_200),
}


def run(part: str, bounds: Bounds, commands: list[str] | None = None) -> Tally:
    """One part. What it needs is made first. commands: of processes, these alone."""
    if part == "tensors":
        from . import tensors

        return tensors.run(bounds)
    if part == "processes":
        from . import processes

        return processes.run(bounds, tuple(commands or processes.COMMANDS))
    from causalqwen.modeling.backbones import default_backbone_path
    from conftest import graft_tiny, make_tokenizer

    tokenizer = make_tokenizer()
    if part == "texts":
        from transformers import AutoTokenizer

        from . import texts

        tokenizers: dict[str, object] = {"tiny": tokenizer}
        if (default_backbone_path() / "tokenizer.json").exists():
            tokenizers["smollm2"] = AutoTokenizer.from_pretrained(default_backbone_path())
        return texts.run(bounds, texts.processors(tokenizers))
    if part == "tables":
        from conftest import make_backbone

        from . import tables

        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            make_backbone("llama", tokenizer).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            return tables.run(bounds, folder)
    if part == "vllm":
        from . import engine

        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            return engine.run(bounds, Path(folder), tokenizer)
    model = graft_tiny("qwen2", tokenizer)
    if part == "resources":
        from . import resources

        return resources.run(bounds, model)
    from . import files

    files.fit_everything(model)
    with contextlib.redirect_stdout(sys.stderr):
        return files.run(bounds, model)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m campaign", description=__doc__)
    parser.add_argument("--size", type=float, default=1.0, help="share of the draws and of the seconds of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=[*PARTS], action="append", help="all but vllm by default")
    parser.add_argument("--command", action="append", help="of processes: this command alone, by its name; repeatable")
    parser.add_argument("--only", type=int, help="one draw alone, by its number")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")  # libraries complain of what they read
    found = 0
    for part in given.part or [part for part in PARTS if part != "vllm"]:
        count, seconds = PARTS[part]
        bounds = Bounds(max(1, round(given.size * count)), given.size * seconds, given.seed, given.only)
        started = time.monotonic()
        tally = run(part, bounds, given.command)
        found += sum(len(findings) for findings in tally.found.values())
        print(
            f"\n{part}, seed {given.seed}, {time.monotonic() - started:.0f} s of at most {bounds.seconds:.0f}\n{tally.table()}",
            flush=True,
        )
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
