"""How a text is decided: which source of randomness is integrated out, drawn per token, or held (theory 3.9).

With c = scale_U Q(e1), n = |b_noise| Q(e2), Q the family's quantile function, T the temperature, and T' that of the noise
(T itself unless it is given):

    loc   = loc_U + [individual != marginal] T c + [noise in {token, sequence}] T' n
    scale = [individual = marginal] scale_U + [noise = marginal] |b_noise| + what T and T' below 1 leave

`+` between scales is the family's own sum; T < 1 leaves (1 - T^a)^(1/a) of what is drawn, but for the documents' scale. e1, e2
are uniform and come from (seed, source, position): see `draws`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

from causalqwen.checking import nearest
from causalqwen.decoding.hindsight import Hindsight
from causalqwen.decoding.individual import Individual
from causalqwen.distributions import check_seed

INDIVIDUAL_MODES = ("marginal", "token", "sequence")
NOISE_MODES = ("marginal", "token", "sequence", "off")
OWN_MODES = ("marginal", "token")
DECISIONS = ("ovr", "loc", "softmax")

PRESETS: dict[str, dict[str, str]] = {
    "standard": {"individual": "marginal", "noise": "marginal"},  # overview 3.1, inference 3 (non-sampling)
    "causal": {"individual": "token", "noise": "marginal"},  # overview 3.2, inference 2
    "noise": {"individual": "marginal", "noise": "token"},  # inference 3 (sampling)
    "shared-individual": {"individual": "sequence", "noise": "marginal"},  # overview 3.4.1
    "shared-noise": {"individual": "marginal", "noise": "sequence"},  # overview 3.4.2
    "individual-only": {"individual": "token", "noise": "off"},  # foundations 2.6.2
    "persona": {"individual": "sequence", "noise": "token"},  # the same individual meets fresh noise
    "sample": {"individual": "token", "noise": "token", "own": "token"},  # the softmax's distribution, drawn from the law
    "softmax": {"decision": "softmax"},  # overview 3.3
}


HELD = 0.3
"""Of the temperature of what is drawn anew at every token: somebody who is heard, and fluent (experiments 4)."""


def held_at(temperature: float) -> float:
    """The temperature of what is held for a text, beside that of what is drawn anew at every token; not below 1."""
    return max(1.0, HELD * temperature)


@dataclass(frozen=True)
class CausalDecoding:
    """A choice for each source of randomness; give it to `generate(causal_decoding=...)`.

    Args:
        individual: "marginal" (integrated out), "token" (a new individual per token), "sequence" (one for the whole
            text), or an `Individual` (or one per row), which is then held for the whole text.
        noise: "marginal", "token", "sequence", "off" (no noise at all), or a `Hindsight` (or one per row): the noise under
            which an observed text came about, token by token behind the prompt, and fresh noise after its end.
        own: the noise of each token's own score: "marginal", so that argmax_k P_k decides, or "token" (drawn anew), so that the
            highest score does, argmax_k S_k. The original design's score scale has no own noise: nothing changes there.
        temperature: T >= 0, multiplies what is drawn. At 1 draws follow the law. Below 1 less is drawn, and more is left to
            each token's own noise. Above 1 words vary more than the law says; values vary as it says (theory 3.9).
        noise_temperature: T' >= 0, multiplies what is drawn of the noise instead.
        central_mass: p in (0, 1]: e1 and e2 are uniform on the central p of the unit interval, and Q is the family's
            plain quantile function (p = 1 is the specification). None: as calibrated for the model, see
            `CausalQwenConfig.central_mass`; the values' own quantile function stays plain then.
        decision: "ovr" argmax_k P_k, "loc" argmax_k loc_S (overview 3.2), or "softmax": loc_S are logits and every
            sampler of transformers applies (overview 3.3), with nothing drawn for individual or noise.
        seed: one int, or one per row. Returned sequence j of a row uses seed + j. None takes one from torch's
            generator.
    """

    individual: str | Individual | Sequence[Individual] = "marginal"
    noise: str | Hindsight | Sequence[Hindsight] = "marginal"
    own: str = "marginal"
    temperature: float = 1.0
    noise_temperature: float | None = None
    central_mass: float | None = None
    decision: Literal["ovr", "loc", "softmax"] = "ovr"
    seed: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check_source("individual", self.individual, INDIVIDUAL_MODES, Individual)
        _check_source("noise", self.noise, NOISE_MODES, Hindsight)
        if self.own not in OWN_MODES:
            raise ValueError(f"unknown own mode {self.own!r}; use one of {', '.join(OWN_MODES)}")
        if not isinstance(self.noise, str) and self.individual_mode == "marginal":
            raise ValueError(
                "a given noise explains what one individual said: give that too (`Individual.nobody`, say)"
            )
        if self.decision not in DECISIONS:
            raise ValueError(f"unknown decision {self.decision!r}; use one of {', '.join(DECISIONS)}")
        for temperature in (self.temperature, self.temperature_of_noise):
            if not _is_number(temperature) or not 0 <= temperature < math.inf:
                raise ValueError(f"the temperature must be a finite number from 0 on, got {temperature!r}")
        if self.central_mass is not None and not (_is_number(self.central_mass) and 0 < self.central_mass <= 1):
            raise ValueError(f"the central mass must lie in (0, 1], got {self.central_mass}")
        if self.seed is not None:
            seed = [check_seed(one) for one in self.seed] if isinstance(self.seed, Iterable) else check_seed(self.seed)
            object.__setattr__(self, "seed", seed)
        if self.decision == "softmax" and (self.individual != "marginal" or self.noise != "marginal"):
            raise ValueError("decision='softmax' draws neither individuals nor noise: leave both 'marginal'")
        if self.own != "marginal" and (self.decision != "ovr" or not isinstance(self.noise, str)):
            raise ValueError("own noise that is drawn decides by itself: leave `decision` at 'ovr', and give no noise")

    @classmethod
    def preset(cls, name: str, **overrides: object) -> "CausalDecoding":
        """One of the named points of the grid (`PRESETS`), with any field overridden: `preset("causal", seed=7)`."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}")
        if unknown := [field for field in overrides if field not in cls.__dataclass_fields__]:
            raise ValueError(f"unknown field {unknown[0]} of a plan; {nearest(unknown[0], cls.__dataclass_fields__)}")
        return replace(cls(**PRESETS[name]), **overrides)  # type: ignore[arg-type]

    def fresh_at(self, temperature: float) -> "CausalDecoding":
        """This plan at another temperature for what is drawn anew at every token, and at `HELD` of it, but not below 1, for
        what is held for the text. Given individuals who were inferred stay at 1, the temperature at which they were inferred.

        `model.config.text_temperature` makes texts as diverse as softmax sampling does.
        """
        of_mode = {"token": temperature, "sequence": held_at(temperature)}
        own, of_noise = (of_mode.get(mode, 1.0) for mode in (self.individual_mode, self.noise_mode))
        if not all(one.drawn for one in self.individuals):
            own = 1.0
        return replace(self, temperature=own, noise_temperature=of_noise)

    @property
    def temperature_of_noise(self) -> float:
        """T'."""
        return self.temperature if self.noise_temperature is None else self.noise_temperature

    @property
    def noise_mode(self) -> str:
        """The mode as a word; given noise is that of tokens."""
        return self.noise if isinstance(self.noise, str) else "token"

    @property
    def individuals(self) -> Sequence[Individual]:
        """Those that are given."""
        if isinstance(self.individual, str):
            return ()
        return (self.individual,) if isinstance(self.individual, Individual) else self.individual

    @property
    def individual_mode(self) -> str:
        """The mode as a word; a given individual is held for the sequence."""
        return self.individual if isinstance(self.individual, str) else "sequence"


def _is_number(given: Any) -> bool:
    return isinstance(given, Real) and not isinstance(given, bool)


def _check_source(name: str, given: Any, modes: tuple[str, ...], kind: type) -> None:
    """ValueError for what says nothing about a source of randomness."""
    if isinstance(given, str):
        if given not in modes:
            raise ValueError(f"unknown {name} mode {given!r}; use one of {', '.join(modes)}")
        return
    each = [given] if isinstance(given, kind) else given
    if not isinstance(each, Sequence) or not each or not all(isinstance(one, kind) for one in each):
        raise ValueError(f"{name}: expected a mode, one {kind.__name__}, or a list of them, got {given!r}")
