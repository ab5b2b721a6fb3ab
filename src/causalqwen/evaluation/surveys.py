"""A survey to a file."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from causalqwen.data.people import read_questions
from causalqwen.data.rows import arrow_for
from causalqwen.decoding import Population
from causalqwen.evaluation.kept import Answers, write_kept
from causalqwen.files import check_kind, suffix_of
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.loading import fingerprint, load_model
from causalqwen.modeling.survey import PEOPLE_AT_ONCE, Question, Survey

_TEXTS_AT_ONCE = 16  # rows that a stopped run loses at most where texts are written, one by one


def survey_file(
    model: CausalQwenForCausalLM,
    population: Population,
    questions: Sequence[Question],
    output: Path,
    *,
    draws: int = 1,
    seed: int = 0,
    resume: bool = False,
) -> int:
    """`model.survey` to a file (`.parquet`, `.csv`, else JSON lines), `PEOPLE_AT_ONCE` rows in memory. Returns the rows.

    Raises as `survey`, and as `write_kept` where a run was stopped.
    """
    output = Path(output)
    check_kind(output, (".parquet", ".csv", ".jsonl"))
    if suffix_of(output) == ".parquet":
        arrow_for(output)
    asked = Survey(model, population, questions, draws, seed)
    people = hashlib.sha256(population.draws.numpy().tobytes())
    if population.numbers is not None:
        people.update(population.numbers.numpy().tobytes())
    people.update(repr((list(population.names), dict(population.facts), population.evidence)).encode())
    listed = [dataclasses.asdict(question) for question in asked.questions]
    options = {
        "model": fingerprint(model),
        "people": people.hexdigest(),
        "questions": listed,
        "draws": draws,
        "seed": seed,
    }

    def belongs(kept: dict[str, Any], item: tuple[int, int]) -> bool:
        return (kept.get("person"), kept.get("draw", 0)) == (population.names[item[0]], item[1])

    size = _TEXTS_AT_ONCE if any(question.kind == "text" for question in asked.questions) else PEOPLE_AT_ONCE
    total = len(population) * max(draws, 1)
    answers = Answers(options, asked.items(), asked.rows, belongs, size, total, "asking")
    return write_kept(output, answers, resume=resume)


class TableSurvey:
    """A worker that asks the people of a table: Arrow table with a column `person` (and `draw`) in, their answers out. For
    `ray.data.Dataset.map_batches`.

    model: folder of a grafted model; population, questions: files; all are read once per worker. Answers are those of `survey`,
    whichever worker gives them.
    """

    def __init__(
        self, model: str, population: str, questions: str, *, draws: int = 1, seed: int = 0, device: str = "auto"
    ) -> None:
        people = Population.load(population)
        self.survey = Survey(load_model(model, device), people, read_questions(questions), draws, seed)
        self.places = {name: place for place, name in enumerate(people.names)}

    def __call__(self, table: Any) -> Any:
        import pyarrow as pa

        names = table.column("person").to_pylist()
        if unknown := [name for name in names if name not in self.places]:
            raise ValueError(f"no individual of the population is called {unknown[0]!r}")
        draws = table.column("draw").to_pylist() if "draw" in table.column_names else [0] * len(names)
        items = zip((self.places[name] for name in names), draws, strict=True)
        return pa.Table.from_pylist(self.survey.rows(list(items)))
