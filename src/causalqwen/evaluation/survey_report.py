"""A page about the answers of a survey: how each question is answered, which answers go together, and who differs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from causalqwen.evaluation.page import figure, write_page
from causalqwen.extras import extra
from causalqwen.files import suffix_of
from causalqwen.modeling import Question

with extra("tables", "a survey's report"):
    import pandas

_BINS, _WHO = 12, 10


@dataclass(frozen=True)
class Answered:
    """A question, and bars (what, share of the answers). numbers: mean, standard deviation, median and 90% interval, where
    answers are numbers or stand for them."""

    name: str
    bars: list[tuple[str, float]]
    numbers: list[float] | None


@dataclass(frozen=True)
class SurveyReport:
    """correlations: Spearman's between answers that are numbers or stand for them, by their places in `named`. who: of those
    who differ most, (name, facts, root mean square of their answers' distances from the means, in standard deviations)."""

    questions: list[Answered]
    named: list[str]
    correlations: list[list[float]]
    who: list[tuple[str, str, float]]
    people: int
    rows: int


def read_answers(path: Path) -> Any:
    """The rows of a survey's file as a pandas.DataFrame."""
    if suffix_of(path) == ".parquet":
        return pandas.read_parquet(path)
    return pandas.read_csv(path) if suffix_of(path) == ".csv" else pandas.read_json(path, lines=True, dtype=False)


def survey_report(table: Any, questions: Sequence[Question]) -> SurveyReport:
    """What the drawn answers of a survey say; table: as `survey` gives it, or its file.

    Raises ValueError for answers that were integrated (`draws=0`): their medians and probabilities are the report already.
    """
    table = table.reset_index(drop="person" in table.columns)
    columns: dict[str, np.ndarray] = {}
    answered = []
    for question in questions:
        if question.kind == "text":
            continue
        said = table[question.name]
        if any(isinstance(answer, Mapping) or str(answer).startswith("{") for answer in said.head()):
            raise ValueError(
                f"{question.name!r} was not drawn: a report is of answers that people gave, draws from 1 on"
            )
        if question.values is not None:
            options = dict(zip(map(str, question.options or ()), question.values, strict=True))
            columns[question.name] = np.array([options[_as_option(answer, options)] for answer in said])
            shares = [(option, float((columns[question.name] == at).mean())) for option, at in options.items()]
        elif question.kind == "words":
            shares = [(str(option), float((said == option).mean())) for option in question.options or ()]
        else:
            columns[question.name] = said.to_numpy(float)
            shares = _binned(columns[question.name])
        of = columns.get(question.name)
        summary = None if of is None else [of.mean(), of.std(), *np.quantile(of, (0.5, 0.05, 0.95))]
        answered.append(Answered(question.name, shares, summary))
    values = pandas.DataFrame({name: column for name, column in columns.items() if column.std() > 0})
    together = values.corr("spearman").to_numpy().tolist()
    people, who = table["person"].nunique(), _who_differs(table, questions, values)
    return SurveyReport(answered, list(values.columns), together, who, people, len(table))


def _binned(values: np.ndarray) -> list[tuple[str, float]]:
    """Shares of round bins that hold 95 of a hundred values, and of what lies beyond them, as the explorer's `binsOf`."""
    low, high = np.quantile(values, 0.025, method="lower"), np.quantile(values, 0.975, method="higher")
    least = (high - low) / _BINS or abs(low) / 10 or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= least)
    is_whole = bool((values == np.floor(values)).all())
    step = max(step, 1.0) if is_whole else step
    first, last = math.floor(low / step), math.floor(high / step)
    is_below, is_above = values.min() < first * step, values.max() >= (last + 1) * step
    first, last = first - is_below, last + is_above
    bins = np.clip(np.floor(values / step), first, last).astype(int) - first
    edges = [figure(float(at * step), 12) for at in range(first, last + 2)]
    ends = [figure(float(at * step - 1), 12) for at in range(first + 1, last + 2)] if is_whole else edges[1:]
    names = [start if start == end else f"{start} to {end}" for start, end in zip(edges, ends, strict=False)]
    if is_below:
        names[0] = f"less than {edges[1]}"
    if is_above:
        names[-1] = f"{edges[-2]} or more"
    return list(zip(names, (np.bincount(bins, minlength=len(names)) / len(values)).tolist(), strict=True))


def _as_option(said: Any, options: Mapping[str, float]) -> str:
    """The option that a file gave back: a number may have come as another kind of number."""
    return str(said) if str(said) in options else next(name for name, at in options.items() if at == float(said))


def _who_differs(table: Any, questions: Sequence[Question], values: Any) -> list[tuple[str, str, float]]:
    if values.empty:
        return []
    people = table["person"].astype(str)
    facts = table.drop(columns=["person", "draw", *(question.name for question in questions)], errors="ignore")
    facts = facts.groupby(people).head(1)
    facts.index = people[facts.index]
    away = (values - values.mean()) / values.std(ddof=0)
    far = (away.groupby(people).mean() ** 2).mean(axis=1) ** 0.5
    return [
        (name, ", ".join(f"{fact} {facts.at[name, fact]}" for fact in facts.columns), distance)
        for name, distance in far.sort_values(ascending=False, kind="stable").head(_WHO).items()
    ]


def write_survey_report(path: Path, table: Any, questions: Sequence[Question], title: str = "Survey") -> None:
    """`survey_report` as a page; it appears by rename."""
    write_page(path, "survey.html", title=title, report=survey_report(table, questions))
