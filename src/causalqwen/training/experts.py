"""What ordinary regressions say of a table's rows, as further columns for the value head (docs/tables.md).

Three experts: ridge regression on character and word n-grams with the row's numbers; extremely randomised trees on the n-grams'
principal components with the same numbers; and gradient-boosted trees on these. Each answers on two axes, the value itself and
its symlog. A training row is answered by experts that were fitted without it and its group, so that the value head learns how
far they can be trusted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from causalqwen.extras import extra
from causalqwen.numbers import symlog

with extra("tables", "a table"):
    from scipy import sparse
    from sklearn.decomposition import TruncatedSVD
    from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

FOLDS = 5
_PENALTIES = (0.1, 0.5, 2.0, 10.0, 50.0)
_TREES, _LEAF = 100, 2
_STEPS, _RATE = 300, 0.06
_ROWS_OF_STEP = 4
"""Boosting takes at most one step for so many rows: few rows are learned by heart in few steps."""
_COMPONENTS = 64
_GRAMS: tuple[dict[str, Any], ...] = (
    {"analyzer": "char_wb", "ngram_range": (2, 5), "min_df": 2, "max_features": 60_000},
    {"analyzer": "word", "ngram_range": (1, 2), "token_pattern": r"\S+", "max_features": 60_000},
)

Rows = tuple[list[str], np.ndarray]
"""The words and the numbers [n, K] of some rows."""


@dataclass
class Experts:
    """Regressions, fitted.

    penalty: of the ridge. vocabularies: of each kind of n-grams, its place in `_GRAMS` first; none for a table without words.
    arrays: center and width [2] of the two axes; idf of the n-grams, float32; weights [2, D] and intercepts [2] of the ridge;
    components [64, D of the n-grams]; the nodes of all trees, end to end: left and right child (-1 at a leaf), feature, cut
    and leaf [nodes, 2], and each tree's root; the same of the boosted trees behind `boosted_`, whose answer is the sum of their
    leaves and boosted_start [2]. Files of earlier versions hold no boosted trees.
    """

    penalty: float
    arrays: dict[str, np.ndarray]
    vocabularies: list[list[str]]

    @classmethod
    def fit(
        cls,
        rows: Rows,
        values: np.ndarray,
        *,
        weight: np.ndarray | None = None,
        penalty: float | None = None,
        check: tuple[Rows, np.ndarray] | None = None,
        seed: int = 0,
    ) -> "Experts":
        """From rows and values [n]. penalty: None for the one whose ridge answers the rows and values of `check` best."""
        words, numbers = rows
        both = _axes(values)
        center, width = both.mean(0), np.maximum(both.std(0), 1e-12)
        wanted = (both - center) / width
        made = cls(0.0, {"center": center, "width": width}, [])
        if any(words):
            made._fit_grams(words)
        counts = made._counts(words)
        if counts is not None and min(counts.shape) > 2:
            size = min(_COMPONENTS, min(counts.shape) - 1)
            made.arrays["components"] = TruncatedSVD(size, random_state=seed).fit(counts).components_.astype(np.float32)
        wide = made._wide(counts, numbers)
        ridges = [Ridge(one).fit(wide, wanted, weight) for one in (_PENALTIES if penalty is None else [penalty])]
        ridge = ridges[0]
        if check is not None and len(ridges) > 1:
            (held_words, held_numbers), held_values = check
            x = made._wide(made._counts(held_words), held_numbers)
            right = (_axes(held_values) - center) / width
            ridge = min(ridges, key=lambda one: float(np.square(one.predict(x) - right).sum()))
        made.penalty = float(ridge.alpha)
        made.arrays |= {"weights": ridge.coef_.astype(np.float32), "intercepts": ridge.intercept_}
        narrow = made._narrow(counts, numbers)
        made._grow(narrow, wanted, weight, seed)
        made._boost(narrow, wanted, weight, seed)
        return made

    @property
    def width(self) -> int:
        """Numbers per row: each expert's on two axes."""
        return 6 if "boosted_start" in self.arrays else 4

    def answers(self, rows: Rows) -> np.ndarray:
        """Float32 [n, width]: each expert's answer on the value's own axis and on that of its symlog, standardized."""
        words, numbers = rows
        counts = self._counts(words)
        narrow = self._narrow(counts, numbers)
        said = [self._wide(counts, numbers) @ self.arrays["weights"].T + self.arrays["intercepts"]]
        said.append(self._walk(narrow) / len(self.arrays["roots"]))
        if self.width > 4:
            said.append(self._walk(narrow, "boosted_") + self.arrays["boosted_start"])
        return np.concatenate(said, axis=1).astype(np.float32)

    def in_units(self, answers: np.ndarray) -> np.ndarray:
        """What each expert says of the value itself, float64 [n, experts], of answers [n, width]."""
        said: np.ndarray = answers[:, ::2].astype(np.float64) * self.arrays["width"][0] + self.arrays["center"][0]
        return said

    def state(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors, their names behind `name`, and the rest as JSON holds it."""
        tensors = {f"{name}{key}": torch.from_numpy(np.ascontiguousarray(value)) for key, value in self.arrays.items()}
        return tensors, {"penalty": self.penalty, "vocabularies": self.vocabularies}

    @classmethod
    def from_state(cls, tensors: dict[str, torch.Tensor], about: dict[str, Any], name: str) -> "Experts":
        """What `state` gave."""
        own = {key.removeprefix(name): tensor.numpy() for key, tensor in tensors.items() if key.startswith(name)}
        return cls(about["penalty"], own, about["vocabularies"])

    def _fit_grams(self, words: Sequence[str]) -> None:
        for place, settings in enumerate(_GRAMS):
            try:
                vectorizer = TfidfVectorizer(sublinear_tf=True, **settings).fit(words)
            except ValueError:  # not one gram that stands often enough
                continue
            self.vocabularies.append([str(place), *(str(gram) for gram in vectorizer.get_feature_names_out())])
            self.arrays[f"idf{place}"] = vectorizer.idf_.astype(np.float32)

    def _counts(self, words: Sequence[str]) -> sparse.csr_matrix | None:
        """TF-IDF of the n-grams, each kind of length 1; None where there are none."""
        parts = []
        for place, *grams in self.vocabularies:
            settings = {
                name: value for name, value in _GRAMS[int(place)].items() if name not in ("min_df", "max_features")
            }
            reader = TfidfVectorizer(sublinear_tf=True, vocabulary=grams, **settings)
            reader.idf_ = self.arrays[f"idf{place}"].astype(np.float64)
            parts.append(reader.transform(words))
        return sparse.hstack(parts).tocsr() if parts else None

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
    rows: Rows, values: np.ndarray, fold: np.ndarray, *, weight: np.ndarray | None = None, seed: int = 0
) -> tuple[Experts, np.ndarray]:
    """Experts on all rows, and each row's answers [n, width] by experts that were fitted without its fold (int [n]).

    The first fold alone chooses the penalty of the ridge.
    """
    answers, penalty = {}, None
    for place in tqdm(np.unique(fold).tolist(), desc="experts", leave=False):
        held, rest = fold == place, fold != place
        theirs = None if weight is None else weight[rest]
        check = (_part(rows, held), values[held])
        made = Experts.fit(_part(rows, rest), values[rest], weight=theirs, penalty=penalty, check=check, seed=seed)
        answers[place], penalty = made.answers(check[0]), made.penalty
    by_row = np.zeros((len(values), made.width), dtype=np.float32)
    for place, said in answers.items():
        by_row[fold == place] = said
    return Experts.fit(rows, values, weight=weight, penalty=penalty, seed=seed), by_row


def _axes(values: np.ndarray) -> np.ndarray:
    return np.stack([values, symlog(torch.tensor(values)).numpy()], axis=1)


def _part(rows: Rows, of: np.ndarray) -> Rows:
    return [rows[0][place] for place in np.flatnonzero(of)], rows[1][of]
