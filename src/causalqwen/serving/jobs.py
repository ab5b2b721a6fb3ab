"""From a request to a job: everything that can be wrong with it is found here, before it waits.

    OpenAI           under `softmax`                    under the other presets
    temperature      of the softmax; 0 takes the best   T, multiplies all noise of the scores (theory 3.9)
    top_p            the nucleus                        the nucleus under sample and persona; else refused, unless 1
    seed             of the tokens' draws               of individuals and noise

A prompt's n texts have the seeds seed, seed + 1, ..., as returned sequences of `generate` have. Without a seed one is drawn,
and reported in the answer.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from causalqwen.decoding import CausalDecoding
from causalqwen.modeling import CausalQwenConfig, CausalQwenProcessor
from causalqwen.modeling.encoded import read_as_prompt
from causalqwen.modeling.prediction import check_speaker
from causalqwen.serving.batching import Job, Piece, Prompt, Row
from causalqwen.serving.requests import TextRequest, one_of
from causalqwen.serving.settings import ApiError, ServerSettings, individual_of, refusing
from causalqwen.serving.text import GrowingText

_START = 4  # characters for each token that there is room for
_CUT = 8  # tokens that a start may have beyond the whole, where it is cut off


def plan_of(asked: TextRequest, settings: ServerSettings) -> CausalDecoding:
    """The plan of a request, without its seed and its individual.

    Raises ApiError 400 for a combination in which something that was asked for would have no effect.
    """
    causal, preset = asked.causal, asked.causal.preset or settings.preset
    temperature = one_of("temperature", asked.temperature, causal.temperature)
    plan = CausalDecoding.preset(preset)
    if causal.individual_mode is not None:
        own = causal.own_mode or "marginal"
        plan = CausalDecoding(individual=causal.individual_mode, noise=causal.noise_mode, own=own)
        preset = f"{causal.individual_mode} x {causal.noise_mode}"
    races = plan.own != "marginal"
    without_effect = {
        "top_p": (
            preset != "softmax" and not races and asked.top_p not in (None, 1),
            "no noise of a token's own is drawn; use sample, persona or softmax",
        ),
        "temperature": (
            not plan.draws and preset != "softmax" and temperature not in (None, 0, 1),
            "it draws nothing that could be multiplied; use sample, persona or softmax",
        ),
        "causal.individual": (
            causal.individual is not None and plan.individual_mode != "sequence",
            "no individual is held for the text; use shared-individual or persona",
        ),
    }
    for field, (wrong, why) in without_effect.items():
        if wrong:
            raise ApiError(400, f"{field} has no effect under the preset {preset}: {why}", param=field)
    heat = 1.0 if temperature is None or not (plan.draws or preset == "softmax") else temperature
    return replace(plan, temperature=heat, top_p=asked.top_p if races and asked.top_p != 1 else None)


def job_of(
    asked: TextRequest,
    settings: ServerSettings,
    processor: CausalQwenProcessor,
    config: CausalQwenConfig,
    context: float,
    deliver: Callable[[Piece | ApiError], None],
) -> Job:
    """The rows of a request, prompt by prompt. ApiError 400 for what cannot be served."""
    plan = plan_of(asked, settings)
    with refusing("top_p"):
        config.check_plan(plan)
    individual = individual_of(asked.causal.individual, settings, "causal.individual")
    with refusing("causal.individual"):
        check_speaker(config, individual)
    seed = one_of("seed", asked.seed, asked.causal.seed)
    seed = secrets.randbits(31) if seed is None else seed
    length, prompts = asked.length(), asked.prompts(processor)
    if (length or 0) > settings.max_tokens:
        raise ApiError(400, f"max_tokens is {length}, this server writes {settings.max_tokens}", param="max_tokens")
    if len(prompts) * asked.n > settings.max_rows:
        message = f"{len(prompts)} prompts times n={asked.n} are more than the {settings.max_rows} texts of one request"
        raise ApiError(400, message, param="n")
    read = _read_all(prompts, asked, processor, config, context)
    rows = []
    for place, prompt in enumerate(prompt for prompt in read for _ in range(asked.n)):
        text = GrowingText(processor, prompt.ids, prompt.values, asked.stops, after_space=prompt.after_space)
        rows.append(Row(place, prompt, seed + place % asked.n, text))
    if length is None:
        length = int(min(settings.max_tokens, context - max(len(prompt.ids) for prompt in read)))
    return Job(
        rows,
        plan,
        length,
        deliver,
        individual=individual,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        alternatives=asked.causal.alternatives,
        points=asked.causal.points,
        logprobs=asked.likeliest,
    )


def _read_all(
    prompts: Sequence[str | list[int]],
    asked: TextRequest,
    processor: CausalQwenProcessor,
    config: CausalQwenConfig,
    context: float,
) -> list[Prompt]:
    """Prompts as the model reads them. ApiError 400 for one that cannot be read, or that is too long."""
    length, field = asked.length(), "messages" if asked.is_chat else "prompt"
    least = 1 if length is None else length

    def check_width(width: int, at_least: str = "") -> None:
        if width + least > context:
            message = f"{at_least}{width} tokens of prompt and {least} of text are more than the context of {context}"
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    read = []
    for place, prompt in enumerate(prompts):
        with refusing(field, f"prompt {place}: " if len(prompts) > 1 else ""):
            if isinstance(prompt, str) and config.context.writes and len(prompt) > _START * context:
                # All of it could be a million tokens and numbers. It has at least the backbone's tokens of its start.
                start = processor.tokenizer(prompt[: _START * int(context)], add_special_tokens=False)["input_ids"]
                check_width(len(start) - _CUT, "at least ")
            read.append(_read(prompt, asked, processor, config))
    check_width(max(len(prompt.ids) for prompt in read))
    return read


def _read(
    prompt: str | list[int], asked: TextRequest, processor: CausalQwenProcessor, config: CausalQwenConfig
) -> Prompt:
    """A prompt as the model reads it. Ids are read as they are: where `<NUM>` is hidden, it need not announce their numbers.

    Raises ValueError for an empty prompt, an id that is no token's, and what this model's context of numbers is not made for.
    """
    scored = asked.echo and asked.likeliest is not None
    if scored:
        config.require("the likelihood of a prompt")
    if isinstance(prompt, str):
        goes_on = not asked.is_chat and asked.length() != 0  # else it is read to its end
        text = read_as_prompt(prompt) if goes_on else prompt
        encoded = processor(text)
        ids, values = encoded["input_ids"], list(encoded["numeric_values"])
        if not ids:
            raise ValueError("the prompt is empty")
        starts = None
        if scored:
            offsets = processor.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
            starts = [start for start, _ in offsets]
        return Prompt(ids, values, prompt if asked.echo else "", starts, text != prompt)
    config.require("a prompt of token ids")
    for token in prompt:
        if token >= len(processor.tokenizer) or token == processor.num_token_id:
            raise ValueError(f"no token has the id {token}: this tokenizer has {len(processor.tokenizer)}")
    growing, starts = GrowingText(processor, [], [], [], special=True), []
    for token in prompt if asked.echo else ():
        starts.append(len(growing.text))
        growing.append(token, 0.0)
    return Prompt(prompt, [0.0] * len(prompt), growing.take(final=True), starts if scored else None)
