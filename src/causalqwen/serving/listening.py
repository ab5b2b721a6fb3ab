"""The process beneath: no patience with clients that hold connections for nothing, an end that answers everybody, and memory
that its libraries would keep given back."""

import asyncio
import contextlib
import ctypes
import gc
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from causalqwen.serving.journal import log_to_stderr
from causalqwen.serving.settings import PATIENCE

_MMAP_THRESHOLD = -3  # mallopt's M_MMAP_THRESHOLD
_LARGE = 16 << 20  # bytes; from 1 MiB a long prompt costs a quarter more time (docs/research/experiments/speed.md 9.1)


class Connection(H11Protocol):
    """uvicorn's, closed where a request or its answer is not moved on; uvicorn itself waits for ever.

    `PATIENCE` is for a request's head, from the connection or the answer before; a request and its answer together have as
    long as the application needs at most, its `state.longest`, and as long again as a body and an answer may take.
    """

    _watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait(PATIENCE)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._wait(self.config.app.state.longest + 2 * PATIENCE)  # type: ignore[union-attr]

    def on_response_complete(self) -> None:
        self._wait(PATIENCE)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait(None)

    def _wait(self, seconds: float | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class Listener(uvicorn.Server):
    """uvicorn's server of an application of `create_app`.

    When it ends, nothing more is taken; what is held is answered, and after `patience` seconds handed back by a 503.
    """

    patience = PATIENCE

    def __init__(self, app: FastAPI, log_config: dict[str, Any] | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_config=log_config,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=int(PATIENCE + 5),
        )
        super().__init__(config)
        self.batcher = app.state.batcher

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.batcher.refuse()
        hand_back = threading.Timer(self.patience, self.batcher.close)
        hand_back.start()
        try:
            await super().shutdown(sockets)
        finally:
            hand_back.cancel()


def leaving_nothing(work: Callable[..., Any], *of: Any) -> Any:
    """Work whose memory the system has again afterwards: the C library keeps what thousands of small pieces lay in, and long
    requests would make a server grow for hours."""
    try:
        return work(*of)
    finally:
        _libc("malloc_trim", 0)


def _libc(name: str, *numbers: int) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        getattr(ctypes.CDLL(None), name)(*numbers)


def run(app: FastAPI, listener: socket.socket, *, log_requests: bool = False) -> None:
    """Serve on a listening socket until SIGINT or SIGTERM, which end the process with status 0.

    Meanwhile glibc, which would keep up to twice the largest piece that it was ever given back, 64 MiB for each thread, is set
    from which size on a piece is the system's; and the garbage collector passes over what stands now, the model.
    """
    for name in (signal.SIGINT, signal.SIGTERM):  # uvicorn takes them over, and raises them again when it has ended
        signal.signal(name, lambda *_: sys.exit(0))
    sys.setswitchinterval(5e-4)  # a thread that reads a long prompt gives way to the model's between two operations
    _libc("mallopt", _MMAP_THRESHOLD, _LARGE)
    gc.collect()
    gc.freeze()
    try:
        Listener(app, log_to_stderr(log_requests)).run(sockets=[listener])
    finally:
        gc.unfreeze()  # what is frozen as the process ends counts as lost in some libraries, which say so
