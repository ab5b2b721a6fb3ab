"""Generation through transformers' own `generate`: what it needs to carry values and to decide causally.

A value exists before its token does: each forward pass predicts the value that the next token would have if it were
`<NUM>`. `numeric_values` grows by one at every step; on the CPU the value itself is computed only where `<NUM>` was chosen.
"""

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.generation import GenerationMode
from transformers.utils import logging

from causalqwen.decoding import BoundDecoding, CausalDecoding, Integrated, ObservedNumber
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.context import without
from causalqwen.modeling.encoded import NumberText
from causalqwen.modeling.ends import MANY
from causalqwen.modeling.logits_processors import (
    ForceTokens,
    KeepNumbers,
    MaskFreeRows,
    NumberFreeDrafts,
    SamplerBesideNumber,
    ValueLog,
    WriteDigits,
)
from causalqwen.modeling.outputs import CACHE, CausalQwenOutput, GenerateCausalBeamOutput, GenerateCausalOutput
from causalqwen.modeling.scores import ActionNetwork
from causalqwen.parts.copying import Candidates

logger = logging.get_logger(__name__)

_OF_PLANS = ("temperature", "top_k", "top_p", "min_p")
_SAMPLING_ARGUMENTS = {  # and what transformers takes for them where nothing is asked for
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "top_h": None, "p_less": None,
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "num_beams": 1, "penalty_alpha": None, "guidance_scale": None,
}  # fmt: skip


class CausalGenerationMixin(GenerationMixin):
    """Values and causal decisions for `generate`; everything else is transformers'."""

    config: CausalQwenConfig
    action: ActionNetwork
    frozen_vocabulary: Any

    _supported_generation_modes = (
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
        GenerationMode.BEAM_SEARCH,
        GenerationMode.BEAM_SAMPLE,
        GenerationMode.ASSISTED_GENERATION,
    )

    @property
    def _theirs(self) -> Any:
        """transformers' own loops and hooks, which are typed for a `self` of another class."""
        return super()

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        causal_decoding: CausalDecoding | str | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, with numbers, and with `causal_decoding` deciding by individual and noise.

        Without `causal_decoding`: greedy search, every sampler and beam search, on `logits` = loc_S. With it: the
        plan's decisions (theory 3.9); arguments of samplers and beams raise then, except under decision "softmax".

        Args:
            inputs: input_ids int64 [B, L] (or `input_ids=`), padded on the left.
            numeric_values: float64 [B, L] (keyword), values of the numbers in the prompts.
            causal_decoding: a `CausalDecoding`, its seed (one per row) included; or the name of a preset. `temperature`,
                `top_k`, `top_p` and `min_p` given beside it are the plan's own; by a `generation_config` too, where they are
                neither transformers' defaults nor those of the model's own.
            tokenizer: with `stop_strings`; a `CausalQwenProcessor` is what fits. A stop string is matched on text, a
                number is one token: no stop string ends inside one, unless its digits stand in the context.

        Returns:
            ids [B, L']; or, with `causal_decoding` or `return_dict_in_generate`, an output that carries `sequences`
            and `numeric_values`, float64 [B, L'], 0 off `<NUM>`. Generated values have `config.value_digits` digits, and are no
            finer than those that the model was trained on. Where digits stand in the context (theory 2.1), those of a value
            are the tokens after its `<NUM>`. A model that copies (theory 3.8) reads a prompt with numbers twice.

        Raises:
            ValueError: a prompt that fills the context; sampling arguments beside a causal plan; an assistant model.
        """
        with self.frozen_vocabulary():
            return self._generate(inputs, generation_config, *args, causal_decoding=causal_decoding, **kwargs)

    def _generate(
        self,
        inputs: Tensor | None,
        generation_config: GenerationConfig | None,
        *args: Any,
        causal_decoding: Any,
        **kwargs: Any,
    ) -> Any:
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        self._check_arguments(ids, generation_config, kwargs)
        if "tokenizer" in kwargs:
            kwargs["tokenizer"] = getattr(kwargs["tokenizer"], "slotted_tokenizer", kwargs["tokenizer"])
        if hasattr(kwargs.get("streamer"), "begin"):
            kwargs["streamer"].begin(kwargs.get("numeric_values"))
        if causal_decoding is None:
            result = self._theirs.generate(inputs, generation_config, *args, **kwargs)
            self._tell_of_lost_values(result, 0 if ids is None else ids.shape[-1])
            return result

        if isinstance(causal_decoding, str):
            causal_decoding = CausalDecoding.preset(causal_decoding)
        if not isinstance(causal_decoding, CausalDecoding):
            raise ValueError(f"causal_decoding: expected a CausalDecoding or a preset's name, got {causal_decoding!r}")
        settings: dict[str, Any] = {"return_dict_in_generate": True}
        if causal_decoding.decision == "softmax":
            if generation_config is None and kwargs.get("do_sample") is None:
                settings["do_sample"] = True
            if causal_decoding.temperature == 0:
                settings["do_sample"] = False  # what sampling comes to, and everybody's word for the likeliest token
            elif causal_decoding.temperature != 1.0:
                settings["temperature"] = causal_decoding.temperature
        else:
            asked = _asked_of_samplers(kwargs, generation_config, self.generation_config)
            causal_decoding = _with_sampling(causal_decoding, asked)
            # Sampling, for several sequences per prompt; `_get_logits_processor` and `_sample` take the chance out of it.
            settings |= {"do_sample": True, "num_beams": 1}
            kwargs["causal_decoding"] = causal_decoding
            self.config.check_plan(causal_decoding)
        if generation_config is None:
            kwargs |= settings
        else:
            generation_config = copy.deepcopy(generation_config)
            generation_config.update(**settings)
        if causal_decoding.decision != "softmax" or causal_decoding.seed is None:
            return self._theirs.generate(inputs, generation_config, *args, **kwargs)
        if not isinstance(causal_decoding.seed, int):
            raise ValueError("decision='softmax' draws from torch's own generator: give one seed, not one per row")
        device = self.action.b_noise.device
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
            torch.manual_seed(causal_decoding.seed)
            return self._theirs.generate(inputs, generation_config, *args, **kwargs)

    def _tell_of_lost_values(self, result: Any, length: int) -> None:
        """A warning where ids alone are handed over, of numbers that no tokens write."""
        lost = isinstance(result, Tensor) and not self.config.context.writes
        if lost and bool((result[:, length:] == self.config.num_token_id).any()):
            logger.warning_once(
                "the text holds numbers, whose values are not among the ids: generate(..., return_dict_in_generate=True) "
                "returns numeric_values, and the processor writes them"
            )

    def _check_arguments(self, ids: Tensor | None, given: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
        if ids is not None:
            self._check_prompt(ids, kwargs.get("numeric_values"), kwargs.get("attention_mask"))
        if (kwargs.get("prefill_chunk_size") or getattr(given, "prefill_chunk_size", None)) is not None:
            raise ValueError("prefill_chunk_size cuts the prompt but not its values: leave it unset")
        if kwargs.get("inputs_embeds") is not None:
            self.config.require("generating from inputs_embeds")

    def _check_prompt(self, ids: Tensor, numeric_values: Tensor | None, attention_mask: Tensor | None) -> None:
        limit = self.config.context_length
        if ids.shape[-1] == 0:
            raise ValueError("the prompt is empty: give at least one token")
        if limit is not None and ids.shape[-1] >= limit:
            raise ValueError(f"the prompt has {ids.shape[-1]} tokens, but the context of this model holds {limit}")
        if attention_mask is not None and attention_mask.shape == ids.shape and not bool(attention_mask.any(-1).all()):
            empty = int((~attention_mask.bool().any(-1)).nonzero()[0])
            raise ValueError(f"prompt {empty} is empty: give at least one token")
        if numeric_values is None:
            return
        if numeric_values.shape != ids.shape:
            shapes = f"{tuple(numeric_values.shape)}, input_ids {tuple(ids.shape)}"
            raise ValueError(f"numeric_values has the shape {shapes}: they must agree")
        bad = ((ids == self.config.num_token_id) & ~numeric_values.isfinite()).nonzero()
        if len(bad):
            raise ValueError(f"row {bad[0, 0].item()}: the number at position {bad[0, 1].item()} is not finite")

    # ---- hooks of transformers' decoding loops -----------------------------------------------------------------------

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        numeric_values: Tensor | None = None,
        value_log: ValueLog | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """transformers' inputs of one step, with the values that belong to its tokens."""
        is_number = input_ids == self.config.num_token_id
        if value_log is not None:
            value_log.follow_rows(input_ids)
        if self.config.context.hides:
            if value_log is not None:  # rows of beams have changed places, and their numbers with them
                attention_mask[:, value_log.start :] = 1
            seen, kwargs["position_ids"] = without(is_number, attention_mask)
            attention_mask = attention_mask.copy_(seen)  # in place: the steps that follow count on it
        if value_log is not None:
            _, value_log.positions = without(is_number & self.config.context.hides, attention_mask)
            if value_log.last >= 0 and not value_log.at_once:
                # Behind the last token of the text there may be drafts, which hold no number.
                value_log.settle(value_log.last, is_number[:, value_log.last], numeric_values)
        kwargs |= {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        kwargs[CACHE] = past_key_values if cache is None else cache
        model_inputs = self._theirs.prepare_inputs_for_generation(input_ids, **kwargs)
        ids = model_inputs.get("input_ids")
        if ids is not None and numeric_values is not None:
            drafted = input_ids.shape[1] - numeric_values.shape[1]
            numeric_values = nn.functional.pad(numeric_values, (0, drafted)) if drafted else numeric_values
            model_inputs["numeric_values"] = numeric_values[:, -ids.shape[1] :].to(ids.device)
        if value_log is not None:
            model_inputs["scores_only"] = True
        return model_inputs

    def _update_model_kwargs_for_generation(  # type: ignore[override] # outputs of ours, the rest by keyword
        self, outputs: CausalQwenOutput, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        """Make room for the value that the next token has if it is `<NUM>`; the token itself is chosen after this."""
        log, values = model_kwargs.get("value_log"), model_kwargs.get("numeric_values")
        model_kwargs = self._theirs._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        if log is not None:
            # More than one: drafts that were right, and the token after them. transformers 5.17 counts them by a tensor.
            new = int(kwargs.get("num_new_tokens", 1))
            drafted = log.positions.shape[1] - values.shape[1]
            dropped = drafted + 1 - new  # drafts that were wrong
            last = slice(-dropped - 1, -dropped or None)
            log.append(values.shape[1] + new - 1, outputs.features[:, last], log.positions[:, last])
            room = values.new_zeros(len(values), new)
            if log.at_once:
                room[:, -1] = log[log.last]
            log.values = model_kwargs["numeric_values"] = torch.cat([values, room], dim=1)
        return model_kwargs

    def _get_logits_processor(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        """transformers' processors; none of its samplers' under a causal plan, and no row that no token uses."""
        if (kwargs.get("model_kwargs") or {}).get("causal_decoding") is not None:
            generation_config = copy.copy(generation_config)
            generation_config.do_sample = False
        processors = self._theirs._get_logits_processor(generation_config, *args, **kwargs)
        if self.config.free_token_ids:
            processors.insert(0, MaskFreeRows(self.action.vocabulary_mask))
        return processors

    def _sample(  # type: ignore[override] # called by keyword
        self, input_ids: Tensor, logits_processor: Any, generation_config: GenerationConfig, **model_kwargs: Any
    ) -> Any:
        plan, bound = model_kwargs.pop("causal_decoding", None), None
        if plan is not None:
            others = [each for each in logits_processor if not isinstance(each, MaskFreeRows | ForceTokens)]
            every_score = bool(generation_config.output_scores or generation_config.output_logits or others)
            copies = generation_config.num_return_sequences or 1
            bound = model_kwargs["causal_decoding"] = BoundDecoding.bind(
                plan, input_ids.shape[0], self.config.causal_size, input_ids.device, copies, every_score
            )
        chooses = any(getattr(processor, "chooses", False) for processor in logits_processor)
        wanted = MANY if plan is None and (chooses or generation_config.do_sample) else 1
        settings = generation_config, model_kwargs
        log, logits_processor = _start_values(self, input_ids, logits_processor, *settings, bound, wanted=wanted)
        if hasattr(model_kwargs.get("streamer"), "follow"):
            model_kwargs["streamer"].follow(log)
        race = None
        if generation_config.do_sample and (plan is not None or self.config.num_token_appended):
            generation_config = copy.copy(generation_config)
            generation_config.do_sample = False
            if plan is None:
                race = SamplerBesideNumber()
                logits_processor = LogitsProcessorList([*logits_processor, race])
        model_kwargs |= {"logits_processor": logits_processor, "generation_config": generation_config}
        result = self._theirs._sample(input_ids, **model_kwargs)
        if isinstance(result, Tensor):
            return result
        if race is not None and result.scores is not None:
            result.scores = tuple(race.scores[: len(result.scores)])
        return GenerateCausalOutput(**result, numeric_values=self._values_of(result.sequences, log))

    def _assisted_decoding(  # type: ignore[override] # called by keyword
        self, input_ids: Tensor, logits_processor: Any, generation_config: GenerationConfig, **model_kwargs: Any
    ) -> Any:
        """transformers' loop. A draft is checked under the plan itself: draws belong to positions, not to steps."""
        self.config.require("drafting from the text")
        plan, bound = model_kwargs.pop("causal_decoding", None), None
        if model_kwargs.get("assistant_model") is not None:
            raise ValueError("an assistant model cannot read <NUM>: draft from the text, by prompt_lookup_num_tokens")
        if model_kwargs.get("streamer") is not None:
            raise ValueError("a streamer gets drafts before their values: leave it out, or prompt_lookup_num_tokens")
        if plan is None and generation_config.do_sample:
            raise ValueError("drafts are checked against one decision: give a causal plan, or do_sample=False")
        if plan is not None:
            bound = model_kwargs["causal_decoding"] = BoundDecoding.bind(
                plan, input_ids.shape[0], self.config.causal_size, input_ids.device, every_score=True
            )
        log, logits_processor = _start_values(self, input_ids, logits_processor, generation_config, model_kwargs, bound)
        wants_dict, generation_config = generation_config.return_dict_in_generate, copy.copy(generation_config)
        generation_config.do_sample, generation_config.return_dict_in_generate = False, True

        def note(_: Any, __: Any, outputs: CausalQwenOutput) -> None:
            log.drafted = outputs.features

        model: Any = self
        hook = model.register_forward_hook(note)
        model_kwargs |= {"logits_processor": logits_processor, "generation_config": generation_config}
        try:
            result = self._theirs._assisted_decoding(input_ids, **model_kwargs)
        finally:
            hook.remove()
        if not wants_dict:
            return result.sequences
        return GenerateCausalOutput(**result, numeric_values=self._values_of(result.sequences, log))

    def _values_of(self, sequences: Tensor, log: ValueLog) -> Tensor:
        """Values of `sequences`, 0 off `<NUM>`."""
        values = nn.functional.pad(log.values[:, : log.start], (0, sequences.shape[1] - log.start))
        is_number = sequences == self.config.num_token_id
        for place in sorted(log.kept):
            log.settle(place, is_number[:, place], values)
        return values.masked_fill(~is_number, 0.0)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        return NumberFreeDrafts(self._theirs._get_candidate_generator(*args, **kwargs), self.config.num_token_id)

    def _beam_search(  # type: ignore[override] # called by keyword
        self, input_ids: Tensor, logits_processor: Any, generation_config: GenerationConfig, **model_kwargs: Any
    ) -> Any:
        self.config.require("beam search")
        # transformers looks at as many tokens of a row as leave beams to go on with where some have ended.
        beams, ends = generation_config.num_beams, np.size(generation_config.eos_token_id)
        wanted = MANY if generation_config.do_sample else beams * max(2, 1 + ends)
        settings = generation_config, model_kwargs
        log, logits_processor = _start_values(self, input_ids, logits_processor, *settings, at_once=True, wanted=wanted)
        log.beams = beams
        wants_dict, generation_config = generation_config.return_dict_in_generate, copy.copy(generation_config)
        generation_config.return_dict_in_generate = True
        model_kwargs |= {"logits_processor": logits_processor, "generation_config": generation_config}
        result = self._theirs._beam_search(input_ids, **model_kwargs)
        if not wants_dict:
            return result.sequences
        # Step t chose the token of sequence i out of running row beam_indices[i, t], so that row's value is its value.
        rows = result.beam_indices.long().clamp(min=0)
        made = torch.stack([log[log.start + step] for step in range(rows.shape[1])], dim=1)
        copies = generation_config.num_return_sequences or 1
        prompts = log.values[::beams, : log.start].repeat_interleave(copies, dim=0)
        values = torch.cat([prompts, made.gather(0, rows.to(made.device))], dim=1)[:, : result.sequences.shape[1]]
        values = torch.where(result.sequences == self.config.num_token_id, values, 0.0)
        return GenerateCausalBeamOutput(**result, numeric_values=values)


def _asked_of_samplers(kwargs: dict[str, Any], given: GenerationConfig | None, own: GenerationConfig) -> dict[str, Any]:
    """Arguments of samplers and beams that are given by name, which takes a plan's own ones out of kwargs, or by a
    configuration where they are neither transformers' defaults nor the model's own."""
    asked = {}
    for name, usual in _SAMPLING_ARGUMENTS.items():
        by_name = name in kwargs
        value = kwargs[name] if by_name else getattr(given, name, None)
        if by_name and name in _OF_PLANS:
            unasked = kwargs.pop(name) is None
        else:
            unasked = value in (None, usual) or (not by_name and value == getattr(own, name, None))
        if not unasked:
            asked[name] = value
    return asked


def _with_sampling(plan: CausalDecoding, asked: dict[str, Any]) -> CausalDecoding:
    """The plan with what is asked of samplers, as far as that is its own. ValueError for the rest, which it replaces."""
    if wrong := [name for name in asked if not plan.draws or name not in _OF_PLANS]:
        raise ValueError(
            f"{', '.join(wrong)} belong to transformers' samplers and have no meaning under this plan. A plan that draws "
            f"(the preset 'sample': the model's distribution) takes {', '.join(_OF_PLANS)}, the preset 'softmax' all of them"
        )
    return replace(plan, **asked)


def _start_log(
    model: Any, input_ids: Tensor, model_kwargs: dict[str, Any], bound: BoundDecoding | None, at_once: bool | None
) -> ValueLog:
    """An empty log of the values that a loop predicts; the loop's arguments get it, and their own values."""
    if model.config.context.hides:
        hidden = input_ids == model.config.num_token_id
        model_kwargs["attention_mask"], _ = without(hidden, model_kwargs.get("attention_mask"))
    if bound is not None:  # each prompt's last token
        mask = model_kwargs.get("attention_mask")
        lengths = torch.ones_like(input_ids).sum(-1) if mask is None else mask.sum(-1)
        bound.origins = (lengths - 1).clamp(min=0)
    if model_kwargs.get("numeric_values") is None:
        model_kwargs["numeric_values"] = torch.zeros(input_ids.shape, dtype=torch.float64, device=input_ids.device)

    def compute(features: Tensor, positions: Tensor) -> Tensor:
        draws = Integrated() if bound is None else bound.at(positions)
        loc_Y, _ = Chain(model, features, draws).value()
        new = draws.restore_observed_values(model.generated_values(loc_Y[:, -1]), loc_Y)
        return model.said_values(features[:, -1], new, log.offered())

    if at_once is None:  # digits are written by the host
        at_once = input_ids.device.type != "cpu" and not model.config.context.writes
    # What a number may be a copy of is known when the tokens before it are.
    log = ValueLog(compute, model_kwargs["numeric_values"], at_once and not model.copies)
    log.readable = model.number_class is not None or not model.config.class_values
    model_kwargs["value_log"] = log
    if model.copies:
        log.numbers = _numbers_of_prompt(model, input_ids, model_kwargs, bound)
    return log


def _start_values(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    bound: BoundDecoding | None = None,
    *,
    at_once: bool | None = None,
    wanted: int = 1,
) -> tuple[ValueLog, LogitsProcessorList]:
    """Give a loop its values, a log of those it predicts, what keeps them, and what writes their digits.

    wanted: how many of the best tokens a decision may fall on.
    """
    log = _start_log(model, input_ids, model_kwargs, bound, at_once)
    forced = [processor for processor in logits_processor if isinstance(processor, ForceTokens)]

    def number_at(row: int, before: Sequence[int]) -> ObservedNumber | None:
        """The number that is set after the ids `before`, or that stood there in the text of an observed noise."""
        given = [processor.forms[row, len(before)] for processor in forced if (row, len(before)) in processor.forms]
        if given or bound is None or bound.observed is None or len(before) < log.start:
            return (*given, None)[0]
        answer = before[log.start :]
        index = len(answer) - model.config.context.hides * answer.count(model.config.num_token_id)
        return bound.observed[row].numbers.get(index)

    def tokens_of(row: int, before: Sequence[int], value: float) -> list[int]:
        return model.processor.tokens_of(before, value, number_at(row, before))

    def form_of(row: int, before: Sequence[int]) -> NumberText:
        number = number_at(row, before)
        return NumberText.of("", math.nan) if number is None else NumberText.of(number.text, number.value)

    def all_scores(input_ids: Any) -> Tensor:
        assert bound is not None
        before, bound.every_score = bound.every_score, True
        scores = Chain(model, log.follows, bound.at(log.positions[:, -1:])).decision_scores()[:, -1].float()
        bound.every_score = before
        return LogitsProcessorList(others)(input_ids, scores)  # type: ignore[arg-type,return-value] # of another class

    ends_at = generation_config.eos_token_id
    ended = set() if ends_at is None else {*np.ravel(ends_at).tolist(), generation_config.pad_token_id}
    others = [processor for processor in logits_processor if not isinstance(processor, ForceTokens)]
    writer = WriteDigits(model.config.num_token_id, log, tokens_of) if model.config.context.writes else None
    ends = functools.cache(lambda: model.processor.ends)  # a text without numbers needs no processor
    again = None if bound is None or bound.every_score else all_scores
    keeper = KeepNumbers(model.config.num_token_id, ends, log, writer, form_of, wanted, ended, again)
    for processor in forced:
        processor.log, processor.writer, processor.keeper = log, writer, keeper
    before, after = ([keeper], others) if wanted > 1 else (others, [keeper])
    return log, LogitsProcessorList([*before, *after, *forced, *([] if writer is None else [writer])])


def _numbers_of_prompt(
    model: Any, input_ids: Tensor, model_kwargs: dict[str, Any], bound: BoundDecoding | None
) -> Candidates:
    values, mask = model_kwargs["numeric_values"], model_kwargs.get("attention_mask")
    features = torch.zeros((), device=model.device).expand(*input_ids.shape, model.config.hidden_size)
    if bool((input_ids == model.config.num_token_id).any()):
        places = None if mask is None else (mask.long().cumsum(-1) - 1).clamp(min=0)
        voice = None if bound is None else bound.voice
        features = model.features(input_ids, mask, values, voice=voice, position_ids=places).last_hidden_state
    return model.candidates(features, input_ids, values, mask)
