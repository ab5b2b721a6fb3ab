"""Extremely randomised trees on the numbers of a table's rows: what they say is one block more (docs/tables.md).

A training row is answered by trees that were fitted without its fold and its group, so that the kernel learns how far they can
be trusted.
"""

from dataclasses import dataclass

import numpy as np

from causalqwen.extras import extra

with extra("tables", "a table"):
    from sklearn.ensemble import ExtraTreesRegressor

_TREES, _FOLDS = 100, 5
_HOW = {"min_samples_leaf": 2, "max_features": 0.5, "random_state": 0}


@dataclass(frozen=True)
class Trees:
    """Trees, fitted, their nodes end to end: left and right child (-1 at a leaf), feature, cut and leaf; roots of each tree."""

    left: np.ndarray
    right: np.ndarray
    feature: np.ndarray
    cut: np.ndarray
    leaf: np.ndarray
    roots: np.ndarray

    @classmethod
    def fit(cls, x: np.ndarray, y: np.ndarray) -> "Trees":
        """To y [n], of rows x [n, K]."""
        trees = [made.tree_ for made in ExtraTreesRegressor(_TREES, **_HOW).fit(x, y).estimators_]
        roots = np.cumsum([0, *(tree.node_count for tree in trees)])[:-1]

        def child(side: str) -> np.ndarray:
            kept = [(getattr(tree, f"children_{side}"), root) for tree, root in zip(trees, roots, strict=True)]
            return np.concatenate([np.where(place < 0, -1, place + root) for place, root in kept]).astype(np.int32)

        return cls(
            left=child("left"),
            right=child("right"),
            feature=np.concatenate([tree.feature for tree in trees]).clip(0).astype(np.int32),
            cut=np.concatenate([tree.threshold for tree in trees]),
            leaf=np.concatenate([tree.value[:, 0, 0] for tree in trees]),
            roots=roots.astype(np.int32),
        )

    def answers(self, x: np.ndarray) -> np.ndarray:
        """What they say of rows x [n, K], float32 [n, 1]."""
        total, rows = np.zeros(len(x)), np.arange(len(x))
        for root in self.roots.tolist():
            at = np.full(len(x), root)
            while (inner := self.left[at] >= 0).any():
                below = x[rows, self.feature[at]] <= self.cut[at]
                at = np.where(inner, np.where(below, self.left[at], self.right[at]), at)
            total += self.leaf[at]
        return (total[:, None] / len(self.roots)).astype(np.float32)


def fit_trees(x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> tuple[Trees, np.ndarray]:
    """Trees on all rows x [n, K] and y [n], and each row's answer [n, 1] by trees that were fitted without its fold. groups:
    int [n], each of one fold."""
    fold = (np.random.default_rng(0).permutation(groups.max() + 1) % _FOLDS)[groups]
    answers = np.zeros((len(x), 1), dtype=np.float32)
    for place in np.unique(fold):
        held = fold == place
        answers[held] = Trees.fit(x[~held], y[~held]).answers(x[held])
    return Trees.fit(x, y), answers
