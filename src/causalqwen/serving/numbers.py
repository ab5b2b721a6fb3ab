"""`/v1/numbers`: the laws of numbers as plain data."""

import math
from collections.abc import Sequence
from typing import Any

from causalqwen.modeling import CausalQwenForCausalLM, NumberPrediction
from causalqwen.modeling.prediction import describe
from causalqwen.numbers.law import LEVELS
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
    texts = [
        one if isinstance(one, str) else text_of_chat(one, model.processor, _goes_on(one)) for one in asked.prompts
    ]
    try:
        predictions = model.predict_number(texts, batch_size=8, individual=individual, classes=asked.classes)
    except ValueError as error:
        raise ApiError(400, str(error), param="prompts") from None
    values = asked.values or [None] * len(texts)
    return [
        {"index": index, "value": value} | told(prediction, value, asked.levels, asked.points)
        for index, (prediction, value) in enumerate(zip(predictions, values, strict=True))
    ]


def _goes_on(messages: list[Any]) -> bool:
    return messages[-1].role == "assistant"


def told(
    prediction: NumberPrediction,
    value: float | None = None,
    levels: Sequence[float] = LEVELS,
    points: int | None = None,
    beside: float | None = None,
) -> dict[str, Any]:
    """A law as plain data, None for what is infinite.

    value: the true one, which it is scored on. points: of its curve, None for none. beside: another value that is drawn.
    """
    entry = describe(prediction, value, levels=levels)
    if value is not None:
        entry["pit"] = prediction.cdf(value)
    if points is not None:
        columns = zip(*prediction.curve(points, value if beside is None else beside), strict=True)
        entry["curve"] = dict(zip(("value", "density", "cdf"), map(list, columns), strict=True))
    return _finite(entry)


def _finite(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {key: _finite(one) for key, one in plain.items()}
    if isinstance(plain, list):
        return [_finite(one) for one in plain]
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
