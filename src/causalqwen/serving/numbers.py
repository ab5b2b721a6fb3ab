"""`/v1/numbers`: the laws of numbers as plain data."""

import math
from typing import Any

from causalqwen.modeling import CausalQwenForCausalLM, NumberPrediction
from causalqwen.modeling.prediction import describe
from causalqwen.serving.requests import NumbersRequest, text_of_chat
from causalqwen.serving.settings import ApiError, ServerSettings, individual_of


def predict_numbers(
    asked: NumbersRequest, settings: ServerSettings, model: CausalQwenForCausalLM
) -> list[dict[str, Any]]:
    """One entry per prompt, in their order: of `predict_number`. ApiError 400 for what cannot be predicted."""
    if len(asked.prompts) > settings.max_prompts:
        message = f"{len(asked.prompts)} prompts are more than the {settings.max_prompts} of one request"
        raise ApiError(400, message, param="prompts")
    individual = individual_of(asked.individual, settings, "individual")
    texts = [one if isinstance(one, str) else text_of_chat(one, model.processor, _goes_on(one)) for one in asked.prompts]
    try:
        predictions = model.predict_number(texts, batch_size=8, individual=individual, classes=asked.classes)
    except ValueError as error:
        raise ApiError(400, str(error), param="prompts") from None
    values = asked.values or [None] * len(texts)
    return [_entry(index, *row, asked) for index, row in enumerate(zip(predictions, values, strict=True))]


def _goes_on(messages: list[Any]) -> bool:
    return messages[-1].role == "assistant"


def _entry(index: int, prediction: NumberPrediction, value: float | None, asked: NumbersRequest) -> dict[str, Any]:
    entry = {"index": index, **describe(prediction, value, levels=asked.levels), "value": value}
    if value is not None:
        entry["pit"] = prediction.cdf(value)
    if asked.points is not None:
        columns = zip(*prediction.curve(asked.points, value), strict=True)
        entry["curve"] = dict(zip(("value", "density", "cdf"), map(list, columns), strict=True))
    return finite(entry)


def finite(told: Any) -> Any:
    """Plain data without what JSON has not: None stands for an infinity."""
    if isinstance(told, dict):
        return {key: finite(one) for key, one in told.items()}
    if isinstance(told, list):
        return [finite(one) for one in told]
    return None if isinstance(told, float) and not math.isfinite(told) else told
