"""What the context holds of a number (theory 2.1): the setting `number_context`."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Context:
    """hides: whether the backbone does not see `<NUM>`. writes: whether a number's digits stand behind its `<NUM>`."""

    hides: bool
    writes: bool

    def hidden(self, is_number: Tensor) -> Tensor:
        """Which of some tokens the backbone does not see; bool, as `is_number`, where `<NUM>` stands."""
        return is_number & self.hides


CONTEXTS = {
    # one token `<NUM>` with its value, as the documents have it
    "value": Context(hides=False, writes=False),
    # `<NUM>`, and behind it the number as it is written, in the tokens of the plain text: `<NUM>` announces the number and
    # carries its value as a label, and the backbone reads exactly the plain text (attention mask 0, no position of its own)
    "digits": Context(hides=True, writes=True),
    # `<NUM>` with its value is seen, and the number as it is written follows
    "both": Context(hides=False, writes=True),
}
