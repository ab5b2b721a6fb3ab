"""Worlds of a grafted model: intervention and prediction with an individual who lasts (theory 3.13).

DiscoSCM's and DoWhy's words: `interventional_samples` let an individual meet fresh noise in a world that was set up;
`counterfactual_samples` ask what the individual who wrote an observed text would have said in another one.
"""

import difflib
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from causalqwen.checking import Finite, Whole, check_fields
from causalqwen.decoding import CausalDecoding, Individual, ObservedNoise, ObservedNumber
from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.encoded import NumberText, read_as_prompt
from causalqwen.modeling.individuals import abduct, abduct_noise, written_numbers
from causalqwen.modeling.logits_processors import ForcedToken, ForceTokens
from causalqwen.modeling.prediction import NumberPrediction, predict_values
from causalqwen.modeling.reading import Observation, encode_text
from causalqwen.numbers.rendering import brief

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Intervention:
    """Settings of another world.

    prompt: the text before, or a function of the observed one; None leaves it. tokens: texts forced after so many tokens of
    the answer, `{5: " but"}`, or as soon as no number is cut in two; they stand as they are set, even where they change how a
    number before them is read. values: numbers forced there instead of what would come, `{5: 100.0}`, before a text at the same
    place, or as soon as they are read as their values. model: another checkpoint that speaks there, of the same tokenizer and
    causal size; None for the one that is asked.
    """

    prompt: str | Callable[[str], str] | None = None
    tokens: dict[Whole, str] = field(default_factory=dict)
    values: dict[Whole, Finite] = field(default_factory=dict)
    model: Any = None

    def __post_init__(self) -> None:
        for name in ("tokens", "values"):  # places may come from numpy
            given = getattr(self, name)
            object.__setattr__(self, name, {index(place): what for place, what in given.items()})
        check_fields(self)

    def prompt_from(self, observed: str) -> str:
        """The prompt of the world."""
        if self.prompt is None:
            return observed
        return self.prompt(observed) if callable(self.prompt) else self.prompt


@dataclass(frozen=True)
class World:
    """What was said in a world: text, tokens int64 [n], values float64 [n] (0 off `<NUM>`). forced: indices of the tokens that
    the intervention set, as far as the text came. digits: of those that write the values, after their `<NUM>`."""

    prompt: str
    text: str
    tokens: Tensor
    values: Tensor
    forced: tuple[int, ...] = ()
    digits: tuple[int, ...] = ()


def interventional_samples(
    model: GraftedModel,
    prompts: str | Sequence[str],
    individual: Individual | None = None,
    *,
    num_samples: int = 1,
    max_new_tokens: int = 64,
    seed: int = 0,
    temperature: float = 1.0,
    streamer: Any = None,
) -> list[list[World]]:
    """What `individual` (a new one per sample by default) writes after each prompt, with fresh noise each time: `num_samples`
    worlds per prompt, of which sample j uses seed + j.

    temperature: of the plan (`CausalDecoding`). streamer: of transformers; it sees each token of each text as it comes.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    who = "sequence" if individual is None else individual
    plan = CausalDecoding.preset("persona", individual=who, seed=seed, temperature=temperature)
    world = Intervention()
    return [continue_prompt(model, prompt, plan, num_samples, max_new_tokens, world, streamer) for prompt in prompts]


def counterfactual_samples(
    model: GraftedModel,
    observed: Observation,
    interventions: Intervention | Sequence[Intervention],
    *,
    noise: str = "abduct",
    individual: Individual | None = None,
    num_samples: int = 1,
    max_new_tokens: int | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    streamer: Any = None,
) -> list[list[World]]:
    """What the individual who wrote an observed text would have written in other worlds: `num_samples` worlds per intervention.

    Args:
        interventions: the worlds; `Intervention()` is the one that was.
        noise: "redraw", the original design's reading: the same individual meets fresh noise; or "abduct": the noise that
            explains the text stays too, so that the world that was gives the observed text back, exactly
            in float32.
        individual: who wrote the text; None to infer them from it.
        max_new_tokens: as many as the observed text has, by default.
        seed: sample j draws its noise (given what was said) with seed + j.
        temperature, streamer: as of `interventional_samples`.

    Raises:
        ValueError: an unknown noise; a speaker or an individual that does not fit; a place of an intervention that lies
            after the last token.
    """
    if noise not in ("redraw", "abduct"):
        raise ValueError(f"unknown noise {noise!r}; use 'redraw' or 'abduct'")
    worlds = [interventions] if isinstance(interventions, Intervention) else list(interventions)
    length = max_new_tokens or len(encode_text(model, observed.text).ids)
    for world in worlds:
        _check_speaker(model, world.model or model)
        _check_places(world, length)
    if individual is None:
        individual = abduct(model, observed)
    individual.check_size(model.config.causal_size)
    samples: list[list[World]] = [[] for _ in worlds]
    with model.frozen_vocabulary():
        for sample in range(num_samples):
            plan = CausalDecoding(individual=individual, own="token", seed=seed + sample, temperature=temperature)
            if noise == "abduct":
                kept = abduct_noise(model, observed, individual, temperature=temperature, seed=seed + sample)
                plan = replace(plan, own=kept)
            for place, world in enumerate(worlds):
                prompt, speaker = world.prompt_from(observed.prompt), world.model or model
                samples[place] += continue_prompt(speaker, prompt, plan, 1, length, world, streamer)
    return samples


def _check_places(world: Intervention, length: int) -> None:
    """ValueError for a place after the end of a text of so many tokens, where nothing could be set."""
    for name, places in (("values", world.values), ("tokens", world.tokens)):
        if places and max(places) >= length:
            raise ValueError(
                f"{name}: place {max(places)} lies after the {length} tokens of the text; name one from 0 to {length - 1}, or "
                "give more max_new_tokens"
            )


def _check_speaker(model: GraftedModel, other: GraftedModel) -> None:
    if other.config.causal_size != model.config.causal_size or other.config.num_token_id != model.config.num_token_id:
        raise ValueError("the other checkpoint has another vocabulary or causal size: who and noise do not fit it")
    if other.config.context != model.config.context:
        raise ValueError(
            f"the other checkpoint has {other.config.context}: noise that is shared needs {model.config.context}"
        )


@torch.no_grad()
def value_predictions(model: GraftedModel, world: World, individual: Individual) -> dict[int, NumberPrediction]:
    """The law of each value of a world, but of those that were forced, by the index of its token: of what `individual` says
    there under fresh noise, as `predict_number(..., individual=)` tells it. Of somebody with a voice it is read under the
    voice, as the text was."""
    numbers = (world.tokens == model.config.num_token_id).nonzero().squeeze(-1).tolist()
    places = [place for place in numbers if place not in world.forced]
    if not places:
        return {}
    ids, values, _ = encode_text(model, world.prompt, prompt=True)
    ids, values = torch.cat([ids, world.tokens])[None, :-1], torch.cat([values, world.values])[None, :-1]
    given = {"numeric_values": values.to(model.device), "voice": individual.voice}
    ids, hidden = ids.to(model.device), model.features(ids.to(model.device), **given).last_hidden_state
    before = [hidden.shape[1] - len(world.tokens) + place for place in places]
    offered = model.candidates(hidden, ids, given["numeric_values"], None)
    candidates = None if offered is None else offered[0, before]
    return dict(zip(places, predict_values(model, hidden[0, before], individual, candidates), strict=True))


def continue_prompt(
    model: GraftedModel,
    prompt: str,
    plan: CausalDecoding,
    num_samples: int,
    max_new_tokens: int,
    world: Intervention,
    streamer: Any = None,
) -> list[World]:
    """Texts after a prompt in a world."""
    ids, values, _ = encoded = encode_text(model, prompt, prompt=True)
    if len(ids) == 0:
        raise ValueError("the prompt is empty: give at least one token")
    start, number = len(ids), model.config.num_token_id
    if world.values:
        model.config.require("a value that is set")
    queue = [ForcedToken(place, number, value) for place, value in world.values.items()]
    for place, forced_text in world.tokens.items():
        text = encode_text(model, forced_text)
        written = written_numbers(model, forced_text, text)
        for at in (~text.digits).nonzero().squeeze(-1).tolist():
            form = written.get(at)
            queue.append(ForcedToken(place, int(text.ids[at]), None if form is None else form.value, form))
    forced = ForceTokens(sorted(queue, key=lambda token: token.after))
    if not model.config.context.writes:
        of_prompt = written_numbers(model, read_as_prompt(prompt), encoded)
        forced.forms |= {(row, place): form for row in range(num_samples) for place, form in of_prompt.items()}
    made = model.generate(
        ids[None].to(model.device),
        numeric_values=values[None].to(model.device),
        attention_mask=torch.ones_like(ids[None]).to(model.device),  # padding within a prompt is read too
        causal_decoding=plan,
        max_new_tokens=max_new_tokens,
        num_return_sequences=num_samples,
        logits_processor=LogitsProcessorList([forced]),
        streamer=streamer,
        pad_token_id=model.processor.tokenizer.pad_token_id or 0,
    )
    rows = zip(made.sequences.cpu(), made.numeric_values.cpu(), strict=True)
    known = plan.own.numbers if isinstance(plan.own, ObservedNoise) else {}
    return [_world(model, prompt, start, forced, known, row, *of_row) for row, of_row in enumerate(rows)]


def _world(
    model: GraftedModel,
    prompt: str,
    start: int,
    forced: ForceTokens,
    observed_numbers: dict[int, ObservedNumber],
    row: int,
    ids: Tensor,
    values: Tensor,
) -> World:
    """The world of a row of tokens and values whose first `start` are the prompt; it ends before an end of text."""
    end = model.generation_config.eos_token_id
    ends = torch.tensor([end] if isinstance(end, int) else (end or []))
    last = torch.isin(ids[start:], ends).nonzero()
    if len(last):
        ids, values = ids[: start + int(last[0])], values[: start + int(last[0])]
        if left := forced.left(row):
            message = f"a text ends after {int(last[0])} tokens: what was to be set at {left[0].after} is not in it"
            logger.warning(message)
    else:
        listed, of_listed = ids.tolist(), values.tolist()
        forced.finish(row, listed, of_listed)
        ids, values = torch.tensor(listed), torch.tensor(of_listed, dtype=torch.float64)
    is_number = ids == model.config.num_token_id
    # As they were written, where the same is written: a number that is not seen takes no place in the noise.
    forms = []
    for place in is_number.nonzero().squeeze(-1).tolist():
        index = place - start - int(is_number[start:place].sum()) * model.config.context.hides if place >= start else -1
        known = forced.forms.get((row, place)) or observed_numbers.get(index)
        forms.append(NumberText.of("", math.nan) if known is None else NumberText.of(known.text, known.value))
    forms = model.processor.ends.fitting(ids.tolist(), values.tolist(), forms)
    text = model.processor.decode(ids, values, forms)
    before = model.processor.decode(ids[:start], values[:start], forms)
    digits: list[int] = []
    kept = [place for place in forced.places[row] if place < len(ids) - start]
    if forced.writer is not None:
        for place in is_number[start:].nonzero().squeeze(-1).tolist():
            whole = forced.writer.tokens_of(row, ids[: start + place].tolist(), values[start + place].item())
            written = range(place + 1, place + 1 + len(whole))
            digits += written
            kept += written if place in kept else ()
    return World(prompt, text[len(before) :], ids[start:], values[start:], tuple(sorted(kept)), tuple(digits))


LEVEL = 0.9
"""What the intervals beside values cover."""


@dataclass(frozen=True)
class WorldNumber:
    """A value in a world's text, its characters start to end (exclusive), and the law that `individual` has there.

    law: None where the value was forced. median, low, high: of the law, [low, high] its central interval of mass `LEVEL`.
    """

    value: float
    start: int
    end: int
    law: NumberPrediction | None = None

    @property
    def median(self) -> float | None:
        return None if self.law is None else self.law.median

    @property
    def low(self) -> float | None:
        return None if self.law is None else self.law.interval(LEVEL)[0]

    @property
    def high(self) -> float | None:
        return None if self.law is None else self.law.interval(LEVEL)[1]

    @property
    def plain(self) -> dict[str, float | None]:
        """As plain data."""
        return {name: getattr(self, name) for name in ("value", "start", "end", "median", "low", "high")}

    def __str__(self) -> str:
        if self.median is None:
            return "set"
        return f"{LEVEL:.0%}: {brief(self.low)} to {brief(self.high)}"


def world_numbers(model: GraftedModel, world: World, individual: Individual) -> list[WorldNumber]:
    """The values of a world in their order, with the intervals of `model.value_predictions`."""
    predictions = value_predictions(model, world, individual)
    before, of_before, _ = encode_text(model, world.prompt, prompt=True)
    ids, values = torch.cat([before, world.tokens]), torch.cat([of_before, world.values])
    first = len(before)

    def characters(count: int) -> int:
        return len(model.processor.decode(ids[:count], numeric_values=values[:count]))

    numbers, origin = [], characters(first)
    for place in (world.tokens == model.config.num_token_id).nonzero().squeeze(-1).tolist():
        end = place + 1
        while end in world.digits:
            end += 1
        span = (characters(first + place) - origin, characters(first + end) - origin)
        numbers.append(WorldNumber(world.values[place].item(), *span, predictions.get(place)))
    return numbers


def word_changes(before: str, after: str) -> list[tuple[str, str]]:
    """`after` aligned with `before`, word by word: ("same" | "gone" | "new", text) pieces in their order."""
    old, new = (re.findall(r"\s*\S+|\s+$", text) for text in (before, after))
    pieces: list[tuple[str, str]] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            pieces.append(("same", "".join(new[c:d])))
            continue
        pieces += [("gone", "".join(old[a:b]))] * (b > a) + [("new", "".join(new[c:d]))] * (d > c)
    return pieces
