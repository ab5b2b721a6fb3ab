"""`python -m campaign`: the parts one after the other, their tables on stdout; status 1 where something was found."""

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

from transformers import AutoTokenizer

from . import Bounds, Tally

# At size 1: draws, and seconds. A draw of texts is 200 of them, one of tensors 500 elements, one of tables a regressor, one of
# generated texts 32, and one of vLLM 64 requests.
PARTS = {
    "texts": (50_000, 10_800),
    "tensors": (20_000, 3_600),
    "files": (10_000, 7_200),
    "tables": (1_000, 3_600),
    "processes": (200, 7_200),
    "resources": (10_000, 3_600),
    "generated": (320, 7_200),
    "vllm": (157, 7_200),
}


def run(part: str, bounds: Bounds, folder: Path, commands: list[str] | None) -> Tally:
    """One part. What it needs is made first, some of it in an empty folder. commands: of processes, these alone."""
    module = importlib.import_module(f".{'engine' if part == 'vllm' else part}", __package__)
    if part == "tensors":
        return module.run(bounds)
    if part == "processes":
        return module.run(bounds, tuple(commands or module.COMMANDS))
    from conftest import graft_tiny, make_backbone, make_tokenizer

    tokenizer = make_tokenizer()
    if part == "vllm":
        return module.run(bounds, folder, tokenizer)
    if part == "texts":
        from causalqwen.modeling.backbones import default_backbone_path

        tokenizers: dict[str, object] = {"tiny": tokenizer}
        if (default_backbone_path() / "tokenizer.json").exists():
            tokenizers["smollm2"] = AutoTokenizer.from_pretrained(default_backbone_path())
        return module.run(bounds, module.processors(tokenizers))
    if part == "tables":
        make_backbone("llama", tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return module.run(bounds, str(folder))
    if part == "generated":
        from test_generation import eager

        contexts = ("value", "digits", "both")
        return module.run(
            bounds, {name: eager(graft_tiny("llama", tokenizer, number_context=name)) for name in contexts}
        )
    model = graft_tiny("qwen2", tokenizer)
    if part == "files":
        module.fit_everything(model)
    with contextlib.redirect_stdout(sys.stderr):
        return module.run(bounds, model)


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
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            tally = run(part, bounds, Path(folder), given.command)
        found += sum(len(findings) for findings in tally.found.values())
        print(
            f"\n{part}, seed {given.seed}, {time.monotonic() - started:.0f} s of at most {bounds.seconds:.0f}\n{tally.table()}",
            flush=True,
        )
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
