"""What ordinary regressions say of a table's rows, as further columns for the value head (docs/tables.md).

Two experts: ridge regression on character and word n-grams with the row's numbers, and extremely randomised trees on the
n-grams' principal components with the same numbers. Both answer on two axes, the value itself and its symlog. A training row is
answered by experts that were fitted without it and its group, so that the value head learns how far they can be trusted.
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
    from sklearn.ensemble import ExtraTreesRegressor
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

FOLDS = 5
ANSWERS = 4
"""Numbers per row: two experts on two axes."""
_PENALTIES = (0.1, 0.5, 2.0, 10.0, 50.0)
_TREES, _LEAF = 100, 2
_COMPONENTS = 64
_GRAMS: tuple[dict[str, Any], ...] = (
    {"analyzer": "char_wb", "ngram_range": (2, 5), "min_df": 2, "max_features": 60_000},
    {"analyzer": "word", "ngram_range": (1, 2), "token_pattern": r"\S+", "max_features": 60_000},
)

Rows = tuple[list[str], np.ndarray]
"""The words and the numbers [n, K] of some rows."""


@dataclass
class Experts:
    """Two regressions, fitted.

    penalty: of the ridge. vocabularies: of each kind of n-grams, its place in `_GRAMS` first; none for a table without words.
    arrays: center and width [2] of the two axes; idf of the n-grams, float32; weights [2, D] and intercepts [2] of the ridge;
    components [64, D of the n-grams]; the nodes of all trees, end to end: left and right child (-1 at a leaf), feature, cut
    and leaf [nodes, 2], and each tree's root.
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
        made._grow(made._narrow(counts, numbers), wanted, weight, seed)
        return made

    def answers(self, rows: Rows) -> np.ndarray:
        """Float32 [n, 4]: each expert's answer on the value's own axis and on that of its symlog, standardized."""
        words, numbers = rows
        counts = self._counts(words)
        of_ridge = self._wide(counts, numbers) @ self.arrays["weights"].T + self.arrays["intercepts"]
        return np.concatenate([of_ridge, self._walk(self._narrow(counts, numbers))], axis=1).astype(np.float32)

    def in_units(self, answers: np.ndarray) -> np.ndarray:
        """What each expert says of the value itself, float64 [n, 2], of answers [n, 4]."""
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
        nodes: dict[str, list[np.ndarray]] = {
            "left": [],
            "right": [],
            "feature": [],
            "cut": [],
            "leaf": [],
            "roots": [],
        }
        start = 0
        for tree in (one.tree_ for one in forest.estimators_):
            for name, child in (("left", tree.children_left), ("right", tree.children_right)):
                nodes[name].append(np.where(child < 0, -1, child + start).astype(np.int32))
            nodes["feature"].append(tree.feature.clip(0).astype(np.int32))
            nodes["cut"].append(tree.threshold.astype(np.float64))
            nodes["leaf"].append(tree.value[:, :, 0].astype(np.float32))
            nodes["roots"].append(np.array([start], dtype=np.int32))
            start += tree.node_count
        self.arrays |= {name: np.concatenate(parts) for name, parts in nodes.items()}

    def _walk(self, x: np.ndarray) -> np.ndarray:
        """The mean answer [n, 2] of all trees."""
        trees = {name: self.arrays[name] for name in ("left", "right", "feature", "cut", "leaf")}
        total, rows = np.zeros((len(x), 2)), np.arange(len(x))
        for root in self.arrays["roots"].tolist():
            at = np.full(len(x), root)
            while (inner := trees["left"][at] >= 0).any():
                below = x[rows, trees["feature"][at]] <= trees["cut"][at]
                at = np.where(inner, np.where(below, trees["left"][at], trees["right"][at]), at)
            total += trees["leaf"][at]
        return total / len(self.arrays["roots"])


def fit_experts(
    rows: Rows, values: np.ndarray, fold: np.ndarray, *, weight: np.ndarray | None = None, seed: int = 0
) -> tuple[Experts, np.ndarray]:
    """Experts on all rows, and each row's answers [n, 4] by experts that were fitted without its fold (int [n]).

    The first fold alone chooses the penalty of the ridge.
    """
    answers = np.zeros((len(values), ANSWERS), dtype=np.float32)
    penalty = None
    for place in tqdm(np.unique(fold).tolist(), desc="experts", leave=False):
        held, rest = fold == place, fold != place
        theirs = None if weight is None else weight[rest]
        check = (_part(rows, held), values[held])
        made = Experts.fit(_part(rows, rest), values[rest], weight=theirs, penalty=penalty, check=check, seed=seed)
        answers[held], penalty = made.answers(check[0]), made.penalty
    return Experts.fit(rows, values, weight=weight, penalty=penalty, seed=seed), answers


def _axes(values: np.ndarray) -> np.ndarray:
    return np.stack([values, symlog(torch.tensor(values)).numpy()], axis=1)


def _part(rows: Rows, of: np.ndarray) -> Rows:
    return [rows[0][place] for place in np.flatnonzero(of)], rows[1][of]
