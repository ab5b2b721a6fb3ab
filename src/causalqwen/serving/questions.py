"""`/v1/answers` and `/v1/population`: what one person answers to questions, as distributions and as draws, and what many do."""

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from causalqwen.checking import Count, Finite
from causalqwen.decoding import Population
from causalqwen.modeling import CausalQwenForCausalLM, Question
from causalqwen.modeling.prediction import prediction_to_dict
from causalqwen.modeling.survey import Survey, batches, fill
from causalqwen.numbers.law import LEVELS
from causalqwen.serving.calls import Task
from causalqwen.serving.people import MOST_PEOPLE, People, TaskRequest, Who
from causalqwen.serving.requests import Level, Points, Seed, Strict
from causalqwen.serving.settings import ApiError, ServerSettings, individual_of, refusing

MOST_ROWS = 10_000
"""People times draws of one request."""

_AT_ONCE = 64


class AskedQuestion(Strict):
    """See `modeling.Question`."""

    prompt: str
    name: str = ""
    options: list[str] | list[Finite] | dict[str, Finite] | None = None
    max_new_tokens: Count | None = None

    @property
    def question(self) -> Question:
        return Question(self.prompt, self.options, self.name, self.max_new_tokens)  # type: ignore[arg-type]


class AnswersRequest(Strict):
    """Questions to one person, who is known by name."""

    model: str
    individual: str
    questions: Annotated[list[AskedQuestion], Field(min_length=1)]
    draws: Annotated[int, Field(ge=0, le=1000)] = 0
    seed: Seed = 0
    levels: Annotated[list[Level], Field(default=list(LEVELS), min_length=1, max_length=99)]
    points: Points | None = None

    @field_validator("questions")
    @classmethod
    def _check(cls, questions: list[AskedQuestion]) -> list[AskedQuestion]:
        for place, asked in enumerate(questions):
            try:
                _ = asked.question  # says itself what is wrong with it
            except ValueError as error:
                raise ValueError(f"question {place}, {error}") from None
        return questions

    @model_validator(mode="after")
    def _check_draws(self) -> "AnswersRequest":
        if self.draws == 0 and any(asked.max_new_tokens for asked in self.questions):
            raise ValueError("a text is drawn: ask for draws")
        return self


def ask_person(asked: AnswersRequest, settings: ServerSettings, model: CausalQwenForCausalLM) -> list[dict[str, Any]]:
    """One entry per question, in their order: the distribution of the answer, of a number as `/v1/numbers` has it, of
    options the probability of each; and `draws` answers, of which every place holds those of one individual (`model.survey`).

    Raises ApiError 400 for what cannot be asked.
    """
    questions = [each.question for each in asked.questions]
    texts = asked.draws * sum(question.max_new_tokens or 0 for question in questions)
    if len(questions) > settings.max_prompts:
        message = f"{len(questions)} questions are more than the {settings.max_prompts} of one request"
        raise ApiError(400, message, param="questions")
    if texts > settings.max_tokens:
        message = f"{texts} tokens of texts are more than the {settings.max_tokens} of one request"
        raise ApiError(400, message, param="draws")
    who = individual_of(asked.individual, settings, "individual")
    with refusing("questions"):
        people = Population.of({asked.individual: who}, seed=asked.seed)
        laws: dict[str, Any] = {}
        answers: list[dict[str, Any]] = []
        if expected := [question for question in questions if question.options is not None]:
            (laws,) = (survey := Survey(model, people, expected, 0)).rows(list(survey.items()))
        if asked.draws:
            answers = (survey := Survey(model, people, questions, asked.draws, asked.seed)).rows(list(survey.items()))
        name = {"name": asked.individual}
        numbers = [fill(question.prompt, name) for question in questions if question.kind == "number"]
        predicted = iter(model.predict_number(numbers, batch_size=8, individual=who))
    entries = []
    for question in questions:
        entry: dict[str, Any] = {"name": question.name}
        if question.kind == "number":
            entry |= prediction_to_dict(next(predicted), None, asked.levels, asked.points)
        elif question.options is not None:
            entry["probabilities"] = {str(option): p for option, p in laws[question.name].items()}
        if asked.draws:
            entry["draws"] = [row[question.name] for row in answers]
        entries.append(entry)
    return entries


class DrawnPeople(Strict):
    """`Population.drawn`: so many people, of the seeds from `seed` on."""

    count: Annotated[int, Field(ge=1, le=MOST_ROWS)]
    seed: Seed = 0


class PopulationRequest(TaskRequest):
    """What a population answers."""

    path = made = "population"

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

    def work(self, people: People, task: Task) -> None:
        """Tell the rows of `model.survey`, person by person."""
        model, most = people.model, people.settings.max_tokens
        if self.drawn is not None:
            population = Population.drawn(self.drawn.count, model.config.causal_size, self.drawn.seed)
        else:
            population = Population.of({name: people.find(who) for name, who in (self.individuals or {}).items()})
        rows = len(population) * max(self.draws, 1)
        if rows > MOST_ROWS:
            raise ApiError(400, f"{rows} rows are more than the {MOST_ROWS} of one request", param="draws")
        if (longest := max(asked.max_new_tokens or 0 for asked in self.questions)) > most:
            raise ApiError(400, f"max_new_tokens is {longest}, this server writes {most}", param="questions")
        questions = [asked.question for asked in self.questions]
        survey, done = Survey(model, population, questions, self.draws, self.seed), 0
        texts = any(question.kind == "text" for question in questions)
        for items in batches(survey.items(), 1 if texts else _AT_ONCE):
            made = survey.rows(items)
            done += len(made)
            task.tell({"data": made, "progress": done / rows})
