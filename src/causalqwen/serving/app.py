"""The application: OpenAI's endpoints over a `Batcher`."""

import asyncio
import hmac
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from causalqwen.decoding import PRESETS
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.serving.batching import Batcher, Job, Piece, Row
from causalqwen.serving.metrics import CountRequests, Metrics
from causalqwen.serving.requests import ChatRequest, CompletionRequest, TextRequest, one_of, parse, plan_of
from causalqwen.serving.settings import ApiError, ServerSettings
from causalqwen.serving.text import GrowingText

_COMPLETION_TOKENS = 16  # OpenAI's default


def create_app(model: CausalQwenForCausalLM, settings: ServerSettings | None = None) -> FastAPI:
    """An application that serves one model; its batcher starts and ends with it.

    Every error has OpenAI's shape. A request that cannot be served as it is gets a 4xx that says why; 429 where the queue is
    full, 503 where time ran out or the server is closing.
    """
    service = _Service(model, settings or ServerSettings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        await asyncio.to_thread(service.batcher.close)

    app = FastAPI(title="CausalQwen", lifespan=lifespan, openapi_url=None)
    app.state.batcher = service.batcher
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    app.add_middleware(CountRequests, metrics=service.metrics)
    app.add_api_route("/health", service.health)
    guarded = APIRouter(dependencies=[Depends(service.check_key)])
    guarded.add_api_route("/metrics", service.show_metrics)
    guarded.add_api_route("/v1/models", service.models)
    guarded.add_api_route("/v1/models/{name:path}", service.model_card)
    guarded.add_api_route("/v1/completions", service.completions, methods=["POST"])
    guarded.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    app.include_router(guarded)
    return app


class _Call:
    """A request on its way: its job, the pieces that come back, and the frame that its answers share."""

    def __init__(self, request: TextRequest, timeout: float, chat: bool) -> None:
        self.request, self.chat = request, chat
        self.loop = asyncio.get_running_loop()
        self.deadline = self.loop.time() + timeout
        self.pieces: asyncio.Queue[Piece | ApiError] = asyncio.Queue()
        self.job: Job
        self.frame = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}
        self.frame["model"] = request.model
        kind = "chat.completion" if chat else "text_completion"
        self.frame["object"] = kind + ".chunk" * (chat and bool(request.stream))

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
                raise ApiError(503, "no answer in the time that this server allows", code="timeout") from None
            if isinstance(piece, ApiError):
                raise piece
            left -= piece.finish is not None
            yield piece

    def usage(self) -> dict[str, int]:
        read, written = (
            sum(len(row.ids) for row in self.job.rows[:: self.request.n]),
            sum(r.written for r in self.job.rows),
        )
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of the answer, or of one event of it."""
        causal: dict[str, Any] = {"numbers": piece.numbers}
        if piece.finish is not None:
            causal["seed"] = self.job.rows[piece.row].seed
        body: dict[str, Any] = {"text": piece.text}
        if self.chat and self.request.stream:
            body = {"delta": {"content": piece.text}}
        elif self.chat:
            body = {"message": {"role": "assistant", "content": piece.text}}
        return {"index": piece.row, **body, "finish_reason": piece.finish, "logprobs": None, "causal": causal}


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
        self.model, self.settings = model, settings
        self.processor = model.processor
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
        return {"object": "list", "data": [self._card()]}

    async def model_card(self, name: str) -> dict[str, Any]:
        self._check_name(name)
        return self._card()

    def _card(self) -> dict[str, Any]:
        causal = {"presets": list(PRESETS), "individuals": list(self.settings.individuals)}
        return {"id": self.settings.name, "object": "model", "created": 0, "owned_by": "causalqwen", "causal": causal}

    def _check_name(self, name: str) -> None:
        if name != self.settings.name:
            message = f"the model {name[:100]!r} does not exist; this server has {self.settings.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def completions(self, request: Request) -> Response:
        asked = parse(CompletionRequest, await self._body(request))
        return await self._answer(request, asked, lambda: asked.prompts, asked.max_tokens or _COMPLETION_TOKENS)

    async def chat(self, request: Request) -> Response:
        asked = parse(ChatRequest, await self._body(request))
        most = one_of("max_completion_tokens", asked.max_completion_tokens, asked.max_tokens)
        return await self._answer(request, asked, lambda: [self._render(asked)], most, chat=True)

    def _render(self, asked: ChatRequest) -> str:
        if self.processor.chat_template is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions")
        messages = [message.plain for message in asked.messages]
        try:
            return self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from None

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

    async def _answer(
        self,
        request: Request,
        asked: TextRequest,
        prompts: Callable[[], list[str]],
        max_tokens: int | None,
        chat: bool = False,
    ) -> Response:
        self._check_name(asked.model)
        call = _Call(asked, self.settings.timeout, chat)
        call.job = await asyncio.to_thread(self._job, asked, prompts, max_tokens, chat, call.deliver)
        self.batcher.submit(call.job)
        self.metrics.tokens.labels("read").inc(call.usage()["prompt_tokens"])
        if asked.stream:
            return _EventStream(self._events(call), lambda: self._end(call))
        whole = asyncio.ensure_future(self._whole(call))
        left = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((whole, left), return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(whole.result()) if whole.done() else Response(status_code=499)
        finally:
            whole.cancel()
            left.cancel()
            self._end(call)

    def _end(self, call: _Call) -> None:
        self.batcher.cancel(call.job)
        self.metrics.tokens.labels("written").inc(call.usage()["completion_tokens"])

    def _job(
        self,
        asked: TextRequest,
        prompts: Callable[[], list[str]],
        max_tokens: int | None,
        chat: bool,
        deliver: Callable[[Piece | ApiError], None],
    ) -> Job:
        """Everything that can be wrong with a request is found here, before it waits."""
        settings = self.settings
        plan, individual, temperature = plan_of(asked, settings.preset, settings.individuals)
        seed = one_of("seed", asked.seed, asked.causal.seed)
        seed = secrets.randbits(31) if seed is None else seed
        if (max_tokens or 0) > settings.max_tokens:
            raise ApiError(
                400, f"max_tokens is {max_tokens}, this server writes {settings.max_tokens}", param="max_tokens"
            )
        texts = prompts()
        if len(texts) * asked.n > settings.max_rows:
            message = (
                f"{len(texts)} prompts times n={asked.n} are more than the {settings.max_rows} texts of one request"
            )
            raise ApiError(400, message, param="n")
        try:
            encoded = self.processor(texts, prompt=not chat)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages" if chat else "prompt") from None
        width, context = max(len(ids) for ids in encoded["input_ids"]), self.batcher.context
        if not all(encoded["input_ids"]):
            raise ApiError(400, "the prompt is empty", param="prompt")
        if width + (max_tokens or 1) > context:
            message = f"{width} tokens of prompt and {max_tokens or 1} of text are more than the context of {context}"
            raise ApiError(400, message, param="messages" if chat else "prompt", code="context_length_exceeded")
        rows = [
            Row(ids, list(values), seed + copy, GrowingText(self.processor, ids, values, asked.stops))
            for ids, values in zip(encoded["input_ids"], encoded["numeric_values"], strict=True)
            for copy in range(asked.n)
        ]
        top_p = 1.0 if asked.top_p is None else asked.top_p
        most = max_tokens or int(min(settings.max_tokens, context - width))
        return Job(rows, plan, most, deliver, individual, temperature, top_p)

    async def _whole(self, call: _Call) -> dict[str, Any]:
        rows = [Piece(row, "", [], None) for row in range(len(call.job.rows))]
        async for piece in call.read():
            before = rows[piece.row]
            rows[piece.row] = Piece(piece.row, before.text + piece.text, before.numbers + piece.numbers, piece.finish)
        return call.frame | {"choices": [call.choice(row) for row in rows], "usage": call.usage()}

    async def _events(self, call: _Call) -> AsyncIterator[str]:
        if call.chat:  # who speaks is said once
            opening = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for row in range(call.request.n):
                yield _event(call.frame | {"choices": [{"index": row} | opening]})
        try:
            async for piece in call.read():
                if piece.text or piece.finish is not None:
                    yield _event(call.frame | {"choices": [call.choice(piece)]})
            if call.request.wants_usage:
                yield _event(call.frame | {"choices": [], "usage": call.usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body())


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


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
