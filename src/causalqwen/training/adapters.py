"""LoRA adapters of PEFT in a backbone: put in by the settings of a stage, and merged at its end."""

import torch

from causalqwen.extras import extra
from causalqwen.training.settings import LoraStage

with extra("lora", "LoRA"):
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer


def add_adapters(backbone: torch.nn.Module, stage: LoraStage) -> None:
    """An adapter in every layer that `target_modules` names, drawn by torch's generator; only they are trained."""
    config = LoraConfig(
        r=stage.rank,
        lora_alpha=stage.alpha,  # type: ignore[arg-type]  # PEFT takes any number
        lora_dropout=stage.dropout,
        target_modules=list(stage.target_modules),
    )
    inject_adapter_in_model(config, backbone)


def merge_adapters(module: torch.nn.Module) -> None:
    """Add every adapter into the layer that it wraps, and leave plain layers."""
    for name, child in module.named_children():
        if isinstance(child, BaseTunerLayer):
            child.merge()
            setattr(module, name, child.get_base_layer())
        else:
            merge_adapters(child)
