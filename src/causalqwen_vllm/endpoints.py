"""vLLM's own OpenAI server for a grafted model: its endpoints of texts answer as `causalqwen serve` does, numbers and all.

vLLM loads `Endpoints` where the variable VLLM_PLUGINS names it; `python -m causalqwen_vllm MODEL` starts a server with it.
"""

import asyncio
import contextlib
import logging
import os
import uuid
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from causalqwen.decoding import Individual
from causalqwen.modeling import CausalQwenConfig, CausalQwenProcessor
from causalqwen.modeling.alternatives import Likelihood
from causalqwen.modeling.prediction import check_speaker
from causalqwen.parts.value_axes import ValueAxes
from causalqwen.serving.batching import Beside, Job, Piece, Prompt, Row
from causalqwen.serving.logprobs import PlacedToken
from causalqwen.serving.requests import NumbersRequest, parse
from causalqwen.serving.settings import ApiError, ServerSettings, individual_of, load_individuals
from causalqwen.serving.texts import TextService, answer_error
from causalqwen_vllm.client import of_tokens, processor_of, written
from causalqwen_vllm.request_options import KEY, ONE_ENGINE

INDIVIDUALS = "CAUSALQWEN_INDIVIDUALS"
"""The variable that names the folder of individuals who can be asked for by name."""
_NUMERIC = frozenset("0123456789+-.e")
_REFUSED = (
    "/v1/responses", "/v1/messages", "/v1/chat/completions/", "/v1/completions/", "/tokenize", "/detokenize",
    "/invocations", "/generative_scoring", "/inference/v1/generate", "/cohere", "/v1/systemone", "/v1/audio",
)  # fmt: skip


class Endpoints:
    """vLLM's `EndpointPlugin`: `/v1/completions` and `/v1/chat/completions` in place of vLLM's own, and `/v1/numbers`. vLLM's
    other endpoints of texts, which know no numbers, are refused."""

    name = "causalqwen"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Called before the engine is known: the routes find their service when they are asked."""

        def answering(name: str) -> Callable:
            async def answer(request: Request) -> Response:
                return await getattr(_service_of(request), name)(request)

            return answer

        async def refused(request: Request) -> Response:
            instead = "use /v1/completions or /v1/chat/completions"
            raise ApiError(404, f"{request.url.path} is not served for a grafted model: {instead}", code="not_found")

        router = APIRouter()
        for route in app.routes:
            if isinstance(route, APIRoute) and route.path.startswith(_REFUSED):
                router.add_api_route(route.path, refused, methods=sorted(route.methods))
        for path, name in {"completions": "completions", "chat/completions": "chat", "numbers": "numbers"}.items():
            router.add_api_route(f"/v1/{path}", answering(name), methods=["POST"])
        app.include_router(router)
        app.add_exception_handler(ApiError, answer_error)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """ValueError for individuals that cannot be read, or a model that a server cannot serve."""
        state.causalqwen = None if engine_client is None else _Service(engine_client, args)


def _service_of(request: Request) -> "_Service":
    service = request.app.state.causalqwen
    if service is None:
        raise ApiError(503, "this server has no engine", code="not_ready")
    request.state.journal = {"request_id": request.headers.get("x-request-id", uuid.uuid4().hex)}
    return service


class _Service(TextService):
    """The endpoints over vLLM's engine."""

    def __init__(self, engine: Any, args: Namespace) -> None:
        model = engine.vllm_config.model_config
        config, folder = model.hf_config, os.environ.get(INDIVIDUALS)
        if not isinstance(config, CausalQwenConfig):
            raise ValueError(f"{model.model} is not grafted: leave {Endpoints.name} out of VLLM_PLUGINS")
        if engine.vllm_config.parallel_config.data_parallel_size > 1:  # an engine of several knows nothing of that
            raise ValueError(f"a grafted model cannot be served this way: {ONE_ENGINE}")
        axes = ValueAxes(config)
        axes.law()  # a model whose numbers need a class is refused before anything is served
        individuals = load_individuals(folder, config.causal_size) if folder else {}
        settings = ServerSettings(
            name=(args.served_model_name or [args.model])[0],
            individuals=individuals,
            max_tokens=model.max_model_len,
            max_rows=engine.vllm_config.scheduler_config.max_num_seqs,
        )
        processor = processor_of(model.model, config.context)
        files = {name: str((Path(folder or "") / f"{name}.safetensors").resolve()) for name in individuals}
        self.engine = EngineWriter(engine, processor, axes, {id(individuals[name]): files[name] for name in files})
        super().__init__(settings, processor, config, self.engine)

    async def numbers(self, request: Request) -> Response:
        """The distributions of the numbers after prompts."""
        asked = parse(NumbersRequest, await self.body(request))
        self.check_name(asked.model)
        texts = asked.texts(self.processor, self.settings.max_prompts)
        individual = individual_of(asked.individual, self.settings, "individual")
        values = asked.values or [None] * len(texts)
        laws = await self.engine.laws(texts, individual, values, asked)
        data = [{"index": index, "value": values[index]} | law for index, law in enumerate(laws)]
        return JSONResponse({"object": "list", "model": asked.model, "data": data})


class EngineWriter:
    """vLLM's engine as what writes jobs: each row is a request of its own, and comes back piece by piece.

    axes: on which values lie. files: of each individual who can be named, by identity: the workers read them there.
    """

    def __init__(self, engine: Any, processor: CausalQwenProcessor, axes: Any, files: dict[int, str]) -> None:
        self._engine, self._processor, self._axes, self._files = engine, processor, axes, files
        self.context = engine.vllm_config.model_config.max_model_len
        self._running: dict[Job, list[asyncio.Task]] = {}
        self._asked: list[tuple[str, tuple, asyncio.Future]] = []
        self._asking: asyncio.Task | None = None
        tokens = range(len(processor.tokenizer))
        words = processor.tokenizer.batch_decode([[token] for token in tokens])
        self._may_begin = frozenset(token for token in tokens if set(words[token].strip()) <= _NUMERIC)

    def _named(self, individual: Individual | None) -> dict[str, Any]:
        """What options say of somebody who was asked for by name."""
        return {} if individual is None else {"individual": self._files[id(individual)]}

    def submit(self, job: Job) -> None:
        """Have vLLM write the rows."""
        prompts = dict.fromkeys(row.prompt for row in job.rows)
        likely = {prompt: asyncio.create_task(self._likelihoods(prompt, job.logprobs or 0)) for prompt in prompts}
        writing = [asyncio.create_task(self._write(job, row, likely[row.prompt])) for row in job.rows]
        self._running[job] = [*writing, *likely.values()]

    def cancel(self, job: Job) -> None:
        job.cancelled = True
        for task in self._running.pop(job, ()):
            task.cancel()

    async def _write(self, job: Job, row: Row, scored: asyncio.Task[list[PlacedToken]]) -> None:
        try:
            likely = await scored
            row.finish = None if job.max_tokens else "length"
            if row.prompt.echo or row.finish:
                job.deliver(Piece(row.place, row.prompt.echo, [], row.finish, logprobs=likely))
            if row.finish is None:
                async with contextlib.aclosing(self._pieces(job, row)) as pieces:
                    async for piece in pieces:
                        job.deliver(piece)
        except Exception as error:
            logging.getLogger(__name__).exception("a request failed")
            job.deliver(error if isinstance(error, ApiError) else ApiError(500, "the engine failed on this request"))

    async def _likelihoods(self, prompt: Prompt, count: int) -> list[PlacedToken]:
        """The tokens of a prompt with their likelihoods, where those are asked for. All but the last are read."""
        if prompt.starts is None:
            return []
        key, number = uuid.uuid4().hex, self._processor.num_token_id
        seen, found = [token for token in prompt.ids if token != number], []
        if len(seen) > 1:
            options = {"preset": "standard", "key": key, "kept_from": 1}
            whole = {"skip_reading_prefix_cache": True}
            asked = of_tokens(self._processor, seen[:-1], [0.0] * (len(seen) - 1), options, 1, whole)
            try:
                await self._read(*asked, key)
                found = await self._ask("see_likelihoods", key, 1, seen[1:], count)
            finally:
                self._aside("forget_numbers", [key])
        likely = [tuple(Likelihood(*word) for word in row) for row in found]
        return list(zip(seen, prompt.starts, [None, *likely], strict=True))

    async def _beside(self, job: Job, row: Row, key: str, place: int, token: int) -> Beside:
        """What was asked about a token that stands at a place."""
        could_be = likely = None
        if job.logprobs is not None:
            (found,) = await self._ask("see_likelihoods", key, place, [token], job.logprobs)
            likely = tuple(Likelihood(*word) for word in found)
        if job.alternatives is not None and not row.text.in_digits:
            could_be = await self._ask("see_alternatives", key, place, token, row.text.tail, job.alternatives)
        return Beside(could_be, likely)

    async def _read(self, tokens: Any, params: Any, key: str) -> None:
        async for _ in self._engine.generate(tokens, params, key):
            pass

    async def _pieces(self, job: Job, row: Row) -> Any:
        """The pieces of one row, until it ends."""
        from vllm.sampling_params import RequestOutputKind

        plan, key, num = job.plan, uuid.uuid4().hex, self._processor.num_token_id
        if plan.decision == "softmax":
            options: dict[str, Any] = {"preset": "softmax", "top_p": job.top_p}
        else:
            modes = {"individual_mode": plan.individual_mode, "noise_mode": plan.noise, "own_mode": plan.own}
            options = modes | {"top_p": plan.top_p}
        options |= self._named(job.individual) | {"seed": row.seed, "key": key, "temperature": plan.temperature}
        prompt, delta = row.prompt, {"output_kind": RequestOutputKind.DELTA}
        tokens, params = of_tokens(self._processor, prompt.ids, prompt.values, options, job.max_tokens, delta)
        at = len(tokens["prompt_token_ids"])
        if job.logprobs is not None or job.alternatives is not None:
            params.extra_args[KEY] |= {"kept_from": at, "laws": job.alternatives is not None}
        try:
            async with contextlib.aclosing(self._engine.generate(tokens, params, key)) as outputs:
                async for output in outputs:
                    (done,) = output.outputs
                    if done.finish_reason not in (None, "stop", "length"):
                        raise ApiError(503, f"vLLM ended this request: {done.finish_reason}")
                    hides, made = self._processor.context.hides, done.token_ids
                    may_be = any(token in self._may_begin if hides else token == num for token in made)
                    numbers = await self._ask("see_numbers", key, at, job.points) if may_be else {}
                    steps = list(written(self._processor, made, at, numbers))
                    for left, (place, token, law) in zip(reversed(range(len(steps))), steps, strict=True):
                        ends = None if left else done.finish_reason
                        is_last = ends == "length" or row.written + 1 == job.max_tokens  # vLLM counts no hidden `<NUM>`
                        beside = await self._beside(job, row, key, place, token)
                        number = law or {"value": 0.0}
                        yield row.step(token, number["value"], partial(dict, number), ends == "stop", is_last, beside)
                        if row.finish is not None:
                            return
                    at += len(made)
        finally:
            self._aside("forget_numbers", [key])

    def _aside(self, method: str, *args: Any) -> None:
        """Ask the workers for something that nothing waits for."""
        task = asyncio.ensure_future(self._engine.collective_rpc(method, args=args))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _ask(self, method: str, *question: Any) -> Any:
        """Ask the workers. What rows ask for at once is asked in one."""
        future = asyncio.get_running_loop().create_future()
        self._asked.append((method, question, future))
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        return await future

    async def _ask_all(self) -> None:
        while self._asked:
            asked, self._asked = self._asked, []
            for method in dict.fromkeys(method for method, _, _ in asked):
                await self._ask_of(method, [question[1:] for question in asked if question[0] == method])

    async def _ask_of(self, method: str, asked: list[tuple[tuple, asyncio.Future]]) -> None:
        """All in one; where that fails, each alone."""
        try:
            answers = await self._engine.collective_rpc(method, args=([question for question, _ in asked],))
            for (_, future), answer in zip(asked, answers[-1], strict=True):  # the last rank decides
                if not future.done():
                    future.set_result(answer)
        except Exception as error:
            left = [(question, future) for question, future in asked if not future.done()]
            if len(asked) == 1 and left:
                left[0][1].set_exception(error)
                return
            for alone in left:
                await self._ask_of(method, [alone])

    async def laws(
        self, texts: list[str], individual: Individual | None, values: list[float | None], asked: NumbersRequest
    ) -> list[dict[str, Any]]:
        """The distribution of the number after each text. ApiError 400 for one that cannot be predicted."""
        encoded = self._processor(texts, prompt=True)
        keys = [uuid.uuid4().hex for _ in texts]
        classes = asked.classes if isinstance(asked.classes, list) else [asked.classes] * len(texts)
        options = {"preset": "persona" if individual else "standard", "laws": True} | self._named(individual)
        try:
            check_speaker(self._engine.vllm_config.model_config.hf_config, individual)
            for name in set(classes):
                self._axes.law(name)
            requests = [
                of_tokens(self._processor, ids, of_ids, options | {"key": key, "number_class": name}, 1)
                for ids, of_ids, key, name in zip(
                    encoded["input_ids"], encoded["numeric_values"], keys, classes, strict=True
                )
            ]
            for place, (tokens, _) in enumerate(requests):
                count = len(tokens["prompt_token_ids"])
                if not count:
                    raise ValueError(f"prompt {place} is empty: there is nothing to predict from")
                if count >= self.context:
                    message = f"prompt {place} has {count} tokens, the context is {self.context} with its number"
                    raise ApiError(400, message, param="prompts", code="context_length_exceeded")

            await asyncio.gather(*(self._read(*request, key) for request, key in zip(requests, keys, strict=True)))
            answers = await self._engine.collective_rpc(
                "tell_laws", args=(list(zip(keys, values, strict=True)), asked.levels, asked.points)
            )
        except ValueError as error:
            raise ApiError(400, str(error), param="prompts") from None
        finally:
            self._aside("forget_numbers", keys)
        return answers[-1]
