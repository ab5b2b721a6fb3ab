"""Copying: which of the numbers in the context is said again (theory 3.8)."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from causalqwen.numbers import ValueLaw
from causalqwen.numbers.copies import CopyLaw
from causalqwen.numbers.law import ClassLaws

NOWHERE = 2**62
"""The place of a candidate that is none."""

_COPIED_AT_START = 0.05


@dataclass(frozen=True)
class Candidates:
    """The numbers in R rows, and positions [...] in these rows which may say one of them again.

    features: [R, m, H], z at the place before each number, what it followed from; where nothing is before it, at its own place,
        or zeros where the backbone does not see that place.
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
        """The same there."""
        return replace(self, **{one.name: getattr(self, one.name).to(device) for one in fields(self)})

    @property
    def offered(self) -> Tensor:
        """bool [..., m]: whether a number stands before, or at, each position."""
        return self.places[self.rows] <= self.at.unsqueeze(-1)

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
        """Those of a batch, for each of its positions [B, S]; features z [B, S, H]. Padding may stand on either side.

        hidden: the backbone does not see numbers.
        """
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
        """The same numbers for one position of each row, behind all of them."""
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
        features, keys = (one.to(self.query.weight.dtype) for one in (features, keys))
        query, key = self.query(features), self.key(keys)[candidates.rows]
        scores = (key @ query.unsqueeze(-1)).squeeze(-1) / math.sqrt(query.shape[-1]) + self.bias
        scores = scores.masked_fill(~candidates.offered, -torch.inf)
        return torch.cat([self.new(features), scores], dim=-1).log_softmax(-1)

    def law(
        self, law: ValueLaw | ClassLaws, features: Tensor, keys: Tensor, candidates: Candidates | None
    ) -> ValueLaw | ClassLaws | CopyLaw:
        """The law of the values that follow features x [..., H], the positions of `candidates`: one of these, or a new number,
        whose law is given. keys: x_j [R, m, H]."""
        if candidates is None:
            return law
        values = candidates.values[candidates.rows].masked_fill(~candidates.offered, torch.inf)
        return CopyLaw(law, values, self(features, keys, candidates))
