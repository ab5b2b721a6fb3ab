"""A training run: fit what is fitted, train the stages, recalibrate, save."""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from causalqwen.data import Example, number_classes
from causalqwen.data.encoding import class_names
from causalqwen.data.texts import read_text
from causalqwen.files import move_into, write_text
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.card import CARD, is_somebodys
from causalqwen.modeling.grafting import renew_values
from causalqwen.modeling.heads import check_made
from causalqwen.modeling.loading import fingerprint
from causalqwen.training import ranks
from causalqwen.training.announcing import announce
from causalqwen.training.axes import (
    LearnedNumbers,
    as_it_was,
    certain_contexts,
    check_classes,
    fit_axes,
    fit_levels,
    set_levels,
)
from causalqwen.training.choice_of_people import EVALUATIONS, ChoiceOfPeople, apply, choosing, is_open
from causalqwen.training.copies import say_again
from causalqwen.training.features import FactStore, update_with_rows
from causalqwen.training.held_out import FEWEST_HELD, hold_out, rows_together
from causalqwen.training.scores import coverage_by_scale, law_of_new, score_tokens, uneven_coverage
from causalqwen.training.settings import STAGES, TrainSettings, ValueStage
from causalqwen.training.sharding import is_sharded
from causalqwen.training.stages import TRAINERS, WORK, Run, check_stages
from causalqwen.training.whole_backbone import WholeBackbone, blocks_of, reads_whole

logger = logging.get_logger(__name__)

_FEWEST_OF_TENTHS = 100
_FOLDS = 5
"""Folds of the evaluation rows, each covered by levels that the others gave."""

BRANCH: dict[str, Any] = {"value_branch_dropout": 0.5, "value_loss": "crps"}
"""Settings of a branch that is trained by gradients, where the graft says nothing (experiments 13)."""

FEWEST_UPDATES = 156
"""Few rows are passed over more often, until so many updates are made: those of 12 passes over 800 rows."""


def train(
    model: CausalQwenForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    output: Path,
    settings: TrainSettings | None = None,
    *,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train `model` in place, as `learn` does, and save it to `output`, whose files appear by rename at the end.

    Returns and raises as `learn`; ValueError too for an output that already holds a model.
    """
    metrics = learn(model, train_examples, eval_examples, output, settings, resume=resume, say=say)
    save_by_rename(model, Path(output), Path(output) / WORK)
    return metrics


def learn(
    model: CausalQwenForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    output: Path,
    settings: TrainSettings | None = None,
    *,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train `model` in place; what was learned is in it alone.

    Where there are no evaluation rows, some of the training rows take their place (`hold_out`), if values are learned and there
    is something to choose or `recalibrate`. Where the settings leave it open (`values` "auto"), values are fitted in closed
    form (`reads_whole`), or people held out choose how they are read, where rows name individuals; `say` is told what.

    Kept facts, checkpoints and `metrics.jsonl` go to `output` as the run goes on. A killed run is taken up with
    `resume=True` and the same settings, and then comes to the same weights.

    Started by torchrun or `accelerate launch`, all ranks train it together (`causalqwen.training.ranks`): call it on each with
    the same arguments, `output` on one filesystem. Rank 0 writes.

    Returns:
        the scores on the evaluation rows after the last stage (`score_tokens`, metrics only; empty without such rows).

    Raises:
        FileNotFoundError: an anchor text that is not there.
        ValueError: what `check_stages` refuses; training rows without a number; a number of no class, or of one without an
            axis, where classes have axes of their own; an output that already holds a model or an unfinished run (without
            `resume`), or another run's work (with it).
    """
    settings = settings or TrainSettings()
    output = Path(output)
    ranks.join(model.device)
    say = say if ranks.rank() == 0 else lambda line: None
    anchor_texts, numbers, certain = _check(model, train_examples, eval_examples, settings)
    run = Run(model, train_examples, eval_examples, output, settings, anchor_texts)
    _begin(run, resume)
    before = model.bf16, model.number_class
    model.bf16, model.number_class = settings.takes_bf16(model, train_examples), None
    try:
        return _learn(run, numbers, certain, say)
    finally:
        model.bf16, model.number_class = before


def _check(
    model: CausalQwenForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    settings: TrainSettings,
) -> tuple[dict[str, str], LearnedNumbers, set[tuple[int, ...]]]:
    """Anchor texts by stage, the numbers of the training rows, and contexts in which a number is certain; raises as `learn`."""
    check_made(model)
    _check_batches(settings)
    check_stages(model, settings, train_examples, eval_examples)
    if ranks.world_size() > 1:
        ranks.check_same_start(model, sum(len(example) for example in (*train_examples, *eval_examples)))
    stages = [(name, getattr(settings, name)) for name in STAGES]
    anchor_texts = {name: read_text(stage.anchor_text) for name, stage in stages if getattr(stage, "anchor", 0) > 0}
    certain = certain_contexts(train_examples, model.config.num_token_id)
    numbers = LearnedNumbers.of(train_examples, model.config.num_token_id, certain)
    if settings.values is not None and not len(numbers.values):
        raise ValueError("the training rows hold no number to learn from; for text alone leave the stage `values` out")
    check_classes(model, train_examples, eval_examples, numbers, settings)
    if settings.values is not None:
        settings.support_of(numbers.values)  # a support in which none of them lies stops the run here
    if settings.value_transform not in ("auto", "keep"):
        numbers.axis(settings.value_transform, settings)  # an axis that these values do not allow stops the run here
    return anchor_texts, numbers, certain


def _learn(
    run: Run, numbers: LearnedNumbers, certain: set[tuple[int, ...]], say: Callable[[str], None]
) -> dict[str, Any]:
    """Choose what the settings leave open, train the stages, recalibrate and score."""
    model, settings, all_examples = run.model, run.settings, run.train_examples
    stages = [name for name in STAGES if getattr(settings, name) is not None]
    of_people = any(example.individual is not None for example in all_examples)
    fresh, whole = choosing(model, settings), reads_whole(model, settings, numbers, all_examples)
    if not whole:
        model.config.require("training by gradients")
    own = not len(run.eval_examples) and settings.values is not None and ((fresh and of_people) or settings.recalibrate)
    if own and not of_people:
        run, numbers = _hold_out(run, certain, say)
    if whole:
        return _finished(run, numbers, _read_whole(run, certain, len(all_examples) > len(run.train_examples), say), say)
    few = own and len(rows_together(run.eval_examples)) < FEWEST_HELD
    if fresh and not of_people:
        settings = _by_gradients(model, settings, run.train_examples)
    elif fresh:
        settings = _by_people(run, numbers, certain, say)
    if own and of_people:  # all of them chose
        run, numbers = _hold_out(run, certain, say)
    settings = as_it_was(settings, model)
    set_levels(model, None)
    fit_axes(model.config, numbers, settings.value_transform, settings)
    # Few rows that were held out here calibrate alone: no state of the weights is chosen by them.
    trained = dataclasses.replace(run, settings=settings, eval_examples=[] if few else run.eval_examples)
    for name in stages:
        TRAINERS[name](trained)
    run = dataclasses.replace(trained, eval_examples=run.eval_examples)
    model.requires_grad_(True).eval()
    _check_finite(model)
    return _finished(run, numbers, _final_scores(run), say)


def _finished(run: Run, numbers: LearnedNumbers, metrics: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The metrics of a run, once they are noted in its model, and what is uneven in them is said."""
    run.model.trained_on = _told(run, numbers, metrics)
    if uneven := uneven_coverage(metrics["scale_deciles"]) if "scale_deciles" in metrics else None:
        say(uneven)
    return metrics


def _by_gradients(model: CausalQwenForCausalLM, settings: TrainSettings, examples: Sequence[Example]) -> TrainSettings:
    """Settings with the stage of values that nothing was chosen for; the model is given the branch that goes with it."""
    apply(model, {name: value for name, value in BRANCH.items() if is_open(model, name)}, settings.seed)
    updates = math.ceil(len(examples) / ValueStage().batch_size)
    stage = ValueStage(epochs=max(12, math.ceil(FEWEST_UPDATES / updates)), center=True)
    return dataclasses.replace(settings, values=stage)


def _by_people(
    run: Run, numbers: LearnedNumbers, certain: set[tuple[int, ...]], say: Callable[[str], None]
) -> TrainSettings:
    """Settings with the stage of values that people held out chose; the model is given the settings that go with it."""
    model, settings, examples = run.model, run.settings, run.train_examples
    choice = ChoiceOfPeople(model, examples, run.eval_examples, numbers, certain, settings, run.work, say)
    if not choice.has_enough:
        return dataclasses.replace(settings, values=choice.stage_of(examples))
    chosen = choice.made()
    apply(model, {"value_family": chosen.family}, settings.seed)
    return dataclasses.replace(
        settings,
        values=choice.stage_of(examples, chosen.share),
        value_transform=chosen.axis,
        evaluations=max(settings.evaluations, EVALUATIONS),
    )


def _read_whole(
    run: Run, certain: set[tuple[int, ...]], held_out_here: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Read values from the whole backbone in closed form. The scores are those of a fit to the training rows alone; in the end
    rows that were held out here are learned from too."""
    model, started = run.model, time.perf_counter()
    copies = say_again(run.train_examples, model.config.num_token_id)
    again = {"copy_numbers": copies} if is_open(model, "copy_numbers") or model.value_kernel is not None else {}
    renew_values(model, value_kernel=None, **again)
    model.reads_backbone = blocks_of(model)
    try:
        known = [(run.train_examples, run.train_facts())]
        fit = WholeBackbone(model, known, certain, run.settings)
        fit.install()
        fit.tell(say, time.perf_counter() - started)
        announce(model, known[0][1])
        model.requires_grad_(True).eval()
        metrics = _final_scores(run)
        facts = run.eval_facts()
        if held_out_here and facts is not None:
            WholeBackbone(
                model, [*known, (run.eval_examples, facts)], certain, run.settings, fit.kernel.shape
            ).install()
    finally:
        model.reads_backbone = None
    return metrics


def _hold_out(run: Run, certain: set[tuple[int, ...]], say: Callable[[str], None]) -> tuple[Run, LearnedNumbers]:
    """The run with some of its training rows as evaluation rows, and the numbers of the others; `say` is told how many."""
    count = len(run.train_examples)
    rest, held = hold_out(run.train_examples, run.settings.seed)
    if len(held):
        say(f"{len(held):,} of the {count:,} training rows are held out, to choose by and to calibrate intervals")
    else:
        say(
            f"{count:,} training rows (of few texts or groups) are too few to hold some out: nothing is chosen, "
            "intervals are not calibrated, and how far off predictions are is not known; give evaluation rows"
        )
    numbers = LearnedNumbers.of(rest, run.model.config.num_token_id, certain)
    return dataclasses.replace(run, train_examples=rest, eval_examples=held), numbers


def _check_finite(model: CausalQwenForCausalLM) -> None:
    """ValueError where training ended in weights that are no numbers."""
    if is_sharded(model):  # each rank has a part
        return
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise ValueError(
                f"training ended in {name} that is not finite: lower the learning rate, or scale the values"
            )


def _final_scores(run: Run) -> dict[str, Any]:
    """Recalibrate on the evaluation rows and score them; empty without such rows."""
    model, facts = run.model, run.eval_facts()
    if facts is None:
        return {}
    classes = number_classes(run.eval_examples, model.config.num_token_id)
    scores = score_tokens(model, facts.blocks(split=True), split=True, classes=classes)
    covered = None
    anew = run.settings.recalibrate and model.value_kernel is None  # whose levels are those of leave-one-out
    if anew and _recalibrate(model, scores["values"], classes, run.train_examples):
        covered = _covered_by_others(run, facts, scores["values"], classes)
        scores = score_tokens(model, facts.blocks(split=True), split=True, classes=classes)
    if covered is not None:
        scores["metrics"]["held_coverage"] = covered
    known = [scores["values"][name] for name in ("loc", "scale", "value")]
    if len(classes) >= _FEWEST_OF_TENTHS and not model.copies:
        scores["metrics"]["scale_deciles"] = coverage_by_scale(scores["law"], *known)
    return scores["metrics"]


def _told(run: Run, numbers: LearnedNumbers, metrics: dict[str, Any]) -> dict[str, Any]:
    """What `training.json` and the card say of a run: of each stage, the settings that are not the default."""
    settings, stages = run.settings, {}
    for name, kind in STAGES.items():
        stage = getattr(settings, name)
        if stage is not None:
            default = {one.name: one.default for one in dataclasses.fields(kind)}
            stages[name] = {key: value for key, value in dataclasses.asdict(stage).items() if value != default[key]}
    return {
        "rows": len(run.train_examples),
        "numbers": len(numbers.values),
        "held_out": len(run.eval_examples),
        "seed": settings.seed,
        "stages": stages,
        "metrics": metrics,
    }


def _recalibrate(
    model: CausalQwenForCausalLM,
    values: dict[str, torch.Tensor],
    classes: list[str | None],
    train_examples: Sequence[Example],
) -> bool:
    """Fit the levels of intervals on these values, of all and of each class; False where there are none to fit on."""
    # Levels are those of a new number's law.
    new = ~values["stands"] if "stands" in values else torch.ones(len(classes), dtype=torch.bool)
    if not bool(new.any()):
        return False
    of_new = [name for name, one in zip(classes, new.tolist(), strict=True) if one]
    met = class_names(train_examples) | {name for name in classes if name is not None}
    fit_levels(model, [values[name][new] for name in ("loc", "scale", "value")], of_new, met)
    return True


def _covered_by_others(
    run: Run, facts: FactStore, values: dict[str, torch.Tensor], classes: list[str | None]
) -> float | None:
    """How many of the values lie in their 90% intervals by levels that are fitted on other rows, each of `_FOLDS` parts of the
    evaluation rows in turn: levels cover the rows that they are fitted on by construction. The model keeps its levels. None
    where it copies."""
    model, config = run.model, run.model.config
    if model.copies or len(values["value"]) < 2:
        return None
    fold = np.empty(len(facts), dtype=np.int64)
    for place, rows in enumerate(rows_together(run.eval_examples)):
        fold[rows] = place % _FOLDS
    is_value = (np.asarray(facts.facts.targets) == config.num_token_id) & np.isfinite(facts.facts.values)
    fold = np.repeat(fold, np.diff(facts.offsets))[is_value]
    kept = {name: getattr(config, name) for name in ("interval_levels", "interval_kinds", "class_interval_levels")}
    inside = []
    for part in np.unique(fold):
        both = [np.flatnonzero(of) for of in (fold == part, fold != part)]
        some, others = ({name: column[rows] for name, column in values.items()} for rows in both)
        of_some, of_others = ([classes[row] for row in rows] for rows in both)
        if of_others:
            _recalibrate(model, others, of_others, run.train_examples)
            low, high = law_of_new(model, of_some).interval(some["loc"], some["scale"], 0.9)
            inside.append((low <= some["value"]) & (some["value"] <= high))
    for name, value in kept.items():
        setattr(config, name, value)
    return torch.cat(inside).double().mean().item() if inside else None


def _check_batches(settings: TrainSettings) -> None:
    for name in STAGES:
        stage = getattr(settings, name)
        if stage is not None and stage.batch_size < ranks.world_size():
            raise ValueError(
                f"{name}: a batch of {stage.batch_size} rows cannot be split over {ranks.world_size()} ranks; "
                "batch_size counts the rows of all ranks together"
            )


def _about_run(
    model: CausalQwenForCausalLM, settings: TrainSettings, rows: Sequence[Sequence[Example]], start: str | None
) -> dict[str, Any]:
    """What a run that is taken up has to share with the one that was stopped, by what is said where it does not.

    start: the model's fingerprint when it began this run, if it is the very one, which has moved since.
    """
    kept = dataclasses.asdict(settings)
    del kept["fsdp"]  # a run may be taken up with or without it
    digest = hashlib.sha256()
    for examples in rows:
        update_with_rows(digest, examples)
        whose = [(one.individual, one.class_name, one.group) for one in examples]
        digest.update(json.dumps(whose).encode())
    about = {"another model": start or fingerprint(model), "other rows": digest.hexdigest(), "other settings": kept}
    described: dict[str, Any] = json.loads(ranks.from_main(json.dumps(about)))
    return described


def _begin(run: Run, resume: bool) -> None:
    """Open the folder of a run's work, or take it up again; raises as `learn`."""
    starts, work = (
        run.model.__dict__.setdefault("_starts", {}),
        run.work.resolve(),
    )  # fingerprints from before they moved
    rows = run.train_examples, run.eval_examples
    about = _about_run(run.model, run.settings, rows, starts.get(work) if resume else None)
    _open_work(run.output, run.work, about, resume)
    starts[work] = about["another model"]


def _open_work(output: Path, work: Path, about: dict[str, Any], resume: bool) -> None:
    note = work / "settings.json"
    if (output / "config.json").exists():
        raise ValueError(f"{output} already holds a model; choose another output")
    if note.exists() and not resume:
        raise ValueError(f"{output} holds an unfinished run; resume it, or choose another output")
    if note.exists():
        was: Any = None
        with suppress(ValueError):  # a damaged note
            was = json.loads(note.read_text(encoding="utf-8"))
        if other := [name for name, one in about.items() if not isinstance(was, dict) or was.get(name) != one]:
            anew = " (a graft made anew starts from other values: load the one that was saved)"
            raise ValueError(
                f"{work} belongs to a run with {' and '.join(other)}; it cannot be resumed with these"
                f"{anew * ('another model' in other)}"
            )
    ranks.barrier()  # every rank has looked
    if ranks.rank() == 0:
        work.mkdir(parents=True, exist_ok=True)
        write_text(note, json.dumps(about))
    ranks.barrier()


def save_by_rename(model: CausalQwenForCausalLM, output: Path, work: Path) -> None:
    """Save into `work`, then move file by file; `config.json`, without which nothing loads, comes last. Rank 0 writes."""
    if ranks.rank() == 0:
        saved = work / "saved"
        model.save_pretrained(saved)
        if is_somebodys(output / CARD):
            (saved / CARD).unlink()
        move_into(output, saved, last="config.json")
    ranks.barrier()
