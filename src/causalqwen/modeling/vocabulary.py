"""W_cls of all tokens for as long as its weights stand still: what follows from them is made once."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from causalqwen.distributions import SCALE_FLOOR, upcast
from causalqwen.kernels import ScaleBounds

if TYPE_CHECKING:
    from causalqwen.modeling.action import ActionNetwork

_ROWS_AT_ONCE = {"cpu": 1024}  # of the matrix: in a core's cache, where several passes take a seventh of the time
_MOST_ROWS = 8192  # elsewhere


def effective_linear(layer: Any) -> tuple[Tensor, Tensor | None]:
    """W [K, C] and b [K] of a linear layer x -> W x + b, with the adapters that PEFT has put beside it, their dropout left
    out; None for no b."""
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


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


class Vocabulary:
    """The rows that the tokens' scores are made of, and what follows from them, made when it is first asked for.

    Made anew for every forward pass; kept for as long as somebody knows that the weights stand still (a text, a stage that
    leaves them frozen: `CausalQwenForCausalLM.standing`). Calling it gives loc_S of the tokens of the matrix, [..., V], from
    loc_U [..., C].

    Args:
        action: whose law it is; `<NUM>`'s own row, the tokens' thresholds and the rows in use are its.
        layer: the linear layer of V rows, or what has `weight`, `bias` and the product; `products` too, W x without the bias,
            where it keeps the rows in an order of its own, which its kernel is fast with.
        served: whether `<NUM>`'s own row stands still too, for as long as this is there.
    """

    def __init__(self, action: "ActionNetwork", layer: Any, served: bool = False) -> None:
        self.action, self.layer, self.served = action, layer, served
        self._number: tuple[Tensor, Tensor] | None = None

    def __call__(self, loc: Tensor) -> Tensor:
        scores: Tensor = self.layer(loc)
        own = self.action.token_thresholds  # only S_k - C_k decides anything: a threshold of its own leaves the score
        return scores if own is None else scores - own.to(scores.dtype)

    def products(self, loc: Tensor) -> Tensor:
        """W loc [N, V] of loc [N, C] up to last bits, without a bias, by the product that is fastest for so many rows."""
        if (of_layer := getattr(self.layer, "products", None)) is not None:
            products: Tensor = of_layer(loc)
            return products
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
        return self.action.number.put(self.action, scales, lambda: self.action.scale_of_row(scale, self.number_row()))

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
        """Rows [V, ...], those of the matrix by default, as many at a time as several passes are best taken over. Asked for
        outside of `no_grad`: it may be this that makes `weight`, which is kept."""
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
        return self.action.number.put(self.action, self.norms.clone(), lambda: of_number)

    @cached_property
    def bounds(self) -> ScaleBounds:
        """Of the tokens' scales under the documents' formula."""
        return ScaleBounds(self.weight, self.action.law)

    def rows_at(self, tokens: Tensor) -> Tensor:
        """W [n, C] of tokens int64 [n], `<NUM>` too, float32."""
        rows = upcast(self.weight.index_select(0, tokens.clamp(max=len(self.weight) - 1)))
        is_number = tokens == (-1 if self.action.num_token_id is None else self.action.num_token_id)
        if is_number.any():
            rows = torch.where(is_number.unsqueeze(-1), upcast(self.number_row()).detach(), rows)
        return rows

    def number_row(self) -> Tensor:
        """W_NUM [C], as far as the score scale lets it reach.

        A `served` one is made once. Any other may move while the matrix stands still: where no gradient is asked for it is kept
        until it differs, but on a GPU, which the comparison would wait for.
        """
        own = self.action.num_row
        if not self.served and (torch.is_grad_enabled() or own.device.type != "cpu"):
            return self._number_row()
        if self._number is None or not (self.served or _same(self._number[0], own)):
            self._number = own.detach().clone(), self._number_row()
        return self._number[1]

    def _number_row(self) -> Tensor:
        action = self.action
        return action.scales.number_row(action.number.row(action, self), self)

    def rows_of_all(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """W [V', C], b [V'] and the rows in use, `<NUM>`'s row where it is, float32."""
        action, bias = self.action, None if self.bias is None else upcast(self.bias)
        weight, number = upcast(self.weight), action.number
        if action.num_token_id is None:
            return weight, bias, action.vocabulary_mask
        bias = weight.new_zeros(len(weight)) if bias is None else bias.clone()
        bias = number.put(action, bias, lambda: number.bias(action, self))
        return number.put_row(action, weight, upcast(self.number_row())), bias, action.vocabulary_mask

    def is_plain(self, layer: Any) -> bool:
        """Whether calling it is calling `layer`."""
        return self.layer is layer and self.action.token_thresholds is None

    def frozen(self) -> bool:
        """Whether no training moves the matrix."""
        layer = self.layer
        return not (isinstance(layer, nn.Module) and any(p.requires_grad for p in layer.parameters()))
