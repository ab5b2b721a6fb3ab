"""vLLM under load: requests of all presets, with values in their prompts, in one batch that is short of memory; some come late,
some are called off. Each text is that of `generate`. Runs in vLLM's own environment (`make campaign-vllm`)."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from reference import (
    Engines,
    gap_where_they_part,
    lookups,
    moved,
    reference,
    write_copying,
    write_tiny,
    write_with_classes,
)

import causalqwen_vllm
from causalqwen import CausalDecoding, CausalQwenForCausalLM, Individual
from causalqwen.decoding import PRESETS
from causalqwen.modeling.loading import load_model
from causalqwen_vllm import client

from . import Bounds, Tally

AT_ONCE = 64
"""Requests of a draw."""
MODELS: dict[str, Callable[[Path, Any], Path]] = {
    **{name: partial(write_tiny, family="llama", number_context=name) for name in ("digits", "value", "both")},
    **{f"copies, {name}": partial(write_copying, context=name) for name in ("digits", "value")},
    **{f"classes, {name}": partial(write_with_classes, context=name) for name in ("digits", "value")},
}
"""What writes each tiny model that is asked: by what the context holds of a number, and what more it does with them."""
_WORDS = [
    "We", "have", "come", "a", "long", "way", "since", "the", "year", "and", "of all men", "who", "were", "not", "it was",
]  # fmt: skip


@dataclass
class Asked:
    """A request, and what is known of it: called_off, after so many steps; number_class, of a model that has classes;
    answer, what vLLM wrote."""

    preset: str
    settings: dict[str, Any]
    top_p: float
    prompt: str
    seed: int
    max_tokens: int
    called_off: int | None
    number_class: str | None = None
    answer: causalqwen_vllm.Answer | None = None

    @property
    def plan(self) -> CausalDecoding:
        return CausalDecoding.preset(self.preset, **self.settings)


def _settings(preset: str, chance: random.Random, people: list[Individual]) -> dict[str, Any]:
    """What a plan of the preset may be given."""
    settings: dict[str, Any] = {"temperature": chance.choice([0.3, 1.0, 4.0])}
    if preset in ("persona", "sample") and chance.random() < 0.5:
        settings |= chance.choice([{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02, "top_p": 0.95}])
    if preset in ("shared-individual", "persona") and chance.random() < 0.5:
        settings["individual"] = chance.choice(people)
    return settings


def _prompt(chance: random.Random) -> str:
    """Words and numbers, of up to some hundred tokens."""
    numbers = (str(chance.randrange(3000)), f"{chance.gauss(0, 100):.3f}", f"{10 ** chance.uniform(-5, 9):.4g}")
    return " ".join(
        chance.choice(numbers) if chance.random() < 0.25 else chance.choice(_WORDS)
        for _ in range(chance.choice([2, 5, 10, 40]))
    )


def draw(chance: random.Random, people: list[Individual], classes: Sequence[str] = ()) -> list[Asked]:
    """The requests of a draw; those of one preset have one plan but for their seeds, and one class of numbers."""
    plans = {preset: _settings(preset, chance, people) for preset in PRESETS}
    nuclei = {preset: chance.choice([1.0, 0.9]) if preset == "softmax" else 1.0 for preset in PRESETS}
    named = {preset: chance.choice(list(classes)) if classes else None for preset in PRESETS}
    asked = []
    for _ in range(AT_ONCE):
        preset = chance.choice(list(PRESETS))
        late = chance.randrange(1, 30) if chance.random() < 0.1 else None
        length = chance.randrange(1, 40)
        seeded = _prompt(chance), chance.randrange(1 << 40)
        asked.append(Asked(preset, plans[preset], nuclei[preset], *seeded, length, late, named[preset]))
    return asked


def write(llm: Any, model: CausalQwenForCausalLM, asked: list[Asked], chance: random.Random) -> None:
    """Have vLLM write all that is not called off; a few come at each step."""
    engine, waiting = llm.llm_engine, list(enumerate(asked))
    requests, ages = {}, {}
    while waiting or engine.has_unfinished_requests():
        for number, one in [waiting.pop() for _ in range(min(len(waiting), chance.randrange(9)))]:
            nucleus = {"top_p": one.top_p} if one.top_p < 1 else {}
            requests[number] = causalqwen_vllm.request(
                model.processor, one.prompt, preset=one.preset, seed=one.seed, max_tokens=one.max_tokens, key=str(number),
                params={"ignore_eos": True}, number_class=one.number_class, **one.settings, **nucleus,
            )  # fmt: skip
            engine.add_request(str(number), *requests[number])
            ages[number] = 0
        for output in engine.step():
            number = int(output.request_id.split("-")[0])
            if not output.finished or number not in ages:
                continue
            del ages[number]
            numbers = llm.collective_rpc("take_numbers", args=([str(number)],))[0]
            one, (tokens, params) = asked[number], requests[number]
            one.answer = client.answer(model.processor, output, tokens, params, numbers[0], one.seed)
        for number in list(ages):
            ages[number] += 1
            if ages[number] == asked[number].called_off:
                engine.abort_request([str(number)])
                llm.collective_rpc("forget_numbers", args=([str(number)],))
                del ages[number]


def check(model: CausalQwenForCausalLM, asked: list[Asked]) -> Iterator[tuple[Asked, str | None]]:
    """Each request that was not called off: "" for the text of `generate`, "tie" where rounding chose another token or moved a
    value or its last digit, and what is wrong otherwise; None for one that was called off."""
    written = [one for one in asked if one.answer is not None]
    for one in asked:
        if one.answer is None:
            yield one, None if one.called_off is not None else "no answer"
    written.sort(key=lambda one: one.preset)
    for _, same in groupby(written, key=lambda one: one.preset):
        rows = list(same)
        model.number_class = rows[0].number_class
        longest = max(row.max_tokens for row in rows)
        seeds, prompts = [row.seed for row in rows], [row.prompt for row in rows]
        wanted = reference(model, prompts, rows[0].plan, seeds, longest, rows[0].top_p)
        for row, tokens, values in zip(rows, wanted.tokens, wanted.values, strict=True):
            count = row.max_tokens
            found, known = row.answer.token_ids[:count], tokens[:count]
            if found == known:
                pairs = list(zip(row.answer.values[:count], values[:count], strict=False))
                far = max((abs(a - b) / max(abs(b), 1.0) for a, b in pairs), default=0.0)
                tie = all(moved(model, *pair) for pair in pairs)
                yield row, "" if far < 1e-4 else "tie" if tie else f"values {far:.2g} apart"
                continue
            columns = found, known, row.answer.values[:count], values[:count]
            gap = gap_where_they_part(model, row.prompt, *columns, replace(row.plan, seed=row.seed), row.top_p)
            yield row, "tie" if gap < 1 else f"another text, {gap:.2g} times what rounding moves"


def run(bounds: Bounds, folder: Path, tokenizer: Any) -> Tally:
    """About as many draws of each model, each over an engine that has room for some rows of the batch."""
    tally, engines, opened, model = Tally(), Engines(), None, None
    for number, chance in bounds.draws():
        name = list(MODELS)[number * len(MODELS) // bounds.count]
        if name != opened:
            opened, model = name, load_model(MODELS[name](folder / name, tokenizer=tokenizer))
        llm = engines(folder / name, block_size=32, num_gpu_blocks_override=40)
        people = [Individual.from_seed(seed, model.config.causal_size) for seed in range(4)]
        asked = draw(chance, people, list(model.config.class_values or ()))
        with lookups(llm) as seen:
            write(llm, model, asked, chance)
        tally.tried[f"{name}: preempted"] += sum(hit.preempted for hit in seen)
        for one, wrong in check(model, asked):
            what = f"{name}: {one.preset}"
            if wrong is None:
                tally.tried[f"{name}: called off"] += 1
                continue
            tally.tried[what] += 1
            tally.tried[f"{name}: ties"] += wrong == "tie"
            if wrong not in ("", "tie"):
                tally.find(what, f"draw {number}, {one.prompt!r}, seed {one.seed}: {wrong}")
    engines.close()
    return tally
