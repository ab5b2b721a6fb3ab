"""The OvR loss on a GPU: how many rows of the vocabulary at a time? (A minute; needs a GPU.)

Loss and gradients of one batch in bfloat16, by Triton's kernel and by blocks in plain torch, over softmax cross-entropy of the
same size: time (median of events) and the memory beside the inputs.

    .venv/bin/python experiments/blocks.py
"""

import argparse
import gc
import statistics
from collections.abc import Callable

import torch
from tqdm.auto import tqdm

from benchmarks.speed.losses import SOFTMAX, LossSize, loss_cases
from causalqwen.kernels import chunked

SIZES = [(1024, 49152, 576), (1024, 151936, 896), (8192, 49152, 576), (8192, 151936, 1536)]


def milliseconds(case: Callable[[], None], repeats: int) -> float:
    """Median, after two runs that do not count."""
    taken = []
    for turn in range(repeats + 2):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        case()
        last.record()
        torch.cuda.synchronize()
        taken += [first.elapsed_time(last)] * (turn > 1)
    return statistics.median(taken)


def most_held(case: Callable[[], None], inputs: int) -> float:
    """MiB beside the inputs, which take so many bytes."""
    torch.cuda.reset_peak_memory_stats()
    case()
    return (torch.cuda.max_memory_allocated() - inputs) / 2**20


def compare(tokens: int, vocabulary: int, hidden: int, *, frozen: bool, powers: list[int], repeats: int) -> None:
    """One size: a line for each case, with time and memory over softmax's by block."""
    cases = loss_cases(LossSize(tokens, vocabulary, hidden, frozen=frozen, device="cuda"))
    inputs = torch.cuda.memory_allocated()
    softmax = milliseconds(cases[SOFTMAX], repeats), most_held(cases[SOFTMAX], inputs)
    weight = "frozen" if frozen else "trained"
    print(f"{tokens} x {vocabulary} x {hidden}, {weight}: softmax {softmax[0]:.2f} ms, {softmax[1]:.0f} MiB")
    for name, case in tqdm(cases.items(), leave=False):
        if name == SOFTMAX or "compiled" in name or "torch" in name:
            continue
        told = []
        for power in powers:
            chunked.BLOCK_ON_GPU = 2**power
            time, held = milliseconds(case, repeats) / softmax[0], most_held(case, inputs) / softmax[1]
            told.append(f"2^{power} {time:.2f} / {held:.2f}")
        print(f"  {name:32} {'   '.join(told)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[22, 24, 26, 28], help="powers of two: scores at a time"
    )
    parser.add_argument("--repeats", type=int, default=6)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "there is no GPU here\n")
    print(torch.cuda.get_device_name())
    for frozen in (False, True):
        for size in SIZES:
            compare(*size, frozen=frozen, powers=asked.blocks, repeats=asked.repeats)
            gc.collect()  # what one size held must not count as an input of the next


if __name__ == "__main__":
    main()
