"""LoRA adapters of PEFT in a backbone: put in by the settings of a stage."""

import torch

from causalqwen.extras import extra
from causalqwen.training.settings import LoraStage

with extra("lora", "LoRA"):
    from peft import LoraConfig, LoraModel


def add_adapters(backbone: torch.nn.Module, stage: LoraStage) -> LoraModel:
    """An adapter in every layer that `target_modules` names, drawn by torch's generator; only they are trained.

    What comes back merges them: `merge_and_unload()` leaves the plain layers in the backbone.
    """
    config = LoraConfig(
        r=stage.rank,
        lora_alpha=stage.alpha,  # type: ignore[arg-type]  # PEFT takes any number
        lora_dropout=stage.dropout,
        target_modules=list(stage.target_modules),
    )
    return LoraModel(backbone, config, "default")
