"""The stages of a training run: what each trains, on what, and the Trainer that all of them share."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import EarlyStoppingCallback, TrainingArguments

from causalqwen.checking import nearest
from causalqwen.data import Example, number_classes
from causalqwen.extras import extra
from causalqwen.kernels import inclusion_probabilities
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.abduction import check_domain_name
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.grafting import own_scores
from causalqwen.modeling.heads import alone_at_their_rate, number_parameters
from causalqwen.modeling.layer_shift import decoder_layers
from causalqwen.parts.branch import ValueBranch
from causalqwen.parts.crossing import Crossing
from causalqwen.training import ranks
from causalqwen.training.anchor import TextAnchor
from causalqwen.training.announcing import announce
from causalqwen.training.batches import ExampleRows, FactRows, class_code
from causalqwen.training.closed_form import LEAST_SPREAD
from causalqwen.training.domain_fit import fit_domain
from causalqwen.training.features import FactStore, TokenFacts, stream_facts
from causalqwen.training.scores import joint_losses, score_tokens
from causalqwen.training.settings import HeadStage, LoraStage, TokenStage, TrainSettings
from causalqwen.training.trainer import BriefTrainer, CausalTrainer, MetricsFile, TrainedForCausalLM, last_checkpoint

_DIRECTIONS = 8  # in which an individual may turn around from context to context, under a Gaussian law
_LEAST_SHARE = 0.05  # of the noise's standard deviation that a start leaves to who speaks
_FEWEST_PEOPLE = 4  # who tell how people differ, before anything is learned
_QUARTILE = 0.6745  # of a normal distribution, in standard deviations
_NOISE_AT_CENTER = 0.05  # where no individual is shared, a value cannot tell noise from who speaks: it is a least scale
_PEOPLE_RIDGE = 1e-2  # penalty of a row, in the start of how far people differ
_LEAST_LEFT = 1e-4  # of the axis that a regression leaves of a value that it has by heart
_RIDGES = tuple(10.0**power for power in range(-4, 3))  # penalties that the start on features, which are many, tries

WORK = "work"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Run:
    """What the stages of one run share.

    anchor_texts: of the stages that have one, by their name. stores: the facts of training and evaluation rows, of a fit that
    is tried: of that the scores of values alone remain, and checkpoints are in memory.
    """

    model: CausalQwenForCausalLM
    train_examples: Sequence[Example]
    eval_examples: Sequence[Example]
    output: Path
    settings: TrainSettings
    anchor_texts: dict[str, str]
    stores: tuple[FactStore, FactStore] | None = None

    @property
    def work(self) -> Path:
        """Kept facts and checkpoints."""
        return self.output / WORK

    def train_facts(self) -> FactStore:
        """The facts of the training rows under the model as it is now, without the rest of the vocabulary: the stages on facts
        learn `<NUM>` and values alone, or take the rest from the features."""
        if self.stores:
            return self.stores[0]
        return FactStore.build(self.model, self.train_examples, self.work, title="training rows", rest=False)

    def eval_facts(self) -> FactStore | None:
        """The facts of the evaluation rows, if there are any."""
        if self.stores:
            return self.stores[1]
        rows = self.eval_examples
        return FactStore.build(self.model, rows, self.work, title="evaluation rows") if rows else None

    def scores(self, model: CausalQwenForCausalLM, blocks: Iterable[TokenFacts]) -> dict[str, Any]:
        """`score_tokens` of this rank's share of the evaluation rows."""
        classes = number_classes(self.eval_examples, model.config.num_token_id) if model.value_axes.apart else None
        return score_tokens(model, blocks, split=True, classes=classes, watched=not self.stores)


def check_stages(
    model: CausalQwenForCausalLM, settings: TrainSettings, train_examples: Iterable[Example], eval_examples: Sequence
) -> None:
    """ValueError for what does not go with this model, these rows or these ranks, which the stages could only refuse, or pass
    over, hours later."""
    stages = {name: getattr(settings, name) for name in TRAINERS if getattr(settings, name) is not None}
    for name, stage in stages.items():
        if stage.batch_size < ranks.world_size():
            raise ValueError(
                f"{name}: a batch of {stage.batch_size} rows cannot be split over {ranks.world_size()} ranks; "
                "batch_size counts the rows of all ranks together"
            )
        if stage.patience and not len(eval_examples):
            raise ValueError(f"{name}: patience does nothing without evaluation rows")
        if not getattr(stage, "direction", True):
            model.config.require("direction: false")
        if (asked := getattr(stage, "negatives", 0)) > (most := int(model.action.vocabulary_mask.sum()) - 1):
            raise ValueError(f"{name}: {asked} negatives of {most} tokens")
    heads, values = settings.heads, settings.values
    if values is not None and any(example.individual is not None for example in train_examples):
        model.config.require("training on rows that name individuals")
        if not bool(model.action.noise.any()):
            raise ValueError(
                "values: rows that name individuals tell who from noise, and this model has none: graft it with initial_noise"
            )
    if values is not None and values.center:
        model.config.require("values: center")
    if settings.lora is not None:
        _check_lora(model, settings.lora)
    layers = len(decoder_layers(model.backbone))
    if settings.backbone is not None and settings.backbone.layers > layers:
        raise ValueError(f"backbone: {settings.backbone.layers} layers are to be trained, and there are {layers}")
    if heads is not None and heads.score_matrix == "shared" and model.score_head is not None:
        raise ValueError("heads: score_matrix 'shared' is the backbone's lm_head; this model's scores have their own")
    if heads is not None and heads.domain is not None:
        _check_domain(model, heads.domain, heads.domain_settings)


def _check_domain(model: CausalQwenForCausalLM, name: str, settings: dict[str, Any]) -> None:
    """ValueError for a name that `add_domain` would not take, or settings that the domain of this name does not have."""
    own = model.config.domains.get(name)
    if own is None:
        return check_domain_name(name)
    for key, value in settings.items():
        if value not in (own.get(key), getattr(HeadStage, f"domain_{key}")):
            raise ValueError(f"domain {name!r} is there already, its {key} {own.get(key)!r}: leave domain_{key} out")
    if own.get("limit") is None:
        raise ValueError(f"domain {name!r} has no limit, and a closed form needs one")


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


# ---- stage 1 ---------------------------------------------------------------------------------------------------------


def _train_values(run: Run) -> None:
    model, stage = run.model.eval(), run.settings.values
    train_store, eval_store = run.train_facts(), run.eval_facts()
    if stage.standardize:
        _fit_standardization(model, train_store)
    _train_numbers_only(model)
    if model.action.scales.common:  # else a threshold says nothing of others: `<NUM>`'s row is learned in passing
        if not run.stores:
            announce(model, train_store)
        for fitted in (model.action.num_row, model.action.num_bias):
            fitted.requires_grad_(False)
    rows = FactRows(train_store, [example.individual for example in run.train_examples], _class_codes(run))
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
    shared = rows.people > 0 and any(owners) and bool(eval_store.facts.learned.any())

    def scores(model: CausalQwenForCausalLM) -> dict[str, Any]:
        made = run.scores(model, eval_store.blocks(split=True))
        if shared:  # whoever crosses is seen by what two of their values say of each other
            losses = ranks.on_whole(model, joint_losses, eval_store, owners)[0]
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
    known: Any = store.facts.learned & (people >= 0)
    if (np.bincount(people[known]) > 1).sum() < _FEWEST_PEOPLE:
        return
    known = torch.from_numpy(known)
    features = store.facts.tensor("features")[known].to(model.device)
    features, places = features.unique(dim=0, return_inverse=True)
    chain, x = Chain(model, features), branch.standardize(features)
    left = (
        model.value_transform.forward(store.facts.tensor("values")[known]).to(model.device) - chain.value()[0][places]
    )
    noise_scale = chain.value_loadings()[1].double().mean().item()
    x = x[places]
    size, noise = branch.crossing.lean(x, left, torch.from_numpy(people)[known].to(model.device))
    unit = _QUARTILE / law.quantile(torch.tensor(0.75)).item()  # scale for a standard deviation: quartiles alike
    zero, scale = torch.zeros_like(chain.loc_U), chain.read_by_values()[1]
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
    row, mean = head.weight, branch.feature_mean.unsqueeze(0)
    loc, scale = branch.eval()(mean, *model.abduction(mean[:, : model.config.hidden_size]))
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
    learned = torch.from_numpy(store.facts.learned)
    axis = model.value_transform.forward(store.facts.tensor("values")[learned]).double()
    low, high = (torch.quantile(axis[:: 1 + len(axis) // 1_000_000], level).item() for level in (0.025, 0.975))
    axis = axis.clamp(2 * low - high, 2 * high - low)
    features = store.facts.tensor("features")[learned].to(model.device)
    x = branch.standardize(features).double()
    slopes, left = _ridge((x - x.mean(0)).cpu(), axis - axis.mean(), _RIDGES)
    left = left + axis.mean()
    # The chain where each feature in turn stands one standard deviation off its mean: loc_Y is linear in z there.
    steps = torch.cat([branch.feature_mean[None], branch.feature_mean + torch.diag(branch.feature_std)])
    loc, scale = (column.double().cpu() for column in Chain(model, steps.to(features.dtype)).value())
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
    features = store.facts.tensor("features")[torch.from_numpy(store.facts.learned)].double()
    std, mean = torch.std_mean(features, dim=0)
    std = torch.maximum(std, LEAST_SPREAD * features.square().mean(0).sqrt())
    std = torch.where(std.isfinite() & (std > 1e-6), std, 1.0)
    model.value_branch.feature_mean.copy_(mean)
    model.value_branch.feature_std.copy_(std)


# ---- the heads -------------------------------------------------------------------------------------------------------


def _train_heads(run: Run) -> str | None:
    model, stage = run.model, run.settings.heads
    if stage.domain is not None:
        if stage.domain not in model.config.domains:
            model.add_domain(stage.domain, **stage.domain_settings)
        model.set_domain(None)  # facts are the base's
        store = run.train_facts()
        model.set_domain(stage.domain)
        return fit_domain(model.eval(), store, run.settings.seed)
    if stage.score_matrix == "own" and model.score_head is None:
        own_scores(model)
    _train_numbers_only(model)
    rates = _open_language(model, stage)
    lm_head, table = model.backbone.get_output_embeddings(), model.backbone.get_input_embeddings()
    if stage.score_matrix == "shared":
        lm_head.requires_grad_(True)
        if lm_head.weight is table.weight:  # features move with it
            trained = TrainedForCausalLM(model, heads=True, negatives=_sampled(run, stage.negatives))
            _run_on_tokens(run, "heads", trained, best="eval_cls_loss", rates=rates)
            return None
    train_store, eval_store = run.train_facts(), run.eval_facts()
    trained = TrainedForCausalLM(model, heads=True, negatives=_sampled(run, stage.negatives, train_store.facts))
    rows = FactRows(train_store, classes=_class_codes(run))

    def scores(model: CausalQwenForCausalLM) -> dict[str, Any]:
        return run.scores(model, eval_store.renewed(model, split=True))

    _run_stage(run, "heads", trained, rows, scores, best="eval_cls_loss", rates=rates)
    return None


def _open_language(model: CausalQwenForCausalLM, stage: HeadStage | TokenStage) -> dict[str, float]:
    """Let abduction, |b_noise|, the thresholds and a W_cls of the model's own be trained too; the rates of noise and thresholds
    by name, `noise_learning_rate` of what they start as, or of gamma and 1 where that is 0."""
    action, config = model.action, model.config
    size = max(abs(config.initial_threshold), 1.0)
    sizes = {"b_noise": config.initial_noise or config.initial_scale, "threshold": size, "token_thresholds": size}
    for part in (model.abduction, *(getattr(action, name) for name in sizes), model.score_head):
        if part is not None:
            part.requires_grad_(True)
    return {f"model.action.{name}": stage.noise_learning_rate * size for name, size in sizes.items()}


def _sampled(run: Run, negatives: int, facts: TokenFacts | None = None) -> Tensor | None:
    """`sampling_of_negatives` by facts of the training rows, by default of the first that are read; None for none."""
    if not negatives:
        return None
    facts = next(stream_facts(run.model, run.train_examples))[1] if facts is None else facts
    return sampling_of_negatives(run.model, facts, negatives)


@torch.no_grad()
def token_importance(model: CausalQwenForCausalLM, features: Tensor) -> Tensor:
    """Root mean square of P_k [V] over features [N, H], the size of a token's gradient, and as much again spread over all.

    0 for `<NUM>` and unused rows; float64. Proportional to it, a sample varies least for its size (Neyman 1934).
    """
    action, words = model.action, model.vocabulary()
    mass = torch.zeros(action.rows, dtype=torch.float64, device=model.device)
    for part in features.to(model.device, model.dtype).split(64):
        mass += (2 * Chain(model, part, words=words).word_scores.log_p()[0]).exp().sum(0)
    mass = (mass / len(features)).sqrt() * action.rest_mask
    return mass + action.rest_mask * mass.sum() / action.rest_mask.sum()


def sampling_of_negatives(model: CausalQwenForCausalLM, facts: TokenFacts, size: int, positions: int = 512) -> Tensor:
    """`inclusion_probabilities` [V] of `size` wrong tokens, by their importance at some of the positions."""
    chosen = np.linspace(0, len(facts) - 1, min(positions, len(facts))).astype(int)
    return inclusion_probabilities(token_importance(model, torch.from_numpy(facts.features[chosen])), size)


# ---- stage 2 ---------------------------------------------------------------------------------------------------------


def add_adapters(backbone: torch.nn.Module, stage: LoraStage) -> Any:
    """An adapter in every layer that `target_modules` names, drawn by torch's generator; only they are trained.

    What comes back, PEFT's `LoraModel`, merges them: `merge_and_unload()` leaves the plain layers in the backbone.
    """
    with extra("lora", "LoRA"):
        from peft import LoraConfig, LoraModel
    layers = list(stage.target_modules)
    alpha: Any = stage.alpha  # PEFT takes any number
    config = LoraConfig(r=stage.rank, lora_alpha=alpha, lora_dropout=stage.dropout, target_modules=layers)
    return LoraModel(backbone, config, "default")


def _train_lora(run: Run) -> None:
    model, stage = run.model, run.settings.lora
    trained, rates = _reading_tokens(run, "lora")
    torch.manual_seed(run.settings.seed)
    adapters = add_adapters(model.backbone, stage)
    _run_on_tokens(run, "lora", trained, rates=rates)
    adapters.merge_and_unload()


def _train_backbone(run: Run) -> None:
    model, stage = run.model, run.settings.backbone
    trained, rates = _reading_tokens(run, "backbone")
    for module in decoder_layers(model.backbone)[-stage.layers :] if stage.layers else [model.backbone]:
        module.requires_grad_(True)
    own = (name for name, parameter in trained.named_parameters() if parameter.requires_grad)
    rates |= {name: stage.backbone_learning_rate for name in own if name.startswith("model.backbone.")}
    _run_on_tokens(run, "backbone", trained, rates=rates)


def _reading_tokens(run: Run, name: str) -> tuple[TrainedForCausalLM, dict[str, float]]:
    """What a stage trains that moves the backbone, made while the backbone is what it was, and the rates of its parts."""
    model, stage, text = run.model, getattr(run.settings, name), run.anchor_texts.get(name)
    _train_numbers_only(model)
    model.numeric_embedding.requires_grad_(True)
    model.numeric_embedding.direction.requires_grad_(stage.direction)
    rates = dict[str, float]()
    if stage.whole_vocabulary:
        of_abduction = (f"model.abduction.{name}" for name, _ in model.abduction.named_parameters())
        rates = _open_language(model, stage) | dict.fromkeys(of_abduction, stage.abduction_learning_rate)
    anchor = TextAnchor(model, text, stage.anchor_tokens) if text is not None else None
    sampled = _sampled(run, stage.negatives)
    return TrainedForCausalLM(model, stage.whole_vocabulary, anchor, stage.anchor, negatives=sampled), rates


def _run_on_tokens(run: Run, name: str, trained: TrainedForCausalLM, **settings: Any) -> None:
    pad, axes = run.model.processor.tokenizer.pad_token_id, run.model.value_axes.apart
    rows = ExampleRows(run.train_examples, pad, axes)

    def scores(model: CausalQwenForCausalLM) -> dict[str, Any]:
        read = stream_facts(model, run.eval_examples, title="evaluating", split=True)
        return run.scores(model, (facts for _, facts in read))

    _run_stage(run, name, trained, rows, scores, **settings)


def _class_codes(run: Run) -> list[int] | None:
    """`class_code` of every training row; None where classes have no axes."""
    names = run.model.value_axes.apart
    return [class_code(example, names) for example in run.train_examples] if names else None


def _train_numbers_only(model: CausalQwenForCausalLM) -> None:
    """Freeze all but what only numbers are learned by."""
    model.requires_grad_(False)
    for parameter in number_parameters(model):
        parameter.requires_grad_(True)


# ---- all of them ------------------------------------------------------------------------------------------------------


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
        trained = ranks.sharded(whole)
    model = trained.model
    updates = -(-len(dataset) // (stage.batch_size * stage.accumulation)) * stage.epochs
    trainer = (BriefTrainer if run.stores else CausalTrainer)(
        model=trained,
        args=_arguments(run, name, updates, best),
        train_dataset=dataset,
        eval_dataset=eval_examples or None,
        data_collator=dataset.collate,
        callbacks=[EarlyStoppingCallback(stage.patience)] if stage.patience and eval_examples else [],
        scorer=lambda: scores(model),
        metrics_file=MetricsFile(run.output / METRICS, name),
        rates=rates,
    )
    if ranks.rank() > 0 and trained.negatives is None:  # wrong tokens are the same on all ranks, as in one process
        torch.manual_seed(settings.seed + ranks.rank())  # dropout masks of its own
    checkpoint = ranks.from_main(last_checkpoint(run.work / name))
    if checkpoint:
        ranks.complete_random_states(checkpoint)
    stands = model.vocabulary().frozen() and not ranks.is_sharded(model)
    with model.frozen_vocabulary() if stands else nullcontext():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trained is not whole:
        ranks.restore(whole, trained)


TRAINERS: dict[str, Callable[[Run], str | None]] = {
    "values": _train_values,
    "heads": _train_heads,
    "lora": _train_lora,
    "backbone": _train_backbone,
}
"""By name, as `STAGES`; each returns what it has to say, if anything."""
