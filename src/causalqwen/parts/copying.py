"""Copying: which number of the context is written again, and the distribution of a value that may be one (theory 3.8)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from causalqwen.losses import quantile_crps
from causalqwen.numbers.law import CRPS_LEVELS, ClassLaws, ValueLaw, ends_of_interval, level_of_quantile

NOWHERE = 2**62
"""The place of a candidate that is none."""

_COPIED_AT_START = 0.05
_SAME = 1e-9  # relative: two numbers that differ by less are one
_END = 1e-12  # no quantile of the new number is asked for nearer to 0 or 1


@dataclass(frozen=True)
class Candidates:
    """The numbers in R rows, and positions [...] in these rows which may say one of them again.

    features: [R, m, H], z at the place before each number; where nothing is before it, at its own place, or zeros where the
        backbone does not see that place.
    values: float64 [R, m]. places: int64 [R, m], where the numbers stand, `NOWHERE` where a row has fewer.
    rows, at: int64 [...], each position's row, and its place there: it is offered the numbers up to that place.
    """

    features: Tensor
    values: Tensor
    places: Tensor
    rows: Tensor
    at: Tensor

    def __getitem__(self, index: Any) -> "Candidates":
        """Some of the positions."""
        return replace(self, rows=self.rows[index], at=self.at[index])

    def to(self, device: torch.device | str) -> "Candidates":
        return replace(self, **{item.name: getattr(self, item.name).to(device) for item in fields(self)})

    @property
    def offered(self) -> Tensor:
        """bool [..., m]: whether a number stands before, or at, each position."""
        return self.places[self.rows] <= self.at.unsqueeze(-1)

    @property
    def values_offered(self) -> Tensor:
        """float64 [..., m], +inf for those that are not."""
        return self.values[self.rows].masked_fill(~self.offered, torch.inf)

    def hold(self, values: Tensor) -> Tensor:
        """Whether each value [...] is one of its candidates."""
        offered = self.values_offered
        return CopyLaw(ValueLaw(), offered, offered.new_zeros(1)).stands(values)

    @classmethod
    def of_tokens(
        cls,
        features: Tensor,
        input_ids: Tensor,
        numeric_values: Tensor | None,
        attention_mask: Tensor | None,
        num_token_id: int,
        hidden: bool = False,
    ) -> "Candidates":
        """The candidates of a batch, for each of its positions [B, S]; features z [B, S, H]. Padding may stand on either side.
        hidden: the backbone does not see numbers."""
        is_number = input_ids == num_token_id
        most = int(is_number.sum(-1).max()) if numeric_values is not None else 0
        places = (~is_number).int().argsort(dim=-1, stable=True)[:, :most]
        before = (places - 1).clamp(min=0)
        follows = places > 0
        if attention_mask is not None:
            follows &= attention_mask.gather(-1, before) > 0
        before = torch.where(follows, before, places)
        values = places.double() if numeric_values is None else numeric_values.double().gather(-1, places)
        rows, at = torch.meshgrid(*(torch.arange(n, device=features.device) for n in input_ids.shape), indexing="ij")
        keys = features.gather(1, before.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
        return cls(
            keys.masked_fill(~follows.unsqueeze(-1), 0.0) if hidden else keys,
            values,
            places.masked_fill(~is_number.gather(-1, places), NOWHERE),
            rows,
            at,
        )

    def later(self) -> "Candidates":
        """The same numbers for one position of each row, after all of them."""
        rows = torch.arange(len(self.values), device=self.values.device)
        return replace(self, rows=rows, at=torch.full_like(rows, NOWHERE - 1))

    def with_number(self, features: Tensor, values: Tensor, is_number: Tensor) -> "Candidates":
        """One number more in each row where is_number [R] holds; features [R, H] that it followed from, values [R]."""
        places = torch.where(is_number, 0, NOWHERE)
        return replace(
            self,
            features=torch.cat([self.features, features.unsqueeze(1)], dim=1),
            values=torch.cat([self.values, values.unsqueeze(1)], dim=1),
            places=torch.cat([self.places, places.unsqueeze(1)], dim=1),
        )


@dataclass(frozen=True, eq=False)
class CopyLaw:
    """F(y) = sum_j pi_j 1[y >= v_j] + pi_0 F_0(y): a number v_j of the context again, or a new one.

    It stands in for the `ValueLaw` of the new number, F_0: loc and scale [...] are that one's, and so are most of the methods.

    Args:
        of_new: F_0.
        candidates: float64 [..., m], v_j; +inf where a row has fewer.
        log_weights: [..., 1 + m], log pi, the new number's first; -inf where a row has fewer.
    """

    of_new: ValueLaw | ClassLaws
    candidates: Tensor
    log_weights: Tensor

    @property
    def transform(self) -> Any:
        """The axis of a new number's value."""
        return self.of_new.transform  # type: ignore[union-attr] # laws of classes have each their own

    def weights(self) -> Tensor:
        """pi in float64, with a sum of 1 there too."""
        return self.log_weights.double().softmax(-1)

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
        return weights.masked_fill(~self._are(value.unsqueeze(-1)).squeeze(-2), lowest).logsumexp(-1).clamp(max=0.0)

    def most_likely(self) -> tuple[Tensor, Tensor]:
        """The candidates' most likely value and its probability [...]; nan and 0 where there are no candidates."""
        weights = self.weights()
        if self.candidates.shape[-1] == 0:
            return torch.full_like(weights[..., 0], torch.nan), torch.zeros_like(weights[..., 0])
        together = (self._are(self.candidates) * weights[..., 1:].unsqueeze(-2)).sum(-1)
        probability, place = together.max(-1)
        return self.candidates.gather(-1, place.unsqueeze(-1)).squeeze(-1), probability

    def copied(self) -> tuple[Tensor, Tensor]:
        """Whether one candidate's value has more than half of the probability, and the most likely one, [...] each."""
        value, probability = self.most_likely()
        return probability > 0.5, value

    def mean_beside(self, of_new: Tensor) -> Tensor:
        """pi_0 m_0 + sum_j pi_j v_j [...] where `of_new` [...] is m_0, the mean of a new number.

        A v_j counts as it stands if it has more than half of the probability. Any other is clipped to the training range,
        widened by its own width, and to the support: the mean of a share does not follow a year that is hardly likely.
        """
        weights, (value, probability) = self.weights(), self.most_likely()
        as_is = self._are(value.unsqueeze(-1)).squeeze(-2) & (probability > 0.5).unsqueeze(-1)
        held = self.transform.support.held(self.of_new.clip(self.candidates))
        each = torch.where(as_is, self.candidates, held).masked_fill(~self.candidates.isfinite(), 0.0)
        return weights[..., 0] * of_new + (weights[..., 1:] * each).sum(-1)

    def or_said(self, of_new: Tensor) -> Tensor:
        """The candidates' value that has more than half of the probability, or else `of_new` [...]."""
        return torch.where(*self.copied(), of_new)

    def __getitem__(self, rows: Any) -> "CopyLaw":
        """The laws of some of the rows."""
        return replace(self, candidates=self.candidates[rows], log_weights=self.log_weights[rows])

    def of_row(self, row: int, of_new: ValueLaw) -> "CopyLaw | ValueLaw":
        """The law of one row, whose new number has another law: that one, where nothing is offered."""
        candidates, log_weights = self.candidates[row].flatten(), self.log_weights[row].double().flatten()
        offered = candidates.isfinite()
        if not bool(offered.any()):
            return of_new
        kept = torch.cat([log_weights[:1], log_weights[1:][offered]])
        return CopyLaw(of_new, candidates[offered], kept)

    def to(self, device: torch.device | str) -> "CopyLaw":
        return replace(self, candidates=self.candidates.to(device), log_weights=self.log_weights.to(device))

    def beside_levels(self) -> "CopyLaw":
        """The same law with an axis more, [..., 1], beside which many levels stand."""
        candidates, log_weights = self.candidates.unsqueeze(-2), self.log_weights.unsqueeze(-2)
        return replace(self, candidates=candidates, log_weights=log_weights)

    def quantile(
        self, loc: Tensor, scale: Tensor, p: Tensor | float, *, raw: bool = False, clip: bool = False
    ) -> Tensor:
        """inf {y : F(y) >= p}, exactly: min over k of max(v_(k), Q_0((p - W_k) / pi_0)), v_(0) = -inf.

        v_(k) are the candidates in order, W_k the summed weights of the k smallest, Q_0 that of the new number, recalibrated
        unless `raw` and clipped by `ValueLaw.clip` if `clip`, with Q_0(u) = -inf for u <= 0 and +inf for u >= 1. v_(k) grows
        with k and the other term falls: halving finds where they meet. ValueError for p outside (0, 1).
        """
        p = level_of_quantile(p)
        weights = self.weights()
        new = weights[..., 0].clamp(min=torch.finfo(torch.float64).tiny)

        def of_new(level: Tensor) -> Tensor:
            quantile = self.of_new.quantile(loc, scale, level.clamp(_END, 1 - _END), raw=raw)
            quantile = self.of_new.clip(quantile) if clip else quantile
            return quantile.masked_fill(level <= 0, -torch.inf).masked_fill(level >= 1, torch.inf)

        values, order = self.candidates.sort(-1)
        below = weights[..., 1:].gather(-1, order).cumsum(-1)
        shape, most = torch.broadcast_shapes(loc.shape, p.shape, new.shape), values.shape[-1]
        # At 0 none is passed, at m + 1 all are.
        values = nn.functional.pad(values, (1, 1), value=torch.inf).expand(*shape, -1)
        below = nn.functional.pad(below, (1, 0)).expand(*shape, -1)

        def of_new_after(place: Tensor) -> Tensor:
            return of_new((p - below.gather(-1, place.unsqueeze(-1)).squeeze(-1)) / new)

        passed = torch.zeros(shape, dtype=torch.int64, device=values.device)  # the greatest k known to have v_(k) < Q_0
        reached = torch.full_like(passed, most + 1)  # the least known not to
        while bool((reached - passed > 1).any()):
            middle = (passed + reached) // 2
            is_reached = values.gather(-1, middle.unsqueeze(-1)).squeeze(-1) >= of_new_after(middle)
            is_reached &= middle > 0  # of those that are found already
            reached, passed = torch.where(is_reached, middle, reached), torch.where(is_reached, passed, middle)
        return torch.minimum(values.gather(-1, reached.unsqueeze(-1)).squeeze(-1), of_new_after(passed))

    def interval(self, loc: Tensor, scale: Tensor, level: float, *, raw: bool = False) -> tuple[Tensor, Tensor]:
        """Central interval of `level` in (0, 1)."""
        low, high = ends_of_interval(level)
        return self.quantile(loc, scale, low, raw=raw), self.quantile(loc, scale, high, raw=raw)

    def cdf(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """F(value) of the raw law."""
        weights = self.weights()
        reached = self.candidates <= value.unsqueeze(-1)
        return (weights[..., 1:] * reached).sum(-1) + weights[..., 0] * self.of_new.cdf(loc, scale, value)

    def _either(self, value: Tensor, of_new: Tensor) -> Tensor:
        """log pi of the candidates that `value` is, else log pi_0 + of_new."""
        return torch.where(self.stands(value), self.log_copied(value), self.log_weights[..., 0] + of_new)

    def axis_losses(self, loc: Tensor, scale: Tensor, value: Tensor, kind: str) -> Tensor:
        """The loss in training: -log pi of a value in the context, else -log pi_0 + `ValueLaw.axis_losses`, elementwise."""
        return -self._either(value, -self.of_new.axis_losses(loc, scale, value, kind))

    def log_prob(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """Log density of a new value, per unit of the data; of one in the context, the log of its candidates' probability."""
        return self._either(value, self.of_new.log_prob(loc, scale, value))

    def crps(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """CRPS in the data's units from 199 raw quantiles, those of a new number clipped (theory 3.11)."""
        loc, scale = loc.unsqueeze(-1), scale.unsqueeze(-1)
        quantiles = self.beside_levels().quantile(loc, scale, CRPS_LEVELS, raw=True, clip=True)
        return quantile_crps(value.double(), quantiles, CRPS_LEVELS)

    quantile_crps = crps


AnyLaw = ValueLaw | ClassLaws | CopyLaw


def joined(of_new: ValueLaw | ClassLaws, candidates: Sequence[Tensor], log_weights: Sequence[Tensor]) -> CopyLaw:
    """The law of the rows of several batches, one after the other: parts [n, m] and [n, 1 + m], m of each batch's own."""

    def padded(parts: Sequence[Tensor], end: float) -> Tensor:
        width = max(part.shape[1] for part in parts)
        return torch.cat([nn.functional.pad(part, (0, width - part.shape[1]), value=end) for part in parts]).double()

    return CopyLaw(of_new, padded(candidates, math.inf), padded(log_weights, -math.inf))


class CopyHead(nn.Module):
    """Weights of the numbers in the context, and of a new one, at a position with features x:

        score_j = <Q x, K x_j> / sqrt(d) + b,   score_0 = <w, x> + c,   pi = softmax(score)

    x_j are the features that number j followed from. Q, w and c start at zero and b at the log odds of 1 to 19, so that a
    single number in the context starts with 5% of the probability, whatever it is.
    """

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden_size, size, bias=False)
        self.key = nn.Linear(hidden_size, size, bias=False)
        self.new = nn.Linear(hidden_size, 1)
        self.bias = nn.Parameter(torch.zeros(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The start."""
        nn.init.zeros_(self.query.weight)
        nn.init.normal_(self.key.weight, std=self.key.in_features**-0.5)
        nn.init.zeros_(self.new.weight)
        nn.init.zeros_(self.new.bias)
        nn.init.constant_(self.bias, math.log(_COPIED_AT_START / (1 - _COPIED_AT_START)))

    def forward(self, features: Tensor, keys: Tensor, candidates: Candidates) -> Tensor:
        """log pi [..., 1 + m], the new number's first, -inf where none is offered; features x [..., H], keys x_j [R, m, H]."""
        features, keys = (column.to(self.query.weight.dtype) for column in (features, keys))
        query, key = self.query(features), self.key(keys)[candidates.rows]
        scores = (key @ query.unsqueeze(-1)).squeeze(-1) / math.sqrt(query.shape[-1]) + self.bias
        scores = scores.masked_fill(~candidates.offered, -torch.inf)
        return torch.cat([self.new(features), scores], dim=-1).log_softmax(-1)

    def law(self, law: ValueLaw | ClassLaws, features: Tensor, keys: Tensor, candidates: Candidates) -> CopyLaw:
        """The law of the values that follow features x [..., H], the positions of `candidates`: one of these, or a new number,
        whose law is given. keys: x_j [R, m, H]."""
        return CopyLaw(law, candidates.values_offered, self(features, keys, candidates))
