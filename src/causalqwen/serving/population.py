"""`/v1/population`: what people of a population answer."""

from typing import Annotated

from pydantic import Field, model_validator

from causalqwen.decoding import Population
from causalqwen.modeling.survey import Survey, batches
from causalqwen.serving.asking import AskedQuestion
from causalqwen.serving.people import MOST_PEOPLE, People, TaskRequest, Who
from causalqwen.serving.requests import Seed, Strict
from causalqwen.serving.settings import ApiError
from causalqwen.serving.tasks import Task, Work

MOST_ROWS = 10_000
"""People times draws of one request."""

_AT_ONCE = 64


class DrawnPeople(Strict):
    """`Population.drawn`: so many people, of the seeds from `seed` on."""

    count: Annotated[int, Field(ge=1, le=MOST_ROWS)]
    seed: Seed = 0


class PopulationRequest(TaskRequest):
    """`/v1/population`."""

    made = "population"

    individuals: Annotated[dict[str, Who], Field(min_length=1, max_length=MOST_PEOPLE)] | None = None
    drawn: DrawnPeople | None = None
    questions: Annotated[list[AskedQuestion], Field(min_length=1, max_length=64)]
    draws: Annotated[int, Field(ge=0)] = 1
    seed: Seed = 0

    @model_validator(mode="after")
    def _check_people(self) -> "PopulationRequest":
        if (self.individuals is None) == (self.drawn is None):
            raise ValueError("give the people who are asked: either individuals by their names, or drawn")
        return self

    def work(self, people: People) -> Work:
        """The rows of `model.survey`, person by person."""
        return lambda task: _ask(self, people, task)


def _ask(asked: PopulationRequest, people: People, task: Task) -> None:
    model, most = people.model, people.settings.max_tokens
    if asked.drawn is not None:
        population = Population.drawn(asked.drawn.count, model.config.causal_size, asked.drawn.seed)
    else:
        population = Population.of({name: people.find(who) for name, who in (asked.individuals or {}).items()})
    rows = len(population) * max(asked.draws, 1)
    if rows > MOST_ROWS:
        raise ApiError(400, f"{rows} rows are more than the {MOST_ROWS} of one request", param="draws")
    if (longest := max(one.max_new_tokens or 0 for one in asked.questions)) > most:
        raise ApiError(400, f"max_new_tokens is {longest}, this server writes {most}", param="questions")
    questions = [one.question for one in asked.questions]
    survey, done = Survey(model, population, questions, asked.draws, asked.seed), 0
    texts = any(one.kind == "text" for one in questions)
    for items in batches(survey.items(), 1 if texts else _AT_ONCE):
        made = survey.rows(items)
        done += len(made)
        task.tell({"data": made, "progress": done / rows})
