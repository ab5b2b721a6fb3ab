"""A survey to a file."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from causalqwen.data.rows import arrow_for
from causalqwen.decoding import Population
from causalqwen.evaluation.kept import write_kept
from causalqwen.evaluation.predict import fingerprint
from causalqwen.modeling import CausalQwenForCausalLM
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
    if output.suffix == ".parquet":
        arrow_for(output)
    asked = Survey(model, population, questions, draws, seed)
    people = hashlib.sha256(population.draws.numpy().tobytes())
    people.update(repr((list(population.names), dict(population.facts), population.evidence)).encode())
    options = {
        "model": fingerprint(model),
        "people": people.hexdigest(),
        "questions": [dataclasses.asdict(question) for question in asked.questions],
        "draws": draws,
        "seed": seed,
    }
    return write_kept(
        output,
        options,
        asked.items(),
        asked.rows,
        lambda kept, item: (kept.get("person"), kept.get("draw", 0)) == (population.names[item[0]], item[1]),
        batch_size=_TEXTS_AT_ONCE if any(one.kind == "text" for one in asked.questions) else PEOPLE_AT_ONCE,
        resume=resume,
        total=len(population) * max(draws, 1),
        doing="asking",
    )
