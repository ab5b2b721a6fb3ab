"""Work of seconds that writes no stream of tokens: it waits its turn among the texts, and ends where nobody waits for it."""

import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from causalqwen.serving.answers import Inbox, event
from causalqwen.serving.settings import ApiError

Work = Callable[["Task"], None]
"""It hands the parts of its answer to `Task.tell` and calls `Task.pause` between two steps."""

_BETWEEN_PROGRESS = 0.2  # seconds


class _CalledOffError(Exception):
    """Nobody waits for it any more."""


@dataclass(eq=False)
class Task:
    """A place in the queue of a `Batcher` for some work; it runs alone. `deliver` takes its parts, a failure, and None at its
    end."""

    work: Work
    deliver: Callable[[Any], None]
    cancelled: bool = False
    rows: tuple[()] = ()
    law: None = None
    arrived: float = -math.inf  # it waits for no company
    between: Callable[[], None] = lambda: None

    def fits(self, *batch: Any) -> bool:
        """With nothing."""
        return False

    def run(self, between: Callable[[], None]) -> None:
        """Do it; `between` is called in its pauses. A ValueError tells what was wrong with the request."""
        self.between = between
        try:
            self.work(self)
            self.deliver(None)
        except _CalledOffError:
            pass
        except ApiError as error:
            self.deliver(error)
        except ValueError as error:
            self.deliver(ApiError(400, str(error)))

    def tell(self, part: dict[str, Any]) -> None:
        """A part of the answer."""
        self.deliver(part)
        self.pause()

    def pause(self) -> None:
        """Short work of others is done here, and a task that was called off ends."""
        if self.cancelled:
            raise _CalledOffError
        self.between()


class Progress:
    """A streamer of `generate` for texts of `total` tokens together: it pauses after each token, and tells how far they are."""

    def __init__(self, task: Task, total: int) -> None:
        self.task, self.total = task, total
        self._done, self._in_prompt, self._told = 0, True, 0.0

    def put(self, value: Any) -> None:
        """A prompt first, then its tokens."""
        if self._in_prompt:
            self._in_prompt = False
            return
        self._done += value.numel()
        now = time.monotonic()
        if now - self._told > _BETWEEN_PROGRESS:
            self._told = now
            self.task.tell({"progress": min(self._done / self.total, 1.0)})
        else:
            self.task.pause()

    def end(self) -> None:
        """The next text begins with its prompt."""
        self._in_prompt = True


class TaskCall(Inbox):
    """A request for some work. Parts of its answer are merged where it is wanted in one: lists are joined."""

    job: Task

    def __init__(self, work: Work, frame: dict[str, Any], timeout: float) -> None:
        super().__init__(timeout)
        self.frame, self.job = frame, Task(work, self.deliver)

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        body = dict(self.frame)
        while (part := await self.next()) is not None:
            for name, made in part.items():
                body[name] = body.get(name, []) + made if isinstance(made, list) else made
        body.pop("progress", None)
        return body

    async def events(self) -> AsyncIterator[str]:
        """Its parts as server-sent events."""
        try:
            while (part := await self.next()) is not None:
                yield event(self.frame | part)
        except ApiError as error:
            yield event(error.body())
            return
        yield "data: [DONE]\n\n"
