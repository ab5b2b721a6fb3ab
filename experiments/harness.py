"""lm-evaluation-harness on a backbone by its own backend, and on its graft by ours: are log-likelihoods and texts the same?

.venv/bin/python experiments/harness.py [--backbone smollm2-135m] [--limit 60] [--batch 4]

Five tasks over rows that come with the package (src/causalqwen_evals/tasks), in float32 and in the same batches.
"""

import argparse
import time
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from causalqwen import CausalQwenForCausalLM
from causalqwen.modeling.backbones import resolve_backbone
from causalqwen_evals import TASKS
from causalqwen_evals.harness import CausalQwenLM


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--backbone", default="smollm2-135m")
    options.add_argument("--limit", type=int, default=60)
    options.add_argument("--batch", type=int, default=4)
    asked = options.parse_args()
    path = resolve_backbone(asked.backbone)
    bare = HFLM(path, backend="causal", dtype="float32", device="cpu", batch_size=asked.batch)
    graft = CausalQwenForCausalLM.from_backbone(path, dtype=torch.float32)
    found = [evaluated(lm, asked.limit) for lm in (bare, CausalQwenLM(graft, batch_size=asked.batch))]
    print("| task | asked | equal to the last bit | scores, bare | scores, grafted |\n|---|---|---|---|---|")
    for task in sorted(found[0]["samples"]):
        answers = [[one for sample in of["samples"][task] for one in sample["resps"]] for of in found]
        equal = sum(one == other for one, other in zip(*answers, strict=True))
        print(f"| `{task}` | {len(answers[0])} | {equal} | {' | '.join(scores(of, task) for of in found)} |")


def evaluated(lm: Any, limit: int) -> dict[str, Any]:
    started = time.perf_counter()
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
    found = lm_eval.simple_evaluate(lm, tasks=["causalqwen"], task_manager=tasks, limit=limit, bootstrap_iters=0)
    print(f"{type(lm).__name__}: {time.perf_counter() - started:.0f} s", flush=True)
    return found


def scores(found: dict[str, Any], task: str) -> str:
    told = {name.split(",")[0]: value for name, value in found["results"][task].items() if "stderr" not in name}
    return ", ".join(f"{name} {value:.4g}" for name, value in told.items() if isinstance(value, float))


if __name__ == "__main__":
    main()
