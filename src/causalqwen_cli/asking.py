"""Commands that ask people: population, survey."""

from pathlib import Path
from typing import Annotated

from typer import Option

from causalqwen_cli.base import AsJson, Device, Individuals, Made, Model, Page, command, refuse, say, show


@command
def population(
    model: Model,
    output: Annotated[Path, Individuals, Option(help="File for the people (safetensors).")],
    rows: Annotated[
        Path | None,
        Option(help="Rows that name an `individual` (JSONL, CSV, Parquet): what people said; other fields are facts."),
    ] = None,
    drawn: Annotated[int | None, Option(min=1, help="Make up this many people instead.")] = None,
    seed: Annotated[int, Option(help="Seed of the people who are made up.")] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """People who can be asked: inferred from what they said, or drawn from the distribution of individuals."""
    from causalqwen import Population
    from causalqwen.data import stream_rows
    from causalqwen.data.people import people_of_rows
    from causalqwen.modeling.loading import load_model

    refuse((rows is None) == (drawn is None), "people are inferred from --rows, or --drawn: give one of them")
    given = [] if rows is None else list(stream_rows(rows))  # a row that cannot be read stops the run here
    loaded, how = load_model(model, device), "drawn from the distribution of individuals"
    if rows is None:
        people = Population.drawn(drawn, loaded.config.causal_size, seed)
    else:
        observed, facts, kinds = people_of_rows(given, loaded.processor)
        likelihood = "values" if kinds == {"values"} else "softmax"
        how = f"inferred from their {', '.join(sorted(kinds))} by likelihood {likelihood!r}"
        if kinds != {"values"}:
            how += "; between words and numbers nothing was learned: where numbers are asked, " + (
                "numbers alone tell who they are" if "values" in kinds else "they are the population average"
            )
        if "values" in kinds and not loaded.reads_numbers:
            how = "inferred from their words; this model has not learned values: train it first, or their numbers tell nothing"
        say(f"{rows.name}: {len(observed):,} people, {how}")
        people = loaded.abduct_people(observed, facts=facts, likelihood=likelihood)
    people.save(output)
    result = {"output": str(output), "people": len(people), "facts": list(people.facts)}
    show(result, f"{output}: {people}, {how}", as_json)


@command
def survey(
    model: Model,
    population: Annotated[Path, Option(help="File of people (`causalqwen population`).")],
    questions: Annotated[
        Path, Option(help='JSON lines: {"prompt": ..., "name": ..., "options": ..., "max_new_tokens": ...}.')
    ],
    output: Annotated[
        Path,
        Made((".parquet", ".csv", ".jsonl")),
        Option(help="Parquet, CSV or JSONL file of answers, a row a person; it appears when it is complete."),
    ],
    draws: Annotated[
        int, Option(min=0, help="Answers of each person to each question; 0 for medians and probabilities.")
    ] = 1,
    seed: Annotated[int, Option(help="Seed of all draws.")] = 0,
    where: Annotated[list[str] | None, Option(help='Whom to ask, by facts: "age > 60"; repeatable.')] = None,
    resume: Annotated[bool, Option("--resume", help="Take up a stopped run of the same output.")] = False,
    html: Annotated[
        Path | None,
        Page,
        Option(help="HTML page: how each question is answered, which answers go together, who differs."),
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Ask people questions: numbers, options and texts, each answer the same whoever else is asked."""
    wrong = "--html is about answers that were drawn: give --draws 1 or more, or leave it out"
    refuse(html is not None and draws == 0, wrong)
    if html is not None:
        from causalqwen.evaluation.survey_report import read_answers, write_survey_report
    from causalqwen import Population
    from causalqwen.data.people import read_questions
    from causalqwen.evaluation.surveys import survey_file
    from causalqwen.modeling.loading import load_model

    asked = read_questions(questions)
    people = Population.load(population).where(*(where or ()))
    loaded = load_model(model, device)
    count = survey_file(loaded, people, asked, output, draws=draws, seed=seed, resume=resume)
    result = {"output": str(output), "rows": count, "people": len(people), "questions": len(asked)}
    if html is not None:
        write_survey_report(html, read_answers(output), asked, f"Survey of {len(people):,} people")
        result["html"] = str(html)
    show(result, f"{output}: {len(people):,} people, {len(asked)} questions, {count:,} rows", as_json)
