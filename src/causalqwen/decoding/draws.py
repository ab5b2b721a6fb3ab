"""A decoding plan bound to the rows of a batch: the draws of each row, and what they leave of loc and scale."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causalqwen.decoding.hindsight import Hindsight
from causalqwen.decoding.plan import CausalDecoding
from causalqwen.distributions import INDIVIDUAL_STREAM, NOISE_STREAM, WHOLE_TEXT, StableFamily, uniform_draws, upcast

_AHEAD = 32  # positions drawn at once where a text is written token by token


class QuantileReader(NamedTuple):
    """How a head reads uniforms e [..., C]: Q(e) = unit * quantile(1/2 + mass (e - 1/2)); unit a number or [C] (theory 3.9)."""

    law: StableFamily
    mass: float = 1.0
    unit: float | Tensor = 1.0

    def __call__(self, uniform: Tensor) -> Tensor:
        return self.unit * self.law.quantile(0.5 + self.mass * (uniform - 0.5))

    def of_normal(self, g: Tensor) -> Tensor:
        """Q(Phi(g)), g = Phi^-1(e); beyond 7.9 float64 cannot tell e from the ends of the unit interval."""
        if self.law.alpha == 2 and self.mass == 1:
            return self.unit * g
        return self(torch.special.ndtr(g).clamp(1e-15, 1 - 1e-15))


@dataclass
class BoundDecoding:
    """`CausalDecoding` for a batch of B rows. Made by `bind`; `at` says what it draws at every step."""

    plan: CausalDecoding
    seeds: Tensor  # int64 [B]
    causal_size: int
    individuals: Tensor | None = None  # e1 of given individuals, float64 [B, C]
    voice: Tensor | None = None  # theirs [B, L, H], 0 for one who has none; None where nobody has one
    hindsight: list[Hindsight] | None = None  # given noise, one per row
    origins: Tensor | None = None  # int64 [B]: the position that the first token of a given noise is decided at
    every_score: bool = False  # scores of tokens that cannot win are wanted too: a processor may take the best away
    _held: dict[int, Tensor] = field(default_factory=dict)
    _ahead: dict[int, tuple[list[int], Tensor]] = field(default_factory=dict)

    @classmethod
    def bind(
        cls,
        plan: CausalDecoding,
        rows: int,
        causal_size: int,
        device: torch.device,
        copies: int = 1,
        every_score: bool = False,
    ) -> "BoundDecoding":
        """Give every row its seed and its individual.

        `rows` counts returned sequences; each prompt has `copies` of them in a row, and copy j adds j to the seed.

        Raises:
            ValueError: as many seeds or individuals as neither one nor one per prompt; an individual of another size.
        """
        prompts = rows // copies
        if plan.seed is None:
            seeds = torch.randint(2**62, (1,)).expand(prompts)
        else:
            seeds = torch.as_tensor(plan.seed, dtype=torch.int64).reshape(-1)
            if len(seeds) not in (1, prompts):
                raise ValueError(f"{len(seeds)} seeds for {prompts} prompts; give one, or one per prompt")
            seeds = seeds.expand(prompts)
        seeds = (seeds.unsqueeze(1) + torch.arange(copies)).flatten().to(device)
        individuals = voice = None
        if given := plan.individuals:
            if len(given) not in (1, prompts):
                raise ValueError(f"{len(given)} individuals for {prompts} prompts; give one, or one per prompt")
            for individual in given:
                individual.check_size(causal_size)
            factors = torch.stack([individual.factor for individual in given]).to(device)
            individuals = factors.expand(prompts, -1).repeat_interleave(copies, dim=0)
            if (spoken := next((one.voice for one in given if one.voice is not None), None)) is not None:
                voices = [torch.zeros_like(spoken) if one.voice is None else one.voice for one in given]
                if any(one.shape != spoken.shape for one in voices):
                    raise ValueError("the individuals have voices of different backbones")
                of_prompts = torch.stack(voices).to(device).expand(prompts, *spoken.shape)
                voice = of_prompts.repeat_interleave(copies, dim=0)
        hindsight = None
        if not isinstance(plan.noise, str):
            noises = [plan.noise] if isinstance(plan.noise, Hindsight) else list(plan.noise)
            if len(noises) not in (1, prompts):
                raise ValueError(f"{len(noises)} noises for {prompts} prompts; give one, or one per prompt")
            hindsight = [noises[row // copies if len(noises) > 1 else 0] for row in range(rows)]
            if any(noise.draws.shape[1] != causal_size for noise in noises):
                raise ValueError(f"a given noise does not fit a model whose causal size is {causal_size}")
        return cls(plan, seeds, causal_size, individuals, voice, hindsight, every_score=every_score)

    def at(self, positions: Tensor) -> "Drawn":
        """What is drawn at positions int64 [B, S]: the index of each token among the real tokens of its row."""
        return Drawn(self, positions)

    def read(self, stream: int, mode: str, positions: Tensor, reader: QuantileReader) -> Tensor:
        """Q(e) of one source, float32, [B, S, C] (or [B, 1, C] where it is held for the text)."""
        if mode == "sequence":
            return reader(self.held(stream)).unsqueeze(1).to(torch.float32)
        if positions.shape[1] == 1:
            return reader(self._next(stream, positions)).to(torch.float32)
        return reader(self._draw(stream, positions)).to(torch.float32)

    def _draw(self, stream: int, positions: Tensor) -> Tensor:
        """Uniforms of positions [B, S], float64 [B, S, C]."""
        seeds = self.seeds.unsqueeze(1).expand_as(positions)
        uniform = uniform_draws(seeds.flatten(), stream, positions.flatten(), self.causal_size)
        uniform = uniform.view(*positions.shape, self.causal_size)
        if stream == NOISE_STREAM:
            for row, column, index, given in self.given(positions):
                uniform[row, column] = given.draws[index].to(uniform.device)
        return uniform

    def given(self, positions: Tensor) -> Iterator[tuple[int, int, int, Hindsight]]:
        """(row, column, index in its noise, noise) of the positions [B, S] that a given noise reaches."""
        if self.hindsight is None:
            return
        if self.origins is None:
            raise ValueError("a given noise belongs to the text behind a prompt: it is for `generate`")
        offsets = (positions - self.origins.unsqueeze(1)).tolist()
        for row, noise in enumerate(self.hindsight):
            for column, index in enumerate(offsets[row]):
                if 0 <= index < len(noise):
                    yield row, column, index, noise

    @torch.compiler.disable  # looks at positions, and fills a store
    def _next(self, stream: int, positions: Tensor) -> Tensor:
        """Uniforms of one position per row, [B, 1, C]. From the second call on, those of 31 more are made too."""
        return self._next_at(stream, positions, positions[:, 0].tolist())

    def _next_at(self, stream: int, positions: Tensor, places: list[int]) -> Tensor:
        """The same; places: the positions as numbers, read once for all rows, because a GPU is waited for."""
        count = 1  # who asks once may want no more
        if stream in self._ahead:
            first, draws = self._ahead[stream]
            index, count = places[0] - first[0], _AHEAD
            if 0 <= index < draws.shape[1] and all(
                here - there == index for here, there in zip(places, first, strict=True)
            ):
                return draws[:, index : index + 1]
        self._ahead[stream] = (places, self._draw(stream, positions + torch.arange(count, device=positions.device)))
        return self._ahead[stream][1][:, :1]

    def held(self, stream: int) -> Tensor:
        """The uniforms that a source holds for the whole text, float64 [B, C]; drawn once."""
        if stream == INDIVIDUAL_STREAM and self.individuals is not None:
            return self.individuals
        if stream not in self._held:
            self._held[stream] = uniform_draws(self.seeds, stream, WHOLE_TEXT, self.causal_size)
        return self._held[stream]


class Integrated:
    """Nothing is drawn: individual and noise are integrated out, and loc_S are what anybody decides by."""

    moves = every_score = races = False
    by_loc = True
    central_mass: float | None = None

    def move(
        self, loc: Tensor, scale: Tensor, noise: Tensor, reader: QuantileReader, gain: Any = 1.0, most: float = math.inf
    ) -> Tensor:
        """loc_U as it is."""
        return loc

    def drawn(self, scale: Tensor, noise: Tensor, law: StableFamily) -> Tensor | None:
        """Nothing."""
        return None

    def left(self, scale: Tensor, noise: Tensor, law: StableFamily, whole: bool = True) -> Tensor:
        """scale_U + |b_noise| [..., C], the family's sum."""
        return law.add(scale, noise)

    def explain(self, scores: Tensor) -> Tensor:
        """Scores [..., V'] as they are."""
        return scores

    def explain_value(self, loc_Y: Tensor) -> Tensor:
        """loc_Y [...] as it is."""
        return loc_Y

    def said_again(self, values: Tensor, loc_Y: Tensor) -> Tensor:
        """Values as they are."""
        return values


@dataclass(frozen=True)
class Drawn:
    """What a bound plan draws at some positions, int64 [B, S], and what it leaves of loc and scale [B, S, C] (theory 3.9).

    moves: whether anything is drawn. by_loc: loc_S decide, not P_k. every_score: see `BoundDecoding`.
    """

    bound: BoundDecoding
    positions: Tensor

    @property
    def moves(self) -> bool:
        return self.bound.plan.individual_mode != "marginal" or self.bound.plan.noise_mode not in ("marginal", "off")

    @property
    def by_loc(self) -> bool:
        return self.bound.plan.decision != "ovr" or self.bound.hindsight is not None

    @property
    def races(self) -> bool:
        """Whether each token's own noise is drawn, so that the highest score decides."""
        return self.bound.plan.own == "token"

    @property
    def temperature(self) -> float:
        """T, of a race."""
        return self.bound.plan.temperature

    @property
    def counters(self) -> tuple[Tensor, Tensor]:
        """Seeds and positions [B * S] that own noise is drawn by."""
        return self.bound.seeds.unsqueeze(1).expand_as(self.positions).flatten(), self.positions.flatten()

    @property
    def every_score(self) -> bool:
        return self.bound.every_score

    @property
    def central_mass(self) -> float | None:
        return self.bound.plan.central_mass

    def move(
        self, loc: Tensor, scale: Tensor, noise: Tensor, reader: QuantileReader, gain: Any = 1.0, most: float = math.inf
    ) -> Tensor:
        """loc_U + T c + T' n [B, S, C], from loc and scale of U and noise |b_noise| [C]. gain, a
        number or [B, S, 1]: of what is drawn. most: the highest temperature that counts."""
        plan = self.bound.plan
        if plan.individual_mode != "marginal":
            drawn = self.bound.read(INDIVIDUAL_STREAM, plan.individual_mode, self.positions, reader)
            loc = loc + min(plan.temperature, most) * gain * scale * drawn
        if plan.noise_mode not in ("marginal", "off"):
            drawn = self.bound.read(NOISE_STREAM, plan.noise_mode, self.positions, reader)
            loc = loc + min(plan.temperature_of_noise, most) * gain * noise * drawn
        return loc

    def drawn(self, scale: Tensor, noise: Tensor, law: StableFamily) -> Tensor | None:
        """The scale [B, S, C] of what `move` adds, with no temperature above 1; None where that is nothing, or where noise is
        off, so that nothing is left beside what is drawn."""
        plan, parts = self.bound.plan, []
        most = math.inf if self.races else 1.0
        if plan.individual_mode != "marginal" and plan.temperature:
            parts.append(min(plan.temperature, most) * scale)
        if plan.noise_mode != "marginal" and plan.temperature_of_noise:
            parts.append(min(plan.temperature_of_noise, most) * noise.expand_as(scale))
        return law.add(*parts) if parts and plan.noise_mode != "off" else None

    def left(self, scale: Tensor, noise: Tensor, law: StableFamily, whole: bool = True) -> Tensor:
        """The scale of what is still integrated out [B, S, C]; 0 where nothing is. whole: of a source that is drawn at T below
        1, (1 - T^a)^(1/a) of its scale, so that what is drawn and what is left are the law; else none."""
        plan, left = self.bound.plan, []
        sources = (
            (scale, plan.individual_mode, plan.temperature),
            (noise.expand_as(scale), plan.noise_mode, plan.temperature_of_noise),
        )
        for source, mode, temperature in sources:
            if mode == "marginal":
                left.append(source)
            elif mode != "off" and whole and temperature < 1:
                left.append(source * (1 - temperature**law.alpha) ** (1 / law.alpha))
        return law.add(*left) if left else torch.zeros_like(scale)

    def explain(self, scores: Tensor) -> Tensor:
        """Scores [B, S, V'] with the residuals of a given noise added to the tokens that it explains."""
        if self.bound.hindsight is None:
            return scores
        scores = upcast(scores)
        for row, column, index, given in self.bound.given(self.positions):
            scores[row, column, given.tokens[index]] += given.residuals[index]
        return scores

    def explain_value(self, loc_Y: Tensor) -> Tensor:
        """loc_Y [B, S] with the residuals of a given noise; the observed value itself where features of float32 tell no
        difference from it."""
        if self.bound.hindsight is None:
            return loc_Y
        loc_Y = loc_Y.double()
        for row, column, index, given in self.bound.given(self.positions):
            said, value = given.values[index], loc_Y[row, column] + given.value_residuals[index]
            loc_Y[row, column] = said if (value - said).abs() <= given.value_slack[index] else value
        return loc_Y

    def said_again(self, values: Tensor, loc_Y: Tensor) -> Tensor:
        """Values [B] of one position per row, where loc_Y [B, 1] is that of an observed number the number that was said: to its
        last digit, however many digits others are written with."""
        values = values.clone()
        for row, column, index, given in self.bound.given(self.positions):
            if index in given.numbers and loc_Y[row, column] == given.values[index]:
                values[row] = given.numbers[index].value
        return values


Draws = Integrated | Drawn
"""What a chain asks how U' comes about."""
