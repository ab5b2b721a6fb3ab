"""A decoding plan bound to the rows of a batch: the draws of each row, and what they leave of loc and scale."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from causalqwen.decoding.individual import voices_of
from causalqwen.decoding.plan import CausalDecoding, ObservedNoise
from causalqwen.distributions import INDIVIDUAL_STREAM, NOISE_STREAM, WHOLE_TEXT, StableFamily, uniform_draws, upcast

_AHEAD = 32  # positions drawn at once where a text is written token by token


@dataclass
class BoundDecoding:
    """`CausalDecoding` for a batch of B rows. Made by `bind`; `at` says what it draws at every step."""

    plan: CausalDecoding
    seeds: Tensor  # int64 [B]
    causal_size: int
    individuals: Tensor | None = None  # e1 of given individuals, float64 [B, C]
    voice: Tensor | None = None  # theirs [B, L, H], 0 for one who has none; None where no individual has one
    observed: list[ObservedNoise] | None = None  # given noise, one per row
    origins: Tensor | None = None  # int64 [B]: the position that the first token of an observed noise is decided at
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

        `rows` counts returned sequences; each prompt has `copies` of them in a row, and copy j adds j to the seed. ValueError
        for as many seeds or individuals as neither one nor one per prompt, or an individual of another size.
        """
        prompts = rows // copies
        if plan.seed is None:
            seeds = torch.randint(2**62, (1,)).expand(prompts)
        else:
            seeds = torch.as_tensor(plan.seed, dtype=torch.int64).reshape(-1)
            _check_count("seeds", len(seeds), prompts)
            seeds = seeds.expand(prompts)
        seeds = (seeds.unsqueeze(1) + torch.arange(copies)).flatten().to(device)
        individuals = voice = observed = None
        if given := plan.individuals:
            _check_count("individuals", len(given), prompts)
            for individual in given:
                individual.check_size(causal_size)
            factors = torch.stack([individual.factor for individual in given]).to(device)
            individuals = factors.expand(prompts, -1).repeat_interleave(copies, dim=0)
            if (voices := voices_of(given)) is not None:
                voice = voices.to(device).expand(prompts, -1, -1).repeat_interleave(copies, dim=0)
        if noises := plan.noises:
            _check_count("noises", len(noises), prompts)
            observed = [noises[row // copies if len(noises) > 1 else 0] for row in range(rows)]
        return cls(plan, seeds, causal_size, individuals, voice, observed, every_score=every_score)

    def at(self, positions: Tensor) -> "Drawn":
        """Draws at positions int64 [B, S]: the index of each token among the real tokens of its row."""
        return Drawn(self, positions)

    def read(self, stream: int, mode: str, positions: Tensor, law: StableFamily) -> Tensor:
        """Q(e) of one source, float32, [B, S, C] (or [B, 1, C] where it is held for the text)."""
        if mode == "sequence":
            return law.quantile(self.held(stream)).unsqueeze(1).to(torch.float32)
        draw = self._next if positions.shape[1] == 1 else self._draw
        return law.quantile(draw(stream, positions)).to(torch.float32)

    def _draw(self, stream: int, positions: Tensor) -> Tensor:
        """Uniforms of positions [B, S], float64 [B, S, C]."""
        seeds = self.seeds.unsqueeze(1).expand_as(positions)
        uniform = uniform_draws(seeds.flatten(), stream, positions.flatten(), self.causal_size)
        return uniform.view(*positions.shape, self.causal_size)

    def given(self, positions: Tensor) -> Iterator[tuple[int, int, int, ObservedNoise]]:
        """(row, column, index in its noise, noise) of the positions [B, S] that an observed noise reaches."""
        if self.observed is None:
            return
        if self.origins is None:
            raise ValueError("an observed noise belongs to the text after a prompt: it is for `generate`")
        offsets = (positions - self.origins.unsqueeze(1)).tolist()
        for row, noise in enumerate(self.observed):
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
            together = all(here - there == index for here, there in zip(places, first, strict=True))
            if together and 0 <= index < draws.shape[1]:
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


def _check_count(kind: str, count: int, prompts: int) -> None:
    if count not in (1, prompts):
        raise ValueError(f"{count} {kind} for {prompts} prompts; give one, or one per prompt")


@dataclass(frozen=True)
class Integrated:
    """Nothing is drawn: all sources are integrated out, and loc_S are what anybody decides by. temperature: T, which multiplies
    all noise of the scores. off: whether there is no noise that all tokens share."""

    temperature: float = 1.0
    off: bool = False
    moves = every_score = races = restricts = False
    by_loc = True

    def move(self, loc: Tensor, scale: Tensor, noise: Tensor, law: StableFamily, most: float = math.inf) -> Tensor:
        """loc_U as it is."""
        return loc

    def drawn(self, scale: Tensor, noise: Tensor, law: StableFamily) -> Tensor | None:
        """Nothing."""
        return None

    def left(self, scale: Tensor, noise: Tensor, law: StableFamily, whole: bool = False) -> Tensor:
        """scale_U + |b_noise| [..., C], the family's sum."""
        return scale if self.off else law.add(scale, noise)

    def observe_value(self, loc_Y: Tensor, scale_Y: Tensor) -> Tensor:
        """loc_Y [...] as it is."""
        return loc_Y

    def restore_observed_values(self, values: Tensor, loc_Y: Tensor) -> Tensor:
        """Values as they are."""
        return values


class Drawn:
    """What a bound plan draws at some positions, int64 [B, S], and what it leaves of loc and scale [B, S, C] (theory 3.9).

    moves: whether U' is drawn, wholly or in part. off: as of `Integrated`. by_loc: loc_S decide, not P_k. races: each token's
    own noise is drawn, so that the highest score decides. restricts: tokens are left out before. every_score: see
    `BoundDecoding`.
    """

    def __init__(self, bound: BoundDecoding, positions: Tensor) -> None:
        self.bound, self.positions, self.plan = bound, positions, bound.plan
        self.off = self.plan.noise == "off"
        self.by_loc = self.plan.decision in ("loc", "softmax")
        self.races = self.plan.own != "marginal"
        self.moves = self.plan.individual_mode != "marginal" or self.plan.noise not in ("marginal", "off")
        self.restricts, self.temperature = self.plan.restricts, self.plan.temperature
        self.every_score = bound.every_score

    def counters(self) -> tuple[Tensor, Tensor]:
        """Seeds and positions int64 [B S] by which own noise is drawn."""
        seeds = self.bound.seeds.unsqueeze(1).expand_as(self.positions)
        if self.bound.observed is not None:
            seeds = seeds.clone()
            for row, column, _, noise in self.bound.given(self.positions):
                seeds[row, column] = noise.seed
        return seeds.flatten(), self.positions.flatten()

    def exceptions(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where an observed noise is another than its seed draws: rows of the flat positions and tokens int64 [m], and Q(e3)
        [m]; None where it is nowhere."""
        found = []
        for row, column, index, noise in self.bound.given(self.positions):
            here = noise.places == index
            rows = torch.full((int(here.sum()),), row * self.positions.shape[1] + column)
            found.append((rows, noise.tokens[here], noise.normals[here]))
        if not found:
            return None
        rows, tokens, normals = (torch.cat(parts) for parts in zip(*found, strict=True))
        return rows, tokens, normals

    def left_out(self, logits: Tensor) -> Tensor:
        """Which tokens top_k, top_p and min_p leave out, one after the other, of a softmax of logits [B, S, V'] at T: bool."""
        plan = self.plan
        p = (upcast(logits) / max(plan.temperature, 1e-6)).softmax(-1)
        if plan.top_k is not None and plan.top_k < p.shape[-1]:
            p = p.masked_fill(p < p.topk(plan.top_k).values[..., -1:], 0.0)
        if plan.top_p is not None:
            order = (p / p.sum(-1, keepdim=True)).sort(-1, descending=True)
            out = order.values.cumsum(-1) - order.values >= plan.top_p
            out[..., 0] = False
            p = p.scatter(-1, order.indices, order.values.masked_fill(out, 0.0))
        if plan.min_p is not None:
            p = p.masked_fill(p < plan.min_p * p.amax(-1, keepdim=True), 0.0)
        return p == 0

    def move(self, loc: Tensor, scale: Tensor, noise: Tensor, law: StableFamily, most: float = math.inf) -> Tensor:
        """loc_U + T c + T n [B, S, C], from loc and scale of U and noise |b_noise| [C]. most: the highest temperature that
        counts."""
        plan = self.plan
        T = min(plan.temperature, most)
        if plan.individual_mode != "marginal":
            loc = loc + T * scale * self.bound.read(INDIVIDUAL_STREAM, plan.individual_mode, self.positions, law)
        if plan.noise not in ("marginal", "off"):
            loc = loc + T * noise * self.bound.read(NOISE_STREAM, plan.noise, self.positions, law)
        return loc

    def drawn(self, scale: Tensor, noise: Tensor, law: StableFamily) -> Tensor | None:
        """The scale [B, S, C] of what `move` adds; None where that is nothing, or where noise is off and own noise integrated
        out, so that nothing is left beside what is drawn."""
        plan, parts = self.plan, []
        if not plan.temperature or (self.off and not self.races):
            return None
        if plan.individual_mode != "marginal":
            parts.append(plan.temperature * scale)
        if plan.noise not in ("marginal", "off"):
            parts.append(plan.temperature * noise.expand_as(scale))
        return law.add(*parts) if parts else None

    def left(self, scale: Tensor, noise: Tensor, law: StableFamily, whole: bool = False) -> Tensor:
        """The scale of what is still integrated out [B, S, C]; 0 where nothing is. whole: of a source that is drawn at T below
        1, (1 - T^a)^(1/a) of its scale, so that what is drawn and what is left are the distribution; else none."""
        plan, left = self.plan, []
        for source, mode in ((scale, plan.individual_mode), (noise.expand_as(scale), plan.noise)):
            if mode == "marginal":
                left.append(source)
            elif mode != "off" and whole and plan.temperature < 1:
                left.append(source * (1 - plan.temperature**law.alpha) ** (1 / law.alpha))
        return law.add(*left) if left else torch.zeros_like(scale)

    def observe_value(self, loc_Y: Tensor, scale_Y: Tensor) -> Tensor:
        """loc_Y [B, S] with the noise of an observed value, as many scales beside it as it was; the observed value itself where
        features of float32 tell no difference from it."""
        if self.bound.observed is None:
            return loc_Y
        loc_Y = loc_Y.double()
        for row, column, index, noise in self.bound.given(self.positions):
            observed = noise.values[index]
            value = loc_Y[row, column] + noise.value_normals[index] * scale_Y[row, column]
            loc_Y[row, column] = observed if (value - observed).abs() <= noise.value_slack[index] else value
        return loc_Y

    def restore_observed_values(self, values: Tensor, loc_Y: Tensor) -> Tensor:
        """Values [B] of one position per row, where loc_Y [B, 1] is that of an observed number the number itself: to its last
        digit, however many digits others are written with."""
        values = values.clone()
        for row, column, index, noise in self.bound.given(self.positions):
            if index in noise.numbers and loc_Y[row, column] == noise.values[index]:
                values[row] = noise.numbers[index].value
        return values


Draws = Integrated | Drawn
"""What a chain asks how U' comes about."""
