"""A training run: fit what is fitted, train the stages, recalibrate, save."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import EarlyStoppingCallback, TrainingArguments

from causalqwen.data import Example
from causalqwen.data.texts import read_text
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.abduction import ValueBranch
from causalqwen.numbers import ValueTransform
from causalqwen.training import ranks, sharding
from causalqwen.training.anchor import TextAnchor
from causalqwen.training.features import FactStore, TokenFacts, stream_facts
from causalqwen.training.negatives import sampling_of_negatives
from causalqwen.training.scores import score_tokens
from causalqwen.training.settings import STAGES, Stage, TokenStage, TrainSettings
from causalqwen.training.trainer import (
    CausalTrainer,
    FactRows,
    MetricsFile,
    TrainedForCausalLM,
    collate_facts,
    collate_tokens,
    last_checkpoint,
)

WORK = "work"
METRICS = "metrics.jsonl"


class ExampleRows(torch.utils.data.Dataset):
    """Examples for a data loader."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


def train(
    model: CausalQwenForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    output: Path,
    settings: TrainSettings | None = None,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Train `model` in place and save it to `output`, whose files appear by rename at the end.

    Kept facts, checkpoints and `metrics.jsonl` go to `output` as the run goes on. A killed run is taken up with
    `resume=True` and the same settings, and then gives the same curve.

    Started by torchrun or `accelerate launch`, all ranks train it together (`causalqwen.training.ranks`): call it on each with
    the same arguments, `output` on one filesystem. Rank 0 writes.

    Returns:
        the scores on the evaluation rows after the last stage (`score_tokens`, metrics only; empty without such rows).

    Raises:
        FileNotFoundError: an anchor text that is not there.
        ValueError: training rows without a number; an output that already holds a model or an unfinished run
            (without `resume`), or another run's work (with it).
    """
    settings = settings or TrainSettings()
    output = Path(output)
    ranks.join(model.device)
    _check_batches(settings)
    if ranks.world_size() > 1:
        ranks.check_same_start(model, sum(len(example) for example in (*train_examples, *eval_examples)))
    work = output / WORK
    anchored = [stage for stage in (settings.lora, settings.backbone) if stage is not None and stage.anchor > 0]
    anchor_texts = {stage: read_text(stage.anchor_text) for stage in anchored}  # a missing file stops the run here
    values = _known_values(model, train_examples, needed=settings.values is not None)
    _open_work(output, work, settings, resume)
    if settings.value_transform != "keep" and len(values):
        transform = ValueTransform.fit(settings.value_transform, values)
        model.config.value_transform = transform.to_dict()
        model.config.value_range = [values.min().item(), values.max().item()]
    model.config.interval_levels = None
    model.ovr_impl = settings.ovr_impl
    if settings.values is not None:
        _train_values(model, train_examples, eval_examples, output, settings)
    if settings.heads is not None:
        _train_heads(model, train_examples, eval_examples, output, settings)
    if settings.lora is not None:
        _train_lora(model, train_examples, eval_examples, output, settings, anchor_texts.get(settings.lora))
    if settings.backbone is not None:
        _train_backbone(model, train_examples, eval_examples, output, settings, anchor_texts.get(settings.backbone))
    model.requires_grad_(True).eval()
    metrics: dict[str, Any] = {}
    if eval_examples:
        scores = score_tokens(model, _eval_blocks(model, eval_examples, work), split=True)
        found = scores["values"]
        if settings.recalibrate and len(found["value"]):
            levels = model.value_law.fit_interval_levels(found["loc"], found["scale"], found["value"])
            model.config.interval_levels = list(levels)
            scores = score_tokens(model, _eval_blocks(model, eval_examples, work), split=True)
        metrics = scores["metrics"]
    save_by_rename(model, output, work)
    return metrics


def _check_batches(settings: TrainSettings) -> None:
    for name in STAGES:
        stage = getattr(settings, name)
        if stage is not None and stage.batch_size < ranks.world_size():
            raise ValueError(
                f"{name}: a batch of {stage.batch_size} rows cannot be split over {ranks.world_size()} ranks; "
                "batch_size counts the rows of all ranks together"
            )


def _known_values(model: CausalQwenForCausalLM, examples: Sequence[Example], needed: bool) -> torch.Tensor:
    num_id = model.config.num_token_id
    # The first token is never predicted, so a number that stands there is no target.
    values = [
        value
        for example in examples
        for token, value in zip(example.input_ids[1:], example.numeric_labels[1:], strict=True)
        if token == num_id and math.isfinite(value)
    ]
    if not values and needed:
        raise ValueError("the training rows hold no number to learn from; for text alone leave the stage `values` out")
    return torch.tensor(values, dtype=torch.float64)


def _open_work(output: Path, work: Path, settings: TrainSettings, resume: bool) -> None:
    kept = dataclasses.asdict(settings)
    del kept["fsdp"]  # a run may be taken up with or without it
    described = json.dumps(kept, sort_keys=True)
    note = work / "settings.json"
    if (output / "config.json").exists():
        raise ValueError(f"{output} already holds a model; choose another output")
    if resume and note.exists() and note.read_text(encoding="utf-8") != described:
        raise ValueError(f"{work} belongs to a run with other settings; it cannot be resumed with these")
    if not resume and note.exists():
        raise ValueError(f"{output} holds an unfinished run; resume it, or choose another output")
    ranks.barrier()  # every rank has looked
    if ranks.rank() == 0:
        work.mkdir(parents=True, exist_ok=True)
        note.write_text(described, encoding="utf-8")
    ranks.barrier()


def _eval_blocks(model: CausalQwenForCausalLM, examples: Sequence[Example], work: Path) -> Iterator[TokenFacts]:
    """Facts of the evaluation rows, this rank's share, from the store that fits the model as it is now."""
    return FactStore.build(model, examples, work, title="evaluation rows").blocks(split=True)


# ---- stage 1 ---------------------------------------------------------------------------------------------------------


def _train_values(
    model: CausalQwenForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    output: Path,
    settings: TrainSettings,
) -> None:
    work = output / WORK
    train_store = FactStore.build(model, train_examples, work, title="training rows")
    eval_store = FactStore.build(model, eval_examples, work, title="evaluation rows") if eval_examples else None
    if settings.values.standardize:
        _fit_standardization(model, train_store)
    _train_numbers_only(model)
    rows = FactRows(train_store, [example.individual for example in train_examples])
    rates = {}
    if rows.people:
        if model.value_branch is None:
            raise ValueError(
                "rows name individuals, but this model has no value branch to learn what differs between them"
            )
        _start_shares(model, model.value_branch)
        model.value_branch.log_noise.requires_grad_(True)
        rates = dict.fromkeys(
            ("model.value_branch.log_noise", "model.action.value_head.bias"), settings.values.noise_learning_rate
        )
    _run_stage(
        "values",
        settings.values,
        TrainedForCausalLM(model),
        rows,
        collate_facts,
        eval_examples,
        output,
        settings,
        lambda _: eval_store.blocks(split=True),
        rates=rates,
    )


@torch.no_grad()
def _start_shares(model: CausalQwenForCausalLM, branch: ValueBranch) -> None:
    """Start at the axis's own centre, where no individual has a mean to make up for, who speaks and the noise alike, each with
    scale 1 there."""
    law, head = model.action.value_law, model.action.value_head
    loc, scale = model.abduction(branch.feature_mean.unsqueeze(0))
    row = head.weight
    head.bias.sub_(model.action.value(loc, scale)[0].squeeze())
    count = branch.residual.last.bias.shape[0] // 2
    branch.residual.last.bias[count:] -= law.linear_scale(scale, row).log().squeeze()
    branch.log_noise.copy_(-law.linear_scale(model.action.noise.unsqueeze(0), row).log().squeeze())


def _fit_standardization(model: CausalQwenForCausalLM, store: FactStore) -> None:
    """Mean and standard deviation of the features that precede values to learn, for the value branch."""
    if model.value_branch is None:
        return
    learned = np.isfinite(store.facts.values)
    features = torch.from_numpy(store.facts.features[learned]).double()
    std, mean = torch.std_mean(features, dim=0)
    std = torch.where(std.isfinite() & (std > 1e-6), std, 1.0)
    model.value_branch.feature_mean.copy_(mean)
    model.value_branch.feature_std.copy_(std)


# ---- the heads -------------------------------------------------------------------------------------------------------


def _train_heads(
    model: CausalQwenForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    output: Path,
    settings: TrainSettings,
) -> None:
    stage, work = settings.heads, output / WORK
    train_store = FactStore.build(model, train_examples, work, title="training rows")
    eval_store = FactStore.build(model, eval_examples, work, title="evaluation rows") if eval_examples else None
    if stage.domain is not None:
        if stage.domain not in model.config.domains:
            model.add_domain(stage.domain, layers=stage.domain_layers, limit=stage.domain_limit)
        model.set_domain(stage.domain)
        model.requires_grad_(False)
        model.abduction.domains[stage.domain].requires_grad_(True)
    else:
        _train_numbers_only(model)
        action = model.action
        parts = (
            model.abduction,
            action.b_noise,
            action.threshold,
            action.shift,
            action.token_thresholds,
            model.score_head,
        )
        for part in parts:
            if part is not None:
                part.requires_grad_(True)
    sampled = sampling_of_negatives(model, train_store.facts, stage.negatives)
    _run_stage(
        "heads",
        stage,
        TrainedForCausalLM(model, heads=True, negatives=sampled, closeness=stage.closeness),
        FactRows(train_store),
        collate_facts,
        eval_examples,
        output,
        settings,
        lambda model: eval_store.renewed(model, split=True),
        best="eval_cls_loss",
    )


# ---- stage 2 ---------------------------------------------------------------------------------------------------------


def _train_lora(
    model: CausalQwenForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    output: Path,
    settings: TrainSettings,
    anchor_text: str | None,
) -> None:
    stage = settings.lora
    _train_numbers_only(model)
    trained = _reading_tokens(model, train_examples, stage, anchor_text)
    torch.manual_seed(settings.seed)
    config = LoraConfig(
        r=stage.rank, lora_alpha=stage.alpha, lora_dropout=stage.dropout, target_modules=list(stage.target_modules)
    )
    inject_adapter_in_model(config, model.backbone)
    _run_on_tokens("lora", stage, trained, train_examples, eval_examples, output, settings)
    merge_adapters(model.backbone)


def _train_backbone(
    model: CausalQwenForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    output: Path,
    settings: TrainSettings,
    anchor_text: str | None,
) -> None:
    stage = settings.backbone
    _train_numbers_only(model)
    trained = _reading_tokens(model, train_examples, stage, anchor_text)
    names = model.backbone._no_split_modules or ()
    layers = [module for module in model.backbone.modules() if type(module).__name__ in names]
    if stage.layers > len(layers):
        raise ValueError(f"backbone: {stage.layers} layers are to be trained, and there are {len(layers)}")
    for module in layers[-stage.layers :] if stage.layers else [model.backbone]:
        module.requires_grad_(True)
    own = (name for name, parameter in trained.named_parameters() if parameter.requires_grad)
    rates = {name: stage.backbone_learning_rate for name in own if name.startswith("model.backbone.")}
    _run_on_tokens("backbone", stage, trained, train_examples, eval_examples, output, settings, rates)


def _reading_tokens(
    model: CausalQwenForCausalLM, train_examples: Sequence[Example], stage: TokenStage, anchor_text: str | None
) -> TrainedForCausalLM:
    """What a stage trains that moves the backbone, made while the backbone is what it was."""
    model.numeric_embedding.requires_grad_(True)
    anchor = TextAnchor(model, anchor_text, stage.anchor_tokens) if anchor_text is not None else None
    sampled = None
    if stage.whole_vocabulary and stage.negatives:
        sampled = sampling_of_negatives(model, next(stream_facts(model, train_examples))[1], stage.negatives)
    return TrainedForCausalLM(model, stage.whole_vocabulary, anchor, stage.anchor, negatives=sampled)


def _run_on_tokens(
    name: str,
    stage: TokenStage,
    trained: TrainedForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    output: Path,
    settings: TrainSettings,
    rates: dict[str, float] | None = None,
) -> None:
    pad = trained.model.processor.tokenizer.pad_token_id
    _run_stage(
        name,
        stage,
        trained,
        ExampleRows(train_examples),
        lambda examples: collate_tokens(examples, pad),
        eval_examples,
        output,
        settings,
        lambda model: (facts for _, facts in stream_facts(model, eval_examples, title="evaluating", split=True)),
        rates=rates,
    )


def _train_numbers_only(model: CausalQwenForCausalLM) -> None:
    """Freeze all but the value branch, the value head, and `<NUM>`'s own row and bias.

    The noise's size on the value axis stays too: a value alone cannot tell it from scale_U.
    """
    model.requires_grad_(False)
    for part in (model.value_branch, model.action.value_head, model.action.num_row, model.action.num_bias):
        if part is not None:
            part.requires_grad_(True)
    if model.value_branch is not None:
        model.value_branch.log_noise.requires_grad_(False)


def merge_adapters(module: torch.nn.Module) -> None:
    """Add every adapter of PEFT into the layer that it wraps, and leave plain layers."""
    for name, child in module.named_children():
        if isinstance(child, BaseTunerLayer):
            child.merge()
            setattr(module, name, child.get_base_layer())
        else:
            merge_adapters(child)


# ---- both ------------------------------------------------------------------------------------------------------------


def _run_stage(
    name: str,
    stage: Stage,
    trained: TrainedForCausalLM,
    dataset: FactRows | ExampleRows,
    collator: Any,
    eval_examples: Sequence[Example],
    output: Path,
    settings: TrainSettings,
    blocks: Callable[[CausalQwenForCausalLM], Iterable[TokenFacts]],
    best: str = "eval_reg_loss",
    rates: dict[str, float] | None = None,
) -> None:
    whole, work = trained, output / WORK
    if settings.fsdp and ranks.world_size() > 1:
        trained = sharding.sharded(whole)
    model = trained.model
    updates = -(-len(dataset) // (stage.batch_size * stage.accumulation)) * stage.epochs
    every = max(1, updates // settings.evaluations)
    arguments = TrainingArguments(
        output_dir=str(work / name),
        num_train_epochs=stage.epochs,
        per_device_train_batch_size=stage.batch_size,
        gradient_accumulation_steps=stage.accumulation,
        learning_rate=stage.learning_rate,
        weight_decay=stage.weight_decay,
        lr_scheduler_type="cosine",
        warmup_steps=stage.warmup,
        logging_steps=settings.logging_steps,
        eval_strategy="steps" if eval_examples else "no",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=2,
        load_best_model_at_end=bool(eval_examples),
        metric_for_best_model=best if eval_examples else None,
        greater_is_better=False,
        report_to=list(settings.report_to),
        seed=settings.seed,
        data_seed=settings.seed,
        remove_unused_columns=False,
        disable_tqdm=False,  # else transformers prints records to stdout
        dataloader_pin_memory=False,
        use_cpu=model.device.type == "cpu",
    )
    callbacks = [EarlyStoppingCallback(stage.patience)] if stage.patience and eval_examples else []
    trainer = CausalTrainer(
        model=trained,
        args=arguments,
        train_dataset=dataset,
        eval_dataset=eval_examples or None,
        data_collator=collator,
        callbacks=callbacks,
        scorer=lambda: score_tokens(model, blocks(model), split=True),
        metrics_file=MetricsFile(output / METRICS, name),
        rates=rates,
    )
    if (
        ranks.rank() > 0 and trained.negatives is None
    ):  # else all ranks sample the same wrong tokens, as one process does
        torch.manual_seed(settings.seed + ranks.rank())  # dropout masks of its own
    checkpoint = ranks.from_main(last_checkpoint(work / name))
    if checkpoint:
        ranks.complete_random_states(checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trained is not whole:
        sharding.restore(whole, trained)


def save_by_rename(model: CausalQwenForCausalLM, output: Path, work: Path) -> None:
    """Save into `work`, then move file by file; `config.json`, without which nothing loads, comes last. Rank 0 writes."""
    if ranks.rank() == 0:
        saved = work / "saved"
        model.save_pretrained(saved)
        for file in sorted(saved.iterdir(), key=lambda path: path.name == "config.json"):
            file.replace(output / file.name)
        saved.rmdir()
    ranks.barrier()
