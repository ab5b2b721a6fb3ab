"""What a graft added, and what it left as it was: counted and compared, never assumed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

logger = logging.getLogger("causalqwen")


class _UnlessConfigured(logging.StreamHandler):
    """To stderr, as long as the program has set up no logging of its own; then that takes over."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


if not logger.handlers:
    logger.addHandler(_UnlessConfigured())
    logger.setLevel(logging.INFO)


@dataclass(frozen=True)
class GraftProof:
    """backbone: its name. parameters, bytes: what stands beside the backbone's own `backbone_parameters`. tokens: how many were
    compared. identical_logits: on how many of them all logits are the backbone's to the last bit. agreement: the share of
    decisions that are the backbone's."""

    backbone: str
    backbone_parameters: int
    parameters: int
    bytes: int
    tokens: int
    identical_logits: int
    agreement: float

    def __str__(self) -> str:
        same, decided = (
            "all" if count == self.tokens else f"{count:,}"
            for count in (self.identical_logits, round(self.agreement * self.tokens))
        )
        return (
            f"{self.parameters:,} parameters ({self.bytes / 1e6:.1f} MB) grafted onto the {self.backbone_parameters:,} of "
            f"{self.backbone}; of {self.tokens:,} tokens that were checked, {same} have the backbone's logits to the last bit, "
            f"and {decided} its decision"
        )


def prove(model: Any, texts: Sequence[str]) -> GraftProof:
    """Count what a graft added, and compare it with its backbone on these texts."""
    own = [p for name, p in model.named_parameters() if not name.startswith("backbone.")]
    return GraftProof(
        backbone=model.config.name_or_path,
        backbone_parameters=sum(p.numel() for p in model.backbone.parameters()),
        parameters=sum(p.numel() for p in own),
        bytes=sum(p.numel() * p.element_size() for p in own),
        **compare_with_backbone(model, texts),
    )


@torch.no_grad()
def compare_with_backbone(model: Any, texts: Sequence[str]) -> dict[str, Any]:
    """The grafted model beside its own backbone, text by text.

    Returns:
        tokens: how many were compared. identical_logits: on how many positions all logits of the backbone's own tokens
        are equal to the last bit. agreement: the share of `standard` decisions that are the backbone's argmax.
    """
    tokens = identical = agreed = 0
    was_training = model.training
    model.eval()
    few = len(texts) == 1  # no bar for one
    for text in tqdm(texts, desc="comparing with the backbone", unit="text", leave=False, disable=few or None):
        inputs = model.processor(text, return_tensors="pt").to(model.device)
        ours = model(**inputs, output_ovr=True)
        theirs = model.backbone(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        rest = torch.ones(theirs.shape[-1], dtype=torch.bool, device=theirs.device)
        if not model.config.num_token_appended:
            rest[model.config.num_token_id] = False
        same = (ours.logits[..., : theirs.shape[-1]] == theirs) | ~rest
        tokens += theirs.shape[1]
        identical += same.all(-1).sum().item()
        agreed += (ours.decisions == theirs.argmax(-1)).sum().item()
    model.train(was_training)
    return {"tokens": tokens, "identical_logits": identical, "agreement": agreed / max(tokens, 1)}
