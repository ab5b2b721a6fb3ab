"""The distribution of a value, as an object."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from causalqwen.distributions import StableFamily, get_family
from causalqwen.losses import quantile_crps
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.processor import CausalQwenProcessor
from causalqwen.numbers import ValueTransform

CRPS_LEVELS = torch.arange(1, 200, dtype=torch.float64) / 200
"""The 199 levels from which a CRPS is taken where it has no closed form (theory 3.11)."""


def clip_range(value_range: Sequence[float]) -> tuple[float, float]:
    """The training range widened by its own width on both sides: what quantiles are clipped to (theory 3.11)."""
    low, high = value_range
    return low - (high - low), high + (high - low)


@dataclass(frozen=True)
class NumberPrediction:
    """Y with t(Y) ~ S(loc, scale), t the value transform; everything in the data's units.

    loc, scale: on the axis of the transform. num_prob: P_NUM, how sure the model is that a number comes here.
    interval_levels: raw central level for each wanted one of 0%, 1%, ..., 100%; None where none was fitted.
    """

    loc: float
    scale: float
    transform: ValueTransform
    law: StableFamily
    num_prob: float
    value_range: tuple[float, float] | None = None
    interval_levels: tuple[float, ...] | None = None

    @property
    def median(self) -> float:
        """t^-1(loc), exact."""
        return self._at(0.5)

    def _at(self, level: float) -> float:
        axis = self.loc + self.scale * self.law.quantile(torch.tensor(level, dtype=torch.float64))
        return self.transform.inverse(axis).item()

    def _raw_level(self, level: float, raw: bool) -> float:
        """The central level of the model's own law that covers `level` of the validation rows."""
        if raw or self.interval_levels is None:
            return level
        position = level * (len(self.interval_levels) - 1)
        left = min(int(position), len(self.interval_levels) - 2)
        low, high = self.interval_levels[left : left + 2]
        return low + (high - low) * (position - left)

    def quantile(self, p: float, *, raw: bool = False) -> float:
        """Quantile at p in (0, 1); recalibrated where the model was, unless `raw`."""
        if not 0 < p < 1:
            raise ValueError(f"a quantile's level must lie strictly between 0 and 1, got {p}")
        central = self._raw_level(abs(2 * p - 1), raw)
        return self._at(0.5 + (0.5 if p > 0.5 else -0.5) * central)

    def interval(self, level: float = 0.9, *, raw: bool = False) -> tuple[float, float]:
        """Central interval that covers `level`; recalibrated on validation rows where there were some, unless `raw`."""
        if not 0 < level < 1:
            raise ValueError(f"an interval's level must lie strictly between 0 and 1, got {level}")
        return self.quantile((1 - level) / 2, raw=raw), self.quantile((1 + level) / 2, raw=raw)

    def cdf(self, value: float) -> float:
        """P(Y <= value) under the model's own law (the probability integral transform of an observation)."""
        return self.law.cdf(self._axis(value), *self._parameters()).item()

    def log_prob(self, value: float) -> float:
        """Log density at `value`, in 1/units, under the model's own law: with the Jacobian of the transform."""
        observed = torch.tensor(value, dtype=torch.float64)
        density = self.law.log_prob(self._axis(value), *self._parameters())
        return (density + self.transform.log_jacobian(observed)).item()

    def crps(self, value: float) -> float:
        """CRPS of the model's own law at `value`, in units (lower is better).

        Closed form where the transform is affine. Through a symlog the law's CRPS in units is infinite: then from 199
        quantiles, clipped to the training range widened by its own width (theory 3.11).
        """
        if self.transform.is_affine:
            return self.law.crps(self._axis(value), *self._parameters()).item() * self.transform.width
        return quantile_crps(torch.tensor(value, dtype=torch.float64), self.crps_quantiles(), CRPS_LEVELS).item()

    def crps_quantiles(self) -> Tensor:
        """The law's 199 quantiles, clipped where a training range is known, float64 [199]."""
        quantiles = self.transform.inverse(self.loc + self.scale * self.law.quantile(CRPS_LEVELS))
        return quantiles if self.value_range is None else quantiles.clamp(*clip_range(self.value_range))

    def _axis(self, value: float) -> Tensor:
        return self.transform.forward(torch.tensor(value, dtype=torch.float64))

    def _parameters(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.loc, dtype=torch.float64), torch.tensor(self.scale, dtype=torch.float64)

    def __str__(self) -> str:
        low, high = self.interval(0.9)
        return f"{self.median:.6g} (90%: {low:.6g} to {high:.6g}; P_NUM {self.num_prob:.3g})"


class NumberPredictionMixin:
    """`predict_number` for a grafted model."""

    config: CausalQwenConfig
    processor: CausalQwenProcessor

    def number_prediction(self, loc: float, scale: float, num_prob: float) -> NumberPrediction:
        """The prediction object for one position's loc_Y, scale_Y and P_NUM."""
        config = self.config
        return NumberPrediction(
            float(loc),
            float(scale),
            self.value_transform,
            get_family(config.value_family),
            float(num_prob),
            tuple(config.value_range) if config.value_range else None,
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
        was_training = self.training
        self.eval()
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = processor(
                [prompts[row] for row in rows], prompt=True, padding=True, padding_side="left", return_tensors="pt"
            )
            batch = batch.to(self.device)
            position_ids = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            features = self.features(**batch, position_ids=position_ids).last_hidden_state[:, -1:]
            result = self.heads(features, skip_logits=True)
            columns = (result.loc_Y[:, 0], result.scale_Y[:, 0], result.num_prob[:, 0])
            for row, loc, scale, num_prob in zip(rows, *(column.tolist() for column in columns), strict=True):
                predictions[row] = self.number_prediction(loc, scale, num_prob)
        self.train(was_training)
        return predictions
