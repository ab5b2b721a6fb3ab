"""Individuals who cross: who is harmed by what helps others? Made-up worlds with a known truth (a minute and a half a line on
one core).

People (fields) with hidden traits are measured three times in each context; of others one context is observed, and another is
asked for. Beside the individual: nobody in particular, the same training where nobody may cross (r = 1), the exact posterior.

    .venv/bin/python experiments/crossing.py --seeds 0 1 2 3 4
"""

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from causalqwen import CausalQwenForCausalLM, Observation
from causalqwen.data import Row, encode_rows
from causalqwen.parts.crossing import Crossing
from causalqwen.training import TrainSettings
from causalqwen.training.run import learn


@dataclass(frozen=True)
class World:
    """contexts: the text before a number, its mean there, and its loadings on the traits. noise: of each measurement. observed:
    contexts of those who are heard; asked: the one that is asked for."""

    contexts: tuple[tuple[str, float, tuple[float, ...]], ...]
    noise: float
    observed: tuple[int, ...] = (0,)
    asked: int = 1

    def person(self, times: int, random: np.random.Generator) -> np.ndarray:
        """Values [contexts, times]."""
        traits = random.normal(size=len(self.contexts[0][2]))
        means = np.array([mean + np.dot(loadings, traits) for _, mean, loadings in self.contexts])
        return (means[:, None] + self.noise * random.normal(size=(len(means), times))).round(2)

    def exact(self, times: int) -> tuple[np.ndarray, float, np.ndarray]:
        """Weights of the observed values (less their means), and the standard deviation of what is asked for."""
        loadings = np.array([row for _, _, row in self.contexts])
        seen = np.repeat(loadings[list(self.observed)], times, axis=0)
        covariance = seen @ seen.T + self.noise**2 * np.eye(len(seen))
        asked = loadings[self.asked]
        weights = np.linalg.solve(covariance, seen @ asked)
        return weights, math.sqrt(asked @ asked + self.noise**2 - weights @ seen @ asked), seen


WORLDS = {
    "crossing": World(
        (
            ("Without irrigation, the field's harvest in sacks is", 50.0, (8.0,)),
            ("With irrigation, the field's harvest in sacks is", 75.0, (-5.0,)),
        ),
        2.0,
    ),
    "one sign": World(
        (
            ("After the sugar pill, the patient's blood pressure in mmHg is", 140.0, (12.0,)),
            ("After the tablet, the patient's blood pressure in mmHg is", 125.0, (7.0,)),
        ),
        3.0,
    ),
    "trait and effect": World(
        (
            ("Before the course, the pupil's score is", 50.0, (8.0, 0.0)),
            ("At the end of the course, the pupil's score is", 70.0, (8.0, 6.0)),
        ),
        2.0,
    ),
    "two traits": World(
        (
            ("On a dry road, the car's range in kilometres is", 300.0, (30.0, 0.0)),
            ("In heavy rain, the car's range in kilometres is", 260.0, (10.0, 25.0)),
            ("On a mountain pass, the car's range in kilometres is", 220.0, (20.0, -20.0)),
        ),
        8.0,
        (0, 1),
        2,
    ),
    "no individual": World(
        (
            ("On a Monday, the number of visitors in hundreds is", 50.0, (0.0,)),
            ("On a Sunday, the number of visitors in hundreds is", 75.0, (0.0,)),
        ),
        8.0,
    ),
}


def trained(world: World, people: int, times: int, crosses: bool, seed: int) -> CausalQwenForCausalLM:
    """A model that learned with its defaults from people who were measured in all contexts."""
    random = np.random.default_rng(seed)
    rows = [
        Row("prompt", f"person {index}", {"prompt": prompt, "value": float(value), "individual": str(index)})
        for index in range(people)
        for (prompt, _, _), values in zip(world.contexts, world.person(times, random), strict=True)
        for value in values
    ]
    model: CausalQwenForCausalLM = CausalQwenForCausalLM.from_backbone("smollm2-135m")
    settings = TrainSettings(seed=seed)
    lean: Any = Crossing.lean

    def nobody_crosses(crossing: Crossing, *told: torch.Tensor) -> Any:
        found = lean(crossing, *told)
        crossing.reset_parameters()
        crossing.requires_grad_(False)
        return found

    try:
        Crossing.lean = lean if crosses else nobody_crosses  # type: ignore[method-assign]
        with tempfile.TemporaryDirectory() as folder:
            examples = encode_rows(rows, model.processor)
            learn(
                model, examples, [], Path(folder) / "run", settings, say=lambda told: print(f"    {told}", flush=True)
            )
    finally:
        Crossing.lean = lean  # type: ignore[method-assign]
    return model


def line(name: str, how: str, seed: int, errors: np.ndarray, inside: np.ndarray) -> None:
    rmse = math.sqrt(np.square(errors).mean())
    print(f"{name:18}{how:24}{seed:5}   rmse {rmse:8.3f}   90% intervals cover {inside.mean():5.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--people", type=int, default=60)
    parser.add_argument("--others", type=int, default=200)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    for name in given.worlds:
        world = WORLDS[name]
        weights, spread, _ = world.exact(given.times)
        means = np.repeat([world.contexts[place][1] for place in world.observed], given.times)
        prompt, mean, _ = world.contexts[world.asked]
        for seed in given.seeds:
            random = np.random.default_rng(10_000 + seed)
            others = [world.person(given.times, random) for _ in range(given.others)]
            truth = np.array([values[world.asked, 0] for values in others])
            seen = np.array([values[list(world.observed)].flatten() for values in others])
            best = mean + (seen - means) @ weights
            line(name, "exact posterior", seed, truth - best, np.abs(truth - best) < 1.6449 * spread)
            for crosses in (True, False):
                model = trained(world, given.people, given.times, crosses, seed)
                (nobody,) = model.predict_number(prompt)
                low, high = nobody.interval(0.9, raw=True)
                if crosses:
                    alone = truth - nobody.median
                    line(name, "nobody", seed, alone, (low <= truth) & (truth <= high))
                places = [place for place in world.observed for _ in range(given.times)]
                found = []
                for values in seen:
                    told = [
                        Observation(f" {value}", world.contexts[place][0])
                        for place, value in zip(places, values, strict=True)
                    ]
                    who = model.abduct(told, likelihood="values")
                    found += model.predict_number(prompt, individual=who)
                ends = np.array([one.interval(0.9) for one in found])
                errors = truth - np.array([one.median for one in found])
                inside = (ends[:, 0] <= truth) & (truth <= ends[:, 1])
                line(name, f"r {'free' if crosses else '= 1'}", seed, errors, inside)


if __name__ == "__main__":
    main()
