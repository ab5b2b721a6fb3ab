"""Training on many ranks, the processes that torchrun or `accelerate launch` start: who does what, and how it is put together.

Every rank reads the same batches in the same order and takes every n-th row of each, so that n ranks see what one process
sees, every row once. Losses are divided by counts over all ranks, and gradients summed. Without a launcher there is one rank,
and nothing here does anything.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch import distributed as dist

from causalqwen import files
from causalqwen.losses import IGNORE_INDEX

T = TypeVar("T")


def started_ranks() -> int:
    """How many ranks a launcher started, by the variable that all of them set."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device_of_rank(device: str) -> str:
    """A torch device, or "auto", as it is for this process: one of several ranks takes the accelerator of its own number."""
    if started_ranks() > 1 and (device == "cuda" or (device == "auto" and torch.cuda.is_available())):
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return device


def join(device: torch.device) -> None:
    """Meet the other ranks, if there are any: over gloo on the CPU, NCCL on CUDA."""
    if started_ranks() > 1 and not dist.is_initialized():
        PartialState(cpu=device.type == "cpu")


def leave() -> None:
    """Part from the other ranks, once all of them are here."""
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def rank() -> int:
    """This process's number; 0 alone writes."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Wait until every rank is here."""
    if world_size() > 1:
        dist.barrier()


def from_main(value: T) -> T:
    """Rank 0's value, on every rank."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


@contextmanager
def writing_folder(path: Path) -> Iterator[Path]:
    """`files.writing_folder` of rank 0, named by its content, into which all write; it becomes `path` once all have left."""
    with ExitStack() as stack:
        part = from_main(
            stack.enter_context(files.writing_folder(path, named_by_content=True)) if rank() == 0 else path
        )
        yield part
        barrier()
    barrier()


def check_same_start(model: nn.Module, tokens: int) -> None:
    """ValueError on every rank unless all were given the same weights (by their sums) and rows (by their tokens)."""
    sums = [tokens, *(parameter.detach().sum(dtype=torch.float64).item() for parameter in model.parameters())]
    same = torch.allclose(torch.tensor(sums), torch.tensor(from_main(sums)), rtol=1e-5, atol=1e-5, equal_nan=True)
    if not all(joined([same])):
        raise ValueError(
            "the ranks start from different models or rows: load the model from one folder, or set the same seed before "
            "from_backbone, and read the same rows"
        )


def summed(tensor: Tensor) -> Tensor:
    """The sum over all ranks, where every rank has one such tensor."""
    if world_size() > 1:
        dist.all_reduce(tensor := tensor.clone())
    return tensor


def share(items: Sequence[T]) -> list[tuple[T, bool]]:
    """Every n-th item from this rank's number on, and True; all ranks get as many, a filler with False where items run out."""
    n = world_size()
    mine = [(item, True) for item in items[rank() :: n]]
    fillers = -(-len(items) // n) - len(mine)
    return mine + [(item, False) for item in items[:fillers]]


def joined(parts: list[T]) -> list[T]:
    """What all ranks made of their `share`, fillers too, in the order of the items."""
    if world_size() == 1:
        return parts
    of_all: list[Any] = [None] * world_size()
    dist.all_gather_object(of_all, parts)
    return [part for turn in zip(*of_all, strict=True) for part in turn]


def rows_of_rank(rows: Sequence[T]) -> tuple[Sequence[T], bool]:
    """This rank's rows of a batch, and True; the first row and False where none is left for it."""
    mine = rows[rank() :: world_size()]
    return (mine, True) if len(mine) else (rows[:1], False)


def without_losses(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with labels that have no loss: a rank without rows of its own still takes its steps."""
    return batch | {"labels": torch.full_like(batch["labels"], IGNORE_INDEX)}


def complete_random_states(checkpoint: Path) -> None:
    """Give every rank a random state in a checkpoint that another number of ranks wrote: rank 0's."""
    name = "rng_state.pth" if world_size() == 1 else f"rng_state_{rank()}.pth"
    kept = [path for path in (checkpoint / "rng_state.pth", checkpoint / "rng_state_0.pth") if path.exists()]
    if kept and not (checkpoint / name).exists():
        shutil.copy(kept[0], checkpoint / name)
