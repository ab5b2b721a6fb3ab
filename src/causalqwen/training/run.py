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
    numbers_learned,
    set_levels,
)
from causalqwen.training.choice_of_people import EVALUATIONS, ChoiceOfPeople, apply, choosing, is_open
from causalqwen.training.copies import values_repeat_context
from causalqwen.training.features import FactStore, update_with_rows
from causalqwen.training.held_out import FEWEST_HELD, hold_out, rows_together
from causalqwen.training.levels_of_people import (
    FEW,
    FEWEST,
    HeldPerson,
    fit_individual_levels,
    people_of,
    population_levels,
)
from causalqwen.training.scores import coverage_by_scale, law_of_new, score_tokens, uneven_coverage
from causalqwen.training.settings import STAGES, TrainSettings, ValueStage
from causalqwen.training.stages import TRAINERS, WORK, Run, check_stages
from causalqwen.training.whole_backbone import WholeBackbone, blocks_of, reads_whole

_FEWEST_OF_TENTHS = 100
_FOLDS = 5  # of the evaluation rows, each covered by levels that the others gave

BRANCH: dict[str, Any] = {"value_branch_dropout": 0.5, "value_loss": "crps"}
"""Settings of a branch that is trained by gradients, where the graft says nothing (experiments 13)."""

FEWEST_UPDATES = 156
"""Few rows are passed over more often, until so many updates are made: those of 12 passes over 800 rows."""

_DIGITS_OF_PEOPLE = (
    "the rows of individuals hold numbers before their values (days, doses), which this model reads as digits; a graft with "
    "--set number_context=value reads how far apart they are, and may predict repeated measures better"
)

Say = Callable[[str], None]


def train(
    model: CausalQwenForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    output: Path,
    settings: TrainSettings | None = None,
    *,
    resume: bool = False,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Train `model` in place, as `learn` does, and save it to `output`, whose files appear by rename at the end: `config.json`,
    without which nothing loads, comes last. Returns and raises as `learn`."""
    metrics = learn(model, train_examples, eval_examples, output, settings, resume=resume, say=say)
    if ranks.rank() == 0:
        output, saved = Path(output), Path(output) / WORK / "saved"
        model.save_pretrained(saved)
        if is_somebodys(output / CARD):
            (saved / CARD).unlink()
        move_into(output, saved, last="config.json")
    ranks.barrier()
    return metrics


def learn(
    model: CausalQwenForCausalLM,
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example],
    output: Path,
    settings: TrainSettings | None = None,
    *,
    resume: bool = False,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Train `model` in place; what was learned is in it alone.

    Where there are no evaluation rows, some of the training rows take their place (`hold_out`), if values are learned and there
    is something to choose or `recalibrate`. `say` gets what is chosen. Kept facts, checkpoints and `metrics.jsonl` go to
    `output` as the run goes on. A killed run is taken up with `resume=True` and the same settings, and then comes to the same
    weights.

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
    ranks.join(model.device)
    anchor_texts, numbers, certain = _check(model, train_examples, eval_examples, settings)
    run = Run(model, train_examples, eval_examples, Path(output), settings, anchor_texts)
    _begin(run, resume)
    before = model.bf16, model.number_class
    model.bf16, model.number_class = settings.takes_bf16(model, train_examples), None
    try:
        return _learn(run, numbers, certain, say if ranks.rank() == 0 else lambda line: None)
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
    check_stages(model, settings, train_examples, eval_examples)
    if ranks.world_size() > 1:
        ranks.check_same_start(model, sum(len(example) for example in (*train_examples, *eval_examples)))
    stages = {"lora": settings.lora, "backbone": settings.backbone}
    anchor_texts = {name: read_text(stage.anchor_text) for name, stage in stages.items() if stage and stage.anchor > 0}
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


def _numbers_of(model: CausalQwenForCausalLM, example: Example) -> int:
    return example.input_ids.count(model.config.num_token_id)


def _learn(run: Run, numbers: LearnedNumbers, certain: set[tuple[int, ...]], say: Say) -> dict[str, Any]:
    """Choose what the settings leave open, train the stages, recalibrate and score."""
    model, settings, every = run.model, run.settings, run.train_examples
    of_people = any(example.individual is not None for example in every)
    if of_people and model.config.number_context == "digits" and any(_numbers_of(model, row) > 1 for row in every):
        say(_DIGITS_OF_PEOPLE)
    fresh, whole = choosing(model, settings), reads_whole(model, settings, numbers, every)
    people: Sequence[HeldPerson] = ()
    if not whole:
        model.config.require("training by gradients")
    own = not len(run.eval_examples) and settings.values is not None and ((fresh and of_people) or settings.recalibrate)
    if own and not of_people:
        run, numbers = _hold_out(run, certain, say)
    if whole:
        return _finished(run, numbers, _read_whole(run, certain, len(every) > len(run.train_examples), say), say)
    few = own and len(rows_together(run.eval_examples)) < FEWEST_HELD
    if fresh and not of_people:
        settings = _by_gradients(model, settings, run.train_examples)
    elif fresh:
        settings, people = _by_people(run, numbers, certain, say)
    if own and of_people:  # all of them chose
        run, numbers = _hold_out(run, certain, say)
    settings = as_it_was(settings, model)
    set_levels(model, None)
    fit_axes(model.config, numbers, settings.value_transform, settings)
    if settings.value_transform != "keep":
        _say_support(run, say)
    # Few rows that were held out here calibrate alone: no state of the weights is chosen by them.
    trained = dataclasses.replace(run, settings=settings, eval_examples=[] if few else run.eval_examples)
    for name, train_stage in TRAINERS.items():
        if getattr(settings, name) is not None and (line := train_stage(trained)):
            say(line)
    run = dataclasses.replace(trained, eval_examples=run.eval_examples)
    model.requires_grad_(True).eval()
    _check_finite(model)
    metrics = _final_scores(run)
    if of_people and settings.recalibrate and _recalibrate_individuals(run, people, certain, say):
        as_it_is = dataclasses.replace(settings, recalibrate=False)
        metrics |= _final_scores(dataclasses.replace(run, settings=as_it_is))
    return _finished(run, numbers, metrics, say)


def _recalibrate_individuals(run: Run, people: Sequence[HeldPerson], certain: set[tuple[int, ...]], say: Say) -> bool:
    """Fit the levels of an individual's intervals on the people of the evaluation rows, as the model predicts them, and on
    others who were held out when it was chosen how values are read. Whether those of the population average are new too."""
    model, rows, facts = run.model, run.eval_examples, run.eval_facts()
    held: list[HeldPerson] = []
    if facts is not None:
        keep = ~LearnedNumbers.of(rows, model.config.num_token_id, certain).certain
        held = people_of(model, facts, [example.individual for example in rows], keep)
    names = {person.name for person in held}
    held += [person for person in people if person.name not in names]
    law, owners = model.action.value_law, [example.individual for example in (*run.train_examples, *rows)]
    levels = ranks.from_main(population_levels(law, held))
    of_people = levels is not None and None not in owners and not model.value_axes.known
    if levels is not None and of_people:
        set_levels(model, [(0.0, levels)])
    fitted = ranks.from_main(fit_individual_levels(law, held))
    model.config.individual_levels = fitted
    if fitted is None:
        if len(rows):  # else it was said that nothing is calibrated
            say(
                f"intervals of an individual are not calibrated: {FEWEST} people held out, of two numbers or more, could"
            )
        return of_people
    count = sum(len(person.noise) > 1 for person in held)
    few = f"; fewer than {FEW} tell little: the levels are wide" * (count < FEW)
    factors = f"what is not known of them x {fitted['who']:.2f}, noise x {fitted['noise']:.2f}"
    say(f"intervals of an individual are calibrated on {count} people held out: {factors}{few}")
    return of_people


def _finished(run: Run, numbers: LearnedNumbers, metrics: dict[str, Any], say: Say) -> dict[str, Any]:
    """The metrics of a run, once they are noted in its model for `training.json` and the card, with the settings of each stage
    that are not the default, and what is uneven in them is said."""
    stages = {}
    for name, kind in STAGES.items():
        if (stage := getattr(run.settings, name)) is not None:
            default = {one.name: one.default for one in dataclasses.fields(kind)}
            stages[name] = {key: value for key, value in dataclasses.asdict(stage).items() if value != default[key]}
    run.model.trained_on = {
        "rows": len(run.train_examples),
        "numbers": len(numbers.values),
        "held_out": len(run.eval_examples),
        "seed": run.settings.seed,
        "stages": stages,
        "metrics": metrics,
    }
    if "scale_deciles" in metrics and (uneven := uneven_coverage(metrics["scale_deciles"])):
        say(uneven)
    return metrics


def _say_support(run: Run, say: Say) -> None:
    """Say beyond which ends no value is predicted, and which training row has the value nearest to each."""
    if run.settings.values is None or run.settings.support != "auto" or run.model.value_axes.apart:
        return
    support, number = run.model.value_transform.support, run.model.config.num_token_id
    known = [(value, words) for words, value in numbers_learned(run.train_examples, number)]
    for side, end, (value, words) in (("below", support.low, min(known)), ("above", support.high, max(known))):
        if end is not None:
            last = run.model.processor.tokenizer.decode([word for word in words if word != number]).strip()
            say(f'no value {side} {end:g} is predicted: a row has {value:g} after "{last}" (`support: null` lifts it)')


def _by_gradients(model: CausalQwenForCausalLM, settings: TrainSettings, examples: Sequence[Example]) -> TrainSettings:
    """Settings with the stage of values that nothing was chosen for; the model is given the branch that goes with it."""
    apply(model, {name: value for name, value in BRANCH.items() if is_open(model, name)}, settings.seed)
    updates = math.ceil(len(examples) / ValueStage().batch_size)
    stage = ValueStage(epochs=max(12, math.ceil(FEWEST_UPDATES / updates)), center=True)
    return dataclasses.replace(settings, values=stage)


def _by_people(
    run: Run, numbers: LearnedNumbers, certain: set[tuple[int, ...]], say: Say
) -> tuple[TrainSettings, Sequence[HeldPerson]]:
    """Settings with the stage of values that people held out chose, and these people; the model is given the settings that go
    with it."""
    model, settings, examples = run.model, run.settings, run.train_examples
    choice = ChoiceOfPeople(model, examples, run.eval_examples, numbers, certain, settings, run.work, say)
    if not choice.has_enough:
        return dataclasses.replace(settings, values=choice.stage_of(examples)), ()
    chosen = choice.made()
    apply(model, {"value_family": chosen.family}, settings.seed)
    best: dict[str, Any] = {"values": choice.stage_of(examples, chosen.share), "value_transform": chosen.axis}
    return dataclasses.replace(settings, **best, evaluations=max(settings.evaluations, EVALUATIONS)), chosen.people


def _read_whole(run: Run, certain: set[tuple[int, ...]], held_out_here: bool, say: Say) -> dict[str, Any]:
    """Read values from the whole backbone in closed form. The scores are those of a fit to the training rows alone; in the end
    rows that were held out here are learned from too."""
    model, started = run.model, time.perf_counter()
    copies = values_repeat_context(run.train_examples, model.config.num_token_id)
    again = {"copy_numbers": copies} if is_open(model, "copy_numbers") or model.value_kernel is not None else {}
    renew_values(model, value_kernel=None, **again)
    model.reads_backbone = blocks_of(model)
    try:
        known = [(run.train_examples, run.train_facts())]
        fit = WholeBackbone(model, known, certain, run.settings)
        fit.install()
        _say_support(run, say)
        fit.tell(say, time.perf_counter() - started)
        announce(model, known[0][1])
        model.requires_grad_(True).eval()
        metrics = _final_scores(run)
        facts = run.eval_facts()
        if held_out_here and facts is not None:
            known.append((run.eval_examples, facts))
            WholeBackbone(model, known, certain, run.settings, fit.kernel.shape).install()
    finally:
        model.reads_backbone = None
    return metrics


def _hold_out(run: Run, certain: set[tuple[int, ...]], say: Say) -> tuple[Run, LearnedNumbers]:
    """The run with some of its training rows as evaluation rows, and the numbers of the others; `say` gets how many."""
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
    if ranks.is_sharded(model):  # each rank has a part
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

    def scored() -> dict[str, Any]:
        return score_tokens(model, facts.blocks(split=True), split=True, classes=classes)

    scores, covered = scored(), None
    anew = run.settings.recalibrate and model.value_kernel is None  # whose levels are those of leave-one-out
    if anew and _recalibrate(model, scores["values"], classes, run.train_examples):
        covered = _covered_by_others(run, facts, scores["values"], classes)
        scores = scored()
    metrics, values = scores["metrics"], scores["values"]
    if covered is not None:
        metrics["held_coverage"] = covered
    if len(classes) >= _FEWEST_OF_TENTHS and not model.copies:
        known = (values[name] for name in ("loc", "scale", "value"))
        metrics["scale_deciles"] = coverage_by_scale(scores["law"], *known)
    return metrics


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
    fold = np.repeat(fold, np.diff(facts.offsets))[facts.facts.learned]
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


def _begin(run: Run, resume: bool) -> None:
    """Open the folder of a run's work, or take it up again, where it shares all with the one that was stopped; raises as
    `learn`."""
    model, work, note = run.model, run.work.resolve(), run.work / "settings.json"
    starts = model.__dict__.setdefault("_starts", {})  # fingerprints, by run, from before it moved
    start = starts.get(work) if resume else None
    settings, digest = dataclasses.asdict(run.settings), hashlib.sha256()
    del settings["fsdp"]  # a run may be taken up with or without it
    for examples in (run.train_examples, run.eval_examples):
        update_with_rows(digest, examples)
        whose = [(one.individual, one.class_name, one.group) for one in examples]
        digest.update(json.dumps(whose).encode())
    about = {"another model": start or fingerprint(model), "other rows": digest.hexdigest(), "other settings": settings}
    about = json.loads(ranks.from_main(json.dumps(about)))
    if (run.output / "config.json").exists():
        raise ValueError(f"{run.output} already holds a model; choose another output")
    if note.exists() and not resume:
        raise ValueError(f"{run.output} holds an unfinished run; resume it, or choose another output")
    if note.exists():
        was: Any = None
        with suppress(ValueError):  # a damaged note
            was = json.loads(note.read_text(encoding="utf-8"))
        if other := [name for name, one in about.items() if not isinstance(was, dict) or was.get(name) != one]:
            anew = " (a graft made anew starts from other values: load the one that was saved)"
            raise ValueError(
                f"{run.work} belongs to a run with {' and '.join(other)}; it cannot be resumed with these"
                f"{anew * ('another model' in other)}"
            )
    ranks.barrier()  # every rank has looked
    if ranks.rank() == 0:
        run.work.mkdir(parents=True, exist_ok=True)
        write_text(note, json.dumps(about))
    ranks.barrier()
    starts[work] = about["another model"]
