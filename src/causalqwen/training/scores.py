"""The documents' metrics (overview 5), always under the `standard` decision, from facts and the current heads."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from causalqwen.decoding import BoundDecoding, CausalDecoding
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.chain import Chain
from causalqwen.numbers import ClassLaws, ValueLaw
from causalqwen.numbers.law import LEVELS, rows_of_classes
from causalqwen.parts.copying import AnyLaw, Candidates, joined
from causalqwen.training import ranks
from causalqwen.training.batches import rows_of_people
from causalqwen.training.features import COLUMNS, FactStore, TokenFacts, known_of_number

_STATISTICS_SAMPLE = 200_000
_AT_ONCE = 4096  # numbers of people
_OF_ONE = 256  # numbers of one person whose joint likelihood is taken: it costs their square


@torch.no_grad()
def score_tokens(
    model: CausalQwenForCausalLM,
    blocks: Iterable[TokenFacts],
    *,
    split: bool = False,
    classes: Sequence[str | None] | None = None,
    watched: bool = True,
) -> dict[str, Any]:
    """Scores of the model over facts: language, numbers found, values, and the state of U.

    split: the blocks are this rank's `share`; every rank gets the scores of all.
    classes: of the numbers, in the order of the blocks (`number_classes`): laws are then those of each number's class; a
    model that knows no class has its own for all.
    watched: look at drawn individuals too, which takes longest.

    Returns:
        `metrics`: loss, cls_loss, reg_loss, accuracy (any right token is right), num_count, num_precision, num_recall, num_f1,
        ovr_sum_median; on positions whose next token is a word, mean nats of the softmax over loc_S (softmax_nll), of the
        normalised P_k (ovr_nll) and of the backbone (backbone_nll); perplexity and ovr_perplexity, e to the first two;
        backbone_agreement, how often the decision is the backbone's argmax; and, where there are numbers, those of
        `score_values`, announced, how often one of the value_count numbers is announced by the decision, and two that join
        words and numbers (architecture 4.3.3): consistency, how often a number is announced and lies in its 90% interval;
        combined, the mean of accuracy and of 1 - mae / (the mae of these numbers' own median). Where the model copies, values
        are scored under the mixture, and `copied` is the share of them whose answer is a number of the context (more than half
        of the probability). Where classes are named, `classes` holds the scores of each by name (`score_classes`; own_levels:
        whether it has levels of its own). Where a domain is asked, domain_divergence and its largest value: D(U, U_base).
        `dist`: mean, median, std and iqr of loc_U, scale_U and |b_noise|, ||b_noise|| / ||scale_U|| (noise_to_scale; lengths a
        coordinate), and the median sum of P_k, keys as in overview 5.4;
        beside it that of one drawn individual (`individual_prob_sums`), at 64 positions of each block, if `watched`.
        `values`: loc, scale (on the axis) and value of every number, float64 [n] each, for plots and rivals, and interval
        [n, 3], the median and both ends at 90%, in the data's units; where the model copies, also `stands`, whether the value
        stands in the context (loc and scale are those of a new number).
        `law`: that of a new number, of each one's class.
    """
    was_training = model.training
    model.eval()
    parts = [ranks.on_whole(model, _score_block, facts, watched) for facts in blocks]
    parts = ranks.joined(parts) if split else parts
    model.train(was_training)
    columns = {name: [part[name] for part in parts if name in part] for name in dict.fromkeys(itertools.chain(*parts))}
    column = {name: torch.cat(parts) for name, parts in columns.items() if name not in ("of_text", "pi")}
    if not len(column["cls_loss"]):
        raise ValueError("nothing to score: no token of these rows follows another")
    dist = _states(column, parts[0]["noise"])
    metrics: dict[str, Any] = {
        "cls_loss": column["cls_loss"].double().mean().item(),
        "accuracy": column["right"].double().mean().item(),
        "ovr_sum_median": dist["ovr_prob_sum_median"],
        **_number_detection(column["is_num"], column["decided_num"]),
    }
    words = ~column["is_num"]
    if bool(words.any()):
        nats = {name: column[name][words].double().mean().item() for name in ("softmax_nll", "ovr_nll", "backbone_nll")}
        perplexity = {"perplexity": math.exp(nats["softmax_nll"]), "ovr_perplexity": math.exp(nats["ovr_nll"])}
        metrics |= nats | perplexity | {"backbone_agreement": column["agrees"].double().mean().item()}
    of_new = law_of_new(model, classes)
    values = {name: column[name].double() for name in ("loc", "scale", "value")}
    reg_loss = _score_numbers(model, of_new, column, columns, values, metrics, classes) if len(values["value"]) else 0.0
    metrics["reg_loss"] = reg_loss
    metrics["loss"] = metrics["cls_loss"] + model.config.value_loss_weight * reg_loss
    if (away := column.get("distance")) is not None:
        metrics |= {"domain_divergence": away.mean().item(), "domain_divergence_max": away.max().item()}
    return {"metrics": metrics, "dist": dist, "values": values, "law": of_new}


def _states(column: dict[str, Tensor], noise: Tensor) -> dict[str, float]:
    """Statistics of U and of the noise, and median sums of P_k, by their names in `score_tokens`."""
    dist: dict[str, float] = {}
    for name, sample in (("U_loc", column["U_loc"]), ("U_scale", column["U_scale"]), ("noise", noise)):
        dist |= {f"{name}_{key}": number for key, number in _statistics(sample).items()}
    dist["noise_to_scale"] = float(
        noise.double().square().mean().sqrt() / column["U_scale"].double().square().mean().sqrt()
    )
    dist["ovr_prob_sum_median"] = column["prob_sum"].median().item()
    if "individual_sum" in column:
        dist["ovr_prob_sum_individual_median"] = column["individual_sum"].double().median().item()
    return dist


def _score_numbers(
    model: CausalQwenForCausalLM,
    of_new: ValueLaw | ClassLaws,
    column: dict[str, Tensor],
    parts: dict[str, list[Tensor]],
    values: dict[str, Tensor],
    metrics: dict[str, Any],
    classes: Sequence[str | None] | None,
) -> float:
    """Mean loss of the numbers; what else is known of them is added to `metrics` and `values`."""
    law: AnyLaw = of_new
    loc, scale, value = (values[name] for name in ("loc", "scale", "value"))
    if model.copies:
        law = joined(of_new, parts["of_text"], parts["pi"])
        values["stands"] = law.stands(value)
        metrics["copied"] = column["copied"].double().mean().item()
    metrics |= score_values(law, loc, scale, value)
    if classes and any(classes):
        known = model.config.class_interval_levels or {}
        of_classes = score_classes(law, loc, scale, value, classes).items()
        metrics["classes"] = {name: scores | {"own_levels": known.get(name) is not None} for name, scores in of_classes}
    low, high = law.interval(loc, scale, 0.9)
    values["interval"] = torch.stack([law.quantile(loc, scale, 0.5), low, high], dim=1)
    inside = (low <= value) & (value <= high)
    metrics["consistency"] = (inside & column["announced"]).double().mean().item()
    metrics["value_count"] = len(value)
    metrics["announced"] = column["announced"].double().mean().item()
    spread = (value - value.median()).abs().mean().item()
    metrics["combined"] = (metrics["accuracy"] + 1 - metrics["mae"] / max(spread, 1e-300)) / 2
    return law.axis_losses(loc, scale, value, model.config.value_loss).mean().item()


def law_of_new(model: CausalQwenForCausalLM, classes: Sequence[str | None] | None) -> Any:
    """The law of numbers [n] that no context holds, that of each one's class where classes have their own levels or axes."""
    of_classes = model.config.class_interval_levels or model.value_axes.apart
    return model.value_axes.laws(classes) if of_classes else model.value_law


def numbers_of(
    store: FactStore, owners: Sequence[str | None], keep: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Positions [n] of the numbers of kept rows, and whose each is [n], as `joint_losses` counts them; owners, keep: as
    there."""
    groups, people = rows_of_people(owners)
    owner = np.empty(len(store), dtype=np.int64)
    for index, rows in enumerate(groups):
        owner[rows] = index if index < people else people - 1 - index
    at = np.flatnonzero(store.facts.learned)
    at = at if keep is None else at[keep.numpy()]
    return at, owner[np.repeat(np.arange(len(store)), np.diff(store.offsets))[at]]


@torch.no_grad()
def joint_losses(
    model: CausalQwenForCausalLM, store: FactStore, owners: Sequence[str | None], keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """L_reg float64 [n] of the numbers of kept rows, where those of one individual are charged equal shares of their joint
    likelihood with e1 integrated out (theory 3.14); their values [n]; and whose each is, int64 [n]: individuals are counted
    from 0, rows of nobody's from -1 down. More than `_OF_ONE` numbers of one are taken in parts, as if of several.

    owners: whose each row is. keep: bool, which of the rows' numbers are looked at, all by default.
    """
    facts, (at, whose) = store.facts, numbers_of(store, owners, keep)
    order, people = np.argsort(whose, kind="stable"), int(whose.max(initial=-1)) + 1
    features, values, losses = facts.tensor("features"), torch.from_numpy(facts.values[at]), np.empty(len(at))
    was_training = model.training
    model.eval()
    ends = np.flatnonzero(np.diff(whose[order], append=people)) + 1  # after each person's
    begins = np.concatenate([[0], ends[:-1]])
    last = np.concatenate(
        [[*range(first + _OF_ONE, end, _OF_ONE), end] for first, end in zip(begins, ends, strict=True)]
    )
    start = 0
    while start < len(order):
        end = last[np.searchsorted(last, min(start + _AT_ONCE, len(order)))]  # whole parts
        part = order[start:end]
        parts = np.searchsorted(last, np.arange(start, end), side="right")
        group = torch.from_numpy(np.where(whose[part] < 0, -1, parts)).to(model.device)
        of = features[at[part]].to(model.device), values[part].to(model.device), group
        losses[part], start = model.value_losses(*of).double().cpu().numpy(), end
    model.train(was_training)
    return torch.from_numpy(losses), values, torch.from_numpy(whose)


def _score_block(model: CausalQwenForCausalLM, facts: TokenFacts, watched: bool) -> dict[str, Tensor]:
    num_id = model.config.num_token_id
    features = facts.tensor("features").to(model.device)
    column = {name: facts.tensor(name) for name in COLUMNS if name != "features"}
    chain = Chain(model, features)
    known_of_number(chain, *(column[name].to(model.device) for name in ("num_scale", "threshold")))
    log_num, log_not_num = (term.cpu() for term in chain.number.log_p())
    num_score, num_logit = (term.cpu() for term in (chain.number.decision_scores(), chain.number.loc))
    is_num = column["targets"] == num_id
    ahead = (num_score > column["rival_score"]) | ((num_score == column["rival_score"]) & (num_id < column["rival_id"]))
    decision = torch.where(ahead, num_id, column["rival_id"])
    prob_sum = column["rest_prob_sum"] + log_num.exp()
    numbers = is_num & column["values"].isfinite()
    loc_Y, scale_Y = Chain(model, facts.features_at(numbers).to(model.device)).value()
    some = Chain(model, features[:: max(1, features.numel() // 50_000)])
    network = model.abduction.asked
    beside = {} if network is None else {"distance": network.distance(chain.features).cpu()}
    if facts.numbers is not None:
        offered = Candidates(**facts.numbers.candidates()).to(model.device)[numbers.to(model.device)]
        of_text = model.copy_law(features[numbers], offered, ValueLaw())  # the new number's law is not looked at here
        beside |= {"of_text": of_text.candidates.cpu(), "pi": of_text.log_weights.cpu()}
        beside |= {"copied": of_text.copied()[0].cpu()}
    if watched:
        beside |= {"individual_sum": individual_prob_sums(model, features[:: max(1, len(features) // 64)]).cpu()}
    return beside | {
        "cls_loss": column["rest_loss"] - torch.where(is_num, log_num, log_not_num),
        "right": (decision == column["targets"]) | (decision.unsqueeze(-1) == column["also_right"]).any(-1),
        "is_num": is_num,
        "decided_num": ahead,
        "agrees": decision == column["backbone_id"],
        "announced": ahead[numbers],
        "prob_sum": prob_sum,
        "softmax_nll": torch.logaddexp(column["rest_log_partition"], num_logit) - column["target_logit"],
        "backbone_nll": column["backbone_nll"],
        "ovr_nll": prob_sum.log() - column["rest_log_p"],
        "loc": loc_Y.cpu(),
        "scale": scale_Y.cpu(),
        "value": column["values"][numbers],
        "noise": model.action.noise.cpu().clone(),
        "U_loc": some.loc_U.flatten().float().cpu().clone(),  # no view of the block's features
        "U_scale": some.scale_U.flatten().float().cpu(),
    }


@torch.no_grad()
def individual_prob_sums(model: CausalQwenForCausalLM, features: Tensor, seed: int = 0) -> Tensor:
    """sum_k P_k [N] for one individual at each position, drawn from U's own law, noise integrated out; features [N, H].

    The author's question in overview 5.4: an individual has one next token, so that this sum should be near 1.
    """
    plan = CausalDecoding.preset("causal", seed=seed)
    bound = BoundDecoding.bind(plan, 1, model.config.causal_size, features.device)
    places = torch.arange(len(features), device=features.device).unsqueeze(0)
    return Chain(model, features.unsqueeze(0), bound.at(places)).scores.p().sum(-1)[0]


def score_values(law: AnyLaw, loc: Tensor, scale: Tensor, values: Tensor) -> dict[str, Any]:
    """Scores of predicted values (theory 3.11), float64 [n] each, in the data's units.

    mae, mse and median_error of the median; log_score, the mean log density (higher is better); crps (lower is better, see
    `ValueLaw.crps`) and quantile_crps (from 199 clipped quantiles, the rule for every rival); coverage of central
    intervals, recalibrated where the law is, and coverage_raw; pit_mean, the mean probability integral transform.
    """
    error = (law.quantile(loc, scale, 0.5) - values).abs()
    return {
        "mae": error.mean().item(),
        "mse": error.square().mean().item(),
        "median_error": error.median().item(),
        "log_score": law.log_prob(loc, scale, values).mean().item(),
        "crps": law.crps(loc, scale, values).mean().item(),
        "quantile_crps": law.quantile_crps(loc, scale, values).mean().item(),
        "pit_mean": law.cdf(loc, scale, values).mean().item(),
        **_coverage(_inside(law, loc, scale, values)),
    }


def score_classes(
    law: AnyLaw, loc: Tensor, scale: Tensor, values: Tensor, classes: Sequence[str | None]
) -> dict[str, dict[str, Any]]:
    """Scores of each class's values by name: numbers (how many), median_error, coverage, coverage_raw as `score_values`."""
    inside = _inside(law, loc, scale, values)
    error = (law.quantile(loc, scale, 0.5) - values).abs()
    return {
        name: {"numbers": len(rows), "median_error": error[rows].median().item(), **_coverage(inside[..., rows])}
        for name, rows in rows_of_classes(classes).items()
    }


def coverage_by_scale(law: AnyLaw, loc: Tensor, scale: Tensor, values: Tensor) -> list[dict[str, Any]]:
    """Tenths of the values by predicted scale on the axis, ascending: numbers, scale (the greatest), coverage as in
    `score_values`. An average may hide two populations: one that is certain, and one whose intervals are useless."""
    inside, tenths = _inside(law, loc, scale, values), scale.argsort().tensor_split(10)
    return [
        {"numbers": len(rows), "scale": scale[rows].max().item(), "coverage": _coverage(inside[..., rows])["coverage"]}
        for rows in tenths
        if len(rows)
    ]


def uneven_coverage(tenths: Sequence[dict[str, Any]], level: float = 0.8) -> str | None:
    """One line where the intervals of some tenth cover clearly less than they say: by 0.15 and by three standard errors."""
    worst = min(tenths, key=lambda tenth: tenth["coverage"][str(level)])
    covered, count = worst["coverage"][str(level)], worst["numbers"]
    if level - covered <= max(0.15, 3 * (level * (1 - level) / count) ** 0.5):
        return None
    return (
        f"{level:.0%} intervals cover {covered:.0%} of the {count} numbers whose predicted scale is at most "
        f"{worst['scale']:.3g}: the average hides two populations (scale_deciles in the metrics)"
    )


def _inside(law: AnyLaw, loc: Tensor, scale: Tensor, values: Tensor) -> Tensor:
    """Which values lie in their intervals: bool [2, levels, n], those of the law as it is and of the raw one."""
    inside = []
    for raw in (False, True):
        ends = [law.interval(loc, scale, level, raw=raw) for level in LEVELS]
        inside.append(torch.stack([(low <= values) & (values <= high) for low, high in ends]))
    return torch.stack(inside)


def _coverage(inside: Tensor) -> dict[str, dict[str, float]]:
    named = [dict(zip(map(str, LEVELS), share, strict=True)) for share in inside.double().mean(-1).tolist()]
    return {"coverage": named[0], "coverage_raw": named[1]}


def _number_detection(is_num: Tensor, decided: Tensor) -> dict[str, float]:
    """How many numbers there are; precision, recall and F1 of deciding for `<NUM>`, 0 where a ratio has nothing to count."""
    both = (is_num & decided).sum().item()
    precision = both / max(decided.sum().item(), 1)
    recall = both / max(is_num.sum().item(), 1)
    f1 = 2 * precision * recall / max(precision + recall, 1e-12)
    return {"num_count": int(is_num.sum()), "num_precision": precision, "num_recall": recall, "num_f1": f1}


def _statistics(sample: Tensor) -> dict[str, float]:
    sample = sample[:: 1 + len(sample) // _STATISTICS_SAMPLE].double()
    low, median, high = torch.quantile(sample, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return {"mean": sample.mean().item(), "median": median, "std": sample.std().item(), "iqr": high - low}
