"""What transformers' decoding loops are given for a grafted model: processors, a log of values, drafts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from causalqwen.modeling.copying import Candidates


class MaskFreeRows(LogitsProcessor):
    """-inf for rows of the vocabulary matrix that no token uses: no sampler and no beam ever takes one."""

    def __init__(self, vocabulary_mask: Tensor) -> None:
        self.vocabulary_mask = vocabulary_mask

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.vocabulary_mask.to(scores.device), -torch.inf)


class RaceSampler(LogitsProcessor):
    """Draws the token itself, so that a `<NUM>` column behind the matrix does not disturb the backbone's own draws.

    torch.multinomial runs a race: with E_k standard exponential, token argmin_k E_k / p_k wins, and it consumes one E_k
    per column; one column more would shift every later draw. Here the race is run over the backbone's V columns alone.
    Its winning time is Exp(1) whoever wins, and decides independently whether `<NUM>` is taken instead:
    P(NUM) = p_NUM, P(k) = (1 - p_NUM) p_k, as under the softmax over all columns.
    """

    def __init__(self) -> None:
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores.append(scores)
        tokens, of_number = scores[:, :-1], scores[:, -1]
        probabilities = nn.functional.softmax(tokens, dim=-1)
        times = torch.empty_like(probabilities).exponential_(1)
        speed, winner = (probabilities / times).max(dim=-1)
        time, place = 1 / speed, winner.unsqueeze(-1)
        partition = (tokens.gather(-1, place) - probabilities.gather(-1, place).log()).squeeze(-1)
        num_prob = torch.sigmoid(of_number - partition)
        winner = torch.where(-torch.expm1(-time) < num_prob, tokens.shape[-1], winner)
        return torch.full_like(scores, -torch.inf).scatter_(-1, winner.unsqueeze(-1), 0.0)


class ValueLog:
    """The values that a decoding loop predicts, [B] each, by the place of their tokens; computed when they are asked for.

    Args:
        compute: the values that follow features [B, 1, H] of one position, whose indices are [B, 1].
        at_once: compute every value as it comes, whether a number follows or not: no step waits for the host then.

    `last` is the place of the latest value, and `follows` the features [B, 1, H] that it follows from. `numbers` are those that
    stand in the text so far, for a model that copies; each is added as it is settled.
    """

    numbers: Candidates | None = None
    follows: Tensor

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], at_once: bool) -> None:
        self.compute, self.at_once = compute, at_once
        self.last = -1
        self._kept: dict[int, Tensor | tuple[Tensor, Tensor]] = {}

    def append(self, place: int, features: Tensor, positions: Tensor) -> None:
        """Note what the value at `place` follows from."""
        self.last, self.follows = place, features
        self._kept[place] = self.compute(features, positions) if self.at_once else (features, positions)

    def __getitem__(self, place: int) -> Tensor:
        found = self._kept[place]
        if isinstance(found, tuple):
            found = self._kept[place] = self.compute(*found)
        return found

    def settle(self, place: int, is_number: Tensor) -> Tensor | None:
        """The values at `place`, once its tokens are known; None where none of them is a number (bool [B])."""
        if self.at_once or bool(is_number.any()):
            if self.numbers is not None and place == self.last:
                self.numbers = self.numbers.with_number(self.follows[:, -1], self[place], is_number)
            return self[place]
        self._kept.pop(place, None)
        return None

    def places(self) -> list[int]:
        """Where values were predicted and not dropped."""
        return sorted(self._kept)


class WriteDigits(LogitsProcessor):
    """Behind each `<NUM>` that was chosen, or that ends a prompt, the tokens of its value, whatever was predicted.

    Args:
        prompt_values: float64 [B, L] of the prompts. log: the values behind them.
        digits: the tokens that write a value behind some ids.
    """

    def __init__(
        self, num_token_id: int, prompt_values: Tensor, log: ValueLog, digits: Callable[[list[int], float], list[int]]
    ) -> None:
        self.num_token_id, self.prompt_values, self.log, self.digits = num_token_id, prompt_values, log, digits
        self._waiting: dict[int, list[int]] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = input_ids.shape[1] - 1
        for row in (input_ids[:, last] == self.num_token_id).nonzero().squeeze(-1).tolist():
            values = self.prompt_values[:, last] if last < self.prompt_values.shape[1] else self.log[last]
            self._waiting[row] = self.digits(input_ids[row, :last].tolist(), values[row].item())
        if self._waiting:
            scores = scores.clone()
        for row in list(self._waiting):
            token, *rest = self._waiting.pop(row)
            scores[row] = -torch.inf
            scores[row, token] = 0.0
            if rest:
                self._waiting[row] = rest
        return scores


class NumberFreeDrafts:
    """A candidate generator of transformers whose drafts end before a `<NUM>`: its value is not known in advance."""

    def __init__(self, generator: Any, num_token_id: int) -> None:
        self.generator, self.num_token_id = generator, num_token_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        drafted, logits = self.generator.get_candidates(input_ids, **kwargs)
        start = input_ids.shape[1]
        numbers = (drafted[0, start:] == self.num_token_id).nonzero()
        if len(numbers):
            length = int(numbers[0])
            drafted, logits = drafted[:, : start + length], None if logits is None else logits[:, :length]
        return drafted, logits
