"""Configuration of a grafted model, and the named start values."""

import copy
import difflib
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import CONFIG_MAPPING

from causalqwen.checking import Count, Finite, NotNegative, Positive, Share, check_values, one_of
from causalqwen.decoding import CausalDecoding
from causalqwen.distributions import FAMILIES
from causalqwen.modeling.context import CONTEXTS, Context
from causalqwen.modeling.scores import SCORE_SCALES
from causalqwen.numbers import ValueTransform
from causalqwen.numbers.law import WANTED_LEVELS
from causalqwen.parts.compatibility import check_needs, missing

Levels = Annotated[list[Share], Field(min_length=len(WANTED_LEVELS), max_length=len(WANTED_LEVELS))]
FORMAT = 3
"""The format of a saved config.json, given there as `format_version`. No other format is read."""


class IndividualLevels:
    """What `individual_levels` holds."""

    who: Positive
    noise: Positive
    levels: Levels


_AXIS = ("value_transform", "value_range", "value_place")  # of each class in `class_values`

STARTS: dict[str, dict[str, Any]] = {
    # Every decision is the backbone's. Noise and scale are read off its matrix when it is grafted, see
    # `modeling.grafting.faithful_start`; the threshold follows from the scores (theory 3.5).
    # A short direction of numbers: at length 1 the word after a number loses 1.0 to 2.6 nats (experiments 1).
    # Gaussian scores cost no likelihood against a large vocabulary, Cauchy ones nats (experiments 3).
    # A number's digits stay in the context, where the backbone reads them as it always did (experiments 12, 13).
    "faithful": {
        "score_scale": "common",
        "scale_activation": "softplus",
        "initial_direction": 0.2,
        "vocabulary_family": "gaussian",
        "number_context": "digits",
    },
    # overview 4: a wide U, no noise, thresholds that hardly anything passes, w normalised; a value is read from U itself, and
    # its loss weighed by P_NUM, gradient and all (overview 2.5).
    "documents": {
        "score_scale": "documents",
        "scale_activation": "softplus",
        "initial_scale": 10.0,
        "initial_noise": 0.0,
        "initial_threshold": 100.0,
        "normalize_direction": True,
        "value_branch": False,
        "gate_alpha": 0.0,
        "gate_detach": False,
    },
    # minimal version: softplus(0), a little noise, thresholds at 0.
    "minimal": {
        "score_scale": "documents",
        "scale_activation": "softplus",
        "initial_scale": 0.6931471805599453,
        "initial_noise": 0.1,
        "initial_threshold": 0.0,
        "value_branch": False,
        "gate_alpha": 0.0,
        "gate_detach": False,
    },
    # The author's comments on overview 4: nothing wide, nothing zero, w like any weight, one constant that is learned for C.
    "ordinary": {
        "score_scale": "documents",
        "scale_activation": "softplus",
        "initial_scale": 1.0,
        "initial_noise": 1.0,
        "initial_threshold": 0.0,
    },
    # architecture 2.3.4: exp, and a small scale that may grow.
    "architecture": {
        "score_scale": "documents",
        "scale_activation": "exp",
        "initial_scale": 0.1,
        "initial_noise": 0.0,
        "initial_threshold": 0.0,
    },
}
"""Start values by name; a field given to `from_backbone` overrides its preset."""


SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "settings": {
        "abduction": (
            "start", "given", "causal_size", "deep_abduction", "abduction_hidden_size", "scale_activation", "max_scale",
            "domains", "domain",
        ),
        "numbers_in": (
            "number_context", "number_embedding", "initial_direction", "normalize_direction",
        ),
        "scores": (
            "score_scale", "token_thresholds", "vocabulary_family", "own_scores",
        ),
        "values": ("value_family", "value_loss", "value_digits", "copy_numbers", "copy_size"),
        "value_branch": (
            "value_branch", "value_branch_hidden_size", "value_branch_dropout", "value_branch_direct",
            "value_crossing",
        ),
        "training": ("gate_alpha", "gate_detach", "value_loss_weight"),
    },
    "fitted": {
        "backbone": ("num_token_id", "free_token_ids", "initial_scale", "initial_noise", "initial_threshold"),
        "scores": ("score_noise", "score_slope"),
        "values": (
            "value_transform", "value_range", "value_place", "interval_levels", "interval_kinds", "class_interval_levels",
            "individual_levels", "class_values", "value_kernel",
        ),
    },
}  # fmt: skip
"""Where a field stands in config.json, by part: what somebody chose, and what was read off the backbone, text or rows."""


class CausalQwenConfig(PreTrainedConfig):
    """Everything that a grafted model adds to its backbone: attributes, which a saved config.json nests by `SECTIONS`.

    Args:
        text_config: the backbone's own configuration, or a dictionary of it.
        num_token_id: id of `<NUM>`: the first free row of the vocabulary matrix, or its number of rows V where there is
            no free row (`<NUM>` then has rows of its own, after the matrix).
        free_token_ids: the other rows that no token uses; left out of losses, decisions and samplers.
        causal_size: C; None for the hidden size H. Below H the model has an lm_head of its own, see `narrow_head`.
        start: which of `STARTS` the parameters started from.
        deep_abduction: a residual perceptron beside W_loc and W_scale (architecture 2.3.3).
        scale_activation: "softplus" (overview 2.3) or "exp" (foundations 2.4.1). max_scale: an upper limit of scale_U
            (foundations 3.3.2), None for none.
        domains: settings of the domains' abduction networks by name; domain: which one is asked, None for the base's. See
            `add_domain`.
        value_branch: a residual on loc_U and scale_U that only the value head reads. value_branch_direct: features move
            the value straight too, and training starts at a ridge regression on them. value_crossing: in how many directions an
            individual may turn around from context to context (`Crossing`); 0 for none. Training on rows that name individuals
            sets it.
        score_scale: "common" (one scale for all scores of a position) or "documents" (|W| scale).
        score_noise, score_slope: a token's own noise under "common", see `graded_scale`.
        token_thresholds: give every token a threshold of its own, C + eps_k, learned by the stage `heads`: the standard
            deviation of eps_k at the start; None for one threshold. `logits` are then loc_S - eps_k.
        own_scores: W_cls and b_cls of the scores are the model's own, not the backbone's lm_head, and can be trained while that
            and the embedding stay; a causal size below H has them anyway. See `own_scores`.
        vocabulary_family, value_family: the stable law of the scores and of the value, "cauchy" or "gaussian".
        initial_scale, initial_noise, initial_threshold: gamma, |b_noise| and C at the start.
        number_context: what the context holds of a number: "value", `<NUM>` with its value; "digits", `<NUM>`, which the
            backbone does not see, and the number as it is written; "both". See `modeling.context`.
        number_embedding: "added", embed(x) + phi(v), or "features", z sigmoid(v w + b) after the backbone (`GatedFeatures`).
        initial_direction: length of the direction w of numbers at the start, on average: coordinates are normal with this over
            the square root of H. normalize_direction: make it exactly that (overview 4, step 1).
        value_transform: see `ValueTransform`; fitted when the value head is trained.
        value_range: smallest and largest training value; quantiles are clipped to it, widened by its own width, when
            a CRPS is taken from them.
        interval_levels: raw central level to use for each wanted one (101 wanted levels, 0% to 100%): the
            recalibration fitted on validation rows, or None. interval_kinds: least scale on the value axis, and levels, of the
            numbers that are not of the surest kind (`ValueLaw.fit_interval_kinds`). class_interval_levels: levels of each class
            that rows named, by name; None for a class that had too few rows, which takes the model's own.
        individual_levels: of intervals of an individual: factors "who" of what is not known about them and "noise", fitted on
            people held out, and "levels" on top (theory 3.14). None where no people were held out.
        class_values: of a model whose classes have axes of their own, value_transform, value_range and value_place of each, by
            name (`TrainSettings.class_transforms`).
        value_kernel: rows and blocks of values that are read from the whole backbone in closed form (`KernelReader`), in place
            of the value branch; None for none.
        value_digits: significant digits of a generated number; `from_backbone` makes it 4 where digits stand in the context, so
            that float32 nearly always writes the same ones in batches of every shape (theory 3.8). value_place: the power of
            ten that it is a multiple of, that of the training values (0: integers); None for any.
        value_loss: what L_reg is made of: "nll" (overview 2.5), or "crps", in the same units of the axis (theory 3.11).
        gate_alpha, gate_detach, value_loss_weight: alpha, whether the gate carries no gradient, and lambda.
        copy_numbers: a number may be one that stands in the context already, exactly (theory 3.8): see `CopyHead`.
            copy_size: d of its queries and keys.
        given: names of the settings that were given when the model was grafted, of which `train` chooses none.
    """

    model_type = "causalqwen"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}

    text_config: Any = None
    num_token_id: Annotated[int, Field(ge=0)] | None = None
    free_token_ids: list[int] | None = None
    causal_size: Count | None = None
    start: str = "faithful"
    given: list[str] | None = None

    deep_abduction: bool = False
    abduction_hidden_size: Count = 512
    scale_activation: Literal["softplus", "exp"] = "softplus"
    max_scale: Positive | None = None
    domains: dict[str, dict[str, Any]] | None = None
    domain: str | None = None
    value_branch: bool = True
    value_branch_hidden_size: Count = 512
    value_branch_direct: bool = False
    value_branch_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3
    value_crossing: Annotated[int, Field(ge=0)] = 0

    score_scale: Annotated[str, one_of(SCORE_SCALES)] = "common"
    score_noise: NotNegative = 0.0
    score_slope: NotNegative = 0.0
    token_thresholds: NotNegative | None = None
    vocabulary_family: Annotated[str, one_of(FAMILIES)] = "cauchy"
    value_family: Annotated[str, one_of(FAMILIES)] = "cauchy"
    own_scores: bool = False
    initial_scale: Positive = 1.0
    initial_noise: NotNegative = 1.0
    initial_threshold: Finite = 0.0
    number_context: Annotated[str, one_of(CONTEXTS)] = "value"
    number_embedding: Literal["added", "features"] = "added"
    initial_direction: NotNegative = 1.0
    normalize_direction: bool = False

    value_transform: dict[str, Any] | None = None
    value_range: Annotated[list[Finite], Field(min_length=2, max_length=2)] | None = None
    interval_levels: Levels | None = None
    interval_kinds: list[tuple[NotNegative, Levels]] | None = None
    class_interval_levels: dict[str, Levels | None] | None = None
    individual_levels: dict[str, Any] | None = None
    class_values: dict[str, dict[str, Any]] | None = None
    value_kernel: dict[str, Any] | None = None
    value_digits: Annotated[int, Field(ge=1, le=17)] = 6
    value_place: int | None = None

    value_loss: Literal["nll", "crps"] = "nll"
    gate_alpha: Share = 1.0
    gate_detach: bool = True
    value_loss_weight: NotNegative = 1.0

    copy_numbers: bool = False
    copy_size: Count = 64

    def __post_init__(self, **kwargs: Any) -> None:
        version = kwargs.pop("format_version", FORMAT)
        if type(version) is not int or version != FORMAT:
            raise ValueError(
                f"format_version: this version of CausalQwen reads checkpoints of the format {FORMAT}, got {version!r}; a "
                "later one needs `pip install --upgrade causalqwen`, an earlier one was never released: graft anew"
            )
        for title, parts in SECTIONS.items():
            self._read_section(title, parts, kwargs.pop(title, {}))
        if isinstance(self.text_config, dict):
            settings = dict(self.text_config)
            kind = settings.pop("model_type", "qwen2")
            if kind not in CONFIG_MAPPING:
                raise ValueError(f"text_config.model_type: {kind!r} is no model of transformers")
            self.text_config = CONFIG_MAPPING[kind](**settings)
        elif self.text_config is None:
            self.text_config = CONFIG_MAPPING["qwen2"]()
        if not isinstance(self.text_config, PreTrainedConfig):
            raise ValueError(f"text_config: expected the backbone's configuration, got {self.text_config!r}")
        if self.causal_size is None:
            self.causal_size = self.text_config.hidden_size
        kinds = [] if self.interval_kinds is None else self.interval_kinds
        if isinstance(kinds, list):  # a file has lists for tuples
            self.interval_kinds = [tuple(kind) if isinstance(kind, list) else kind for kind in kinds]
        empty: dict[str, type] = {
            "domains": dict,
            "class_interval_levels": dict,
            "class_values": dict,
            "free_token_ids": list,
        }
        for name, kind_of in empty.items():
            if getattr(self, name) is None:
                setattr(self, name, kind_of())
        if self.num_token_id is None:
            self.num_token_id = self.text_config.vocab_size
        known = list(CausalQwenConfig.__annotations__)
        for name in kwargs:
            if close := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                raise ValueError(f"unknown setting {name}; did you mean {close[0]}?")
        super().__post_init__(**kwargs)
        self.check()

    def _read_section(self, title: str, parts: dict[str, tuple[str, ...]], section: Any) -> None:
        """Fields as `to_diff_dict` nests them."""
        places = {f"{title}.{part}.{name}": name for part, names in parts.items() for name in names}
        if not isinstance(section, dict):
            raise ValueError(f"{title}: expected settings by part, got {section!r}")
        for part, fields in section.items():
            if not isinstance(fields, dict):
                raise ValueError(f"{title}.{part}: expected settings by name, got {fields!r}")
            for name, value in fields.items():
                place = f"{title}.{part}.{name}"
                if place not in places:
                    near = difflib.get_close_matches(place, places, n=1, cutoff=0.0)[0]
                    raise ValueError(f"unknown setting {place}; did you mean {near}?")
                setattr(self, name, value)

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds: transformers' fields as they are, those of a graft by `SECTIONS`."""
        fields = super().to_diff_dict() | {"format_version": FORMAT}
        fields.pop("auto_map", None)  # names a file that lies beside another checkpoint (`modeling.remote_code`)
        # Values as they are here: transformers goes into dicts, and changes what is called "dtype" or "_commit_hash" there.
        own = {name: copy.deepcopy(value) for name, value in vars(self).items() if name in fields}
        for title, parts in SECTIONS.items():
            fields[title] = {part: {name: own[name] for name in names if name in own} for part, names in parts.items()}
            for names in parts.values():
                for name in names:
                    fields.pop(name, None)
        return fields

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: transformers would copy this library's own files into checkpoints (`modeling.remote_code`)."""

    def check(self) -> None:
        """ValueError unless every value is one that there is, and goes with the others; before training and saving too."""
        check_values(CausalQwenConfig, vars(self))
        for name in (name for parts in SECTIONS.values() for names in parts.values() for name in names):
            try:
                json.dumps(getattr(self, name))
            except TypeError as error:
                raise ValueError(
                    f"{name}: no file can hold it ({error}); give plain numbers, lists and texts"
                ) from None
        if self.context_length is not None and self.context_length < 1:
            raise ValueError(f"max_position_embeddings: a context holds a token at least, got {self.context_length}")
        rows = self.text_config.vocab_size
        if self.num_token_id > rows:
            raise ValueError(f"num_token_id {self.num_token_id} lies outside the {rows} rows of the vocabulary matrix")
        if wrong := [index for index in self.free_token_ids if not 0 <= index < rows]:
            raise ValueError(f"free_token_ids: {wrong[0]} lies outside the {rows} rows of the vocabulary matrix")
        if self.num_token_id in self.free_token_ids:
            raise ValueError(f"num_token_id {self.num_token_id} is also listed among the free rows")
        if self.causal_size > self.hidden_size:
            raise ValueError(f"causal_size {self.causal_size} does not lie in 1 to {self.hidden_size}, the hidden size")
        if self.start not in STARTS:
            raise ValueError(f"unknown start {self.start!r}; known starts: {', '.join(STARTS)}")
        if self.max_scale is not None and not self.max_scale > self.initial_scale:
            raise ValueError(f"max_scale {self.max_scale} leaves no room above the initial scale {self.initial_scale}")
        if self.domain is not None and self.domain not in self.domains:
            raise ValueError(f"there is no domain {self.domain!r}; known domains: {', '.join(self.domains) or 'none'}")
        if self.value_crossing > 1:
            self.require("value_crossing above 1")
        _check_axis("", self.value_transform, self.value_range)
        if self.individual_levels is not None:
            _check_individual_levels(self.individual_levels)
        for name, axis in self.class_values.items():
            if axis.keys() != set(_AXIS):
                raise ValueError(
                    f"class_values[{name!r}]: expected {', '.join(_AXIS)}, got {', '.join(axis) or 'nothing'}"
                )
            check_values(CausalQwenConfig, axis, f"class_values[{name!r}].")
            _check_axis(f"class_values[{name!r}].", axis["value_transform"], axis["value_range"])

    @property
    def domain_settings(self) -> dict[str, Any]:
        """Settings of the domain that is asked."""
        return self.domains[self.domain]

    @property
    def context(self) -> Context:
        """What the context holds of a number."""
        return CONTEXTS[self.number_context]

    @property
    def by_tokens_alone(self) -> bool:
        """Whether what follows a context is known by its tokens and their cache: no value of a number stands in it, and what a
        number followed from, by which it is copied, need not be kept."""
        return self.context.hides and not self.copy_numbers

    def allows(self, what: str) -> bool:
        """Whether the settings are those of `parts.compatibility.NEEDS`."""
        return not missing(what, vars(self))

    def require(self, what: str) -> None:
        """ValueError where `what` is asked for and the settings of `parts.compatibility.NEEDS` are others."""
        check_needs(what, vars(self))

    def check_plan(self, plan: CausalDecoding) -> None:
        """ValueError for a plan that asks for what the settings are not there for."""
        if plan.noises:
            self.require("a text under observed noise")
        if plan.restricts:
            self.require("top_k, top_p or min_p in a plan")

    @property
    def num_token_appended(self) -> bool:
        """Whether `<NUM>` stands after the vocabulary matrix instead of on one of its rows."""
        return self.num_token_id == self.text_config.vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of columns of `logits`."""
        return self.text_config.vocab_size + self.num_token_appended

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        """The backbone's configuration, its `vocab_size` that of `logits`: beams and transition scores ask for it here."""
        config: PreTrainedConfig = super().get_text_config(*args, **kwargs)
        if config is self.text_config and self.num_token_appended:
            config = copy.copy(config)
            config.vocab_size = self.vocab_size
        return config

    @property
    def context_length(self) -> int | None:
        """How many tokens a context holds; None for any number."""
        return context_length(self.text_config)

    @property
    def hidden_size(self) -> int:
        """H of the backbone."""
        return self.text_config.hidden_size


def context_length(config: Any) -> int | None:
    """How many tokens the context of a backbone of this configuration holds; None for any number."""
    return getattr(config, "max_position_embeddings", None)


def _check_individual_levels(fitted: dict[str, Any]) -> None:
    if fitted.keys() != vars(IndividualLevels)["__annotations__"].keys():
        raise ValueError(f"individual_levels: expected who, noise, levels, got {', '.join(fitted) or 'nothing'}")
    check_values(IndividualLevels, fitted, "individual_levels.")


def _check_axis(place: str, transform: dict[str, Any] | None, span: list[float] | None) -> None:
    try:
        ValueTransform(**(transform or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}value_transform: {error}") from None
    if span is not None and span[0] > span[1]:
        raise ValueError(f"{place}value_range: expected the least and the greatest value, got {span}")
