"""OpenAI's completions and chats: from a request's body to its answer, whole or streamed, whoever writes the tokens."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from causalqwen.modeling import CausalQwenConfig, CausalQwenProcessor
from causalqwen.serving.batching import Job, Piece
from causalqwen.serving.calls import Call
from causalqwen.serving.jobs import job_of
from causalqwen.serving.listening import leaving_nothing
from causalqwen.serving.logprobs import chat_logprobs, completion_logprobs, ovr_logprobs
from causalqwen.serving.requests import ChatRequest, CompletionRequest, TextRequest, parse
from causalqwen.serving.settings import GONE, PATIENCE, ApiError, ServerSettings

_LONG_BODY = 1 << 16  # bytes of a request that take Python a while to read
_LONG_HELD = 4


class Writer(Protocol):
    """Whoever writes the texts of jobs, and delivers them piece by piece. context: the most tokens of a prompt and its text."""

    context: float

    def submit(self, job: Job) -> None:
        """Take a job; ApiError where there is no room."""

    def cancel(self, job: Job) -> None:
        """Give its place back."""


class TextCall(Call):
    """A request for texts. `frame` is what all parts of its answer share."""

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
        rows = [Piece(row, "", [], None) for row in range(len(self.job.rows))]
        async for piece in self.read():
            before, columns = rows[piece.row], ("text", "numbers", "tokens", "logprobs")
            joined = {name: getattr(before, name) + getattr(piece, name) for name in columns}
            rows[piece.row] = replace(piece, **joined)
        return self.frame | {"choices": [self.choice(row) for row in rows], "usage": self.usage()}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        frame = self.frame | ({"usage": None} if self.asked.wants_usage else {})
        if self.asked.is_chat:  # who speaks is sent once
            opening = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for row in range(self.asked.n):
                yield frame | {"choices": [{"index": row} | opening]}
        async for piece in self.read():
            if piece.text or piece.tokens or piece.logprobs or piece.finish is not None:
                yield frame | {"choices": [self.choice(piece)]}
        if self.asked.wants_usage:
            yield self.frame | {"choices": [], "usage": self.usage()}

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of the answer, or of one event of it."""
        row = self.job.rows[piece.row]
        causal: dict[str, Any] = {"numbers": _after(row.prompt.echo, piece.numbers)}
        if self.job.alternatives is not None:
            causal["tokens"] = _after(row.prompt.echo, piece.tokens)
        if piece.finish is not None:
            causal["seed"] = row.seed
        logprobs = None
        if self.job.logprobs is not None:
            processor = row.text.processor
            logprobs = (chat_logprobs if self.asked.is_chat else completion_logprobs)(piece.logprobs, processor)
            causal["ovr"] = ovr_logprobs(piece.logprobs, processor)
        body: dict[str, Any] = {"text": piece.text}
        if self.asked.is_chat:
            message = {"content": piece.text}
            body = {"delta": message} if self.asked.stream else {"message": {"role": "assistant"} | message}
        return {"index": piece.row, **body, "finish_reason": piece.finish, "logprobs": logprobs, "causal": causal}

    def usage(self) -> dict[str, int]:
        read = sum(len(row.prompt.ids) for row in self.job.rows[:: self.asked.n])
        written = sum(row.written for row in self.job.rows)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class TextService:
    """The endpoints of texts, and what the others share with them: bodies, names, answers."""

    def __init__(
        self, settings: ServerSettings, processor: CausalQwenProcessor, config: CausalQwenConfig, writer: Writer
    ) -> None:
        self.settings, self.processor, self.config, self.writer = settings, processor, config, writer
        self.processor("made ready before there are threads")
        self.long_thread, self._long_held = ThreadPoolExecutor(1), 0

    async def completions(self, request: Request) -> Response:
        """Texts that go on from prompts, whole or streamed."""
        return await self._answer(request, CompletionRequest)

    async def chat(self, request: Request) -> Response:
        """An assistant's answer by the backbone's template, whole or streamed."""
        return await self._answer(request, ChatRequest)

    async def _answer(self, request: Request, kind: type[TextRequest]) -> Response:
        body = await self.body(request)
        asked = parse(kind, body)
        self.check_name(asked.model)
        call = TextCall(asked, self.settings.timeout, request.state.journal)
        needed = asked, self.settings, self.processor, self.config, self.writer.context, call.deliver
        call.job = await self.beside(len(body) > _LONG_BODY, job_of, *needed)
        self.writer.submit(call.job)
        return await call.answer(request, asked.stream, lambda: self._end(call))

    async def beside(self, is_long: bool, work: Callable[..., Any], *of: Any) -> Any:
        """Work of Python's in another thread than the loop's and the model's; long work in one, one piece after the other,
        since the model's gets the less of the processor the more there is. ApiError 429 where too much of it waits."""
        if not is_long:
            return await asyncio.to_thread(work, *of)
        if self._long_held >= _LONG_HELD:
            raise ApiError(429, f"{_LONG_HELD} requests as long as this one wait already", code="rate_limit_exceeded")
        self._long_held += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.long_thread, leaving_nothing, work, *of)
        finally:
            self._long_held -= 1

    async def body(self, request: Request) -> bytes:
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
        except ClientDisconnect:
            raise ApiError(GONE, "the client left before its body was there") from None
        return body

    def check_name(self, name: str) -> None:
        if name != self.settings.name:
            message = f"the model {name[:100]!r} does not exist; this server has {self.settings.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _end(self, call: TextCall) -> None:
        """Give the place of a call back, whether it was answered or not, and count its tokens."""
        self.writer.cancel(call.job)
        usage = call.usage()
        call.journal |= usage
        self.count(usage)

    def count(self, usage: dict[str, int]) -> None:
        """Whoever keeps counters notes the tokens of an answer."""


def _after(echo: str, places: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Places of a text, as places of a choice that begins with its prompt."""
    return [place | {"span": [len(echo) + at for at in place["span"]]} for place in places] if echo else places


async def answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # no such path or method
        error = ApiError(error.status_code, error.detail)
    assert isinstance(error, ApiError)
    return error.response()
