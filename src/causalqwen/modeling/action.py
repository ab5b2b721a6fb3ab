"""Action: one linear law, the same for everybody, from an individual and exogenous noise to tokens and values.

    U' = U + |b_noise| eps            eps ~ S(0, 1), independent per coordinate       (theory 2.4)
    S_k = W_k U' + b_k                the score of token k; it decides against C_k + c(z)
    Y   = W_reg U' + b_reg            the value, on the axis of the value transform

Sums and linear maps of stable laws are stable, so all of it is closed form.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from causalqwen.distributions import SCALE_FLOOR, get_family, get_value_family, upcast
from causalqwen.modeling.vocabulary import Vocabulary, effective_linear
from causalqwen.parts import PARTS, number_row


@dataclass(frozen=True)
class ActionSettings:
    """What a `CausalQwenConfig` says of the action law, by its names.

    Args:
        num_token_id: None for no number channel.
        free_token_ids: rows that no token uses.
        score_scale: "common": every token has exogenous noise of its own that fills its scale up to a common one, one number
            per position that no row's |W_k| (scale_U + |b_noise|) exceeds; argmax_k P_k is then argmax_k loc_S.
            "documents": |W_k| (scale_U + |b_noise|), one per token (overview 2.4).
        score_noise, score_slope: scale at the threshold, and growth below it, of a token's own noise beside what "common"
            fills up (see `graded_scale`): they set how probabilities fall off, and move no decision. Not for "documents".
        vocabulary_family, value_family: the laws of the scores and of the value.
        initial_noise, initial_threshold: |b_noise| and C at the start.
        token_thresholds: standard deviation of eps_k at the start, where every token of the matrix has a threshold C + eps_k;
            None for one threshold (overview 4, foundations 3.1.1).
    """

    num_token_id: int | None = None
    free_token_ids: Sequence[int] = ()
    score_scale: str = "common"
    score_noise: float = 0.0
    score_slope: float = 0.0
    vocabulary_family: str = "cauchy"
    value_family: str = "cauchy"
    initial_noise: float = 0.0
    initial_threshold: float = 0.0
    token_thresholds: float | None = None

    @classmethod
    def of(cls, config: Any) -> "ActionSettings":
        """Those of a configuration."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


class ActionNetwork(nn.Module):
    """The action law.

    Its W_cls is a linear layer `lm_head` of V rows: its own where `vocab_size` is given, else the backbone's, handed to
    each call, so that it stays tied to the embedding where it was; or a `Vocabulary` of it, which keeps what follows from it.

    `<NUM>` has a row of its own (`num_row`, `num_bias`): behind the V rows where num_token_id == V, else added to row
    num_token_id, starting at 0. Its bias is also its threshold: only loc - C enters any decision.

    Args:
        causal_size: C.
        vocab_size: V, for a network with its own `lm_head`; None to be handed one.
        settings: see `ActionSettings`.
        matrix_rows: V of the lm_head that it will be handed.
    """

    vocabulary_mask: Tensor
    rest_mask: Tensor

    def __init__(
        self,
        causal_size: int,
        vocab_size: int | None = None,
        settings: ActionSettings = ActionSettings(),
        *,
        matrix_rows: int | None = None,
    ) -> None:
        super().__init__()
        if settings.score_scale not in PARTS["score_scale"]:
            known = ", ".join(PARTS["score_scale"])
            raise ValueError(f"unknown score scale {settings.score_scale!r}; use one of {known}")
        rows = matrix_rows if matrix_rows is not None else vocab_size
        if rows is None:
            raise ValueError(
                "give vocab_size for a network of its own, or matrix_rows of the lm_head it will be handed"
            )
        self.rows = rows
        self.num_token_id = settings.num_token_id
        self.number = number_row(settings.num_token_id, rows)
        self.free_token_ids = list(settings.free_token_ids)
        self.scales = PARTS["score_scale"][settings.score_scale]
        if not self.scales.common and (settings.score_noise or settings.score_slope):
            raise ValueError("score_noise and score_slope belong to a score scale that all tokens share: 'common'")
        self.score_noise = settings.score_noise
        self.score_slope = settings.score_slope
        self.law = get_family(settings.vocabulary_family)
        self.value_law = get_value_family(settings.value_family)
        self.start = settings

        self.lm_head = nn.Linear(causal_size, vocab_size) if vocab_size is not None else None
        self.b_noise = nn.Parameter(torch.empty(causal_size))
        self.threshold = nn.Parameter(torch.empty(()))
        self.token_thresholds = nn.Parameter(torch.empty(rows)) if settings.token_thresholds is not None else None
        self.num_row = nn.Parameter(torch.zeros(causal_size))
        self.num_bias = nn.Parameter(torch.zeros(()))
        self.value_head = nn.Linear(causal_size, 1)
        self.register_buffer("vocabulary_mask", self._mask(), persistent=False)
        self.register_buffer("rest_mask", self._rest_mask(), persistent=False)
        self.reset_parameters()

    def _mask(self) -> Tensor:
        mask = torch.ones(self.rows + self.number.columns, dtype=torch.bool)
        mask[self.free_token_ids] = False
        return mask

    def _rest_mask(self) -> Tensor:
        """[V]: rows of the matrix that tokens other than `<NUM>` use."""
        mask = self._mask()[: self.rows]
        if self.num_token_id is not None:
            mask[self.num_token_id : self.num_token_id + 1] = False
        return mask

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The start: constant noise and threshold, `<NUM>` unmoved, an ordinary value head."""
        nn.init.constant_(self.b_noise, self.start.initial_noise)
        nn.init.constant_(self.threshold, self.start.initial_threshold)
        if self.token_thresholds is not None:
            nn.init.normal_(self.token_thresholds, std=self.start.token_thresholds)
        nn.init.zeros_(self.num_row)
        nn.init.zeros_(self.num_bias)
        nn.init.normal_(self.value_head.weight, std=self.value_head.in_features**-0.5)
        nn.init.zeros_(self.value_head.bias)

    def reset_buffers(self) -> None:
        """Fill the buffers that a checkpoint does not hold."""
        self.vocabulary_mask.copy_(self._mask())
        self.rest_mask.copy_(self._rest_mask())

    @property
    def columns_in_use(self) -> Tensor | None:
        """`vocabulary_mask`; None where tokens use all columns."""
        return self.vocabulary_mask if self.free_token_ids else None

    @property
    def rest_in_use(self) -> Tensor | None:
        """`rest_mask`; None where tokens other than `<NUM>` use all rows of the matrix."""
        return self.rest_mask if self.free_token_ids or self.num_token_id in range(self.rows) else None

    @property
    def noise(self) -> Tensor:
        """|b_noise| [C], float32."""
        return upcast(self.b_noise.abs())

    def vocabulary(self, lm_head: Any = None) -> Vocabulary:
        """The rows of `lm_head` as they are now; a `Vocabulary` as it is; of this network's own lm_head by default."""
        if isinstance(lm_head, Vocabulary):
            return lm_head
        if lm_head is None and self.lm_head is None:
            raise ValueError("this action network has no lm_head of its own: hand it the backbone's")
        return Vocabulary(self, self.lm_head if lm_head is None else lm_head)

    def forward(self, loc: Tensor, scale: Tensor, lm_head: Any = None) -> tuple[Tensor, Tensor]:
        """The law of all scores with the noise integrated out (overview 2.4).

        loc, scale: loc_U, scale_U [..., C] -> loc_S [..., V'], scale_S [..., 1] ("common") or [..., V'] ("documents"),
        V' = V + 1 where `<NUM>` stands behind the matrix.
        """
        words = self.vocabulary(lm_head)
        return self.score_loc(loc, words), self.score_scale_of(self.law.add(scale, self.noise), words)

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def score_loc(self, loc: Tensor, lm_head: Any = None) -> Tensor:
        """loc_S [..., V'] from loc_U [..., C]: the backbone's own product, plus `<NUM>`'s column."""
        return self.number.scores(self, loc, self.vocabulary(lm_head))

    def num_loc(self, loc: Tensor, lm_head: Any = None) -> Tensor:
        """loc of `<NUM>`'s score [...], float32."""
        words = self.vocabulary(lm_head)
        of_row = F.linear(upcast(loc), upcast(words.number_row()).unsqueeze(0)).squeeze(-1)
        return of_row + self.number.bias(self, words)

    def score_scale_of(self, scale: Tensor, lm_head: Any = None) -> Tensor:
        """scale_S from the scale [..., C] of U': [..., 1] where all share it, or [..., V'], float32."""
        return self.scales.of_all(self, scale, self.vocabulary(lm_head))

    def common_scale(self, scale: Tensor, lm_head: Any = None) -> Tensor:
        """m . scale [...], float32, the family's sum, of the scale [..., C] of U': at least |W_k| scale for every row."""
        return self.scale_of_row(scale, self.vocabulary(lm_head).largest)

    def scale_of_row(self, scale: Tensor, row: Tensor) -> Tensor:
        """|row| scale [...] of the scale [..., C] of U', float32."""
        scales = self.law.linear_scale(upcast(scale), row.unsqueeze(0).to(upcast(scale).dtype))
        return scales.squeeze(-1).clamp(min=SCALE_FLOOR)

    # ---- values ------------------------------------------------------------------------------------------------------

    @property
    def value_linear(self) -> tuple[Tensor, Tensor]:
        """W_reg [1, C] and b_reg [1], adapters included, in float32 at least."""
        weight, bias = effective_linear(self.value_head)
        return upcast(weight), upcast(bias)

    def value(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """(loc_Y, scale_Y) [...] on the value axis from the law of U' [..., C], float32; scale_Y = |W_reg| scale."""
        value_loc, value_scale = self.value_law.linear(upcast(loc), upcast(scale), *self.value_linear)
        return value_loc.squeeze(-1), value_scale.squeeze(-1).clamp(min=SCALE_FLOOR)
