"""The application: OpenAI's endpoints over a `Batcher`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Route

from causalqwen import __version__
from causalqwen.decoding import PRESETS
from causalqwen.modeling import CausalQwenForCausalLM, NumberPrediction
from causalqwen.modeling.loading import fingerprint
from causalqwen.modeling.prediction import prediction_to_dict
from causalqwen.serving.batching import Batcher
from causalqwen.serving.calls import TaskCall, too_late, unless_left
from causalqwen.serving.journal import Journal, Metrics
from causalqwen.serving.keys import Keys
from causalqwen.serving.pages import ERRORS, add_explorer, add_openapi, body_of
from causalqwen.serving.people import IndividualsRequest, People, TaskRequest
from causalqwen.serving.questions import AnswersRequest, PopulationRequest, ask_person
from causalqwen.serving.requests import ChatRequest, CompletionRequest, NumbersRequest, parse
from causalqwen.serving.settings import ApiError, ServerSettings, individual_of, refusing
from causalqwen.serving.texts import TextService, answer_error
from causalqwen.serving.worlds import WorldsRequest

_ABOUT = (
    "OpenAI's completions and chats by a grafted model, with its numbers as distributions. The field `causal`, and what "
    "answers carry under that name, are in docs/serving.md of the package."
)


def create_app(model: CausalQwenForCausalLM, settings: ServerSettings | None = None) -> FastAPI:
    """An application that serves one model; its batcher starts and ends with it.

    Every error has OpenAI's shape. A request that cannot be served as it is gets a 4xx that says why; 429 where the queue is
    full, 503 where time ran out or the server is closing.
    """
    settings = settings or ServerSettings()
    service = _Service(model, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        await asyncio.to_thread(service.batcher.close)
        service.long_thread.shutdown(wait=False, cancel_futures=True)

    about: dict[str, Any] = {"title": "CausalQwen", "description": _ABOUT, "version": __version__}
    app = FastAPI(**about, lifespan=lifespan, openapi_url=None, responses=ERRORS)
    app.state.batcher, app.state.longest = service.batcher, settings.timeout
    for error in (ApiError, HTTPException):
        app.add_exception_handler(error, answer_error)
    app.add_api_route("/health", service.health)
    app.add_api_route("/ready", service.ready)
    guarded = APIRouter(dependencies=[Depends(service.check_key)])
    guarded.add_api_route("/metrics", service.show_metrics)
    guarded.add_api_route("/v1/models", service.models)
    guarded.add_api_route("/v1/models/{name:path}", service.model_card)
    posts: dict[str, tuple[type[BaseModel], Callable]] = {
        "completions": (CompletionRequest, service.completions),
        "chat/completions": (ChatRequest, service.chat),
        "numbers": (NumbersRequest, service.numbers),
        "answers": (AnswersRequest, service.answers),
    }
    for kind in (IndividualsRequest, WorldsRequest, PopulationRequest):
        posts[kind.path] = kind, service.working(kind)
    for path, (asked, endpoint) in posts.items():
        guarded.add_api_route(f"/v1/{path}", endpoint, methods=["POST"], openapi_extra=body_of(asked))
    app.include_router(guarded)
    add_openapi(app, [asked for asked, _ in posts.values()])
    if settings.page:
        add_explorer(app)
    routes = [*app.routes, *guarded.routes]
    service.metrics.paths = frozenset(route.path for route in routes if isinstance(route, Route))
    app.add_middleware(Journal, metrics=service.metrics, local=settings.local or settings.page)
    return app


class _Service(TextService):
    """The endpoints of a model in this process."""

    def __init__(self, model: CausalQwenForCausalLM, settings: ServerSettings) -> None:
        _ = model.value_law  # a model whose numbers need a class is refused before anything is served
        self.model, self.batcher = model, Batcher(model, settings)
        super().__init__(settings, model.processor, model.config, self.batcher)
        self.people, self.fingerprint = People(model, settings), fingerprint(model)
        self.metrics = Metrics(self.batcher)
        self.keys = Keys(settings.api_keys) if settings.api_keys else None

    def count(self, usage: dict[str, int]) -> None:
        self.metrics.tokens.labels("read").inc(usage["prompt_tokens"])
        self.metrics.tokens.labels("written").inc(usage["completion_tokens"])

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
        self.check_name(name)
        settings = self.settings
        limits = ("max_rows", "max_waiting", "max_tokens", "max_body", "max_prompts", "max_heard", "timeout")
        causal = {
            "presets": list(PRESETS),
            "individuals": list(settings.individuals),
            "chat": self.processor.chat_template is not None,
            "numbers": self.model.reads_numbers,
            "context": self.model.config.context_length,
            "fingerprint": self.fingerprint,
            "keeps": settings.keep is not None,
            "limits": {limit: getattr(settings, limit) for limit in limits},
        }
        return {"id": name, "object": "model", "created": 0, "owned_by": "causalqwen", "causal": causal}

    async def numbers(self, request: Request) -> Response:
        """The distributions of the numbers after prompts."""
        asked = parse(NumbersRequest, await self.body(request))
        self.check_name(asked.model)
        predictions = await self._aside(request, lambda: self._predict(asked))
        data = await self.beside(asked.points is not None, _numbers, asked, predictions)
        return JSONResponse({"object": "list", "model": asked.model, "data": data})

    def _predict(self, asked: NumbersRequest) -> list[NumberPrediction]:
        """`predict_number` of each prompt, in their order. ApiError 400 for what cannot be predicted."""
        texts = asked.texts(self.processor, self.settings.max_prompts)
        who = individual_of(asked.individual, self.settings, "individual")
        with refusing("prompts"):
            return self.model.predict_number(texts, batch_size=8, individual=who, classes=asked.classes)

    async def answers(self, request: Request) -> Response:
        """What one person answers to questions."""
        asked = parse(AnswersRequest, await self.body(request))
        self.check_name(asked.model)
        data = await self._aside(request, lambda: ask_person(asked, self.settings, self.model))
        return JSONResponse({"object": "list", "model": asked.model, "individual": asked.individual, "data": data})

    async def _aside(self, request: Request, work: Callable[[], Any]) -> Any:
        """Short work of the thread that owns the model; ApiError 503 where time runs out. A client that leaves calls it off."""
        try:
            async with asyncio.timeout(self.settings.timeout):
                return await unless_left(request, asyncio.wrap_future(self.batcher.run(work)))
        except TimeoutError:
            raise too_late() from None

    def working(self, kind: type[TaskRequest]) -> Callable:
        """The endpoint of a kind of task."""

        async def work(request: Request) -> Response:
            asked = parse(kind, await self.body(request))
            self.check_name(asked.model)
            frame = {"object": kind.made, "model": asked.model}
            call = TaskCall(partial(asked.work, self.people), frame, self.settings.timeout)
            self.batcher.submit(call.job)
            return await call.answer(request, asked.stream, lambda: self.batcher.cancel(call.job))

        work.__name__, work.__doc__ = kind.path, kind.__doc__
        return work


def _numbers(asked: NumbersRequest, predictions: Sequence[NumberPrediction]) -> list[dict[str, Any]]:
    """One entry per prompt, in their order."""
    values = asked.values or [None] * len(predictions)
    return [
        {"index": index, "value": value} | prediction_to_dict(prediction, value, asked.levels, asked.points)
        for index, (prediction, value) in enumerate(zip(predictions, values, strict=True))
    ]
