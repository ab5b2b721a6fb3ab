"""What vLLM's workers can be asked for beyond tokens: the numbers of a request."""

from typing import Any


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
