"""FSDP2: every rank holds its part of each parameter, its gradient and its optimizer state, and gathers a layer when it runs.

What is sharded is a copy of the modules that shares the parameters with the ordinary model, whose own stay empty meanwhile:
the ordinary model comes back from it as it was, without hooks. Heads and vocabulary matrix belong to the root, so that
losses, which read them outside of any layer, find them whole.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from causalqwen.training import ranks

T = TypeVar("T")


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
    mesh = init_device_mesh(made.model.device.type, (ranks.world_size(),))
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
            parameter.grad /= ranks.world_size()


# ---- checkpoints -----------------------------------------------------------------------------------------------------


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
