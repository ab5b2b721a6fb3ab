"""The law of a value that may be one of the numbers in the context (theory 3.8)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from causalqwen.losses import quantile_crps
from causalqwen.numbers.law import CRPS_LEVELS, ClassLaws, ValueLaw, ends_of_interval, level_of_quantile

_SAME = 1e-9  # relative: two numbers that differ by less are one
_END = 1e-12  # no quantile of the new number is asked for nearer to 0 or 1


@dataclass(frozen=True)
class CopyLaw:
    """F(y) = sum_j pi_j 1[y >= v_j] + pi_0 F_0(y): a number v_j of the context again, or a new one, F_0.

    It stands in for the `ValueLaw` of the new number: loc and scale [...] are that one's, and so are most of the methods.

    Args:
        of_new: F_0.
        candidates: float64 [..., m], v_j; +inf where a row has fewer.
        log_weights: [..., 1 + m], log pi, the new number's first; -inf where a row has fewer.
    """

    of_new: ValueLaw | ClassLaws
    candidates: Tensor
    log_weights: Tensor

    def _weights(self) -> Tensor:
        return self.log_weights.double().exp()

    def _are(self, values: Tensor) -> Tensor:
        """[..., k] -> bool [..., k, m], which candidates each of the values is."""
        candidates = self.candidates.unsqueeze(-2)
        near = (values.unsqueeze(-1) - candidates).abs() <= _SAME * candidates.abs()
        return near & candidates.isfinite()

    def stands(self, value: Tensor) -> Tensor:
        """Whether each value [...] is one of the candidates."""
        return self._are(value.unsqueeze(-1)).any(-1).squeeze(-1)

    def log_copied(self, value: Tensor) -> Tensor:
        """log of the summed weights of the candidates that `value` [...] is; a very negative number where it is none."""
        weights, lowest = self.log_weights[..., 1:], torch.finfo(self.log_weights.dtype).min
        return weights.masked_fill(~self._are(value.unsqueeze(-1)).squeeze(-2), lowest).logsumexp(-1)

    def most_likely(self) -> tuple[Tensor, Tensor]:
        """The candidates' most likely value and its probability [...]; nan and 0 where there are no candidates."""
        weights = self._weights()
        if self.candidates.shape[-1] == 0:
            return torch.full_like(weights[..., 0], torch.nan), torch.zeros_like(weights[..., 0])
        each = self.candidates.unsqueeze(-1).unbind(-2)
        together = torch.cat(
            [(self._are(one).squeeze(-2) * weights[..., 1:]).sum(-1, keepdim=True) for one in each], -1
        )
        probability, place = together.max(-1)
        return self.candidates.gather(-1, place.unsqueeze(-1)).squeeze(-1), probability

    def copied(self) -> tuple[Tensor, Tensor]:
        """Whether one candidate's value has more than half of the probability, and the most likely one, [...] each."""
        value, probability = self.most_likely()
        return probability > 0.5, value

    def to(self, device: torch.device | str) -> "CopyLaw":
        """The same there."""
        return replace(self, candidates=self.candidates.to(device), log_weights=self.log_weights.to(device))

    def beside_levels(self) -> "CopyLaw":
        """The same law with an axis more, [..., 1], beside which many levels stand."""
        candidates, log_weights = self.candidates.unsqueeze(-2), self.log_weights.unsqueeze(-2)
        return replace(self, candidates=candidates, log_weights=log_weights)

    def quantile(
        self, loc: Tensor, scale: Tensor, p: Tensor | float, *, raw: bool = False, clip: bool = False
    ) -> Tensor:
        """inf {y : F(y) >= p} for p in (0, 1), exactly: min over k of max(v_(k), Q_0((p - W_k) / pi_0)), v_(0) = -inf.

        v_(k) are the candidates in order, W_k the summed weights of the k smallest, Q_0 that of the new number, recalibrated
        unless `raw` and clipped by `ValueLaw.clip` if `clip`, with Q_0(u) = -inf for u <= 0 and +inf for u >= 1. ValueError for
        p outside (0, 1).
        """
        p = level_of_quantile(p)
        weights = self._weights()
        new = weights[..., 0].clamp(min=torch.finfo(torch.float64).tiny)

        def of_new(level: Tensor) -> Tensor:
            quantile = self.of_new.quantile(loc, scale, level.clamp(_END, 1 - _END), raw=raw)
            quantile = self.of_new.clip(quantile) if clip else quantile
            return quantile.masked_fill(level <= 0, -torch.inf).masked_fill(level >= 1, torch.inf)

        values, order = self.candidates.sort(-1)
        below = weights[..., 1:].gather(-1, order).cumsum(-1)
        least = of_new(p / new)
        for value, weight in zip(values.unbind(-1), below.unbind(-1), strict=True):
            least = torch.minimum(least, torch.maximum(value, of_new((p - weight) / new)))
        return least

    def interval(self, loc: Tensor, scale: Tensor, level: float, *, raw: bool = False) -> tuple[Tensor, Tensor]:
        """Central interval of `level` in (0, 1)."""
        low, high = ends_of_interval(level)
        return self.quantile(loc, scale, low, raw=raw), self.quantile(loc, scale, high, raw=raw)

    def cdf(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """F(value) of the raw law."""
        weights = self._weights()
        reached = self.candidates <= value.unsqueeze(-1)
        return (weights[..., 1:] * reached).sum(-1) + weights[..., 0] * self.of_new.cdf(loc, scale, value)

    def _either(self, value: Tensor, of_new: Tensor) -> Tensor:
        """log pi of the candidates that `value` is, else log pi_0 + of_new."""
        return torch.where(self.stands(value), self.log_copied(value), self.log_weights[..., 0] + of_new)

    def axis_losses(self, loc: Tensor, scale: Tensor, value: Tensor, kind: str) -> Tensor:
        """What is trained on: -log pi of a value in the context, else -log pi_0 + `ValueLaw.axis_losses`, elementwise."""
        return -self._either(value, -self.of_new.axis_losses(loc, scale, value, kind))

    def log_prob(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """Log density per unit of a new value; of one in the context, the log of its candidates' probability."""
        return self._either(value, self.of_new.log_prob(loc, scale, value))

    def crps(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """CRPS in the data's units from 199 raw quantiles, those of a new number clipped (theory 3.11)."""
        loc, scale = loc.unsqueeze(-1), scale.unsqueeze(-1)
        quantiles = self.beside_levels().quantile(loc, scale, CRPS_LEVELS, raw=True, clip=True)
        return quantile_crps(value.double(), quantiles, CRPS_LEVELS)

    quantile_crps = crps
