"""The application: OpenAI's endpoints over a `Batcher`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from causalqwen import __version__
from causalqwen.decoding import PRESETS
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.loading import fingerprint
from causalqwen.serving.answers import EventStream, Inbox, disconnected, event, too_late
from causalqwen.serving.asking import AnswersRequest, ask_person
from causalqwen.serving.batching import Batcher, Job, Piece
from causalqwen.serving.hosts import OnlyLoopback
from causalqwen.serving.jobs import job_of
from causalqwen.serving.journal import Journal
from causalqwen.serving.keys import Keys
from causalqwen.serving.logprobs import chat_logprobs, completion_logprobs, ovr_logprobs
from causalqwen.serving.metrics import Metrics
from causalqwen.serving.numbers import predict_numbers, tell_numbers
from causalqwen.serving.openapi import add_openapi, asks
from causalqwen.serving.page import page
from causalqwen.serving.people import IndividualsRequest, People, TaskRequest
from causalqwen.serving.population import PopulationRequest
from causalqwen.serving.requests import ChatRequest, CompletionRequest, NumbersRequest, TextRequest, parse
from causalqwen.serving.settings import PATIENCE, ApiError, ServerSettings
from causalqwen.serving.tasks import TaskCall
from causalqwen.serving.worlds import WorldsRequest

_ABOUT = (
    "OpenAI's completions and chats by a grafted model, with its numbers as laws. The field `causal`, and what answers carry "
    "under that name, are in docs/serving.md of the package."
)

_LONG_BODY = 1 << 16  # bytes of a request that take Python a while to read
_LONG_HELD = 4


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
        service.long_thread.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="CausalQwen", description=_ABOUT, version=__version__, lifespan=lifespan, openapi_url=None)
    app.state.batcher, app.state.longest = service.batcher, settings.timeout
    for kind in (ApiError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_api_route("/health", service.health)
    app.add_api_route("/ready", service.ready)
    guarded = APIRouter(dependencies=[Depends(service.check_key)])
    guarded.add_api_route("/metrics", service.show_metrics)
    guarded.add_api_route("/v1/models", service.models)
    guarded.add_api_route("/v1/models/{name:path}", service.model_card)
    guarded.add_api_route("/v1/completions", service.completions, methods=["POST"])
    guarded.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    guarded.add_api_route("/v1/numbers", service.numbers, methods=["POST"])
    guarded.add_api_route("/v1/answers", service.answers, methods=["POST"])
    guarded.add_api_route("/v1/individuals", service.individuals, methods=["POST"])
    guarded.add_api_route("/v1/worlds", service.worlds, methods=["POST"])
    guarded.add_api_route("/v1/population", service.population, methods=["POST"])
    app.include_router(guarded)
    add_openapi(app, guarded.routes)
    if settings.page:
        app.include_router(page())
    service.metrics.paths = frozenset(
        route.path for route in (*app.routes, *guarded.routes) if isinstance(route, APIRoute)
    )
    if settings.local or settings.page:
        app.add_middleware(OnlyLoopback)
    app.add_middleware(Journal, metrics=service.metrics)
    return app


class _Call(Inbox):
    """A request on its way: its job, the pieces that come back, and the frame that its answers share."""

    job: Job

    def __init__(self, asked: TextRequest, timeout: float, journal: dict[str, Any]) -> None:
        super().__init__(timeout)
        self.asked, self.journal = asked, journal
        name, prefix = ("chat.completion", "chatcmpl") if asked.is_chat else ("text_completion", "cmpl")
        self.frame = {
            "id": f"{prefix}-{journal['request_id']}",
            "object": name + ".chunk" * bool(asked.is_chat and asked.stream),
            "created": int(time.time()),
            "model": asked.model,
        }

    async def read(self) -> AsyncIterator[Piece]:
        """Pieces until every row has ended; ApiError where the job fails or time runs out."""
        left = len(self.job.rows)
        while left:
            piece = await self.next()
            left -= piece.finish is not None
            yield piece

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        rows = [Piece(row, "", [], None) for row in range(len(self.job.rows))]
        async for piece in self.read():
            before = rows[piece.row]
            joined = (
                getattr(before, name) + getattr(piece, name) for name in ("text", "numbers", "tokens", "logprobs")
            )
            text, numbers, tokens, likely = joined
            rows[piece.row] = Piece(piece.row, text, numbers, piece.finish, tokens, likely)
        return self.frame | {"choices": [self.choice(row) for row in rows], "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        frame = self.frame | ({"usage": None} if self.asked.wants_usage else {})
        if self.asked.is_chat:  # who speaks is said once
            opening = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for row in range(self.asked.n):
                yield event(frame | {"choices": [{"index": row} | opening]})
        try:
            async for piece in self.read():
                if piece.text or piece.tokens or piece.logprobs or piece.finish is not None:
                    yield event(frame | {"choices": [self.choice(piece)]})
        except ApiError as error:
            yield event(error.body())
            return
        if self.asked.wants_usage:
            yield event(self.frame | {"choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of the answer, or of one event of it."""
        row = self.job.rows[piece.row]
        causal: dict[str, Any] = {"numbers": _behind(row.prompt.echo, piece.numbers)}
        if self.job.alternatives is not None:
            causal["tokens"] = _behind(row.prompt.echo, piece.tokens)
        if piece.finish is not None:
            causal["seed"] = row.seed
        logprobs = None
        if self.job.logprobs is not None:
            processor = row.text.processor
            logprobs = (chat_logprobs if self.asked.is_chat else completion_logprobs)(piece.logprobs, processor)
            causal["ovr"] = ovr_logprobs(piece.logprobs, processor)
        body: dict[str, Any] = {"text": piece.text}
        if self.asked.is_chat:
            said = {"content": piece.text}
            body = {"delta": said} if self.asked.stream else {"message": {"role": "assistant"} | said}
        return {"index": piece.row, **body, "finish_reason": piece.finish, "logprobs": logprobs, "causal": causal}

    def usage(self) -> dict[str, int]:
        read = sum(len(row.prompt.ids) for row in self.job.rows[:: self.asked.n])
        written = sum(row.written for row in self.job.rows)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class _Service:
    """The endpoints."""

    def __init__(self, model: CausalQwenForCausalLM, settings: ServerSettings) -> None:
        model.config.require("the server")
        _ = model.value_law  # a model whose numbers need a class is told so before anything is served
        self.model, self.processor, self.settings = model, model.processor, settings
        self.processor("made ready before there are threads")
        self.people, self.fingerprint = People(model, settings), fingerprint(model)
        limits = {name: getattr(settings, name) for name in ("max_rows", "window", "max_waiting")}
        self.batcher = Batcher(model, **limits)
        self.metrics = Metrics(self.batcher)
        self.long_thread, self._long_held = ThreadPoolExecutor(1), 0
        self.keys = Keys(settings.api_keys) if settings.api_keys else None

    async def check_key(self, request: Request) -> None:
        if self.keys is not None:
            request.state.journal["key"] = self.keys.admit(request.headers.get("authorization", ""))

    async def health(self) -> dict[str, str]:
        """Whether the server is up; asks for no key."""
        return {"status": "ok"}

    async def ready(self) -> dict[str, str]:
        """Whether a request would be taken now: 503 where the queue is full or the server is ending. Asks for no key."""
        if not self.batcher.ready:
            raise ApiError(503, "the queue is full, or the server is ending", code="not_ready")
        return {"status": "ready"}

    async def show_metrics(self) -> Response:
        """Counters, for Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> dict[str, Any]:
        """The model, as a list of one."""
        return {"object": "list", "data": [await self.model_card(self.settings.name)]}

    async def model_card(self, name: str) -> dict[str, Any]:
        """The model: its presets, the individuals who can be named, what it can do and its limits."""
        self._check_name(name)
        settings, limits = (
            self.settings,
            ("max_rows", "max_waiting", "max_tokens", "max_body", "max_prompts", "max_heard", "timeout"),
        )
        causal = {
            "presets": list(PRESETS),
            "individuals": list(settings.individuals),
            "temperature": settings.temperature,
            "chat": self.processor.chat_template is not None,
            "numbers": self.model.reads_numbers,
            "context": self.model.config.context_length,
            "fingerprint": self.fingerprint,
            "keeps": settings.keep is not None,
            "limits": {limit: getattr(settings, limit) for limit in limits},
        }
        return {"id": name, "object": "model", "created": 0, "owned_by": "causalqwen", "causal": causal}

    @asks(CompletionRequest)
    async def completions(self, request: Request) -> Response:
        """Texts that go on from prompts, whole or streamed."""
        return await self._answer(request, CompletionRequest)

    @asks(ChatRequest)
    async def chat(self, request: Request) -> Response:
        """An assistant's answer by the backbone's template, whole or streamed."""
        return await self._answer(request, ChatRequest)

    @asks(NumbersRequest)
    async def numbers(self, request: Request) -> Response:
        """The laws of the numbers behind prompts."""
        asked = parse(NumbersRequest, await self._body(request))
        self._check_name(asked.model)
        predictions = await self._aside(request, lambda: predict_numbers(asked, self.settings, self.model))
        data = await self._beside(asked.points is not None, tell_numbers, asked, predictions)
        return JSONResponse({"object": "list", "model": asked.model, "data": data})

    @asks(IndividualsRequest)
    async def individuals(self, request: Request) -> Response:
        """Individuals: drawn, inferred, mixed, saved."""
        return await self._work(request, IndividualsRequest)

    @asks(WorldsRequest)
    async def worlds(self, request: Request) -> Response:
        """What would have been said: worlds of a text."""
        return await self._work(request, WorldsRequest)

    @asks(PopulationRequest)
    async def population(self, request: Request) -> Response:
        """What a population answers."""
        return await self._work(request, PopulationRequest)

    @asks(AnswersRequest)
    async def answers(self, request: Request) -> Response:
        """What one person answers to questions."""
        asked = parse(AnswersRequest, await self._body(request))
        self._check_name(asked.model)
        data = await self._aside(request, lambda: ask_person(asked, self.settings, self.model))
        return JSONResponse({"object": "list", "model": asked.model, "individual": asked.individual, "data": data})

    async def _aside(self, request: Request, work: Callable[[], Any]) -> Any:
        """Short work of the thread that owns the model; ApiError 503 where time runs out. A client that leaves calls it off."""
        future = asyncio.wrap_future(self.batcher.run(work))
        left = asyncio.ensure_future(disconnected(request))
        try:
            async with asyncio.timeout(self.settings.timeout):
                await asyncio.wait((future, left), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise too_late() from None
        finally:
            left.cancel()
            future.cancel()
        if not future.done() or future.cancelled():
            raise HTTPException(499, "the client left")
        return future.result()

    async def _answer(self, request: Request, kind: type[TextRequest]) -> Response:
        settings = self.settings
        body = await self._body(request)
        asked = parse(kind, body)
        self._check_name(asked.model)
        call = _Call(asked, settings.timeout, request.state.journal)
        context = self.batcher.context
        config = self.model.config
        needed = asked, settings, self.processor, config, context, call.deliver
        call.job = await self._beside(len(body) > _LONG_BODY, job_of, *needed)
        self.batcher.submit(call.job)
        return await self._deliver(request, call, bool(asked.stream), lambda: self._end(call))

    async def _deliver(
        self, request: Request, call: _Call | TaskCall, stream: bool, ended: Callable[[], None]
    ) -> Response:
        """What comes of a call, as events or in one; whatever ends it runs `ended`."""
        if stream:
            return EventStream(call.events(), ended)
        whole, left = asyncio.ensure_future(call.whole()), asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait((whole, left), return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(whole.result()) if whole.done() else Response(status_code=499)
        finally:
            whole.cancel()
            left.cancel()
            ended()

    async def _work(self, request: Request, kind: type[TaskRequest]) -> Response:
        """A task's answer."""
        asked = parse(kind, await self._body(request))
        self._check_name(asked.model)
        call = TaskCall(asked.work(self.people), {"object": kind.made, "model": asked.model}, self.settings.timeout)
        self.batcher.submit(call.job)
        return await self._deliver(request, call, asked.stream, lambda: self.batcher.cancel(call.job))

    async def _beside(self, is_long: bool, work: Callable[..., Any], *of: Any) -> Any:
        """Work of Python's in another thread than the loop's and the model's; long work in one, one piece after the other,
        since the model's gets the less of the processor the more there is. ApiError 429 where too much of it waits."""
        if not is_long:
            return await asyncio.to_thread(work, *of)
        if self._long_held >= _LONG_HELD:
            raise ApiError(429, f"{_LONG_HELD} requests as long as this one wait already", code="rate_limit_exceeded")
        self._long_held += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.long_thread, work, *of)
        finally:
            self._long_held -= 1

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A page in a browser may send other types to this machine without being asked whether it may.
            raise ApiError(415, "the body must be application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "the body must be plain: no Content-Encoding")
        body, most = b"", self.settings.max_body
        try:
            async with asyncio.timeout(min(self.settings.timeout, PATIENCE)):
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
        call.journal |= usage
        self.metrics.tokens.labels("read").inc(usage["prompt_tokens"])
        self.metrics.tokens.labels("written").inc(usage["completion_tokens"])


def _behind(echo: str, places: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Places of a text, as places of a choice that begins with its prompt."""
    return [place | {"span": [len(echo) + at for at in place["span"]]} for place in places] if echo else places


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # no such path or method
        error = ApiError(error.status_code, error.detail)
    assert isinstance(error, ApiError)
    headers = {"Retry-After": str(error.retry_after)} if error.status in (429, 503) else None
    return JSONResponse(error.body(), error.status, headers)
