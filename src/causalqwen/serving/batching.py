"""Requests gathered for a short while, then run through `generate` together by the one thread that owns the model."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from causalqwen.decoding import CausalDecoding, Individual
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.alternatives import Likelihood, alternatives, likelihoods
from causalqwen.modeling.logits_processors import ValueLog
from causalqwen.modeling.prediction import prediction_to_dict
from causalqwen.parts.copying import Candidates
from causalqwen.serving.calls import Task
from causalqwen.serving.logprobs import PlacedToken
from causalqwen.serving.settings import ApiError, ServerSettings
from causalqwen.serving.softmax_sampling import RowSoftmaxSampler
from causalqwen.serving.text import GrowingText


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as the model reads it. echo: its text, where that is given back. starts: of each token of that text, where its
    log-probabilities are asked for. after_space: it ends with a space that the model does not read."""

    ids: list[int]
    values: list[float]
    echo: str = ""
    starts: list[int] | None = None
    after_space: bool = False


class Beside(NamedTuple):
    """What else was asked about a token: what could stand in its place, and how likely it was."""

    could_be: dict[str, Any] | None = None
    likely: tuple[Likelihood, ...] | None = None


@dataclass
class Row:
    """One text to write: which of its job, after what, its seed, and what was written so far."""

    place: int
    prompt: Prompt
    seed: int
    text: GrowingText
    written: int = 0
    finish: str | None = None

    def step(
        self, token: int, value: float, law: Callable[[], dict[str, Any]], is_end: bool, is_last: bool, beside: Beside
    ) -> "Piece":
        """Take the next token, and `finish` where the text ends with it: what can be sent now.

        value, law: of a `<NUM>`. is_end: whether the token ends a text. is_last: whether none may follow.
        """
        begun, start = self.text.end, len(self.text.text)
        self.written += 1
        numbers: list[dict[str, Any]] = []
        if is_end:
            self.finish = "stop"
        elif (span := self.text.append(token, value)) is not None:
            numbers.append({"value": value, "span": list(span)} | law())
        piece = self.text.take(final=is_end or is_last)
        if self.text.stopped:
            self.finish = "stop"
        elif is_last and self.finish is None:
            self.finish = "length"
        end = len(self.text.text)
        tokens = [] if beside.could_be is None else [{"span": [min(start, end), end]} | beside.could_be]
        logprobs = [] if beside.likely is None else [(token, len(self.prompt.echo) + min(begun, end), beside.likely)]
        whole = [number for number in numbers if number["span"][1] <= end]
        return Piece(self.place, piece, whole, self.finish, tokens, logprobs)


@dataclass(frozen=True)
class Piece:
    """What a step added to a row: text, numbers in it, why it ended, where it did, and, where that was asked for, its token and
    how likely tokens were."""

    row: int
    text: str
    numbers: list[dict[str, Any]]
    finish: str | None
    tokens: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[PlacedToken] = field(default_factory=list)


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
    logprobs: int | None = None
    cancelled: bool = False
    arrived: float = field(default_factory=time.monotonic)

    @property
    def width(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(row.prompt.ids) for row in self.rows)

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

    A row's draws belong to (its seed, its position), so that its text does not depend on what it is batched with. The model's
    weights stand still while it runs.
    """

    def __init__(self, model: CausalQwenForCausalLM, settings: ServerSettings) -> None:
        self.model, self.settings = model, settings
        self.context = model.config.context_length or math.inf
        self.observe: Callable[[int], None] = lambda rows: None
        self._waiting: list[Any] = []  # jobs and tasks
        self._asides: deque[tuple[Callable[[], Any], Future]] = deque()
        self._running: list[Any] = []
        self._changed = threading.Condition()
        self._refuses = self._closed = False
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._asides)

    @property
    def running(self) -> int:
        return len(self._running)

    def start(self) -> None:
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self._thread.is_alive() and not self._refuses and self.waiting < self.settings.max_waiting

    def refuse(self) -> None:
        """Take nothing more; what is held goes on."""
        self._refuses = True

    def close(self) -> None:
        """Refuse what waits, end what runs at its next token, and wait for the thread."""
        self.refuse()
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

    def submit(self, job: Job | Task) -> None:
        """Queue a job, or a task. ApiError 429 where the queue is full."""
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
        if self._refuses:
            raise ApiError(503, "the server is shutting down")
        if self.waiting >= (most := self.settings.max_waiting):
            raise ApiError(429, f"{most} requests are waiting already", code="rate_limit_exceeded")

    def cancel(self, job: Job | Task) -> None:
        """Give its place back: out of the queue, or out of its batch at the next token."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)

    def _work(self) -> None:
        with self.model.frozen_vocabulary():
            while (batch := self._next()) is not None:
                self.step_aside()
                if batch:
                    self._run(batch)

    def _run(self, batch: list[Any]) -> None:
        try:
            if isinstance(batch[0], Task):
                batch[0].run(self.step_aside)
            else:
                self.observe(sum(len(job.rows) for job in batch))
                self._generate(batch)
        except Exception:  # the next batch may fare better
            logging.getLogger(__name__).exception("a batch failed")
            for job in batch:
                job.deliver(ApiError(500, "the model failed on this batch"))
        with self._changed:
            self._running = []

    def _next(self) -> list[Any] | None:
        """The oldest job and those that fit it, when its window is over or the batch is full, or the oldest task; an empty
        list where short work waits, None when closed."""
        window, most = self.settings.window, self.settings.max_rows
        with self._changed:
            while not self._closed:
                if self._asides:
                    return []
                if not self._waiting:
                    self._changed.wait()
                    continue
                batch, left = self._waiting[:1], 0.0
                if isinstance(batch[0], Job):
                    for job in self._waiting[1:]:
                        if isinstance(job, Job) and job.fits(batch, most, self.context):
                            batch.append(job)
                    if sum(len(job.rows) for job in batch) < most:
                        left = batch[0].arrived + window - time.monotonic()
                if left <= 0:
                    self._waiting = [job for job in self._waiting if job not in batch]
                    self._running = batch
                    return batch
                self._changed.wait(left)
            return None

    def _echo(self, job: Job) -> None:
        """Give prompts back that are to stand before their texts; those of no text end there."""
        likely: dict[Prompt, list[PlacedToken]] = {}
        for row in job.rows:
            prompt = row.prompt
            if prompt not in likely and not job.cancelled:
                likely[prompt] = [] if prompt.starts is None else self._likelihoods(prompt, prompt.starts, job.logprobs)
                self.step_aside()
            row.finish = None if job.max_tokens else "length"
            if prompt.echo or row.finish:
                job.deliver(Piece(row.place, prompt.echo, [], row.finish, logprobs=likely.get(prompt, [])))

    def _likelihoods(self, prompt: Prompt, starts: list[int], count: int) -> list[PlacedToken]:
        """The tokens of a prompt, each read alone: no padding moves a digit. Nothing stands before the first."""
        seen = [token for token in prompt.ids if token != self.model.config.num_token_id]
        ids = torch.tensor([seen], device=self.model.device)
        with torch.no_grad():
            features = self.model.features(ids, use_cache=False).last_hidden_state[0]
        found = likelihoods(self.model, features[:-1], ids[0, 1:], count)
        return list(zip(seen, starts, [None, *found], strict=True))

    def _generate(self, batch: list[Job]) -> None:
        for job in batch:
            self._echo(job)
        batch = [job for job in batch if job.max_tokens and not job.cancelled]
        if not batch:
            return
        model, rows = self.model, [row for job in batch for row in job.rows]
        owners = [job for job in batch for _ in job.rows]
        prompts = [row.prompt for row in rows]
        width = max(len(prompt.ids) for prompt in prompts)
        pad = model.processor.tokenizer.pad_token_id

        def padded(columns: list[list], fill: float, dtype: torch.dtype) -> Tensor:
            lines = [[fill] * (width - len(column)) + column for column in columns]
            return torch.tensor(lines, dtype=dtype, device=model.device)

        watch = _Watch(model, batch, self.step_aside)
        seeds = [row.seed for row in rows]
        if batch[0].plan.decision == "softmax":
            nucleus = [job.plan.temperature for job in owners], [job.top_p for job in owners]
            sampler = RowSoftmaxSampler(seeds, *nucleus, [len(prompt.ids) for prompt in prompts], width, model.device)
            choice: dict[str, Any] = {"do_sample": False, "logits_processor": LogitsProcessorList([sampler])}
        else:
            plan = replace(batch[0].plan, seed=seeds)
            if batch[0].individual is not None:
                plan = replace(plan, individual=[job.individual for job in owners])
            choice = {"causal_decoding": plan}
        model.generate(
            padded([prompt.ids for prompt in prompts], pad, torch.int64),
            attention_mask=padded([[1] * len(prompt.ids) for prompt in prompts], 0, torch.int64),
            numeric_values=padded([prompt.values for prompt in prompts], 0.0, torch.float64),
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
        self.rows = [(job, row) for job in batch for row in job.rows]
        end = model.generation_config.eos_token_id
        self.ends = set(end) if isinstance(end, list) else {end}
        self.log: ValueLog
        self._announced: dict[int, Tensor] = {}  # what a hidden `<NUM>` that was written last followed from, by row

    def follow(self, log: ValueLog) -> None:
        self.log = log

    def put(self, value: Tensor) -> None:
        """Tokens are taken as a stopping criterion."""

    def end(self) -> None:
        """And so is their end."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        for index, ((job, row), token) in enumerate(zip(self.rows, input_ids[:, -1].tolist(), strict=True)):
            if row.finish is None and not job.cancelled:
                job.deliver(self._step(index, token))
        self.between()
        done = [job.cancelled or row.finish is not None for job, row in self.rows]
        return torch.tensor(done, device=input_ids.device)

    def _beside(self, index: int, token: int) -> Beside:
        """What was asked about a row's token: what else could stand there, how likely it was."""
        job, row = self.rows[index]
        model, features = self.model, self.log.follows[index]
        could_be = likely = None
        if job.alternatives is not None and not row.text.in_digits:
            offered = self._offered(index)
            (made,) = alternatives(model, features, [token], [row.text.tail], job.alternatives, offered)
            could_be = asdict(made)
        if job.logprobs is not None:
            # The first digit of a hidden number follows from what its `<NUM>` did.
            features = self._announced.pop(index, features)
            if token == model.config.num_token_id and model.config.context.hides:
                self._announced[index] = features
            (likely,) = likelihoods(model, features, torch.tensor([token], device=features.device), job.logprobs)
        return Beside(could_be, likely)

    def _step(self, index: int, token: int) -> Piece:
        (job, row), beside = self.rows[index], self._beside(index, token)
        is_number = token == self.model.config.num_token_id and token not in self.ends
        value = self.log[self.log.last][index].item() if is_number else 0.0
        is_last = row.written + 1 >= job.max_tokens
        return row.step(token, value, lambda: self._law(index, job, value), token in self.ends, is_last, beside)

    def _law(self, index: int, job: Job, value: float) -> dict[str, Any]:
        """The distribution that a number came from, with every draw integrated out; about the individual that was named."""
        (prediction,) = self.model.predict_values(self.log.follows[index], job.individual, self._offered(index))
        return prediction_to_dict(prediction, points=job.points, beside=value)

    def _offered(self, index: int) -> Candidates | None:
        return self.log.offered(slice(index, index + 1))
