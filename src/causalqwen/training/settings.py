"""Settings of a training run, from a YAML file or keywords."""

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import yaml
from pydantic import Field
from torch import Tensor
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from causalqwen.checking import Count, NotNegative, Positive, Seed, Share, Whole, check_fields, nearest
from causalqwen.extras import extra
from causalqwen.modeling.backbones import bf16_pays
from causalqwen.numbers.support import Support
from causalqwen.numbers.transforms import TRANSFORMS


@dataclass(frozen=True)
class Stage:
    """What every stage has.

    Args:
        epochs: passes over the rows. batch_size: rows per step. accumulation: steps per update.
        learning_rate: peak of a warm-up (`warmup`, a share of the updates) and cosine schedule.
        weight_decay: of the value branch's matrices and of adapters.
        patience: stop after so many evaluations without a better value likelihood (for the heads, L_cls) on the evaluation
            rows (0: never); the best state is kept.
    """

    epochs: Count = 40
    batch_size: Count = 64
    accumulation: Count = 1
    learning_rate: NotNegative = 1e-3
    weight_decay: NotNegative = 0.1
    warmup: Share = 0.1
    patience: Whole = 0

    needs: ClassVar[dict[str, tuple[str, ...]]] = {}  # by the name of a setting, those that do nothing without it

    def __post_init__(self) -> None:
        check_fields(self)
        for needed, names in self.needs.items():
            for one in dataclasses.fields(self):
                if one.name in names and getattr(self, one.name) != one.default and not getattr(self, needed):
                    raise ValueError(f"{one.name} does nothing without {needed}")


@dataclass(frozen=True)
class ValueStage(Stage):
    """Stage 1: the value branch, the value head and `<NUM>`'s own row and threshold, on features kept on disk.

    The backbone and everything that text reads stay frozen: a text without numbers stays as it was, bit for bit.

    Args:
        standardize: fit the mean and standard deviation by which the branch reads the features.
        center: start at the centre of the value axis, with the spread of the training values, and not at W_reg times the
            average features. Rows that name individuals always start there.
        scalar_learning_rate: the rate of single numbers, which have to move further than any weight: the copy head's biases
            and, where rows name individuals, the noise's scale and the value head's bias.
    """

    standardize: bool = True
    center: bool = False
    scalar_learning_rate: NotNegative = 0.03


@dataclass(frozen=True)
class ChosenStage(ValueStage):
    """Stage 1 by default (`values: auto`): in closed form where `reads_whole` allows it, as people held out choose where rows
    name individuals (`ChoiceOfPeople`), elsewhere by gradients."""


@dataclass(frozen=True)
class HeadStage(Stage):
    """The heads on L_cls of the whole vocabulary, on features kept on disk: the documents' own training (overview 2.5).

    It trains abduction, noise and threshold beside all that stage 1 trains. With W_cls and b_cls, by choice, it is
    the documents' first stage (architecture 4.3.1). It moves the language, and not for the better (experiments 5). Train
    values instead, unless this stage is what you study.

    Args:
        score_matrix: "kept": the backbone's lm_head stays as it is (a matrix of the model's own is trained); "own": the model
            gets W_cls and b_cls of its own, see `own_scores`, and the backbone stays bit for bit; "shared": lm_head itself is
            trained. Where that is tied to the embedding, features move with it, and the stage reads tokens.
        negatives: wrong tokens per step, a weighted sample whose loss and gradient are those of all of them in
            expectation (theory 3.7); 0 for all.
        domain: fit only the abduction network of this domain, in closed form (`fit_domain`), which is made if it is not there;
            action law, base and value head stay bit for bit (overview 2.3). domain_layers: its hidden layers, which stay as
            drawn. domain_limit: of its divergence from the base at every position. The other settings are for gradients.
        noise_learning_rate: of |b_noise| and the thresholds, in shares of their size: they have further to go than a weight.
    """

    epochs: Count = 1
    batch_size: Count = 16
    learning_rate: NotNegative = 1e-4
    weight_decay: NotNegative = 0.0
    score_matrix: Literal["kept", "own", "shared"] = "kept"
    negatives: Whole = 0
    domain: str | None = None
    domain_layers: Whole = 0
    domain_limit: Positive = 0.1
    noise_learning_rate: NotNegative = 0.01

    needs = {"domain": ("domain_layers", "domain_limit")}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        own = "domain", "domain_layers", "domain_limit"
        given = [f.name for f in dataclasses.fields(self) if f.name not in own and getattr(self, f.name) != f.default]
        if self.domain is not None and given:
            raise ValueError(f"a domain is fitted in closed form: leave {given[0]} out")

    @property
    def domain_settings(self) -> dict[str, Any]:
        return {"layers": self.domain_layers, "limit": self.domain_limit}


@dataclass(frozen=True)
class TokenStage(Stage):
    """A stage that moves the backbone, and therefore reads tokens; it trains all that stage 1 trains as well, and `<NUM>`'s
    input row and direction.

    Args:
        whole_vocabulary: train on L_cls of all tokens, and with it abduction, noise and thresholds too: everything at once, as
            in the documents' second stage (architecture 4.3.1). By default `<NUM>`'s own term alone is trained, because rows
            with numbers should not teach words (theory 4). negatives: wrong tokens per step, see `HeadStage`.
            abduction_learning_rate: of the abduction network. noise_learning_rate: see `HeadStage`.
        anchor: weight of KL(backbone || model) on plain text, which holds the language in place where training would
            move it (experiments 5); 0 for none. anchor_text: a file of that text, None for the speeches that come along.
            anchor_tokens: of it per step.
        direction: train w, the direction of numbers; False keeps it as it started (overview 2.1 allows both).
    """

    epochs: Count = 1
    batch_size: Count = 16
    learning_rate: NotNegative = 2e-4
    weight_decay: NotNegative = 0.0
    whole_vocabulary: bool = False
    negatives: Whole = 0
    abduction_learning_rate: NotNegative = 1e-4
    noise_learning_rate: NotNegative = 0.01
    anchor: NotNegative = 0.0
    anchor_text: str | None = None
    anchor_tokens: Count = 128
    direction: bool = True

    needs = {  # noqa: RUF012
        "whole_vocabulary": ("negatives", "abduction_learning_rate", "noise_learning_rate"),
        "anchor": ("anchor_text", "anchor_tokens"),
    }


@dataclass(frozen=True)
class LoraStage(TokenStage):
    """Stage 2: LoRA adapters in the backbone, merged at the end.

    Args:
        rank, alpha, dropout: of the adapters. target_modules: names of the linear layers that get one.
    """

    rank: Count = 8
    alpha: Positive = 16
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class BackboneStage(TokenStage):
    """The backbone's own weights, at a learning rate of their own (architecture 4.3.1).

    Args:
        layers: how many of its last layers; 0 for all of it, embeddings and vocabulary matrix too.
        backbone_learning_rate: theirs; `learning_rate` is that of the heads.
    """

    learning_rate: NotNegative = 1e-4
    layers: Whole = 0
    backbone_learning_rate: NotNegative = 1e-5


STAGES: dict[str, type[Stage]] = {
    "values": ValueStage,
    "heads": HeadStage,
    "lora": LoraStage,
    "backbone": BackboneStage,
}
"""By name, in the order in which they run."""

SHIPPED = {"documents": Path(__file__).with_name("documents.yaml")}
"""Settings files that come with the package, by name."""


@dataclass(frozen=True)
class TrainSettings:
    """A run: what to fit before, which stages to train, what to report.

    Args:
        value_transform: "affine", "symlog", "log" or "quantile", fitted to the training values, or "identity"; "keep" for the
            model's own; "auto": chosen with `values`, else affine, or the model's own where it has learned values already. See
            `ValueTransform`.
        support: where values can lie: "auto" for what the training values show (`Support.seen_in`), [low, high] or
            [low, high, step], null for an end that is open; null for anywhere.
        class_transforms: fit it to each class's own values instead: one model of quantities in different units. Every row with
            a number then names its `class`, and so does whoever asks for one.
        values: stage 1, or None to leave it out; "auto": see `ChosenStage`; settings that the graft was given are kept.
        heads: the heads' stage after it, or None. lora: stage 2, or None. backbone: the backbone's own weights, or None.
        recalibrate: fit the intervals' levels on the evaluation rows at the end.
        max_grad_norm: gradients of an update are scaled down to this length; 0 leaves them.
        logging_steps: updates between two records of train/*. evaluations: how often per stage eval/* is taken and
            a checkpoint written, from which a killed run can be resumed.
        assistant_only_loss: of messages, learn only what the assistant says; read where rows are encoded.
        bf16: take the backbone's matrix products in bfloat16 (autocast); weights, heads and losses stay as they are. "auto":
            where numbers alone are trained and this machine is faster so (`bf16_pays`).
        report_to: trackers beside the JSONL file: tensorboard, wandb, trackio, mlflow.
        fsdp: on many ranks, spread the parameters over them (FSDP2) instead of a copy on each (DDP); nothing on one.
    """

    seed: Seed = 0
    value_transform: str = "auto"
    support: str | list[float | None] | None = "auto"
    class_transforms: bool = False
    values: ValueStage | None = field(default_factory=ChosenStage)
    heads: HeadStage | None = None
    lora: LoraStage | None = None
    backbone: BackboneStage | None = None
    recalibrate: bool = True
    max_grad_norm: NotNegative = 1.0
    logging_steps: Count = 20
    evaluations: Count = 10
    assistant_only_loss: bool = False
    bf16: bool | Literal["auto"] = "auto"
    report_to: tuple[str, ...] = ()
    fsdp: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.value_transform not in (*TRANSFORMS, "keep", "auto"):
            known = ", ".join((*TRANSFORMS, "keep"))
            raise ValueError(f"value_transform {self.value_transform!r} is not one of {known} and auto")
        self.support_of(torch.zeros(0))
        if self.class_transforms and self.value_transform == "keep":
            raise ValueError(
                "class_transforms fits axes, and value_transform 'keep' keeps those that are there; choose one"
            )
        for name in self.report_to:
            if name not in INTEGRATION_TO_CALLBACK:
                raise ValueError(f"report_to: {name!r} is no tracker; {nearest(name, INTEGRATION_TO_CALLBACK)}")
            if name not in get_available_reporting_integrations():
                raise ValueError(f"report_to: {name} is not installed; pip install {name}, or leave it out")
        if self.lora is not None:
            with extra("lora", "the stage lora"):
                import peft  # noqa: F401
        if all(getattr(self, name) is None for name in STAGES):
            raise ValueError("nothing to train: all stages are left out")

    def takes_bf16(self, model: Any, examples: Iterable[Any] = ()) -> bool:
        """Whether the backbone's products are taken in bfloat16 here. "auto" leaves float32 to rows that name people: their
        contexts are few, and may differ by little more than rounding."""
        if self.bf16 != "auto":
            return self.bf16
        named = any(example.individual is not None for example in examples)
        return not (named or self.heads or self.lora or self.backbone) and bf16_pays(model)

    def support_of(self, values: Tensor) -> Support:
        """Where the values [n] of a training set can lie. ValueError for a `support` that is none."""
        if self.support is None or self.support == "auto":
            return Support() if self.support is None else Support.seen_in(values)
        if isinstance(self.support, str) or len(self.support) not in (2, 3):
            raise ValueError(f"support: expected auto, null, [low, high] or [low, high, step], got {self.support!r}")
        given = Support(*self.support)
        if values.numel() and not bool((given.held(values) == values).any()):
            raise ValueError(
                f"support: none of the training values, such as {values[0].item():g}, lies in {self.support}"
            )
        return given

    @classmethod
    def from_yaml(cls, path: str | Path) -> "TrainSettings":
        """Settings from a YAML file, or "documents" for the original design's own training (`documents.yaml` beside this file);
        ValueError names an unknown key and what it may have meant."""
        path = SHIPPED.get(str(path), Path(path))
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file")
        try:
            given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path.name} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(given, dict):
            raise ValueError(f"{path.name}: expected keys and values")
        return cls.from_dict(given, path.name)

    @classmethod
    def from_dict(cls, given: dict[str, Any], place: str = "settings") -> "TrainSettings":
        """Settings from nested dictionaries, as a YAML file holds them."""
        given = dict(given)
        for name, stage in STAGES.items():
            if name == "values" and given.get(name) == "auto":
                given[name] = ChosenStage()
            elif isinstance(given.get(name), dict):
                given[name] = _build(stage, given[name], f"{place}, {name}")
            elif given.get(name) is True:
                given[name] = stage()
            elif given.get(name) is False:
                given[name] = None
        return _build(cls, given, place)


def _build(kind: type, given: dict[str, Any], place: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(kind)}
    made = {}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{place}: unknown setting {name}; {nearest(str(name), known)}")
        default = known[name].default
        if isinstance(default, tuple) and isinstance(value, str):
            value = (value,)
        elif isinstance(default, float) and isinstance(value, str):
            with suppress(ValueError):
                value = float(value)  # YAML reads 2e-4 as text
        made[name] = value
    try:
        return kind(**made)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
