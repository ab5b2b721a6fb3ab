"""Ridge in closed form: leave-one-out is that of refits, its distribution covers, and bad input is refused."""

import numpy as np
import pytest
from sklearn.kernel_ridge import KernelRidge as Refit

from causalqwen.evaluation.number_table import NumberTable
from causalqwen.evaluation.rivals import crps_of, fit_ngram_ridge, inside
from causalqwen.numbers import CRPS_LEVELS, ValueLaw
from causalqwen.training.closed_form import AXES, INTERCEPT, KernelRidge


def rows(count, seed=0, noise=0.3):
    """x [n, 4], and values that are linear in x, noisier where x_0 is large, far from zero."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 4))
    return x, 50 + x @ [3.0, -2.0, 0.0, 1.0] + noise * np.exp(x[:, 0]) * generator.normal(size=count)


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_left_out_is_what_refits_predict(seed):
    x, values = rows(40, seed)
    kernel = x @ x.T
    made = KernelRidge(kernel, values)
    whole, y = kernel / made.unit + INTERCEPT, AXES[made.axis][0](values)
    spread = np.log(np.abs(y - made.location.left_out) + (y - made.location.left_out).std() / 20)
    for target, solution in ((y, made.location), (spread, made.log_scale)):
        for row in (0, 7, 39):
            rest = np.arange(40) != row
            refit = Refit(alpha=solution.ridge, kernel="precomputed").fit(whole[rest][:, rest], target[rest])
            assert solution.left_out[row] == pytest.approx(refit.predict(whole[None, row, rest])[0], rel=1e-6, abs=1e-8)


def test_features_that_are_centred_do_not_make_leave_one_out_trust_no_ridge():
    """On noise that no feature explains, as many features as rows: the intercept is in the kernel, so the ridge is high."""
    generator = np.random.default_rng(0)
    x, values = generator.normal(size=(80, 200)), 10 + generator.normal(size=80)
    x -= x.mean(0)
    made = KernelRidge(x @ x.T, values)
    found = made.predict(generator.normal(size=(400, 200)) @ x.T)
    truth = 10 + generator.normal(size=400)
    covered = np.mean(inside(found[:, [9, 189]], truth))
    assert made.location.ridge >= 1 and 0.84 <= covered <= 0.97


def test_its_distribution_is_wide_where_rows_are_noisy_and_covers():
    x, values = rows(300)
    new, truth = rows(1000, seed=5)
    found = KernelRidge(x @ x.T, values).predict(new @ x.T)
    assert (np.diff(found) >= 0).all()
    for level, ends in ((0.5, [49, 149]), (0.9, [9, 189])):
        assert inside(found[:, ends], truth).mean() == pytest.approx(level, abs=0.05)
    width = found[:, 189] - found[:, 9]
    assert width[new[:, 0] > 1].mean() > 3 * width[new[:, 0] < -1].mean()


@pytest.mark.parametrize(("axis", "of"), [("log", np.exp), ("identity", lambda y: y)])
def test_the_axis_is_the_one_on_which_rows_are_linear(axis, of):
    x, values = rows(200, noise=0.05)
    y = (values - 50) / 3
    assert KernelRidge(x @ x.T, of(y)).axis == axis


def test_few_rows_and_numbers_that_are_none_are_refused():
    for values in ([1.0, 2.0], [1.0, 2.0, np.nan]):
        with pytest.raises(ValueError, match="three rows"):
            KernelRidge(np.eye(len(values)), np.array(values))


def test_letters_tell_a_price():
    """Boosting on compressed letters is 1.1 of its error or worse: the rival that is shown is the strong one."""
    generator = np.random.default_rng(0)
    things, colours = {"chair": 40, "lamp": 25, "table": 180, "sofa": 400}, {"red": 1.0, "blue": 1.2, "golden": 2.0}

    def table(count):
        names = [(generator.choice(list(things)), generator.choice(list(colours))) for _ in range(count)]
        prices = [things[t] * colours[c] * np.exp(0.1 * generator.normal()) for t, c in names]
        return NumberTable([f"a {c} {t} costs" for t, c in names], np.zeros((count, 1)), np.array(prices))

    train, validation, test = table(120), table(20), table(200)
    found = fit_ngram_ridge(train, validation, 0)(test).quantiles
    assert crps_of(found, test.values, ValueLaw()).mean() < 0.075 * test.values.mean()  # noise of 10% has 0.056
    assert found.shape == (200, len(CRPS_LEVELS)) and (found > 0).all()
