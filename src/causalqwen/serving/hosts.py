"""A page elsewhere can give this machine a name of its own, and a browser would let it ask a server here; this does not."""

import re
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers

from causalqwen.serving.settings import ApiError

_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")


class OnlyLoopback:
    """ASGI middleware: 400 where the header `Host` does not name this machine as its own programs do."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not _LOOPBACK.fullmatch(Headers(scope=scope).get("host", "").lower()):
            error = ApiError(400, "this server answers to 127.0.0.1, [::1] and localhost alone", code="wrong_host")
            await JSONResponse(error.body(), error.status)(scope, receive, send)
            return
        await self.app(scope, receive, send)
