"""An epoch of heads on kept features against LoRA on the same rows, and text to tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device

from benchmarks.speed.losses import SHARE, alternate
from causalqwen.data import collate, encode_rows, parse_row
from causalqwen.data.boiling_points import boiling_points, write_sentences
from causalqwen.data.splits import split_by_entity
from causalqwen.data.texts import speech_paragraphs
from causalqwen.modeling import CausalQwenForCausalLM, CausalQwenProcessor
from causalqwen.modeling.heads import number_parameters
from causalqwen.training import FactStore, LoraStage
from causalqwen.training.batches import FactRows
from causalqwen.training.stages import add_adapters, sampling_of_negatives
from causalqwen.training.trainer import TrainedForCausalLM


def score_epochs(backbone: str, work: Path, rows: int, repeats: int, device: str = "cpu") -> dict[str, Any]:
    """One epoch over the same rows in batches of 16: heads on kept features, and LoRA through the backbone."""
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    write_sentences(work / "rows.jsonl", split_by_entity(boiling_points(), {"train": rows})["train"])
    lines = (work / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    model = CausalQwenForCausalLM.from_backbone(backbone).to(device)
    examples = encode_rows([parse_row(line, "rows") for line in lines], model.processor)
    store = FactStore.build(model, examples, work)
    pad = model.processor.tokenizer.pad_token_id
    negatives = sampling_of_negatives(model, store.facts, model.action.rows // SHARE)
    heads = (model.abduction, model.action.b_noise, model.action.threshold)
    numbers = tuple(number_parameters(model))

    def epoch(trained: TrainedForCausalLM, parts: tuple, kept: bool) -> Callable[[], None]:
        def run() -> None:
            model.requires_grad_(False)
            for part in parts:
                part.requires_grad_(True)
            adapters = [p for n, p in model.backbone.named_parameters() if "lora_" in n]
            for parameter in adapters:
                parameter.requires_grad_(not kept)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
            facts = FactRows(store)
            trained.train()
            with model.frozen_vocabulary():  # as a stage trains whatever leaves W_cls frozen
                for start in range(0, rows, 16):
                    batch = range(start, min(start + 16, rows))
                    inputs = facts.collate(batch) if kept else collate([examples[i] for i in batch], pad)
                    trained(**send_to_device(inputs, device))["loss"].backward()
                    optimizer.step()
                    optimizer.zero_grad()

        return run

    cases = {
        "heads, whole vocabulary": epoch(TrainedForCausalLM(model, heads=True), heads + numbers, True),
        f"heads, 1/{SHARE} of the negatives": epoch(
            TrainedForCausalLM(model, heads=True, negatives=negatives), heads + numbers, True
        ),
        "numbers alone": epoch(TrainedForCausalLM(model), numbers, True),
    }
    lora = {
        "LoRA, whole vocabulary": epoch(TrainedForCausalLM(model, True), numbers, False),
        "LoRA, numbers alone": epoch(TrainedForCausalLM(model, False), numbers, False),
    }
    add_adapters(model.backbone, LoraStage(dropout=0.0))
    seconds = alternate(cases | lora, repeats)
    reference = seconds["LoRA, whole vocabulary"]
    return {
        "rows": rows,
        "tokens": len(store.facts),
        "seconds": seconds,
        "times_faster": {name: reference / taken for name, taken in seconds.items()},
    }


def score_tokenizer(backbone: str, repeats: int) -> dict[str, Any]:
    """Text to tensors, numbers found, against the bare fast tokenizer on the same paragraphs."""
    processor = CausalQwenProcessor.from_pretrained(backbone)
    texts = speech_paragraphs() * 4
    cases = {
        "tokenizer": lambda: processor.tokenizer(texts, return_tensors="pt", padding=True),
        "processor": lambda: processor(texts, return_tensors="pt", padding=True),
    }
    seconds = alternate(cases, repeats)
    return {"texts": len(texts), "seconds": seconds, "speed_ratio": seconds["tokenizer"] / seconds["processor"]}
