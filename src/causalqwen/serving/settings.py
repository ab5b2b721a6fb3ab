"""What a server is started with, and the errors that it answers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse

from causalqwen.checking import Count, NotNegative, Positive, check_fields, nearest
from causalqwen.decoding import PRESETS, Individual

PATIENCE = 30.0
"""Seconds for the head of a request, for its body, for an answer to be taken, and for what is held when a server ends."""
GONE = 499
"""A status for the log: the client left before its answer was there."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of `create_app`.

    Args:
        name, individuals, preset: the model's name, who can be asked for by name, the preset of requests that name none.
        max_rows: texts generated at once; a request's prompts times its n may not be more.
        window: seconds that a batch waits for company after its first request came.
        max_waiting: requests that may wait; one more is answered 429.
        max_tokens: the most a request may ask for, and what a chat gets that asks for nothing.
        timeout, max_body: seconds from a request's arrival to the end of its answer; its bytes.
        max_prompts, max_heard: numbers predicted by one request; tokens that one individual is inferred from.
        keep: the folder where individuals are saved by request; None to save none.
        api_keys: of which `Authorization: Bearer ...` must hold one, and the requests a minute of each, None for any number.
        local: whether only requests that name this machine as their host (127.0.0.1, [::1], localhost) are answered.
        page: whether the explorer's page is served too; it makes a server local.
    """

    name: str = "causalqwen"
    individuals: dict[str, Individual] = field(default_factory=dict)
    preset: str = "softmax"
    max_rows: Count = 8
    window: NotNegative = 0.01
    max_waiting: Count = 64
    max_tokens: Count = 1024
    timeout: Positive = 300.0
    max_body: Count = 1 << 20
    max_prompts: Count = 64
    max_heard: Count = 4096
    keep: Path | None = None
    api_keys: Mapping[str, int | None] = field(default_factory=dict)
    local: bool = False
    page: bool = False

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}; known presets: {', '.join(PRESETS)}")
        check_fields(self)
        for key, limit in self.api_keys.items():
            if not key:
                raise ValueError("the API key is empty")
            if limit is not None and not limit > 0:
                raise ValueError(f"an API key has {limit} requests a minute; give a positive number, or None")


def load_individuals(
    folder: str | Path, causal_size: int, depths: tuple[int, int] | None = None
) -> dict[str, Individual]:
    """The individuals in a folder's *.safetensors files, by file name; ValueError for one that does not fit the model.

    depths: the shape [L, H] of voices that its backbone takes; None where it takes none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder of individuals")
    individuals = {path.stem: Individual.load(path) for path in sorted(folder.glob("*.safetensors"))}
    for name, individual in individuals.items():
        if (size := len(individual.factor)) != causal_size:
            raise ValueError(
                f"{name} in {folder} has {size} coordinates, the causal size of the model is {causal_size}"
            )
        if individual.voice is not None and tuple(individual.voice.shape) != depths:
            fact = "takes no voices" if depths is None else f"has {depths[0]} layers of {depths[1]}"
            layers, size = individual.voice.shape
            raise ValueError(f"{name} in {folder} has a voice for {layers} layers of {size}, and this backbone {fact}")
    return individuals


def individual_of(name: str | None, settings: ServerSettings, param: str) -> Individual | None:
    """The one of that name; None for no name. ApiError 400 for a name that no individual has."""
    if name is not None and name not in settings.individuals:
        hint = nearest(name, settings.individuals) if settings.individuals else "known: none"
        where = "a server knows those whose files are in its folder --individuals"
        raise ApiError(400, f"no individual is called {name!r}; {hint} ({where})", param=param)
    return None if name is None else settings.individuals[name]


@contextmanager
def refusing(param: str, where: str = "") -> Iterator[None]:
    """While the block runs, a ValueError is an ApiError 400 about a field."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, f"{where}{error}", param=param) from None


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. retry_after: seconds, sent
    with 429 and 503."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 1
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def response(self) -> JSONResponse:
        """The answer itself."""
        headers = {"Retry-After": str(self.retry_after)} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)

    def body(self) -> dict[str, Any]:
        types = {401: "authentication_error", 429: "rate_limit_error"}
        kind = types.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
