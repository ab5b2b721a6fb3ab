"""The client: opening vLLM on a grafted model, asking it, and reading texts and numbers."""

import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from causalqwen.decoding import Individual
from causalqwen.modeling import CausalQwenConfig, CausalQwenProcessor
from causalqwen.modeling.context import Context
from causalqwen.modeling.encoded import read_as_prompt
from causalqwen.modeling.prediction import check_speaker
from causalqwen.parts.value_axes import ValueAxes
from causalqwen.serving.text import GrowingText
from causalqwen_vllm.request_options import FOLLOWER, KEY, TOKENS_ALONE, RequestOptions, check_params, check_silent

WORKER = "causalqwen_vllm.worker.NumberWorker"
NEEDED = {"skip_tokenizer_init": True, "logits_processors": [FOLLOWER], "worker_extension_cls": WORKER}
"""vLLM's own settings that a grafted model needs: `load` and `python -m causalqwen_vllm` set them."""


def graphs(context: Context) -> dict[str, Any]:
    """`compilation_config` of a GPU: CUDA graphs of the whole decoder for steps of one token a row, where model runner V2 runs
    and no value of a number is embedded, and otherwise of its parts; our heads stay outside."""
    whole = context.hides and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0"
    return {"cudagraph_mode": "FULL_AND_PIECEWISE" if whole else "PIECEWISE", "cudagraph_copy_inputs": True}


@dataclass(frozen=True)
class Number:
    """A generated number: `value` was written and fed on, under the plan's draws.

    token, span: its index among the generated tokens, and its characters in the text. The others: its distribution with every
    draw integrated out, loc and scale on the axis of the value transform; of the named individual, unless known by words alone.
    """

    value: float
    token: int
    span: tuple[int, int]
    loc: float
    scale: float
    num_prob: float
    median: float
    intervals: dict[str, list[float]]
    announced: bool = True


@dataclass(frozen=True)
class Answer:
    """What follows a prompt. values: one per token, 0 off `<NUM>`. finish: "stop" or "length".

    Where digits stand in the context, those of a number follow its `<NUM>`; the last ones may be cut short by `max_tokens`, but
    value and text are whole.
    """

    text: str
    token_ids: list[int]
    values: list[float]
    numbers: list[Number]
    finish: str
    seed: int


def register() -> None:
    """The entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""
    from vllm import ModelRegistry

    name = "CausalQwenForCausalLM"
    if name not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, f"causalqwen_vllm.model:{name}")


def load(model: str, **engine: Any) -> Any:
    """vLLM's `LLM` on the grafted model in a folder, with the settings that the plug-in needs; `engine` are vLLM's own.

    Its prefix cache is on where the context holds no value of a number and none is copied. The backbone is compiled with
    `enforce_eager=False`. ValueError names all settings under which a number could be wrong.
    """
    if wrong := [f"{name}={engine[name]}" for name in NEEDED if engine.get(name, NEEDED[name]) != NEEDED[name]]:
        kept = ", ".join(f"{name}={value}" for name, value in NEEDED.items())
        raise ValueError(f"a grafted model cannot be served with {', '.join(wrong)}; it needs {kept}")
    config = CausalQwenConfig.from_pretrained(model)
    cached = config.by_tokens_alone
    engine = {"enable_prefix_caching": cached, "enforce_eager": True} | engine
    if engine["enable_prefix_caching"] and not cached:
        raise ValueError(f"a grafted model cannot be served this way: {TOKENS_ALONE}")
    if not engine["enforce_eager"] and isinstance(given := engine.get("compilation_config", {}), dict):
        engine["compilation_config"] = graphs(config.context) | given
    from vllm import LLM

    register()
    return LLM(str(model), **(NEEDED | engine))


def request(
    processor: CausalQwenProcessor,
    prompt: str,
    *,
    preset: str = "standard",
    seed: int = 0,
    max_tokens: int = 64,
    individual: str | Individual | None = None,
    key: str = "",
    params: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Any, Any]:
    """A prompt with its numbers as vLLM takes it: (TokensPrompt, SamplingParams).

    Args:
        max_tokens: of the tokens that vLLM makes, the digits of numbers among them where they stand in the context, but not a
            `<NUM>` that the backbone does not see.
        individual: a file that `Individual.save` wrote, within the workers' reach, or an individual known exactly.
        key: under which `take_numbers` finds the numbers; params: further fields of SamplingParams (`ignore_eos`, ...).
        settings: temperature, top_p, number_class; None asks for nothing. ValueError for whatever the plug-in would refuse.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    if isinstance(individual, Individual):
        check_silent(individual)
        if individual.is_inferred:
            raise ValueError(f"{individual} is not known exactly: save it and give its file, which says how well")
        settings |= {"individual": individual.factor.tolist()}
    elif individual is not None:
        settings["individual"] = individual
    encoded = processor(prompt, prompt=True)
    ids, values = encoded["input_ids"], encoded["numeric_values"]
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    named = {} if "individual_mode" in settings or "noise_mode" in settings else {"preset": preset}
    return of_tokens(processor, ids, values, {"seed": seed, "key": key} | named | settings, max_tokens, params)


def of_tokens(
    processor: CausalQwenProcessor,
    ids: Sequence[int],
    values: Sequence[float],
    options: dict[str, Any],
    max_tokens: int,
    params: dict[str, Any] | None = None,
) -> tuple[Any, Any]:
    """As `request`, for the tokens of a prompt, a value at each `<NUM>`, and all else that `RequestOptions.read` takes."""
    from vllm.inputs import TokensPrompt

    from vllm import SamplingParams

    known = [value for token, value in zip(ids, values, strict=True) if token == processor.num_token_id]
    options = options | {"values": known}
    if processor.context.hides:
        announced = [place for place, token in enumerate(ids) if token == processor.num_token_id]
        options["places"] = [place - hidden for hidden, place in enumerate(announced)]
        ids = [token for token in ids if token != processor.num_token_id]
    given = {"temperature": 0.0, "detokenize": False, "max_tokens": max_tokens, "extra_args": {KEY: options}}
    sampling = SamplingParams(**(given | (params or {})))
    check_params(sampling)
    return TokensPrompt(prompt_token_ids=list(ids)), sampling


def generate(
    llm: Any, prompts: Sequence[str], *, seed: int | Sequence[int] | None = None, adapter: Any = None, **settings: Any
) -> list[Answer]:
    """What follows each prompt, as `CausalQwenForCausalLM.generate` decides it, in vLLM.

    Args:
        llm: made by `load`.
        seed: one for all prompts, or one per prompt; drawn where None.
        adapter: vLLM's `LoRARequest` for all prompts, or one or None per prompt; of an engine with `enable_lora=True`.
        settings: those of `request`. ValueError for what it refuses, and an adapter that cannot be loaded or reaches the heads.
    """
    prompts, config = list(prompts), llm.model_config.hf_config
    processor = processor_of(llm.model_config.model, config.context)
    if seed is None:
        seed = torch.randint(2**62, (len(prompts),)).tolist()
    seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one, or one per prompt")
    keys = [uuid.uuid4().hex for _ in prompts]
    asked = [
        request(processor, prompt, seed=own, key=key, **settings)
        for prompt, own, key in zip(prompts, seeds, keys, strict=True)
    ]
    for _, params in asked[:1]:  # all have the same individual and class
        options = RequestOptions.read(params.extra_args[KEY])
        options.bind(config.causal_size)
        config.check_plan(options.plan)
        check_speaker(config, options.individual)
        ValueAxes(config, options.number_class).law()
    adapters = list(adapter) if isinstance(adapter, Sequence) else [adapter] * len(prompts)
    if None in adapters and any(adapters) and llm.llm_engine.vllm_config.device_config.device_type == "cpu":
        raise ValueError("vLLM for CPU adapts requests beside those that have an adapter: ask for such requests apart")
    for lora in {lora.lora_int_id: lora for lora in adapters if lora is not None}.values():
        llm.llm_engine.add_lora(lora)  # one that cannot be loaded would end the engine in the middle of a step
    outputs = llm.generate(
        [tokens for tokens, _ in asked], [params for _, params in asked], use_tqdm=False, lora_request=adapters
    )
    numbers = llm.collective_rpc("take_numbers", args=(keys,))[-1]  # the last rank decides
    return [
        answer(processor, output, *asked[row], numbers[row], seeds[row], prompts[row] != read_as_prompt(prompts[row]))
        for row, output in enumerate(outputs)
    ]


@lru_cache(maxsize=4)
def processor_of(folder: str, context: Context) -> CausalQwenProcessor:
    """The processor of the model in a folder, whose configuration says what stands in the context for a number."""
    processor = CausalQwenProcessor.from_pretrained(folder)
    processor.context = context
    return processor


def answer(
    processor: CausalQwenProcessor,
    output: Any,
    tokens: Any,
    params: Any,
    numbers: dict[str, dict],
    seed: int,
    after_space: bool = False,
) -> Answer:
    """vLLM's output for a `request`, and what `take_numbers` gave for its key; after_space: `GrowingText`'s."""
    ids, known = tokens["prompt_token_ids"], iter(params.extra_args[KEY]["values"])
    values = [next(known) if token == processor.num_token_id else 0.0 for token in ids]
    done = output.outputs[0]
    text, predicted, of_token = GrowingText(processor, ids, values, (), after_space=after_space), [], []
    made = list(written(processor, done.token_ids, len(ids), numbers))
    for index, (_, token, law) in enumerate(made):
        of_token.append(0.0 if law is None else law["value"])
        span = text.append(token, of_token[-1])
        if law is not None:
            predicted.append(Number(token=index, span=span, **law))
    text.take(final=True)
    return Answer(text.text, [token for _, token, _ in made], of_token, predicted, done.finish_reason, seed)


def written(
    processor: CausalQwenProcessor, made: Sequence[int], start: int, numbers: dict[str, dict]
) -> Iterator[tuple[int, int, dict | None]]:
    """Places and tokens that vLLM made from place `start` on, each `<NUM>` with its number; one that vLLM does not get is put
    back, at the place of its first digit."""
    for place, token in enumerate(made, start):
        if processor.context.hides and str(place) in numbers:
            yield place, processor.num_token_id, numbers[str(place)]
        yield place, token, numbers[str(place)] if token == processor.num_token_id else None
