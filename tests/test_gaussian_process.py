"""The Gaussian process over a table's rows: each fast path beside the formula that it stands for."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from causalqwen.data.columns import TableReader, TableRows
from causalqwen.training import gaussian_process
from causalqwen.training.gaussian_process import GaussianProcess, _unlikely, learned_lengths
from causalqwen.training.grams import Grams

WORDS = ("red", "old", "small", "wooden", "painted")


def shop(rows: int = 40, seed: int = 0) -> tuple[TableRows, np.ndarray]:
    """Things of some kinds, and two numbers of each that follow from them, standardized."""
    random = np.random.default_rng(seed)
    kind = random.choice(["chair", "table", "lamp"], rows).tolist()
    name = [f"{random.choice(WORDS)} {one} of {chr(97 + place)}" for place, one in enumerate(kind)]
    size = random.gamma(2.0, 2.0, rows)
    table = {"name": name, "kind": [*kind[:-1], None], "size": size.tolist(), "rarely": [1.0] * (rows - 1) + [2.0]}
    value = 3.0 * (np.array(kind) == "table") + size + random.normal(0, 0.1, rows)
    both = np.stack([value, np.log(np.maximum(value, 0.1))], axis=1)
    return TableReader.fit(table, "price").rows(table), (both - both.mean(0)) / both.std(0)


def covariances(process: GaussianProcess, rows: TableRows, others: TableRows) -> np.ndarray:
    """The formula of the module, a pair of rows and a column at a time."""
    widths, spread = np.exp(process.lengths[:-2]), np.exp(process.lengths[-2])
    exponent, text, number = np.zeros((len(rows), len(others))), 0, 0
    for width, one, other in zip(widths, rows.columns, others.columns, strict=True):
        if isinstance(one, np.ndarray):
            unit = process.arrays["units"][number : number + one.shape[1]]
            x, y = one / unit, other / unit
            number += one.shape[1]
        else:
            grams = process.grams[text]
            x, y = (grams.counts(part).toarray() / np.sqrt(len(grams.vocabularies)) for part in (one, other))
            text += 1
        exponent -= width * np.square(x[:, None] - y[None]).sum(-1) / 2
    return spread * np.exp(exponent)


def test_a_row_is_told_what_the_formula_says():
    rows, wanted = shop()
    known, asked = rows.taken(np.arange(30)), rows.taken(np.arange(30, 40))
    process = GaussianProcess.fit(known, wanted[:30])
    among, between = covariances(process, known, known), covariances(process, asked, known)
    noise = np.exp(process.lengths[-1]) + gaussian_process._NOISE
    within = np.linalg.inv(among + noise * np.eye(30))
    answers = process.answers(asked)
    assert answers.shape == (10, process.WIDTH)
    np.testing.assert_allclose(answers[:, :2], between @ within @ wanted[:30], atol=2e-3)
    near = between / np.exp(process.lengths[-2])
    np.testing.assert_allclose(answers[:, 4], np.log(1.05 - near.max(1)), atol=1e-6)
    left_out = wanted[:30] - (wanted[:30] - within @ wanted[:30] / within.diagonal()[:, None])
    order = np.random.default_rng(0).permutation(30)
    missed = np.maximum(np.square(left_out), gaussian_process._NOISE)
    missed /= missed.mean(0)
    np.testing.assert_allclose(process.arrays["missed"], missed[order], rtol=0.05, atol=1e-2)
    sharp = near**8
    off = (sharp @ missed + 1e-3) / (sharp.sum(1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(answers[:, 2:4], np.log(off) / 2, atol=0.05)
    assert np.abs(answers[:, 0] - wanted[30:, 0]).mean() < 0.5 * np.abs(wanted[30:, 0]).mean()


@given(st.integers(0, 5), st.floats(-3, 1))
def test_likelihoods_and_their_slopes(seed, width):
    rows, wanted = shop(15, seed)
    process = GaussianProcess([Grams.fit(part) for part in rows.columns[:2]], np.zeros(0), {})
    process.arrays["units"] = gaussian_process._units(rows.columns[2:])
    distances = [one.astype(np.float64) for one in process._distances(rows)]
    at = np.array([width, -1.0, 0.3, -2.0, 0.5, -2.0])
    value, slope = _unlikely(at, distances, wanted)
    process.lengths = at
    whole = covariances(process, rows, rows) + (np.exp(at[-1]) + gaussian_process._NOISE) * np.eye(15)
    dense = -sum(multivariate_normal(np.zeros(15), whole).logpdf(one) for one in wanted.T)
    assert value * 30 + 15 * np.log(2 * np.pi) == pytest.approx(dense, rel=1e-4)
    step = 1e-3
    for place in range(len(at)):
        beside = [_unlikely(at + sign * step * np.eye(6)[place], distances, wanted)[0] for sign in (1, -1)]
        assert slope[place] == pytest.approx((beside[0] - beside[1]) / (2 * step), abs=2e-4)


def test_widths_tell_a_column_that_matters_from_one_that_does_not():
    random = np.random.default_rng(0)
    x = random.normal(size=(150, 2)).astype(np.float32)
    rows = TableRows([""] * 150, x, [x[:, :1], x[:, 1:]])
    wanted = np.stack([np.sin(2 * x[:, 0]), np.cos(2 * x[:, 0])], axis=1)
    process = GaussianProcess.fit(rows, wanted)
    matters, does_not = process.lengths[:2]
    assert matters > np.log(0.5) and does_not < matters - 3
    np.testing.assert_allclose(process.arrays["units"], x.std(0), rtol=1e-6)
    np.testing.assert_allclose(gaussian_process._units([x]), x.std(0) * np.sqrt(2), rtol=1e-6)
    nowhere = TableRows([""], x[:1] + 1000, [x[:1, :1] + 1000, x[:1, 1:]])
    np.testing.assert_allclose(process.answers(nowhere), [[0, 0, 0, 0, np.log(1.05)]], atol=1e-9)
    distances = [-np.square(one[:, None] - one[None]) / 2 for one in x.T / 3]
    again = learned_lengths(distances, wanted)
    slope = _unlikely(again, distances, wanted)[1][0] + 0.05 * (again[0] - np.log(0.3)) / 150
    assert abs(slope) < 1e-4
    assert _unlikely(again, distances, wanted)[0] < _unlikely(np.array([-1.2, -1.2, 0, -3]), distances, wanted)[0]


def test_one_value_far_beyond_the_others_does_not_say_how_long_the_lengths_are():
    rows, wanted = shop(80)
    fits = []
    for value in (10.0, 1e4):
        wild = wanted.copy()
        wild[7] = value
        wild = (wild - wild.mean(0)) / wild.std(0)
        fits.append((GaussianProcess.fit(rows, wild), wild))
    (near, _), (far, wild) = fits
    np.testing.assert_allclose(near.lengths, far.lengths, atol=0.05)
    assert wild[7].min() > 8 and near.lengths.max() - near.lengths.min() > 1
    low, high = np.quantile(wanted, [0.025, 0.975], axis=0)
    clipped = np.clip(wanted, low - (high - low), high + (high - low))
    np.testing.assert_allclose(gaussian_process._held_in(wanted), (clipped - clipped.mean(0)) / clipped.std(0))


def test_a_number_that_is_nearly_always_the_same_is_learned_where_it_is_not():
    x = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    rows = TableRows([""] * 300, x, [x[:, :1], x[:, 1:]])
    value = np.maximum(x[:, 0] - np.sort(x[:, 0])[-6], 0.0)  # five are more than 0
    wanted = np.stack([(value - value.mean()) / value.std()] * 2, axis=1)
    np.testing.assert_allclose(gaussian_process._held_in(wanted), wanted, atol=1e-6)
    said = GaussianProcess.fit(rows, wanted).answers(rows)[:, 0]
    assert np.square(said - wanted[:, 0]).mean() < 0.1


def test_of_many_rows_the_landmarks_are_some_drawn_ones_and_those_that_these_tell_least_of(monkeypatch):
    rows, wanted = shop(60)
    whole = GaussianProcess.fit(rows, wanted, seed=1)
    odd = np.random.default_rng(1).permutation(60)[-1]  # drawn last
    moved = wanted.copy()
    moved[odd] += 5.0
    monkeypatch.setattr(gaussian_process, "LANDMARKS", 40)
    some = GaussianProcess.fit(rows, moved, lengths=whole.lengths, seed=1)
    assert len(some.arrays["weights"]) == 40 == len(some.arrays["dense"])
    asked = rows.taken(np.array([odd]))
    assert some.answers(asked)[0, 4] == pytest.approx(np.log(0.05), abs=1e-3)
    close = GaussianProcess.fit(rows, wanted, lengths=whole.lengths, seed=1)
    np.testing.assert_allclose(close.answers(rows)[:, :2], whole.answers(rows)[:, :2], atol=0.1)


def test_few_landmarks_do_not_say_that_rows_are_further_off(monkeypatch):
    """The far ones are landmarks because they are far off: fits of more and of fewer rows are to say the same of a new one."""
    rows, wanted = shop(300)
    known, asked = rows.taken(np.arange(200)), rows.taken(np.arange(200, 300))
    noisy = wanted + np.random.default_rng(0).normal(0, 0.3, wanted.shape)
    whole = GaussianProcess.fit(known, noisy[:200])
    monkeypatch.setattr(gaussian_process, "LANDMARKS", 150)
    some = GaussianProcess.fit(known, noisy[:200], lengths=whole.lengths)
    assert len(some.arrays["missed"]) == 75
    away = some.answers(asked)[:, 2:4].mean(0) - whole.answers(asked)[:, 2:4].mean(0)
    assert np.abs(away).max() < 0.15


def test_a_row_that_counts_twice_is_one_that_stands_there_twice():
    rows, wanted = shop(20)
    lengths = GaussianProcess.fit(rows, wanted).lengths
    twice = np.concatenate([np.arange(20), [3, 7]])
    weight = np.bincount(twice).astype(float)
    weighted = GaussianProcess.fit(rows, wanted, weight=weight, lengths=lengths)
    repeated = GaussianProcess.fit(rows.taken(twice), wanted[twice], lengths=lengths)
    repeated.grams, repeated.arrays["units"] = weighted.grams, weighted.arrays["units"]
    repeated._solve(repeated._facts(rows.taken(twice)), np.arange(22), wanted[twice], np.ones(22), np.arange(22))
    np.testing.assert_allclose(weighted.answers(rows)[:, :2], repeated.answers(rows)[:, :2], atol=2e-3)
    noise = (np.exp(lengths[-1]) + gaussian_process._NOISE) / weight
    inverse = np.linalg.inv(covariances(weighted, rows, rows) + np.diag(noise))
    missed = np.maximum(np.square(inverse @ wanted / inverse.diagonal()[:, None]), gaussian_process._NOISE)
    order = np.random.default_rng(0).permutation(20)
    np.testing.assert_allclose(weighted.arrays["missed"], (missed / missed.mean(0))[order], rtol=0.05, atol=1e-2)


def test_saved_it_says_the_same_whoever_else_is_asked():
    rows, wanted = shop()
    process = GaussianProcess.fit(rows, wanted)
    answers = process.answers(rows)
    arrays, about = process.state()
    again = GaussianProcess.from_state(arrays, json.loads(json.dumps(about)))
    np.testing.assert_allclose(again.answers(rows), answers, atol=1e-5)
    some = np.array([17, 3, 25])
    np.testing.assert_allclose(process.answers(rows.taken(some)), answers[some], rtol=1e-12)


@pytest.mark.parametrize("columns", ["none", "empty texts", "constant"])
def test_rows_that_tell_nothing_are_told_the_mean(columns):
    wanted = np.random.default_rng(0).normal(size=(30, 2))
    wanted -= wanted.mean(0)
    parts = {"none": [], "empty texts": [[""] * 30], "constant": [np.ones((30, 2), dtype=np.float32)]}[columns]
    rows = TableRows([""] * 30, np.zeros((30, 0), dtype=np.float32), parts)
    answers = GaussianProcess.fit(rows, wanted).answers(rows)
    np.testing.assert_allclose(answers[:, :2], 0, atol=1e-3)
    assert np.isfinite(answers).all()
