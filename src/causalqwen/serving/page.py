"""The explorer's page: static files beside this module, made by `npm run build` in web/."""

from pathlib import Path
from typing import Any

from fastapi import Response
from fastapi.staticfiles import StaticFiles

FOLDER = Path(__file__).parent / "explorer"

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Of each file: a browser asks nobody else for anything, and runs nothing that is not in one of them."""


class Page(StaticFiles):
    """The files, `index.html` at /."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER, html=True)

    async def get_response(self, path: str, scope: Any) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers.update(HEADERS)
        return answer
