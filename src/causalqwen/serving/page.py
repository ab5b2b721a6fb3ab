"""The explorer's page: static files beside this module, made by `npm run build` in web/."""

import mimetypes
from pathlib import Path

from fastapi import APIRouter, Response

FOLDER = Path(__file__).parent / "explorer"

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Of each file: a browser asks nobody else for anything, and runs nothing that is not in one of them."""


def page() -> APIRouter:
    """The files as they are now, `index.html` at / too: what a request names is looked for among them, and on no disk."""
    router = APIRouter(include_in_schema=False)
    for path in FOLDER.iterdir():
        for name in (path.name, "") if path.name == "index.html" else (path.name,):
            router.add_api_route(f"/{name}", _File(path), methods=["GET", "HEAD"])
    return router


class _File:
    """One of them, as an endpoint."""

    def __init__(self, path: Path) -> None:
        self.content, self.kind = path.read_bytes(), mimetypes.guess_type(path.name)[0]

    async def __call__(self) -> Response:
        return Response(self.content, headers=HEADERS, media_type=self.kind)
