"""A Gaussian process over the rows of a table: what rows that are alike say of a number (docs/tables.md).

    y(x) = f(x) + noise,    Cov(f(x), f(x')) = a exp(-1/2 sum_c w_c |x_c - x'_c|^2)

x_c is what column c says: the n-grams of its text, of length 1, or its numbers, each over its own standard deviation and all
over the square root of how many they are. One width w_c for each column, the spread a and the noise are those of the greatest
marginal likelihood (Rasmussen and Williams 2006, section 5.4). Of many rows f is a sum over some of them, the landmarks (their
section 8.3.2): half of these are drawn, and half are the rows that the others tell least of.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from causalqwen.data.columns import TableRows
from causalqwen.extras import extra
from causalqwen.training.grams import Grams

with extra("tables", "a table"):
    from scipy import linalg, optimize, sparse

LANDMARKS = 3000
LEARNED_ON, MOST_CELLS = 1200, 60_000_000
"""Rows that widths are learned on: fewer where so many columns' distances would be more cells than that."""
STEPS = 40
_START, _LEAST, _MOST = 0.3, -7.0, 3.0  # width of a column at first; logarithms of what it may be
_NOISE, _JITTER = 1e-5, 1e-6
_AT_ONCE = 256
_SHARPER = 4.0  # how many times nearer a row has to be to say how far the others are off
_UNKNOWN = 1e-3  # weight of what all rows are off by, beside those near by
_TOUCHING = 0.05
_CONSTANT = 1e-9

Lengths = np.ndarray
"""Logarithms of w_c of each column, a and the noise, in this order."""


@dataclass
class GaussianProcess:
    """Fitted to two numbers of each row.

    grams: of each column of texts, in order. lengths: `Lengths`. arrays: units, the deviation of each number of the columns,
    times the square root of how many its column has; the landmarks' facts, the sparse ones (data, indices, indptr, width) and
    the dense ones [m, K]; weights [m, 2] of their covariances; missed [d, 2], of the landmarks that were drawn, which stand
    first: the squares of what the other rows are off by, over their mean.
    """

    grams: list[Grams]
    lengths: Lengths
    arrays: dict[str, np.ndarray]

    WIDTH = 5

    @classmethod
    def fit(
        cls,
        rows: TableRows,
        wanted: np.ndarray,
        *,
        weight: np.ndarray | None = None,
        lengths: Lengths | None = None,
        seed: int = 0,
    ) -> "GaussianProcess":
        """From rows and two numbers of each [n, 2], standardized. weight [n]: how often a row counts. lengths: None for the
        likeliest. They are how this process measures what is near and how far rows are off: answers of two processes compare
        where their lengths are the same."""
        texts, numbers = _apart(rows)
        units = _units(numbers)
        made = cls([Grams.fit(one) for one in texts], np.zeros(0), {"units": units})
        drawn = np.random.default_rng(seed).permutation(len(rows))
        if lengths is None:
            count = min(LEARNED_ON, int(np.sqrt(MOST_CELLS / max(1, len(rows.columns)))))
            some = drawn[:count]
            lengths = learned_lengths(made._distances(rows.taken(some)), _held_in(wanted)[some])
        made.lengths = lengths
        counts = np.ones(len(rows)) if weight is None else weight
        facts = made._facts(rows)
        chosen = drawn
        if len(rows) > LANDMARKS:
            drawn, rest = np.split(drawn, [LANDMARKS // 2])
            off = made._solve(facts, drawn, wanted, counts, rest)
            far = np.argsort(-np.square(off).sum(1), kind="stable")[: LANDMARKS - len(drawn)]
            chosen = np.concatenate([drawn, rest[far]])
        off = made._solve(facts, chosen, wanted, counts, drawn)  # the far ones are off by more than rows are
        missed = np.maximum(np.square(off), _NOISE)
        made.arrays["missed"] = missed / missed.mean(0)
        return made

    def answers(self, rows: TableRows) -> np.ndarray:
        """[n, 5]: f of both numbers; the logarithm of what the rows near by are off by, of both, beside what all are off by;
        how far the nearest row is."""
        facts, said = self._facts(rows), []
        landmarks, spread = self._landmarks(), np.exp(self.lengths[-2])
        for part, size in _blocks(facts):
            near = _nearness(part, landmarks)
            missed = self.arrays["missed"]
            sharp = near[:, : len(missed)] ** (2 * _SHARPER)
            off = (sharp @ missed + _UNKNOWN) / (sharp.sum(1, keepdims=True) + _UNKNOWN)
            gap = np.log(1 + _TOUCHING - near.max(1, keepdims=True))
            found = np.concatenate([spread * near @ self.arrays["weights"], np.log(off) / 2, gap], axis=1)
            said.append(found[:size])
        return np.concatenate(said)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays, and the rest as JSON holds it."""
        arrays = self.arrays | {"lengths": self.lengths}
        for place, grams in enumerate(self.grams):
            arrays |= {f"idf{place}.{kind}": idf for kind, idf in grams.idf.items()}
        return arrays, {"vocabularies": [grams.vocabularies for grams in self.grams]}

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> "GaussianProcess":
        """What `state` gave."""
        own = dict(arrays)
        grams = [
            Grams(vocabularies, {one[0]: own.pop(f"idf{place}.{one[0]}") for one in vocabularies})
            for place, vocabularies in enumerate(about["vocabularies"])
        ]
        return cls(grams, own.pop("lengths"), own)

    def _facts(self, rows: TableRows) -> "_Facts":
        """x of each row, each column times the root of its w_c."""
        texts, numbers = _apart(rows)
        roots = np.exp(self.lengths[: len(rows.columns)] / 2)
        of_texts = [root for root, part in zip(roots, rows.columns, strict=True) if not isinstance(part, np.ndarray)]
        of_numbers = [root for root, part in zip(roots, rows.columns, strict=True) if isinstance(part, np.ndarray)]
        said = [root * one for root, one in zip(of_texts, self._counts(texts), strict=True)]
        words = sparse.hstack(said).tocsr() if said else sparse.csr_matrix((len(rows), 0))
        scaled = np.repeat(of_numbers, [part.shape[1] for part in numbers]) / self.arrays["units"]
        return _Facts(words, np.concatenate([np.zeros((len(rows), 0)), *numbers], axis=1) * scaled)

    def _counts(self, texts: Sequence[list[str]]) -> Iterator[sparse.csr_matrix]:
        for grams, one in zip(self.grams, texts, strict=True):
            counts = grams.counts(one)
            empty = sparse.csr_matrix((len(one), 0))
            yield empty if counts is None else counts / np.sqrt(len(grams.vocabularies))

    def _distances(self, rows: TableRows) -> list[np.ndarray]:
        """-|x_c - x'_c|^2 / 2 of each column, float32 [n, n]."""
        texts, _ = _apart(rows)
        counts, found, start = self._counts(texts), [], 0
        for part in rows.columns:
            if isinstance(part, np.ndarray):
                dense = part / self.arrays["units"][start : start + part.shape[1]]
                start += part.shape[1]
                facts = _Facts(sparse.csr_matrix((len(rows), 0)), dense)
            else:
                facts = _Facts(next(counts), np.zeros((len(rows), 0)))
            found.append(_exponents(facts, facts).astype(np.float32))
        return found

    def _solve(
        self, facts: "_Facts", chosen: np.ndarray, wanted: np.ndarray, counts: np.ndarray, asked: np.ndarray
    ) -> np.ndarray:
        """Weights of the chosen landmarks, and what the rows asked are off by [m, 2] where each is left out."""
        spread, noise = np.exp(self.lengths[-2]), np.exp(self.lengths[-1]) + _NOISE
        landmarks = facts[chosen]
        among = spread * _nearness(landmarks, landmarks)
        among.flat[:: len(chosen) + 1] += _JITTER * spread
        root = linalg.cholesky(among, lower=True, overwrite_a=True, check_finite=False)

        def known(some: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for rows in np.split(some, range(1024, len(some), 1024)):
                covariances = spread * _nearness(facts[rows], landmarks)
                yield rows, linalg.solve_triangular(root, covariances.T, lower=True, check_finite=False)

        gram, right = np.zeros_like(root), np.zeros((len(chosen), 2))
        for rows, basis in known(np.arange(len(wanted))):
            weighted = basis * counts[rows]
            gram += weighted @ basis.T
            right += weighted @ wanted[rows]
        gram.flat[:: len(chosen) + 1] += noise
        factor = linalg.cholesky(gram, lower=True, overwrite_a=True, check_finite=False)
        solved = linalg.cho_solve((factor, True), right, check_finite=False)
        off = []
        for rows, basis in known(asked):
            within = linalg.solve_triangular(factor, basis, lower=True, check_finite=False)
            own = counts[rows] * np.square(within).sum(0)
            off.append((wanted[rows] - basis.T @ solved) / np.maximum(1 - own, _NOISE)[:, None])
        self.arrays |= {
            "weights": linalg.solve_triangular(root, solved, lower=True, trans=1, check_finite=False),
            "data": landmarks.words.data.astype(np.float32),
            "indices": landmarks.words.indices.astype(np.int32),
            "indptr": landmarks.words.indptr.astype(np.int64),
            "dense": landmarks.dense,
        }
        return np.concatenate(off)

    def _landmarks(self) -> "_Facts":
        parts = (self.arrays[name] for name in ("data", "indices", "indptr"))
        shape = len(self.arrays["indptr"]) - 1, sum(grams.width for grams in self.grams)
        return _Facts(sparse.csr_matrix(tuple(parts), shape=shape).astype(np.float64), self.arrays["dense"])


def learned_lengths(distances: Sequence[np.ndarray], wanted: np.ndarray) -> Lengths:
    """The likeliest `Lengths` of two processes [n, 2] that share them, of columns whose `-|x_c - x'_c|^2 / 2` are given.

    A normal law of the logarithms of w_c, wide, keeps them where the rows tell nothing.
    """
    columns = len(distances)
    center = np.log(min(_START, 10 * _START / max(columns, 1)))
    start = np.array([*np.full(columns, center), 0.0, np.log(0.05)])

    def loss(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = _unlikely(at, distances, wanted)
        away = at[:columns] - center
        slope[:columns] += 0.05 * away / len(wanted)
        return value + 0.025 * float(away @ away) / len(wanted), slope

    bounds = [(_LEAST, _MOST)] * columns + [(-3.0, 5.0), (_LEAST, 1.0)]
    found: np.ndarray = optimize.minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": STEPS}
    ).x
    return found


def _unlikely(at: Lengths, distances: Sequence[np.ndarray], wanted: np.ndarray) -> tuple[float, np.ndarray]:
    """-log p of the numbers [n, t], a number, and its gradient."""
    rows, columns = len(wanted), len(distances)
    exponent = np.zeros((rows, rows), dtype=np.float32)
    for width, distance in zip(np.exp(at[:columns]).astype(np.float32), distances, strict=True):
        exponent += width * distance
    covariance = np.exp(at[-2]) * np.exp(exponent.astype(np.float64))
    whole = covariance.copy()
    whole.flat[:: rows + 1] += np.exp(at[-1]) + _NOISE
    factor = linalg.cholesky(whole, lower=True, overwrite_a=True, check_finite=False)
    solved = linalg.cho_solve((factor, True), wanted, check_finite=False)
    inverse = linalg.cho_solve((factor, True), np.eye(rows), check_finite=False)
    count = wanted.shape[1]
    value = float((wanted * solved).sum()) / 2 + count * float(np.log(factor.diagonal()).sum())
    slope = (count * inverse - solved @ solved.T) / 2
    through = (slope * covariance).astype(np.float32)
    widths = [np.exp(width) * float(np.vdot(through, one)) for width, one in zip(at, distances, strict=False)]
    gradient = [*widths, float(through.sum(dtype=np.float64)), float(np.trace(slope) * np.exp(at[-1]))]
    return value / (rows * count), np.array(gradient) / (rows * count)


@dataclass
class _Facts:
    """What is known of rows: words, sparse [n, G], and numbers, dense [n, K]."""

    words: sparse.csr_matrix
    dense: np.ndarray

    def __len__(self) -> int:
        return len(self.dense)

    def __getitem__(self, rows: Any) -> "_Facts":
        return _Facts(self.words[rows], self.dense[rows])

    @property
    def lengths(self) -> np.ndarray:
        """|x|^2 of each."""
        return np.asarray(self.words.multiply(self.words).sum(1)).ravel() + np.square(self.dense).sum(1)


def _exponents(rows: _Facts, others: _Facts) -> np.ndarray:
    """-|x - x'|^2 / 2 [n, m], float64."""
    inner = (rows.words @ others.words.T).toarray() + rows.dense @ others.dense.T
    return np.minimum(inner - (rows.lengths[:, None] + others.lengths) / 2, 0.0)


def _nearness(rows: _Facts, others: _Facts) -> np.ndarray:
    """exp of it."""
    return np.exp(_exponents(rows, others))


def _blocks(facts: _Facts) -> Iterator[tuple[_Facts, int]]:
    """Rows in products of one shape, the last ones repeated, and how many of a block are rows: what is said of a row does not
    depend on how many others are asked about."""
    for start in range(0, len(facts), _AT_ONCE):
        places = np.arange(start, start + _AT_ONCE).clip(max=len(facts) - 1)
        yield facts[places], min(_AT_ONCE, len(facts) - start)


def _apart(rows: TableRows) -> tuple[list[list[str]], list[np.ndarray]]:
    """Columns of texts, and those of numbers."""
    texts = [part for part in rows.columns if not isinstance(part, np.ndarray)]
    return texts, [part for part in rows.columns if isinstance(part, np.ndarray)]


def _held_in(wanted: np.ndarray) -> np.ndarray:
    """Numbers [n, t], clipped to where 95% of them lie, widened by as much on both sides, and standardized again: one that is
    far beyond the others would say alone how long the lengths are. They are not clipped where 95% are one number."""
    low, high = np.quantile(wanted, [0.025, 0.975], axis=0)
    held = np.where(low < high, wanted.clip(2 * low - high, 2 * high - low), wanted)
    deviation = held.std(0)
    return (held - held.mean(0)) / np.where(deviation > _CONSTANT, deviation, 1.0)


def _units(numbers: Sequence[np.ndarray]) -> np.ndarray:
    """What each number is divided by: its deviation, and the root of how many its column has; of one that never varies,
    infinity."""
    found = [np.zeros(0)]
    for part in numbers:
        deviation = part.std(0, dtype=np.float64)
        found.append(np.where(deviation > _CONSTANT, deviation, np.inf) * np.sqrt(part.shape[1]))
    return np.concatenate(found)
