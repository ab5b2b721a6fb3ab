"""Pages that a server gives a browser: the explorer, and `/docs`, every endpoint and field of `/openapi.json`. A browser asks
nobody else for anything."""

import html
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
_DOCS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-cache"}
_STYLE = (
    "body{font:1rem/1.5 sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "td{padding:0 1rem 0 0;vertical-align:top}"
)
_WORDS, _MAYBE = {"type": "string"}, {"type": ["string", "null"]}
_INSIDE = {"type": "object", "properties": {"message": _WORDS, "type": _WORDS, "param": _MAYBE, "code": _MAYBE}}
_ERROR = {"type": "object", "properties": {"error": _INSIDE}}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "maxLength": "length ≤"}


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
    """Serve `/openapi.json` and `/docs` of the endpoints that an application has by then, with bodies of these kinds."""
    told = app.openapi()
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_COMPONENTS + "{model}")
    told["components"] = {"schemas": {"Error": _ERROR} | schemas["$defs"]}
    schema = partial(_given, json.dumps(told, ensure_ascii=False), "application/json", {})
    app.add_route("/openapi.json", schema, ["GET"], include_in_schema=False)
    app.add_route("/docs", partial(_given, _page(told), "text/html", _DOCS), ["GET"], include_in_schema=False)


def _page(told: dict[str, Any]) -> str:
    about, parts = told["info"], []
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {path}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('description', ''))}</p>")
            for body in operation.get("requestBody", {}).get("content", {}).values():
                parts.append(f"<p>{_kind(body['schema'])}</p>")
    parts.append("<h2>Fields</h2>")
    for name, schema in sorted(told["components"]["schemas"].items()):
        parts.append(f'<h3 id="{name}">{name}</h3><p>{html.escape(schema.get("description", ""))}</p><table>')
        for field, inside in schema.get("properties", {}).items():
            needed = " (needed)" if field in schema.get("required", ()) else ""
            described = html.escape(inside.get("description", ""))
            parts.append(f"<tr><td><code>{field}</code>{needed}<td>{_kind(inside)}<td>{described}")
        parts.append("</table>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{about["title"]}</title><style>{_STYLE}</style>'
        f"<h1>{about['title']}</h1><p>{html.escape(about['description'])}</p>" + "\n".join(parts)
    )


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_COMPONENTS)
        return f'<a href="#{name}">{name}</a>'
    if several := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(dict.fromkeys(map(_kind, several)))
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return ", ".join(f"<code>{html.escape(json.dumps(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of ({_kind(schema.get('items', {}))})"
    bounds = [f"{html.escape(sign)} {schema[name]:g}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([schema.get("type", "anything"), *bounds])
