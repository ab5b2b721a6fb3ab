"""Training on many ranks, the processes that torchrun or `accelerate launch` start: who does what, and how it is put together.

Every rank reads the same batches in the same order and takes every n-th row of each, so that n ranks see what one process
sees, every row once. Losses are divided by counts over all ranks, and gradients summed. Without a launcher there is one rank,
and nothing here does anything.

With FSDP2 every rank holds its part of each parameter, its gradient and its optimizer state, and gathers a layer when it runs.
What is sharded is a copy of the modules that shares the parameters with the ordinary model, whose own stay empty meanwhile:
the ordinary model comes back from it as it was, without hooks. Heads and vocabulary matrix belong to the root, so that
losses, which read them outside of any layer, find them whole.
"""

import copy
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import ref

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

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


# ---- FSDP2 ------------------------------------------------------------------------------------------------------------


def sharded(root: Any) -> Any:
    """A copy of a `TrainedForCausalLM` with its parameters spread over all ranks; those of `root` are empty until `restore`.

    Raises:
        ValueError: trained parameters of more than one dtype, whose gradients FSDP2 cannot reduce together.
    """
    dtypes = {str(p.dtype).removeprefix("torch.") for p in root.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        raise ValueError(
            f"fsdp: the parameters to train are {' and '.join(sorted(dtypes))}, and FSDP2 takes one dtype; "
            "train a model that was grafted with --dtype float32, or set fsdp: false"
        )
    kept = (*root.parameters(), *root.buffers(), root.config, root.anchor, root.negatives, root.model.processor)
    made = copy.deepcopy(root, {id(thing): thing for thing in kept})
    # A number cannot be spread: such parameters stay on every rank, their gradients averaged by `average_numbers`.
    whole = {parameter for parameter in made.parameters() if parameter.dim() == 0}
    mesh = init_device_mesh(made.model.device.type, (world_size(),))
    names = made.model.backbone._no_split_modules or ()
    layers = [module for module in made.model.backbone.modules() if type(module).__name__ in names]
    for module in (*layers, made):
        taken = [p for p in module.parameters() if p not in whole and not isinstance(p, DTensor)]
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
        for parameter in taken:
            parameter.data = parameter.data.new_empty(0)
    register_fsdp_forward_method(made, "call")
    made._is_accelerate_prepared = True  # accelerate is not to wrap it once more
    made.model.fsdp_root = ref(made)
    return made


@torch.no_grad()
def restore(root: nn.Module, made: nn.Module) -> None:
    """Give the parameters of `root` back, from its copy `made`; every rank then has them whole."""
    for parameter, part in zip(root.parameters(), made.parameters(), strict=True):
        if isinstance(part, DTensor):
            parameter.data = part.full_tensor()


def on_whole(model: Any, function: Callable[..., T], *args: Any) -> T:
    """function(model, *args), with the weights gathered where `model` is sharded; then every rank must call it."""
    return model.fsdp_root().call(function, *args) if is_sharded(model) else function(model, *args)


def is_sharded(model: nn.Module) -> bool:
    """Whether this is the model of a module that `sharded` made."""
    return hasattr(model, "fsdp_root")


def average_numbers(model: nn.Module) -> None:
    """Average the gradients of parameters that are not spread, as FSDP2 averages those of the others."""
    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size()


def whole(tensor: Any) -> Any:
    """All of a tensor that is spread; anything else as it is. Every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor of a parameter's shape, if the parameter is spread."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    return distribute_tensor(
        tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's `state_dict`, as one process would have it. Every rank must call it."""
    own = optimizer.state_dict()
    state = {index: {name: whole(x) for name, x in slots.items()} for index, slots in own["state"].items()}
    return own | {"state": state}


def spread_state(optimizer: torch.optim.Optimizer) -> None:
    """Spread what was loaded whole into the optimizer like its parameters."""
    for parameter, slots in optimizer.state.items():
        for name, tensor in slots.items():
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                slots[name] = spread_like(tensor, parameter)
