"""A request as the server keeps it: an id, a count, a duration and a line of the log; never a text."""

import json
import logging
import re
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.datastructures import Headers, MutableHeaders

from causalqwen.serving.batching import Batcher
from causalqwen.serving.settings import GONE, ApiError

_LOGGER = logging.getLogger(__name__)
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LONGEST = 200  # characters of a path
_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROWS = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counters of one server, in a registry of its own, as `/metrics` tells them. `paths`: those that are counted by name."""

    def __init__(self, batcher: Batcher) -> None:
        self.registry = registry = CollectorRegistry()
        self.paths: frozenset[str] = frozenset()
        ProcessCollector(registry=registry)
        by, kind = ("path", "status"), ("kind",)
        what, lasted = "Answers by status; 499: the client left.", "From request to end of answer."
        self.requests = Counter("causalqwen_requests", what, by, registry=registry)
        self.seconds = Histogram("causalqwen_request_seconds", lasted, ("path",), buckets=_SECONDS, registry=registry)
        self.tokens = Counter("causalqwen_tokens", "Tokens read and written.", kind, registry=registry)
        batches = Histogram("causalqwen_batch_rows", "Texts per batch.", buckets=_ROWS, registry=registry)
        Gauge("causalqwen_waiting", "Requests in the queue.", registry=registry).set_function(lambda: batcher.waiting)
        Gauge("causalqwen_running", "Requests in the batch.", registry=registry).set_function(lambda: batcher.running)
        batcher.observe = batches.observe


class Journal:
    """ASGI middleware around everything.

    An answer carries `X-Request-Id`: the request's own, if that is at most 64 letters, digits, dots and dashes, or one of
    ours. `scope["state"]["journal"]` is what the log gets to know beside it. Whatever went wrong is answered in OpenAI's shape.

    local: requests are refused whose header `Host` does not name this machine as its own programs do. A page elsewhere can give
    it a name of its own, and a browser would let that page ask a server here.
    """

    def __init__(self, app: Any, metrics: Metrics, local: bool) -> None:
        self.app, self.metrics, self.local = app, metrics, local

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, headers = time.monotonic(), GONE, Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        known = scope.setdefault("state", {})["journal"] = {"request_id": request_id}

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        app = self.app
        if self.local and not _LOOPBACK.fullmatch(headers.get("host", "").lower()):
            message = "this server answers to 127.0.0.1, [::1] and localhost alone"
            app = ApiError(400, message, code="wrong_host").response()
        try:
            await app(scope, receive, noting)
        except Exception:
            _LOGGER.exception("request %s failed", request_id)
            if status != GONE:  # half an answer is there: the connection has to end
                raise
            await ApiError(500, "something went wrong inside the server").response()(scope, receive, noting)
        finally:
            seconds, path = time.monotonic() - start, scope["path"] if scope["path"] in self.metrics.paths else "other"
            self.metrics.requests.labels(path, status).inc()
            self.metrics.seconds.labels(path).observe(seconds)
            facts = {"method": scope["method"], "path": scope["path"][:_LONGEST], "status": status}
            facts |= {"seconds": round(seconds, 4)}
            _LOGGER.info("answered", extra={"facts": known | facts})


class JsonLines(logging.Formatter):
    """A record as one JSON object: `time`, `level`, `logger`, `message`, and what a request left."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        } | getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


def log_to_stderr(requests: bool) -> dict[str, Any]:
    """`logging.config.dictConfig`: JSON lines on stderr, of warnings and errors, and of each request if that is wanted."""
    level = "INFO" if requests else "WARNING"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonLines}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}},
        "loggers": {
            "causalqwen.serving": {"level": level, "handlers": ["stderr"], "propagate": False},
            "uvicorn": {"level": "WARNING", "handlers": ["stderr"], "propagate": False},
        },
    }
