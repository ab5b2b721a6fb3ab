"""What will people answer in a study that they are not yet known from? The Twin-2K mega-study: 1,784 people, 163 outcomes of 19
studies, beside what language models that play these people answered (a quarter of an hour on one core).

Every person's answers in one study are hidden, for each study that they took part in, and told from their answers in the
others, by what the people of four other folds said in all. Each outcome is on its own axis, the normal scores of what those
people answered; a prompt names the study and the outcome, and the model learns from rows of one individual each, as `train`
does by default. The individual is inferred from the answers in the other studies (exactly, in closed form; a few people are
held against `abduct` and `predict_number`). Beside it: ridge regression on the same answers, the same with its residuals, the
twins' own answers as published, and the mean.

What had to be chosen (the ridge's penalty, the passes of training) was chosen on `CHOSEN_ON`.

DIR holds three files of github.com/TianyiPeng/Twin-2K-500-Mega-Study (Apache-2.0), from `post_metric_calculation` and its
folder `post_processing_caliberation`.

    .venv/bin/python experiments/twins.py --data DIR --work DIR
"""

import argparse
import hashlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats

from causalqwen import CausalQwenForCausalLM, Observation
from causalqwen.data import Row, encode_rows
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.reading import contexts_of, read_contexts
from causalqwen.training import TrainSettings, ValueStage, train

PEOPLE, TWINS, OUTCOMES = "combined_dv_human.csv", "combined_dv_llm.csv", "dv_variables_summary.csv"
FILES = {
    PEOPLE: "b94ffc6887c8bb03184fa33e4a2fa6c6ee26490db67d277a61cb6608213295f0",
    TWINS: "9996b240398e824db66b3e0b51cd401cc93a70e07e774051cb42f3d1dc1ef3ed",
    OUTCOMES: "6ade8349b5f0780feb5024b9a90e88b3ccc431869119e229d1794154c6ab5313",
}
CHOSEN_ON = (
    "Accuracy Nudge",
    "Affective Primes",
    "Consumer Minimalism",
    "Defaults",
    "Digital certificates for luxury consumption",
    "Junk Fees",
    "Obedient twins",
    "Preferences for redistribution",
    "Privacy",
    "Promiscuous donors",
)
FOLDS, PENALTY, EPOCHS = 5, 1000.0, 0
NAMES = ("mean only", "the twins as published", "ridge", "ridge and its residuals", "the individual")
LEVELS = (np.arange(199) + 0.5) / 199
FEWEST = 100
"""People who answered both outcomes of a pair whose correlation counts."""


@dataclass
class Study:
    """All that was measured. answers, twins: [people, outcomes], NaN where nobody answered; studies: of each outcome."""

    outcomes: list[str]
    studies: np.ndarray
    answers: np.ndarray
    twins: np.ndarray

    @classmethod
    def read(cls, folder: Path) -> "Study":
        """ValueError for a file that is not the one that was measured on."""
        for name, expected in FILES.items():
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            if found != expected:
                raise ValueError(f"{folder / name} has the SHA-256 {found}, expected {expected}")
        people, twins = (pd.read_csv(folder / name, index_col="TWIN_ID") for name in (PEOPLE, TWINS))
        of_study = pd.read_csv(folder / OUTCOMES).set_index("DV_variable")["study_name"]
        twins = twins.loc[people.index, people.columns]
        return cls(list(people.columns), of_study[people.columns].to_numpy(), people.to_numpy(), twins.to_numpy())

    @property
    def names(self) -> list[str]:
        return sorted(set(self.studies))

    @property
    def prompts(self) -> list[str]:
        return [
            f"In the study {study!r}, the answer {outcome.replace('_', ' ')!r} is"
            for study, outcome in zip(self.studies, self.outcomes, strict=True)
        ]


@dataclass
class Axis:
    """Of one outcome: the answers that those who are taught gave, their normal scores, how often each; and the ends between."""

    values: np.ndarray
    shares: np.ndarray

    @classmethod
    def of(cls, answers: np.ndarray) -> "Axis":
        known = answers[np.isfinite(answers)]
        values, counts = np.unique(known, return_counts=True)
        return cls(values, counts / counts.sum())

    @property
    def scores(self) -> np.ndarray:
        return stats.norm.ppf(self.shares.cumsum() - self.shares / 2)

    @property
    def ends(self) -> np.ndarray:
        return (self.scores[1:] + self.scores[:-1]) / 2

    def score(self, answers: np.ndarray) -> np.ndarray:
        return np.interp(answers, self.values, self.scores)

    def below(self, mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
        """P(answer <= each of the values) [n, values] of normal laws on the axis."""
        inner = stats.norm.cdf((self.ends - mean[:, None]) / spread[:, None])
        return np.concatenate([inner, np.ones((len(mean), 1))], axis=1)

    def crps(self, below: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """Of laws on the values; an answer that nobody who was taught gave is counted from the nearest value."""
        steps = np.diff(self.values)
        reached = truth[:, None] <= self.values[:-1]
        outside = np.maximum(self.values[0] - truth, 0) + np.maximum(truth - self.values[-1], 0)
        return ((below[:, :-1] - reached) ** 2 * steps).sum(1) + outside


@dataclass
class Told:
    """What somebody's way of telling says of every hidden answer: the mean of its law, one draw of it, its CRPS."""

    mean: np.ndarray
    drawn: np.ndarray
    crps: np.ndarray

    @classmethod
    def nothing(cls, study: Study) -> "Told":
        return cls(*(np.full_like(study.answers, np.nan) for _ in range(3)))


def sample_crps(samples: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Of equally likely samples [n, m], ascending."""
    count = samples.shape[1]
    spread = (samples * (2 * np.arange(count) + 1 - count)).sum(1) / count**2
    return np.abs(samples - truth[:, None]).mean(1) - spread


# ---- the rivals ------------------------------------------------------------------------------------------------------


def tell_plainly(
    study: Study, taught: np.ndarray, asked: np.ndarray, told: dict[str, Told], random: np.random.Generator
) -> None:
    """The mean, the twins, ridge regression, and ridge regression with its residuals."""
    answers = study.answers
    mean, spread = np.nanmean(answers[taught], axis=0), np.nanstd(answers[taught], axis=0)
    x = np.nan_to_num((answers - mean) / spread)
    for place in range(len(study.outcomes)):
        known, rows = taught & np.isfinite(answers[:, place]), asked & np.isfinite(answers[:, place])
        others, truth, seen = study.studies != study.studies[place], answers[rows, place], answers[known, place]
        matrix = x[known][:, others]
        inverse = np.linalg.inv(matrix.T @ matrix + PENALTY * np.eye(others.sum()))
        slopes = inverse @ matrix.T @ (seen - seen.mean())
        reach = 1 / len(seen) + ((matrix @ inverse) * matrix).sum(1)
        left = (seen - seen.mean() - matrix @ slopes) / (1 - reach)
        point = seen.mean() + x[rows][:, others] @ slopes
        laws = {
            "mean only": (
                np.full(rows.sum(), seen.mean()),
                np.quantile(seen - seen.mean(), LEVELS),
                seen - seen.mean(),
            ),
            "ridge": (point, np.zeros(1), np.zeros(1)),
            "ridge and its residuals": (point, np.quantile(left, LEVELS), left),
            "the twins as published": (study.twins[rows, place], np.zeros(1), np.zeros(1)),
        }
        for name, (centre, quantiles, around) in laws.items():
            told[name].mean[rows, place] = centre
            told[name].drawn[rows, place] = centre + random.choice(around, rows.sum())
            told[name].crps[rows, place] = sample_crps(centre[:, None] + quantiles, truth)


# ---- the individual --------------------------------------------------------------------------------------------------


def trained(study: Study, scores: np.ndarray, taught: np.ndarray, seed: int, epochs: int) -> CausalQwenForCausalLM:
    """A model that learned from what these people answered in all studies."""
    rows = [
        Row(
            "prompt",
            f"person {person}",
            {"prompt": study.prompts[place], "value": float(scores[person, place].round(4)), "individual": str(person)},
        )
        for person in np.flatnonzero(taught)
        for place in np.flatnonzero(np.isfinite(scores[person]))
    ]
    torch.manual_seed(seed)
    model: CausalQwenForCausalLM = CausalQwenForCausalLM.from_backbone("smollm2-135m", value_family="gaussian")
    moves = epochs > 0  # else one pass that changes nothing: where training starts
    rates = {"learning_rate": 1e-4 * moves, "scalar_learning_rate": 0.03 * moves}
    stage = ValueStage(epochs=max(epochs, 1), batch_size=64 if moves else int(taught.sum()), **rates)
    own_axis = {"value_transform": "identity", "support": None, "recalibrate": False}
    settings = TrainSettings(seed=seed, values=stage, **own_axis, logging_steps=50)
    with tempfile.TemporaryDirectory() as folder:
        train(model, encode_rows(rows, model.processor), [], Path(folder) / "run", settings)
    return model


@torch.no_grad()
def law_of(model: CausalQwenForCausalLM, prompts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a value behind each prompt: mean, what one unit of each coordinate of an individual adds, variance of the noise."""
    read = read_contexts(model, contexts_of(model, [Observation(" 0", prompt) for prompt in prompts], 512))
    chain, width = Chain(model, read.features), model.value_transform.width
    loadings, noise = (column.double().numpy() * width for column in chain.value_loadings())
    centre = model.value_transform.inverse(chain.action.value(*chain.read_by_values())[0]).double().numpy()
    return centre, loadings, noise**2


def tell_by_individuals(
    study: Study,
    scores: np.ndarray,
    axes: list[Axis],
    asked: np.ndarray,
    law: tuple[np.ndarray, ...],
    told: Told,
    random: np.random.Generator,
) -> None:
    """Each person's answers of one study, given theirs in the others: the law of values that share an individual."""
    centre, loadings, noise = law
    shared = loadings @ loadings.T
    mean, spread, drawn = (np.full_like(scores, np.nan) for _ in range(3))
    for name, person in itertools.product(study.names, np.flatnonzero(asked)):
        known = np.isfinite(scores[person])
        hidden, seen = known & (study.studies == name), known & (study.studies != name)
        if hidden.any():
            gain = np.linalg.solve(shared[np.ix_(seen, seen)] + np.diag(noise[seen]), shared[np.ix_(seen, hidden)]).T
            mean[person, hidden] = centre[hidden] + gain @ (scores[person, seen] - centre[seen])
            left = shared[np.ix_(hidden, hidden)] - gain @ shared[np.ix_(seen, hidden)] + np.diag(noise[hidden])
            spread[person, hidden] = np.sqrt(np.diag(left))
            drawn[person, hidden] = random.multivariate_normal(mean[person, hidden], left, method="cholesky")
    for place, axis in enumerate(axes):
        rows = asked & np.isfinite(study.answers[:, place])
        below = axis.below(mean[rows, place], spread[rows, place])
        told.mean[rows, place] = np.diff(below, prepend=0.0, axis=1) @ axis.values
        told.drawn[rows, place] = axis.values[np.searchsorted(axis.ends, drawn[rows, place])]
        told.crps[rows, place] = axis.crps(below, study.answers[rows, place])


def check_against_the_library(
    model: CausalQwenForCausalLM, study: Study, scores: np.ndarray, people: np.ndarray, law: tuple[np.ndarray, ...]
) -> float:
    """The largest difference between a mean in closed form and what `predict_number` says of whom `abduct` inferred."""
    centre, loadings, noise = law
    shared, worst = loadings @ loadings.T, 0.0
    for person in people:
        known = np.flatnonzero(np.isfinite(scores[person]))
        hidden, seen = known[0], known[1:]
        who = model.abduct(
            [Observation(f" {scores[person, place]:.4f}", study.prompts[place]) for place in seen], likelihood="values"
        )
        (found,) = model.predict_number(study.prompts[hidden], individual=who)
        weights = np.linalg.solve(shared[np.ix_(seen, seen)] + np.diag(noise[seen]), shared[seen, hidden])
        worst = max(
            worst, abs(found.median - centre[hidden] - weights @ (scores[person, seen].round(4) - centre[seen]))
        )
    return worst


# ---- what came out ---------------------------------------------------------------------------------------------------


def correlation(left: np.ndarray, right: np.ndarray) -> float:
    both = np.isfinite(left) & np.isfinite(right)
    if both.sum() < 3 or left[both].std() == 0 or right[both].std() == 0:
        return np.nan
    return float(np.corrcoef(left[both], right[both])[0, 1])


def pairs_of_a_study(study: Study) -> Iterator[tuple[int, int]]:
    for one, other in itertools.combinations(range(len(study.outcomes)), 2):
        both = np.isfinite(study.answers[:, one]) & np.isfinite(study.answers[:, other])
        if study.studies[one] == study.studies[other] and both.sum() >= FEWEST:
            yield one, other


def report(study: Study, told: dict[str, Told]) -> None:
    answers, spread = study.answers, np.nanstd(study.answers, axis=0)
    chosen_on = np.isin(study.studies, CHOSEN_ON)
    places, pairs = range(len(study.outcomes)), list(pairs_of_a_study(study))
    of_people = np.array([correlation(answers[:, one], answers[:, other]) for one, other in pairs])
    by_study = {}
    print(f"\n{'':26}{'correlation':>12}{'ten':>8}{'nine':>8}{'SD of draws':>13}{'CRPS':>8}{'pairs off':>11}")
    for name, one in told.items():
        found = np.array([correlation(one.mean[:, place], answers[:, place]) for place in places])
        found = np.nan_to_num(found)  # who says the same of everybody tells nothing
        drawn = np.nanstd(np.where(np.isfinite(answers), one.drawn, np.nan), axis=0) / spread
        crps = np.nanmean(one.crps, axis=0) / spread
        by_study[name] = {study_name: crps[study.studies == study_name].mean() for study_name in study.names}
        off = np.abs(np.array([correlation(one.drawn[:, a], one.drawn[:, b]) for a, b in pairs]) - of_people)
        print(
            f"{name:26}{found.mean():12.3f}{found[chosen_on].mean():8.3f}{found[~chosen_on].mean():8.3f}"
            f"{np.mean(drawn):13.2f}{np.mean(list(by_study[name].values())):8.4f}{np.nanmedian(off):11.3f}"
        )
    rival = by_study["ridge and its residuals"]
    for name in [name for name in told if name.startswith("the individual")]:
        wins = [one for one in study.names if by_study[name][one] < rival[one]]
        print(f"{name}: CRPS below ridge and its residuals on {len(wins)} of {len(study.names)} studies")
        for one in study.names:
            print(f"  {one:46}{by_study[name][one]:8.4f}{rival[one]:8.4f}")


def told_of_fold(study: Study, asked: np.ndarray, seed: int, epochs: int) -> dict[str, Told]:
    """What everybody's way says of the people of one fold."""
    random, taught = np.random.default_rng(seed), ~asked
    told = {name: Told.nothing(study) for name in NAMES}
    tell_plainly(study, taught, asked, told, random)
    axes = [Axis.of(study.answers[taught, place]) for place in range(len(study.outcomes))]
    columns = zip(axes, study.answers.T, strict=True)
    scores = np.stack([np.where(np.isfinite(column), axis.score(column), np.nan) for axis, column in columns], axis=1)
    model = trained(study, scores, taught, seed, epochs)
    law = law_of(model, study.prompts)
    off = check_against_the_library(model, study, scores, np.flatnonzero(asked)[:1], law)
    print(f"{model.config.value_crossing} directions; closed form and `abduct`, `predict_number` differ by {off:.1e}")
    tell_by_individuals(study, scores, axes, asked, law, told[NAMES[-1]], random)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the three files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="0: where training starts")
    parser.add_argument("--work", type=Path, required=True, help="a folder where each fold is kept when it is told")
    parser.add_argument("--folds", type=int, nargs="*", default=list(range(FOLDS)), help="those to be told now")
    given = parser.parse_args()
    study = Study.read(given.data)
    fold = np.random.default_rng(given.seed).permutation(len(study.answers)) % FOLDS
    given.work.mkdir(parents=True, exist_ok=True)
    for number in given.folds:
        told = told_of_fold(study, fold == number, given.seed, given.epochs)
        columns = {f"{name}/{field}": values for name, one in told.items() for field, values in vars(one).items()}
        np.savez_compressed(given.work / f"fold{number}.npz", **columns)
    kept = [given.work / f"fold{number}.npz" for number in range(FOLDS)]
    if missing := [path.name for path in kept if not path.exists()]:
        print(f"not told yet: {', '.join(missing)}")
        return
    told = {name: Told.nothing(study) for name in NAMES}
    for number, path in enumerate(kept):
        with np.load(path) as columns:
            for key in columns:
                name, field = key.split("/")
                getattr(told[name], field)[fold == number] = columns[key][fold == number]
    report(study, told)


if __name__ == "__main__":
    main()
