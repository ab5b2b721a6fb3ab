"""inspect-ai on a grafted model: the provider `causalqwen`, and a task about numbers that is scored by CRPS."""

from typing import Any

import anyio
import torch
from inspect_ai import Task, task
from inspect_ai import model as models
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolChoice, ToolInfo

from causalqwen.modeling.loading import load_model
from causalqwen_evals import rows

_TOKENS = 256
_PASSED_ON = {"temperature", "top_p", "top_k"}


class CausalQwenAPI(models.ModelAPI):
    """A grafted model, one request at a time. `--model causalqwen/FOLDER`.

    Messages are rendered by the backbone's chat template; where it has none, their texts are put one after the other. What is
    written holds its numbers as text.

    Args:
        model_name: folder of the model. model_args: device ("auto"), as `-M device=cpu`.

    Raises ValueError for a folder without a grafted model, and for an argument that there is not.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 # as inspect-ai has it
        device: str = "auto",
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if model_args:
            raise ValueError(f"the provider causalqwen has no argument {next(iter(model_args))}; it has device")
        self.model = load_model(model_name, device)
        self._alone = anyio.Lock()

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """A text. ValueError for tools, which these models do not know."""
        if tools:
            raise ValueError("the provider causalqwen calls no tools; leave them out")
        async with self._alone:
            return await anyio.to_thread.run_sync(self._written, self.prompt(input), config)

    def prompt(self, messages: list[ChatMessage]) -> str:
        """The text that the model goes on with."""
        processor = self.model.processor
        if processor.chat_template is None:
            return "\n".join(message.text for message in messages)
        plain = [{"role": message.role, "content": message.text} for message in messages]
        text: str = processor.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        return text

    def _written(self, prompt: str, config: GenerateConfig) -> ModelOutput:
        processor = self.model.processor
        inputs = processor(prompt, prompt=True, return_tensors="pt").to(self.model.device)
        given = {} if config.temperature == 0 else config.model_dump(include=_PASSED_ON, exclude_none=True)
        asked: dict[str, Any] = {"do_sample": bool(given)} | given
        if config.stop_seqs:
            asked |= {"stop_strings": list(config.stop_seqs), "tokenizer": processor}
        with torch.random.fork_rng(enabled=config.seed is not None):
            if config.seed is not None:
                torch.manual_seed(config.seed)
            made = self.model.generate(
                **inputs,
                max_new_tokens=config.max_tokens or _TOKENS,
                return_dict_in_generate=True,
                **asked,
            )
        length = inputs["input_ids"].shape[1]
        (text,) = processor.batch_decode(
            made.sequences[:, length:], made.numeric_values[:, length:], skip_special_tokens=True
        )
        output = ModelOutput.from_content(self.model_name, text)
        new = made.sequences.shape[1] - length
        output.usage = models.ModelUsage(input_tokens=length, output_tokens=new, total_tokens=length + new)
        return output

    async def law(self, prompt: str) -> dict[str, list[float]]:
        """The number after a prompt, as a distribution: see `rows.law_of`."""
        async with self._alone:
            return rows.law_of((await anyio.to_thread.run_sync(self.model.predict_number, prompt))[0])


@models.modelapi(name="causalqwen")
def causalqwen() -> type[models.ModelAPI]:
    """The provider, for `--model causalqwen/FOLDER`."""
    return CausalQwenAPI


@solver
def number() -> Solver:
    """Ask for the number after the sample's text: a grafted model for its distribution, any other for a text, asked to answer
    with a number alone."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        api = models.get_model().api
        if not isinstance(api, CausalQwenAPI):
            state.messages[-1] = models.ChatMessageUser(
                content=f"Go on with one number and nothing else: {state.input_text}"
            )
            return await generate(state)
        law = await api.law(state.input_text)
        state.metadata["law"] = law
        state.output = ModelOutput.from_content(api.model_name, f"{law['quantiles'][len(law['quantiles']) // 2]:.6g}")
        return state

    return solve


@scorer(metrics={name: [mean(), stderr()] for name in ("crps", "error", "covered_90", "has_number")})
def crps() -> Scorer:
    """`rows.score_number` of the distribution, or of the text."""

    async def score(state: TaskState, target: Target) -> Score:
        answer = state.output.completion
        scores = rows.score_number(float(target.text), answer, state.metadata.get("law"))
        return Score(value=dict(scores), answer=answer)

    return score


@task
def boiling_points(count: int = 200) -> Task:
    """Boiling points, in kelvin, of compounds that the demo's training never saw."""
    samples = [Sample(input=row["text"], target=str(row["value"])) for row in rows.boiling(count)]
    return Task(dataset=samples, solver=number(), scorer=crps())
