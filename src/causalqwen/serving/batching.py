"""Requests gathered for a short while, then run through `generate` together by the one thread that owns the model."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from causalqwen.decoding import CausalDecoding, Individual
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.alternatives import alternatives
from causalqwen.modeling.loop import ValueLog
from causalqwen.serving.numbers import told
from causalqwen.serving.sampling import RowSampler
from causalqwen.serving.settings import ApiError
from causalqwen.serving.text import GrowingText


@dataclass
class Row:
    """One text to write: a prompt's ids and values, its seed, and what was written so far."""

    ids: list[int]
    values: list[float]
    seed: int
    text: GrowingText
    written: int = 0
    finish: str | None = None


@dataclass(frozen=True)
class Piece:
    """What a step added to a row: text, numbers in it, why it ended, where it did, and its token, where that was asked for."""

    row: int
    text: str
    numbers: list[dict[str, Any]]
    finish: str | None
    tokens: list[dict[str, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """A request. `plan` is that of all its rows, without seed and individual; `deliver` takes pieces and a failure.

    Under the preset `softmax` the plan's temperature and top_p are those of the row sampler.
    """

    rows: list[Row]
    plan: CausalDecoding
    max_tokens: int
    deliver: Callable[[Piece | ApiError], None]
    individual: Individual | None = None
    top_p: float = 1.0
    alternatives: int | None = None
    points: int | None = None
    cancelled: bool = False
    arrived: float = field(default_factory=time.monotonic)

    @property
    def width(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(row.ids) for row in self.rows)

    @property
    def law(self) -> tuple:
        """What rows of one batch must share; a row sampler has temperatures of its own."""
        plan = self.plan
        return (replace(plan, temperature=1.0) if plan.decision == "softmax" else plan), self.individual is None

    def fits(self, batch: list["Job"], max_rows: int, context: float) -> bool:
        """Whether it can run with these: the same law for all rows, and room for the longest prompt and the longest text."""
        jobs = [*batch, self]
        return (
            self.law == batch[0].law
            and sum(len(job.rows) for job in jobs) <= max_rows
            and max(job.width for job in jobs) + max(job.max_tokens for job in jobs) <= context
        )


class Batcher:
    """A bounded queue and its worker thread. `submit`, `cancel` and `run` may be called from any thread.

    A row's draws belong to (its seed, its position), so that its text does not depend on what it is batched with.
    """

    def __init__(
        self, model: CausalQwenForCausalLM, *, max_rows: int = 8, window: float = 0.01, max_waiting: int = 64
    ) -> None:
        self.model, self.max_rows, self.window, self.max_waiting = model, max_rows, window, max_waiting
        self.context = model.config.context_length or math.inf
        self.observe: Callable[[int], None] = lambda rows: None
        self._waiting: list[Job] = []
        self._asides: deque[tuple[Callable[[], Any], Future]] = deque()
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._asides)

    @property
    def running(self) -> int:
        return len(self._running)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Refuse what waits, end what runs at its next token, and wait for the thread."""
        with self._changed:
            self._closed = True
            for job in [*self._waiting, *self._running]:
                job.cancelled = True
                job.deliver(ApiError(503, "the server is shutting down"))
            for _, future in self._asides:
                if future.set_running_or_notify_cancel():
                    future.set_exception(ApiError(503, "the server is shutting down"))
            self._waiting.clear()
            self._asides.clear()
            self._changed.notify()
        self._thread.join()

    def submit(self, job: Job) -> None:
        """Queue a job. ApiError 429 where the queue is full."""
        with self._changed:
            self._check_room()
            self._waiting.append(job)
            self._changed.notify()

    def run(self, work: Callable[[], Any]) -> Future:
        """Have the thread that owns the model do some short work, between two tokens where a batch runs. ApiError 429 where
        the queue is full."""
        future: Future = Future()
        with self._changed:
            self._check_room()
            self._asides.append((work, future))
            self._changed.notify()
        return future

    def step_aside(self) -> None:
        """Do one piece of short work, if some waits; on the worker's thread."""
        with self._changed:
            if not self._asides:
                return
            work, future = self._asides.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    def _check_room(self) -> None:
        if self._closed:
            raise ApiError(503, "the server is shutting down")
        if self.waiting >= self.max_waiting:
            raise ApiError(429, f"{self.max_waiting} requests are waiting already", code="rate_limit_exceeded")

    def cancel(self, job: Job) -> None:
        """Give its place back: out of the queue, or out of its batch at the next token."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            self.step_aside()
            if not batch:
                continue
            self.observe(sum(len(job.rows) for job in batch))
            try:
                self._generate(batch)
            except Exception:  # the next batch may fare better
                logging.getLogger(__name__).exception("a batch failed")
                for job in batch:
                    job.deliver(ApiError(500, "the model failed on this batch"))
            with self._changed:
                self._running = []

    def _next(self) -> list[Job] | None:
        """The oldest job and those that fit it, when its window is over or the batch is full; an empty list where short work
        waits, None when closed."""
        with self._changed:
            while not self._closed:
                if self._asides:
                    return []
                if not self._waiting:
                    self._changed.wait()
                    continue
                batch = self._waiting[:1]
                for job in self._waiting[1:]:
                    if job.fits(batch, self.max_rows, self.context):
                        batch.append(job)
                left = batch[0].arrived + self.window - time.monotonic()
                if left <= 0 or sum(len(job.rows) for job in batch) >= self.max_rows:
                    self._waiting = [job for job in self._waiting if job not in batch]
                    self._running = batch
                    return batch
                self._changed.wait(left)
            return None

    def _generate(self, batch: list[Job]) -> None:
        model, rows = self.model, [row for job in batch for row in job.rows]
        owners = [job for job in batch for _ in job.rows]
        width = max(len(row.ids) for row in rows)
        pad = model.processor.tokenizer.pad_token_id

        def padded(columns: list[list], fill: float, dtype: torch.dtype) -> Tensor:
            lines = [[fill] * (width - len(column)) + column for column in columns]
            return torch.tensor(lines, dtype=dtype, device=model.device)

        watch = _Watch(model, batch, self.step_aside)
        seeds = [row.seed for row in rows]
        choice: dict[str, Any] = {"do_sample": False}
        if batch[0].plan.decision == "softmax":
            nucleus = [job.plan.temperature for job in owners], [job.top_p for job in owners]
            sampler = RowSampler(seeds, *nucleus, [len(row.ids) for row in rows], width, model.device)
            choice["logits_processor"] = LogitsProcessorList([sampler])
        else:
            plan = replace(batch[0].plan, seed=seeds)
            if batch[0].individual is not None:
                plan = replace(plan, individual=[job.individual for job in owners])
            choice = {"causal_decoding": plan}
        model.generate(
            padded([row.ids for row in rows], pad, torch.int64),
            attention_mask=padded([[1] * len(row.ids) for row in rows], 0, torch.int64),
            numeric_values=padded([row.values for row in rows], 0.0, torch.float64),
            max_new_tokens=max(job.max_tokens for job in batch),
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([watch]),
            streamer=watch,
            **choice,
        )


class _Watch(StoppingCriteria):
    """Sees every token as it comes, hands its text on, and says which rows are done.

    It is given to `generate` as a streamer as well, which is how it comes by the values.
    """

    def __init__(self, model: CausalQwenForCausalLM, batch: list[Job], between: Callable[[], None]) -> None:
        self.model, self.between = model, between
        self.rows = [(job, place, row) for job in batch for place, row in enumerate(job.rows)]
        end = model.generation_config.eos_token_id
        self.ends = set(end) if isinstance(end, list) else {end}
        self.log: ValueLog

    def follow(self, log: ValueLog) -> None:
        self.log = log

    def put(self, value: Tensor) -> None:
        """Tokens are taken as a stopping criterion."""

    def end(self) -> None:
        """And so is their end."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        tokens = input_ids[:, -1].tolist()
        places = self._places(tokens)
        for index, (job, place, row) in enumerate(self.rows):
            if row.finish is None and not job.cancelled:
                job.deliver(self._step(index, job, place, row, tokens[index], places.get(index)))
        self.between()
        done = [job.cancelled or row.finish is not None for job, _, row in self.rows]
        return torch.tensor(done, device=input_ids.device)

    def _places(self, tokens: list[int]) -> dict[int, dict[str, Any]]:
        """What else could stand where each row's token does, by the row's index, where that was asked for."""
        places = {}
        for index, (job, _, row) in enumerate(self.rows):
            if job.alternatives is None or row.finish is not None or job.cancelled or row.text.in_digits:
                continue
            features, before = self.log.follows[index], row.text.tail
            (made,) = alternatives(self.model, features, [tokens[index]], [before], job.alternatives)
            places[index] = asdict(made)
        return places

    def _step(self, index: int, job: Job, place: int, row: Row, token: int, could_be: dict[str, Any] | None) -> Piece:
        row.written += 1
        numbers, text, start = [], row.text, len(row.text.text)
        if token in self.ends:
            row.finish = "stop"
        else:
            is_number = token == self.model.config.num_token_id
            value = self.log[self.log.last][index].item() if is_number else 0.0
            span = text.append(token, value)
            if span is not None:
                numbers.append({"value": value, "span": list(span)} | self._law(index, job, value))
        ended = row.finish is not None or row.written >= job.max_tokens
        piece = text.take(final=ended)
        if text.stopped:
            row.finish = "stop"
        elif ended and row.finish is None:
            row.finish = "length"
        numbers = [number for number in numbers if number["span"][1] <= len(text.text)]
        tokens = [] if could_be is None else [{"span": [min(start, len(text.text)), len(text.text)]} | could_be]
        return Piece(place, piece, numbers, row.finish, tokens)

    def _law(self, index: int, job: Job, value: float) -> dict[str, Any]:
        """The distribution that a number came from, with every draw integrated out; about the individual that was named."""
        (prediction,) = self.model.predict_values(self.log.follows[index], job.individual)
        return told(prediction, points=job.points, beside=value)
