"""`/v1/worlds`: what somebody would have written, world by world."""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from causalqwen.checking import Count
from causalqwen.decoding import Individual
from causalqwen.modeling import CausalQwenForCausalLM, Intervention, Observation, World
from causalqwen.modeling.explain_individual import token_texts
from causalqwen.modeling.prediction import prediction_to_dict
from causalqwen.modeling.reading import EncodedText, encode_text
from causalqwen.modeling.worlds import word_changes, world_numbers
from causalqwen.serving.calls import Progress, Task
from causalqwen.serving.people import People, TaskRequest, Who, about
from causalqwen.serving.requests import Points, Seed, Strict, Temperature
from causalqwen.serving.settings import ApiError

_LENGTH = 64  # tokens after a prompt where nothing says how many
_DRAWN = ("num_samples", "seed", "temperature")

Place = Annotated[int, Field(ge=0, strict=False)]  # keys of JSON are texts


class Edit(Strict):
    """An `Intervention`; with nothing set, the world that was."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    tokens: dict[Place, str] = Field(default_factory=dict)
    values: dict[Place, float] = Field(default_factory=dict)


class WorldsRequest(TaskRequest):
    """What would have been written: worlds of a text."""

    path = made = "worlds"

    prompt: Annotated[str, Field(min_length=1)]
    text: Annotated[str, Field(min_length=1)] | None = None
    interventions: list[Edit] = Field(default_factory=lambda: [Edit()], min_length=1)
    individual: Who | None = None
    noise: Literal["abduct", "redraw"] = "abduct"
    num_samples: Count = 1
    max_tokens: Count | None = None
    seed: Seed = 0
    temperature: Temperature = 1.0
    points: Points | None = None

    @model_validator(mode="after")
    def _check_text(self) -> "WorldsRequest":
        if self.text is None and self.interventions != [Edit()]:
            raise ValueError("interventions change what was observed: give its text")
        return self

    def work(self, people: People, task: Task) -> None:
        """Tell the worlds, in the order of interventions and samples."""
        model, settings = people.model, people.settings
        of_text = 0 if self.text is None else len(encode_text(model, self.text).ids)
        length, count = self.max_tokens or of_text or _LENGTH, len(self.interventions) * self.num_samples
        if max(length, of_text) > settings.max_tokens:
            message = f"a world has {max(length, of_text)} tokens, this server writes {settings.max_tokens}"
            raise ApiError(400, message, param="max_tokens")
        if count > settings.max_rows:
            message = f"{count} worlds are more than the {settings.max_rows} texts of one request"
            raise ApiError(400, message, param="interventions")
        observed, who = Observation(self.text or "", self.prompt), None
        if self.individual is not None:
            who = people.find(self.individual)
        elif self.text is not None:
            who = model.abduct(observed)
        task.tell({"individual": None if who is None else about(who), "progress": 0.0})
        drawn: dict[str, Any] = {name: getattr(self, name) for name in _DRAWN}
        drawn |= {"individual": who, "max_new_tokens": length, "streamer": Progress(task, length * count)}
        if self.text is None:
            made = model.interventional_samples(self.prompt, **drawn)
        else:
            edits = [Intervention(**edit.model_dump()) for edit in self.interventions]
            made = model.counterfactual_samples(observed, edits, noise=self.noise, **drawn)
        for intervention, worlds in enumerate(made):
            for sample, world in enumerate(worlds):
                speaker = who or Individual.from_seed(self.seed + sample, model.config.causal_size)
                entry = {"intervention": intervention, "sample": sample}
                task.tell({"data": [entry | _world(model, self, world, speaker)]})


def _world(model: CausalQwenForCausalLM, asked: WorldsRequest, world: World, speaker: Individual) -> dict[str, Any]:
    """A world as plain data; beside what was observed, where something was."""
    before = encode_text(model, world.prompt, prompt=True)
    digits = torch.zeros(len(world.tokens), dtype=torch.bool)
    digits[list(world.digits)] = True
    whole = before.then(EncodedText(world.tokens, world.values, digits))
    numbers = [
        {"value": number.value, "span": [number.start, number.end]}
        | ({} if number.law is None else prediction_to_dict(number.law, points=asked.points, beside=number.value))
        for number in world_numbers(model, world, speaker)
    ]
    entry = {
        "prompt": world.prompt,
        "text": world.text,
        "tokens": token_texts(model, whole)[len(before.ids) :],
        "forced": list(world.forced),
        "numbers": numbers,
    }
    if asked.text is not None:
        entry["changes"] = word_changes(asked.text, world.text)
        entry["prompt_changes"] = word_changes(asked.prompt, world.prompt)
    return entry
