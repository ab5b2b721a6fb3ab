"""What the model and `generate` return."""

from dataclasses import dataclass, fields

from torch import Tensor
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = {"cache", "past_key_values"}.intersection(field.name for field in fields(CausalLMOutputWithPast)).pop()
"""transformers' name of the keys and values kept of tokens that were read: `cache` since 5.24, before it `past_key_values`."""


@dataclass
class CausalQwenOutput(CausalLMOutputWithPast):
    """Output of `CausalQwenForCausalLM.forward`; S is the number of positions kept (`logits_to_keep`).

    loss, loss_cls, loss_reg: [] where labels are given: total, classification and value part (theory 3.7).
    logits: loc_S [B, S, V'], V' = config.vocab_size; None where `skip_logits`; of `scores_only` see `forward`.
    features: z [B, S, H], which all heads read.
    loc_U, scale_U: [B, S, C].
    loc_Y, scale_Y: [B, S], on the axis of the value transform; under a `causal_decoding` what its draws leave.
    num_prob: P_NUM [B, S].
    scale_S [B, S, V'], ovr_probs [B, S, V'], decisions int64 [B, S]: with `output_ovr`. Rows that no token uses have
        probability 0 and are never decided for.
    cache (`past_key_values` before transformers 5.24), hidden_states, attentions: the backbone's own.
    """

    loss_cls: Tensor | None = None
    loss_reg: Tensor | None = None
    features: Tensor | None = None
    loc_U: Tensor | None = None
    scale_U: Tensor | None = None
    loc_Y: Tensor | None = None
    scale_Y: Tensor | None = None
    num_prob: Tensor | None = None
    scale_S: Tensor | None = None
    ovr_probs: Tensor | None = None
    decisions: Tensor | None = None


@dataclass
class GenerateCausalOutput(GenerateDecoderOnlyOutput):
    """transformers' output of sampling and greedy search, with `numeric_values` float64 [B, L] beside `sequences`."""

    numeric_values: Tensor | None = None


@dataclass
class GenerateCausalBeamOutput(GenerateBeamDecoderOnlyOutput):
    """transformers' output of beam search, with `numeric_values` float64 [B, L] beside `sequences`."""

    numeric_values: Tensor | None = None
