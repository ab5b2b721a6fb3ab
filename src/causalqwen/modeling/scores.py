"""Action: one linear law, the same for everybody, from an individual and exogenous noise to tokens and values.

    U' = U + |b_noise| eps            eps ~ S(0, 1), independent per coordinate       (theory 2.4)
    S_k = W_k U' + b_k                the score of token k; it decides against C_k + c(z)
    Y   = W_reg U' + b_reg            the value, on the axis of the value transform

Sums and linear maps of stable laws are stable, so all of it is closed form. `Vocabulary` is W_cls of all tokens, and what
follows from it. A score scale says how scale_S follows from the scale of U'.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from causalqwen.distributions import SCALE_FLOOR, get_family, upcast

_ROWS_AT_ONCE = {"cpu": 1024}  # of the matrix: in a core's cache, where several passes take a seventh of the time
_MOST_ROWS = 8192  # elsewhere
_FEW = 16  # rows of a product that a processor takes up to three times as fast from the other side (experiments 7.3)


def effective_linear(layer: Any) -> tuple[Tensor, Tensor | None]:
    """W [K, C] and b [K] (None for none) of a linear layer, with the adapters that PEFT has put beside it, without dropout."""
    if not hasattr(layer, "get_base_layer"):
        return layer.weight, layer.bias
    base, was_training = layer.get_base_layer(), layer.training
    eye = torch.eye(base.weight.shape[1], dtype=base.weight.dtype, device=base.weight.device)
    bias, base.bias = base.bias, None  # a large one would cost W its last digits
    layer.eval()
    try:  # what every coordinate alone gives: right for any adapter that is linear in x
        with torch.autocast(eye.device.type, enabled=False):
            at_zero = layer(torch.zeros_like(eye[:1]))
            weight, of_adapter = (layer(eye) - at_zero).T, at_zero[0]
    finally:
        layer.train(was_training)
        base.bias = bias
    if bias is None and not bool(of_adapter.any()):
        return weight, None
    return weight, of_adapter if bias is None else bias + of_adapter


class DocumentsScale:
    """The score scale "documents": |W_k| scale, one for each token, what W makes of the scale of U' row by row (overview 2.4).

    common: whether all tokens of a position have one scale where nothing is drawn, so that it decides nothing. widest: the
    largest spread of g that is looked for in somebody's words: beyond it, what fits the text that was observed fits their next
    one worse (experiments 8).
    """

    common = False
    widest = 0.2

    def threshold(self, constant: Tensor, partition: Callable[[float], Tensor], temperature: float) -> Tensor:
        """C: the same at every position (overview 2.5)."""
        return constant

    def of_number(self, scale: Tensor, words: "Vocabulary") -> Tensor:
        """The scale of `<NUM>`'s score [...] from that of U' [..., C]."""
        return words.action.scale_of_row(scale, words.number_row())

    def of_all(self, scale: Tensor, words: "Vocabulary") -> Tensor:
        """scale_S [..., 1] or [..., V'] from that of U' [..., C]."""
        return words.scales(upcast(scale))

    def of_products(self, scale: Tensor, words: "Vocabulary") -> Tensor:
        """What `linear_ovr_loss` makes the scales of: the common one [...], or that of U' [..., C]."""
        return scale

    def number_row(self, row: Tensor, words: "Vocabulary") -> Tensor:
        """W_NUM [C], as far as the scale lets it reach."""
        return row


class CommonScale(DocumentsScale):
    """The score scale "common": one scale for all tokens of a position, and what is drawn of it is taken off (theory 3.5).

    Every token has exogenous noise of its own that fills its scale up to a common one, which is never below what any row makes
    of U': argmax_k P_k is then argmax_k loc_S, the backbone's own decision. Where individual or noise are drawn, they move a
    token's loc by S(0, d_k), and its scale is what d_k leaves.
    """

    common = True
    widest = 3.0

    def threshold(self, constant: Tensor, partition: Callable[[float], Tensor], temperature: float) -> Tensor:
        """T (C + log sum_k exp(loc_k / T)) [..., 1], of loc with nothing drawn: the P_k then sum to about 1."""
        return temperature * (constant + partition(temperature))

    def bound(self, scale: Tensor, words: "Vocabulary") -> Tensor:
        """min(max_j scale_j max_k |W_k|_a, m . scale) [...], |W_k|_a the row's a-norm, m_j = max_k |W_kj|.

        Both are at least |W_k| scale for every k; the longest row reaches the first where all coordinates have one scale.
        """
        scale = upcast(scale)
        longest = scale.amax(-1) * words.longest
        return torch.minimum(longest, words.action.scale_of_row(scale, words.largest)).clamp(min=SCALE_FLOOR)

    def of_number(self, scale: Tensor, words: "Vocabulary") -> Tensor:
        """The scale of any token [...]: the bound and the score noise."""
        bound, noise = self.bound(scale, words), words.action.score_noise
        return words.action.law.add(bound, torch.full_like(bound, noise)) if noise else bound

    def of_all(self, scale: Tensor, words: "Vocabulary") -> Tensor:
        return self.of_number(scale, words).unsqueeze(-1)

    def of_products(self, scale: Tensor, words: "Vocabulary") -> Tensor:
        return self.of_number(scale, words)

    def number_row(self, row: Tensor, words: "Vocabulary") -> Tensor:
        """W_NUM [C] within +-m, and no longer than the longest row: the common scale bounds `<NUM>`'s too."""
        limit, longest = words.largest.to(row.dtype), words.longest.to(row.dtype)
        row = torch.maximum(torch.minimum(row, limit), -limit)
        length = torch.linalg.vector_norm(row, words.action.law.alpha).clamp(min=SCALE_FLOOR)
        return row * (longest / length).clamp(max=1.0)


SCORE_SCALES = {"common": CommonScale(), "documents": DocumentsScale()}
"""By the setting `score_scale`."""


class ActionNetwork(nn.Module):
    """The action law of a configuration, over W_cls of V rows: a linear layer `lm_head`, or a `Vocabulary` of it.

    `<NUM>` has a row of its own (`num_row`, `num_bias`): after the V rows where num_token_id == V, else added to row
    num_token_id, starting at 0. Its bias is also its threshold: only loc - C enters any decision.
    """

    vocabulary_mask: Tensor
    rest_mask: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.rows: int = config.text_config.vocab_size
        self.num_token_id: int = config.num_token_id
        self.appended: bool = config.num_token_appended
        self.free_token_ids = list(config.free_token_ids)
        self.scales = SCORE_SCALES[config.score_scale]
        if not self.scales.common and (config.score_noise or config.score_slope):
            raise ValueError("score_noise and score_slope belong to a score scale that all tokens share: 'common'")
        self.score_noise: float = config.score_noise
        self.score_slope: float = config.score_slope
        self.law = get_family(config.vocabulary_family)
        self.value_law = get_family(config.value_family)
        self.start = config.initial_noise, config.initial_threshold, config.token_thresholds

        self.b_noise = nn.Parameter(torch.empty(config.causal_size))
        self.threshold = nn.Parameter(torch.empty(()))
        self.token_thresholds = None if config.token_thresholds is None else nn.Parameter(torch.empty(self.rows))
        self.num_row = nn.Parameter(torch.zeros(config.causal_size))
        self.num_bias = nn.Parameter(torch.zeros(()))
        self.value_head = nn.Linear(config.causal_size, 1)
        self.register_buffer(
            "vocabulary_mask", torch.empty(self.rows + self.appended, dtype=torch.bool), persistent=False
        )
        self.register_buffer("rest_mask", torch.empty(self.rows, dtype=torch.bool), persistent=False)
        self.reset_buffers()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The start: constant noise and threshold, `<NUM>` unmoved, an ordinary value head."""
        noise, threshold, apart = self.start
        nn.init.constant_(self.b_noise, noise)
        nn.init.constant_(self.threshold, threshold)
        if self.token_thresholds is not None:
            nn.init.normal_(self.token_thresholds, std=apart)
        nn.init.zeros_(self.num_row)
        nn.init.zeros_(self.num_bias)
        nn.init.normal_(self.value_head.weight, std=self.value_head.in_features**-0.5)
        nn.init.zeros_(self.value_head.bias)

    def reset_buffers(self) -> None:
        """Fill the buffers that a checkpoint does not hold: the rows that tokens use, [V'], and others than `<NUM>`, [V]."""
        self.vocabulary_mask.fill_(True)
        self.vocabulary_mask[self.free_token_ids] = False
        self.rest_mask.copy_(self.vocabulary_mask[: self.rows])
        self.rest_mask[self.num_token_id : self.num_token_id + 1] = False

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

    def vocabulary(self, lm_head: Any) -> "Vocabulary":
        """The rows of `lm_head` as they are now; a `Vocabulary` as it is."""
        return lm_head if isinstance(lm_head, Vocabulary) else Vocabulary(self, lm_head)

    def forward(self, loc: Tensor, scale: Tensor, lm_head: Any) -> tuple[Tensor, Tensor]:
        """The law of all scores with the noise integrated out (overview 2.4).

        loc, scale: loc_U, scale_U [..., C] -> loc_S [..., V'], scale_S [..., 1] ("common") or [..., V'] ("documents"),
        V' = V + 1 where `<NUM>` stands after the matrix.
        """
        words = self.vocabulary(lm_head)
        return self.score_loc(loc, words), self.score_scale_of(self.law.add(scale, self.noise), words)

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def score_loc(self, loc: Tensor, words: "Vocabulary") -> Tensor:
        """loc_S [..., V'] from loc_U [..., C]: the backbone's own product, plus `<NUM>`'s column."""
        scores = words(loc)
        if self.appended:
            return self.put(scores, lambda: self.num_loc(loc, words))
        # beside the backbone's product: untrained, it moves no bit
        own = words.number_row() - words.weight[self.num_token_id]
        of_number = F.linear(upcast(loc), upcast(own).unsqueeze(0)).squeeze(-1) + self.num_bias
        scores[..., self.num_token_id] += of_number.to(scores.dtype)
        return scores

    def put(self, columns: Tensor, of_number: Callable[[], Tensor]) -> Tensor:
        """Put what is `<NUM>`'s [...] after the columns of the matrix [..., V], or into them, in place."""
        if self.appended:
            return torch.cat([columns, of_number().unsqueeze(-1).to(columns.dtype)], dim=-1)
        columns[..., self.num_token_id] = of_number()
        return columns

    def num_loc(self, loc: Tensor, words: "Vocabulary") -> Tensor:
        """loc of `<NUM>`'s score [...], float32."""
        of_row = F.linear(upcast(loc), upcast(words.number_row()).unsqueeze(0)).squeeze(-1)
        return of_row + words.number_bias()

    def score_scale_of(self, scale: Tensor, lm_head: Any) -> Tensor:
        """scale_S from the scale [..., C] of U': [..., 1] where all share it, or [..., V'], float32."""
        return self.scales.of_all(scale, self.vocabulary(lm_head))

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


class Vocabulary:
    """The rows that the tokens' scores are made of, and what follows from them, made when it is first asked for: anew for
    every forward pass, but within `frozen_vocabulary`. Calling it gives loc_S [..., V] of the matrix's tokens from loc_U.

    Args:
        action: whose law it is; `<NUM>`'s own row, the tokens' thresholds and the rows in use are its.
        layer: the linear layer of V rows, or what has `weight`, `bias` and the product; `products` too, W x without the bias,
            where it keeps the rows in an order of its own, which its kernel is fast with.
        served: whether `<NUM>`'s own row stands still too.
    """

    def __init__(self, action: ActionNetwork, layer: Any, served: bool = False) -> None:
        self.action, self.layer, self.served = action, layer, served

    def __call__(self, loc: Tensor) -> Tensor:
        scores: Tensor = self.layer(loc)
        own = self.action.token_thresholds  # only S_k - C_k decides anything: a threshold of its own leaves the score
        return scores if own is None else scores - own.to(scores.dtype)

    def products(self, loc: Tensor) -> Tensor:
        """W loc [N, V] of loc [N, C] up to last bits, without a bias, by the product that is fastest for so many rows."""
        if (of_layer := getattr(self.layer, "products", None)) is not None:
            products: Tensor = of_layer(loc)
            return products
        if 1 < len(loc) <= _FEW and loc.device.type == "cpu" and loc.dtype == self.weight.dtype == torch.float32:
            return (self.weight @ loc.T).T.contiguous()
        return F.linear(loc, self.weight)

    def at_once(self, loc: Tensor) -> Tensor:
        """loc_S [..., V] up to last bits."""
        scores, bias = self.products(loc.flatten(0, -2)), self.bias
        return (scores if bias is None else scores + bias).view(*loc.shape[:-1], -1)

    def scales(self, scale: Tensor) -> Tensor:
        """(|W_k|^a scale^a)^(1/a) [..., V'] of the scale [..., C] of U', float32, block by block of rows."""
        law = self.action.law
        blocks = [law.linear_scale(scale, upcast(rows)) for rows in self._blocks()]
        scales = torch.cat(blocks, dim=-1).clamp(min=SCALE_FLOOR)
        return self.action.put(scales, lambda: self.action.scale_of_row(scale, self.number_row()))

    @cached_property
    def _linear(self) -> tuple[Tensor, Tensor | None]:
        return effective_linear(self.layer)

    @property
    def weight(self) -> Tensor:
        """W [V, C], adapters included."""
        return self._linear[0]

    @property
    def bias(self) -> Tensor | None:
        """b - eps [V], the tokens' own thresholds taken off; None where there are neither."""
        bias, own = self._linear[1], self.action.token_thresholds
        if own is None:
            return bias
        return -own.to(self.weight.dtype) if bias is None else bias - own.to(bias.dtype)

    def _blocks(self, rows: Tensor | None = None) -> Iterator[Tensor]:
        """Rows [V, ...], those of the matrix by default, some at a time. Asked for outside of `no_grad`: this may be what makes
        `weight`, which is kept."""
        rows = self.weight if rows is None else rows
        return iter(rows.split(_ROWS_AT_ONCE.get(self.weight.device.type, _MOST_ROWS)))

    @cached_property
    def largest(self) -> Tensor:
        """m [C]: m_j = max_k |W_kj| over the rows that tokens use, float32."""
        used = self.action.vocabulary_mask[: self.action.rows].unsqueeze(-1)
        blocks = zip(self._blocks(), self._blocks(used), strict=True)
        with torch.no_grad():  # row blocks: |W| of a whole vocabulary would be as large as the matrix itself
            of_used = (w.abs() if bool(u.all()) else w.abs() * u for w, u in blocks)
            return upcast(torch.stack([w.amax(0) for w in of_used]).amax(0))

    @cached_property
    def norms(self) -> Tensor:
        """|W_k|_a [V], the a-norms of the rows, a the law's index, float32; 0 for rows that no token uses."""
        blocks = self._blocks()
        with torch.no_grad():
            norms = [torch.linalg.vector_norm(upcast(block), self.action.law.alpha, dim=1) for block in blocks]
            return torch.cat(norms) * self.action.vocabulary_mask[: self.action.rows]

    @cached_property
    def longest(self) -> Tensor:
        """max_k |W_k|_a, a number."""
        return self.norms.max()

    @property
    def all_norms(self) -> Tensor:
        """`norms` with `<NUM>`'s as it is now, [V']."""
        of_number = torch.linalg.vector_norm(upcast(self.number_row()), self.action.law.alpha)
        return self.action.put(self.norms.clone(), lambda: of_number)

    def rows_at(self, tokens: Tensor) -> Tensor:
        """W [n, C] of tokens int64 [n], `<NUM>` too, float32."""
        rows = upcast(self.weight.index_select(0, tokens.clamp(max=len(self.weight) - 1)))
        is_number = tokens == self.action.num_token_id
        if is_number.any():
            rows = torch.where(is_number.unsqueeze(-1), upcast(self.number_row()).detach(), rows)
        return rows

    def number_row(self) -> Tensor:
        """W_NUM [C], as far as the score scale lets it reach; it may move while the matrix stands still, unless `served`."""
        return self._served_row if self.served else self._number_row()

    @cached_property
    def _served_row(self) -> Tensor:
        return self._number_row()

    def _number_row(self) -> Tensor:
        action, own = self.action, self.action.num_row
        row = own if action.appended else own + self.weight[action.num_token_id].to(own.dtype)
        return action.scales.number_row(row, self)

    def number_bias(self) -> Tensor:
        """b_NUM []."""
        own: Tensor = self.action.num_bias
        return own if self.action.appended or self.bias is None else own + self.bias[self.action.num_token_id]

    def rows_of_all(self) -> tuple[Tensor, Tensor, Tensor]:
        """W [V', C], b [V'] and the rows in use, `<NUM>`'s row where it is, float32."""
        action, weight = self.action, upcast(self.weight)
        bias = weight.new_zeros(len(weight)) if self.bias is None else upcast(self.bias).clone()
        bias, row = action.put(bias, self.number_bias), upcast(self.number_row()).unsqueeze(0)
        place = action.num_token_id
        return torch.cat([weight[:place], row, weight[place + 1 :]]), bias, action.vocabulary_mask

    def frozen(self) -> bool:
        """Whether no training moves the matrix."""
        layer = self.layer
        return not (isinstance(layer, nn.Module) and any(p.requires_grad for p in layer.parameters()))
