"""How a text is decided: which source of randomness is integrated out, drawn per token, or held (theory 3.9).

With c = scale_U Q(e1), n = |b_noise| Q(e2), Q the family's quantile function and T the temperature:

    loc   = loc_U + [individual != marginal] T c + [noise in {token, sequence}] T n
    S_k   = W_k loc + b_k + own_k Q(e3_k)      where own noise is drawn, and argmax_k S_k decides; else argmax_k P_k does

own_k is what the sources that are drawn leave of a token's scale. e1, e2, e3 are uniform and come from counters: see `draws`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

from torch import Tensor

from causalqwen.checking import nearest
from causalqwen.decoding.individual import Individual
from causalqwen.distributions import check_seed


@dataclass(frozen=True)
class ObservedNumber:
    """A number of an observed text: its value in the data's units, how it was written, with the space that it absorbed, and in
    which tokens, where digits stand in the context."""

    value: float
    text: str
    tokens: list[int]


@dataclass(frozen=True, eq=False)
class ObservedNoise:
    """Own noise under which n tokens after a prompt are the ones that are decided, kept to be met again in another world
    (theory 3.13).

    It is the noise that `seed` draws, but for a few tokens of each position: the one that was observed, and those that would
    have beaten it.

    Args:
        temperature: that it was found at: no other decides the same.
        places, tokens, normals: [m], positions (0 is that of the first token after the prompt), tokens and Q(e3) of the
        exceptions. length: n.
        values: float64 [n], those of `<NUM>` on the value axis (0 elsewhere).
        value_normals: float64 [n], how many scales each lies beside loc_Y, which is where it lies in another world, too.
        value_slack: float64 [n], how far from a value loc_Y may then be and still be that value: what float32 makes of the same
            features in batches of other shapes.
        numbers: those that were observed, by the index of their `<NUM>`.
    """

    seed: int
    temperature: float
    places: Tensor
    tokens: Tensor
    normals: Tensor
    length: int
    values: Tensor
    value_normals: Tensor
    value_slack: Tensor
    numbers: dict[int, ObservedNumber] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.length


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
    "persona": {"individual": "sequence", "noise": "token", "own": "token"},  # the same individual meets fresh noise
    "sample": {
        "individual": "token",
        "noise": "token",
        "own": "token",
    },  # the softmax's distribution, drawn from the law
    "softmax": {"decision": "softmax"},  # overview 3.3
}


@dataclass(frozen=True)
class CausalDecoding:
    """A choice for each source of randomness; give it to `generate(causal_decoding=...)`.

    Args:
        individual: "marginal" (integrated out), "token" (a new one per token), "sequence" (one for the whole text), or an
            `Individual` (or one per row), which is then held for the whole text.
        noise: the noise that all tokens share: "marginal", "token", "sequence", or "off" (no noise at all).
        own: the noise of each token's own score: "marginal", so that argmax_k P_k decides; "token" (drawn anew), so that the
            highest score does; or an `ObservedNoise` (or one per row) after the prompt, and fresh noise after its end. The
            original design's score scale has no own noise.
        temperature: T >= 0, by which scores are divided: it multiplies all noise of the scores. 1 is the distribution of the
            model; 0 decides as the backbone does. Values vary no more than at 1.
        top_k, top_p, min_p: leave out tokens before the race, where own noise is drawn: those that transformers' samplers
            leave out of the backbone's logits, whatever is drawn beside (theory 3.9).
        decision: "ovr", the rule above; "loc" argmax_k loc_S (overview 3.2), or "softmax": loc_S are logits and every
            sampler of transformers applies (overview 3.3), with nothing drawn for individual or noise.
        seed: one int, or one per row. Returned sequence j of a row uses seed + j. None takes one from torch's
            generator.
    """

    individual: str | Individual | Sequence[Individual] = "marginal"
    noise: str = "marginal"
    own: str | ObservedNoise | Sequence[ObservedNoise] = "marginal"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    decision: Literal["ovr", "loc", "softmax"] = "ovr"
    seed: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check_source("individual", self.individual, INDIVIDUAL_MODES, Individual)
        if self.noise not in NOISE_MODES:
            raise ValueError(f"unknown noise mode {self.noise!r}; use one of {', '.join(NOISE_MODES)}")
        _check_source("own", self.own, OWN_MODES, ObservedNoise)
        if self.noises and ((self.individual_mode != "marginal" and not self.individuals) or self.noise != "marginal"):
            raise ValueError(
                "an observed noise explains what one individual said, or the population average, with the shared noise "
                "integrated out: give the individual too, or leave it 'marginal', and leave noise 'marginal'"
            )
        if self.decision not in DECISIONS:
            raise ValueError(f"unknown decision {self.decision!r}; use one of {', '.join(DECISIONS)}")
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"the temperature must be a finite number from 0 on, got {self.temperature!r}")
        for noise in self.noises:
            if noise.temperature != self.temperature:
                raise ValueError(
                    f"the observed noise explains a text at temperature {noise.temperature}, and another one at "
                    f"{self.temperature}: give temperature={noise.temperature}"
                )
        if self.top_k is not None and not (_is_number(self.top_k, int) and self.top_k >= 1):
            raise ValueError(f"top_k must be a whole number from 1 on, got {self.top_k!r}")
        for name in ("top_p", "min_p"):
            share = getattr(self, name)
            if share is not None and not (_is_number(share) and 0 <= share <= 1):
                raise ValueError(f"{name} must lie in [0, 1], got {share!r}")
        if self.seed is not None:
            seed = [check_seed(row) for row in self.seed] if isinstance(self.seed, Iterable) else check_seed(self.seed)
            object.__setattr__(self, "seed", seed)
        if self.decision == "softmax" and (self.individual != "marginal" or self.noise != "marginal"):
            raise ValueError("decision='softmax' draws neither individuals nor noise: leave both 'marginal'")
        if self.own != "marginal" and self.decision != "ovr":
            raise ValueError("own noise that is drawn decides by itself: leave `decision` at 'ovr'")
        if self.own == "marginal" and self.restricts:
            raise ValueError(
                "top_k, top_p and min_p leave out tokens before a race, and this plan runs none: use own='token' (sample, "
                "persona), or transformers' samplers with the preset 'softmax'"
            )

    @classmethod
    def preset(cls, name: str, **overrides: object) -> "CausalDecoding":
        """One of the named points of the grid (`PRESETS`), with any field overridden: `preset("causal", seed=7)`."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}")
        if unknown := [field for field in overrides if field not in cls.__dataclass_fields__]:
            raise ValueError(f"unknown field {unknown[0]} of a plan; {nearest(unknown[0], cls.__dataclass_fields__)}")
        return replace(cls(**PRESETS[name]), **overrides)  # type: ignore[arg-type]

    @property
    def draws(self) -> bool:
        """Whether any source is drawn."""
        return self.individual_mode != "marginal" or self.noise in ("token", "sequence") or self.own != "marginal"

    @property
    def restricts(self) -> bool:
        """Whether some tokens are left out before the race."""
        return (self.top_k, self.top_p, self.min_p) != (None, None, None)

    @property
    def individuals(self) -> Sequence[Individual]:
        """The individuals that are given."""
        return _given(self.individual, Individual)

    @property
    def noises(self) -> Sequence[ObservedNoise]:
        """The observed noises that are given."""
        return _given(self.own, ObservedNoise)

    @property
    def individual_mode(self) -> str:
        """The mode as a word; a given individual is held for the sequence."""
        return self.individual if isinstance(self.individual, str) else "sequence"


def _is_number(given: Any, kind: type = Real) -> bool:
    return isinstance(given, kind) and not isinstance(given, bool)


def _given(source: Any, kind: type) -> Sequence[Any]:
    """What a source of randomness is given as, () for a mode."""
    if isinstance(source, str):
        return ()
    return (source,) if isinstance(source, kind) else source


def _check_source(name: str, given: Any, modes: tuple[str, ...], kind: type) -> None:
    """ValueError for what says nothing about a source of randomness."""
    if isinstance(given, str) and given not in modes:
        raise ValueError(f"unknown {name} mode {given!r}; use one of {', '.join(modes)}")
    each = _given(given, kind)
    if not isinstance(given, str) and not (
        isinstance(each, Sequence) and each and all(isinstance(x, kind) for x in each)
    ):
        raise ValueError(f"{name}: expected a mode, one {kind.__name__}, or a list of them, got {given!r}")
