"""A text that grows token by token: pieces that can be sent, and stop strings that end it."""

from collections.abc import Sequence

from causalqwen.modeling import CausalQwenProcessor

_PROMPT = 48  # tokens of the prompt that decide how a number after it is written: an address takes a space
_CONTEXT = 8  # tokens that decide how the next one is written
_NUMBER = "\ufdd0"  # stands for each character of a generated number where stop strings are looked for
_UNFINISHED = "\ufffd"  # what bytes of a character decode to until the last one is there


class GrowingText:
    """What follows a prompt. Characters are settled when no later token can change them.

    A stop string is matched on text, but never inside a generated number: "." does not end 351.4. What may be the
    beginning of one is held back. Where digits stand in the context, a number is written with its `<NUM>`, and the digits that
    are appended after it add nothing. `special` shows special tokens too. `after_space`: the prompt ends with a space that the
    model did not read (`read_as_prompt`), so that the text begins without the one that the model writes in its place.
    """

    def __init__(
        self,
        processor: CausalQwenProcessor,
        ids: Sequence[int],
        values: Sequence[float],
        stops: Sequence[str],
        special: bool = False,
        after_space: bool = False,
    ) -> None:
        self.processor, self.stops, self.special = processor, stops, special
        self.text = ""
        self.stopped = False
        self._after_space = after_space
        self._in_digits = processor.context.writes
        self._digits: list[int] = []  # of the last number
        self._number = self._expected = 0  # where it starts; digits that are written already, and still to come
        tail = list(zip(ids, values, strict=True))[-_PROMPT:]
        if self._in_digits:  # the text is in them alone
            tail = [(token, value) for token, value in tail if token != processor.num_token_id]
        self._ids, self._values = [token for token, _ in tail], [value for _, value in tail]
        self._start, self._read = 0, len(self._ids)
        self._masked = ""
        self._sent = 0

    @property
    def in_digits(self) -> bool:
        """Whether the next token writes a number whose `<NUM>` was written already."""
        return self._expected > 0

    @property
    def end(self) -> int:
        """Where the text of the next token starts."""
        if not self._expected:
            return len(self.text)
        return max(self._number + len(self.processor.decode(self._digits[: -self._expected])), 0)

    @property
    def tail(self) -> tuple[list[int], list[float]]:
        """Ids and values at the end of prompt and text."""
        return self._ids[-_CONTEXT:], self._values[-_CONTEXT:]

    def append(self, token: int, value: float) -> tuple[int, int] | None:
        """Take a token, and its value if it is `<NUM>`; where a number was written, its first character and its end."""
        if self._expected:
            self._expected -= 1
            return None
        is_number, tokens = token == self.processor.num_token_id, [token]
        if is_number:  # what is left of a character stands before it
            self._settle(flush=True)
        if is_number and self._in_digits:
            tokens = self._digits = self.processor.tokens_of(self._ids, value)
            self._number, self._expected = len(self.text), len(tokens)
        self._ids += tokens
        self._values += [value] * len(tokens)
        self._settle(flush=is_number)
        if not is_number:
            return None
        start = len(self.text) - len(self.processor.write_number(value))
        self._masked = self._masked[:start] + _NUMBER * (len(self.text) - start)
        return start, len(self.text)

    def take(self, final: bool = False) -> str:
        """What can be sent and was not yet; everything up to a stop string, if this is the end."""
        if final:
            self._settle(flush=True)
        places = [at for stop in self.stops if (at := self._masked.find(stop, self._sent)) >= 0]
        if places:
            self.stopped = True
            self.text, self._masked = self.text[: min(places)], self._masked[: min(places)]
        held = 0 if final or self.stopped else self._beginning_of_stop()
        piece = self.text[self._sent : len(self.text) - held]
        self._sent += len(piece)
        return piece

    def _settle(self, flush: bool) -> None:
        known, whole = self._decode(self._read), self._decode(len(self._ids))
        if (
            whole.endswith(_UNFINISHED) and not flush and len(self._ids) - self._read < _CONTEXT
        ):  # no character is longer
            return
        piece = whole[len(known) :]
        if piece:
            self._start = self._read
            if self._after_space and piece[0] == " ":
                piece = piece[1:]
                self._number -= 1  # its digits are decoded with their space
            self._after_space = False
        self.text += piece
        self._masked += piece
        self._read = len(self._ids)

    def _decode(self, end: int) -> str:
        part = slice(self._start, end)
        return self.processor.decode(self._ids[part], self._values[part], skip_special_tokens=not self.special)

    def _beginning_of_stop(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        rest = self._masked[self._sent :]
        longest = min(max(map(len, self.stops), default=1) - 1, len(rest))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(rest[-n:]) for s in self.stops)), 0)
