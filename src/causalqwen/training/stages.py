"""The stages of a training run: what each trains, on what, and the Trainer that all of them share."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import EarlyStoppingCallback, TrainingArguments

from causalqwen.checking import nearest
from causalqwen.data import Example, number_classes
from causalqwen.kernels import linear_ovr_loss
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.abduction import check_domain_name
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.grafting import own_scores
from causalqwen.modeling.heads import alone_at_their_rate, number_parameters
from causalqwen.modeling.layer_shift import decoder_layers
from causalqwen.parts.branch import ValueBranch
from causalqwen.parts.crossing import Crossing
from causalqwen.training import ranks, sharding
from causalqwen.training.anchor import TextAnchor
from causalqwen.training.announcing import announce
from causalqwen.training.batches import ExampleRows, FactRows, class_code
from causalqwen.training.closed_form import LEAST_SPREAD
from causalqwen.training.features import FactStore, TokenFacts, stream_facts
from causalqwen.training.negatives import sampling_of_negatives
from causalqwen.training.scores import joint_losses, score_tokens
from causalqwen.training.settings import HeadStage, LoraStage, TrainSettings
from causalqwen.training.trainer import CausalTrainer, MetricsFile, TrainedForCausalLM, last_checkpoint

_DIRECTIONS = 8
"""Directions in which an individual may turn around from context to context, under a Gaussian law."""

_LEAST_SHARE = 0.05
"""The share of the noise's standard deviation that a start leaves to who speaks."""

_FEWEST_PEOPLE = 4
"""Who tell how people differ, before anything is learned."""

_QUARTILE = 0.6745
"""The quartile of a normal distribution, in standard deviations."""

_NOISE_AT_CENTER = 0.05
"""Where no individual is shared, a value cannot tell noise from who speaks: little of it, because it is a least scale."""

_PEOPLE_RIDGE = 1e-2
"""Penalty of a row, in the start of how far people differ."""

_LEAST_LEFT = 1e-4
"""The least share of the axis that a regression leaves of a value that it has by heart."""

_RIDGES = tuple(10.0**power for power in range(-4, 3))
"""Penalties that are tried in the start on features, which are many."""

WORK = "work"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Run:
    """What the stages of one run share. anchor_texts: of the stages that have one, by their name. watched: whether more is
    looked at than values: when a number is announced, and drawn individuals. trainer: what trains them."""

    model: CausalQwenForCausalLM
    train_examples: Sequence[Example]
    eval_examples: Sequence[Example]
    output: Path
    settings: TrainSettings
    anchor_texts: dict[str, str]
    watched: ClassVar[bool] = True
    trainer: ClassVar[type[CausalTrainer]] = CausalTrainer

    @property
    def work(self) -> Path:
        """Kept facts and checkpoints."""
        return self.output / WORK

    def train_facts(self) -> FactStore:
        """The facts of the training rows under the model as it is now, without the rest of the vocabulary: the stages on facts
        learn `<NUM>` and values alone, or take the rest from the features."""
        return FactStore.build(self.model, self.train_examples, self.work, title="training rows", rest=False)

    @property
    def class_names(self) -> list[str]:
        """The classes that have axes of their own, in their order."""
        return self.model.value_axes.apart

    def class_codes(self) -> list[int] | None:
        """`class_code` of every training row; None where classes have no axes."""
        names = self.class_names
        return [class_code(example, names) for example in self.train_examples] if names else None

    def eval_facts(self) -> FactStore | None:
        """The facts of the evaluation rows, if there are any."""
        if not self.eval_examples:
            return None
        return FactStore.build(self.model, self.eval_examples, self.work, title="evaluation rows")

    def scores(self, model: CausalQwenForCausalLM, blocks: Iterable[TokenFacts]) -> dict[str, Any]:
        """`score_tokens` of this rank's share of the evaluation rows."""
        classes = number_classes(self.eval_examples, model.config.num_token_id) if model.value_axes.apart else None
        return score_tokens(model, blocks, split=True, classes=classes, watched=self.watched)


def check_stages(
    model: CausalQwenForCausalLM, settings: TrainSettings, train_examples: Iterable[Example], eval_examples: Sequence
) -> None:
    """Whatever the stages could only refuse, or pass over, hours later. ValueError for what does not go with this model, these
    rows or this machine."""
    stages = {name: getattr(settings, name) for name in TRAINERS if getattr(settings, name) is not None}
    for name, stage in stages.items():
        if stage.patience and not len(eval_examples):
            raise ValueError(f"{name}: patience does nothing without evaluation rows")
        if not getattr(stage, "direction", True):
            model.config.require("direction: false")
    if settings.values is not None and any(example.individual is not None for example in train_examples):
        model.config.require("training on rows that name individuals")
        if not bool(model.action.noise.any()):
            raise ValueError(
                "values: rows that name individuals tell who from noise, and this model has none: graft it with initial_noise"
            )
    if settings.values is not None and settings.values.center:
        model.config.require("values: center")
    if settings.lora is not None:
        _check_lora(model, settings.lora)
    layers = len(decoder_layers(model.backbone))
    if settings.backbone is not None and settings.backbone.layers > layers:
        raise ValueError(f"backbone: {settings.backbone.layers} layers are to be trained, and there are {layers}")
    if settings.heads is not None and settings.heads.score_matrix == "shared" and model.score_head is not None:
        raise ValueError("heads: score_matrix 'shared' is the backbone's lm_head; this model's scores have their own")
    if settings.heads is not None and settings.heads.domain is not None:
        _check_domain(model, settings.heads.domain, settings.heads.domain_asked)
    for name, stage in stages.items():
        if (asked := getattr(stage, "negatives", 0)) > (most := int(model.action.vocabulary_mask.sum()) - 1):
            raise ValueError(f"{name}: {asked} negatives of {most} tokens")
    if settings.ovr_impl != "auto":
        _try_loss(settings.ovr_impl, model.device)


def _check_lora(model: CausalQwenForCausalLM, stage: LoraStage) -> None:
    backbone, targets = model.backbone, stage.target_modules
    if not targets:
        raise ValueError("lora: target_modules names nothing to adapt")
    table, head = backbone.get_input_embeddings(), backbone.get_output_embeddings()
    for name, part in backbone.named_modules():
        if part in (table, head) and table.weight is head.weight and name.split(".")[-1] in targets:
            raise ValueError(
                f"lora: this backbone ties its embedding and lm_head, which an adapter of {name} would move at once; leave it "
                "out of target_modules"
            )
    names = {name.split(".")[-1] for name, part in backbone.named_modules() if isinstance(part, torch.nn.Linear)}
    if unknown := [name for name in targets if name.split(".")[-1] not in names]:
        raise ValueError(f"lora: this backbone has no {unknown[0]} to adapt; {nearest(unknown[0], sorted(names))}")


def _try_loss(impl: str, device: torch.device) -> None:
    loc, weight = torch.zeros(2, 4, device=device), torch.zeros(3, 4, device=device, requires_grad=True)
    targets = torch.zeros(2, dtype=torch.int64, device=device)
    try:
        linear_ovr_loss(loc, torch.ones(2, device=device), weight, None, 0.0, targets, impl=impl).backward()
    except Exception as error:  # whatever a compiler has to say
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"ovr_impl: {impl} does not run here: {told[0]}") from error


# ---- stage 1 ---------------------------------------------------------------------------------------------------------


def _train_values(run: Run) -> None:
    model, stage = run.model, run.settings.values
    train_store, eval_store = run.train_facts(), run.eval_facts()
    if stage.standardize:
        _fit_standardization(model, train_store)
    _train_numbers_only(model)
    if model.action.scales.common:  # else a threshold says nothing of others: `<NUM>`'s row is learned in passing
        if run.watched:
            announce(model, train_store)
        for fitted in (model.action.num_row, model.action.num_bias):
            fitted.requires_grad_(False)
    rows = FactRows(train_store, [example.individual for example in run.train_examples], run.class_codes())
    single = [f"model.{name}" for name in alone_at_their_rate(model)]
    if rows.people:
        model.value_branch.let_lean()
        model.config.value_branch_direct = True
        let_cross(model)
        _center(model, model.value_branch, noise=1.0)
        model.value_branch.log_noise.requires_grad_(True)
        single += ["model.value_branch.log_noise", "model.action.value_head.bias"]
    elif stage.center:
        _center(model, model.value_branch, noise=_NOISE_AT_CENTER)
    if model.value_branch is not None and model.value_branch.direct is not None:
        _lean(model, train_store)
    if rows.people:
        _lean_on_people(model, train_store, rows)
    trained = TrainedForCausalLM(model, whole_vocabulary=False)
    rates = dict.fromkeys(single, stage.scalar_learning_rate)
    owners = [example.individual for example in run.eval_examples]
    shared = rows.people > 0 and any(owners) and bool(np.isfinite(eval_store.facts.values).any())

    def scores(model: CausalQwenForCausalLM) -> dict[str, Any]:
        made = run.scores(model, eval_store.blocks(split=True))
        if shared:  # whoever crosses is seen by what two of their values say of each other
            losses = sharding.on_whole(model, joint_losses, eval_store, owners)[0]
            made["metrics"]["joint_reg_loss"] = losses.mean().item()
        return made

    _run_stage(run, "values", trained, rows, scores, "eval_joint_reg_loss" if shared else "eval_reg_loss", rates)


@torch.no_grad()
def _lean_on_people(model: CausalQwenForCausalLM, store: FactStore, rows: FactRows) -> None:
    """Start who speaks, and the noise beside them, where the values that one person said say that they are: r in
    `Crossing.lean`, and the size of what people differ by as a ridge regression of its logarithm on the features. Of fewer than
    `_FEWEST_PEOPLE` nothing is said: who and noise stay alike."""
    branch, law = model.value_branch, model.action.value_law
    owners = np.full(len(store), -1)
    for person, of_person in enumerate(rows.groups[: rows.people]):
        owners[of_person] = person
    people = np.repeat(owners, np.diff(store.offsets))
    told = np.isfinite(store.facts.values) & (people >= 0)
    if (np.bincount(people[told]) > 1).sum() < _FEWEST_PEOPLE:
        return
    told = torch.from_numpy(told)
    features = store.facts.tensor("features")[told].to(model.device)
    was_training = branch.training
    model.eval()
    features, places = features.unique(dim=0, return_inverse=True)
    chain, x = Chain(model, features), branch.standardize(features)
    left = model.value_transform.forward(store.facts.tensor("values")[told]).to(model.device) - chain.value()[0][places]
    noise_scale = chain.value_loadings()[1].double().mean().item()
    x = x[places]
    size, noise = branch.crossing.lean(x, left, torch.from_numpy(people)[told].to(model.device))
    unit = _QUARTILE / law.quantile(torch.tensor(0.75)).item()  # scale for a standard deviation: quartiles alike
    zero, scale = torch.zeros_like(chain.loc_U), chain.read_by_values()[1]
    branch.train(was_training)
    if not noise > 0:  # everybody said the same
        return
    before = model.action.value(zero, scale)[1].double()[places]
    step = (unit * size.clamp(min=_LEAST_SHARE * noise)).log() - before.log()
    middle = x.double().mean(0)
    slopes, _ = _ridge((x.double() - middle).cpu(), (step - step.mean()).cpu(), (_PEOPLE_RIDGE,))
    branch.direct[1].add_(slopes.to(branch.direct))
    start = step.mean() - middle.cpu() @ slopes
    branch.residual.last.bias[branch.causal_size :] += start.item()
    branch.log_noise.add_(math.log(unit * noise / noise_scale))


def let_cross(model: Any) -> Crossing:
    """The crossing of how a model's value head reads, a branch, which is made where there is none: nobody crosses yet."""
    reader, config = model.value_reader, model.config
    if reader.crossing is None:
        config.value_crossing = _DIRECTIONS if model.action.value_law.alpha == 2 else 1
        made = Crossing(len(reader.feature_mean), config.causal_size, config.value_crossing)
        reader.crossing = made.to(reader.feature_mean.device)
    crossing: Crossing = reader.crossing
    return crossing


@torch.no_grad()
def _center(model: CausalQwenForCausalLM, branch: ValueBranch, noise: float) -> None:
    """Start at the axis's own centre, where no individual has a mean to make up for: who speaks has scale 1 there, the
    noise `noise`."""
    law, head = model.action.value_law, model.action.value_head
    was_training, mean = branch.training, branch.feature_mean.unsqueeze(0)
    loc, scale = branch.eval()(mean, *model.abduction(mean[:, : model.config.hidden_size]))
    branch.train(was_training)
    row = head.weight
    head.bias.sub_(model.action.value(loc, scale)[0].squeeze())
    spread = law.linear_scale(scale, row).log().squeeze()
    branch.residual.last.bias[branch.causal_size :] -= spread
    own = law.linear_scale(model.action.noise.unsqueeze(0), row).squeeze()
    if own > 0:  # a start without noise keeps none
        branch.log_noise.copy_(math.log(noise) - own.log())


@torch.no_grad()
def _lean(model: CausalQwenForCausalLM, store: FactStore) -> None:
    """Start at the ridge regression of t(value) on the features, with the spread that it leaves: a goes along W_reg, and d
    takes back what W_reg makes of z by itself. t(value) is clipped there to where 95% of it lie, widened by as much on both
    sides."""
    branch, head, law = model.value_branch, model.action.value_head, model.action.value_law
    branch.direct.zero_()  # what an earlier training left there
    learned = torch.from_numpy(np.isfinite(store.facts.values))
    axis = model.value_transform.forward(store.facts.tensor("values")[learned]).double()
    low, high = (torch.quantile(axis[:: 1 + len(axis) // 1_000_000], level).item() for level in (0.025, 0.975))
    axis = axis.clamp(2 * low - high, 2 * high - low)
    features = store.facts.tensor("features")[learned].to(model.device)
    x = branch.standardize(features).double()
    slopes, left = _ridge((x - x.mean(0)).cpu(), axis - axis.mean(), _RIDGES)
    left = left + axis.mean()
    # The chain where each feature in turn stands one standard deviation off its mean: loc_Y is linear in z there.
    was_training = branch.training
    steps = torch.cat([branch.feature_mean[None], branch.feature_mean + torch.diag(branch.feature_std)])
    loc, scale = (column.double().cpu() for column in Chain(model.eval(), steps.to(features.dtype)).value())
    branch.train(was_training)
    branch.along.copy_(head.weight[0] / head.weight.square().sum())
    branch.direct[0].copy_(loc[0] - loc[1:] + slopes)
    head.bias.add_((left.median() - loc[0] - x.mean(0).cpu() @ slopes).item())
    apart = (left - left.median()).abs().clamp(min=_LEAST_LEFT)
    least = apart.median() / law.quantile(torch.tensor(0.75))
    step = float((least.clamp(min=1e-6) / scale[0]).log())
    branch.residual.last.bias[branch.causal_size :] += step
    branch.log_noise.add_(step)


def _ridge(x: torch.Tensor, y: torch.Tensor, penalties: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """The ridge regression of y [n] on x [n, k], both centred float64, whose errors on rows left out one by one are least: its
    slopes [k] and these errors [n]. penalties: of a row."""
    rows, places, counts = x.unique(dim=0, return_inverse=True, return_counts=True)
    if len(rows) < len(x) // 2:  # rows that are alike weigh more
        weights = counts.to(x.dtype).sqrt().unsqueeze(-1)
        left, widths, right = torch.linalg.svd(rows * weights, full_matrices=False)
        left = (left / weights)[places]
    else:
        left, widths, right = torch.linalg.svd(x, full_matrices=False)
    seen, best = left.T @ y, None
    for penalty in penalties:
        shrunk = widths.square() / (widths.square() + penalty * len(x))
        reach = (left.square() @ shrunk + 1 / len(x)).clamp(max=1 - 1e-9)  # the centre is one more that is fitted
        errors = (y - left @ (shrunk * seen)) / (1 - reach)
        if best is None or errors.square().sum() < best[1].square().sum():
            best = right.T @ (shrunk / widths.clamp(min=1e-300) * seen), errors
    return best


def _fit_standardization(model: CausalQwenForCausalLM, store: FactStore) -> None:
    """Mean and standard deviation of the features that precede values to learn, for the value branch.

    A coordinate that hardly varies, as where all rows share a few prompts, is divided by `LEAST_SPREAD` of its size.
    """
    if model.value_branch is None:
        return
    learned = np.isfinite(store.facts.values)
    features = store.facts.tensor("features")[torch.from_numpy(learned)].double()
    std, mean = torch.std_mean(features, dim=0)
    std = torch.maximum(std, LEAST_SPREAD * features.square().mean(0).sqrt())
    std = torch.where(std.isfinite() & (std > 1e-6), std, 1.0)
    model.value_branch.feature_mean.copy_(mean)
    model.value_branch.feature_std.copy_(std)


def _check_domain(model: CausalQwenForCausalLM, name: str, settings: dict[str, Any]) -> None:
    """ValueError for a name that `add_domain` would not take, or settings that the domain of this name does not have."""
    own = model.config.domains.get(name)
    if own is None:
        return check_domain_name(name)
    for key, value in settings.items():
        if value != own.get(key):
            raise ValueError(f"domain {name!r} is there already, its {key} {own.get(key)!r}: leave domain_{key} out")


# ---- the heads -------------------------------------------------------------------------------------------------------


def _train_heads(run: Run) -> None:
    model, stage = run.model, run.settings.heads
    if stage.score_matrix == "own" and model.score_head is None:
        own_scores(model)
    if stage.domain is not None:
        model.requires_grad_(False)
        if stage.domain in model.config.domains:
            model.set_domain(stage.domain)
        else:
            model.add_domain(stage.domain, **stage.domain_settings)
        model.abduction.domains[stage.domain].requires_grad_(True)
    else:
        _train_numbers_only(model)
        action = model.action
        parts = (model.abduction, action.b_noise, action.threshold, action.token_thresholds, model.score_head)
        for part in parts:
            if part is not None:
                part.requires_grad_(True)
    if stage.score_matrix == "shared":
        model.backbone.get_output_embeddings().requires_grad_(True)
    if _moves_embedding(model, stage):
        sampled = None
        if stage.negatives:
            sampled = sampling_of_negatives(model, next(stream_facts(model, run.train_examples))[1], stage.negatives)
        _run_on_tokens(run, "heads", TrainedForCausalLM(model, heads=True, negatives=sampled), best="eval_cls_loss")
        return
    train_store, eval_store = run.train_facts(), run.eval_facts()
    sampled = sampling_of_negatives(model, train_store.facts, stage.negatives)
    trained = TrainedForCausalLM(model, heads=True, negatives=sampled, closeness=stage.closeness)
    _run_stage(
        run,
        "heads",
        trained,
        FactRows(train_store, classes=run.class_codes()),
        lambda model: run.scores(model, eval_store.renewed(model, split=True)),
        best="eval_cls_loss",
    )


def _moves_embedding(model: CausalQwenForCausalLM, stage: HeadStage) -> bool:
    """Whether the heads' stage trains the embedding too, which is one with the backbone's lm_head."""
    tied = model.backbone.get_output_embeddings().weight is model.backbone.get_input_embeddings().weight
    return stage.score_matrix == "shared" and tied


# ---- stage 2 ---------------------------------------------------------------------------------------------------------


def _train_lora(run: Run) -> None:
    from causalqwen.training.adapters import add_adapters  # PEFT comes with an extra

    model, stage = run.model, run.settings.lora
    _train_numbers_only(model)
    trained = _reading_tokens(run, "lora")
    torch.manual_seed(run.settings.seed)
    adapters = add_adapters(model.backbone, stage)
    _run_on_tokens(run, "lora", trained)
    adapters.merge_and_unload()


def _train_backbone(run: Run) -> None:
    model, stage = run.model, run.settings.backbone
    _train_numbers_only(model)
    trained = _reading_tokens(run, "backbone")
    for module in decoder_layers(model.backbone)[-stage.layers :] if stage.layers else [model.backbone]:
        module.requires_grad_(True)
    own = (name for name, parameter in trained.named_parameters() if parameter.requires_grad)
    rates = {name: stage.backbone_learning_rate for name in own if name.startswith("model.backbone.")}
    _run_on_tokens(run, "backbone", trained, rates=rates)


def _reading_tokens(run: Run, name: str) -> TrainedForCausalLM:
    """What a stage trains that moves the backbone, made while the backbone is what it was."""
    model, stage, text = run.model, getattr(run.settings, name), run.anchor_texts.get(name)
    model.numeric_embedding.requires_grad_(True)
    model.numeric_embedding.direction.requires_grad_(stage.direction)
    anchor = TextAnchor(model, text, stage.anchor_tokens) if text is not None else None
    sampled = None
    if stage.whole_vocabulary and stage.negatives:
        sampled = sampling_of_negatives(model, next(stream_facts(model, run.train_examples))[1], stage.negatives)
    return TrainedForCausalLM(model, stage.whole_vocabulary, anchor, stage.anchor, negatives=sampled)


def _run_on_tokens(run: Run, name: str, trained: TrainedForCausalLM, **settings: Any) -> None:
    _run_stage(
        run,
        name,
        trained,
        ExampleRows(run.train_examples, run.model.processor.tokenizer.pad_token_id, run.class_names),
        lambda model: run.scores(
            model, (facts for _, facts in stream_facts(model, run.eval_examples, title="evaluating", split=True))
        ),
        **settings,
    )


def _train_numbers_only(model: CausalQwenForCausalLM) -> None:
    """Freeze all but what only numbers are learned by."""
    model.requires_grad_(False)
    for parameter in number_parameters(model):
        parameter.requires_grad_(True)


# ---- all of them ------------------------------------------------------------------------------------------------------------


def _arguments(run: Run, name: str, updates: int, best: str) -> TrainingArguments:
    """A stage of so many updates, in the Trainer's words. best: the score by which its best state is kept."""
    settings, stage, evaluated = run.settings, getattr(run.settings, name), bool(run.eval_examples)
    every = max(1, updates // settings.evaluations)
    return TrainingArguments(
        output_dir=str(run.work / name),
        num_train_epochs=stage.epochs,
        per_device_train_batch_size=stage.batch_size,
        gradient_accumulation_steps=stage.accumulation,
        learning_rate=stage.learning_rate,
        weight_decay=stage.weight_decay,
        lr_scheduler_type="cosine",
        max_grad_norm=settings.max_grad_norm,
        warmup_steps=stage.warmup if updates > 1 else 0,  # the first update of a warm-up has the rate 0
        logging_steps=settings.logging_steps,
        eval_strategy="steps" if evaluated else "no",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=2,
        load_best_model_at_end=evaluated,
        metric_for_best_model=best if evaluated else None,
        greater_is_better=False,
        report_to=list(settings.report_to),
        seed=settings.seed,
        data_seed=settings.seed,
        remove_unused_columns=False,
        disable_tqdm=False,  # else transformers prints records to stdout
        dataloader_pin_memory=False,
        use_cpu=run.model.device.type == "cpu",
    )


def _run_stage(
    run: Run,
    name: str,
    trained: TrainedForCausalLM,
    dataset: FactRows | ExampleRows,
    scores: Callable[[CausalQwenForCausalLM], dict[str, Any]],
    best: str = "eval_reg_loss",
    rates: dict[str, float] | None = None,
) -> None:
    settings, stage, eval_examples = run.settings, getattr(run.settings, name), run.eval_examples
    whole = trained
    if settings.fsdp and ranks.world_size() > 1:
        trained = sharding.sharded(whole)
    model = trained.model
    updates = -(-len(dataset) // (stage.batch_size * stage.accumulation)) * stage.epochs
    arguments = _arguments(run, name, updates, best)
    callbacks = [EarlyStoppingCallback(stage.patience)] if stage.patience and eval_examples else []
    trainer = run.trainer(
        model=trained,
        args=arguments,
        train_dataset=dataset,
        eval_dataset=eval_examples or None,
        data_collator=dataset.collate,
        callbacks=callbacks,
        scorer=lambda: scores(model),
        metrics_file=MetricsFile(run.output / METRICS, name),
        rates=rates,
    )
    samples = trained.negatives is not None  # the same wrong tokens on all ranks, as in one process
    if ranks.rank() > 0 and not samples:
        torch.manual_seed(settings.seed + ranks.rank())  # dropout masks of its own
    checkpoint = ranks.from_main(last_checkpoint(run.work / name))
    if checkpoint:
        ranks.complete_random_states(checkpoint)
    stands = model.vocabulary().frozen() and not sharding.is_sharded(model)
    with model.frozen_vocabulary() if stands else nullcontext():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trained is not whole:
        sharding.restore(whole, trained)


TRAINERS: dict[str, Callable[[Run], None]] = {
    "values": _train_values,
    "heads": _train_heads,
    "lora": _train_lora,
    "backbone": _train_backbone,
}
"""By name, as `STAGES`."""
