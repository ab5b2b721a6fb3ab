"""The distribution of a value, as an object."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from causalqwen.decoding import Individual
from causalqwen.losses import quantile_crps
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.copying import Candidates
from causalqwen.modeling.processor import CausalQwenProcessor
from causalqwen.numbers import (
    CRPS_LEVELS,
    PLAIN,
    NumberStyle,
    ValueLaw,
    ValueTransform,
    format_number,
    last_place,
    round_significant,
)
from causalqwen.numbers.copies import CopyLaw
from causalqwen.numbers.law import ClassLaws, ends_of_interval, level_of_quantile

_MIXED = 200  # individuals that a prediction is mixed from where their Gaussian is all that is known


@dataclass(frozen=True)
class NumberPrediction:
    """One number's distribution, in the data's units: t(Y) ~ S(loc, scale), t the value transform.

    loc, scale: on the axis of the transform. num_prob: P_NUM, how sure the model is that a number comes here.
    law: the transform, the family and the recalibration, that of the number's class where one was named.
    """

    loc: float
    scale: float
    num_prob: float
    law: ValueLaw

    def _parameters(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.loc, dtype=torch.float64), torch.tensor(self.scale, dtype=torch.float64)

    @property
    def median(self) -> float:
        """t^-1(loc), exact."""
        return self.law.quantile(*self._parameters(), 0.5).item()

    def quantile(self, p: float, *, raw: bool = False) -> float:
        """Quantile at p in (0, 1); recalibrated on validation rows where there were some, unless `raw`."""
        return self.law.quantile(*self._parameters(), p, raw=raw).item()

    def interval(self, level: float = 0.9, *, raw: bool = False) -> tuple[float, float]:
        """Central interval that covers `level` in (0, 1); recalibrated as `quantile`."""
        low, high = self.law.interval(*self._parameters(), level, raw=raw)
        return low.item(), high.item()

    def cdf(self, value: float) -> float:
        """P(Y <= value) under the model's own law."""
        return self.law.cdf(*self._parameters(), torch.tensor(value, dtype=torch.float64)).item()

    def log_prob(self, value: float) -> float:
        """Log density at `value`, per unit, under the model's own law."""
        return self.law.log_prob(*self._parameters(), torch.tensor(value, dtype=torch.float64)).item()

    def crps(self, value: float) -> float:
        """CRPS at `value`, in units, lower is better: see `ValueLaw.crps`."""
        return self.law.crps(*self._parameters(), torch.tensor(value, dtype=torch.float64)).item()

    def format(self, level: float | None = None, style: NumberStyle = PLAIN) -> str:
        """The median as text, with its interval where a level in (0, 1) is asked for: `351 K (90%: 338-364)`.

        As many digits as the interval (of 90% by default) supports, and unit and separators of a style: see
        `NumberStyle.of`, which reads them from the data.
        """
        low, high = self.interval(level or 0.9)
        place = last_place(self.median, high - low)
        median, low_text, high_text = (format_number(value, style, place) for value in (self.median, low, high))
        told = f"{style.before}{median}{style.after}"
        if level is None:
            return told
        return f"{told} ({100 * level:.4g}%: {low_text}{'-' if low >= 0 else ' to '}{high_text})"

    def __str__(self) -> str:
        return f"{self.format(0.9)[:-1]}; P_NUM {self.num_prob:.3g})"


@dataclass(frozen=True)
class MixedNumberPrediction(NumberPrediction):
    """A number's distribution where several individuals are equally likely: t(Y) ~ mean over m of S(locs_m, scale).

    locs: float64 [m], on the axis of the transform; loc is their median. Never recalibrated: levels were fitted for nobody
    in particular.
    """

    locs: Tensor

    def _cdf(self, axis: Tensor) -> Tensor:
        """[...] -> mean over the individuals of P(t(Y) <= axis)."""
        scale = torch.tensor(self.scale, dtype=torch.float64)
        return self.law.law.cdf(axis.unsqueeze(-1), self.locs, scale).mean(-1)

    def _quantiles(self, p: Tensor) -> Tensor:
        """On the axis, by bisection; p [...]."""
        reach = self.scale * self.law.law.quantile(p)
        low, high = self.locs.min() + reach, self.locs.max() + reach
        for _ in range(80):
            middle = (low + high) / 2
            below = self._cdf(middle) < p
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def quantile(self, p: float, *, raw: bool = False) -> float:
        axis = self._quantiles(level_of_quantile(p))
        return self.law.transform.inverse(axis).item()

    def interval(self, level: float = 0.9, *, raw: bool = False) -> tuple[float, float]:
        low, high = ends_of_interval(level)
        return self.quantile(low), self.quantile(high)

    def cdf(self, value: float) -> float:
        return self.law.cdf(self.locs, *self._each(value)).mean().item()

    def log_prob(self, value: float) -> float:
        return (self.law.log_prob(self.locs, *self._each(value)).logsumexp(-1) - math.log(len(self.locs))).item()

    def _each(self, value: float) -> tuple[Tensor, Tensor]:
        """Scale and value, once for every individual."""
        return torch.full_like(self.locs, self.scale), torch.full_like(self.locs, value)

    def crps(self, value: float) -> float:
        """From 199 quantiles, clipped as `ValueLaw.crps` does."""
        quantiles = self.law.clip(self.law.transform.inverse(self._quantiles(CRPS_LEVELS)))
        return quantile_crps(torch.tensor(value, dtype=torch.float64), quantiles, CRPS_LEVELS).item()


@dataclass(frozen=True)
class CopiedNumberPrediction(NumberPrediction):
    """A number's distribution where it may be one that stands in the context: F(y) = sum_j pi_j 1[y >= v_j] + pi_0 F_0(y).

    loc, scale: of F_0, on the axis of the transform. law: F_0 and the candidates (float64 [m]) with their weights; quantiles
    are exact, and the log density at a candidate is the log of its probability.
    """

    law: CopyLaw  # type: ignore[assignment]

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def candidates(self) -> list[tuple[float, float]]:
        """Value and probability of each number that stands in the context, as they stand there."""
        weights = self.law.log_weights[1:].exp()
        return list(zip(self.law.candidates.tolist(), weights.tolist(), strict=True))

    @property
    def copied(self) -> float | None:
        """The number of the context that has more than half of the probability; None where none has."""
        copied, value = self.law.copied()
        return value.item() if bool(copied) else None


class NumberPredictionMixin:
    """`predict_number` for a grafted model."""

    config: CausalQwenConfig
    processor: CausalQwenProcessor

    number_class: str | None = None
    """The class of numbers that are not said to be of another; it is not kept in a checkpoint."""

    @property
    def value_transform(self) -> ValueTransform:
        """The map between values and the axis of the value head, see `value_law`."""
        return self.value_law.transform

    @property
    def value_law(self) -> ValueLaw:
        """What turns (loc_Y, scale_Y) into medians, intervals and scores in the data's units, with the model's own levels; the
        law of `number_class`, where that is set.

        ValueError where classes have axes of their own, and `number_class` is not set.
        """
        return self._law_of_class(None)

    @overload
    def value_law_of(self, classes: str | None) -> ValueLaw: ...

    @overload
    def value_law_of(self, classes: Sequence[str | None]) -> ValueLaw | ClassLaws: ...

    def value_law_of(self, classes: str | Sequence[str | None] | None) -> ValueLaw | ClassLaws:
        """`value_law` of a class: with its levels and, where classes have axes of their own, on its axis; of a sequence, that
        of each row's class.

        None stands for `number_class`, and, where that is None too, for the model's own levels, as does a class that had too
        few rows. ValueError for a class that the model does not know, and for none where it needs one.
        """
        if classes is None or isinstance(classes, str):
            return self._law_of_class(classes)
        names = list(dict.fromkeys(classes)) or [next(iter(self.config.class_values or {}), None)]
        laws = tuple(self._law_of_class(name) for name in names)
        if all(law == laws[0] for law in laws):
            return laws[0]
        place = {name: index for index, name in enumerate(names)}
        return ClassLaws(laws, torch.tensor([place[name] for name in classes]))

    def _law_of_class(self, name: str | None) -> ValueLaw:
        levels, axis = self.levels_of_class(name), self._axis_of_class(name)
        span = axis["value_range"]
        return ValueLaw(
            ValueTransform(**(axis["value_transform"] or {})),
            self.config.value_family,
            (span[0], span[1]) if span else None,
            tuple(levels) if levels else None,
        )

    def levels_of_class(self, name: str | None) -> list[float] | None:
        """The interval levels of a class, or the model's own, see `value_law_of`, which raises the same."""
        axes, levels = self.config.class_values or {}, self.config.class_interval_levels or {}
        known, name = axes or levels, self._class_or_own(name)
        if name is not None and name not in known:
            found = ", ".join(known) or "none"
            raise ValueError(f"unknown class {name!r}; the classes of this model's numbers: {found}")
        if name is None and axes:
            raise ValueError(
                f"the classes of this model's numbers have axes of their own: name one of {', '.join(axes)}, for each number "
                "or as the model's number_class"
            )
        return levels.get(name or "") or self.config.interval_levels

    def _class_or_own(self, name: str | None) -> str | None:
        return self.number_class if name is None else name

    def _axis_of_class(self, name: str | None) -> dict[str, Any]:
        """value_transform, value_range and value_place."""
        config, name = self.config, self._class_or_own(name)
        if config.class_values and name is not None:
            return config.class_values[name]
        return {key: getattr(config, key) for key in ("value_transform", "value_range", "value_place")}

    def generated_values(self, loc_Y: Tensor) -> Tensor:
        """What a text says where the value axis is at loc_Y: t^-1, to `value_digits` digits and no finer than `value_place`."""
        values = self.value_transform.inverse(loc_Y)
        return round_significant(values, self.config.value_digits, self._axis_of_class(None)["value_place"])

    @torch.no_grad()
    def predict_number(
        self,
        prompts: str | Sequence[str],
        batch_size: int = 32,
        *,
        individual: Individual | None = None,
        classes: str | Sequence[str | None] | None = None,
    ) -> list[NumberPrediction]:
        """What number follows each prompt, as a distribution.

        Args:
            prompts: texts that end where the number would start ("The boiling point of water is"); a trailing space is
                dropped, because `<NUM>` brings its own.
            batch_size: prompts per forward pass.
            individual: who it is about; nobody in particular by default. What is not known about them, where they were
                inferred, is integrated out. Who was inferred from words is nobody in particular here: how far their numbers
                follow from their words was never learned (`likelihood="values"` infers from numbers).
            classes: of which class each number is, or all are: its intervals are then recalibrated for that class, and it is
                read on that class's axis, where classes have axes of their own. None for `number_class`, or else the model's
                own recalibration. What is predicted about an individual is never recalibrated, and is of `number_class`.

        Returns:
            one `NumberPrediction` per prompt, in their order; of a model that copies, a `CopiedNumberPrediction` where numbers
            stand in the prompt.

        Raises:
            ValueError: an empty prompt, or one longer than the context, by its index; an individual whose numbers are known,
                asked of a model that copies; a class that the model does not know, or not as many classes as prompts.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        names = [classes] * len(prompts) if classes is None or isinstance(classes, str) else list(classes)
        if len(names) != len(prompts):
            raise ValueError(f"expected one class per prompt, got {len(names)} for {len(prompts)}")
        for name in set(names):
            self.levels_of_class(name)  # an unknown class stops it here
        processor = self.processor
        limit = getattr(self.config.text_config, "max_position_embeddings", None)
        encoded = processor(prompts, prompt=True) if prompts else {"input_ids": []}
        lengths = [len(ids) for ids in encoded["input_ids"]]
        for row, length in enumerate(lengths):
            if length == 0:
                raise ValueError(f"prompt {row} is empty")
            if limit is not None and length > limit:
                raise ValueError(f"prompt {row} has {length} tokens, but the context of this model holds {limit}")
        order = sorted(range(len(prompts)), key=lambda row: lengths[row])
        predictions: list[NumberPrediction | None] = [None] * len(prompts)
        was_training = self.training
        self.eval()
        with self.standing():
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                batch = processor(
                    [prompts[row] for row in rows], prompt=True, padding=True, padding_side="left", return_tensors="pt"
                )
                inputs = dict(batch.to(self.device))
                position_ids = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
                features = self.features(**inputs, position_ids=position_ids).last_hidden_state
                offered = self.candidates(features, **inputs)[:, -1] if self.config.copy_numbers else None
                found = self.predict_values(features[:, -1], individual, offered, [names[row] for row in rows])
                for row, prediction in zip(rows, found, strict=True):
                    predictions[row] = prediction
        self.train(was_training)
        return predictions

    @torch.no_grad()
    def predict_values(
        self,
        features: Tensor,
        individual: Individual | None = None,
        candidates: Candidates | None = None,
        classes: Sequence[str | None] | None = None,
    ) -> list[NumberPrediction]:
        """The number that `individual` says after each of the features [n, H], as `predict_number` does after prompts.

        candidates: the numbers that each may be a copy of; None for none. classes: one per row; None for none.
        """
        result = self.heads(features[None], skip_logits=True)
        loc, scale, prob = (column[0].tolist() for column in (result.loc_Y, result.scale_Y, result.num_prob))
        if individual is not None and individual.knows_values:
            self.config.require("the number that an individual says", copy_numbers=False)
            return self._of_individual(features, individual, prob)
        names = classes or [None] * len(features)
        laws = {name: self._law_of_class(name) for name in set(names)}
        parameters = zip(loc, scale, prob, strict=True)
        plain = [NumberPrediction(*one, laws[name]) for one, name in zip(parameters, names, strict=True)]
        if candidates is None:
            return plain
        copies = self.copy_law(features, candidates, ValueLaw())  # each row's own law takes its place below
        columns = (candidates.offered.cpu(), copies.candidates.cpu(), copies.log_weights.cpu().double())
        found = []
        for one, offered, values, log_weights in zip(plain, *columns, strict=True):
            if bool(offered.any()):
                kept = torch.cat([log_weights[:1], log_weights[1:][offered]])
                of_text = CopyLaw(one.law, values[offered], kept)
                one = CopiedNumberPrediction(one.loc, one.scale, one.num_prob, of_text)
            found.append(one)
        return found

    def _of_individual(self, features: Tensor, individual: Individual, prob: list[float]) -> list[NumberPrediction]:
        """Predictions after features [n, H] about an individual."""
        law = replace(self.value_law, interval_levels=None)
        loc, scale = self.as_values_read(features, *self.abduction(features))
        loadings, left = (t.double().cpu() for t in self.value_loadings(loc, scale))
        centre = self.action.value(loc, scale)[0].double().cpu()
        if individual.draws is None and (individual.precision is None or law.law.alpha == 2):
            known = law.law.quantile(individual.factor)
            found, spread = centre + loadings @ known, left
            if individual.precision is not None:  # Gaussian: what is not known about them adds to the noise
                upper = torch.linalg.cholesky(individual.precision)
                open_ = torch.linalg.solve_triangular(upper, loadings.T, upper=False).square().sum(0)
                spread = (left.square() + open_).sqrt()
            pairs = zip(found.tolist(), spread.tolist(), prob, strict=True)
            return [NumberPrediction(*pair, law) for pair in pairs]
        known = law.law.quantile(torch.special.ndtr(individual.likely(_MIXED)))
        locs = centre.unsqueeze(-1) + loadings @ known.T
        return [
            MixedNumberPrediction(row.median().item(), width, p, law, row)
            for row, width, p in zip(locs, left.tolist(), prob, strict=True)
        ]
