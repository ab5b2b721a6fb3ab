"""Many clients on one server for a while, some of whom vanish, send rubbish or mean harm: statuses, latencies, memory.

.venv/bin/python experiments/serving.py [--model DIR] [--minutes 2] [--clients 64] [--hostile 12]

Every client asks again as soon as it has its answer (after a second, where it was told 429). One request in ten vanishes on
the way, one in twenty is malformed; what is asked twice has to get the same text. The hostile ones do what
experiments/_hostile.py says. Without --model a tiny random model with the default backbone's tokenizer is made in
runs/serving/model. `--minutes 60` is the long run. Where a text went on otherwise, the model says how near another choice
was there: float32 moves it with the size of a batch. Ends with status 1 where an answer was a 5xx, a text was not the one
that was asked for and rounding does not explain it, or the server did not end with status 0.
"""

import argparse
import asyncio
import json
import math
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import torch
from _hostile import attack
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.distributions import NOISE_STREAM, uniform_draws
from causalqwen.modeling.backbones import resolve_backbone
from causalqwen.modeling.loading import load_model

COMMAND = [sys.executable, "-m", "causalqwen_cli"]
FOLDER = Path("runs/serving")
PROMPTS = [
    "The boiling point of ethanol (C2H6O) is",
    "The weather in Paris today is",
    "In 1969 there were 3",
    "My friends, we have come a long way together, and",
]
CAUSAL = [{}, {}, {"preset": "persona", "temperature": 0.9}, {"preset": "standard"}]
PARTS = 6  # of the time, for latencies and memory
NUMBER = re.compile(r"-?\d[\d.,]*(e[+-]?\d+)?")  # whose last digit may move
MOST = 50  # texts that are looked at
DRAW, SCORES = 1e-7, 1e-3  # what rounding may move: borders in the unit interval, scores in their spread


class Client:
    """Asks, now and then vanishes, now and then sends rubbish. said: the longest text of each question so far, for all."""

    def __init__(self, api: openai.AsyncOpenAI, said: dict[tuple, str], seed: int) -> None:
        self.api, self.said, self.chance = api, said, random.Random(seed)
        self.statuses: Counter[str] = Counter()
        self.seconds: list[tuple[float, float]] = []  # when an answer was there, and how long it took
        self.tokens, self.others = 0, list[tuple[tuple, str, str]]()

    async def work(self, end: float) -> None:
        while time.monotonic() < end:
            fate, causal = self.chance.random(), self.chance.randrange(len(CAUSAL))
            fields = {"model": "it", "prompt": self.chance.choice(PROMPTS), "seed": self.chance.randrange(1000)}
            fields |= {"max_tokens": self.chance.randint(4, 24), "extra_body": {"causal": CAUSAL[causal]}}
            fields |= {"echo": True, "logprobs": self.chance.choice([None, None, None, 2])}
            if self.chance.random() < 0.5:
                fields |= {"stream": True, "stream_options": {"include_usage": True}}
            if fate < 0.05:
                fields["extra_body"] = {self.chance.choice(("top_k", "causal", "tools")): 7}
            start = time.monotonic()
            try:
                if 0.05 <= fate < 0.15:
                    await asyncio.wait_for(self._ask(fields, causal), self.chance.uniform(0.01, 5.0))
                else:
                    await self._ask(fields, causal)
                    self.seconds.append((time.monotonic(), time.monotonic() - start))
                self.statuses["200"] += 1
            except TimeoutError:
                self.statuses["vanished"] += 1
            except openai.APIStatusError as error:
                self.statuses[str(error.status_code)] += 1
                if error.status_code == 429:
                    await asyncio.sleep(1.0)
            except openai.APIError as error:
                self.statuses[type(error).__name__] += 1

    async def _ask(self, fields: dict, causal: int) -> None:
        answer = await self.api.completions.create(**fields)
        if "stream" in fields:
            async with answer:
                events = [event async for event in answer]
            usage, choices = events[-1].usage if events else None, [one for event in events for one in event.choices]
        else:
            usage, choices = answer.usage, answer.choices
        if usage is None:
            raise openai.APIError("the stream broke off", request=answer.response.request, body=None)
        self.tokens += usage.completion_tokens
        text = without_numbers("".join(one.text for one in choices), fields["prompt"])
        key = fields["prompt"], fields["seed"], causal
        known = self.said.setdefault(key, text)
        if not goes_on(known, text) or not text.startswith(fields["prompt"]):
            self.others.append((key, known, text))
        self.said[key] = max(known, text, key=len)


async def load(
    url: str, process: psutil.Process, clients: int, hostile: int, seconds: float
) -> tuple[list[Client], dict[str, Counter], list[float], float]:
    """Let the clients work, and look at the server's memory (MB) every half second; when they began."""
    port, said = urlsplit(url).port, {}
    found: defaultdict[str, Counter] = defaultdict(Counter)

    async def harm(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < end:
            name, status = await attack(port, chance)
            found[name][status] += 1

    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as api:
        people = [Client(api, said, seed) for seed in range(clients)]
        begun = time.monotonic()
        end = begun + seconds
        work = asyncio.gather(*(person.work(end) for person in people), *map(harm, range(hostile)))
        memory = []
        while time.monotonic() < end:
            memory.append(process.memory_info().rss / 2**20)
            await asyncio.sleep(0.5)
        await work
    return people, found, memory, begun


def without_numbers(text: str, prompt: str) -> str:
    """A text, behind its prompt with # for numbers, and without a part of a character at its end."""
    return prompt + NUMBER.sub("#", text.removeprefix(prompt)).rstrip("\ufffd") if text.startswith(prompt) else text


def goes_on(one: str, other: str) -> bool:
    """Whether one of two texts begins the other."""
    return one.startswith(other) or other.startswith(one)


def nearness(model: Any, key: tuple[str, int, int], known: str, text: str) -> float:
    """Where two texts of one request part: how far its draw lay from the border of two tokens, in `DRAW`; under plans, how far
    the two best scores lay apart, in `SCORES`. Infinite where one of them does not go on as `generate` does, and the other by
    the token beyond that border."""
    prompt, seed, causal = key
    settings, near = dict(CAUSAL[causal]), []
    plan = replace(CausalDecoding.preset(settings.pop("preset", "softmax"), **settings), seed=[seed])
    encoded = model.processor([prompt], prompt=True, return_tensors="pt")
    start = encoded["input_ids"].shape[1]

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        row = scores[0].double()
        if plan.decision != "softmax":
            (first, second), best = row.topk(2)
            near.append((((first - second) / row[row.isfinite()].std()).item() / SCORES, best[1].item()))
            return scores
        borders = row.softmax(-1).cumsum(-1)
        draw = (
            uniform_draws(torch.tensor([seed]), NOISE_STREAM, torch.tensor([ids.shape[1] - 1]), 1).item() * borders[-1]
        )
        chosen, border = int(torch.searchsorted(borders, draw)), int((borders[:-1] - draw).abs().argmin())
        near.append(((borders[border] - draw).abs().item() / DRAW, border if border < chosen else chosen + 1))
        return torch.full_like(scores, -torch.inf).index_fill_(-1, torch.tensor(chosen), 0.0)

    choice = {"do_sample": False} if plan.decision == "softmax" else {"causal_decoding": plan}
    choice |= {"logits_processor": LogitsProcessorList([note]), "return_dict_in_generate": True}
    whole = model.generate(**encoded, **choice, max_new_tokens=24)

    def told(count: int, *ids: int) -> str:
        row = [*whole.sequences[0, : start + count].tolist(), *ids]
        values = [*whole.numeric_values[0, : start + count].tolist(), *(1.0 for _ in ids)]
        return without_numbers(model.processor.decode(row, values, skip_special_tokens=True), prompt)

    ends = [told(count) for count in range(len(near) + 1)]
    for count in range(len(near)):
        agree = [goes_on(ends[count + 1], one) for one in (known, text)]
        if not all(agree):
            apart = known if agree[1] else text
            first = ends.index(ends[count])  # tokens that cut a character add nothing to see
            beyond = [near[at][0] for at in range(first, count + 1) if goes_on(told(at, near[at][1]), apart)]
            return min(beyond, default=math.inf) if any(agree) else math.inf
    return math.inf


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as page:
        return sum(float(line) for line in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page.read().decode(), re.M))


def make_tiny(path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve_backbone("smollm2-135m"))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes))
    CausalQwenForCausalLM.from_backbone(tiny, tokenizer=tokenizer).save_pretrained(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--hostile", type=int, default=12)
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = options.model or FOLDER / "model"
    if options.model is None and not model.exists():
        make_tiny(model)
    command = [*COMMAND, "serve", "--model", model, "--port", "0", "--max-waiting", "48", "--name", "it", "--json"]
    with (
        (FOLDER / "log.jsonl").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            url = json.loads(server.stdout.readline())["url"]
            process = psutil.Process(server.pid)
            opened = process.num_fds()
            people, found, memory, begun = asyncio.run(
                load(url, process, options.clients, options.hostile, 60 * options.minutes)
            )
            time.sleep(35.0)  # what nobody moves on is given up by then
            left = metric(url, "causalqwen_running") + metric(url, "causalqwen_waiting")
            rows = metric(url, "causalqwen_batch_rows_sum") / metric(url, "causalqwen_batch_rows_count")
            opened = process.num_fds() - opened
        finally:
            server.terminate()
    lines = (FOLDER / "log.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]  # behind the bar of loading
    failed = sum(line.get("status", 0) >= 500 or "traceback" in line for line in logged)
    statuses = sum((person.statuses for person in people), Counter())
    answered = sorted((when - begun, took) for person in people for when, took in person.seconds)
    seconds = sorted(took for _, took in answered)
    tokens, others = sum(person.tokens for person in people), [pair for person in people for pair in person.others]
    size, length = max(len(memory) // PARTS, 1), 60 * options.minutes / PARTS
    parts = [statistics.median(memory[at : at + size]) for at in range(0, size * PARTS, size)]
    late = [
        percentile([took for when, took in answered if length * n <= when < length * (n + 1)]) for n in range(PARTS)
    ]
    print("| answers | " + " | ".join(sorted(statuses)) + " |")
    print("|---" * (1 + len(statuses)) + "|")
    print("| | " + " | ".join(f"{statuses[status]:,}" for status in sorted(statuses)) + " |\n")
    print("| hostile | what they got |\n|---|---|")
    for name in sorted(found):
        print(
            f"| `{name}` | " + ", ".join(f"{status} {count:,}" for status, count in sorted(found[name].items())) + " |"
        )
    print(f"\n{options.clients} clients, {options.minutes:g} minutes, {rows:.1f} texts per batch, {tokens:,} tokens")
    print(
        f"seconds to the whole answer: p50 {seconds[len(seconds) // 2]:.2f}, p99 {percentile(seconds):.2f}, "
        f"longest {seconds[-1]:.2f}"
    )
    print(f"p99 of {PARTS} parts of the time: " + ", ".join(f"{part:.2f}" for part in late))
    print(
        f"memory of the server, MB, medians of {PARTS} parts of the time: "
        + ", ".join(f"{part:,.1f}" for part in parts)
    )
    print(f"left running or waiting at the end: {left:g}; files open more than at the start: {opened}")
    loaded = load_model(model, device="cpu") if others else None
    near = [nearness(loaded, *one) for one in others[:MOST]] + [math.inf] * len(others[MOST:])
    for gap, ((prompt, seed, causal), known, text) in zip(near, others[:MOST], strict=False):
        print(f"{prompt!r}, seed {seed}, {CAUSAL[causal]}: {known!r}, and {text!r}; {gap:.1g} of what rounding moves")
    wrong = sum(not gap <= 1 for gap in near)
    print(f"texts that went on otherwise: {len(others)}, by more than rounding: {wrong}")
    print(f"lines of the log {len(logged):,}, of failures {failed}")
    print(f"the server ended with status {server.returncode}")
    return int(bool(failed or wrong or server.returncode or left))


def percentile(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)] if seconds else float("nan")


if __name__ == "__main__":
    sys.exit(main())
