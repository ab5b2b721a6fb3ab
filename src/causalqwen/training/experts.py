"""What ordinary regressions say of a table's rows, as further columns for the value head (docs/tables.md).

Four experts: ridge regression on character and word n-grams with the row's numbers; extremely randomised trees on the n-grams'
principal components with the same numbers; gradient-boosted trees on these; and a Gaussian process, which also says how near
the row is to known ones and how far they are off. Each answers on two axes, the value itself and its symlog. A training row is
answered by experts that were fitted without it and its group, so that the value head learns how far they can be trusted.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from causalqwen.data.columns import TableRows
from causalqwen.extras import extra
from causalqwen.numbers import symlog
from causalqwen.training.gaussian_process import GaussianProcess, Lengths
from causalqwen.training.grams import Grams

with extra("tables", "a table"):
    from scipy import sparse
    from scipy.optimize import nnls
    from sklearn.decomposition import TruncatedSVD
    from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor
    from sklearn.linear_model import Ridge

FOLDS = 5
_PENALTIES = (0.1, 0.5, 2.0, 10.0, 50.0)
_TREES, _LEAF = 100, 2
_STEPS, _RATE = 300, 0.06
_ROWS_OF_STEP = 4
"""Boosting takes at most one step for so many rows: few rows are learned by heart in few steps."""
_COMPONENTS = 64
_SMALL = 1e-4
"""Penalty of a row, of the mixture's weights."""
_NEAR = "near_"


@dataclass
class Experts:
    """Regressions, fitted.

    penalty: of the ridge. arrays: center and width [2] of the two axes; ends [2], the least and the greatest value; weights
    [2, D] and intercepts [2] of the ridge; components [64, D of the n-grams]; the nodes of all trees, end to end: left and
    right child (-1 at a leaf), feature, cut and leaf [nodes, 2], and each tree's root; the same of the boosted trees behind
    `boosted_`, whose answer is the sum of their leaves and boosted_start [2]; bounds [2, width], see `bound`; mixture [2, 8],
    see `mix`.
    """

    penalty: float
    arrays: dict[str, np.ndarray]
    grams: Grams
    process: GaussianProcess

    @classmethod
    def fit(
        cls,
        rows: TableRows,
        values: np.ndarray,
        *,
        weight: np.ndarray | None = None,
        like: "Experts | None" = None,
        lengths: Lengths | None = None,
        check: tuple[TableRows, np.ndarray] | None = None,
        seed: int = 0,
    ) -> "Experts":
        """From rows and values [n]. like: experts whose penalty is taken; by default it is that whose ridge answers the rows
        and values of `check` best. lengths: of the process; by default the likeliest."""
        both = _axes(values)
        center, width = both.mean(0), np.maximum(both.std(0), 1e-12)
        wanted = (both - center) / width
        process = GaussianProcess.fit(rows, wanted, weight=weight, lengths=lengths, seed=seed)
        arrays = {"center": center, "width": width, "ends": np.array([values.min(), values.max()])}
        made = cls(0.0, arrays, Grams(), process)
        if any(rows.words):
            made.grams = Grams.fit(rows.words)
        counts = made.grams.counts(rows.words)
        if counts is not None and min(counts.shape) > 2:
            size = min(_COMPONENTS, min(counts.shape) - 1)
            made.arrays["components"] = TruncatedSVD(size, random_state=seed).fit(counts).components_.astype(np.float32)
        wide = made._wide(counts, rows.numbers)
        ridges = [Ridge(one).fit(wide, wanted, weight) for one in (_PENALTIES if like is None else [like.penalty])]
        ridge = ridges[0]
        if check is not None and len(ridges) > 1:
            held, held_values = check
            x = made._wide(made.grams.counts(held.words), held.numbers)
            right = (_axes(held_values) - center) / width
            ridge = min(ridges, key=lambda one: float(np.square(one.predict(x) - right).sum()))
        made.penalty = float(ridge.alpha)
        made.arrays |= {"weights": ridge.coef_.astype(np.float32), "intercepts": ridge.intercept_}
        narrow = made._narrow(counts, rows.numbers)
        made._grow(narrow, wanted, weight, seed)
        made._boost(narrow, wanted, weight, seed)
        return made

    @property
    def width(self) -> int:
        """Numbers per row: each expert's on two axes, what the process says beside its own, and the mixture's on both."""
        return 6 + GaussianProcess.WIDTH + 2 * ("mixture" in self.arrays)

    def answers(self, rows: TableRows) -> np.ndarray:
        """Float32 [n, width]: each expert's answer on the value's own axis and on that of its symlog, standardized; behind
        these what `GaussianProcess.answers` says, and the mixture. All within the bounds."""
        counts = self.grams.counts(rows.words)
        narrow = self._narrow(counts, rows.numbers)
        said = [self._wide(counts, rows.numbers) @ self.arrays["weights"].T + self.arrays["intercepts"]]
        said.append(self._walk(narrow) / len(self.arrays["roots"]))
        said.append(self._walk(narrow, "boosted_") + self.arrays["boosted_start"])
        said.append(self.process.answers(rows))
        found = np.concatenate(said, axis=1)
        if "bounds" in self.arrays:
            found = found.clip(*self.arrays["bounds"])
        if "mixture" in self.arrays:
            found = np.concatenate([found, self._mixed(found, self.arrays["mixture"])], axis=1)
        return found.astype(np.float32)

    def in_units(self, answers: np.ndarray) -> np.ndarray:
        """What the mixture says of the value itself, float64 [n, 1], of answers [n, width]."""
        center, width = self.arrays["center"][0], self.arrays["width"][0]
        found: np.ndarray = answers[:, -2:-1].astype(np.float64) * width + center
        return found

    def _on_axes(self, answers: np.ndarray) -> list[np.ndarray]:
        """What each expert says by either axis, brought to the value's own axis and to that of its symlog: [n, 8] each,
        standardized. By its own axis it may say what lies beyond the values by as much as they are apart, as a law may, by
        that of the symlog what lies among them."""
        (center, other_center), (width, other_width) = self.arrays["center"], self.arrays["width"]
        own, by_symlog = (answers[:, axis : 2 - GaussianProcess.WIDTH : 2].astype(np.float64) for axis in (0, 1))
        low, high = self.arrays["ends"]
        straight = (own * width + center).clip(2 * low - high, 2 * high - low)
        bent = (by_symlog * other_width + other_center).clip(*_symlog(self.arrays["ends"]))
        held = np.concatenate([straight, np.sign(bent) * np.expm1(np.abs(bent))], axis=1)
        return [(held - center) / width, (_symlog(held) - other_center) / other_width]

    def _mixed(self, answers: np.ndarray, mixture: np.ndarray) -> np.ndarray:
        """The mixture on both axes, [n, 2]."""
        axes = self._on_axes(answers)
        return np.stack([one @ weights for one, weights in zip(axes, mixture, strict=True)], axis=1)

    def mix(self, answers: np.ndarray, values: np.ndarray, fold: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        """Learn the mixture: the weights, none of them negative, of the least squared errors of answers [n, width] that were
        given to rows without their values, and of the least size where answers tell nothing. Returns what a mixture says [n, 2]
        of each row that was learned without its fold (int [n])."""
        often = np.sqrt(np.ones(len(values)) if weight is None else weight)[:, None]
        wanted = (_axes(values) - self.arrays["center"]) / self.arrays["width"]
        axes = self._on_axes(answers)

        def learned(some: np.ndarray) -> np.ndarray:
            mixture, of = [], often[some]
            for said, one in zip(axes, wanted.T, strict=True):
                small = np.sqrt(_SMALL * np.square(of).sum()) * np.eye(said.shape[1])
                facts = np.concatenate([of * said[some], small])
                mixture.append(nnls(facts, np.concatenate([of[:, 0] * one[some], np.zeros(len(small))]))[0])
            return np.stack(mixture)

        self.arrays["mixture"] = learned(np.ones(len(values), dtype=bool))
        mixed = np.empty((len(values), 2))
        for place in np.unique(fold):
            mixed[fold == place] = self._mixed(answers[fold == place], learned(fold != place))
        return mixed

    def bound(self, answers: np.ndarray) -> None:
        """Keep what is said within answers [n, width] that were given to rows without their values: a row that is known, or as
        good as known, is told what no such row was, and nothing learned from these says what to make of it. The ridge alone may
        go on beyond them, by as much as they are apart."""
        low, high = answers.min(0).astype(np.float64), answers.max(0).astype(np.float64)
        beyond = np.where(np.arange(len(low)) < 2, high - low, 0.0)
        self.arrays["bounds"] = np.stack([low - beyond, high + beyond])

    def restated(self, answers: np.ndarray, other: "Experts") -> np.ndarray:
        """Its own answers [n, width], standardized as those of `other` are."""
        found = answers.copy()
        for axis in (0, 1):
            (center, width), (of_other, by) = (
                (one.arrays["center"][axis], one.arrays["width"][axis]) for one in (self, other)
            )
            said = found[:, axis : 2 - GaussianProcess.WIDTH : 2]
            said[:] = (said.astype(np.float64) * width + center - of_other) / by
        return found

    def state(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors, their names behind `name`, and the rest as JSON holds it."""
        arrays = self.arrays | {f"idf{kind}": idf for kind, idf in self.grams.idf.items()}
        about: dict[str, Any] = {"penalty": self.penalty, "vocabularies": self.grams.vocabularies}
        near, about["process"] = self.process.state()
        arrays |= {f"{_NEAR}{key}": value for key, value in near.items()}
        return {f"{name}{key}": torch.from_numpy(np.ascontiguousarray(value)) for key, value in arrays.items()}, about

    @classmethod
    def from_state(cls, tensors: dict[str, torch.Tensor], about: dict[str, Any], name: str) -> "Experts":
        """What `state` gave."""
        own = {key.removeprefix(name): tensor.numpy() for key, tensor in tensors.items() if key.startswith(name)}
        near = {key.removeprefix(_NEAR): own.pop(key) for key in list(own) if key.startswith(_NEAR)}
        vocabularies = about["vocabularies"]
        grams = Grams(vocabularies, {one[0]: own.pop(f"idf{one[0]}") for one in vocabularies})
        return cls(about["penalty"], own, grams, GaussianProcess.from_state(near, about["process"]))

    @staticmethod
    def _wide(counts: sparse.csr_matrix | None, numbers: np.ndarray) -> Any:
        dense = numbers.astype(np.float64)
        return dense if counts is None else sparse.hstack([counts, sparse.csr_matrix(dense)]).tocsr()

    def _narrow(self, counts: sparse.csr_matrix | None, numbers: np.ndarray) -> np.ndarray:
        if counts is None or "components" not in self.arrays:
            return numbers.astype(np.float32)
        return np.concatenate([counts @ self.arrays["components"].T, numbers], axis=1).astype(np.float32)

    def _grow(self, x: np.ndarray, wanted: np.ndarray, weight: np.ndarray | None, seed: int) -> None:
        forest = ExtraTreesRegressor(_TREES, min_samples_leaf=_LEAF, max_features=0.3, random_state=seed)
        forest.fit(x, wanted, weight)
        trees = [one.tree_ for one in forest.estimators_]
        self._keep(
            "",
            left=[tree.children_left for tree in trees],
            right=[tree.children_right for tree in trees],
            feature=[tree.feature for tree in trees],
            cut=[tree.threshold for tree in trees],
            leaf=[tree.value[:, :, 0] for tree in trees],
        )

    def _boost(self, x: np.ndarray, wanted: np.ndarray, weight: np.ndarray | None, seed: int) -> None:
        """One boosting for each axis; a leaf is 0 on the other one."""
        steps = max(1, min(_STEPS, len(x) // _ROWS_OF_STEP))
        nodes, leaves, starts = [], [], []
        for axis in range(2):
            boosted = HistGradientBoostingRegressor(
                max_iter=steps, learning_rate=_RATE, early_stopping=False, random_state=seed
            ).fit(x, wanted[:, axis], weight)
            for (tree,) in boosted._predictors:
                nodes.append(tree.nodes)
                leaves.append(np.eye(2)[axis] * tree.nodes["value"][:, None])
            starts.append(float(boosted._baseline_prediction.item()))
        self._keep(
            "boosted_",
            left=[np.where(one["is_leaf"], -1, one["left"].astype(np.int64)) for one in nodes],
            right=[np.where(one["is_leaf"], -1, one["right"].astype(np.int64)) for one in nodes],
            feature=[one["feature_idx"] for one in nodes],
            cut=[one["num_threshold"] for one in nodes],
            leaf=leaves,
        )
        self.arrays["boosted_start"] = np.array(starts)

    def _keep(self, name: str, **nodes: list[np.ndarray]) -> None:
        """Trees end to end, their arrays behind `name`."""
        starts = np.cumsum([0, *(len(tree) for tree in nodes["left"])])
        for side in ("left", "right"):
            moved = [np.where(one < 0, -1, one + start) for one, start in zip(nodes[side], starts[:-1], strict=True)]
            self.arrays[name + side] = np.concatenate(moved).astype(np.int32)
        self.arrays[name + "feature"] = np.concatenate(nodes["feature"]).clip(0).astype(np.int32)
        self.arrays[name + "cut"] = np.concatenate(nodes["cut"]).astype(np.float64)
        self.arrays[name + "leaf"] = np.concatenate(nodes["leaf"]).astype(np.float32)
        self.arrays[name + "roots"] = starts[:-1].astype(np.int32)

    def _walk(self, x: np.ndarray, name: str = "") -> np.ndarray:
        """The sum [n, 2] of what the trees say whose arrays stand behind `name`."""
        left, right, feature, cut, leaf = (
            self.arrays[name + one] for one in ("left", "right", "feature", "cut", "leaf")
        )
        total, rows = np.zeros((len(x), 2)), np.arange(len(x))
        for root in self.arrays[name + "roots"].tolist():
            at = np.full(len(x), root)
            while (inner := left[at] >= 0).any():
                below = x[rows, feature[at]] <= cut[at]
                at = np.where(inner, np.where(below, left[at], right[at]), at)
            total += leaf[at]
        return total


def fit_experts(
    rows: TableRows, values: np.ndarray, fold: np.ndarray, *, weight: np.ndarray | None = None, seed: int = 0
) -> tuple[Experts, np.ndarray]:
    """Experts on all rows, and each row's answers [n, width] by experts that were fitted without its fold (int [n]).

    The first fold alone chooses the penalty of the ridge. The process on all rows has the folds' lengths, on average: what it
    says of nearness means there what it meant where rows were learned from (experiments 15.7).
    """
    parts, first = [], None
    for place in tqdm(np.unique(fold).tolist(), desc="experts", leave=False):
        held, rest = np.flatnonzero(fold == place), np.flatnonzero(fold != place)
        theirs = None if weight is None else weight[rest]
        check = (rows.taken(held), values[held])
        made = Experts.fit(rows.taken(rest), values[rest], weight=theirs, like=first, check=check, seed=seed)
        first = first or made
        parts.append((held, made, made.answers(check[0])))
    lengths = np.mean([made.process.lengths for _, made, _ in parts], axis=0)
    whole = Experts.fit(rows, values, weight=weight, like=first, lengths=lengths, seed=seed)
    by_row = np.zeros((len(values), whole.width), dtype=np.float32)
    for held, made, said in parts:
        by_row[held] = made.restated(said, whole)
    whole.bound(by_row)
    return whole, np.concatenate([by_row, whole.mix(by_row, values, fold, weight)], axis=1).astype(np.float32)


def _axes(values: np.ndarray) -> np.ndarray:
    return np.stack([values, _symlog(values)], axis=1)


def _symlog(values: np.ndarray) -> np.ndarray:
    """`numbers.symlog` of an array."""
    logged: np.ndarray = symlog(torch.tensor(values)).numpy()
    return logged
