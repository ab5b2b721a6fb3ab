"""The application: OpenAI's endpoints over a `Batcher`."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from causalqwen.decoding import PRESETS
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.serving.batching import Batcher, Job, Piece
from causalqwen.serving.jobs import job_of
from causalqwen.serving.metrics import CountRequests, Metrics
from causalqwen.serving.numbers import predict_numbers
from causalqwen.serving.page import Page
from causalqwen.serving.requests import ChatRequest, CompletionRequest, NumbersRequest, TextRequest, parse
from causalqwen.serving.settings import ApiError, ServerSettings


def create_app(model: CausalQwenForCausalLM, settings: ServerSettings | None = None) -> FastAPI:
    """An application that serves one model; its batcher starts and ends with it.

    Every error has OpenAI's shape. A request that cannot be served as it is gets a 4xx that says why; 429 where the queue is
    full, 503 where time ran out or the server is closing.
    """
    settings = settings or ServerSettings()
    if settings.temperature is None:
        settings = replace(settings, temperature=model.config.text_temperature)
    service = _Service(model, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        await asyncio.to_thread(service.batcher.close)

    app = FastAPI(title="CausalQwen", lifespan=lifespan, openapi_url=None)
    app.state.batcher = service.batcher
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(CountRequests, metrics=service.metrics)
    app.add_api_route("/health", service.health)
    guarded = APIRouter(dependencies=[Depends(service.check_key)])
    guarded.add_api_route("/metrics", service.show_metrics)
    guarded.add_api_route("/v1/models", service.models)
    guarded.add_api_route("/v1/models/{name:path}", service.model_card)
    guarded.add_api_route("/v1/completions", service.completions, methods=["POST"])
    guarded.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    guarded.add_api_route("/v1/numbers", service.numbers, methods=["POST"])
    app.include_router(guarded)
    if settings.page:  # a site elsewhere could name this machine as its own host
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
        app.mount("/", Page())
    return app


class _Call:
    """A request on its way: its job, the pieces that come back, and the frame that its answers share."""

    job: Job

    def __init__(self, asked: TextRequest, timeout: float) -> None:
        self.asked = asked
        self.loop = asyncio.get_running_loop()
        self.deadline = self.loop.time() + timeout
        self.pieces: asyncio.Queue[Piece | ApiError] = asyncio.Queue()
        name, prefix = ("chat.completion", "chatcmpl") if asked.is_chat else ("text_completion", "cmpl")
        self.frame = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": name + ".chunk" * bool(asked.is_chat and asked.stream),
            "created": int(time.time()),
            "model": asked.model,
        }

    def deliver(self, piece: Piece | ApiError) -> None:
        """From the worker's thread."""
        try:
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.job.cancelled = True

    async def read(self) -> AsyncIterator[Piece]:
        """Pieces until every row has ended; ApiError where the job fails or time runs out."""
        left = len(self.job.rows)
        while left:
            try:
                async with asyncio.timeout_at(self.deadline):
                    piece = await self.pieces.get()
            except TimeoutError:
                raise _too_late() from None
            if isinstance(piece, ApiError):
                raise piece
            left -= piece.finish is not None
            yield piece

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        rows = [Piece(row, "", [], None) for row in range(len(self.job.rows))]
        async for piece in self.read():
            before = rows[piece.row]
            numbers, tokens = before.numbers + piece.numbers, before.tokens + piece.tokens
            rows[piece.row] = Piece(piece.row, before.text + piece.text, numbers, piece.finish, tokens)
        return self.frame | {"choices": [self.choice(row) for row in rows], "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        if self.asked.is_chat:  # who speaks is said once
            opening = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for row in range(self.asked.n):
                yield _event(self.frame | {"choices": [{"index": row} | opening]})
        try:
            async for piece in self.read():
                if piece.text or piece.tokens or piece.finish is not None:
                    yield _event(self.frame | {"choices": [self.choice(piece)]})
        except ApiError as error:
            yield _event(error.body())
            return
        if self.asked.wants_usage:
            yield _event(self.frame | {"choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of the answer, or of one event of it."""
        causal: dict[str, Any] = {"numbers": piece.numbers}
        if self.job.alternatives is not None:
            causal["tokens"] = piece.tokens
        if piece.finish is not None:
            causal["seed"] = self.job.rows[piece.row].seed
        body: dict[str, Any] = {"text": piece.text}
        if self.asked.is_chat:
            said = {"content": piece.text}
            body = {"delta": said} if self.asked.stream else {"message": {"role": "assistant"} | said}
        return {"index": piece.row, **body, "finish_reason": piece.finish, "logprobs": None, "causal": causal}

    def usage(self) -> dict[str, int]:
        read = sum(len(row.ids) for row in self.job.rows[:: self.asked.n])
        written = sum(row.written for row in self.job.rows)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class _EventStream(StreamingResponse):
    """Server-sent events; whatever ends them, a client that left included, runs `ended`."""

    def __init__(self, events: AsyncIterator[str], ended: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.ended = ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


class _Service:
    """The endpoints."""

    def __init__(self, model: CausalQwenForCausalLM, settings: ServerSettings) -> None:
        model.config.require("the server")
        _ = model.value_law  # a model whose numbers need a class is told so before anything is served
        self.model, self.processor, self.settings = model, model.processor, settings
        self.processor("made ready before there are threads")
        limits = {name: getattr(settings, name) for name in ("max_rows", "window", "max_waiting")}
        self.batcher = Batcher(model, **limits)
        self.metrics = Metrics(self.batcher)

    async def check_key(self, request: Request) -> None:
        key = self.settings.api_key
        if key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), key.encode())
        if scheme.lower() != "bearer" or not right:
            raise ApiError(401, "wrong or no API key: send it as `Authorization: Bearer ...`", code="invalid_api_key")

    async def health(self) -> dict[str, str]:
        return {"status": "ok"}

    async def show_metrics(self) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model_card(self.settings.name)]}

    async def model_card(self, name: str) -> dict[str, Any]:
        self._check_name(name)
        settings, limits = (
            self.settings,
            ("max_rows", "max_waiting", "max_tokens", "max_body", "max_prompts", "timeout"),
        )
        causal = {
            "presets": list(PRESETS),
            "individuals": list(settings.individuals),
            "temperature": settings.temperature,
            "chat": self.processor.chat_template is not None,
            "numbers": self.model.reads_numbers,
            "context": self.model.config.context_length,
            "limits": {limit: getattr(settings, limit) for limit in limits},
        }
        return {"id": name, "object": "model", "created": 0, "owned_by": "causalqwen", "causal": causal}

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest)

    async def numbers(self, request: Request) -> Response:
        asked = parse(NumbersRequest, await self._body(request))
        self._check_name(asked.model)
        data = await self._aside(request, lambda: predict_numbers(asked, self.settings, self.model))
        return JSONResponse({"object": "list", "model": asked.model, "data": data})

    async def _aside(self, request: Request, work: Callable[[], Any]) -> Any:
        """Short work of the thread that owns the model; ApiError 503 where time runs out. A client that leaves calls it off."""
        future = asyncio.wrap_future(self.batcher.run(work))
        left = asyncio.ensure_future(_disconnected(request))
        try:
            async with asyncio.timeout(self.settings.timeout):
                await asyncio.wait((future, left), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise _too_late() from None
        finally:
            left.cancel()
            future.cancel()
        if not future.done() or future.cancelled():
            raise HTTPException(499, "the client left")
        return future.result()

    async def _answer(self, request: Request, kind: type[TextRequest]) -> Response:
        settings = self.settings
        asked = parse(kind, await self._body(request))
        self._check_name(asked.model)
        call = _Call(asked, settings.timeout)
        context = self.batcher.context
        call.job = await asyncio.to_thread(job_of, asked, settings, self.processor, context, call.deliver)
        self.batcher.submit(call.job)
        if asked.stream:
            return _EventStream(call.events(), lambda: self._end(call))
        whole, left = asyncio.ensure_future(call.whole()), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((whole, left), return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(whole.result()) if whole.done() else Response(status_code=499)
        finally:
            whole.cancel()
            left.cancel()
            self._end(call)

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A page in a browser may send other types to this machine without being asked whether it may.
            raise ApiError(415, "the body must be application/json")
        body, most = b"", self.settings.max_body
        try:
            async with asyncio.timeout(self.settings.timeout):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise ApiError(413, f"the body has more than {most} bytes", code="body_too_large")
        except TimeoutError:
            raise ApiError(408, "the body did not come") from None
        return body

    def _check_name(self, name: str) -> None:
        if name != self.settings.name:
            message = f"the model {name[:100]!r} does not exist; this server has {self.settings.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _end(self, call: _Call) -> None:
        """Give the place of a call back, whether it was answered or not, and count its tokens."""
        self.batcher.cancel(call.job)
        usage = call.usage()
        self.metrics.tokens.labels("read").inc(usage["prompt_tokens"])
        self.metrics.tokens.labels("written").inc(usage["completion_tokens"])


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


def _too_late() -> ApiError:
    return ApiError(503, "no answer in the time that this server allows", code="timeout")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # no such path or method
        error = ApiError(error.status_code, error.detail)
    if not isinstance(error, ApiError):
        error = ApiError(500, "something went wrong inside the server")
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), error.status, headers)
