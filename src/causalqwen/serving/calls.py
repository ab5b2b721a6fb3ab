"""Requests on their way to the model's own thread and back: what they deliver, time that runs out, clients that leave."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from causalqwen.serving.settings import GONE, ApiError

Work = Callable[["Task"], None]
"""It hands the parts of its answer to `Task.tell` and calls `Task.pause` between two steps."""

_BETWEEN_PROGRESS = 0.2  # seconds


class Call:
    """A request on its way. `job` is the work for it; what that delivers is kept in its order."""

    job: Any

    def __init__(self, timeout: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline = self.loop.time() + timeout
        self.pieces: asyncio.Queue[Any] = asyncio.Queue()

    def deliver(self, piece: Any) -> None:
        """From the worker's thread."""
        try:
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
        except RuntimeError:  # the loop is closed: nothing listens any more
            self.job.cancelled = True

    async def next(self) -> Any:
        """The next piece; ApiError where the work failed or time runs out."""
        try:
            async with asyncio.timeout_at(self.deadline):
                piece = await self.pieces.get()
        except TimeoutError:
            raise too_late() from None
        if isinstance(piece, ApiError):
            raise piece
        return piece

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        raise NotImplementedError

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in parts."""
        raise NotImplementedError

    async def answer(self, request: Request, stream: bool, ended: Callable[[], None]) -> Response:
        """The answer as server-sent events, or in one; whatever ends it, a client that left included, runs `ended`."""
        if stream:
            return _EventStream(self.events(), ended)
        try:
            return JSONResponse(await unless_left(request, asyncio.ensure_future(self.whole())))
        finally:
            ended()


async def unless_left(request: Request, work: asyncio.Future) -> Any:
    """The result of some work; ApiError for a client that leaves before, which calls the work off."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    left = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(GONE, "the client left")
        return work.result()
    finally:
        left.cancel()
        work.cancel()


def too_late() -> ApiError:
    return ApiError(503, "no answer in the time that this server allows", code="timeout")


class _EventStream(StreamingResponse):
    def __init__(self, parts: AsyncIterator[dict[str, Any]], ended: Callable[[], None]) -> None:
        super().__init__(_events(parts), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.ended = ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


async def _events(parts: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for part in parts:
            yield _event(part)
    except ApiError as error:
        yield _event(error.body())
        return
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


# ---- work of seconds that writes no stream of tokens -------------------------------------------------------------------


class _CalledOffError(Exception):
    """Nobody waits for it any more."""


@dataclass(eq=False)
class Task:
    """A place in the queue of a `Batcher` for some work; it waits its turn among the texts, runs alone, and ends where nobody
    waits for it. `deliver` takes its parts, a failure, and None at its end."""

    work: Work
    deliver: Callable[[Any], None]
    cancelled: bool = False
    between: Callable[[], None] = lambda: None

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
        self._done, self._in_prompt, self._reported_at = 0, True, 0.0

    def put(self, value: Any) -> None:
        """A prompt first, then its tokens."""
        if self._in_prompt:
            self._in_prompt = False
            return
        self._done += value.numel()
        now = time.monotonic()
        if now - self._reported_at > _BETWEEN_PROGRESS:
            self._reported_at = now
            self.task.tell({"progress": min(self._done / self.total, 1.0)})
        else:
            self.task.pause()

    def end(self) -> None:
        """The next text begins with its prompt."""
        self._in_prompt = True


class TaskCall(Call):
    """A request for some work. Parts of its answer are merged where it is wanted in one: lists are joined."""

    def __init__(self, work: Work, frame: dict[str, Any], timeout: float) -> None:
        super().__init__(timeout)
        self.frame, self.job = frame, Task(work, self.deliver)

    async def whole(self) -> dict[str, Any]:
        body = dict(self.frame)
        async for part in self.events():
            for name, made in part.items():
                body[name] = body[name] + made if isinstance(made, list) and name in body else made
        body.pop("progress", None)
        return body

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        while (part := await self.next()) is not None:
            yield self.frame | part
