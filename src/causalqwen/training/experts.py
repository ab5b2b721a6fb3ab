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
_NEAR = "near_"


@dataclass
class Experts:
    """Regressions, fitted.

    penalty: of the ridge. arrays: center and width [2] of the two axes; ends [2], the least and the greatest value; weights
    [2, D] and intercepts [2] of the ridge; components [64, D of the n-grams]; the nodes of all trees, end to end: left and
    right child (-1 at a leaf), feature, cut and leaf [nodes, 2], and each tree's root; the same of the boosted trees behind
    `boosted_`, whose answer is the sum of their leaves and boosted_start [2]. Files of earlier versions hold no Gaussian
    process, and older ones no boosted trees.
    """

    penalty: float
    arrays: dict[str, np.ndarray]
    grams: Grams
    process: GaussianProcess | None = None

    @classmethod
    def fit(
        cls,
        rows: TableRows,
        values: np.ndarray,
        *,
        weight: np.ndarray | None = None,
        like: "Experts | None" = None,
        check: tuple[TableRows, np.ndarray] | None = None,
        seed: int = 0,
    ) -> "Experts":
        """From rows and values [n]. like: experts whose penalty and lengths are taken; by default the penalty is that whose
        ridge answers the rows and values of `check` best."""
        both = _axes(values)
        center, width = both.mean(0), np.maximum(both.std(0), 1e-12)
        wanted = (both - center) / width
        made = cls(0.0, {"center": center, "width": width, "ends": np.array([values.min(), values.max()])}, Grams())
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
        lengths: Lengths | None = None if like is None or like.process is None else like.process.lengths
        made.process = GaussianProcess.fit(rows, wanted, weight=weight, lengths=lengths, seed=seed)
        return made

    @property
    def width(self) -> int:
        """Numbers per row: each regression's on two axes, and what the process says beside its own."""
        return 4 + 2 * ("boosted_start" in self.arrays) + (0 if self.process is None else self.process.WIDTH)

    def answers(self, rows: TableRows) -> np.ndarray:
        """Float32 [n, width]: each expert's answer on the value's own axis and on that of its symlog, standardized, and what
        `GaussianProcess.answers` says behind these."""
        counts = self.grams.counts(rows.words)
        narrow = self._narrow(counts, rows.numbers)
        said = [self._wide(counts, rows.numbers) @ self.arrays["weights"].T + self.arrays["intercepts"]]
        said.append(self._walk(narrow) / len(self.arrays["roots"]))
        if "boosted_start" in self.arrays:
            said.append(self._walk(narrow, "boosted_") + self.arrays["boosted_start"])
        if self.process is not None:
            said.append(self.process.answers(rows))
        return np.concatenate(said, axis=1).astype(np.float32)

    def in_units(self, answers: np.ndarray) -> np.ndarray:
        """What each expert says of the value itself, float64 [n, experts], of answers [n, width]; behind these, what each says
        by way of the symlog, between the least and the greatest value."""
        of_axes = answers.astype(np.float64)
        if self.process is not None:
            of_axes = of_axes[:, : 2 - self.process.WIDTH]
        center, width = self.arrays["center"], self.arrays["width"]
        said: np.ndarray = of_axes[:, ::2] * width[0] + center[0]
        if self.process is None:  # so it was in files of earlier versions
            return said
        other = np.clip(of_axes[:, 1::2] * width[1] + center[1], *_axes(self.arrays["ends"])[:, 1])
        return np.concatenate([said, np.sign(other) * np.expm1(np.abs(other))], axis=1)

    def state(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors, their names behind `name`, and the rest as JSON holds it."""
        arrays = self.arrays | {f"idf{kind}": idf for kind, idf in self.grams.idf.items()}
        about: dict[str, Any] = {"penalty": self.penalty, "vocabularies": self.grams.vocabularies}
        if self.process is not None:
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
        process = GaussianProcess.from_state(near, about["process"]) if "process" in about else None
        return cls(about["penalty"], own, grams, process)

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

    The first fold alone chooses the penalty of the ridge, and all others the lengths of the process.
    """
    answers, first = {}, None
    for place in tqdm(np.unique(fold).tolist(), desc="experts", leave=False):
        held, rest = np.flatnonzero(fold == place), np.flatnonzero(fold != place)
        theirs = None if weight is None else weight[rest]
        check = (rows.taken(held), values[held])
        made = Experts.fit(rows.taken(rest), values[rest], weight=theirs, like=first, check=check, seed=seed)
        answers[place], first = made.answers(check[0]), first or made
    whole = Experts.fit(rows, values, weight=weight, like=first, seed=seed)
    by_row = np.zeros((len(values), whole.width), dtype=np.float32)
    for place, said in answers.items():
        by_row[fold == place] = said
    return whole, by_row


def _axes(values: np.ndarray) -> np.ndarray:
    return np.stack([values, symlog(torch.tensor(values)).numpy()], axis=1)
