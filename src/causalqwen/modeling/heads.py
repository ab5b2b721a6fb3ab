"""What a graft adds after the backbone, and what follows from features with it: laws and losses."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from causalqwen.decoding import Draws
from causalqwen.losses import LossMasks, LossParts, total_loss
from causalqwen.modeling.abduction import AbductionNetwork, make_domain
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.embedding import GatedFeatures, NumericEmbedding
from causalqwen.modeling.outputs import CausalQwenOutput
from causalqwen.modeling.scores import ActionNetwork, Vocabulary
from causalqwen.numbers import ValueLaw, ValueTransform, round_significant
from causalqwen.parts.branch import PlainReader, ValueBranch
from causalqwen.parts.copying import Candidates, CopyHead
from causalqwen.parts.crossing import Crossing
from causalqwen.parts.kernel_reader import KernelReader
from causalqwen.parts.perceptron import ResidualPerceptron
from causalqwen.parts.value_axes import ValueAxes

_FROZEN: ContextVar[tuple[list[Vocabulary], ...]] = ContextVar("frozen", default=())
"""Vocabularies of the models whose weights stand still here (a thread, and what it awaits); empty where they do no more."""


def make_heads(config: CausalQwenConfig) -> dict[str, nn.Module | None]:
    """Everything that a grafted model adds to its backbone, at its start values, by the names of its modules."""
    size = config.causal_size
    made: dict[str, nn.Module | None] = {}
    made["numeric_embedding"] = (GatedFeatures if config.number_embedding == "features" else NumericEmbedding)(
        config.hidden_size, config.num_token_id, config.num_token_appended
    )
    abduction = AbductionNetwork(
        config.hidden_size,
        size,
        deep=config.deep_abduction,
        deep_hidden_size=config.abduction_hidden_size,
        scale_activation=config.scale_activation,
        initial_scale=config.initial_scale,
        max_scale=config.max_scale,
    )
    for name, settings in config.domains.items():
        abduction.domains[name] = make_domain(config, settings)
    abduction.domain = config.domain
    made["abduction"] = abduction
    made["value_branch"] = None
    if config.value_branch:
        sizes = config.hidden_size, size, config.value_branch_hidden_size
        made["value_branch"] = branch = ValueBranch(*sizes, dropout=config.value_branch_dropout)
        if config.value_branch_direct:
            branch.let_lean()
        if config.value_crossing:
            branch.crossing = Crossing(config.hidden_size, size, config.value_crossing)
    kernel = config.value_kernel
    made["value_kernel"] = None if kernel is None else KernelReader(config.hidden_size, size, **kernel)
    made["action"] = ActionNetwork(config)
    # A causal size below H needs a W_cls of its own, in the backbone's dtype.
    has_own = size < config.hidden_size or config.own_scores
    made["score_head"] = nn.Linear(size, config.text_config.vocab_size) if has_own else None
    with torch.random.fork_rng(devices=()):  # whatever is drawn after it does not depend on it
        made["copy_head"] = CopyHead(config.hidden_size, config.copy_size) if config.copy_numbers else None
    return made


_MANY = 1024  # values of a batch from which on contexts that are alike are read once, where people share them


class GraftModules:
    """The modules of a graft, and what follows from how they are set, wherever its backbone runs."""

    config: CausalQwenConfig
    numeric_embedding: NumericEmbedding
    abduction: AbductionNetwork
    action: ActionNetwork
    value_branch: ValueBranch | None
    value_kernel: KernelReader | None
    copy_head: CopyHead | None
    score_head: nn.Linear | None
    training: bool
    get_output_embeddings: Any
    ovr_impl: str = "auto"  # how the OvR loss is computed where no scores are kept: see `linear_ovr_loss`
    number_class: str | None = None  #: class of numbers for which no other is given; kept in no checkpoint

    @property
    def copies(self) -> bool:
        """Whether a number may be one of the context's again."""
        return self.copy_head is not None

    @property
    def value_reader(self) -> ValueBranch | KernelReader | PlainReader:
        """How the value head reads U."""
        return self.value_kernel or self.value_branch or PlainReader()

    @property
    def value_axes(self) -> ValueAxes:
        """The laws of values, by the class of a number; `number_class` is that of numbers which name none."""
        return ValueAxes(self.config, self.number_class)

    @property
    def value_law(self) -> ValueLaw:
        """What turns (loc_Y, scale_Y) into medians, intervals and scores in the data's units, with the model's own levels, or
        those of `number_class`. ValueError where classes have axes of their own, and that is not set.
        """
        return self.value_axes.law()

    def copy_law(self, features: Tensor, candidates: Candidates | None, law: Any = None) -> Any:
        """The law of the values that follow features [..., H], the positions of `candidates`: one of these, where the model
        copies, or a new number, of which `law` is (`value_law` by default)."""
        law = self.value_law if law is None else law
        if candidates is None or self.copy_head is None:
            return law
        read, size = self.value_reader.standardize, self.config.hidden_size
        return self.copy_head.law(law, read(features[..., :size]), read(candidates.features[..., :size]), candidates)

    @property
    def reads_numbers(self) -> bool:
        """Whether numbers in a text are `<NUM>` to this model: once its values were trained; before, they are digits."""
        return self.config.value_range is not None

    @property
    def value_transform(self) -> ValueTransform:
        """The map between values and the axis of the value head, see `value_law`."""
        return self.value_law.transform

    def generated_values(self, loc_Y: Tensor) -> Tensor:
        """What a text says anew where the value axis is at loc_Y: t^-1, to `value_digits` digits and no finer than
        `value_place`, and where that is none of its values the nearest of the support."""
        axes, digits = self.value_axes, self.config.value_digits
        transform = axes.law().transform
        new = round_significant(transform.inverse(loc_Y), digits, axes.axis(None)["value_place"])
        return transform.support.take_in(new)

    def said_values(self, features: Tensor, new: Tensor, candidates: Candidates | None) -> Tensor:
        """What a text says after features [n, H]: the number of the context that has more than half of the probability,
        exactly, where one has; elsewhere `new` [n]."""
        if candidates is None:
            return new
        copied, again = self.copy_law(features, candidates).copied()
        return torch.where(copied, again, new)

    def vocabulary(self) -> Vocabulary:
        """W_cls as it is now; within `frozen_vocabulary`, as it was when that began."""
        known = (words for entry in reversed(_FROZEN.get()) for words in entry if words.action is self.action)
        return next(known, None) or self.action.vocabulary(self.get_output_embeddings())

    @contextmanager
    def frozen_vocabulary(self) -> Iterator[None]:
        """While the block runs, W_cls stands still: what follows from it is made once, for each thread that says so."""
        own = [self.vocabulary()]
        _FROZEN.set((*_FROZEN.get(), own))
        try:
            yield
        finally:  # blocks may end in any order, and in another context than they began in
            own.clear()
            _FROZEN.set(tuple(entry for entry in _FROZEN.get() if entry))

    def heads(
        self,
        features: Tensor,
        masks: LossMasks | None = None,
        *,
        candidates: Candidates | None = None,
        draws: Draws | None = None,
        output_ovr: bool = False,
        skip_logits: bool = False,
    ) -> CausalQwenOutput:
        """Laws of scores and values from features z [B, S, H], and with masks [B, S-1] the losses.

        candidates: for each position, the numbers that a value may be a copy of; None for none. draws: what a plan draws there.
        """
        chain = Chain(self, features, draws).situated()
        loc_Y, scale_Y = chain.value()
        log_num, log_not_num = chain.number.log_p()
        result = CausalQwenOutput(
            features=features, loc_U=chain.loc_U, scale_U=chain.scale_U, loc_Y=loc_Y, scale_Y=scale_Y,
            num_prob=log_num.exp(), logits=None if skip_logits else chain.loc_S,
        )  # fmt: skip
        if output_ovr:
            scores = chain.scores
            result.scale_S, result.ovr_probs, result.decisions = scores.graded(), scores.p(), scores.decide()
        if masks is None:
            return result
        before = chain[:, :-1]
        if skip_logits:
            rest_loss = before.rest_loss(masks.targets, masks.also_right, impl=self.ovr_impl)
        else:
            rest_loss = before.word_scores.loss(before.words_of(masks.targets), masks.also_right)
        numbers = None if candidates is None else candidates[:, :-1][masks.num_mask]
        values = masks.values[masks.num_mask]
        of_values = self.value_losses(features[:, :-1][masks.num_mask], values, candidates=numbers)
        parts = self.losses(masks, rest_loss, (log_num[:, :-1], log_not_num[:, :-1]), of_values)
        result.loss, result.loss_cls, result.loss_reg = parts.total, parts.cls, parts.reg
        return result

    def losses(
        self, masks: LossMasks, rest_loss: Tensor, log_p_num: tuple[Tensor, Tensor], of_values: Tensor
    ) -> LossParts:
        """`total_loss` under this model's settings; of_values [n] where `masks.num_mask` holds."""
        config = self.config
        parts = masks, rest_loss, log_p_num, of_values
        alpha, weight = config.gate_alpha, config.value_loss_weight
        return total_loss(*parts, alpha=alpha, detach_gate=config.gate_detach, value_weight=weight)

    def value_losses(
        self,
        features: Tensor,
        values: Tensor,
        group: Tensor | None = None,
        candidates: Candidates | None = None,
        classes: Tensor | None = None,
    ) -> Tensor:
        """L_reg of values [n], in the data's units, after features [n, H]: see `Chain.value_losses`.

        classes: int64 [n], each one's class by its place in `value_axes.apart`, where classes have axes of their own; not
        beside a group.
        """
        law = self.value_axes.coded(classes) if len(values) else ValueLaw()  # nothing to lose, under any law
        places = None
        if group is not None and len(features) > _MANY:
            distinct, places = features.unique(dim=0, return_inverse=True)
            features, places = (distinct, places) if len(distinct) < len(features) // 2 else (features, None)
        return Chain(self, features).value_losses(values, law, group, candidates, places)

    def candidates(
        self,
        features: Tensor,
        input_ids: Tensor,
        numeric_values: Tensor | None,
        attention_mask: Tensor | None,
    ) -> Candidates | None:
        """The numbers of a batch [B, S] for each position, under features z [B, S, H]; None where the model does not copy."""
        if not self.copies:
            return None
        number, hides = self.config.num_token_id, self.config.context.hides
        return Candidates.of_tokens(features, input_ids, numeric_values, attention_mask, number, hides)


IN_FLOAT32 = {
    "numeric_embedding", "scale_net", "abduction.residual", "domains", "value_branch", "copy_head", "action.b_noise",
    "action.threshold", "action.token_thresholds", "action.num_row", "action.num_bias",
    "action.value_head", *(f"value_kernel.{name}" for name in KernelReader.IN_FLOAT32),
}  # fmt: skip
"""What stays in float32 whatever the backbone's dtype: the heads are small and their tails matter. Named one by one:
transformers would make floats of the integers among them too."""

NUMBER_PARTS = "value_branch.", "value_kernel.", "copy_head.", "action.num_row", "action.num_bias", "action.value_head."
"""Where the parameters start that only numbers are learned by: no score of a word depends on them."""


def check_made(model: Any) -> None:
    """ValueError where the configuration was changed after the model was made, and describes another one."""
    config, action = model.config, model.action
    config.check()
    with torch.device("meta"):
        made = make_heads(config)

    def shapes(module: nn.Module | None) -> dict[str, torch.Size]:
        return {} if module is None else {key: tensor.shape for key, tensor in module.state_dict().items()}

    def kind(part: Any) -> tuple[type, Any]:
        return type(part), getattr(part, "alpha", None)

    again: Any = made["action"]
    other = [name for name, part in made.items() if shapes(part) != shapes(getattr(model, name))]
    other += ["num_token_id"] * (config.num_token_id != action.num_token_id)
    laws = ("law", "value_law", "scales")
    other += [name for name in laws if kind(getattr(again, name)) != kind(getattr(action, name))]
    if other:
        raise ValueError(f"the configuration was changed after the model was made, and describes another {other[0]}")


VALUE_MODULES = ("value_branch", "value_kernel", "copy_head")  # made anew where values are read in another way
OWN_STARTS = (AbductionNetwork, ActionNetwork, ResidualPerceptron, CopyHead)  # they know their start values


def number_parameters(model: Any) -> list[nn.Parameter]:
    """Parameters of `NUMBER_PARTS`, but for the noise's size on the value axis: a value alone cannot tell it from scale_U."""
    noise = None if model.value_branch is None else model.value_branch.log_noise
    named = model.named_parameters()
    return [parameter for name, parameter in named if name.startswith(NUMBER_PARTS) and parameter is not noise]


def alone_at_their_rate(model: Any) -> list[str]:
    """Names of the single numbers of a copy head: they move through large values with few updates."""
    return ["copy_head.bias", "copy_head.new.bias"] if model.copies else []
