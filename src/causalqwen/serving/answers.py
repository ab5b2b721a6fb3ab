"""Answers of work that the model's own thread does: what it delivers, time that runs out, clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from causalqwen.serving.settings import ApiError


class Inbox:
    """What is delivered for a request, in its order; `job` is the work behind it."""

    job: Any

    def __init__(self, timeout: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline = self.loop.time() + timeout
        self.pieces: asyncio.Queue[Any] = asyncio.Queue()

    def deliver(self, piece: Any) -> None:
        """From the worker's thread."""
        try:
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.job.cancelled = True

    async def next(self) -> Any:
        """What comes next; ApiError where the work failed or time runs out."""
        try:
            async with asyncio.timeout_at(self.deadline):
                piece = await self.pieces.get()
        except TimeoutError:
            raise too_late() from None
        if isinstance(piece, ApiError):
            raise piece
        return piece


class EventStream(StreamingResponse):
    """Server-sent events; whatever ends them, a client that left included, runs `ended`."""

    def __init__(self, events: AsyncIterator[str], ended: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.ended = ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


def too_late() -> ApiError:
    return ApiError(503, "no answer in the time that this server allows", code="timeout")


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
