"""The distribution of a value, as an object."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from causalqwen.decoding import Individual
from causalqwen.distributions import StableFamily, get_family
from causalqwen.files import batches, finite
from causalqwen.losses import quantile_crps
from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.chain import Chain
from causalqwen.numbers import CRPS_LEVELS, PLAIN, NumberStyle, ValueLaw, format_number, last_place
from causalqwen.numbers.law import LEVELS, ends_of_interval, level_of_quantile
from causalqwen.parts.copying import Candidates

logger = logging.get_logger(__name__)

_NOTHING_LEARNED = (
    "this graft has learned no numbers, and what it predicts follows from its start values alone: train it first, by "
    "`causalqwen train`, or in Python causalqwen.training.train(model, ...)"
)

ANNOUNCED = 0.5
"""From which P_NUM on a number counts as announced: `<NUM>`'s score is then likelier above its threshold than below."""

_AT_ONCE = 1024  # predictions, each of which may be scored by 199 quantiles
_MIXED = 200  # individuals that a prediction is mixed from where their Gaussian is all that is known


@dataclass(frozen=True)
class NumberPrediction:
    """One number's distribution, in the data's units: t(Y) ~ S(loc, scale), t the value transform.

    loc, scale: on the axis of the transform. num_prob: P_NUM, how sure the model is that a number comes here; None where
    nothing else can come: a regressor's rows.
    law: the transform, the family and the recalibration, that of the number's class where one was named.
    calibrated: of an individual, the distribution whose widths and levels were fitted on people held out: it gives quantiles
    and intervals, unless `raw`. The median and densities are what the model believes.
    """

    loc: float
    scale: float
    num_prob: float | None
    law: ValueLaw
    calibrated: "NumberPrediction | None" = field(default=None, kw_only=True, repr=False)

    def _of_intervals(self, raw: bool) -> "NumberPrediction":
        """The prediction whose quantiles are given."""
        return self if raw or self.calibrated is None else self.calibrated

    def _parameters(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.loc, dtype=torch.float64), torch.tensor(self.scale, dtype=torch.float64)

    @property
    def announced(self) -> bool:
        """Whether a number is expected here: P_NUM >= `ANNOUNCED`, or no P_NUM. Elsewhere the law was not learned."""
        return self.num_prob is None or self.num_prob >= ANNOUNCED

    @property
    def median(self) -> float:
        """t^-1(loc), exact; of a mixture its quantile at 1/2."""
        return self._quantile(0.5, False)

    def quantile(self, p: float, *, raw: bool = False) -> float:
        """Quantile at p in (0, 1), recalibrated where the model was trained with validation rows; `raw`: the law's own."""
        return self._of_intervals(raw)._quantile(p, raw)

    def _quantile(self, p: float, raw: bool) -> float:
        return self.law.quantile(*self._parameters(), p, raw=raw).item()

    def interval(self, level: float = 0.9, *, raw: bool = False) -> tuple[float, float]:
        """Central interval that covers `level` in (0, 1); recalibrated as `quantile`."""
        low, high = ends_of_interval(level)
        return self.quantile(low, raw=raw), self.quantile(high, raw=raw)

    def cdf(self, value: float) -> float:
        """P(Y <= value) under the model's own law."""
        return self._cdf(torch.tensor(value, dtype=torch.float64)).item()

    def _cdf(self, values: Tensor) -> Tensor:
        return self.law.cdf(*self._parameters(), values)

    def probabilities(self) -> dict[float, float]:
        """P(Y = v) of every possible value v under the model's own law; they sum to 1. ValueError where values are not known
        to lie on a bounded grid (`TrainSettings.support`)."""
        values = self.law.transform.support.values()
        if values is None:
            raise ValueError(
                "the values of this number are not finitely many, or more than 10,000: no bounded grid was seen, or given, in "
                "training"
            )
        below = [0.0, *(self.cdf(value) for value in values)]
        return {value: after - before for value, before, after in zip(values, below, below[1:], strict=False)}

    def log_prob(self, value: float) -> float:
        """Log density at `value`, per unit, under the model's own law; log P(Y = value) where that is not 0."""
        return self._log_prob(_observed(value)).item()

    def _log_prob(self, values: Tensor) -> Tensor:
        return self.law.log_prob(*self._parameters(), values)

    def _drawn_density(self, values: Tensor) -> Tensor:
        """Per unit, as a curve shows it."""
        return self._log_prob(values).exp()

    def crps(self, value: float) -> float:
        """CRPS at `value`, in units, lower is better: see `ValueLaw.crps`."""
        return self.law.crps(*self._parameters(), _observed(value)).item()

    def curve(self, points: int = 400, value: float | None = None) -> list[tuple[float, float, float]]:
        """Where the law is drawn: (y, density per unit, P(Y <= y)) at evenly spaced y, under the model's own law.

        They reach from the quantile at 2% to that at 98%, or to `value` where it lies no further out than those are apart, and
        5% further. On a grid, a y has the probability of its nearest value for a density. A bound that values do not pass has a
        probability, and no density: it is in P(Y <= y) alone.
        """
        support = self.law.transform.support
        ends = [self.quantile(p) for p in (0.02, 0.98)]
        apart = ends[1] - ends[0] or abs(ends[0]) or 1.0
        if value is not None and ends[0] - apart <= value <= ends[1] + apart:
            ends.append(value)
        margin = 0.05 * (max(ends) - min(ends) or apart)
        places = torch.linspace(min(ends) - margin, max(ends) + margin, points, dtype=torch.float64)
        low, high = (math.inf * sign if end is None else end for sign, end in ((-1, support.low), (1, support.high)))
        inside = (low < places) & (places < high)
        if support.step is not None:
            inside |= (places == low) | (places == high)
        density = torch.zeros_like(places)
        density[inside] = self._drawn_density(places[inside])
        return list(zip(places.tolist(), density.tolist(), self._cdf(places).tolist(), strict=True))

    def format(self, level: float | None = None, style: NumberStyle = PLAIN) -> str:
        """The median as text, with its interval where a level in (0, 1) is asked for: `351 K (90%: 338-364)`; as many digits as
        the interval (of 90% by default) supports, with the unit and the separators of a style."""
        low, high = self.interval(0.9 if level is None else level)
        place = last_place(self.median, high - low)
        median, low_text, high_text = (format_number(value, style, place) for value in (self.median, low, high))
        text = f"{style.before}{median}{style.after}"
        if level is None:
            return text
        return f"{text} ({100 * level:.4g}%: {low_text}{'-' if low >= 0 else ' to '}{high_text})"

    def __str__(self) -> str:
        text = self.format(0.9)
        if self.num_prob is None:
            return text
        return f"{text[:-1]}; P_NUM {self.num_prob:.3g}{'' if self.announced else ', no number is announced'})"

    def plot(self, value: float | None = None, axes: Any = None, unit: str = "") -> Any:
        """Density, intervals, and the truth where it is known, as matplotlib draws them: see `modeling.plots`."""
        from causalqwen.modeling.plots import plot_prediction  # whoever predicts need not load matplotlib

        return plot_prediction(self, value, axes, unit)

    def _repr_html_(self) -> str | None:
        try:
            from causalqwen.modeling.plots import as_html
        except ImportError:  # a notebook without matplotlib shows what `str` says
            return None
        return as_html(self)


def mixed_quantiles(stable: StableFamily, locs: Tensor, scale: Tensor, p: Tensor) -> Tensor:
    """Quantiles at p [...] of the mean over m of S(locs [..., m], scale [...]), by bisection."""
    reach = scale * stable.quantile(p)
    low, high = locs.amin(-1) + reach, locs.amax(-1) + reach
    for _ in range(80):
        middle = (low + high) / 2
        below = stable.cdf(middle.unsqueeze(-1), locs, scale.unsqueeze(-1)).mean(-1) < p
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class MixedNumberPrediction(NumberPrediction):
    """A number's distribution where several individuals are equally likely: t(Y) ~ mean over m of S(locs_m, scale).

    locs: float64 [m]; loc is their median.
    """

    locs: Tensor

    def _quantiles(self, p: Tensor) -> Tensor:
        return mixed_quantiles(self.law.stable, self.locs, torch.tensor(self.scale, dtype=torch.float64), p)

    def _quantile(self, p: float, raw: bool) -> float:
        level = level_of_quantile(p)
        level = level if raw else self.law.raw_p(level, self._parameters()[1])
        return self.law.transform.inverse(self._quantiles(level)).item()

    def _cdf(self, values: Tensor) -> Tensor:
        return self.law.cdf(self.locs, self._parameters()[1], values.unsqueeze(-1)).mean(-1)

    def _log_prob(self, values: Tensor) -> Tensor:
        of_each = self.law.log_prob(self.locs, self._parameters()[1], values.unsqueeze(-1))
        return of_each.logsumexp(-1) - math.log(len(self.locs))

    def crps(self, value: float) -> float:
        """From 199 quantiles, clipped as `ValueLaw.crps` does."""
        quantiles = self.law.clip(self.law.transform.inverse(self._quantiles(CRPS_LEVELS)))
        return quantile_crps(torch.tensor(value, dtype=torch.float64), quantiles, CRPS_LEVELS).item()


@dataclass(frozen=True)
class CopiedNumberPrediction(NumberPrediction):
    """A number's distribution where it may be one that stands in the context: F(y) = sum_j pi_j 1[y >= v_j] + pi_0 F_0(y).

    loc, scale: of F_0. law: F_0 and the candidates (float64 [m]) with their weights. At one of them the log density is the log
    of its probability.
    """

    law: Any

    def probabilities(self) -> dict[float, float]:
        """Probabilities of a new number, times pi_0, and of the numbers of the context, wherever they lie."""
        new = NumberPrediction(self.loc, self.scale, self.num_prob, self.law.of_new).probabilities()
        each = {value: p * self.law.weights()[0].item() for value, p in new.items()}
        for value, p in self.candidates:
            same = next((known for known in each if math.isclose(known, value, rel_tol=1e-9)), value)
            each[same] = each.get(same, 0.0) + p
        return dict(sorted(each.items()))

    def _drawn_density(self, values: Tensor) -> Tensor:
        """Of a new number alone, times pi_0: a copy has a probability, and no density."""
        of_new: Tensor = self.law.of_new.log_prob(*self._parameters(), values)
        return (self.law.log_weights[0] + of_new).exp()

    @property
    def candidates(self) -> list[tuple[float, float]]:
        """Value and probability of each number that stands in the context, as they stand there."""
        return list(zip(self.law.candidates.tolist(), self.law.weights()[1:].tolist(), strict=True))

    @property
    def copied(self) -> float | None:
        """The number of the context that has more than half of the probability; None where none has."""
        copied, value = self.law.copied()
        return value.item() if bool(copied) else None


def _observed(value: float) -> Tensor:
    if not math.isfinite(value):
        raise ValueError(f"a value must be a finite number, got {value!r}")
    return torch.tensor(value, dtype=torch.float64)


DESCRIBED = ("median", "intervals", "num_prob", "announced", "crps", "log_prob")


def describe(
    prediction: NumberPrediction, value: float | None, *, raw: bool = False, levels: Sequence[float] = LEVELS
) -> dict[str, Any]:
    """One prediction as plain data, `DESCRIBED`: num_prob and `announced` where there is one, crps and log_prob where the value
    is known."""
    intervals = [list(prediction.interval(level, raw=raw)) for level in levels]
    scores = {} if value is None else {"crps": prediction.crps(value), "log_prob": prediction.log_prob(value)}
    return _described(prediction, prediction.median, intervals, levels) | scores


def _described(
    prediction: NumberPrediction, median: float, intervals: Sequence[list[float]], levels: Sequence[float]
) -> dict[str, Any]:
    described = {"median": median, "intervals": dict(zip(map(str, levels), intervals, strict=True))}
    if prediction.num_prob is not None:
        described |= {"num_prob": prediction.num_prob, "announced": prediction.announced}
    return described


def describe_all(
    predictions: Sequence[NumberPrediction],
    values: Sequence[float | None] | None = None,
    *,
    raw: bool = False,
    levels: Sequence[float] = LEVELS,
) -> list[dict[str, Any]]:
    """`describe` of each, up to last bits; numbers of one law at once. values: one per prediction, None for none."""
    values = [None] * len(predictions) if values is None else values
    of_law: dict[int, list[int]] = {}
    entries: list[dict[str, Any]] = [{} for _ in predictions]
    for row, (prediction, value) in enumerate(zip(predictions, values, strict=True)):
        if type(prediction) is NumberPrediction:
            of_law.setdefault(id(prediction.law), []).append(row)
        else:  # a mixture: each has its own
            entries[row] = describe(prediction, value, raw=raw, levels=levels)
    for rows in itertools.chain.from_iterable(batches(rows, _AT_ONCE) for rows in of_law.values()):
        law = predictions[rows[0]].law
        each = [(predictions[row], predictions[row]._of_intervals(raw)) for row in rows]
        parameters = [(own.loc, own.scale, wide.loc, wide.scale) for own, wide in each]
        loc, scale, *of_intervals = torch.tensor(parameters, dtype=torch.float64).unbind(-1)
        calibrated = each[0][1].law  # of all of them, as `law`
        ends = [torch.stack(calibrated.interval(*of_intervals, level, raw=raw), -1).tolist() for level in levels]
        for row, median, *of_levels in zip(rows, law.quantile(loc, scale, 0.5).tolist(), *ends, strict=True):
            entries[row] = _described(predictions[row], median, of_levels, levels)
        known = [place for place, row in enumerate(rows) if values[row] is not None]
        observed = torch.stack([_observed(values[rows[place]]) for place in known]) if known else loc[:0]
        scored = (loc[known], scale[known], observed)
        scores = zip(known, law.crps(*scored).tolist(), law.log_prob(*scored).tolist(), strict=True)
        for place, crps, log_prob in scores:
            entries[rows[place]] |= {"crps": crps, "log_prob": log_prob}
    return entries


class Scored:
    """Predictions as plain data (`describe`), beside the values that were known: how far medians are off, and how many values
    lie in their 90% intervals."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.inside = 0

    def add(self, entry: dict[str, Any], value: float | None) -> None:
        """Count one, if its value is known and it has a median. An end of an interval may be None, for infinity."""
        if value is None or entry.get("median") is None:
            return
        low, high = entry["intervals"]["0.9"]
        self.errors.append(abs(entry["median"] - value))
        self.inside += (low is None or low <= value) and (high is None or value <= high)

    @property
    def plain(self) -> dict[str, Any]:
        """values: how many; median_error; coverage of 90% intervals. Empty where no value was known."""
        if not self.errors:
            return {}
        count = len(self.errors)
        return {"values": count, "median_error": statistics.median(self.errors), "coverage": self.inside / count}

    def __str__(self) -> str:
        return how_well(*self.plain.values()) if self.errors else ""


def how_well(values: int, median_error: float, coverage: float) -> str:
    """Scores in words: "typically off by 1,500; 90% intervals held 93% of 15 values"."""
    place = None if median_error == 0 else math.floor(math.log10(median_error)) - 1
    off = format_number(median_error, NumberStyle(group=","), place)
    return f"typically off by {off}; 90% intervals held {coverage:.0%} of {values:,} value{'s' * (values != 1)}"


def prediction_to_dict(
    prediction: NumberPrediction,
    value: float | None = None,
    levels: Sequence[float] = LEVELS,
    points: int | None = None,
    beside: float | None = None,
    *,
    raw: bool = False,
) -> dict[str, Any]:
    """A law as plain data, None for what is infinite. value: the true one. points: of its curve. beside: a value that the curve
    reaches too."""
    entry = describe(prediction, value, raw=raw, levels=levels)
    if value is not None:
        entry["pit"] = prediction.cdf(value)
    if points is not None:
        columns = zip(*prediction.curve(points, value if beside is None else beside), strict=True)
        entry["curve"] = dict(zip(("value", "density", "cdf"), map(list, columns), strict=True))
    return finite(entry)


@torch.no_grad()
def predict_number(
    model: GraftedModel,
    prompts: str | Sequence[str],
    batch_size: int = 32,
    *,
    individual: Individual | None = None,
    classes: str | Sequence[str | None] | None = None,
) -> list[NumberPrediction]:
    """What number follows each prompt, as a distribution; a `CopiedNumberPrediction` where the model copies and the prompt
    holds numbers. A graft that has learned no numbers warns, once.

    Args:
        prompts: texts that end where the number would start ("The boiling point of water is"); a trailing space is
            dropped, because `<NUM>` brings its own.
        individual: whom the number is about; the population average by default. Whatever is not known about somebody who was
            inferred is integrated out. Somebody who was inferred from words counts as the population average, because
            training never learned how numbers follow from words; `abduct(likelihood="values")` infers people from numbers.
        classes: the class of each number, or one for all, by which intervals are recalibrated and, where classes have axes
            of their own, the number is read. None for `number_class`, and where that is None too, for the model's own
            recalibration. Numbers about an individual are of `number_class`, and are recalibrated on people held out.

    Raises:
        ValueError: an empty prompt, or one longer than the context, by its index; an individual whose numbers are a
            mixture, asked of a model that copies; a class that the model does not know, or not as many classes as prompts.
    """
    if not model.reads_numbers:
        logger.warning_once(_NOTHING_LEARNED)
    if individual is not None:
        individual.check_size(model.config.causal_size)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: a forward pass takes one prompt at least")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    names = [classes] * len(prompts) if classes is None or isinstance(classes, str) else list(classes)
    if len(names) != len(prompts):
        raise ValueError(f"expected one class per prompt, got {len(names)} for {len(prompts)}")
    for name in dict.fromkeys(names):
        model.value_axes.check(name)  # an unknown class stops it here
    lengths = _lengths(model, prompts)
    predictions: list[NumberPrediction | None] = [None] * len(prompts)
    padded: dict[str, Any] = {"prompt": True, "padding": True, "padding_side": "left", "return_tensors": "pt"}
    was_training = model.training
    model.eval()
    with model.frozen_vocabulary():
        for rows in batches(sorted(range(len(prompts)), key=lengths.__getitem__), batch_size):
            inputs = dict(model.processor([prompts[row] for row in rows], **padded).to(model.device))
            position_ids = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            features = model.features(**inputs, position_ids=position_ids).last_hidden_state
            offered = model.candidates(features, **inputs)
            last = None if offered is None else offered[:, -1]
            predicted = predict_values(model, features[:, -1], individual, last, [names[row] for row in rows])
            for row, prediction in zip(rows, predicted, strict=True):
                predictions[row] = prediction
    model.train(was_training)
    return predictions


def _lengths(model: GraftedModel, prompts: list[str]) -> list[int]:
    """How many tokens each prompt has. ValueError for an empty one, or one longer than the context, by its index."""
    limit = model.config.context_length
    encoded = model.processor(prompts, prompt=True) if prompts else {"input_ids": []}
    lengths = [len(ids) for ids in encoded["input_ids"]]
    for row, length in enumerate(lengths):
        if length == 0:
            raise ValueError(f"prompt {row} is empty")
        if limit is not None and length > limit:
            raise ValueError(f"prompt {row} has {length} tokens, but the context of this model holds {limit}")
    return lengths


@torch.no_grad()
def predict_values(
    model: GraftedModel,
    features: Tensor,
    individual: Individual | None = None,
    candidates: Candidates | None = None,
    classes: Sequence[str | None] | None = None,
) -> list[NumberPrediction]:
    """The number that `individual` says after each of the features [n, H], as `predict_number` does after prompts. candidates:
    the numbers that each may be a copy of. classes: one per row."""
    chain = Chain(model, features)
    (loc, scale), prob = (column.tolist() for column in chain.value()), chain.number.log_p()[0].exp().tolist()
    if individual is not None and individual.knows_values:
        check_speaker(model.config, individual)
        plain = _of_individual(chain, individual, prob, model.value_law)
        if (fitted := model.config.individual_levels) is not None:
            wide = _of_individual(chain, individual, prob, model.value_law, fitted)
            plain = [replace(own, calibrated=other) for own, other in zip(plain, wide, strict=True)]
    else:
        names = classes or [None] * len(features)
        laws = {name: model.value_axes.law(name) for name in set(names)}
        parameters = zip(loc, scale, prob, strict=True)
        plain = [NumberPrediction(*parameter, laws[name]) for parameter, name in zip(parameters, names, strict=True)]
    if candidates is None:
        return plain
    return or_copied(plain, model.copy_law(features, candidates, ValueLaw()).to("cpu"))


def or_copied(of_new: Sequence[NumberPrediction], copies: Any) -> list[NumberPrediction]:
    """Predictions of new numbers, and of copies where a row is offered some. copies: the law of all rows, without that of a new
    number."""

    def copied(new: NumberPrediction, row: int) -> NumberPrediction:
        law = copies.of_row(row, new.law)
        wide = None if new.calibrated is None else copied(new.calibrated, row)
        return new if law is new.law else CopiedNumberPrediction(new.loc, new.scale, new.num_prob, law, calibrated=wide)

    return [copied(new, row) for row, new in enumerate(of_new)]


def check_speaker(config: Any, individual: Individual | None) -> None:
    """ValueError for somebody whose numbers have a mixture for a law, where the model mixes copies with a single one."""
    if individual is not None and individual.knows_values and _is_mixed(individual, get_family(config.value_family)):
        config.require("the number of somebody known by draws")


def _is_mixed(individual: Individual, law: StableFamily) -> bool:
    return individual.draws is not None or (individual.precision is not None and law.alpha != 2)


def _of_individual(
    chain: Chain, individual: Individual, prob: list[float], law: ValueLaw, fitted: Any = None
) -> list[NumberPrediction]:
    """Predictions about an individual at positions [n]: what the model believes, or with factors and levels that were fitted
    on people held out."""
    who, noise, levels = (1.0, 1.0, None) if fitted is None else (fitted[key] for key in ("who", "noise", "levels"))
    law = replace(law, interval_levels=None if levels is None else tuple(levels), interval_kinds=())
    loadings, left = (t.double().cpu() for t in chain.value_loadings())
    left = noise * left
    centre = chain.value()[0].double().cpu()
    if not _is_mixed(individual, law.stable):
        known = law.stable.quantile(individual.factor)
        loc, spread = centre + loadings @ known, left
        if individual.precision is not None:  # Gaussian: what is not known about them adds to the noise
            upper = torch.linalg.cholesky(individual.precision)
            open_ = torch.linalg.solve_triangular(upper, loadings.T, upper=False).square().sum(0)
            spread = (left.square() + who**2 * open_).sqrt()
        return [NumberPrediction(*entry, law) for entry in zip(loc.tolist(), spread.tolist(), prob, strict=True)]
    known = law.stable.quantile(torch.special.ndtr(individual.likely(_MIXED)))
    locs = centre.unsqueeze(-1) + loadings @ known.T
    middle = locs.median(-1, keepdim=True).values
    locs = middle + who * (locs - middle) if fitted else locs  # else to the last bit
    return [
        MixedNumberPrediction(loc, width, p, law, row)
        for loc, row, width, p in zip(middle.flatten().tolist(), locs, left.tolist(), prob, strict=True)
    ]
