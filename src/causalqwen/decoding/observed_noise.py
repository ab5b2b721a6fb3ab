"""The noise of an observed text, kept to be met again in another world (theory 3.13)."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ObservedNumber:
    """A number of an observed text: its value in the data's units, how it was written, with the space that it absorbed, and in
    which tokens, where digits stand in the context."""

    value: float
    text: str
    tokens: list[int]


@dataclass(frozen=True, eq=False)
class ObservedNoise:
    """Own noise under which n tokens after a prompt are the ones that are decided.

    It is the noise that `seed` draws, but for a few tokens of each position: the one that was observed, and those that would
    have beaten it.

    Args:
        seed: of the own noise.
        temperature: that it was found at: no other decides the same.
        places, tokens: int64 [m], positions (0 is that of the first token after the prompt) and tokens of the exceptions.
        normals: float64 [m], Q(e3) of these.
        length: n.
        values: float64 [n], those of `<NUM>` on the value axis (0 elsewhere).
        value_normals: float64 [n], how many scales each lies beside loc_Y, which is where it lies in another world, too.
        value_slack: float64 [n], how far from a value loc_Y may then be and still be that value: what float32 makes of the same
            features in batches of other shapes.
        numbers: those that were observed, by the index of their `<NUM>`.
    """

    seed: int
    temperature: float
    places: Tensor
    tokens: Tensor
    normals: Tensor
    length: int
    values: Tensor
    value_normals: Tensor
    value_slack: Tensor
    numbers: dict[int, ObservedNumber] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.length
