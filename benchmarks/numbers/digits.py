"""The same backbone writing digits: LoRA on "prompt value" as plain text, then sampled for its distribution.

With `number_token_loss` beside the cross-entropy this is the rival of Zausinger et al. 2024 (Regress, Don't Guess).
"""

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
_WRITING = 0.75
"""When fewer of the samples than this are still written, the others leave the cache."""
_ANSWER = re.compile(r"\s*([+-]?\d+(?:,\d{3})*(?:\.\d+)?)")


@dataclass(frozen=True)
class DigitWriter:
    """A rival of the mechanism in `rivals`.

    ntl: weight of the number token loss. samples: a row.
    bf16: train and sample under autocast in bfloat16; weights and losses are float32.
    """

    make: MakeModel
    ntl: float = 0.0
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
        digits = digit_ids(tokenizer)
        backbone.train()
        for picked in tqdm(order, desc="LoRA", leave=False):
            optimizer.zero_grad()
            for some in batches_by_length([rows[index][0] for index in picked], _TOKENS):
                ids, labels = _padded([rows[picked[place]] for place in some], backbone.device)
                learned = labels[:, 1:] != IGNORE_INDEX  # the vocabulary only where something is learned
                with self._autocast(backbone):  # anew each time: it keeps the weights that it has cast
                    hidden = backbone.base_model(input_ids=ids, use_cache=False)[0]
                    logits = backbone.get_output_embeddings()(hidden[:, :-1][learned]).float()
                targets = labels[:, 1:][learned]
                loss = F.cross_entropy(logits, targets)
                if self.ntl:
                    loss = loss + self.ntl * number_token_loss(logits, targets, digits)
                (loss * len(some) / len(picked)).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
        backbone.eval()

    @torch.no_grad()
    def _sample(self, backbone: Any, tokenizer: Any, prompts: Sequence[str], seed: int) -> list[list[str]]:
        """Continuations of every prompt at temperature 1; each prompt is read once, and its cache shared by its samples."""
        generator = torch.Generator(backbone.device).manual_seed(seed)
        texts: list[list[str]] = [[] for _ in prompts]
        groups = list(batches_by_length(tokenizer(list(prompts))["input_ids"], _CACHED // self.samples))
        for rows in tqdm(groups, desc="sampling", leave=False):
            batch = tokenizer([prompts[row] for row in rows], return_tensors="pt", padding=True, padding_side="left")
            mask = batch["attention_mask"].to(backbone.device)
            position = (mask.cumsum(-1) - 1).clamp(min=0)
            cache = DynamicCache(config=backbone.config)
            out = backbone(
                input_ids=batch["input_ids"].to(backbone.device), attention_mask=mask, position_ids=position,
                use_cache=True, logits_to_keep=1, **{CACHE: cache},
            )  # fmt: skip
            cache.batch_repeat_interleave(self.samples)
            logits, mask, position = (
                t.repeat_interleave(self.samples, 0) for t in (out.logits[:, -1], mask, position[:, -1:])
            )
            made = torch.full((len(mask), self.max_new_tokens), tokenizer.eos_token_id, device=mask.device)
            going = torch.arange(len(mask), device=mask.device)  # the samples that are still written, among all
            for step in range(self.max_new_tokens):
                level = torch.rand(len(made), 1, generator=generator, device=mask.device)
                chosen = drawn(logits, level[going])
                ended = (made[going, step - 1] == tokenizer.eos_token_id) & (step > 0)
                made[going, step] = chosen.squeeze(-1).masked_fill(ended, tokenizer.eos_token_id)
                on = made[going, step] != tokenizer.eos_token_id
                if not bool(on.any()) or step == self.max_new_tokens - 1:
                    break
                if on.float().mean() < _WRITING:
                    cache.batch_select_indices(on.nonzero().squeeze(-1))
                    going, chosen, mask, position = (tensor[on] for tensor in (going, chosen, mask, position))
                mask, position = torch.cat([mask, torch.ones_like(chosen)], dim=1), position + 1
                logits = backbone(
                    input_ids=chosen, attention_mask=mask, position_ids=position, use_cache=True, **{CACHE: cache}
                ).logits[:, -1]
            decoded = tokenizer.batch_decode(made, skip_special_tokens=True)
            for place, row in enumerate(rows):
                texts[row] = decoded[place * self.samples : (place + 1) * self.samples]
        return texts


def drawn(logits: Tensor, level: Tensor) -> Tensor:
    """A token of the softmax over logits [B, V] per row, int64 [B, 1], by its cumulated probabilities at level [B, 1] in
    [0, 1): one uniform draw where `torch.multinomial` takes V of them."""
    cumulated = logits.float().softmax(-1).cumsum(-1)
    tokens = torch.searchsorted(cumulated, level * cumulated[:, -1:], right=True)
    return tokens.clamp(max=logits.shape[-1] - 1)


def written(value: float) -> str:
    """The value in plain digits: 478.15, 4900000, at most 8 significant ones."""
    return np.format_float_positional(float(f"{value:.8g}"), trim="-")


def parse(text: str) -> float | None:
    """The number with which the text begins, or None."""
    match = _ANSWER.match(text)
    return float(match[1].replace(",", "")) if match else None


def digit_ids(tokenizer: Any) -> Tensor:
    """Ids of the tokens 0 to 9, int64 [10]. ValueError for a tokenizer that does not write single digits."""
    ids = [tokenizer(str(digit), add_special_tokens=False)["input_ids"] for digit in range(10)]
    if any(len(tokens) != 1 for tokens in ids):
        raise ValueError("the number token loss needs a tokenizer with one token for each digit")
    return torch.tensor([tokens[0] for tokens in ids])


def number_token_loss(logits: Tensor, targets: Tensor, digits: Tensor) -> Tensor:
    """Mean over the targets that are digits of sum_j p_j |y - j|, p the softmax over the logits of the ten digit tokens: the
    Wasserstein form of the number token loss. 0 where no target is a digit.

    logits [N, V], targets int64 [N], digits int64 [10] -> a scalar.
    """
    digits = digits.to(logits.device)
    is_digit = targets.unsqueeze(-1) == digits
    rows = is_digit.any(-1)
    value = is_digit[rows].long().argmax(-1, keepdim=True)
    distance = (torch.arange(10, device=logits.device) - value).abs().to(logits.dtype)
    lost = (logits[rows][:, digits].softmax(-1) * distance).sum(-1)
    return lost.sum() / rows.sum().clamp(min=1)


def _padded(rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids and labels [B, S] of prompts and answers, padded on the right, where nothing before it looks."""
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels = torch.zeros(len(rows), length, dtype=torch.int64), torch.full((len(rows), length), IGNORE_INDEX)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids.to(device), labels.to(device)
