"""The chain from a context to a decision: who speaks, what they say, with which number. All of it, in one file.

    chain = Chain(model, z, draws)      z [..., H], the features of a context: the backbone's last hidden state

    U    chain.loc_U, chain.scale_U     [..., C]   who speaks there                           abduction, theory 2.3
    U'   chain.loc, chain.scale         [..., C]   U with noise: what is drawn moves loc,
                                                   what is not stays in scale                 situation, theory 2.4, 3.9
    S    chain.loc_S, chain.scale_S     [..., V']  scores W U' + b of the V rows of the
                                                   vocabulary matrix and of <NUM>             action, theory 2.4
    C_k  chain.threshold                [..., 1]   what a token's score has to pass           theory 3.5
    P_k  chain.scores.p()               [..., V']  P(S_k > C_k)                               theory 2.5
         chain.decision_scores()                 [..., V']  the decision is its argmax: of P_k, or of
                                                   S_k where own noise is drawn too           theory 3.6
    U_Y  chain.read_by_values()         [..., C]   U as the value head reads it               theory 3.3
    Y    chain.value()                  [...]      the value W_reg U_Y + b_reg, with noise,
                                                   on the axis of the value transform         theory 2.4, 3.8

[...] are the positions: [batch, length], or [N] of kept ones. Stable laws stay stable under sums and linear maps, so that every
step is a pair (loc, scale). A step is taken when it is first asked for: where all scores share one scale, a decision never
computes it.

Everything that a graft is trained, scored, or asked with goes through a `Chain`. Where a step can be done in several ways, it
is done by a part that was chosen once, by its name in the configuration; of a score scale alone it is asked here whether all
tokens share it. The fast forms of steps are in `causalqwen.kernels`; what they must equal is here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from causalqwen.decoding import Draws, Integrated
from causalqwen.distributions import FAR, SCALE_FLOOR, StableFamily, own_uniforms, upcast
from causalqwen.individuals.marginal import shared_losses
from causalqwen.kernels import Negatives, Race, linear_ovr_loss
from causalqwen.losses import NO_TARGET, graded_scale, ovr_log_probs, ovr_loss
from causalqwen.modeling.abduction import AbductionNetwork, LawOfU
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.scores import ActionNetwork, Vocabulary
from causalqwen.parts.branch import PlainReader, ValueBranch
from causalqwen.parts.copying import Candidates
from causalqwen.parts.kernel_reader import KernelReader

_LEFT_OUT = 1e4  # by so much do tokens that top-k, top-p and min-p leave out come after those that they keep
POSITIONS_AT_ONCE = 256  # have all their scores held, where they are looked at one by one
ROWS_IN_CACHE = 8  # of scores: in a core's cache, several passes take a fraction of the time; on a GPU kernels do


class Grafted(Protocol):
    """What a chain needs of a model, wherever its backbone runs."""

    config: CausalQwenConfig
    abduction: AbductionNetwork
    action: ActionNetwork

    @property
    def value_reader(self) -> ValueBranch | KernelReader | PlainReader: ...
    def copy_law(self, features: Tensor, candidates: Candidates | None, law: Any) -> Any: ...
    def vocabulary(self) -> Vocabulary: ...


class Chain:
    """One pass through the chain at the features z [..., H] of some positions.

    draws: what a decoding plan draws at these positions; nothing by default. What is known already of a step is simply set:
    `chain.threshold = ...`. features may be [..., H + R], with what the whole backbone tells after z (`read_backbone`): the
    value reader alone looks at it.
    """

    def __init__(
        self, model: Grafted, features: Tensor, draws: Draws | None = None, words: Vocabulary | None = None
    ) -> None:
        self.model, self.whole = model, features
        self.draws: Any = draws or Integrated()  # those of a plan may race too
        self.features = features[..., : model.config.hidden_size].to(model.abduction.loc_net.weight.dtype)
        self.action, self.words = model.action, words or model.vocabulary()

    # ---- abduction: who speaks ---------------------------------------------------------------------------------------

    @cached_property
    def _individual(self) -> LawOfU:
        return self.model.abduction.law(self.features)

    @cached_property
    def loc_U(self) -> Tensor:
        """W_loc z + b_loc [..., C], in the dtype of W_loc (theory 2.3)."""
        return self._individual.loc

    @cached_property
    def scale_U(self) -> Tensor:
        """softplus or exp of W_scale z + b_scale [..., C], float32 at least, positive (theory 2.3)."""
        return self._individual.scale

    # ---- situation: the individual, and the noise they meet ------------------------------------------------------------

    @cached_property
    def loc(self) -> Tensor:
        """loc_U + T δ_U + T δ_ε [..., C], in the dtype of loc_U (theory 3.9).

        δ_U = scale_U Q(e1) is what is drawn of the individual, δ_ε = |b_noise| Q(e2) of the noise: e1 and e2 are uniform on
        (0, 1), Q the family's quantile function, T the temperature.
        """
        if not self.draws.moves:
            return self.loc_U
        moved = self.draws.move(upcast(self.loc_U), self.scale_U, self.action.noise, self.action.law)
        return moved.to(self.loc_U.dtype)

    @cached_property
    def scale(self) -> Tensor:
        """scale_U + |b_noise| [..., C], as far as they are not drawn (theory 2.4, 3.9)."""
        return self.draws.left(self.scale_U, self.action.noise, self.action.law)

    @cached_property
    def drawn(self) -> Tensor | None:
        """s_D [..., C], the scale of what is drawn of U'; None where nothing is (theory 3.5)."""
        if not self.draws.moves:
            return None
        return self.draws.drawn(upcast(self.scale_U), self.action.noise, self.action.law)

    @cached_property
    def undrawn(self) -> "Chain":
        """The chain of the same U with nothing drawn, at T = 1."""
        if not self.draws.moves and self.draws.temperature == 1:
            return self
        whole = Chain(self.model, self.whole, Integrated(off=self.draws.off), self.words)
        whole.loc_U, whole.scale_U = self.loc_U, self.scale_U
        return whole

    # ---- action: the words -------------------------------------------------------------------------------------------

    @cached_property
    def loc_S(self) -> Tensor:
        """W loc + b [..., V'], in the backbone's dtype: for text without numbers its logits, to the last bit (theory 2.4)."""
        return self.action.score_loc(self.loc, self.words)

    @cached_property
    def threshold(self) -> Tensor:
        """C + c(z) [..., 1], float32, the same for all tokens of a position (theory 3.5)."""
        T = max(self.draws.temperature, 1e-6)
        if self.action.scales.common and T == 1 and self.undrawn is not self:
            return self.undrawn.threshold
        constant = self.action.scales.threshold(upcast(self.action.threshold), self.log_partition, T)
        return constant.expand(*self.loc_U.shape[:-1], 1)

    @torch.no_grad()
    def log_partition(self, temperature: float = 1.0) -> Tensor:
        """log sum_k exp(loc_k / T) [..., 1] over the tokens but `<NUM>`, nothing drawn, float32, without a gradient."""
        rows, used = self.action.rows, self.action.rest_in_use
        known = self.undrawn.__dict__.get("loc_S")
        if known is None:
            blocks = map(self.words, self.loc_U.flatten(0, -2).split(POSITIONS_AT_ONCE))
        else:
            blocks = iter(known[..., :rows].flatten(0, -2).split(ROWS_IN_CACHE))
        sums = []
        for block in blocks:
            scores = upcast(block) if temperature == 1 else upcast(block) / temperature
            scores = scores if used is None else scores.masked_fill(~used, -torch.inf)
            sums.append(scores.logsumexp(-1).clamp(-FAR, FAR))
        return torch.cat(sums).view(*self.loc_U.shape[:-1], 1)

    @cached_property
    def number_scale(self) -> Tensor:
        """The scale of `<NUM>`'s score [...], float32 (theory 3.2, 3.5)."""
        if self._takes_off:
            return self.scale_S[..., self.action.num_token_id]
        return self.action.scales.of_number(self.scale, self.words)

    @cached_property
    def scale_S(self) -> Tensor:
        """[..., 1] or [..., V'], float32, without what a token's own noise adds below its threshold (theory 3.5): one for all
        tokens under a common scale, and `own` where something is drawn of it."""
        return self.own() if self._takes_off else self.action.scales.of_all(self.scale, self.words)

    @property
    def _takes_off(self) -> bool:
        """Whether what is drawn, or a temperature, is taken off a scale that all tokens share."""
        return self.action.scales.common and (self.drawn is not None or self.draws.temperature != 1)

    def own(self) -> Tensor:
        """own_k [..., V'], the scale of what is not drawn of each token's score at temperature T (theory 3.5, 3.9):

        own_k^a = T^a scale^a + T^(a-1) beta max(C - loc_k, 0) - d_k^a,   loc_k with nothing drawn, d_k = |W_k| s_D
        """
        return self._left(self.drawn, self.draws.temperature)

    def known(self) -> Tensor:
        """The scale of each score once U is known, of the rows of the matrix, [..., V], of tokens that share one."""
        return self._left(upcast(self.scale_U), 1.0)[..., : self.action.rows]

    def _left(self, drawn: Tensor | None, temperature: float) -> Tensor:
        a, words, whole = self.action.law.alpha, self.words, self.undrawn.scores
        power = temperature**a * whole.scale**a
        if whole.slope:
            fallen = (self.threshold - upcast(whole.loc)).clamp(0, FAR)
            power = power + temperature ** (a - 1) * whole.slope * fallen
        if drawn is not None:
            is_even = bool((drawn == drawn[..., :1]).all())
            power = power - (drawn[..., :1] * words.all_norms if is_even else words.scales(drawn)) ** a
        return (power.clamp(min=SCALE_FLOOR**a) ** (1 / a)).expand(whole.loc.shape)

    @cached_property
    def scores(self) -> "Scores":
        """Scores of all tokens, `<NUM>` too, [..., V']."""
        return self._scores(self.loc_S, self.scale_S, self.action.columns_in_use)

    @cached_property
    def word_scores(self) -> "Scores":
        """Scores of all tokens but `<NUM>`, [..., V]: rows of the matrix, without what `<NUM>` adds to one of them."""
        rows = self.action.rows
        return self._scores(self.loc_S[..., :rows], self.scale_S[..., :rows], self.action.rest_in_use)

    @cached_property
    def number(self) -> "Scores":
        """The score of `<NUM>` alone: [...], without a last axis (theory 3.2)."""
        loc = self.action.num_loc(self.loc, self.words)
        return self._scores(loc, self.number_scale, None, self.threshold.squeeze(-1))

    def _scores(self, loc: Tensor, scale: Tensor, mask: Tensor | None, threshold: Tensor | None = None) -> "Scores":
        action, threshold = self.action, self.threshold if threshold is None else threshold
        slope = 0.0 if self._takes_off else action.score_slope  # it is in the scale already
        return Scores(loc, scale, threshold, slope, action.law, mask, action.scales.common and self.drawn is None)

    # ---- decision ----------------------------------------------------------------------------------------------------

    def decision_scores(self) -> Tensor:
        """What the plan's decision is the argmax of, [..., V']; -inf for tokens that are known to lose (theory 3.6).

        Without a plan that is loc_S, as the backbone decides; and where a scale that all share decides nothing. Under one it is
        P_k, or what orders tokens as P_k does, (loc_S - C) / own; where own noise is drawn too, S_k.
        """
        draws = self.draws
        if draws.by_loc:
            return self.loc_S
        if not self.action.scales.common:
            return self.scores.decision_scores()
        if not draws.races:
            if self.drawn is None:
                return self.loc_S
            self._take_both()
            return self.scores.decision_scores()
        a_gpu_would_wait = self.features.device.type != "cpu"
        if a_gpu_would_wait or draws.every_score or torch.is_grad_enabled() or self.action.law.alpha != 2:
            return self.raced()
        return self._raced_by_bounds()

    @torch.compiler.disable  # looks at scores
    def _raced_by_bounds(self) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # bounds are no better than what they follow from
            return self.race().scores().view(self.loc_S.shape)

    def race(self) -> Race:
        """The race of the scores, of which those that are known to lose are never drawn."""
        draws = self.draws
        T, whole, loc = draws.temperature, self.undrawn, self.in_race().detach().flatten(0, -2)
        power = whole.loc_S.flatten(0, -2).to(torch.float32, copy=True)
        least, threshold = (T * whole.scale_S.flatten()).square(), upcast(self.threshold).flatten()
        for of_row, of_all, edge in zip(power, least, threshold, strict=True):  # each stays in a core's cache
            of_row.neg_().add_(edge).clamp_(0, FAR).mul_(T * self.action.score_slope).add_(of_all)
        drawn = None if self.drawn is None else self.drawn.flatten(0, -2)
        return Race(self.action.law, loc, power, drawn, self.words.rows_at, draws.counters(), draws.exceptions())

    def raced(self) -> Tensor:
        """S_k = loc_k + own_k Q(e3_k) [..., V'] of all tokens, the slow way.

        Where every score is wanted, tokens that are left out come after all others, the likeliest first.
        """
        draws, loc, law = self.draws, self.in_race(), self.action.law
        seeds, positions = draws.counters()
        normals = law.quantile(own_uniforms(seeds, positions, loc.shape[-1])).to(loc.dtype)
        if (given := draws.exceptions()) is not None:
            rows, tokens, values = (column.to(loc.device) for column in given)
            normals[rows, tokens] = values.to(loc.dtype)
        scores = loc + self.own() * normals.view(loc.shape)
        if draws.restricts and draws.every_score:
            scores = torch.where(loc == -torch.inf, self._in_use(self.undrawn.loc_S) - _LEFT_OUT, scores)
        return scores

    def in_race(self) -> Tensor:
        """loc_S [..., V'], float32 at least, -inf for tokens that take no part: those that the plan leaves out, too. What the
        population average would say decides which: loc_S with nothing drawn, the logits of a softmax's samplers."""
        self._take_both()
        loc = self._in_use(self.loc_S)
        if not self.draws.restricts:
            return loc
        return loc.masked_fill(self.draws.left_out(self._in_use(self.undrawn.loc_S)), -torch.inf)

    def _in_use(self, loc: Tensor) -> Tensor:
        used = self.action.columns_in_use
        return upcast(loc) if used is None else upcast(loc).masked_fill(~used, -torch.inf)

    def _take_both(self) -> None:
        """Take loc_S with what is drawn and without it in one product."""
        if not self.draws.moves:
            self.undrawn.loc_S = self.loc_S
            return
        action, words, both = self.action, self.words, torch.stack([self.loc_U, self.loc])
        self.undrawn.loc_S, self.loc_S = action.put(words.at_once(both), lambda: action.num_loc(both, words))

    def of_held(self) -> tuple[Tensor, Tensor]:
        """(loc_S, own) [B, S, V'] where somebody is held for the text; loc_S is -inf for rows that no token uses.

        Where scale_U is the same at all positions, they move a score by the same everywhere: one row more in one product.
        """
        scale, action, words = self.scale_U[:, :1], self.action, self.words
        if bool((self.scale_U == scale).all()):
            moved = self.draws.move(torch.zeros_like(scale), scale, action.noise, action.law)
            rows = torch.cat([self.loc_U, moved.to(self.loc_U.dtype)], dim=1)
            products = words.products(rows.flatten(0, -2)).view(*rows.shape[:-1], -1)
            scores = products[:, :-1] if words.bias is None else products[:, :-1] + words.bias
            self.undrawn.loc_S = action.put(scores, lambda: action.num_loc(self.loc_U, words))
            self.loc_S = action.put(scores + products[:, -1:], lambda: action.num_loc(self.loc, words))
        else:
            self._take_both()
        used, own = action.columns_in_use, self.own()
        return self.loc_S if used is None else self.loc_S.masked_fill(~used, -torch.inf), own

    @torch.no_grad()
    def decide(self) -> Tensor:
        """argmax_k P_k, int64 [...], whatever the plan decides by, without all scores at once (theory 3.6)."""
        return torch.cat([part.scores.decide() for part in self.parts()]).view(self.features.shape[:-1])

    # ---- the words' loss ---------------------------------------------------------------------------------------------

    def rest_loss(
        self, targets: Tensor, also_right: Tensor | None = None, negatives: Negatives | None = None, impl: str = "auto"
    ) -> Tensor:
        """`word_scores.loss` [...] without ever forming the scores: `<NUM>` counts as no target of theirs (theory 2.5).

        negatives: a sample of the wrong tokens in place of all. impl: see `linear_ovr_loss`.
        """
        action, words = self.action, self.words
        if self.drawn is not None or self.draws.temperature != 1:  # every token has a scale of its own
            return self.word_scores.loss(self.words_of(targets), also_right)
        scale = action.scales.of_products(self.scale, words).flatten(0, targets.dim() - 1)
        threshold, right = self.threshold.flatten(0, -2), self.words_of(targets).flatten()
        losses = linear_ovr_loss(
            self.loc.flatten(0, -2), scale, words.weight, words.bias, threshold, right, family=action.law.name,
            slope=action.score_slope, also_right=None if also_right is None else also_right.flatten(0, -2),
            vocabulary_mask=action.rest_mask, negatives=negatives, reduction="none", impl=impl,
        )  # fmt: skip
        return losses.view(targets.shape)

    def words_of(self, targets: Tensor) -> Tensor:
        """Targets int64 [...] as the rest sees them: where `<NUM>` comes, none of its tokens is right."""
        return targets.masked_fill(targets == self.action.num_token_id, NO_TARGET)

    # ---- the value ---------------------------------------------------------------------------------------------------

    def read_by_values(self) -> tuple[Tensor, Tensor]:
        """The law of U as the value head reads it, [..., C] (theory 3.3)."""
        return self.model.value_reader(self.whole, self.loc_U, self.scale_U)

    def value_reach(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """What an individual reaches, [..., C] with a sign, and the noise's scale, [C] or [..., C], of the scale [..., C] of U
        as the value head reads it (theory 3.14)."""
        return self.model.value_reader.split(self.whole, scale, self.action.noise, self.action.value_law)

    def value(self) -> tuple[Tensor, Tensor]:
        """(loc_Y, scale_Y) [...], float32 at least, on the value axis (theory 2.4, 3.4)."""
        action, draws = self.action, self.draws
        loc, scale = self.read_by_values()
        reach, noise = self.value_reach(scale)
        left = draws.left(reach.abs(), noise, action.value_law, whole=True)
        if draws.moves:  # a value has units, which say how far it varies: no temperature above 1
            loc = draws.move(upcast(loc), reach, noise, action.value_law, most=1.0)
        loc_Y, scale_Y = action.value(loc, left)
        return draws.observe_value(loc_Y, scale_Y), scale_Y

    def value_loadings(self) -> tuple[Tensor, Tensor]:
        """What an individual's coordinates add to the value, r scale W_reg [..., C], and noise [...] (theory 3.14)."""
        loc, scale = self.read_by_values()
        reach, noise = self.value_reach(scale)
        left = self.action.value(torch.zeros_like(loc), noise.expand_as(scale))[1]
        return reach * self.action.value_linear[0][0], left

    def value_losses(
        self,
        values: Tensor,
        law: Any,
        group: Tensor | None = None,
        candidates: Candidates | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """L_reg [n] of values [n], in the data's units, at positions [n]: `law.axis_losses` of
        `config.value_loss` (theory 2.5).

        law: a `ValueLaw`, or what stands in for one. group: int64 [n], -1 for none; values of one group share an individual,
        and each is charged its part of their joint likelihood with e1 integrated out (theory 3.14). candidates: of each value,
        the numbers that it may be a copy of; not beside a group. places: int64 [n], of the chain's, where each value stands.
        """
        at: Any = slice(None) if places is None else places
        loc_Y, scale_Y = (column[..., at] for column in self.value())
        law = self.model.copy_law(self.features, candidates, law)
        losses = law.axis_losses(loc_Y, scale_Y, values, self.model.config.value_loss)
        if group is None:
            return losses
        residuals = law.transform.forward(values) - loc_Y
        loadings, noise = self.value_loadings()
        return shared_losses(losses, self.action.value_law, residuals, loadings[at], noise[at], group)

    # ---- some of the positions -----------------------------------------------------------------------------------------

    def __getitem__(self, places: Any) -> "Chain":
        """The chain at some of the positions; their values are those with nothing drawn."""
        return self._each(lambda step: step[places])

    def _each(self, taken: Callable[[Tensor], Tensor]) -> "Chain":
        draws = Integrated(self.draws.temperature, self.draws.off)
        part = Chain(self.model, taken(self.whole), draws, self.words)
        for step in _SITUATED:
            setattr(part, step, taken(getattr(self, step)))
        if self.drawn is not None:
            part.drawn, part.undrawn = taken(self.drawn), self.undrawn._each(taken)
        if "loc_S" in self.__dict__:
            part.loc_S = taken(self.loc_S)
        return part

    def parts(self, count: int = POSITIONS_AT_ONCE) -> Iterator["Chain"]:
        """The chain at `count` positions at a time, [n, H] each; values as in `chain[places]`."""
        flat = self._each(lambda step: step.flatten(0, -2))
        for start in range(0, len(flat.features), count):
            yield flat[start : start + count]

    def situated(self) -> "Chain":
        """This chain, with U, U' and the threshold taken now, in this order: it fixes the last bits of summed gradients."""
        for step in _SITUATED:
            getattr(self, step)
        return self


_SITUATED = ("loc_U", "scale_U", "loc", "scale", "threshold")  # with them, scores need no plan any more


@dataclass(frozen=True)
class Scores:
    """Laws of some tokens' scores, S_k ~ S(loc_k, scale_k), and the thresholds that they have to pass.

    loc: [..., K]. scale: [..., K], or [..., 1] for one that all share. threshold: [..., 1]. slope: of a token's own noise below
    its threshold (`graded_scale`). mask: bool [K], False for rows that take no part; None where all do. common: whether the
    scale is the same for all tokens of a position, so that it moves no decision.
    """

    loc: Tensor
    scale: Tensor
    threshold: Tensor
    slope: float
    law: StableFamily
    mask: Tensor | None
    common: bool

    @property
    def at_once(self) -> int:
        """How many positions' scores are best looked at together."""
        return ROWS_IN_CACHE if self.loc.device.type == "cpu" else POSITIONS_AT_ONCE

    def parts(self) -> Iterator["Scores"]:
        """Scores of `at_once` positions at a time, [n, K]. Positions may share scale and threshold."""
        alike = (column.expand(*self.loc.shape[:-1], -1) for column in (self.loc, self.scale, self.threshold))
        columns = (column.flatten(0, -2).split(self.at_once) for column in alike)
        for loc, scale, threshold in zip(*columns, strict=True):
            yield replace(self, loc=loc, scale=scale, threshold=threshold)

    def masked(self, columns: Tensor, value: float) -> Tensor:
        """Columns [..., K] with `value` for rows that take no part."""
        return columns if self.mask is None else columns.masked_fill(~self.mask, value)

    def graded(self) -> Tensor:
        """The scale with a token's own noise [..., K] (theory 3.5)."""
        return graded_scale(self.loc, self.scale, self.threshold, self.slope, self.law).expand(self.loc.shape)

    def log_p(self) -> tuple[Tensor, Tensor]:
        """log P_k and log(1 - P_k) [..., K], both exact in their tails; masked rows too."""
        return ovr_log_probs(upcast(self.loc), self.scale, self.threshold, family=self.law.name, slope=self.slope)

    def log_not_p(self) -> Tensor:
        """log(1 - P_k) [N, K] alone, without a gradient."""
        return self.law.log_cdf_and_hazard((self.threshold - upcast(self.loc)) / self.graded())[0]

    def at(self, index: Tensor) -> "Scores":
        """Scores of the tokens int64 [..., R], masked ones too."""
        loc, scale, threshold = (
            column if column.shape[-1] == 1 else column.expand(self.loc.shape).gather(-1, index)
            for column in (self.loc, self.scale, self.threshold)
        )
        return replace(self, loc=loc, scale=scale, threshold=threshold, mask=None)

    def p(self) -> Tensor:
        """P_k [..., K], 0 for masked rows: the law's F at loc, seen from the threshold, because it is symmetric."""
        return self.masked(self.law.cdf(upcast(self.loc), self.threshold, self.graded()), 0.0)

    def loss(self, targets: Tensor, also_right: Tensor | None = None) -> Tensor:
        """-sum_right log P_k - sum_wrong log(1 - P_k) [...] of targets int64 [...], as `ovr_loss` takes them."""
        return ovr_loss(
            upcast(self.loc), self.scale, targets, self.threshold, family=self.law.name, slope=self.slope,
            also_right=also_right, vocabulary_mask=self.mask, reduction="none",
        )  # fmt: skip

    def decision_scores(self) -> Tensor:
        """What the decision is the argmax of [..., K], float32; -inf for masked rows (theory 3.6).

        (loc - C) / scale increases in P_k at every distance from the threshold, where P_k itself saturates. Under a common
        scale it is loc as it is: the decision then equals the backbone's to the last bit.
        """
        ranked = self.loc.to(torch.float32)
        if not self.common:
            ranked = (ranked - self.threshold) / self.scale.to(torch.float32).clamp(min=SCALE_FLOOR)
        return self.masked(ranked, -torch.inf)

    def decide(self) -> Tensor:
        """argmax_k P_k, int64 [...]; ties to the lowest id."""
        return self.decision_scores().max(-1).indices  # three times as fast as argmax, and the first of equals too
