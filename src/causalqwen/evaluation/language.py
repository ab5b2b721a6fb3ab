"""What a graft leaves of a backbone's language, on text without numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from causalqwen.modeling import CausalQwenForCausalLM


@torch.no_grad()
def compare_with_backbone(model: CausalQwenForCausalLM, texts: Sequence[str]) -> dict[str, Any]:
    """The grafted model beside its own backbone, text by text.

    Returns:
        tokens: how many were compared. identical_logits: on how many positions all logits of the backbone's own tokens
        are equal to the last bit. agreement: the share of `standard` decisions that are the backbone's argmax.
    """
    tokens = identical = agreed = 0
    was_training = model.training
    model.eval()
    for text in tqdm(texts, desc="comparing with the backbone", unit="text", leave=False):
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
    return {"tokens": tokens, "identical_logits": identical, "agreement": agreed / tokens}
