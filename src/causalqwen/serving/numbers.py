"""`/v1/numbers`: the laws of numbers as plain data."""

from collections.abc import Sequence
from typing import Any

from causalqwen.modeling import CausalQwenForCausalLM, CausalQwenProcessor, NumberPrediction
from causalqwen.modeling.prediction import prediction_to_dict
from causalqwen.serving.requests import NumbersRequest, text_of_chat
from causalqwen.serving.settings import ApiError, ServerSettings, individual_of


def texts_of(asked: NumbersRequest, settings: ServerSettings, processor: CausalQwenProcessor) -> list[str]:
    """The text that each number stands behind. ApiError 400 for too many, and for messages that the template refuses."""
    if len(asked.prompts) > settings.max_prompts:
        message = f"{len(asked.prompts)} prompts are more than the {settings.max_prompts} of one request"
        raise ApiError(400, message, param="prompts")
    return [one if isinstance(one, str) else text_of_chat(one, processor, _goes_on(one)) for one in asked.prompts]


def predict_numbers(
    asked: NumbersRequest, settings: ServerSettings, model: CausalQwenForCausalLM
) -> list[NumberPrediction]:
    """Of each prompt, in their order: `predict_number`. ApiError 400 for what cannot be predicted."""
    texts = texts_of(asked, settings, model.processor)
    individual = individual_of(asked.individual, settings, "individual")
    try:
        return model.predict_number(texts, batch_size=8, individual=individual, classes=asked.classes)
    except ValueError as error:
        raise ApiError(400, str(error), param="prompts") from None


def tell_numbers(asked: NumbersRequest, predictions: Sequence[NumberPrediction]) -> list[dict[str, Any]]:
    """One entry per prompt, in their order."""
    values = asked.values or [None] * len(predictions)
    return [
        {"index": index, "value": value} | prediction_to_dict(prediction, value, asked.levels, asked.points)
        for index, (prediction, value) in enumerate(zip(predictions, values, strict=True))
    ]


def _goes_on(messages: list[Any]) -> bool:
    return messages[-1].role == "assistant"
