"""The explorer's page, for which a browser asks no other server for anything, and `/openapi.json`: every endpoint and field."""

import json
import mimetypes
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

FOLDER = Path(__file__).parent / "explorer"
"""The explorer's files, made by `npm run build` in web/."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Headers of each file: a browser runs nothing that is not in one of them."""

_COMPONENTS = "#/components/schemas/"
_WORDS, _MAYBE = {"type": "string"}, {"type": ["string", "null"]}
_INSIDE = {"type": "object", "properties": {"message": _WORDS, "type": _WORDS, "param": _MAYBE, "code": _MAYBE}}
_ERROR = {"type": "object", "properties": {"error": _INSIDE}}


def add_explorer(app: FastAPI) -> None:
    """Serve its files as they are now, `index.html` at / too: what a request names is looked for on no disk."""
    for path in FOLDER.iterdir():
        file = partial(_given, path.read_bytes(), mimetypes.guess_type(path.name)[0], HEADERS)
        for name in (path.name, "") if path.name == "index.html" else (path.name,):
            app.add_route(f"/{name}", file, ["GET"], include_in_schema=False)


async def _given(content: str | bytes, kind: str | None, headers: dict[str, str], request: Request) -> Response:
    return Response(content, headers=headers, media_type=kind)


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _COMPONENTS + name}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "an error, in OpenAI's shape", "content": _json("Error")}
}
"""`responses` of every endpoint beside its answer."""


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of an endpoint that reads its body itself: what stands in it."""
    return {"requestBody": {"required": True, "content": _json(kind.__name__)}}


def add_openapi(app: FastAPI, kinds: Sequence[type[BaseModel]]) -> None:
    """Serve `/openapi.json` of the endpoints that an application has by then, with bodies of these kinds."""
    document = app.openapi()
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_COMPONENTS + "{model}")
    document["components"] = {"schemas": {"Error": _ERROR} | schemas["$defs"]}
    schema = partial(_given, json.dumps(document, ensure_ascii=False), "application/json", {})
    app.add_route("/openapi.json", schema, ["GET"], include_in_schema=False)
