"""The distribution of a value, as an object."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.processor import CausalQwenProcessor
from causalqwen.numbers import ValueLaw, ValueTransform


@dataclass(frozen=True)
class NumberPrediction:
    """One number's distribution, in the data's units: t(Y) ~ S(loc, scale), t the value transform.

    loc, scale: on the axis of the transform. num_prob: P_NUM, how sure the model is that a number comes here.
    law: the transform, the family and the recalibration that all predictions of a model share.
    """

    loc: float
    scale: float
    num_prob: float
    law: ValueLaw

    def _parameters(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.loc, dtype=torch.float64), torch.tensor(self.scale, dtype=torch.float64)

    @property
    def median(self) -> float:
        """t^-1(loc), exact."""
        return self.law.quantile(*self._parameters(), 0.5).item()

    def quantile(self, p: float, *, raw: bool = False) -> float:
        """Quantile at p in (0, 1); recalibrated on validation rows where there were some, unless `raw`."""
        return self.law.quantile(*self._parameters(), p, raw=raw).item()

    def interval(self, level: float = 0.9, *, raw: bool = False) -> tuple[float, float]:
        """Central interval that covers `level` in (0, 1); recalibrated as `quantile`."""
        low, high = self.law.interval(*self._parameters(), level, raw=raw)
        return low.item(), high.item()

    def cdf(self, value: float) -> float:
        """P(Y <= value) under the model's own law."""
        return self.law.cdf(*self._parameters(), torch.tensor(value, dtype=torch.float64)).item()

    def log_prob(self, value: float) -> float:
        """Log density at `value`, per unit, under the model's own law."""
        return self.law.log_prob(*self._parameters(), torch.tensor(value, dtype=torch.float64)).item()

    def crps(self, value: float) -> float:
        """CRPS at `value`, in units, lower is better: see `ValueLaw.crps`."""
        return self.law.crps(*self._parameters(), torch.tensor(value, dtype=torch.float64)).item()

    def __str__(self) -> str:
        low, high = self.interval(0.9)
        return f"{self.median:.6g} (90%: {low:.6g} to {high:.6g}; P_NUM {self.num_prob:.3g})"


class NumberPredictionMixin:
    """`predict_number` for a grafted model."""

    config: CausalQwenConfig
    processor: CausalQwenProcessor

    @property
    def value_transform(self) -> ValueTransform:
        """The map between values and the axis of the value head."""
        return ValueTransform(**(self.config.value_transform or {}))

    @property
    def value_law(self) -> ValueLaw:
        """What turns (loc_Y, scale_Y) into medians, intervals and scores in the data's units."""
        config = self.config
        return ValueLaw(
            self.value_transform,
            config.value_family,
            (config.value_range[0], config.value_range[1]) if config.value_range else None,
            tuple(config.interval_levels) if config.interval_levels else None,
        )

    @torch.no_grad()
    def predict_number(self, prompts: str | Sequence[str], batch_size: int = 32) -> list[NumberPrediction]:
        """What number follows each prompt, as a distribution.

        Args:
            prompts: texts that end where the number would start ("The boiling point of water is"); a trailing space is
                dropped, because `<NUM>` brings its own.
            batch_size: prompts per forward pass.

        Returns:
            one `NumberPrediction` per prompt, in their order.

        Raises:
            ValueError: an empty prompt, or one longer than the context, by its index.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        processor = self.processor
        limit = getattr(self.config.text_config, "max_position_embeddings", None)
        encoded = processor(prompts, prompt=True) if prompts else {"input_ids": []}
        lengths = [len(ids) for ids in encoded["input_ids"]]
        for row, length in enumerate(lengths):
            if length == 0:
                raise ValueError(f"prompt {row} is empty")
            if limit is not None and length > limit:
                raise ValueError(f"prompt {row} has {length} tokens, but the context of this model holds {limit}")
        order = sorted(range(len(prompts)), key=lambda row: lengths[row])
        predictions: list[NumberPrediction | None] = [None] * len(prompts)
        law = self.value_law
        was_training = self.training
        self.eval()
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = processor(
                [prompts[row] for row in rows], prompt=True, padding=True, padding_side="left", return_tensors="pt"
            )
            inputs = dict(batch.to(self.device))
            position_ids = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            features = self.features(**inputs, position_ids=position_ids).last_hidden_state[:, -1:]
            result = self.heads(features, skip_logits=True)
            columns = (result.loc_Y[:, 0], result.scale_Y[:, 0], result.num_prob[:, 0])
            for row, loc, scale, prob in zip(rows, *(column.tolist() for column in columns), strict=True):
                predictions[row] = NumberPrediction(loc, scale, prob, law)
        self.train(was_training)
        return predictions
