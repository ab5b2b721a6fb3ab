"""What may be asked: OpenAI's fields, the extension `causal`, and how both become a plan.

    OpenAI           under `softmax`                    under the other presets
    temperature      of the softmax; 0 takes the best   T, multiplies whatever is drawn (theory 3.9)
    top_p            the nucleus                        refused, unless 1: no sampler chooses there
    seed             of the tokens' draws               of individuals and noise

Prompt i's n texts have the seeds seed, seed + 1, ..., as returned sequences of `generate` have. Without a seed one is drawn
and told in the answer. What this server cannot do is refused with the field's name, never ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from causalqwen.decoding import PRESETS, CausalDecoding, Individual
from causalqwen.serving.settings import ApiError

# Fields of OpenAI's that are not supported, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),  # 0 asks for those of the written tokens
    "top_logprobs": (None,),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "store": (None, False),
}
_SEED = 1 << 62
_MAX_STOP = 256

Seed = Annotated[int, Field(ge=-_SEED, le=_SEED)]
Temperature = Annotated[float, Field(ge=0, le=2)]
StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CausalOptions(_Strict):
    """The extension field `causal`: one of the eight presets, and what it draws."""

    preset: Literal[tuple(PRESETS)] | None = None  # type: ignore[valid-type]
    individual: str | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    noise_temperature: Temperature | None = None
    central_mass: Annotated[float, Field(gt=0, le=1)] | None = None


class StreamOptions(_Strict):
    include_usage: bool | None = None


class TextRequest(_Strict):
    """What both endpoints share."""

    model: str
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    causal: CausalOptions = Field(default_factory=CausalOptions)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in _NEUTRAL.keys() & data.keys():
            value = data[name]
            if not any(
                value == neutral and isinstance(value, bool) is isinstance(neutral, bool) for neutral in _NEUTRAL[name]
            ):
                raise ValueError(f"{name} is not supported here; leave it out")
        return {name: value for name, value in data.items() if name not in _NEUTRAL}

    @model_validator(mode="after")
    def _check_stream(self) -> "TextRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belong to stream=true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(TextRequest):
    """`/v1/completions`."""

    prompt: str | Annotated[list[str], Field(min_length=1)]

    @field_validator("prompt", mode="before")
    @classmethod
    def _refuse_ids(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and any(isinstance(item, int | list) for item in prompt):
            raise ValueError("token ids carry no values of numbers: give text")
        return prompt

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class ContentPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(TextRequest):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


Kind = TypeVar("Kind", bound=TextRequest)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """The request in a body; ApiError 400 that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{place}: {message}" if place else message, param=place or None) from None


def one_of(name: str, first: Any, second: Any) -> Any:
    """The one that was given, of two fields for the same thing."""
    if first is not None and second is not None and first != second:
        raise ApiError(400, f"{name} was given twice: {first} and {second}", param=name)
    return second if first is None else first


def plan_of(
    request: TextRequest, default: str, individuals: Mapping[str, Individual]
) -> tuple[CausalDecoding, Individual | None, float]:
    """The plan of a request without its seed, the individual that it names, and its temperature.

    Raises ApiError 400 for a combination in which something that was asked for would have no effect.
    """
    causal = request.causal
    preset = causal.preset or default
    temperature = one_of("temperature", request.temperature, causal.temperature)
    plan = CausalDecoding.preset(preset)
    draws_noise = plan.noise_mode in ("token", "sequence")
    draws = draws_noise or plan.individual_mode != "marginal"

    def refuse(field: str, why: str) -> None:
        raise ApiError(400, f"{field} has no effect under the preset {preset}: {why}", param=field)

    if preset != "softmax" and request.top_p not in (None, 1):
        refuse("top_p", "tokens are decided, not sampled; use the preset softmax, or causal.central_mass")
    if causal.individual is not None and plan.individual_mode != "sequence":
        refuse("causal.individual", "nobody is held for the text; use shared-individual or persona")
    if causal.individual is not None and causal.individual not in individuals:
        raise ApiError(
            400,
            f"nobody is called {causal.individual!r}; known: {', '.join(individuals) or 'nobody'}",
            param="causal.individual",
        )
    if causal.noise_temperature is not None and not draws_noise:
        refuse("causal.noise_temperature", "it draws no noise")
    if causal.central_mass is not None and not draws:
        refuse("causal.central_mass", "it draws neither individuals nor noise")
    temperature = 1.0 if temperature is None else temperature
    if preset == "softmax":
        return plan, None, temperature
    if not draws and temperature not in (0, 1):
        refuse("temperature", "it draws nothing that could be multiplied")
    settings = {"temperature": temperature if draws else 1.0, "central_mass": causal.central_mass}
    plan = CausalDecoding.preset(preset, noise_temperature=causal.noise_temperature, **settings)
    return plan, individuals.get(causal.individual or ""), temperature
