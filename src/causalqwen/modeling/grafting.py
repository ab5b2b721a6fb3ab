"""Grafting: the configuration and the start values of a new model over a backbone; and what a graft added, and what it left as
it was, counted and compared, never assumed."""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from causalqwen.checking import check_values, nearest
from causalqwen.distributions import get_family
from causalqwen.modeling.backbones import align_parameters, check_graftable, free_rows, resolve_backbone
from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.configuration import STARTS, CausalQwenConfig, context_length
from causalqwen.modeling.heads import VALUE_MODULES, make_heads
from causalqwen.modeling.low_rank_head import NarrowHead, narrow_head
from causalqwen.modeling.processor import CausalQwenProcessor
from causalqwen.modeling.scores import SCORE_SCALES, effective_linear
from causalqwen.parts.compatibility import NEEDS

logger = logging.getLogger("causalqwen")


class _UnlessConfigured(logging.StreamHandler):
    """To stderr, as long as the program has set up no logging of its own; then that takes over."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


if not logger.handlers:
    logger.addHandler(_UnlessConfigured())
    logger.setLevel(logging.INFO)


_PROBES = (
    "The river rises in the hills and runs through three towns before it meets the sea. Nobody knows who built the old "
    "bridge, but the people who live beside it say that it was there before them. ",
    "春天来了，河水从山上流下来，经过三个小镇，最后流进大海。",
    "def area(width, height):\n    return width * height\n",
)
_PROBE = "".join(_PROBES)
"""Ordinary text without numbers, on which a graft is compared with its backbone."""

FAITHFUL_LINK = {
    # scale_S at the threshold in logits, score_slope, C: the threshold minus the log-partition
    "gaussian": (1.0, 0.5, -0.6),
    "cauchy": (1.0, 0.0, 0.0),
}
"""Per family. At the Gaussian's the tail falls as the softmax's does, log P_k ~ loc_k - C for a slope of 1/2, and both P_k and
the winner of the race S_k have nearly its probabilities (theory 3.5)."""

FAITHFUL_SHARES = (0.8, 0.1)
"""Shares of scale_S^a of the longest row of W_cls: who speaks, and the noise that all tokens share; the rest, a tenth, and more
of shorter rows, is a token's own. Texts have the same distribution whatever the shares are (theory 3.6). Nothing in a backbone
says how much people differ: texts of one individual are as alike as they can be while every row keeps noise of its own."""


def from_backbone(
    cls: type[GraftedModel],
    name_or_path: str | PreTrainedModel,
    dtype: torch.dtype | str | None = None,
    start: str = "faithful",
    tokenizer: PreTrainedTokenizerBase | None = None,
    text: str | None = None,
    quiet: bool = False,
    **config: Any,
) -> Any:
    """Graft a number channel and an individual onto a pretrained decoder, which itself stays as it is.

    One line tells what was added, and on how many tokens of a few lines the logits were found to be the backbone's: at
    level INFO of the logger `causalqwen`, which writes to stderr where the program has set up no logging of its own
    (`logging.getLogger("causalqwen").setLevel("WARNING")` for silence).

    Args:
        name_or_path: a folder, a hub name, `smollm2-135m` (the default backbone), or a loaded model (with its
            `tokenizer`).
        dtype: of the backbone; transformers' own choice by default. The heads stay in float32.
        start: the start values, one of `STARTS`. "faithful": every decision is the backbone's.
        text: what a causal size below H is fitted to, some thousand tokens (`narrow_head`); a few lines by default.
        quiet: neither compare nor tell.
        config: any field of `CausalQwenConfig`, over those of the start.

    Raises:
        ValueError: an unknown start or field; a setting that does nothing beside the others (`parts.compatibility`); a
            model that is no decoder (encoder-only, encoder-decoder), or whose logits are no linear map of its features.
    """
    _check_asked(start, config)
    backbone, tokenizer, name = _loaded(name_or_path, dtype, tokenizer)
    attention = backbone.config._attn_implementation
    grafted, narrow = _configured(backbone, tokenizer, start, text, config)
    with_own, grafted.own_scores = grafted.own_scores, False  # they come after all that is drawn
    grafted._attn_implementation = attention  # a new configuration resets that of its parts
    grafted.dtype, grafted.name_or_path = backbone.dtype, name
    model: Any = cls(grafted, backbone=backbone)
    model.abduction.loc_net.to(backbone.dtype)
    if narrow is not None:
        narrow.copy_to(model.abduction.loc_net, model.score_head.to(backbone.dtype))
    elif with_own:
        own_scores(model)
    model.to(backbone.device)
    model.generation_config = backbone.generation_config
    model.processor = CausalQwenProcessor.of(tokenizer, grafted)
    start_number_rows(model, tokenizer)
    model.eval()
    if not quiet and logger.isEnabledFor(logging.INFO):
        longest = grafted.context_length or math.inf
        logger.info(prove(model, [part for part in _PROBES if len(model.processor(part)["input_ids"]) <= longest]))
    return model


def _check_asked(start: str, config: dict[str, Any]) -> None:
    """ValueError for an unknown start, and for settings that there are not, or that no caller sets."""
    if start not in STARTS:
        raise ValueError(f"unknown start {start!r}; known starts: {', '.join(STARTS)}")
    found = ("num_token_id", "free_token_ids", "given")
    for name in [name for name in found if name in config]:
        what = "the settings that are given" if name == "given" else "the tokens that nothing uses"
        raise ValueError(f"{name}: {what} are found when a backbone is grafted; leave it out")
    known = [name for name in CausalQwenConfig.__annotations__ if name not in (*found, "text_config", "sub_configs")]
    if unknown := [name for name in config if name not in known]:
        raise ValueError(f"unknown setting {unknown[0]}; {nearest(unknown[0], known)}")
    check_values(CausalQwenConfig, config)


def _loaded(
    name_or_path: str | PreTrainedModel, dtype: torch.dtype | str | None, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """The backbone, its tokenizer and its name. ValueError for what cannot be grafted."""
    if isinstance(name_or_path, PreTrainedModel):
        backbone, name = name_or_path, type(name_or_path).__name__
        _refuse_others(backbone.config, name)
        if tokenizer is None:
            raise ValueError("a loaded backbone needs its tokenizer: from_backbone(model, tokenizer=...)")
    else:
        if not isinstance(name_or_path, str | os.PathLike):
            kind = type(name_or_path).__name__
            raise ValueError(
                f"a {kind} is no backbone: give a model of transformers (an adapter's by merge_and_unload())"
            )
        name, path = str(name_or_path), resolve_backbone(name_or_path)
        _refuse_others(AutoConfig.from_pretrained(path), name)
        backbone = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto")
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(path)
    align_parameters(backbone)
    check_graftable(backbone, name)
    return backbone, tokenizer, name


def _configured(
    backbone: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    start: str,
    text: str | None,
    config: dict[str, Any],
) -> tuple[CausalQwenConfig, NarrowHead | None]:
    """The configuration of a graft, and below the hidden size what its scores start as. ValueError for what is asked for and
    would do nothing."""
    free = free_rows(tokenizer, backbone.get_output_embeddings().weight.shape[0])
    settings = {"num_token_id": free[0], "free_token_ids": free[1:], "start": start, **STARTS[start]}
    head, narrow = backbone.get_output_embeddings(), None
    if config.get("causal_size") not in (None, head.weight.shape[1]):
        narrow = narrow_head(head, _features(backbone, tokenizer, text or _PROBE), config["causal_size"])
    elif text is not None and config.get("causal_size") is None:
        raise ValueError("text is what a causal size below the hidden size is fitted to: give causal_size too")
    if start == "faithful":
        weight = head.weight if narrow is None else narrow.weight
        settings |= faithful_start(free, (settings | config)["vocabulary_family"], weight)
    if not SCORE_SCALES[(settings | config)["score_scale"]].common:
        settings |= {"score_noise": 0.0, "score_slope": 0.0}
        if start == "faithful":  # a constant threshold, so the log-partition's median
            scores = head(_features(backbone, tokenizer, _PROBE).to(head.weight.dtype)).float()
            settings["initial_threshold"] += scores.logsumexp(-1).median().item()
    grafted = CausalQwenConfig(text_config=backbone.config, given=sorted(config), **(settings | config))
    if grafted.context.writes and "value_digits" not in config:
        grafted.value_digits = 4
    for field, value in config.items():
        if value != STARTS[start].get(field, getattr(CausalQwenConfig, field)) and f"the setting {field}" in NEEDS:
            grafted.require(f"the setting {field}")
    return grafted, narrow


def _refuse_others(config: Any, name: str) -> None:
    """ValueError for a model that is grafted already, and for what transformers would load as a causal model although it is
    none (BERT, T5)."""
    if config.model_type == CausalQwenConfig.model_type:
        raise ValueError(
            f"{name} is grafted already: load it with from_pretrained, or graft the backbone that it stands on"
        )
    architectures = config.architectures or []
    causal = any("CausalLM" in a or "LMHead" in a for a in architectures) or not architectures
    encoder = getattr(config, "is_encoder_decoder", False) or (
        "is_decoder" in config.to_dict() and not config.is_decoder and not causal
    )
    if encoder or not causal:
        raise ValueError(
            f"{name} cannot be grafted: it is a {config.model_type} model ({', '.join(architectures) or 'no architecture'}), "
            "not a decoder-only language model"
        )


@torch.no_grad()
def _features(backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """z [N, H] of a text, in chunks that fit the backbone."""
    limit = min(context_length(backbone.config) or 512, 512)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"].to(backbone.device)
    chunks = (backbone.base_model(input_ids=part, use_cache=False)[0] for part in ids.split(limit, dim=1))
    return torch.cat(list(chunks), dim=1)[0].float()


@torch.no_grad()
def faithful_start(free: list[int], family: str, weight: torch.Tensor) -> dict[str, Any]:
    """Start values read off the rows W_cls, `weight` [V, C]: they mean the same on every backbone (theory 3.5).

    initial_scale, initial_noise: `FAITHFUL_SHARES` of the longest row. score_noise: what they leave.
    """
    used = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
    used[[index for index in free[1:] if index < len(used)]] = False
    blocks = list(zip(weight.split(8192), used.split(8192), strict=True))
    law = get_family(family)
    longest = max((torch.linalg.vector_norm(w.float(), law.alpha, dim=1) * u).max().item() for w, u in blocks)
    scale, slope, threshold = FAITHFUL_LINK[law.name]
    who, noise = (scale * share ** (1 / law.alpha) for share in FAITHFUL_SHARES)
    return {
        "score_noise": scale * (1 - sum(FAITHFUL_SHARES)) ** (1 / law.alpha),
        "score_slope": slope,
        "initial_scale": who / longest,
        "initial_noise": noise / longest,
        "initial_threshold": threshold,
    }


@torch.no_grad()
def own_scores(model: Any) -> None:
    """Give a model W_cls [V, H] and b_cls [V] of its own, `score_head`, which start as the backbone's lm_head, b_cls at 0 where
    that has none; a checkpoint keeps them. The embedding, which the lm_head may be tied to (overview 2.4), and with it every
    feature, stays when they are trained."""
    weight, bias = effective_linear(model.backbone.get_output_embeddings())
    rows, size = weight.shape
    own = nn.utils.skip_init(nn.Linear, size, rows, dtype=weight.dtype, device=weight.device)  # draws nothing
    own.weight.copy_(weight)
    own.bias.copy_(torch.zeros_like(own.bias) if bias is None else bias)
    model.score_head = own
    model.config.own_scores = True


def renew_values(model: Any, **config: Any) -> None:
    """Give a graft other value parts, at their start values, by fields of its configuration: those of the branch, of the
    value's law and loss, and whether numbers are copied."""
    for name, value in config.items():
        setattr(model.config, name, value)
    made = make_heads(model.config)
    for name in VALUE_MODULES:
        part = made[name]
        setattr(model, name, None if part is None else part.to(model.device))
    model.action.value_law = get_family(model.config.value_family)


@torch.no_grad()
def start_number_rows(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Start `<NUM>`'s rows where it has no row of the matrix: the digit 5 going in, the mean token coming out.

    Of single digits, and their mean, the embedding of 5 leaves the words after a number most likely (experiments 1). The
    mean of all rows scores the mean of all scores, which is never above the largest one: `<NUM>` decides nothing until it
    is trained. On a row of the matrix `<NUM>` starts as what that row is.
    """
    if not model.config.num_token_appended:
        return
    head = model.vocabulary()
    digit = tokenizer("5", add_special_tokens=False)["input_ids"][-1]
    model.numeric_embedding.row.copy_(model.get_input_embeddings().weight[digit].float())
    model.action.num_row.copy_(head.weight.float().mean(0))
    if head.bias is not None:
        model.action.num_bias.copy_(head.bias.float().mean())


@dataclass(frozen=True)
class GraftProof:
    """backbone: its name. parameters, bytes: what stands beside the backbone's own `backbone_parameters`. tokens: how many were
    compared. identical_logits: on how many of them all logits are the backbone's to the last bit. agreement: the share of
    decisions that are the backbone's."""

    backbone: str
    backbone_parameters: int
    parameters: int
    bytes: int
    tokens: int
    identical_logits: int
    agreement: float

    def __str__(self) -> str:
        same, decided = (
            "all" if count == self.tokens else f"{count:,}"
            for count in (self.identical_logits, round(self.agreement * self.tokens))
        )
        return (
            f"{self.parameters:,} parameters ({self.bytes / 1e6:.1f} MB) grafted onto the {self.backbone_parameters:,} of "
            f"{self.backbone}; of {self.tokens:,} tokens that were checked, {same} have the backbone's logits to the last bit, "
            f"and {decided} its decision"
        )


def prove(model: Any, texts: Sequence[str]) -> GraftProof:
    """Count what a graft added, and compare it with its backbone on these texts."""
    own = [p for name, p in model.named_parameters() if not name.startswith("backbone.")]
    return GraftProof(
        backbone=model.config.name_or_path,
        backbone_parameters=sum(p.numel() for p in model.backbone.parameters()),
        parameters=sum(p.numel() for p in own),
        bytes=sum(p.numel() * p.element_size() for p in own),
        **compare_with_backbone(model, texts),
    )


@torch.no_grad()
def compare_with_backbone(model: Any, texts: Sequence[str]) -> dict[str, Any]:
    """The grafted model beside its own backbone, text by text.

    Returns:
        tokens: how many were compared. identical_logits: on how many positions all logits of the backbone's own tokens
        are equal to the last bit. agreement: the share of `standard` decisions that are the backbone's argmax.
    """
    tokens = identical = agreed = 0
    was_training = model.training
    model.eval()
    few = len(texts) == 1  # no bar for one
    for text in tqdm(texts, desc="comparing with the backbone", unit="text", leave=False, disable=few or None):
        inputs = model.processor(text, return_tensors="pt").to(model.device)
        ours = model(**inputs, output_ovr=True)
        theirs = model.backbone(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        rest = torch.ones(theirs.shape[-1], dtype=torch.bool, device=theirs.device)
        if not model.config.num_token_appended:
            rest[model.config.num_token_id] = False
        same = (ours.logits[..., : theirs.shape[-1]] == theirs) | ~rest
        tokens += theirs.shape[1]
        identical += same.all(-1).sum().item()
        agreed += (ours.decisions == theirs.argmax(-1)).sum().item()
    model.train(was_training)
    return {"tokens": tokens, "identical_logits": identical, "agreement": agreed / max(tokens, 1)}
