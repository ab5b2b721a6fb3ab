"""`/v1/answers`: what one person answers to questions, as distributions and as draws."""

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from causalqwen.decoding import Population
from causalqwen.modeling import CausalQwenForCausalLM, Question
from causalqwen.modeling.prediction import prediction_to_dict
from causalqwen.modeling.survey import Survey, fill
from causalqwen.numbers.law import LEVELS
from causalqwen.serving.requests import Count, Level, Points, Seed, Strict
from causalqwen.serving.settings import ApiError, ServerSettings, individual_of

Finite = Annotated[float, Field(allow_inf_nan=False)]


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
        for place, one in enumerate(questions):
            try:
                _ = one.question  # says itself what is wrong with it
            except ValueError as error:
                raise ValueError(f"question {place}, {error}") from None
        return questions

    @model_validator(mode="after")
    def _check_draws(self) -> "AnswersRequest":
        if self.draws == 0 and any(one.max_new_tokens for one in self.questions):
            raise ValueError("a text is drawn: ask for draws")
        return self


def ask_person(asked: AnswersRequest, settings: ServerSettings, model: CausalQwenForCausalLM) -> list[dict[str, Any]]:
    """One entry per question, in their order: the law of the answer, of a number as `/v1/numbers` has it, of options the
    probability of each; and `draws` answers, of which every place holds those of one individual (`model.survey`).

    Raises ApiError 400 for what cannot be asked.
    """
    questions = [one.question for one in asked.questions]
    texts = asked.draws * sum(one.max_new_tokens or 0 for one in questions)
    if len(questions) > settings.max_prompts:
        message = f"{len(questions)} questions are more than the {settings.max_prompts} of one request"
        raise ApiError(400, message, param="questions")
    if texts > settings.max_tokens:
        message = f"{texts} tokens of texts are more than the {settings.max_tokens} of one request"
        raise ApiError(400, message, param="draws")
    who = individual_of(asked.individual, settings, "individual")
    try:
        people = Population.of({asked.individual: who}, seed=asked.seed)
        laws: dict[str, Any] = {}
        answers: list[dict[str, Any]] = []
        if expected := [one for one in questions if one.options is not None]:
            (laws,) = (survey := Survey(model, people, expected, 0)).rows(list(survey.items()))
        if asked.draws:
            answers = (survey := Survey(model, people, questions, asked.draws, asked.seed)).rows(list(survey.items()))
        numbers = [fill(one.prompt, {"name": asked.individual}) for one in questions if one.kind == "number"]
        predicted = iter(model.predict_number(numbers, batch_size=8, individual=who))
    except ValueError as error:
        raise ApiError(400, str(error), param="questions") from None
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
