"""What may be asked: OpenAI's fields and the extension `causal`.

What this server cannot do is refused with the field's name, never ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from causalqwen.checking import Count
from causalqwen.decoding.plan import INDIVIDUAL_MODES, NOISE_MODES, OWN_MODES, PRESETS
from causalqwen.modeling import CausalQwenProcessor
from causalqwen.numbers.law import LEVELS
from causalqwen.serving.settings import ApiError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],), "audio": (), "best_of": (1,), "frequency_penalty": (0,), "function_call": ("none",),
    "functions": ([],), "logit_bias": ({},), "metadata": ({},), "modalities": (["text"],), "moderation": (),
    "parallel_tool_calls": (True, False), "prediction": (), "presence_penalty": (0,), "reasoning_effort": ("none",),
    "refusal": (), "response_format": ({"type": "text"},), "service_tier": ("auto", "default"), "store": (False,),
    "suffix": ("",), "tool_calls": ([],), "tool_choice": ("none",), "tools": ([],), "verbosity": ("medium",),
    "web_search_options": (),
}  # fmt: skip
"""Fields of OpenAI's requests and messages that are not supported, with the values beside null that ask for nothing."""

_UNSUPPORTED = "unsupported_parameter"
_SEED = 1 << 62
_COMPLETION_TOKENS = 16  # OpenAI's default

Seed = Annotated[int, Field(ge=-_SEED, le=_SEED)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Points = Annotated[int, Field(ge=2, le=1000)]
Level = Annotated[float, Field(gt=0, lt=1 - 1e-12)]  # nearer to 1, the quantiles of an interval are infinite
Logprobs = Annotated[int, Field(ge=0, le=20)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_TEXT, _TEXTS, _IDS, _ROWS = "<text>", "<list>", "<ids>", "<rows>"  # shapes of what may be given in several


def _shape(given: Any) -> str:
    return _TEXTS if isinstance(given, list) else _TEXT


def _shape_of_prompt(prompt: Any) -> str:
    first = prompt[0] if isinstance(prompt, list) and prompt else ""
    return _shape(prompt) if isinstance(first, str) else _ROWS if isinstance(first, list) else _IDS


class Strict(BaseModel):
    """An object of a request. A field that is null asks for nothing, whatever its name: it is as if it were not there.

    neutral: fields that are not supported, with further values that ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name in cls.neutral.keys() & given.keys():
            value = given.pop(name)
            if not any(
                value == neutral and isinstance(value, bool) is isinstance(neutral, bool)
                for neutral in cls.neutral[name]
            ):
                raise PydanticCustomError(_UNSUPPORTED, f"{name} is not supported here; leave it out", {"param": name})
        return given


class CausalOptions(Strict):
    """The extension field `causal`: one of the presets, or a mode for each source, what they draw, and what is reported."""

    preset: Literal[tuple(PRESETS)] | None = None  # type: ignore[valid-type]
    individual_mode: Literal[INDIVIDUAL_MODES] | None = None  # type: ignore[valid-type]
    noise_mode: Literal[NOISE_MODES] | None = None  # type: ignore[valid-type]
    own_mode: Literal[OWN_MODES] | None = None  # type: ignore[valid-type]
    individual: str | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    alternatives: Logprobs | None = None
    points: Points | None = None

    @model_validator(mode="after")
    def _check_modes(self) -> "CausalOptions":
        if (self.individual_mode is None) != (self.noise_mode is None):
            raise ValueError("individual_mode and noise_mode are given together")
        if self.individual_mode is None and self.own_mode is not None:
            raise ValueError("own_mode is given beside individual_mode and noise_mode")
        if self.individual_mode is not None and self.preset is not None:
            raise ValueError("a preset says the modes already: leave it out, or them")
        return self


class StreamOptions(Strict):
    include_usage: bool = False


class SharedFields(Strict):
    """What both endpoints of texts share."""

    neutral = _NEUTRAL
    is_chat: ClassVar[bool]

    model: str
    n: Count = 1
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: (
        Annotated[
            Annotated[StopString, Tag(_TEXT)] | Annotated[list[StopString], Field(max_length=4), Tag(_TEXTS)],
            Discriminator(_shape),
        ]
        | None
    ) = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    causal: CausalOptions = Field(default_factory=CausalOptions)

    @model_validator(mode="after")
    def _check_stream(self) -> "SharedFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belong to stream=true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SharedFields):
    """`/v1/completions`."""

    is_chat = False

    prompt: Annotated[
        Annotated[str, Tag(_TEXT)]
        | Annotated[list[str], Field(min_length=1), Tag(_TEXTS)]
        | Annotated[TokenIds, Tag(_IDS)]
        | Annotated[list[TokenIds], Tag(_ROWS)],
        Discriminator(_shape_of_prompt),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    logprobs: Logprobs | None = None

    @model_validator(mode="after")
    def _check_length(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0 and echo is false, which asks for no text at all")
        return self

    def length(self) -> int | None:
        """The tokens asked for; None for as many as there may be."""
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self, processor: CausalQwenProcessor) -> Sequence[str | list[int]]:
        """The prompts: texts, or ids of tokens."""
        alone = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if alone else self.prompt  # type: ignore[list-item, return-value]

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest words are reported with each token; None where no log-probabilities are asked for."""
        return self.logprobs


class ContentPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """A message as clients send it, or dump it from an answer. An assistant's without content is empty."""

    neutral = _NEUTRAL
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag(_TEXT)] | Annotated[list[ContentPart], Tag(_TEXTS)], Discriminator(_shape)
    ] = ""
    name: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError(f"a message of the role {self.role!r} needs content")
        return self

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(SharedFields):
    """`/v1/chat/completions`."""

    is_chat = True
    echo: ClassVar[bool] = False

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    continue_final_message: bool = False
    logprobs: bool = False
    top_logprobs: Logprobs | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs belong to logprobs=true")
        return self

    @model_validator(mode="after")
    def _check_last(self) -> "ChatRequest":
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or not last.plain["content"].strip()):
            raise ValueError("continue_final_message goes on with the words of an assistant, who said none last")
        return self

    def length(self) -> int | None:
        return one_of("max_completion_tokens", self.max_completion_tokens, self.max_tokens)

    def prompts(self, processor: CausalQwenProcessor) -> Sequence[str | list[int]]:
        return [text_of_chat(self.messages, processor, self.continue_final_message)]

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


TextRequest = CompletionRequest | ChatRequest


def text_of_chat(messages: list[Message], processor: CausalQwenProcessor, goes_on: bool = False) -> str:
    """Messages by the backbone's template: what an assistant answers after, or, if it goes on, its last words.

    These stand at the end as they are, whatever a template does to the ends of messages.
    """
    if processor.chat_template is None:
        raise ApiError(400, "this model has no chat template: use /v1/completions")
    plain = [message.plain for message in messages]
    last_words = plain.pop()["content"] if goes_on else ""
    try:
        return processor.apply_chat_template(plain, tokenize=False, add_generation_prompt=True) + last_words
    except (TemplateError, IndexError) as error:  # some look at messages that are not there
        raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from None


class NumbersRequest(Strict):
    """`/v1/numbers`: the numbers after texts, or after chats, as distributions."""

    model: str
    prompts: Annotated[
        list[
            Annotated[
                Annotated[str, Tag(_TEXT)] | Annotated[list[Message], Field(min_length=1), Tag(_TEXTS)],
                Discriminator(_shape),
            ]
        ],
        Field(min_length=1),
    ]
    values: list[float | None] | None = None
    levels: Annotated[list[Level], Field(min_length=1, max_length=99)] = list(LEVELS)
    points: Points | None = None
    individual: str | None = None
    classes: (
        Annotated[Annotated[str, Tag(_TEXT)] | Annotated[list[str | None], Tag(_TEXTS)], Discriminator(_shape)] | None
    ) = None

    @model_validator(mode="after")
    def _check_rows(self) -> "NumbersRequest":
        for name in ("values", "classes"):
            given = getattr(self, name)
            if isinstance(given, list) and len(given) != len(self.prompts):
                raise ValueError(f"{name}: expected one per prompt, got {len(given)} for {len(self.prompts)}")
        return self

    def texts(self, processor: CausalQwenProcessor, most: int) -> list[str]:
        """The text that each number stands after. ApiError 400 for more than `most`, and for messages that the template
        refuses."""
        if len(self.prompts) > most:
            raise ApiError(400, f"{len(self.prompts)} prompts are more than the {most} of one request", param="prompts")
        return [
            prompt if isinstance(prompt, str) else text_of_chat(prompt, processor, prompt[-1].role == "assistant")
            for prompt in self.prompts
        ]


Kind = TypeVar("Kind", bound=BaseModel)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """The request in a body; ApiError 400 that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(part for part in map(str, first["loc"]) if part[:1] != "<")  # without the names of shapes
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == _UNSUPPORTED:
            raise ApiError(400, message, param=first["ctx"]["param"], code=_UNSUPPORTED) from None
        raise ApiError(400, f"{place}: {message}" if place else message, param=place or None) from None


def one_of(name: str, first: Any, second: Any) -> Any:
    """The one that was given, of two fields for the same thing."""
    if first is not None and second is not None and first != second:
        raise ApiError(400, f"{name} was given twice: {first} and {second}", param=name)
    return second if first is None else first
