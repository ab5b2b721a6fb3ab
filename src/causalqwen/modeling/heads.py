"""Everything after the backbone: from features z to laws, decisions and losses."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from causalqwen.decoding import BoundDecoding, CausalDecoding, QuantileReader, decide, decision_scores
from causalqwen.distributions import upcast
from causalqwen.individuals import value_marginal
from causalqwen.kernels import Negatives, linear_ovr_loss
from causalqwen.losses import (
    NO_TARGET,
    LossMasks,
    LossParts,
    graded_scale,
    ovr_log_probs,
    ovr_loss,
    shift_targets,
    solve_thresholds,
    total_loss,
)
from causalqwen.modeling.abduction import AbductionNetwork, ValueBranch
from causalqwen.modeling.action import ActionNetwork
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.copying import Candidates, CopyHead
from causalqwen.modeling.domains import make_domain
from causalqwen.modeling.embedding import NumericEmbedding
from causalqwen.modeling.outputs import CausalQwenOutput
from causalqwen.modeling.vocabulary import Vocabulary
from causalqwen.numbers import ValueLaw, ValueTransform
from causalqwen.numbers.copies import CopyLaw

_STANDING: ContextVar[tuple[list[Vocabulary], ...]] = ContextVar("standing", default=())
"""Of the models whose weights stand still here, one each; empty where they do no more: of a thread, and of what it awaits."""


class HeadsMixin:
    """The heads of a grafted model."""

    config: CausalQwenConfig
    numeric_embedding: NumericEmbedding
    abduction: AbductionNetwork
    value_branch: ValueBranch | None
    copy_head: CopyHead | None
    action: ActionNetwork
    score_head: nn.Linear | None
    value_law: ValueLaw
    value_transform: ValueTransform
    ovr_impl: str = "auto"
    """How the OvR loss is computed where no scores are kept: see `linear_ovr_loss`. Not part of a checkpoint."""
    bf16: bool = False
    """Whether `features` takes the backbone's products in bfloat16 (autocast), whatever its dtype. Not part of a checkpoint."""

    def make_heads(self, config: CausalQwenConfig) -> None:
        """Everything that a grafted model adds to its backbone, at its start values."""
        size = config.causal_size
        self.numeric_embedding = NumericEmbedding(
            config.hidden_size,
            config.num_token_id,
            config.num_token_appended,
            multiplied=config.number_embedding == "multiplied",
            fourier=config.number_encoding == "fourier",
        )
        self.abduction = AbductionNetwork(
            config.hidden_size,
            size,
            deep=config.deep_abduction,
            deep_hidden_size=config.abduction_hidden_size,
            scale_activation=config.scale_activation,
            initial_scale=config.initial_scale,
            max_scale=config.max_scale,
        )
        for name, settings in config.domains.items():
            self.abduction.domains[name] = make_domain(config, settings)
        self.abduction.domain = config.domain
        self.value_branch = None
        if config.value_branch:
            self.value_branch = ValueBranch(
                config.hidden_size,
                size,
                config.value_branch_hidden_size,
                members=config.value_branch_members,
                layers=config.value_branch_layers,
                dropout=config.value_branch_dropout,
            )
        self.action = ActionNetwork(
            size,
            hidden_size=config.hidden_size,
            matrix_rows=config.text_config.vocab_size,
            num_token_id=config.num_token_id,
            free_token_ids=config.free_token_ids,
            score_scale=config.score_scale,
            score_noise=config.score_noise,
            score_slope=config.score_slope,
            anchor_tokens=config.anchor_tokens,
            family=config.vocabulary_family,
            value_family=config.value_family,
            initial_noise=config.initial_noise,
            initial_threshold=config.initial_threshold,
            token_thresholds=config.token_thresholds,
        )
        # A causal size below H needs a W_cls of its own, in the backbone's dtype.
        self.score_head = nn.Linear(size, config.text_config.vocab_size) if size < config.hidden_size else None
        with torch.random.fork_rng(devices=()):  # whatever is drawn behind it does not depend on it
            self.copy_head = CopyHead(config.hidden_size, config.copy_size) if config.copy_numbers else None

    def vocabulary(self) -> Vocabulary:
        """W_cls as it is now; within `standing`, as it was when that began."""
        known = (words for entry in reversed(_STANDING.get()) for words in entry if words.action is self.action)
        return next(known, None) or self.action.vocabulary(self.get_output_embeddings())

    @contextmanager
    def standing(self) -> Iterator[None]:
        """While the block runs, W_cls stands still: what follows from it is made once, for each thread that says so."""
        own = [self.vocabulary()]
        _STANDING.set((*_STANDING.get(), own))
        try:
            yield
        finally:  # blocks may end in any order, and in another context than they began in
            own.clear()
            _STANDING.set(tuple(entry for entry in _STANDING.get() if entry))

    def heads(
        self,
        features: Tensor,
        *,
        labels: Tensor | None = None,
        also_right: Tensor | None = None,
        numeric_labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        candidates: Candidates | None = None,
        output_ovr: bool = False,
        skip_logits: bool = False,
        causal_decoding: BoundDecoding | None = None,
        positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        num_numbers_in_batch: Tensor | int | None = None,
    ) -> CausalQwenOutput:
        """Laws of scores and values from features z [B, S, H]; arguments as in `forward`.

        positions: int64 [B, S], needed by `causal_decoding`: the index of each token among the real tokens of its row.
        candidates: for each position, the numbers that a value may be a copy of; None for none.
        """
        action, words = self.action, self.vocabulary()
        loc_U, scale_U = self.abduction(features)
        loc, scale = self.situate(loc_U, scale_U, causal_decoding, positions, features, words)
        loc_Y, scale_Y = self.value_parameters(features, loc_U, scale_U, causal_decoding, positions)
        thresholds = self.thresholds(features, loc_U, scale_U, words)
        log_num, log_not_num = self.num_log_probs(loc, action.num_scale(scale, words), thresholds.squeeze(-1), words)
        result = CausalQwenOutput(
            features=features, loc_U=loc_U, scale_U=scale_U, loc_Y=loc_Y, scale_Y=scale_Y, num_prob=log_num.exp()
        )
        if not skip_logits:
            result.logits = action.score_loc(loc, words)
        if output_ovr:
            logits = action.score_loc(loc, words) if skip_logits else result.logits
            self._add_ovr(result, logits, action.score_scale_of(scale, words), thresholds)
        if labels is None:
            return result

        masks = shift_targets(labels, numeric_labels, attention_mask, self.config.num_token_id)
        parts = self.losses(
            masks,
            self.rest_loss(
                result.logits,
                loc[:, :-1],
                scale[:, :-1],
                thresholds[:, :-1],
                masks.targets,
                also_right=None if also_right is None else also_right[:, 1:],
                words=words,
            ),
            log_num[:, :-1],
            log_not_num[:, :-1],
            self.value_losses(
                features[:, :-1][masks.num_mask],
                masks.values[masks.num_mask],
                candidates=None if candidates is None else candidates[:, :-1][masks.num_mask],
            ),
            num_items_in_batch,
            num_numbers_in_batch,
        )
        result.loss, result.loss_cls, result.loss_reg = parts.total, parts.cls, parts.reg
        return result

    def scores(
        self, features: Tensor, bound: BoundDecoding | None = None, positions: Tensor | None = None
    ) -> CausalQwenOutput:
        """What one step of `generate` needs of the heads: `logits` (what `bound` decides by) and the features.

        Under the common scale the decision is argmax_k loc_S: no scale, threshold or value is computed. Under the
        documents', scales are computed only for tokens that can still win (`ScaleBounds`), unless `bound.every_score`.
        """
        action, words = self.action, self.vocabulary()
        loc_U = self.abduction.locate(features)
        if bound is None:
            return CausalQwenOutput(logits=action.score_loc(loc_U, words), features=features)
        plan = bound.plan
        own_scale = action.score_scale == "documents" and plan.decision == "ovr"
        loc, scale_U, scale = loc_U, None, None
        if own_scale or plan.individual_mode != "marginal" or plan.noise_mode in ("token", "sequence"):
            scale_U = self.abduction.spread(features)
            loc, scale = self.situate(loc_U, scale_U, bound, positions, features, words)
        logits = action.score_loc(loc, words)
        if bound.hindsight is not None:  # nothing is left to integrate out where all noise is given
            return CausalQwenOutput(logits=bound.add_residuals(upcast(logits), positions), features=features)
        if not own_scale:
            return CausalQwenOutput(logits=logits, features=features)
        thresholds = self.thresholds(features, loc_U, scale_U, words)
        if bound.every_score or features.shape[1] > 1:
            scales = action.score_scale_of(scale, words)
            return CausalQwenOutput(logits=decision_scores(logits, scales, thresholds), features=features)
        return CausalQwenOutput(logits=self._bounded_scores(logits, scale, thresholds, words), features=features)

    def _bounded_scores(self, logits: Tensor, scale: Tensor, thresholds: Tensor, words: Vocabulary) -> Tensor:
        """`decision_scores` of one position per row under the documents' scale, -inf where a token cannot win."""
        action, num_id = self.action, self.config.num_token_id
        of_rows = logits[:, -1, : action.rows]
        scores = words.bounds.decision_scores(of_rows, scale[:, -1], thresholds[:, -1], action.rest_mask)
        of_number = (upcast(logits[:, -1, num_id]) - thresholds[:, -1, 0]) / action.num_scale(scale[:, -1], words)
        if action.num_appended:
            return torch.cat([scores, of_number.unsqueeze(-1)], dim=-1).unsqueeze(1)
        scores[:, num_id] = of_number
        return scores.unsqueeze(1)

    # ---- parts, which training on kept features calls one by one ------------------------------------------------------

    def situate(
        self,
        loc_U: Tensor,
        scale_U: Tensor,
        bound: BoundDecoding | None = None,
        positions: Tensor | None = None,
        features: Tensor | None = None,
        words: Vocabulary | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The law of U' that the tokens see: noise added to the scale, or what a plan's draws leave (theory 3.9).

        With a plan, give positions and features too.
        """
        action = self.action
        if bound is None:
            return loc_U, action.law.add(scale_U, action.noise)
        gain: Tensor | float = 1.0  # a central mass of the plan's own comes with the plain quantile function
        if bound.plan.central_mass is None:
            gain = action.draw_gain(features, loc_U, words or self.vocabulary())
        reader = self._readers(bound.plan)[0]
        loc, scale = bound.situate(upcast(loc_U), scale_U, action.noise, positions, reader, gain)
        return loc.to(loc_U.dtype), scale

    def value_parameters(
        self,
        features: Tensor,
        loc_U: Tensor,
        scale_U: Tensor,
        bound: BoundDecoding | None = None,
        positions: Tensor | None = None,
        *,
        each_member: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(loc_Y, scale_Y) [...] on the value axis, from features [..., H] and the law of U [..., C] there; with `each_member`,
        [members, ...], those of each member of the value branch alone."""
        loc, scale = self.as_values_read(features, loc_U, scale_U, each_member=each_member)
        if bound is None:
            scale = self.action.value_law.add(scale, self.value_noise)
        else:
            loc, scale = bound.situate(upcast(loc), scale, self.value_noise, positions, self._readers(bound.plan)[1])
        loc_Y, scale_Y = self.action.value(loc, scale)
        return (loc_Y if bound is None else bound.add_value_residuals(loc_Y, positions)), scale_Y

    @property
    def value_noise(self) -> Tensor:
        """The scale of the noise [C] as the value head reads it."""
        noise = self.action.noise
        return noise if self.value_branch is None else noise * self.value_branch.log_noise.exp()

    def as_values_read(
        self, features: Tensor, loc_U: Tensor, scale_U: Tensor, *, each_member: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The law of U [..., C] as the value head reads it: through the value branch, where there is one."""
        if self.value_branch is None:
            return (loc_U[None], scale_U[None]) if each_member else (loc_U, scale_U)
        return self.value_branch(features, loc_U, scale_U, each=each_member)

    def thresholds(
        self,
        features: Tensor,
        loc_U: Tensor,
        scale_U: Tensor,
        words: Vocabulary | None = None,
        positions_at_once: int = 256,
    ) -> Tensor:
        """C + c(z) [..., 1], predicted or solved (`config.threshold_shift`), from features and the law of U, [..., C]."""
        action, words = self.action, words or self.vocabulary()
        if self.config.threshold_shift == "predicted":
            return action.thresholds(features, loc_U, words)
        found = []
        with torch.no_grad():
            scale = action.law.add(scale_U, action.noise)
            parts = (t.reshape(-1, t.shape[-1]).split(positions_at_once) for t in (loc_U, scale))
            for loc_part, scale_part in zip(*parts, strict=True):
                found.append(
                    solve_thresholds(
                        action.score_loc(loc_part, words),
                        action.score_scale_of(scale_part, words),
                        family=action.law.name,
                        slope=action.score_slope,
                        vocabulary_mask=action.vocabulary_mask,
                    )
                )
        return torch.cat(found).view(*loc_U.shape[:-1], 1)

    def num_log_probs(
        self, loc: Tensor, num_scale: Tensor, thresholds: Tensor, words: Vocabulary | None = None
    ) -> tuple[Tensor, Tensor]:
        """log P_NUM and log(1 - P_NUM) [...], from loc_U [..., C], the scale of `<NUM>`'s score and its threshold [...]."""
        num_loc = self.action.num_loc(loc, words or self.vocabulary())
        law, slope = self.action.law.name, self.action.score_slope
        return ovr_log_probs(num_loc, num_scale, thresholds, family=law, slope=slope)

    def rest_loss(
        self,
        logits: Tensor | None,
        loc: Tensor,
        scale: Tensor,
        thresholds: Tensor,
        targets: Tensor,
        negatives: Negatives | None = None,
        also_right: Tensor | None = None,
        words: Vocabulary | None = None,
    ) -> Tensor:
        """What every token but `<NUM>` adds to L_cls [B, S-1]; all arguments but logits are shifted already.

        From the scores [B, S, V'] where there are any, else block by block of the vocabulary, or of a sample of it.
        """
        action, words = self.action, words or self.vocabulary()
        mask = action.rest_mask
        targets = targets.masked_fill(targets == self.config.num_token_id, NO_TARGET)
        if logits is not None:
            return ovr_loss(
                logits[:, :-1, : action.rows],
                action.score_scale_of(scale, words)[..., : action.rows],
                targets,
                thresholds,
                family=action.law.name,
                slope=action.score_slope,
                also_right=also_right,
                vocabulary_mask=mask,
                reduction="none",
            )
        if action.score_scale == "equal":
            scale = action.num_scale(scale, words)  # the common one
        losses = linear_ovr_loss(
            loc.flatten(0, 1),
            scale.flatten(0, 1),
            words.weight,
            words.bias,
            thresholds.flatten(0, 1),
            targets.flatten(),
            family=action.law.name,
            slope=action.score_slope,
            also_right=None if also_right is None else also_right.flatten(0, 1),
            vocabulary_mask=mask,
            negatives=negatives,
            reduction="none",
            impl=self.ovr_impl,
        )
        return losses.view(targets.shape)

    def losses(
        self,
        masks: LossMasks,
        rest_loss: Tensor,
        log_num: Tensor,
        log_not_num: Tensor,
        value_losses: Tensor,
        num_items: Tensor | int | None = None,
        num_numbers: Tensor | int | None = None,
    ) -> LossParts:
        """`total_loss` under this model's settings; value_losses [n] where `masks.num_mask` holds."""
        return total_loss(
            masks,
            rest_loss,
            log_num,
            log_not_num,
            value_losses,
            self.config.num_token_id,
            alpha=self.config.gate_alpha,
            detach_gate=self.config.gate_detach,
            value_weight=self.config.value_loss_weight,
            num_items=num_items,
            num_numbers=num_numbers,
        )

    def candidates(
        self, features: Tensor, input_ids: Tensor, numeric_values: Tensor | None, attention_mask: Tensor | None
    ) -> Candidates:
        """The numbers of a batch [B, S] for each of its positions, under features z [B, S, H]."""
        hidden = self.config.hides_numbers
        return Candidates.of_tokens(
            features, input_ids, numeric_values, attention_mask, self.config.num_token_id, hidden
        )

    def copy_law(self, features: Tensor, candidates: Candidates, law: ValueLaw | None = None) -> CopyLaw:
        """The law of the values that follow features [..., H], the positions of `candidates`: one of these, or a new number.

        law: the new number's; `value_law` by default.

        Where there is a value branch, the copy head reads features as the branch does, standardized.
        """
        if self.copy_head is None:
            raise ValueError("this model does not copy: graft it with copy_numbers=True")
        found = features, candidates.features
        if self.value_branch is not None:
            found = self.value_branch.standardize(features), self.value_branch.standardize(candidates.features)
        log_weights = self.copy_head(*found, candidates)
        values = candidates.values[candidates.rows].masked_fill(~candidates.offered, torch.inf)
        return CopyLaw(self.value_law if law is None else law, values, log_weights)

    def value_losses(
        self,
        features: Tensor,
        values: Tensor,
        group: Tensor | None = None,
        candidates: Candidates | None = None,
        classes: Tensor | None = None,
    ) -> Tensor:
        """L_reg of values [n], in the data's units, after features [n, H]; [n]: `ValueLaw.axis_losses` of `config.value_loss`.
        In training, the mean over the branch's members of what each would lose alone.

        group: int64 [n], -1 for none; values of one group share an individual, and each is charged its part of their joint
            likelihood with e1 integrated out (theory 3.14). A value that shares with none has the law that predicts it.
        candidates: for each value, the numbers that it may be a copy of (`CopyLaw.axis_losses`); not beside a group.
        classes: int64 [n], the place in `config.class_values` of each one's class, where classes have axes of their own; not
            beside a group either.
        """
        loc_U, scale_U = self.abduction(features)
        loc_Y, scale_Y = self.value_parameters(features, loc_U, scale_U, each_member=self.training)

        def losses_under(law: ValueLaw, rows: slice | Tensor = slice(None)) -> Tensor:
            of_values = law if candidates is None else self.copy_law(features[rows], candidates[rows], law)
            return of_values.axis_losses(loc_Y[..., rows], scale_Y[..., rows], values[rows], self.config.value_loss)

        if not len(values):
            losses = losses_under(ValueLaw())  # nothing to lose, under any law
        elif classes is None:
            losses = losses_under(self.value_law)
        else:
            names = list(self.config.class_values or {})
            met = classes.unique().tolist()
            rows = [(classes == place).nonzero().flatten() for place in met]
            parts = [losses_under(self.value_law_of(names[place]), of) for place, of in zip(met, rows, strict=True)]
            losses = torch.cat(parts, dim=-1)[..., torch.cat(rows).argsort()]
        if self.training:
            losses, loc_Y = losses.mean(0), loc_Y.mean(0)
        if group is None:
            return losses
        targets = self.value_transform.forward(values)
        loadings, left = self.value_loadings(*self.as_values_read(features, loc_U, scale_U))
        columns, law = [t.double() for t in (targets - loc_Y, loadings, left)], self.action.value_law
        order = group.argsort(stable=True)
        members, counts = group[order].unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        for count in counts[(members >= 0) & (counts > 1)].unique().tolist():
            first = starts[(members >= 0) & (counts == count)]
            places = order[first.unsqueeze(-1) + torch.arange(count, device=order.device)]  # [people, count]
            joint = value_marginal(law, *(column[places] for column in columns))
            share = (-joint / count).to(losses.dtype).unsqueeze(-1).expand(places.shape)
            losses = losses.index_copy(0, places.flatten(), share.flatten())
        return losses

    def value_loadings(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """What an individual's coordinates add to a value, scale W_reg [n, C], and the noise's scale [n], on the value axis.

        loc, scale: the law of U as the value head reads it.
        """
        left = self.action.value(torch.zeros_like(loc), self.value_noise.expand_as(scale))[1]
        return scale * self.action.value_linear[0][0], left

    @torch.no_grad()
    def decide(self, loc: Tensor, scale: Tensor, thresholds: Tensor, positions_at_once: int = 256) -> Tensor:
        """The `standard` decisions int64 [...] from the law of U' [..., C], some positions at a time."""
        action, words = self.action, self.vocabulary()
        columns = [t.reshape(-1, t.shape[-1]).split(positions_at_once) for t in (loc, scale, thresholds)]
        decisions = []
        for loc_part, scale_part, threshold_part in zip(*columns, strict=True):
            scores = action.score_loc(loc_part, words)
            scales = action.score_scale_of(scale_part, words)
            scores = decision_scores(scores, scales, threshold_part, vocabulary_mask=action.vocabulary_mask)
            decisions.append(decide(scores))
        return torch.cat(decisions).view(loc.shape[:-1])

    def _add_ovr(self, result: CausalQwenOutput, logits: Tensor, scales: Tensor, thresholds: Tensor) -> None:
        mask, law, slope = self.action.vocabulary_mask, self.action.law, self.action.score_slope
        log_p, _ = ovr_log_probs(upcast(logits), scales, thresholds, family=law.name, slope=slope)
        result.scale_S = graded_scale(logits, scales, thresholds, slope, law).expand(logits.shape)
        result.ovr_probs = log_p.exp().masked_fill(~mask, 0.0)
        result.decisions = decide(decision_scores(logits, scales, thresholds, vocabulary_mask=mask))

    def _readers(self, plan: CausalDecoding) -> tuple[QuantileReader, QuantileReader]:
        """How tokens and values read e1 and e2 under this plan (theory 3.9)."""
        config, action = self.config, self.action
        if plan.central_mass is not None:
            mass = plan.central_mass
            return QuantileReader(action.law, mass), QuantileReader(action.value_law, mass)
        of_tokens = QuantileReader(action.law, config.central_mass, action.draw_unit)
        return of_tokens, QuantileReader(action.value_law)
