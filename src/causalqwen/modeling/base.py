"""`GraftedModel`: a pretrained decoder with a number channel and an individual grafted onto it: what a text is read with, what
follows it, and how both are saved. What else can be asked of one, `modeling.model` adds."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.initialization import guard_torch_init_functions
from transformers.utils import can_return_tuple, logging

from causalqwen.decoding import BoundDecoding, CausalDecoding, Draws, Integrated
from causalqwen.files import write_sums, writing_tensors
from causalqwen.losses import shift_targets
from causalqwen.modeling import card
from causalqwen.modeling import heads as laws
from causalqwen.modeling import remote_code as remote_code_file
from causalqwen.modeling.abduction import AbductionNetwork
from causalqwen.modeling.backbones import align_parameters
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.context import check_one_sequence, without
from causalqwen.modeling.embedding import GatedFeatures, NumericEmbedding
from causalqwen.modeling.generation import CausalGenerationMixin
from causalqwen.modeling.layer_shift import speaking
from causalqwen.modeling.outputs import CACHE, CausalQwenOutput
from causalqwen.modeling.processor import CausalQwenProcessor
from causalqwen.modeling.reader import read_backbone, read_numbers, seen_by_each, tokens_of
from causalqwen.modeling.scores import ActionNetwork
from causalqwen.numbers import ValueLaw
from causalqwen.numbers.law import ClassLaws
from causalqwen.parts.branch import ValueBranch
from causalqwen.parts.perceptron import ResidualPerceptron

logger = logging.get_logger(__name__)

_WHERE = ("token", "revision", "cache_dir", "local_files_only")


class GraftedModel(PreTrainedModel, laws.GraftModules, CausalGenerationMixin):
    """Embedding with numbers -> backbone -> abduction -> action (theory 2.1 to 2.5)."""

    config: CausalQwenConfig
    bf16: bool = False
    """Whether `features` takes the backbone's products in bfloat16 (autocast), whatever its dtype. Not part of a checkpoint."""
    reads_backbone: list[int] | None = None
    """Set while a `value_kernel` is fitted, to its blocks: `features` then tell what the whole backbone tells. Not kept."""

    # what transformers has to know
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012
    _keep_in_fp32_modules_strict = laws.IN_FLOAT32

    @torch.no_grad()
    def _initialize_missing_keys(self, *args: Any, **kwargs: Any) -> None:
        super()._initialize_missing_keys(*args, **kwargs)
        # transformers passes over custom modules without parameters of their own, whatever their children lack.
        with guard_torch_init_functions():  # what was loaded stays
            for module in self.modules():
                if isinstance(module, AbductionNetwork | ResidualPerceptron):
                    module.reset_parameters()

    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, laws.OWN_STARTS):
            module.reset_parameters()
        if isinstance(module, ActionNetwork):
            module.reset_buffers()
        if isinstance(module, NumericEmbedding):
            torch.nn.init.zeros_(module.row)
            length = self.config.initial_direction
            torch.nn.init.normal_(module.direction, std=length * self.config.hidden_size**-0.5)
            if self.config.normalize_direction:
                module.direction.mul_(length / module.direction.norm())
        if isinstance(module, GatedFeatures):
            torch.nn.init.zeros_(module.gate_bias)
        if isinstance(module, ValueBranch):
            module.log_noise.zero_()
            module.feature_mean.zero_()
            module.feature_std.fill_(1.0)

    def __init__(self, config: CausalQwenConfig, backbone: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        self.backbone = AutoModelForCausalLM.from_config(config.text_config) if backbone is None else backbone
        for name, module in laws.make_heads(config).items():
            self.add_module(name, module)
        self._processor: CausalQwenProcessor | None = None
        self.loaded_from: dict[str, Any] | None = None
        self.trained_on: dict[str, Any] | None = None
        self.post_init()

    @property
    def processor(self) -> CausalQwenProcessor:
        """The processor that belongs to this model; read from its folder when it is first asked for."""
        if self._processor is None:
            try:
                self._processor = CausalQwenProcessor.from_pretrained(self.name_or_path)
            except AttributeError as error:  # which torch would tell as one of this property's
                raise ValueError(f"the processor in {self.name_or_path} is damaged: {error}") from error
            self._processor.context = self.config.context  # which may have been set anew on loading
        return self._processor

    @processor.setter
    def processor(self, processor: CausalQwenProcessor) -> None:
        self._processor = processor

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """transformers' `from_pretrained`; outputs are those of the saved model, bit for bit."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.loaded_from = {"source": model.name_or_path} | {key: kwargs[key] for key in _WHERE if key in kwargs}
        align_parameters(model)
        return loaded

    def save_pretrained(self, save_directory: Any, *, remote_code: bool = False, **kwargs: Any) -> None:  # type: ignore[override] # given by keyword
        """transformers' `save_pretrained` (safetensors); beside the weights the processor, a card (`modeling.card`) and
        checksums (`files.SUMS`), which `causalqwen doctor --scan` holds the files against.

        Args:
            remote_code: also a file of one import, by which transformers finds this library with `trust_remote_code=True` where
                no code imports it (`modeling.remote_code`).

        Raises:
            ValueError: a configuration that was set to what there is not; `push_to_hub`, which is a method of its own.
            OSError: a full disk.
        """
        laws.check_made(self)
        if kwargs.get("push_to_hub"):
            raise ValueError("push_to_hub: save_pretrained only saves; upload with model.push_to_hub(repo_id)")
        if self._processor is None and os.path.isfile(os.path.join(self.name_or_path, "processor_config.json")):
            _ = self.processor  # before anything is written: it may lie where the model is saved to
        beside = card.Beside.of(self)
        with writing_tensors(save_directory):
            super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            folder = Path(save_directory)
            if self._processor is not None:
                self._processor.save_pretrained(folder)
            if remote_code:
                remote_code_file.write(folder)
            beside.write(folder, self.config)
            write_sums(folder)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:  # type: ignore[override] # those of `card.upload`
        """Upload weights, processor and card to a repository of the hub: see `card.upload`."""
        return card.upload(self, repo_id, **kwargs)

    # ---- parts of the backbone ---------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        """The layer whose rows are W_cls of the action law: the backbone's lm_head, or `score_head` of its own."""
        return self.backbone.get_output_embeddings() if self.score_head is None else self.score_head

    def set_output_embeddings(self, new_embeddings: torch.nn.Module) -> None:
        self.backbone.set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> torch.nn.Module:  # type: ignore[override] # refused
        raise ValueError(
            "a grafted model never resizes its vocabulary matrix: that changes logits in their last bits. "
            "<NUM> has rows of its own"
        )

    def features(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        numeric_values: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        voice: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The backbone's own output on numerically aware embeddings; z is its `last_hidden_state` [B, S, H], with r after it,
        [B, S, H + R], where numbers are read from the whole backbone (`read_backbone`).

        What it sees is described by `seen`, and the names of a cache by `forward`. Where `bf16` is set, its matrix products are
        taken in bfloat16 (autocast). voice: the speaker's, [L, H], or one for each row, [B, L, H]: see `layer_shift.speaking`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        named, positions = [kwargs.pop(name, None) for name in ("cache", "past_key_values")], kwargs.get("position_ids")
        cache = next((given for given in named if given is not None), None)
        if attention_mask is None and cache is None and positions is not None:
            check_one_sequence(positions)
        attention_mask, kwargs["position_ids"] = self.seen(input_ids, attention_mask, positions, cache)
        if cache is not None:
            kwargs[CACHE] = cache
        if inputs_embeds is None:
            inputs_embeds = self.numeric_embedding(input_ids, numeric_values, self.get_input_embeddings())
        given = {"inputs_embeds": inputs_embeds, "attention_mask": attention_mask, "return_dict": True, **kwargs}
        whole = self.reads_backbone is not None or self.value_kernel is not None
        if whole:
            given |= {"output_hidden_states": True, "use_cache": True}
        spoken = nullcontext() if voice is None else speaking(self.backbone, voice)
        with spoken, torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            outputs = self.backbone.base_model(**given)
        hidden = outputs.last_hidden_state.to(self.dtype) if self.bf16 else outputs.last_hidden_state
        if input_ids is not None:
            hidden = self.numeric_embedding.gate(hidden, input_ids, numeric_values)
        if whole:
            if outputs.get(CACHE) is None:
                raise ValueError(
                    "numbers are read from the cache, which gradient checkpointing does without: model.eval()"
                )
            ids = hidden.new_full(hidden.shape[:2], -1, dtype=torch.int64) if input_ids is None else input_ids
            ids = tokens_of(outputs[CACHE], ids)
            values = [layer.values for layer in outputs[CACHE].layers[:-1]]
            sees = seen_by_each(hidden, ids.shape[1], attention_mask)
            blocks = read_backbone([*outputs.hidden_states[1:-1], hidden], values, sees)
            numbers = read_numbers(ids, sees, self.processor.digits(ids.device))
            hidden = torch.cat([hidden, *(block.to(hidden.dtype) for block in blocks), *numbers], dim=-1)
            if not kwargs.get("output_hidden_states"):
                outputs.hidden_states = None
            if kwargs.get("use_cache") is False:
                outputs[CACHE] = None
        outputs.last_hidden_state = hidden
        return outputs

    def seen(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Attention mask and position_ids as the backbone gets them: as they are, but for a context that hides `<NUM>`.

        There the mask is 0 at each `<NUM>` of input_ids, and position_ids do not count it: they follow from the mask, or,
        where they are given, lose what is hidden before them. A mask that is 0 at each `<NUM>` already says that they do not
        count it any more. Beside a cache the mask [B, L] must be given, and must be 0 at each `<NUM>` before input_ids;
        `generate` sees to it. A mask that was made for attention already ([B, 1, S, L], or one per kind of layer), as static
        caches bring it, is taken as it is.
        """
        made = attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2)
        if not self.config.context.hides or input_ids is None or made:
            return attention_mask, position_ids
        cached = _length(cache) > 0
        if attention_mask is None and cached:
            raise ValueError(f"{self.config.context} needs attention_mask beside a cache, 0 at each <NUM> in it")
        hidden = input_ids == self.config.num_token_id
        if not cached and not bool(hidden.any()):
            return attention_mask, position_ids
        if position_ids is not None:
            position_ids = position_ids.expand(len(input_ids), -1)
            if attention_mask is not None:  # of `generate`, as a rule, which has hidden them
                here = attention_mask[:, -input_ids.shape[1] :].bool()
                if not bool((here & hidden).any()):
                    return attention_mask, position_ids
        mask, counted = without(hidden, attention_mask)
        if position_ids is None:
            return mask, counted[:, -input_ids.shape[1] :]
        return mask, (position_ids - hidden.long().cumsum(-1)).clamp(min=0)

    # ---- forward -----------------------------------------------------------------------------------------------------

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        numeric_values: Tensor | None = None,
        labels: Tensor | None = None,
        numeric_labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_ovr: bool = False,
        skip_logits: bool = False,
        scores_only: bool = False,
        causal_decoding: CausalDecoding | BoundDecoding | None = None,
        also_right: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        num_numbers_in_batch: Tensor | int | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalQwenOutput:
        """Laws of the next token's scores and of the next value at every position.

        Args:
            input_ids: int64 [B, S]; attention_mask: [B, S]; position_ids: as for the backbone.
            numeric_values: float64 [B, S], in the data's units, read where input_ids is `<NUM>`.
            labels: int64 [B, S], unshifted, -100 for no loss. also_right: int64 [B, S, R], further right tokens beside each
                label, -1 where there are fewer, `<NUM>` not among them: see `ovr_loss`.
            numeric_labels: float64 [B, S], unshifted; `numeric_values` by default. NaN where a value is unknown.
            logits_to_keep: positions from the end to compute heads for (0: all), or their indices.
            output_ovr: also return scale_S, ovr_probs and decisions.
            skip_logits: do not form the [B, S, V'] scores at all; the loss then comes from blocks of the vocabulary.
            scores_only: compute `logits` alone; under a plan, the scores that it decides by: see `Chain.decision_scores`.
            causal_decoding: draws of a plan: logits, values and decisions are those of the drawn individuals.
            num_items_in_batch, num_numbers_in_batch: counts over the whole accumulated batch that the two losses are
                divided by; this batch's own by default. With the first alone, as transformers' Trainer counts, both are divided
                by it: see `total_loss`.
            cache: keys and values of the tokens before these. past_key_values: its name before transformers 5.24.
        """
        cache = past_key_values if cache is None else cache
        seen, places = attention_mask, position_ids
        if not isinstance(causal_decoding, CausalDecoding | BoundDecoding | None):
            raise ValueError(f"causal_decoding: expected a CausalDecoding, got {causal_decoding!r}")
        if isinstance(causal_decoding, CausalDecoding):
            self.config.check_plan(causal_decoding)
            given: Any = input_ids if inputs_embeds is None else inputs_embeds
            causal_decoding = BoundDecoding.bind(
                causal_decoding, len(given), self.config.causal_size, given.device, every_score=True
            )
        if causal_decoding is not None:
            seen, places = self.seen(input_ids, attention_mask, position_ids, cache)
        outputs = self.features(
            input_ids,
            attention_mask,
            numeric_values,
            inputs_embeds,
            None if causal_decoding is None else causal_decoding.voice,
            position_ids=position_ids,
            cache=cache,
            use_cache=getattr(self.config, "use_cache", None) if use_cache is None else use_cache,
            **kwargs,
        )
        kept = kept_positions(logits_to_keep)
        features = outputs.last_hidden_state[:, kept]
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("a loss needs every position: leave logits_to_keep at 0 where labels are given")
        draws: Draws = Integrated()
        if causal_decoding is not None:
            positions = token_positions(outputs.last_hidden_state, seen, places, cache)
            draws = causal_decoding.at(positions[:, kept])
        if scores_only:
            result = CausalQwenOutput(logits=Chain(self, features, draws).decision_scores(), features=features)
        else:
            masks, candidates = None, None
            if labels is not None:
                flat = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 else None
                values = numeric_values if numeric_labels is None else numeric_labels
                masks = shift_targets(labels, values, flat, self.config.num_token_id)
                masks.also_right = None if also_right is None else also_right[:, 1:]
                masks.num_items, masks.num_numbers = num_items_in_batch, num_numbers_in_batch
                if input_ids is not None:
                    candidates = self.candidates(features, input_ids, numeric_values, attention_mask)
            result = self.heads(
                features, masks, candidates=candidates, draws=draws, output_ovr=output_ovr, skip_logits=skip_logits
            )
        setattr(result, CACHE, outputs.get(CACHE))
        result.hidden_states = outputs.get("hidden_states")
        result.attentions = outputs.get("attentions")
        return CausalQwenOutput(**result)  # in the order of its fields: as a tuple, the loss comes first

    def value_law_of(self, classes: str | Sequence[str | None] | None) -> ValueLaw | ClassLaws:
        """`value_law` of a class: with its levels and, where classes have axes of their own, on its axis; of a sequence, that
        of each row's class.

        None stands for `number_class`, and, where that is None too, for the model's own levels, as does a class that had too
        few rows. ValueError for a class that the model does not know, and for none where it needs one.
        """
        if classes is None or isinstance(classes, str):
            return self.value_axes.law(classes)
        return self.value_axes.laws(classes)


def kept_positions(logits_to_keep: int | Tensor) -> Any:
    """The index of the positions that heads are computed for."""
    if isinstance(logits_to_keep, int):
        return slice(-logits_to_keep, None) if logits_to_keep else slice(None)
    return logits_to_keep


def _length(past: Cache | None) -> int:
    return 0 if past is None else past.get_seq_length()


def token_positions(
    features: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, past: Cache | None
) -> Tensor:
    """Index of each token among the real tokens of its row, int64 [B, S], from whatever the caller knows."""
    rows, length = features.shape[:2]
    if position_ids is not None:
        return position_ids.expand(rows, -1)[:, -length:]
    if attention_mask is not None and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    start = _length(past) - length if past is not None else 0
    return torch.arange(start, start + length, device=features.device).expand(rows, -1)
