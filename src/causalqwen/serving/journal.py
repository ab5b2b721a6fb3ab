"""What is kept of each request: an id, a count, a duration and a line of the log; never a text."""

import json
import logging
import re
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders

from causalqwen.serving.metrics import Metrics
from causalqwen.serving.settings import GONE, ApiError

_LOGGER = logging.getLogger(__name__)
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LONGEST = 200  # characters of a path


class Journal:
    """ASGI middleware around everything.

    An answer carries `X-Request-Id`: the request's own, if that is at most 64 letters, digits, dots and dashes, or one of
    ours. `scope["state"]["journal"]` is what the log gets to know beside it. Whatever went wrong is answered in OpenAI's shape.
    """

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), GONE
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        known = scope.setdefault("state", {})["journal"] = {"request_id": request_id}

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception:
            _LOGGER.exception("request %s failed", request_id)
            if status != GONE:  # half an answer is there: the connection has to end
                raise
            error = ApiError(500, "something went wrong inside the server")
            await JSONResponse(error.body(), error.status)(scope, receive, noting)
        finally:
            seconds = time.monotonic() - start
            self.metrics.answered(scope["path"], status, seconds)
            facts = {"method": scope["method"], "path": scope["path"][:_LONGEST], "status": status}
            facts |= {"seconds": round(seconds, 4)}
            _LOGGER.info("answered", extra={"facts": known | facts})


class JsonLines(logging.Formatter):
    """A record as one JSON object: `time`, `level`, `logger`, `message`, and what a request left behind."""

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
