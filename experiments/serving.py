"""Many clients on one server for a while, some of whom vanish or send rubbish: statuses, latencies, memory over time.

.venv/bin/python experiments/serving.py [--model DIR] [--minutes 5] [--clients 64]

Every client asks again as soon as it has its answer (after a second, where it was told 429). One request in ten vanishes on
the way, one in twenty is malformed. Without --model the default backbone is grafted into runs/serving/model first.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import openai
import psutil

COMMAND = [sys.executable, "-m", "causalqwen_cli"]
PROMPTS = [
    "The boiling point of ethanol (C2H6O) is",
    "The weather in Paris today is",
    "In 1969 there were 3",
    "My friends, we have come a long way together, and",
]
CAUSAL = [{}, {}, {"preset": "persona", "temperature": 0.3, "noise_temperature": 0.95}, {"preset": "standard"}]
PARTS = 6  # of the time, for memory


class Client:
    """Asks, now and then vanishes, now and then sends rubbish."""

    def __init__(self, api: openai.AsyncOpenAI, model: str, seed: int) -> None:
        self.api, self.model, self.chance = api, model, random.Random(seed)
        self.statuses: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.tokens = 0

    async def work(self, end: float) -> None:
        while time.monotonic() < end:
            fate = self.chance.random()
            fields = {
                "model": self.model,
                "prompt": self.chance.choice(PROMPTS),
                "max_tokens": self.chance.randint(4, 24),
            }
            fields |= {"seed": self.chance.randrange(1000), "extra_body": {"causal": self.chance.choice(CAUSAL)}}
            if self.chance.random() < 0.5:
                fields |= {"stream": True, "stream_options": {"include_usage": True}}
            if fate < 0.05:
                fields["extra_body"] = {self.chance.choice(("top_k", "causal", "logprobs")): 7}
            start = time.monotonic()
            try:
                if 0.05 <= fate < 0.15:
                    await asyncio.wait_for(self._ask(fields), self.chance.uniform(0.01, 5.0))
                else:
                    await self._ask(fields)
                    self.seconds.append(time.monotonic() - start)
                self.statuses["200"] += 1
            except TimeoutError:
                self.statuses["vanished"] += 1
            except openai.APIStatusError as error:
                self.statuses[str(error.status_code)] += 1
                if error.status_code == 429:
                    await asyncio.sleep(1.0)
            except openai.APIError as error:
                self.statuses[type(error).__name__] += 1

    async def _ask(self, fields: dict) -> None:
        answer = await self.api.completions.create(**fields)
        usage = None if "stream" in fields else answer.usage
        if "stream" in fields:
            async with answer:
                async for event in answer:
                    usage = event.usage  # comes last
        if usage is None:
            raise openai.APIError("the stream broke off", request=answer.response.request, body=None)
        self.tokens += usage.completion_tokens


async def load(
    url: str, model: str, process: psutil.Process, clients: int, seconds: float
) -> tuple[list[Client], list[float]]:
    """Let the clients work, and look at the server's memory (MB) every half second."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as api:
        people = [Client(api, model, seed) for seed in range(clients)]
        end = time.monotonic() + seconds
        work = asyncio.gather(*(person.work(end) for person in people))
        memory = []
        while time.monotonic() < end:
            memory.append(process.memory_info().rss / 2**20)
            await asyncio.sleep(0.5)
        await work
    return people, memory


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as page:
        return sum(float(line) for line in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page.read().decode(), re.M))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    model = options.model or Path("runs/serving/model")
    if not model.exists():
        subprocess.run([*COMMAND, "graft", "--backbone", "smollm2-135m", "--output", model], check=True)
    command = [*COMMAND, "serve", "--model", model, "--port", "0", "--max-waiting", "48", "--name", "it", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = json.loads(server.stdout.readline())["url"]
            process = psutil.Process(server.pid)
            people, memory = asyncio.run(load(url, "it", process, options.clients, 60 * options.minutes))
            time.sleep(1.0)
            left = metric(url, "causalqwen_running") + metric(url, "causalqwen_waiting")
            rows = metric(url, "causalqwen_batch_rows_sum") / metric(url, "causalqwen_batch_rows_count")
        finally:
            server.send_signal(signal.SIGINT)
    statuses = sum((person.statuses for person in people), Counter())
    seconds = sorted(second for person in people for second in person.seconds)
    tokens = sum(person.tokens for person in people)
    size = max(len(memory) // PARTS, 1)
    parts = [statistics.median(memory[at : at + size]) for at in range(0, size * PARTS, size)]
    at = statistics.quantiles(seconds, n=100)
    print("| answers | " + " | ".join(sorted(statuses)) + " |")
    print("|---" * (1 + len(statuses)) + "|")
    print("| | " + " | ".join(f"{statuses[status]:,}" for status in sorted(statuses)) + " |\n")
    print(f"{options.clients} clients, {options.minutes:g} minutes, {rows:.1f} texts per batch, {tokens:,} tokens")
    print(f"seconds to the whole answer: p50 {at[49]:.2f}, p99 {at[98]:.2f}, longest {seconds[-1]:.2f}")
    print(
        f"memory of the server, MB, medians of {PARTS} parts of the time: "
        + ", ".join(f"{part:,.0f}" for part in parts)
    )
    print(f"left running or waiting at the end: {left:g}")


if __name__ == "__main__":
    main()
