"""What vLLM's workers can be asked for beyond tokens: the numbers of a request."""

from collections.abc import Sequence
from typing import Any

from causalqwen.modeling.prediction import NumberPrediction, told


class NumberWorker:
    """vLLM's `worker_extension_cls`; `LLM.collective_rpc("take_numbers", args=(keys,))` calls it."""

    def take_numbers(self, keys: list[str]) -> list[dict[str, dict[str, Any]]]:
        """Per request, by the place of each number that was generated: see `CausalQwenForCausalLM.numbers_of`. Given once.

        Raises:
            ValueError: a key that no request came with, or whose numbers were taken before.
        """
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        known = model.table.by_key
        if missing := [key for key in keys if key not in known]:
            raise ValueError(f"no numbers are kept under the key {missing[0]!r}; they are given once")
        return [model.numbers_of(known.pop(key)) for key in keys]

    def see_numbers(self, asked: Sequence[tuple[str, int, int | None]]) -> list[dict[str, dict[str, Any]]]:
        """As `take_numbers`, of requests that may go on: those of a key from a place on, as a server tells them, with so many
        points of their curves. They stay; where a key is unknown there are none."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        seen = []
        for key, since, points in asked:

            def tell(law: NumberPrediction, value: float, points: int | None = points) -> dict[str, Any]:
                return told(law, points=points, beside=value)

            request = model.table.by_key.get(key)
            seen.append({} if request is None else model.numbers_of(request, since, tell))
        return seen

    def tell_laws(
        self, asked: Sequence[tuple[str, float | None]], levels: Sequence[float], points: int | None
    ) -> list[dict[str, Any]]:
        """The law of the number behind each key's prompt, of which one token was made, as a server tells it; given once. With
        the true value, where one is known."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        laws = [model.law_of(model.table.by_key.pop(key)) for key, _ in asked]
        return [told(law, value, levels, points) for law, (_, value) in zip(laws, asked, strict=True)]

    def forget_numbers(self, keys: list[str]) -> None:
        """Nobody will ask for these any more."""
        for key in keys:
            self.model_runner.get_model().table.by_key.pop(key, None)  # type: ignore[attr-defined]
