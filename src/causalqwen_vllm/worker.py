"""What vLLM's workers can be asked for beyond tokens: the numbers of a request, and how likely its tokens were."""

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import torch
from torch import Tensor

from causalqwen.modeling.alternatives import alternatives, likelihoods
from causalqwen.modeling.prediction import describe_all, prediction_to_dict
from causalqwen_vllm.requests import offered


class NumberWorker:
    """vLLM's `worker_extension_cls`; `LLM.collective_rpc("take_numbers", args=(keys,))` calls it. Of a pipeline the last rank
    answers."""

    @property
    def _served(self) -> Any:
        return self.model_runner.get_model()  # type: ignore[attr-defined]

    def take_numbers(self, keys: list[str]) -> list[dict[str, dict[str, Any]]]:
        """Per request, by the place of each number that was generated: its `value`, and of its distribution (`numbers_of`)
        `loc` and `scale` on the value axis, `median`, `intervals`, `num_prob` and `announced`. Given once.

        ValueError for a key that no request came with, or whose numbers were taken before.
        """
        model, known = self._served, self._served.table.by_key
        if missing := [key for key in keys if key not in known]:
            raise ValueError(
                f"no numbers are kept under the key {missing[0]!r}: no request came with it, or they were taken before; give "
                "each request a key of its own, and take its numbers once"
            )
        numbers = model.numbers_of([(known[key], 0) for key in keys])
        self.forget_numbers(keys)
        described = iter(describe_all([law for of_one in numbers for _, law in of_one.values()]))
        return [
            {
                str(place): {"value": value, "loc": law.loc, "scale": law.scale} | next(described)
                for place, (value, law) in of_one.items()
            }
            for of_one in numbers
        ]

    def see_numbers(self, asked: Sequence[tuple[str, int, int | None]]) -> list[dict[str, dict[str, Any]]]:
        """As `take_numbers`, of requests that may go on: those of a key from a place on, as a server tells them, with so many
        points of their curves. They stay; where a key is unknown there are none."""
        model, known = self._served, self._served.table.by_key
        numbers = iter(model.numbers_of([(known[key], since) for key, since, _ in asked if key in known]))
        return [
            {
                str(place): {"value": value} | prediction_to_dict(law, points=points, beside=value)
                for place, (value, law) in (next(numbers) if key in known else {}).items()
            }
            for key, _, points in asked
        ]

    def see_likelihoods(self, asked: Sequence[tuple[str, int, list[int], int]]) -> list[list[list[tuple]]]:
        """For each key the tokens from a place on, and so many of the likeliest: the fields of a `Likelihood` each. What they
        follow from was kept (`RequestOptions.kept_from`), and what the tokens before them follow from is so no longer;
        where a key is unknown there are none."""
        model = self._served
        seen: list[list[list[tuple]]] = [[] for _ in asked]
        if not model.decides:
            return seen
        of_count: dict[int, list[int]] = {}
        for row, (key, _, _, count) in enumerate(asked):
            if key in model.table.by_key:
                of_count.setdefault(count, []).append(row)
        for count, rows in of_count.items():
            chosen, width = [asked[row] for row in rows], model.config.hidden_size
            features = torch.cat([self._kept(key, place, len(tokens), width) for key, place, tokens, _ in chosen])
            tokens = torch.tensor([token for row in rows for token in asked[row][2]], device=features.device)
            found = iter(likelihoods(model, features, tokens, count))
            for row in rows:
                seen[row] = [[astuple(word) for word in next(found)] for _ in asked[row][2]]
        return seen

    def see_alternatives(
        self, asked: Sequence[tuple[str, int, int, tuple[list[int], list[float]], int]]
    ) -> list[dict[str, Any]]:
        """The fields of a `Place` for each key's place, where a token stands after a text, with so many alternatives."""
        model = self._served
        seen: list[dict[str, Any]] = []
        for key, place, token, before, count in asked if model.decides else ():
            request, found = model.table.by_key.get(key), None
            if request is not None:
                model.number_class = request.options.number_class
                features, numbers = self._kept(key, place, 1), offered([(request, place)])
                (found,) = alternatives(model, features, [token], [before], count, numbers)
            seen.append({} if found is None else asdict(found))
        return seen

    def _kept(self, key: str, place: int, count: int, width: int | None = None) -> Tensor:
        """The features [count, width], or as wide as they are, that the tokens from a place on follow from. ValueError for one
        that is not kept."""
        kept = self._served.table.by_key[key].kept
        if missing := [at for at in range(place, place + count) if at not in kept]:
            raise ValueError(
                f"what the token at {missing[0]} of {key!r} follows from is not kept: places from kept_from on are, until they "
                "are given, but for those that the prefix cache knows; ask in order and once, with kept_from at the first "
                "place, and with skip_reading_prefix_cache=True where that is in the prompt"
            )
        for at in [at for at in kept if at < place]:
            del kept[at]
        return torch.stack([kept[at][:width] for at in range(place, place + count)]).to(self.device)  # type: ignore[attr-defined]

    def tell_laws(
        self, asked: Sequence[tuple[str, float | None]], levels: Sequence[float], points: int | None
    ) -> list[dict[str, Any]]:
        """The distribution of the number after each key's prompt, of which one token was made, as a server sends it; given
        once. With the true value, where one is known."""
        model = self._served
        if not model.decides:
            return []
        requests = [model.table.by_key[key] for key, _ in asked]
        laws = model.laws_of([(request, *request.pending) for request in requests])
        self.forget_numbers([key for key, _ in asked])
        return [prediction_to_dict(law, value, levels, points) for law, (_, value) in zip(laws, asked, strict=True)]

    def forget_numbers(self, keys: list[str]) -> None:
        """Nobody will ask for these any more."""
        for key in keys:
            self._served.table.forget(key)
