"""What changed from world to world: the words, and the values with their intervals (theory 3.13)."""

import difflib
import re
from dataclasses import dataclass

import torch

from causalqwen.decoding import Individual
from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.prediction import NumberPrediction
from causalqwen.modeling.reading import encode_text
from causalqwen.modeling.worlds import World, value_predictions
from causalqwen.numbers.rendering import brief

LEVEL = 0.9
"""What the intervals beside values cover."""


@dataclass(frozen=True)
class WorldNumber:
    """A value in a world's text, its characters start to end (exclusive), and the law that `individual` has there.

    law: None where the value was forced. median, low, high: of the law, [low, high] its central interval of mass `LEVEL`.
    """

    value: float
    start: int
    end: int
    law: NumberPrediction | None = None

    @property
    def median(self) -> float | None:
        return None if self.law is None else self.law.median

    @property
    def low(self) -> float | None:
        return None if self.law is None else self.law.interval(LEVEL)[0]

    @property
    def high(self) -> float | None:
        return None if self.law is None else self.law.interval(LEVEL)[1]

    @property
    def plain(self) -> dict[str, float | None]:
        """As plain data."""
        return {name: getattr(self, name) for name in ("value", "start", "end", "median", "low", "high")}

    def __str__(self) -> str:
        if self.median is None:
            return "set"
        return f"{LEVEL:.0%}: {brief(self.low)} to {brief(self.high)}"


def world_numbers(model: GraftedModel, world: World, individual: Individual) -> list[WorldNumber]:
    """The values of a world in their order, with the intervals of `model.value_predictions`."""
    predictions = value_predictions(model, world, individual)
    before, of_before, _ = encode_text(model, world.prompt, prompt=True)
    ids, values = torch.cat([before, world.tokens]), torch.cat([of_before, world.values])
    first = len(before)

    def characters(count: int) -> int:
        return len(model.processor.decode(ids[:count], numeric_values=values[:count]))

    numbers, origin = [], characters(first)
    for place in range(first, len(ids)):
        if ids[place] != model.config.num_token_id:
            continue
        end = place + 1
        while end - first in world.digits:
            end += 1
        span = (characters(place) - origin, characters(end) - origin)
        numbers.append(WorldNumber(values[place].item(), *span, predictions.get(place - first)))
    return numbers


def word_changes(before: str, after: str) -> list[tuple[str, str]]:
    """`after` aligned with `before`, word by word: ("same" | "gone" | "new", text) pieces in their order.

    The pieces that are not gone make up `after`, those that are not new make up `before`.
    """
    old, new = (re.findall(r"\s*\S+|\s+$", text) for text in (before, after))
    pieces: list[tuple[str, str]] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            pieces.append(("same", "".join(new[c:d])))
            continue
        pieces += [("gone", "".join(old[a:b]))] * (b > a) + [("new", "".join(new[c:d]))] * (d > c)
    return pieces
