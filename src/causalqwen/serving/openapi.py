"""`/openapi.json`, and the same as a page to read, `/docs`, which asks nobody else for anything."""

import html
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.routing import BaseRoute

_COMPONENTS = "#/components/schemas/"
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-cache"}
_STYLE = (
    "body{font:1rem/1.5 sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "td{padding:0 1rem 0 0;vertical-align:top}"
)
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

Endpoint = TypeVar("Endpoint", bound=Callable)


def asks(kind: type[BaseModel]) -> Callable[[Endpoint], Endpoint]:
    """Says of an endpoint, which reads its body itself, what stands in it."""

    def said(endpoint: Endpoint) -> Endpoint:
        endpoint.asks = kind  # type: ignore[attr-defined]
        return endpoint

    return said


def add_openapi(app: FastAPI, asked: Sequence[BaseRoute]) -> None:
    """`/openapi.json` and `/docs` of the routes that an application has by then. asked: those that may say what they read."""
    described = json.dumps(_described(app, asked), ensure_ascii=False)
    page = _page(json.loads(described))

    async def schema() -> Response:
        return Response(described, media_type="application/json")

    async def docs() -> Response:
        return Response(page, media_type="text/html", headers=_HEADERS)

    app.add_api_route("/openapi.json", schema, include_in_schema=False)
    app.add_api_route("/docs", docs, include_in_schema=False)


def _described(app: FastAPI, routes: Sequence[BaseRoute]) -> dict[str, Any]:
    told = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = told.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _ERROR
    for route in routes:
        kind = getattr(getattr(route, "endpoint", None), "asks", None)
        operation = told["paths"].get(getattr(route, "path", None), {}).get("post")
        if kind is None or operation is None:
            continue
        schemas |= (asked := kind.model_json_schema(ref_template=_COMPONENTS + "{model}")).pop("$defs", {})
        schemas[kind.__name__] = asked
        body = {"schema": {"$ref": _COMPONENTS + kind.__name__}}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    error = {"application/json": {"schema": {"$ref": _COMPONENTS + "Error"}}}
    for methods in told["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "an error, in OpenAI's shape", "content": error}
    return told


def _page(told: dict[str, Any]) -> str:
    parts = [f"<h1>{html.escape(told['info']['title'])}</h1><p>{html.escape(told['info'].get('description', ''))}</p>"]
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('description', ''))}</p>")
            for body in operation.get("requestBody", {}).get("content", {}).values():
                parts.append(f"<p>{_kind(body['schema'])}</p>")
    parts.append("<h2>Fields</h2>")
    for name, schema in sorted(told["components"]["schemas"].items()):
        parts.append(f'<h3 id="{html.escape(name)}">{html.escape(name)}</h3>')
        parts.append(f"<p>{html.escape(schema.get('description', ''))}</p><table>")
        for field, one in schema.get("properties", {}).items():
            needed = " (needed)" if field in schema.get("required", ()) else ""
            told_of = html.escape(one.get("description", ""))
            parts.append(f"<tr><td><code>{html.escape(field)}</code>{needed}<td>{_kind(one)}<td>{told_of}")
        parts.append("</table>")
    title = html.escape(told["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        + "\n".join(parts)
    )


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = html.escape(schema["$ref"].removeprefix(_COMPONENTS))
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(map(_kind, schema[several])))
    if "enum" in schema or "const" in schema:
        return ", ".join(
            f"<code>{html.escape(json.dumps(one))}</code>" for one in schema.get("enum", [schema.get("const")])
        )
    if schema.get("type") == "array":
        return f"list of ({_kind(schema.get('items', {}))})"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "maxLength": "length ≤"}
    told = [f"{html.escape(sign)} {schema[name]:g}" for name, sign in bounds.items() if name in schema]
    kinds = schema.get("type", "anything")
    return " ".join([kinds if isinstance(kinds, str) else " or ".join(kinds), *told])
