"""Streamers that write generated numbers as they come."""

from typing import Any

from torch import Tensor
from transformers import TextIteratorStreamer, TextStreamer

from causalqwen.modeling.processor import CausalQwenProcessor


class _NumberStreaming(TextStreamer):
    """Gives a text streamer the values after `<NUM>`: `generate` calls `begin` with the prompt's, then `follow` with the log
    of its values, which has that of a token before the token is put."""

    processor: CausalQwenProcessor

    def begin(self, numeric_values: Tensor | None) -> None:
        self._prompt = None if numeric_values is None else numeric_values[0].tolist()
        self._seen: list[float] = []
        self._log: Any = None

    def follow(self, log: Any) -> None:
        self._log = log

    def put(self, value: Tensor) -> None:
        if self._log is not None and self._log.last >= 0:
            is_number = value.reshape(-1)[0].item() == self.processor.num_token_id
            self._seen.append(self._log[self._log.last][0].item() if is_number else 0.0)
        else:
            self._seen.extend(self._prompt or [0.0] * value.numel())
        super().put(value)

    def decode(self, token_ids: int | list[int], **kwargs: Any) -> str:
        """What the streamer of transformers calls with the tokens that it still holds back: the latest ones, or after a line
        the latest one."""
        token_ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.processor.decode(token_ids, numeric_values=self._seen[-len(token_ids) :], **kwargs)


class NumberTextStreamer(_NumberStreaming):
    """transformers' `TextStreamer` (prints words as they are finished), for a `CausalQwenProcessor`."""

    def __init__(self, processor: CausalQwenProcessor, skip_prompt: bool = False, **decode_kwargs: Any) -> None:
        self.processor = processor
        super().__init__(self, skip_prompt, **decode_kwargs)  # type: ignore[arg-type] # all it asks of one is `decode`


class NumberTextIteratorStreamer(_NumberStreaming, TextIteratorStreamer):
    """transformers' `TextIteratorStreamer` (words through a queue), for a `CausalQwenProcessor`."""

    def __init__(
        self,
        processor: CausalQwenProcessor,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        self.processor = processor
        super().__init__(self, skip_prompt, timeout, **decode_kwargs)  # type: ignore[arg-type] # and here
