"""What the context holds of a number, the setting `number_context`, and masks and positions where the backbone does not see
some of the tokens (theory 2.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """name: of `number_context`. hides: whether the backbone does not see `<NUM>`. writes: whether a number's digits stand
    after its `<NUM>`."""

    name: str
    hides: bool
    writes: bool

    def hidden(self, is_number: Tensor) -> Tensor:
        """Which of some tokens the backbone does not see; bool, as `is_number`, where `<NUM>` stands."""
        return is_number & self.hides

    def __str__(self) -> str:
        return f"number_context={self.name!r}"


def context_of(name: str) -> Context:
    """The context of a name. ValueError for one that is not known."""
    if name not in CONTEXTS:
        raise ValueError(f"unknown number_context {name!r}; use one of {', '.join(CONTEXTS)}")
    return CONTEXTS[name]


CONTEXTS = {
    # one token `<NUM>` with its value, as the original design has it
    "value": Context("value", hides=False, writes=False),
    # `<NUM>`, and after it the number as it is written, in the tokens of the plain text: `<NUM>` announces the number and
    # carries its value as a label, and the backbone reads exactly the plain text (attention mask 0, no position of its own)
    "digits": Context("digits", hides=True, writes=True),
    # `<NUM>` with its value is seen, and the number as it is written follows
    "both": Context("both", hides=False, writes=True),
}


def without(hidden: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention mask [B, L] and position_ids int64 [B, L] of a context in which some tokens are not seen.

    position_ids count the tokens that are seen; one that is not has the position of the last that is, 0 before the first.

    Args:
        hidden: bool [B, S], of the last S tokens. attention_mask: [B, L], L >= S; None for L = S and no padding.
    """
    mask = torch.ones_like(hidden, dtype=torch.int64) if attention_mask is None else attention_mask.clone()
    mask[:, mask.shape[1] - hidden.shape[1] :].masked_fill_(hidden, 0)
    return mask, (mask.long().cumsum(-1) - 1).clamp(min=0)


def check_one_sequence(position_ids: Tensor) -> None:
    """ValueError where sequences are packed into one row: wherever position_ids [B, S] do not go on by one."""
    if bool((position_ids.diff(dim=-1) != 1).any()):
        raise ValueError("sequences packed into one row are not read apart: give them as rows of their own")
