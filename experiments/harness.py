"""lm-evaluation-harness on a backbone by its own backend, on its graft by ours, and on the graft's server by its client for
OpenAI's API (`local-completions`): are log-likelihoods and texts the same?

.venv/bin/python experiments/harness.py [--backbone smollm2-135m] [--limit 60] [--batch 4]

Five tasks over rows that come with the package (src/causalqwen_evals/tasks), in float32 and in the same batches. The graft is
kept in runs/harness/model, from where `causalqwen serve` serves it on this machine.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from causalqwen import CausalQwenForCausalLM
from causalqwen.modeling.backbones import resolve_backbone
from causalqwen_evals import TASKS
from causalqwen_evals.harness import CausalQwenLM

MODEL = Path("runs/harness/model")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backbone", default="smollm2-135m")
    options.add_argument("--limit", type=int, default=60)
    options.add_argument("--batch", type=int, default=4)
    asked = options.parse_args()
    path = resolve_backbone(asked.backbone)
    bare = HFLM(path, backend="causal", dtype="float32", device="cpu", batch_size=asked.batch)
    graft = CausalQwenForCausalLM.from_backbone(path, dtype=torch.float32)
    graft.save_pretrained(MODEL)
    of_bare, of_graft = (evaluated(lm, asked.limit) for lm in (bare, CausalQwenLM(graft, batch_size=asked.batch)))
    with server() as url:
        client = LocalCompletionsAPI(
            f"{url}/completions",
            tokenizer_backend="huggingface",
            model=MODEL.name,
            tokenizer=path,
            batch_size=asked.batch,
            max_length=bare.max_length,
        )
        of_server = evaluated(client, asked.limit)
    print(
        "| task | asked | grafted: equal to the last bit | served: same choice or text | nats a token apart, at most |"
    )
    print("|---|---|---|---|---|")
    for task in sorted(of_bare["samples"]):
        first, second, third = (answers(found, task) for found in (of_bare, of_graft, of_server))
        equal = sum(one == other for one, other in zip(first, second, strict=True))
        alike = sum(
            one == other if isinstance(one, str) else one[1:] == other[1:]
            for one, other in zip(first, third, strict=True)
        )
        texts = [asked_of[-1] for sample in of_bare["samples"][task] for asked_of in sample["arguments"]]
        apart = [
            abs(one[0] - other[0]) / len(bare.tok_encode(text))
            for one, other, text in zip(first, third, texts, strict=True)
            if not isinstance(one, str)
        ]
        print(f"| `{task}` | {len(first)} | {equal} | {alike} | {f'{max(apart):.1e}' if apart else ''} |")
    for name, found in (("bare", of_bare), ("grafted", of_graft), ("served", of_server)):
        print(f"{name}: " + "; ".join(f"{task} {scores(found, task)}" for task in sorted(found["samples"])))


@contextmanager
def server() -> Iterator[str]:
    options = ["--model", MODEL, "--device", "cpu", "--port", "0", "--json"]
    command = [sys.executable, "-m", "causalqwen_cli", "serve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            told = process.stdout.readline()
            if not told:
                raise SystemExit("the server did not start; what it said stands above")
            yield json.loads(told)["url"]
        finally:
            process.terminate()


def evaluated(lm: Any, limit: int) -> dict[str, Any]:
    started = time.perf_counter()
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
    found = lm_eval.simple_evaluate(lm, tasks=["causalqwen"], task_manager=tasks, limit=limit, bootstrap_iters=0)
    print(f"{type(lm).__name__}: {time.perf_counter() - started:.0f} s", flush=True)
    return found


def answers(found: dict[str, Any], task: str) -> list[Any]:
    """Of each question: a text; the log-likelihood and whether greedy search says the same; or the log-likelihood alone."""
    told = [one for sample in found["samples"][task] for (one,) in sample["resps"]]
    return [one if isinstance(one, str | tuple) else (one,) for one in told]


def scores(found: dict[str, Any], task: str) -> str:
    told = {name.split(",")[0]: value for name, value in found["results"][task].items() if "stderr" not in name}
    return ", ".join(f"{name} {value:.4g}" for name, value in told.items() if isinstance(value, float))


if __name__ == "__main__":
    main()
