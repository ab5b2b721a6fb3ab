"""A request while vLLM runs it: its draws, and its numbers by their place in the text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from causalqwen.decoding import BoundDecoding
from causalqwen.parts.copying import NOWHERE, Candidates
from causalqwen_vllm.request_options import RequestOptions


class Request:
    """One request of vLLM, from its first step to its last; preemption takes its cache away, but not this.

    A token's place is its index in vLLM's sequence, the prompt included. With `hides` the sequence holds no `<NUM>`, and a
    number's place is that of its first digit. `ids`: the tokens of the prompt and those fed since; `digits`: place -> the token
    that stands there whatever is predicted. `values`: place -> value, where the last token is no number too. `pending`: place
    and features of the token that was decided last, after them what the whole backbone gives where it was read.

    Features [H], by place, that a generated number follows from (`followed`) and that any token does (`kept`, from
    `kept_from` on, in the processor's memory, since vLLM counts on the whole of a GPU's); once `forgotten`, or without a key,
    neither. Where the model copies, `stated`: value by place, of all numbers of the text, and `keys`: what each followed from.

    Raises:
        ValueError: more or fewer values than the prompt has numbers, one that should be hidden, an individual of another size.
    """

    def __init__(
        self,
        options: RequestOptions,
        prompt: Sequence[int],
        num_token_id: int,
        causal_size: int,
        device: torch.device,
        hides: bool = False,
        copies: bool = False,
    ) -> None:
        places = [place for place, token in enumerate(prompt) if token == num_token_id]
        if hides and places:
            raise ValueError(f"this model sees no <NUM>, but one stands at {places[0]} of the prompt: leave it out")
        if not hides and len(places) != len(options.values):
            raise ValueError(f"a prompt with {len(places)} numbers came with {len(options.values)} values")
        if hides and copies and len(options.places) != len(options.values):
            raise ValueError(f"{len(options.values)} hidden numbers came with {len(options.places)} places")
        self.options, self.hides, self.copies = options, hides, copies
        self.values = {} if hides else dict(zip(places, options.values, strict=True))
        self.stated = dict(zip(options.places if hides else places, options.values, strict=True)) if copies else {}
        self.keys: dict[int, Tensor] = {}
        self.ids = list(prompt)
        self.digits: dict[int, int] = {}
        self.followed: dict[int, Tensor] = {}
        self.pending: tuple[int, Tensor] | None = None
        self.kept: dict[int, Tensor] = {}
        self.forgotten = not options.key
        self.decided = len(prompt) - 1  # the last place whose token was decided
        self.bound = options.bind(causal_size, device)

    def feed(self, place: int, tokens: Sequence[int]) -> None:
        self.ids[place : place + len(tokens)] = tokens

    def keep(self, place: int, features: Tensor) -> None:
        """Of the features [n, H] of the tokens from `place` on, keep those that somebody may ask about."""
        first = self.options.kept_from
        if first is not None and not self.forgotten and place + len(features) >= first:
            rows = features[max(first - place - 1, 0) :].to("cpu", copy=True)
            self.kept |= dict(enumerate(rows, max(first, place + 1)))

    def read(self, place: int, features: Tensor) -> None:
        """Note which of the features [n, H] of the tokens from `place` on the numbers of the text followed from."""
        for at in self.stated if len(self.keys) < len(self.stated) else ():
            index = max(at - 1, 0) - place
            if at not in self.keys and 0 <= index < len(features):
                unseen = self.hides and at == 0
                self.keys[at] = torch.zeros_like(features[index]) if unseen else features[index].clone()

    def forget(self) -> None:
        self.forgotten = True
        self.kept.clear()
        self.followed.clear()

    def rest(self) -> None:
        """It stands in no batch: what can be read again, or nobody will ask for, is not kept."""
        if self.forgotten:
            self.keys.clear()

    def decide(self, place: int, features: Tensor) -> bool:
        """Note what the token at `place` follows from, and tell whether it is decided now. Places of the prompt, and those
        that are computed again after a preemption, are known already."""
        is_open = place > self.decided
        if is_open:
            self.decided, self.pending = place, (place, features)
        return is_open

    def hidden_before(self, place: int) -> int:
        """How many `<NUM>` the text before `place` has that the sequence has not."""
        return len(self.options.values) + sum(at < place for at in self.values) if self.hides else 0

    def write_digits(self, place: int, tokens: Sequence[int]) -> None:
        self.digits |= {place + index: token for index, token in enumerate(tokens)}

    def text(self, before: int) -> tuple[list[int], list[float], int | None]:
        """Ids and values of the text before a place, and where its last number is."""
        known = dict(zip(self.options.places, self.options.values, strict=False)) | self.values
        values = [known.get(at, 0.0) for at in range(before)]
        return self.ids[:before], values, max((at for at in known if at < before), default=None)

    def lacks(self, place: int) -> bool:
        """Whether the number at `place` is the token that was decided last, and has no value yet."""
        return place not in self.values and self.pending is not None and self.pending[0] == place

    def widen(self, features: Tensor) -> None:
        """Keep these in place of the features of the token that was decided last: what else was read stands after them."""
        assert self.pending is not None, "a number follows from something"
        place, _ = self.pending
        self.pending = place, features
        if place in self.kept:
            self.kept[place] = features.to("cpu")

    def may_be_numbers(self, since: int, width: int) -> dict[int, Tensor]:
        """Place -> the features that each number from a place on follows from, and those that the last token does, if they are
        as wide as a number's."""
        at_end = {} if self.hides or self.pending is None or len(self.pending[1]) < width else dict([self.pending])
        return {place: features for place, features in (at_end | self.followed).items() if place >= since}

    def write(self, value: float) -> None:
        """If the token that was decided last is a number, it is `value`."""
        assert self.pending is not None, "a number follows from something"
        self.values[self.pending[0]] = value

    def say(self, place: int) -> None:
        """A number stands at `place`, the value that was written there."""
        if place in self.stated or place in self.followed or self.pending is None or self.pending[0] != place:
            return
        if self.copies:
            self.stated[place], self.keys[place] = self.values[place], self.pending[1].clone()
        if not self.forgotten:
            self.followed[place] = self.pending[1].clone()

    def value(self, place: int) -> float:
        """The value of the number at `place`. RuntimeError where none was given or written: nothing is fed on in its stead."""
        if place not in self.values:
            raise RuntimeError(f"no value is known for the number at {place}, nor what it follows from")
        return self.values[place]


@dataclass
class Step:
    """The rows of a step of vLLM's, whose tokens stand one row after the other.

    starts: where each row's tokens start, and the last one's end, after which CUDA graphs leave what stood there before.
    first, last: the place of each row's first token, and int64 [B] of its last. attention: vLLM's metadata by layer; means:
    what was read through it of each row, if it was. is_read: whether what follows from the tokens was noted.
    """

    requests: list[Request]
    starts: list[int]
    first: list[int]
    last: Tensor
    attention: Any
    means: Tensor | None = None
    is_read: bool = False

    @classmethod
    def of(
        cls, requests: list[Request], starts: list[int], first: list[int], positions: Tensor, attention: Any
    ) -> "Step":
        """positions [N] of all tokens, which vLLM may write over."""
        at: Any = slice(len(requests))
        if starts[-1] > len(requests):
            at = torch.tensor(starts[1:], device=positions.device) - 1
        return cls(requests, starts, first, positions[at].clone(), attention)

    @property
    def places(self) -> list[int]:
        """For each row the place of the token that is decided next."""
        return [place + end - start for _, place, (start, end) in self._rows()]

    def _rows(self) -> Iterator[tuple[Request, int, tuple[int, int]]]:
        """Each request, the place of its first token, and where its tokens start and end among all."""
        return zip(self.requests, self.first, pairwise(self.starts), strict=True)

    def feed(self, tokens: Tensor) -> None:
        ids = tokens.tolist()
        for request, place, (start, end) in self._rows():
            request.feed(place, ids[start:end])

    def read(self, features: Tensor) -> None:
        """Keep of the features [N, H] of all tokens what somebody may ask for."""
        for request, place, (start, end) in self._rows():
            if request.options.kept_from is not None:
                request.keep(place, features[start:end])
            if request.copies:
                request.read(place, features[start:end])
        self.is_read = True


def offered(asked: Sequence[tuple[Request, int]]) -> Candidates | None:
    """The numbers that stand before a place of a request, of several; None where the model does not copy, or none stands."""
    before = [sorted(at for at in request.stated if at < place) for request, place in asked]
    most = max(map(len, before), default=0)
    if not most:
        return None
    some = next(iter(next(request for request, _ in asked if request.keys).keys.values()))
    features = some.new_zeros(len(asked), most, len(some))
    values = torch.zeros(len(asked), most, dtype=torch.float64)
    places = torch.full((len(asked), most), NOWHERE)
    for row, ((request, _), numbers) in enumerate(zip(asked, before, strict=True)):
        for column, at in enumerate(numbers):
            features[row, column], values[row, column], places[row, column] = request.keys[at], request.stated[at], at
    at_place = torch.tensor([place - 1 for _, place in asked])
    return Candidates(features, values, places, torch.arange(len(asked)), at_place).to(some.device)


class Company(BoundDecoding):
    """The plan of several requests that share all of it but seeds and individuals; each draws its own."""

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Company":
        bounds = [request.bound for request in requests]
        company = cls(bounds[0].plan, torch.cat([bound.seeds for bound in bounds]), bounds[0].causal_size)
        company.bounds = bounds
        return company

    bounds: list[BoundDecoding]

    def _next_at(self, stream: int, positions: Tensor, places: list[int]) -> Tensor:
        rows = zip(self.bounds, positions.split(1), places, strict=True)
        return torch.cat([bound._next_at(stream, of_row, [place]) for bound, of_row, place in rows])

    def held(self, stream: int) -> Tensor:
        if stream not in self._held:
            self._held[stream] = torch.cat([bound.held(stream) for bound in self.bounds])
        return self._held[stream]


def companies(requests: Sequence[Request]) -> list[tuple[list[int], Company | None]]:
    """Rows that can be scored together, and the plan they share; None for those of the preset `softmax`."""
    groups: dict[tuple, list[int]] = {}
    for row, request in enumerate(requests):
        plan = request.options.plan
        shared = plan.individual_mode, plan.noise, plan.own, plan.temperature, plan.top_p
        groups.setdefault(() if request.bound is None else shared, []).append(row)
    return [(rows, Company.of([requests[row] for row in rows]) if law else None) for law, rows in groups.items()]
