"""A grafted model among vLLM's models: its own decoder below, our heads above."""

import bisect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_pp_group, tensor_model_parallel_all_gather
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, init_vllm_registered_model, maybe_prefix
from vllm.utils.torch_utils import is_quantized_kv_cache, set_default_torch_dtype

from causalqwen.decoding import Draws, Integrated
from causalqwen.files import batches
from causalqwen.modeling import heads
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.context import CONTEXTS
from causalqwen.modeling.ends import MANY, TextEnd, keep_numbers
from causalqwen.modeling.prediction import NumberPrediction, predict_values
from causalqwen.modeling.reader import EVERY, read_numbers
from causalqwen.modeling.scores import Vocabulary
from causalqwen.serving.softmax_sampling import RowSoftmaxSampler
from causalqwen_vllm.client import processor_of
from causalqwen_vllm.request_options import FOLLOWER, ONE_ENGINE, TOKENS_ALONE
from causalqwen_vllm.requests import Company, Request, Step, companies, offered
from causalqwen_vllm.table import RequestTable, RowFollower
from causalqwen_vllm.vocabulary import VocabularyMatrix
from vllm import envs

BACKBONES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""transformers' model types and vLLM's classes for them."""
GRAPHS_OF_PARTS = "set cudagraph_mode='PIECEWISE'"
LAWS_AT_ONCE = 64
"""Each has the features of all numbers before it beside it, where the model copies."""


class CausalQwenForCausalLM(heads.GraftModules, nn.Module, SupportsLoRA, SupportsPP):
    """`causalqwen.CausalQwenForCausalLM` over vLLM's decoder; the same checkpoint, the same decisions, the same values.

    Each step: `forward` embeds the tokens of all rows, a `<NUM>` with its value; `compute_logits` returns scores whose argmax
    is what each row's plan decides. A generated number's value is computed when its token is fed, or asked for at the end.
    Where digits stand in the context, they are decided with it; a `<NUM>` that the backbone does not see never enters vLLM's
    sequence: its first digit is decided in its stead.

    The decoder's layers may lie on several ranks, of which the last decides. Where values are read from the whole backbone
    (`read_backbone`), `forward` returns states of its layers after z, and the means of the cache are read in a step that
    decides a number, or whose distribution is asked for, and in no other.
    """

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.": "backbone.model."})
    """Adapters and quantization may name the layers as the backbone does that was grafted."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        refuse_settings(vllm_config)
        self.config = config
        # The older runner's table, by which the model itself finds what a step reads. `GraftState` gives V2's, and tells.
        self.table: RequestTable | None = RowFollower.of_engine.get(vllm_config.instance_id)
        self._finds_steps = self.table is not None
        self.processor = processor_of(vllm_config.model_config.model, config.context)
        self.backbone = init_vllm_registered_model(
            vllm_config=vllm_config,
            prefix=maybe_prefix(prefix, "backbone"),
            hf_config=config.text_config,
            architectures=[BACKBONES[config.text_config.model_type]],
        )
        self.backbone.embedding_modules = {}  # an adapter of the vocabulary would not reach the heads
        self._whole = config.hidden_size + sum((config.value_kernel or {"blocks": []})["blocks"])
        if config.value_kernel is not None:
            layers = range(config.text_config.num_hidden_layers - EVERY, 0, -EVERY)
            self.backbone.set_aux_hidden_state_layers(tuple(layers))
        self.make_empty_intermediate_tensors = self.backbone.make_empty_intermediate_tensors
        self.decides = get_pp_group().is_last_rank
        if self.decides and not isinstance(self.backbone.lm_head.quant_method, UnquantizedEmbeddingMethod):
            raise ValueError(
                "a grafted model reads the vocabulary matrix itself: leave lm_head out of what is quantized"
            )
        with set_default_torch_dtype(torch.float32):
            for name, module in heads.make_heads(config).items():
                self.add_module(name, module)
        for part in (self.abduction.loc_net, self.score_head):
            if part is not None:
                part.to(vllm_config.model_config.dtype)
        self._step: Step | None = None
        self._decided: Step | None = None
        self._companies: tuple[int, list[tuple[list[int], Company | None]]] = (-1, [])

    @staticmethod
    def get_model_state_cls() -> type:
        """What model runner V2 keeps beside the model."""
        from causalqwen_vllm.state import GraftState

        return GraftState

    def vocabulary(self) -> Vocabulary:
        """Weights stand still from when they are loaded: one for ever."""
        if self._standing is None:
            layer = VocabularyMatrix(self.backbone.lm_head, self.config.text_config.vocab_size)
            self._standing = Vocabulary(self.action, layer if self.score_head is None else self.score_head, served=True)
        return self._standing

    _standing: Vocabulary | None = None
    _free: Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self._standing = None
        return AutoWeightsLoader(self).load_weights(weights)

    # ---- numbers in --------------------------------------------------------------------------------------------------

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.backbone.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Features [N, H] of the N tokens of all rows, one row after the other, with states of layers after them where these
        are read; on a rank that does not decide, what vLLM's decoder hands to the next one."""
        if self._finds_steps:
            self.begin(self._found_step(input_ids, positions), input_ids)
        step, values = self._step, None
        if step is not None and not self.config.context.hides:
            values = self._values(step, input_ids, positions)
        if self.config.context.hides:
            embeddings = None  # plain tokens: the backbone embeds them itself
        elif values is None:
            embeddings = self.embed_input_ids(input_ids.clamp(max=self.config.text_config.vocab_size - 1))
        else:
            embeddings = self.numeric_embedding(input_ids, values, self.embed_input_ids)
        features = self.backbone(input_ids, positions, intermediate_tensors, embeddings)
        if isinstance(features, tuple):
            features = torch.cat([features[0], *reversed(features[1])], dim=-1)
        if step is not None and self.decides:
            step.read(features[:, : self.config.hidden_size])
        return features

    def begin(self, step: Step | None, input_ids: Tensor) -> None:
        """Note the step that vLLM runs next, which reads the tokens [N]; None while vLLM warms up."""
        self._step = step
        if step is not None:
            step.feed(input_ids)

    def _found_step(self, input_ids: Tensor, positions: Tensor) -> Step | None:
        """The step of the rows in the table, as the older runner leaves it to be found; None while vLLM warms up."""
        assert self.table is not None, "the older runner's is there before the model"
        requests, metadata = self.table.requests, get_forward_context().attn_metadata
        if not requests or metadata is None:  # vLLM warms up
            return None
        starts = list(range(len(requests) + 1))
        if len(input_ids) > len(requests):
            starts = next(iter(metadata.values())).query_start_loc[: len(starts)].tolist()
        places = positions.tolist()
        return Step.of(requests, starts, [places[start] for start in starts[:-1]], positions, metadata)

    def _values(self, step: Step, input_ids: Tensor, positions: Tensor) -> Tensor | None:
        """float64 [N], the values of the numbers among the tokens; those that lack one are decided first. None without any."""
        is_number = input_ids == self.config.num_token_id
        is_number[step.starts[-1] :] = False
        if not is_number.any():
            return None
        at_numbers = is_number.nonzero().flatten().tolist()
        rows = [bisect.bisect_right(step.starts, index) - 1 for index in at_numbers]
        places = [
            (step.requests[row], step.first[row] + index - step.starts[row])
            for row, index in zip(rows, at_numbers, strict=True)
        ]
        self._write([request for request, place in places if request.lacks(place)])
        for request, place in places:
            request.say(place)
        values = torch.zeros(len(input_ids), dtype=torch.float64, device=input_ids.device)
        values[at_numbers] = values.new_tensor([request.value(place) for request, place in places])
        return values

    def _write(self, requests: list[Request]) -> None:
        """Decide the numbers that stand where each of the requests went on last."""
        for request, value in zip(requests, self._values_of(requests), strict=True):
            request.write(value)

    def _values_of(self, requests: list[Request]) -> list[float]:
        """The value that each of the requests has where it went on last, if a number stands there, from what it follows."""
        self._read_whole(requests)
        found: dict[int, float] = {}
        for rows, company in companies(requests):
            chosen = [requests[row] for row in rows]
            features = torch.stack([request.pending[1] for request in chosen]).unsqueeze(1)
            at = torch.tensor([[request.pending[0] - 1] for request in chosen], device=features.device)
            loc_Y, _ = Chain(self, features, _draws(company, at)).value()
            of_class: dict[str | None, list[int]] = {}
            for row, request in enumerate(chosen):
                of_class.setdefault(request.options.number_class, []).append(row)
            for name, of_one in of_class.items():
                self.number_class = name
                numbers = offered([(chosen[row], chosen[row].pending[0]) for row in of_one])
                values = self.said_values(features[of_one, -1], self.generated_values(loc_Y[of_one, -1]), numbers)
                found |= zip((rows[row] for row in of_one), values.tolist(), strict=True)
        return [found[row] for row in range(len(requests))]

    def _read_whole(self, requests: Sequence[Request]) -> None:
        """Put what else the whole backbone gives after the features of what each of the requests decided in this step, where
        numbers are read from it: see `read_backbone`."""
        for request in requests:
            assert request.pending is not None and self._decided is not None, "a number follows from something"
            features = request.pending[1]
            if len(features) < self._whole:
                z, means = features[: self.config.hidden_size], self._means(self._decided)
                ids = torch.tensor([request.ids[: request.pending[0]]], device=z.device)
                numbers = read_numbers(ids, ids[:, None] >= 0, self.processor.digits(z.device))
                further = means[self._decided.requests.index(request)], *(block[0, 0] for block in numbers)
                request.widen(torch.cat([z, features, *further]))

    def _means(self, step: Step) -> Tensor:
        """[B, heads x D of all layers], the mean of the cached values over what each row's last token sees: what a query of
        zeros reads, however a backend lays its cache out. All rows at once, once in a step."""
        if step.means is None:
            at, means = torch.tensor(step.starts[1:], device=step.last.device) - 1, []
            for layer in self.backbone.model.layers:
                attention = layer.self_attn.attn
                metadata = step.attention[attention.layer_name]
                query = self.backbone.lm_head.weight.new_zeros(
                    metadata.num_actual_tokens, attention.num_heads, attention.head_size
                )
                cache, output = attention.kv_cache, torch.empty_like(query)
                attention.impl.forward(attention, query, None, None, cache, metadata, output=output)
                of_queries = tensor_model_parallel_all_gather(output[at].flatten(1))
                heads = of_queries.view(len(at), layer.self_attn.total_num_kv_heads, -1, attention.head_size)
                means.append(heads[:, :, 0].flatten(1))
            step.means = torch.cat(means, dim=-1)
        return step.means

    @torch.inference_mode()
    def numbers_of(self, asked: Sequence[tuple[Request, int]]) -> list[dict[int, tuple[float, NumberPrediction]]]:
        """By place, from a place of each request on: the value that was written, and the distribution that it came from with
        every draw integrated out. Whether the last place holds a number is for the caller to know."""
        found = [(request, request.may_be_numbers(since, self._whole)) for request, since in asked]
        lacking = (request for request, followed in found if any(map(request.lacks, followed)))
        for part in batches(lacking, LAWS_AT_ONCE):
            self._write(part)
        places = [(request, place, features) for request, of in found for place, features in of.items()]
        laws = iter(self.laws_of(places))
        return [{place: (request.values[place], next(laws)) for place in of} for request, of in found]

    @torch.inference_mode()
    def laws_of(self, places: Sequence[tuple[Request, int, Tensor]]) -> list[NumberPrediction]:
        """The distribution of a number at each place of a request, from the features [H] that it follows from; of one
        individual and class many are made at once."""
        alike: dict[tuple[int, str | None], list[int]] = {}
        for row, (request, _, _) in enumerate(places):
            alike.setdefault((id(request.options.individual), request.options.number_class), []).append(row)
        laws: dict[int, NumberPrediction] = {}
        for (_, self.number_class), of_one in alike.items():
            for rows in batches(of_one, LAWS_AT_ONCE):
                requests, at, features = zip(*map(places.__getitem__, rows), strict=True)
                numbers = offered(list(zip(requests, at, strict=True)))
                found = predict_values(self, torch.stack(features), requests[0].options.individual, numbers)
                laws |= zip(rows, found, strict=True)
        return [laws[row] for row in range(len(places))]

    # ---- decisions out -----------------------------------------------------------------------------------------------

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Scores [B, V'] whose argmax is the decision, from the features [B, H] of each row's last token."""
        features = hidden_states.unsqueeze(1)
        step, self._step = self._step, None
        if step is None:
            return Chain(self, features).loc_S[:, 0]
        self._decided = step
        if not step.is_read:  # a CUDA graph of the whole decoder ran, for rows of one token, and no line of `forward`
            step.read(hidden_states[:, : self.config.hidden_size])
        requests, places, last = step.requests, step.places, step.last
        is_open = [
            request.decide(place, of_row)
            for request, place, of_row in zip(requests, places, hidden_states, strict=True)
        ]
        rows = self._undecided(requests, places)
        asked = [requests[row] for row in rows]
        if len(rows) < len(requests):
            features, last = features[rows], last[rows]
        at, may_be = [places[row] for row in rows], [is_open[row] for row in rows]
        scores = self._scores_of_groups(asked, at, features, last)
        if self.value_kernel is not None:
            best = (scores[:, self.config.num_token_id] >= scores.amax(-1)).tolist()
            announced = zip(asked, may_be, best, strict=True)
            self._read_whole([request for request, of, number in announced if of and (number or request.options.laws)])
        if self.config.context.hides:
            self._announce(asked, at, may_be, scores)
        return self._with_digits(requests, places, rows, scores) if self.config.context.writes else scores

    def _undecided(self, requests: list[Request], places: list[int]) -> list[int]:
        """The rows whose token is not known to be a digit of a number, once the digits of a number that was fed last are
        written. The others need nothing of the vocabulary."""
        if not self.config.context.writes:
            return list(range(len(requests)))
        for request, place in zip(requests, places, strict=True):
            if request.ids[place - 1] == self.config.num_token_id:
                self._write_digits(request, place - 1, place)
        return [row for row, place in enumerate(places) if place not in requests[row].digits]

    def _announce(self, requests: list[Request], places: list[int], is_open: list[bool], scores: Tensor) -> None:
        """Where `<NUM>` is decided, decide the number and its digits; take `<NUM>` away from scores [B, V'], in place."""
        number = self.config.num_token_id
        own = scores[:, number].clone()
        scores[:, number] = -torch.inf
        best = scores.amax(-1)  # a tenth of argmax's time on a CPU
        chosen, is_tied = torch.stack([own > best, own == best]).tolist()  # one wait for a GPU
        if tied := [row for row, is_so in enumerate(is_tied) if is_so]:  # as bfloat16 often is
            for row, first in zip(tied, scores[tied].argmax(-1).tolist(), strict=True):
                chosen[row] = number < first
        announced = [
            (request, place)
            for request, place, is_number, may_be in zip(requests, places, chosen, is_open, strict=True)
            if is_number and may_be
        ]
        self._write([request for request, _ in announced])
        for request, place in announced:
            request.say(place)
            self._write_digits(request, place, place)

    def _with_digits(self, requests: list[Request], places: list[int], rows: list[int], scores: Tensor) -> Tensor:
        """[B, V'] from the scores of these rows: where a number's digit stands, that alone can be the best."""
        if len(rows) < len(requests):
            of_rows, scores = scores, scores.new_empty(len(requests), self.config.vocab_size)
            scores[rows] = of_rows
        known = {
            row: request.digits[place]
            for row, (request, place) in enumerate(zip(requests, places, strict=True))
            if place in request.digits
        }
        if known:
            scores[list(known)] = -torch.inf
            scores[list(known), list(known.values())] = 0.0
        return scores

    def _write_digits(self, request: Request, number: int, place: int) -> None:
        """The digits of the number at `number` stand from `place` on."""
        request.write_digits(place, self.processor.tokens_of(request.ids[:number], request.value(number)))

    def _scores_of_groups(self, requests: list[Request], places: list[int], features: Tensor, last: Tensor) -> Tensor:
        """[B, V'], each row's under its plan, of the tokens at these places."""
        groups = self._grouped(requests)
        if len(groups) == 1:
            return self._scores(requests, places, groups[0][1], features, last)
        result = features.new_empty(len(requests), self.config.vocab_size, dtype=torch.float32)
        for rows, company in groups:
            chosen, at = [requests[row] for row in rows], [places[row] for row in rows]
            result[rows] = self._scores(chosen, at, company, features[rows], last[rows]).float()
        return result

    def _grouped(self, requests: list[Request]) -> list[tuple[list[int], Company | None]]:
        if len(requests) < len(self.table.requests):
            return companies(requests)
        if self._companies[0] != self.table.version:
            self._companies = self.table.version, companies(requests)
        return self._companies[1]

    def _scores(
        self, requests: list[Request], places: list[int], company: Company | None, features: Tensor, last: Tensor
    ) -> Tensor:
        """[B, V'] from features [B, 1, H] and the positions [B] of the tokens that they belong to."""
        options = [request.options for request in requests]
        is_sampled = company is None and any(each.plan.temperature > 0 for each in options)

        def ranked(every: bool = False) -> Tensor:
            if company is not None:
                company.every_score = every
            scores = Chain(self, features, _draws(company, last.unsqueeze(1))).decision_scores()[:, 0]
            if self._free is None:  # kept where the scores are: a list would go there at every step
                self._free = torch.tensor(self.config.free_token_ids, dtype=torch.int64, device=scores.device)
            return scores.index_fill_(1, self._free, -torch.inf) if len(self._free) else scores

        texts = [request.text(place) for request, place in zip(requests, places, strict=True)]
        numbers = {row for row, (_, _, place) in enumerate(texts) if place is not None}

        def value_of(row: int) -> float | None:
            request, place = requests[row], places[row]
            is_open = request.pending is not None and request.pending[0] == place
            return self._values_of([request])[0] if is_open else None

        scores = keep_numbers(
            ranked(),
            self.config.num_token_id,
            MANY if is_sampled else 1,
            numbers,
            lambda row: TextEnd(self.processor.ends, *texts[row]),
            value_of,
            None if company is None else partial(ranked, True),
        )
        if not is_sampled:
            return scores
        temperatures, top_ps = [each.plan.temperature for each in options], [each.top_p for each in options]
        seeds = [each.seed for each in options]
        lengths = [place + request.hidden_before(place) for request, place in zip(requests, places, strict=True)]
        sampler = RowSoftmaxSampler(seeds, temperatures, top_ps, lengths, 1, scores.device)
        return sampler(last.unsqueeze(1), scores)


def _draws(company: Company | None, positions: Tensor) -> Draws:
    return Integrated() if company is None else company.at(positions)


def refuse_settings(config: VllmConfig) -> None:
    """ValueError for engine settings under which a number could be wrong or lost."""
    graft, parallel, compilation = config.model_config.hf_config, config.parallel_config, config.compilation_config
    graft.require("vLLM")
    kind = graft.text_config.model_type
    wrong = {
        f"the backbone {kind!r}: only {', '.join(BACKBONES)} are served": kind not in BACKBONES,
        "the plug-in follows no requests: open the engine by `causalqwen_vllm.load`, or with logits_processors=["
        "'causalqwen_vllm.table:RowFollower']": FOLLOWER not in (config.model_config.logits_processors or ()),
        TOKENS_ALONE: config.cache_config.enable_prefix_caching and not graft.by_tokens_alone,
        "numbers are read from the whole backbone's cache on the rank that decides: leave pipeline_parallel_size at 1 and "
        "kv_cache_dtype at 'auto', under a backbone whose attention has no window": (
            graft.value_kernel is not None
            and (
                parallel.pipeline_parallel_size > 1
                or is_quantized_kv_cache(config.cache_config.cache_dtype)
                or "sliding_attention" in (getattr(graft.text_config, "layer_types", None) or ())
            )
        ),
        "the last rank of a pipeline decides numbers that the first would have to embed: train with "
        f"{CONTEXTS['digits']}": parallel.pipeline_parallel_size > 1 and not graft.context.hides,
        ONE_ENGINE: (
            parallel.prefill_context_parallel_size > 1
            or parallel.decode_context_parallel_size > 1
            or parallel.data_parallel_size > 1
        ),
        "a cache taken from another engine comes without the values in it: leave kv_transfer_config unset": (
            config.kv_transfer_config is not None
        ),
        "a drafted token has no decision of the plug-in's, and beside speculative decoding vLLM's first runner has no place "
        "for the logits processor that follows requests: leave speculative_config unset": config.speculative_config
        is not None,
        f"a CUDA graph of the whole decoder leaves out the values of numbers: {GRAPHS_OF_PARTS}, or train with "
        f"{CONTEXTS['digits']}": compilation.cudagraph_mode.has_full_cudagraphs() and not graft.context.hides,
        "vLLM's older model runner, which runs here, does not say what a CUDA graph of the whole decoder reads: "
        f"{GRAPHS_OF_PARTS}": compilation.cudagraph_mode.has_full_cudagraphs() and not config.use_v2_model_runner,
        "a CUDA graph of a prompt would freeze what is read of it: set cudagraph_mode='FULL_AND_PIECEWISE'": (
            compilation.cudagraph_mode == CUDAGraphMode.FULL and graft.context.hides and config.use_v2_model_runner
        ),
        "what breaks a CUDA graph inside the model freezes what lies between: leave VLLM_USE_BREAKABLE_CUDAGRAPH unset": (
            compilation.cudagraph_mode != CUDAGraphMode.NONE and envs.VLLM_USE_BREAKABLE_CUDAGRAPH
        ),
        "a CUDA graph reads its input where it lay when it was captured: set cudagraph_copy_inputs=True": (
            compilation.cudagraph_mode != CUDAGraphMode.NONE and not compilation.cudagraph_copy_inputs
        ),
    }
    if reasons := [text for text, is_wrong in wrong.items() if is_wrong]:
        raise ValueError("a grafted model cannot be served this way: " + "; ".join(reasons))
