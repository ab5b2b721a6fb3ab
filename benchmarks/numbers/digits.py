"""The same backbone writing digits: LoRA on "prompt value" as plain text, then sampled for its distribution."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import DynamicCache, get_cosine_schedule_with_warmup

from benchmarks.numbers.parts import MakeModel
from causalqwen.evaluation.number_table import NumberTable
from causalqwen.evaluation.rivals import Forecast, Predictor
from causalqwen.losses import IGNORE_INDEX
from causalqwen.modeling.outputs import CACHE
from causalqwen.numbers import CRPS_LEVELS
from causalqwen.training import LoraStage
from causalqwen.training.features import batches_by_length
from causalqwen.training.stages import add_adapters

_TOKENS = 2048
"""Tokens of rows that are trained at once, with their padding; longer batches take several turns."""
_CACHED = 40_000
"""Tokens of samples that are drawn at once, with their prompts."""
_ANSWER = re.compile(r"\s*([+-]?\d+(?:,\d{3})*(?:\.\d+)?)")


@dataclass(frozen=True)
class DigitWriter:
    """A rival of the mechanism in `rivals`.

    samples: a row. bf16: train and sample under autocast in bfloat16; weights and losses are float32.
    """

    make: MakeModel
    epochs: int = 2
    batch_size: int = 16
    samples: int = 32
    max_new_tokens: int = 10
    bf16: bool = False

    def __call__(self, train: NumberTable, validation: NumberTable, seed: int) -> Predictor:
        graft = self.make()
        backbone, tokenizer = graft.backbone, graft.processor.tokenizer
        self._fine_tune(backbone, tokenizer, train, seed)
        fallback = np.quantile(train.values, CRPS_LEVELS.numpy())

        def predict(table: NumberTable) -> Forecast:
            with self._autocast(backbone):
                written = self._sample(backbone, tokenizer, table.prompts, seed)
            read = [[value for value in map(parse, texts) if value is not None] for texts in written]
            quantiles = [np.quantile(row, CRPS_LEVELS.numpy()) if row else fallback for row in read]
            dropped = 1 - sum(map(len, read)) / (self.samples * len(table))
            return Forecast(np.stack(quantiles), notes={"unparsable": dropped})

        return predict

    def _autocast(self, backbone: Any) -> torch.autocast:
        return torch.autocast(backbone.device.type, torch.bfloat16, enabled=self.bf16)

    def _fine_tune(self, backbone: Any, tokenizer: Any, train: NumberTable, seed: int) -> None:
        """Adapters of the LoRA stage's settings in the backbone; the loss is on the digits and the end alone."""
        stage = LoraStage()
        rows = [
            (tokenizer(prompt)["input_ids"], [*tokenizer(f" {written(value)}", add_special_tokens=False)["input_ids"],
                                              tokenizer.eos_token_id])
            for prompt, value in zip(train.prompts, train.values.tolist(), strict=True)
        ]  # fmt: skip
        torch.manual_seed(seed)
        backbone.requires_grad_(False)
        add_adapters(backbone, stage)
        weights = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        generator = torch.Generator().manual_seed(seed)
        order = [
            picked.tolist()
            for _ in range(self.epochs)
            for picked in torch.randperm(len(rows), generator=generator).split(self.batch_size)
        ]
        optimizer = torch.optim.AdamW(weights, lr=stage.learning_rate, weight_decay=stage.weight_decay)
        schedule = get_cosine_schedule_with_warmup(optimizer, int(stage.warmup * len(order)), len(order))
        backbone.train()
        for picked in tqdm(order, desc="LoRA", leave=False):
            optimizer.zero_grad()
            for some in batches_by_length([rows[index][0] for index in picked], _TOKENS):
                ids, labels = _padded([rows[picked[place]] for place in some], backbone.device)
                learned = labels[:, 1:] != IGNORE_INDEX  # the vocabulary only where something is learned
                with self._autocast(backbone):  # anew each time: it keeps the weights that it has cast
                    hidden = backbone.base_model(input_ids=ids, use_cache=False)[0]
                    logits = backbone.get_output_embeddings()(hidden[:, :-1][learned]).float()
                loss = F.cross_entropy(logits, labels[:, 1:][learned])
                (loss * len(some) / len(picked)).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
        backbone.eval()

    @torch.no_grad()
    def _sample(self, backbone: Any, tokenizer: Any, prompts: Sequence[str], seed: int) -> list[list[str]]:
        """Continuations of every prompt at temperature 1; each prompt is read once, and its cache shared by its samples."""
        torch.manual_seed(seed)
        texts: list[list[str]] = [[] for _ in prompts]
        groups = list(batches_by_length(tokenizer(list(prompts))["input_ids"], _CACHED // self.samples))
        for rows in tqdm(groups, desc="sampling", leave=False):
            batch = tokenizer([prompts[row] for row in rows], return_tensors="pt", padding=True, padding_side="left")
            ids, mask = (batch[name].to(backbone.device) for name in ("input_ids", "attention_mask"))
            cache = DynamicCache(config=backbone.config)
            before = {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]}
            places = (before["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            backbone.base_model(**before, position_ids=places, use_cache=True, **{CACHE: cache})
            cache.batch_repeat_interleave(self.samples)
            ids, mask = (tensor.repeat_interleave(self.samples, 0) for tensor in (ids, mask))
            made = backbone.generate(
                ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                max_new_tokens=self.max_new_tokens, pad_token_id=tokenizer.eos_token_id, **{CACHE: cache},
            )  # fmt: skip
            decoded = tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
            for place, row in enumerate(rows):
                texts[row] = decoded[place * self.samples : (place + 1) * self.samples]
        return texts


def written(value: float) -> str:
    """The value in plain digits: 478.15, 4900000, at most 8 significant ones."""
    return np.format_float_positional(float(f"{value:.8g}"), trim="-")


def parse(text: str) -> float | None:
    """The number with which the text begins, or None."""
    match = _ANSWER.match(text)
    return float(match[1].replace(",", "")) if match else None


def _padded(rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids and labels [B, S] of prompts and answers, padded on the right, where nothing before it looks."""
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels = torch.zeros(len(rows), length, dtype=torch.int64), torch.full((len(rows), length), IGNORE_INDEX)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids.to(device), labels.to(device)
