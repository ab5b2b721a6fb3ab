"""What the context holds of a number (theory 2.1): the setting `number_context`."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Context:
    """name: of `number_context`. hides: whether the backbone does not see `<NUM>`. writes: whether a number's digits stand
    behind its `<NUM>`."""

    name: str
    hides: bool
    writes: bool

    def hidden(self, is_number: Tensor) -> Tensor:
        """Which of some tokens the backbone does not see; bool, as `is_number`, where `<NUM>` stands."""
        return is_number & self.hides

    @property
    def reads_as(self) -> dict[str, Any]:
        """What features that are kept depend on, beside the tokens."""
        return {"hides_numbers": True} if self.hides else {}

    def __str__(self) -> str:
        return f"number_context={self.name!r}"


def context_of(name: str) -> Context:
    """The context of a name. ValueError for one that is not known."""
    if name not in CONTEXTS:
        raise ValueError(f"unknown number_context {name!r}; use one of {', '.join(CONTEXTS)}")
    return CONTEXTS[name]


CONTEXTS = {
    # one token `<NUM>` with its value, as the documents have it
    "value": Context("value", hides=False, writes=False),
    # `<NUM>`, and behind it the number as it is written, in the tokens of the plain text: `<NUM>` announces the number and
    # carries its value as a label, and the backbone reads exactly the plain text (attention mask 0, no position of its own)
    "digits": Context("digits", hides=True, writes=True),
    # `<NUM>` with its value is seen, and the number as it is written follows
    "both": Context("both", hides=False, writes=True),
}
