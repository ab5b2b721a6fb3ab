"""What a request asks for: `SamplingParams.extra_args["causalqwen"]`, read and checked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from causalqwen.checking import nearest
from causalqwen.decoding import BoundDecoding, CausalDecoding, Individual
from causalqwen.modeling.context import CONTEXTS

KEY = "causalqwen"
FOLLOWER = "causalqwen_vllm.table:RowFollower"
"""The logits processor by which vLLM tells the plug-in of its requests."""
ONE_ENGINE = "context and data parallelism: run one engine per group of devices"
TOKENS_ALONE = (
    "the prefix cache knows tokens, but neither the values of numbers that stand in this model's context, nor what numbers that"
    f" may be copied followed from: set enable_prefix_caching=False, or train with {CONTEXTS['digits']} and copy_numbers=False"
)
"""Why the prefix cache is refused."""

_KNOWN = {
    "preset", "individual_mode", "noise_mode", "own_mode", "seed", "temperature", "top_p",
    "individual", "values", "places", "key", "number_class", "kept_from", "laws",
}  # fmt: skip


@dataclass(frozen=True)
class RequestOptions:
    """One request's own.

    plan: without its seed. values: of the prompt's numbers, left to right; where vLLM gets no `<NUM>`, their count matters to
    the draws of `softmax`. places: of their first digits, where vLLM gets no `<NUM>`; of a model that copies. key: under which
    its numbers are kept for whoever asks for them; "" for none. top_p: of the preset `softmax`, whose draws are those of
    `causalqwen serve`. number_class: of its numbers, as a model's own `number_class`. kept_from: the first place of which what
    it follows from is kept under the key; None for none. laws: whether somebody asks for the distribution of a number where
    none is decided, which a model that reads the whole backbone has to read at once.
    """

    plan: CausalDecoding
    seed: int
    values: tuple[float, ...] = ()
    top_p: float = 1.0
    key: str = ""
    number_class: str | None = None
    kept_from: int | None = None
    places: tuple[int, ...] = ()
    laws: bool = False

    @classmethod
    def read(cls, given: Any) -> "RequestOptions":
        """From `extra_args["causalqwen"]`; a setting that is None asks for nothing. ValueError names what is wrong."""
        if not isinstance(given, Mapping):
            raise ValueError(
                f"a grafted model needs extra_args={{'{KEY}': {{...}}}} with preset, seed and the values of the prompt's "
                "numbers; `causalqwen_vllm.request` makes them"
            )
        given = {name: value for name, value in given.items() if value is not None}
        if unknown := sorted(set(given) - _KNOWN):
            raise ValueError(f"unknown setting {unknown[0]}; {nearest(unknown[0], sorted(_KNOWN))}")
        named, individual = _named(given), given.get("individual")
        plan = replace(named, temperature=given.get("temperature", 1.0))
        if individual is not None:
            if plan.individual_mode != "sequence":
                asked = given.get("preset", f"{plan.individual_mode} x {plan.noise}")
                raise ValueError(f"the preset {asked!r} takes no individual; shared-individual and persona do")
            plan = replace(plan, individual=_individual(individual))
        top_p = float(given.get("top_p", 1.0))
        if plan.own != "marginal" and top_p != 1:
            plan, top_p = replace(plan, top_p=top_p), 1.0
        if not 0 <= top_p <= 1 or (top_p < 1 and plan.decision != "softmax"):
            raise ValueError(f"top_p belongs to sample, persona and softmax and lies in [0, 1], got {top_p}")
        key, kept = given.get("key", ""), given.get("kept_from")
        if not isinstance(key, str):
            raise ValueError(f"the key is a string, got {key!r}")
        if kept is not None and (type(kept) is not int or kept < 1 or not key):
            raise ValueError(f"kept_from is a place, an integer of 1 or more, and needs a key; got {kept!r}")
        seed, values = int(given.get("seed", 0)), tuple(map(float, given.get("values", ())))
        places, laws = tuple(given.get("places", ())), bool(given.get("laws"))
        return cls(plan, seed, values, top_p, key, given.get("number_class"), kept, places, laws)

    @property
    def individual(self) -> Individual | None:
        """Who was named, if anybody."""
        return self.plan.individual if isinstance(self.plan.individual, Individual) else None

    def bind(self, causal_size: int, device: str | torch.device = "cpu") -> BoundDecoding | None:
        """The plan's draws for one row; None under `softmax`. ValueError for an individual of another size."""
        if self.plan.decision == "softmax":
            return None
        return BoundDecoding.bind(replace(self.plan, seed=self.seed), 1, causal_size, torch.device(device))


def _named(given: Mapping[str, Any]) -> CausalDecoding:
    """The plan of a preset, or of a mode for each source."""
    modes = {name: given[f"{name}_mode"] for name in ("individual", "noise", "own") if f"{name}_mode" in given}
    if not modes:
        return CausalDecoding.preset(given.get("preset", "standard"))
    if "preset" in given or not {"individual", "noise"} <= set(modes):
        raise ValueError("give a preset, or individual_mode and noise_mode together")
    return CausalDecoding(**modes)


def check_silent(individual: Individual) -> None:
    """ValueError for somebody with a voice."""
    if individual.voice is not None:
        raise ValueError(
            f"{individual} has a voice at every depth, and vLLM's layers are compiled: serve them by `causalqwen serve`"
        )


def _individual(given: Any) -> Individual:
    """A file's, or the one at the coordinates e1 that are given."""
    if isinstance(given, str):
        try:
            individual = Individual.load(given)
        except OSError as error:
            raise ValueError(f"no individual can be read from {given}: {error}") from None
        check_silent(individual)
        return individual
    return Individual(torch.tensor(given, dtype=torch.float64))


def check_params(params: Any) -> None:
    """ValueError for SamplingParams without `RequestOptions`, that decide without the plan, or cannot be served."""
    RequestOptions.read((params.extra_args or {}).get(KEY))
    if params.temperature != 0:
        raise ValueError(
            f"temperature={params.temperature} is vLLM's sampler's: leave SamplingParams.temperature at 0 and set "
            f"extra_args['{KEY}']['temperature']"
        )
    if params.detokenize:
        raise ValueError(
            "vLLM's own detokenizer cannot write numbers: set detokenize=False and take texts from `causalqwen_vllm.generate`"
        )
    neutral = {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "min_tokens": 0,
    }  # fmt: skip
    unset = (
        "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "stop",
    )  # fmt: skip
    wrong = [name for name, value in neutral.items() if getattr(params, name) != value]
    wrong += [name for name in unset if getattr(params, name) not in (None, [], {})]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: not available for a grafted model, whose plan alone decides; leave it unset"
        )
