"""Do intervals of an individual cover what they say? Eight made-up worlds with a known truth (a minute or two a world and seed
on one core).

60 people with hidden traits are measured three times in each of two contexts, and learned from by default. Of 200 others 0, 1,
3 and 8 values are observed, contexts as they come, and another is asked for. Beside the intervals: those that the model
believes (raw), and those of the exact posterior, which knows the world. "width" is the mean width of 90% intervals over the
exact posterior's, each scaled to cover 90% of these people. `--bounds`: how well somebody covers who knows all of a world but
how far its people differ, and has that from 60 of them.

    .venv/bin/python experiments/people_cover.py --seeds 0 1 2 3 4
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from scipy.special import ndtr

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import Row, encode_rows
from causalqwen.modeling.choices import last_features
from causalqwen.modeling.individuals import Abduction
from causalqwen.modeling.reading import Reading, encode_text
from causalqwen.training import TrainSettings
from causalqwen.training.run import learn

PROMPTS = ("Without irrigation, the field's harvest in sacks is", "With irrigation, the field's harvest in sacks is")
KNOWN, LEVELS = (0, 1, 3, 8), (0.5, 0.8, 0.9)
_KEPT = 12.0  # nats below the likeliest place of a grid, to which a person's posterior is looked at


def normal(random: np.random.Generator, count: int) -> np.ndarray:
    return random.normal(size=count)


def student(random: np.random.Generator, count: int) -> np.ndarray:
    return random.standard_t(3, size=count) / math.sqrt(3)


@dataclass(frozen=True)
class World:
    """means [2] and loadings [2][traits] of the contexts. noise: of each measurement; varies: by how much its log differs
    between people. trait: how the first trait is drawn. log: whether values are exponentials."""

    means: tuple[float, float]
    loadings: tuple[tuple[float, ...], tuple[float, ...]]
    noise: float
    varies: float = 0.0
    trait: Callable[[np.random.Generator, int], np.ndarray] = normal
    log: bool = False

    def people(self, count: int, times: int, random: np.random.Generator) -> np.ndarray:
        """Values on the axis [people, 2, times]."""
        traits = np.stack([self.trait(random, count), *(normal(random, count) for _ in self.loadings[0][1:])])
        noise = self.noise * np.exp(self.varies * normal(random, count))
        means = np.array(self.means)[:, None] + np.array(self.loadings) @ traits
        return means.T[:, :, None] + noise[:, None, None] * random.normal(size=(count, 2, times))

    @cached_property
    def grid(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means in both contexts [g, 2], noise [g] and log weights [g] of who somebody may be."""
        heavy = self.trait is student
        first = (
            np.sinh(np.linspace(-5, 5, 1201))
            if heavy
            else np.linspace(-4.5, 4.5, 241 if len(self.loadings[0]) == 1 else 121)
        )
        axes = [first, *[np.linspace(-4.5, 4.5, 91)] * (len(self.loadings[0]) - 1)]
        axes.append(np.linspace(-3, 3, 25) if self.varies else np.zeros(1))
        logs = [-np.square(axis) / 2 for axis in axes]
        if heavy:
            logs[0] = -2 * np.log1p(np.square(first)) + np.log(np.cosh(np.arcsinh(first)))
        places = np.stack([one.flatten() for one in np.meshgrid(*axes, indexing="ij")])
        weights = sum(np.meshgrid(*logs, indexing="ij")).flatten()
        means = np.array(self.means) + (np.array(self.loadings) @ places[:-1]).T
        return means, self.noise * np.exp(self.varies * places[-1]), weights

    def exact(self, seen: np.ndarray, contexts: np.ndarray, asked: int) -> np.ndarray:
        """Quantiles of a value in the context `asked`, given seen [k] in contexts [k]: the median, and ends at each level."""
        means, noise, logs = self.grid
        z = (seen - means[:, contexts]) / noise[:, None]
        logs = logs - np.square(z).sum(1) / 2 - len(seen) * np.log(noise)
        kept = logs > logs.max() - _KEPT
        weights = np.exp(logs[kept] - logs[kept].max())
        weights, loc, scale = weights / weights.sum(), means[kept, asked], noise[kept]
        levels = np.array([0.5, *(0.5 + sign * level / 2 for level in LEVELS for sign in (-1, 1))])
        low, high = (np.full(len(levels), loc.mean() + sign * 1e4 * (scale.max() + 1)) for sign in (-1, 1))
        for _ in range(60):
            middle = (low + high) / 2
            below = (weights * ndtr((middle[:, None] - loc) / scale)).sum(1) < levels
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return middle


WORLDS = {
    "helps in both": World((50, 75), ((8,), (5,)), 2),
    "helps and harms": World((50, 75), ((8,), (-5,)), 2),
    "acts in one": World((50, 75), ((8,), (0,)), 3),
    "two traits": World((50, 70), ((8, 0), (8, 6)), 2),
    "noise is larger": World((50, 60), ((3,), (3,)), 6),
    "noise of a person": World((50, 75), ((8,), (5,)), 3, varies=0.5),
    "heavy tails": World((50, 75), ((8,), (-5,)), 2, trait=student),
    "on a log axis": World((3.0, 3.5), ((0.5,), (-0.3,)), 0.15, log=True),
}


def trained(world: World, people: int, times: int, seed: int) -> tuple[CausalQwenForCausalLM, float]:
    """A model that learned by default, and the seconds that took."""
    values = world.people(people, times, np.random.default_rng(seed))
    values = (np.exp(values) if world.log else values).round(2)
    rows = [
        Row("prompt", f"row {person}", {"prompt": prompt, "value": float(value), "individual": str(person)})
        for person, of_person in enumerate(values)
        for prompt, said in zip(PROMPTS, of_person, strict=True)
        for value in said
    ]
    model: CausalQwenForCausalLM = CausalQwenForCausalLM.from_backbone("smollm2-135m")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        examples = encode_rows(rows, model.processor)
        learn(
            model,
            examples,
            [],
            Path(folder) / "run",
            TrainSettings(seed=seed),
            say=lambda line: print(f"    {line}", flush=True),
        )
    return model, time.perf_counter() - began


def predictions(
    model: CausalQwenForCausalLM, seen: np.ndarray, contexts: np.ndarray, asked: int, z: torch.Tensor
) -> list:
    """Medians, and both ends at each level, of what is predicted, and of what is believed [2, 1 + 2 levels]; with the log
    density as a function. z [2, H]: features of both prompts, which are read once for everybody."""
    who = None
    if len(seen):
        targets = torch.full((len(seen),), model.config.num_token_id)
        read = Reading(z[torch.from_numpy(contexts)], targets, torch.from_numpy(seen))
        who = Abduction(likelihood="values").checked(model).infer(model, read, [], "")
    (found,) = model.predict_values(z[asked : asked + 1], who)
    ends = [
        [found.median, *(end for level in LEVELS for end in found.interval(level, raw=raw))] for raw in (False, True)
    ]
    return [np.array(ends), found.log_prob]


def measured(name: str, seed: int, people: int, others: int, times: int) -> None:
    world = WORLDS[name]
    model, seconds = trained(world, people, times, seed)
    fitted = model.config.individual_levels or {}
    z = torch.cat([last_features(model, encode_text(model, prompt, prompt=True)) for prompt in PROMPTS])
    random = np.random.default_rng(10_000 + seed)
    values = world.people(others, max(KNOWN) + 1, random)
    said = (np.exp(values) if world.log else values).round(2)
    plain = [world.exact(np.zeros(0), np.zeros(0, dtype=int), asked) for asked in (0, 1)]
    for known in KNOWN:
        found, logs, truth = [], [], []
        for person in range(others):
            contexts = random.integers(2, size=known + 1)
            places = np.arange(known + 1)
            seen, asked = said[person, contexts[:-1], places[:-1]], int(contexts[-1])
            own, log_prob = predictions(model, seen, contexts[:-1], asked, z)
            ideal = world.exact(np.log(seen) if world.log else seen, contexts[:-1], asked) if known else plain[asked]
            found.append([*own, np.exp(ideal) if world.log else ideal])
            truth.append(said[person, asked, known])
            logs.append(log_prob(truth[-1]))
        ends, y = np.array(found), np.array(truth)[:, None]
        inside = (ends[..., 1::2] <= y[..., None]) & (y[..., None] <= ends[..., 2::2])
        rmse = np.sqrt(np.square(ends[..., 0] - y).mean(0))
        width = (ends[..., 6] - ends[..., 5]).mean(0)
        needed = np.maximum(
            (y - ends[..., 0]) / (ends[..., 6] - ends[..., 0]), (ends[..., 0] - y) / (ends[..., 0] - ends[..., 5])
        )
        equal = width * np.quantile(needed, 0.9, axis=0)
        covers = "   ".join(
            f"{how} {' '.join(f'{share:6.1%}' for share in inside[:, place].mean(0))}"
            for place, how in enumerate(("fitted", "raw", "exact"))
        )
        print(
            f"{name:18}{seed:3}{known:3}   rmse {rmse[0]:7.3f} exact {rmse[2]:7.3f}  log score {np.mean(logs):7.3f}  {covers}  "
            f"width {equal[0] / equal[2]:.3f} raw {equal[1] / equal[2]:.3f}  as given {width[0] / width[2]:.3f} "
            f"raw {width[1] / width[2]:.3f}  who {fitted.get('who', 1):.2f} noise {fitted.get('noise', 1):.2f} {seconds:.0f} s",
            flush=True,
        )


def bounds(people: int, others: int, runs: int = 40, repeats: int = 2000) -> None:
    """Coverage of 90% by whoever knows all of a world but how far people differ, and estimates that from so many: of one run,
    and of the worst of `runs`, on `others`."""
    random = np.random.default_rng(0)
    spread = np.sqrt(random.chisquare(people - 1, size=(repeats, runs)) / (people - 1))
    truth = 2 * ndtr(1.6706 * spread) - 1
    seen = random.binomial(others, truth) / others
    exact = random.binomial(others, 0.9, size=(repeats, runs)) / others
    for how, share in (("60 people's spread", seen), ("the exact posterior", exact)):
        worst, best = np.median(share.min(1)), np.median(share.max(1))
        print(
            f"{how}: {share.mean():.1%} of {others}, sd {share.std():.1%}; of {runs} runs from {worst:.1%} to {best:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--people", type=int, default=60)
    parser.add_argument("--others", type=int, default=200)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--bounds", action="store_true")
    given = parser.parse_args()
    if given.bounds:
        return bounds(given.people, given.others)
    for seed in given.seeds:
        for name in given.worlds:
            measured(name, seed, given.people, given.others, given.times)


if __name__ == "__main__":
    main()
