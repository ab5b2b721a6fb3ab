"""The laws against mpmath and scipy in float64, against finite differences, and in both tails."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from causalqwen.distributions import FAMILIES, get_family, uniform_draws
from causalqwen.distributions.draws import philox

LAWS = {"cauchy": stats.cauchy, "gaussian": stats.norm}
finite = st.floats(-1e3, 1e3)
positive = st.floats(1e-3, 1e3)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", FAMILIES)
@given(x=finite, loc=finite, scale=positive)
def test_density_and_tails_are_scipys(name, x, loc, scale):
    law, truth = get_family(name), LAWS[name](loc, scale)
    arguments = tensor(x), tensor(loc), tensor(scale)
    np.testing.assert_allclose(law.log_prob(*arguments), truth.logpdf(x), rtol=1e-9, atol=1e-12)
    for ours, theirs in ((law.log_cdf, truth.logcdf), (law.log_sf, truth.logsf)):
        if theirs(x) > -700:  # beyond, scipy's own Gaussian tail is an approximation
            np.testing.assert_allclose(ours(*arguments), theirs(x), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(law.cdf(*arguments), truth.cdf(x), rtol=1e-6, atol=1e-15)


def test_cauchy_tails_are_exact_where_the_textbook_formula_is_zero():
    law = get_family("cauchy")
    far = torch.tensor([1e8, 1e12, 1e20], dtype=torch.float32)
    zero, one = torch.zeros(3), torch.ones(3)
    textbook = 0.5 + torch.atan(-far) / torch.pi
    assert (textbook <= 0).all(), "the formula of the documents has lost these probabilities"
    expected = [float(mpmath.log(mpmath.acot(mpmath.mpf(x.item())) / mpmath.pi)) for x in far]
    np.testing.assert_allclose(law.log_sf(far, zero, one), expected, rtol=1e-6)
    np.testing.assert_allclose(law.log_cdf(-far, zero, one), expected, rtol=1e-6)


def test_half_precision_is_raised_before_it_loses_a_tail():
    law = get_family("cauchy")
    x, zero, one = (torch.tensor([v], dtype=torch.bfloat16) for v in (1e4, 0.0, 1.0))
    assert law.log_sf(x, zero, one).dtype == torch.float32
    assert law.log_sf(x, zero, one).item() == pytest.approx(float(mpmath.log(1 / (mpmath.pi * x.item()))), rel=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_quantiles_invert_the_cdf_far_into_both_tails(name):
    law = get_family(name)
    p = tensor(1e-12, 1e-6, 0.01, 0.3, 0.5, 0.7, 0.99, 1 - 1e-6)
    np.testing.assert_allclose(law.quantile(p), LAWS[name].ppf(p), rtol=1e-7, atol=1e-9)
    zero, one = torch.zeros_like(p), torch.ones_like(p)
    np.testing.assert_allclose(law.cdf(law.quantile(p), zero, one), p, rtol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
@given(loc=finite, scale=positive, other_loc=finite, other_scale=positive)
def test_kl_is_zero_at_itself_and_positive_elsewhere(name, loc, scale, other_loc, other_scale):
    law = get_family(name)
    here, there = (tensor(loc), tensor(scale)), (tensor(other_loc), tensor(other_scale))
    assert law.kl(*here, *here).abs().item() < 1e-12
    assert law.kl(*here, *there).item() >= -1e-12
    if name == "cauchy":  # the only one that is symmetric
        assert law.kl(*here, *there).item() == pytest.approx(law.kl(*there, *here).item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_kl_is_the_integral(name):
    loc, scale, other_loc, other_scale = 0.3, 1.5, -1.0, 0.7
    law, p, q = get_family(name), LAWS[name](loc, scale), LAWS[name](other_loc, other_scale)
    grid = np.linspace(1e-7, 1 - 1e-7, 2_000_001)
    points = p.ppf(grid)
    truth = np.trapezoid(p.logpdf(points) - q.logpdf(points), grid)
    ours = law.kl(tensor(loc), tensor(scale), tensor(other_loc), tensor(other_scale)).item()
    assert ours == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("x", [-40.0, -0.3, 0.0, 2.0, 300.0])
def test_crps_is_the_integral(name, x):
    loc, scale = 0.4, 1.7
    law, truth = get_family(name), LAWS[name](loc, scale)
    cdf = lambda y: mpmath.mpf(float(truth.cdf(float(y))))  # noqa: E731
    if name == "cauchy":
        cdf = lambda y: mpmath.mpf(1) / 2 + mpmath.atan((y - loc) / scale) / mpmath.pi  # noqa: E731
    left = mpmath.quad(lambda y: cdf(y) ** 2, [-mpmath.inf, min(x, loc) - 10, x])
    right = mpmath.quad(lambda y: (1 - cdf(y)) ** 2, [x, max(x, loc) + 10, mpmath.inf])
    assert law.crps(tensor(x), tensor(loc), tensor(scale)).item() == pytest.approx(float(left + right), rel=2e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_finite_differences(name):
    law = get_family(name)
    x, loc, scale = tensor(0.3, -9.0, 25.0), tensor(0.0, 1.0, -2.0), tensor(1.0, 0.5, 3.0)
    for function in (law.log_prob, law.log_cdf, law.log_sf, law.crps):
        arguments = [t.clone().requires_grad_(True) for t in (x, loc, scale)]
        assert torch.autograd.gradcheck(function, arguments, eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_linear_map_of_draws_has_the_mapped_law(name):
    law = get_family(name)
    generator = torch.Generator().manual_seed(0)
    loc, scale = tensor(1.0, -2.0, 0.5), tensor(0.5, 1.0, 2.0)
    weight, bias = tensor(1.5, -0.5, 0.2, 0.0, 2.0, -1.0).view(2, 3), tensor(3.0, -1.0)
    draws = loc + scale * law.quantile(torch.rand(200_000, 3, generator=generator, dtype=torch.float64))
    made_loc, made_scale = law.linear(loc, scale, weight, bias)
    for row, sample in enumerate((draws @ weight.T + bias).T):
        truth = LAWS[name](made_loc[row].item(), made_scale[row].item())
        assert stats.kstest(sample.numpy(), truth.cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
@given(scales=st.lists(positive, min_size=1, max_size=4))
def test_sums_of_scales_are_those_of_a_row_of_ones(name, scales):
    law = get_family(name)
    added = law.add(*(tensor(s) for s in scales))
    mapped = law.linear_scale(tensor(*scales), torch.ones(1, len(scales), dtype=torch.float64))
    torch.testing.assert_close(added, mapped)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_of_what_lies_beyond_the_root_of_the_largest_float_are_finite_and_right(name, dtype):
    law, far = get_family(name), 1e300 if dtype == torch.float64 else 1e30
    x = torch.tensor([far, -far], dtype=dtype)
    loc, scale = torch.zeros(2, dtype=dtype, requires_grad=True), torch.full((2,), 0.5, dtype=dtype, requires_grad=True)
    crps = law.crps(x, loc, scale)
    np.testing.assert_allclose(crps.detach(), [far, far], rtol=1e-6)
    made = [crps]
    if name == "cauchy":  # a Gaussian's own log density there is beyond every float
        log_prob = law.log_prob(x, loc, scale)
        np.testing.assert_allclose(log_prob.detach(), math.log(0.5 / math.pi) - 2 * math.log(far), rtol=1e-6)
        interval = law.log_interval(x[:1], 2 * x[:1], loc[:1], scale[:1])
        np.testing.assert_allclose(interval.detach(), math.log(0.25 / math.pi) - math.log(far), rtol=1e-6)
        made += [log_prob]
    for scores in made:
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(scores.sum(), (loc, scale)))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_median_is_the_middle_and_quantiles_have_slopes_there(name):
    law = get_family(name)
    p = tensor(0.5, 0.25, 0.75).requires_grad_()
    assert law.quantile(p)[0].item() == 0.0
    (slope,) = torch.autograd.grad(law.quantile(p).sum(), p)
    density = law.log_prob(law.quantile(p), tensor(0.0), tensor(1.0)).exp()
    np.testing.assert_allclose(slope, 1 / density.detach(), rtol=1e-9)  # Q'(p) = 1/f(Q(p))


def test_an_unknown_family_is_named():
    with pytest.raises(ValueError, match="cauchy, gaussian"):
        get_family("laplace")


def test_philox_gives_the_published_vectors():
    """Known answers of Philox4x32-10 in the Random123 library."""
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        made = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
        assert tuple(word.item() for word in made) == expected


def test_draws_are_uniform_and_depend_on_nothing_but_their_key():
    seeds = torch.tensor([7, 8, 2**62, -1])
    draws = uniform_draws(seeds, 1, torch.tensor([0, 5, 5, 9]), 576)
    alone = uniform_draws(seeds[2:3], 1, 5, 576)
    assert torch.equal(draws[2:3], alone)
    assert torch.equal(uniform_draws(seeds, 1, torch.tensor([0, 5, 5, 9]), 33), draws[:, :33])
    assert not torch.equal(draws, uniform_draws(seeds, 2, torch.tensor([0, 5, 5, 9]), 576))
    many = uniform_draws(torch.arange(200), 1, 3, 576).flatten()
    assert many.min() > 0 and many.max() < 1
    assert stats.kstest(many.numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
@given(loc=st.floats(-5, 5), low=st.floats(-1e6, 1e6), width=st.floats(1e-6, 1e6), scale=positive)
def test_the_probability_of_an_interval_is_exact_far_out(name, loc, low, width, scale):
    law, a, b = get_family(name), tensor(low), tensor(low + width)
    at, spread, infinite = tensor(loc), tensor(scale), tensor(math.inf)
    found = law.log_interval(a, b, at, spread).item()
    with mpmath.workdps(60):
        ends = [(mpmath.mpf(x) - mpmath.mpf(loc)) / mpmath.mpf(scale) for x in (low, low + width)]
        if name == "cauchy":
            truth = mpmath.log((mpmath.atan(ends[1]) - mpmath.atan(ends[0])) / mpmath.pi)
        else:
            ends = [-ends[1], -ends[0]] if ends[0] > 0 else ends
            tails = [mpmath.erfc(-x / mpmath.sqrt(2)) for x in ends]
            assume(tails[1] > tails[0])
            truth = mpmath.log((tails[1] - tails[0]) / 2)
    assert found == pytest.approx(float(truth), rel=1e-5, abs=1e-8)
    below, above = (law.log_interval(*pair, at, spread).exp().item() for pair in ((-infinite, b), (b, infinite)))
    assert below + above == pytest.approx(1)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_an_interval_are_finite_and_right(name):
    law = get_family(name)
    low, high = tensor(-math.inf, -3.0, 2.0, 40.0), tensor(-1.0, 1.0, math.inf, 41.0)
    loc, scale = tensor(0.5).requires_grad_(), tensor(1.3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: law.log_interval(low, high, x, y), (loc, scale))


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_the_slope_of_a_gaussian_tail_is_right_however_far_out(dtype, digits):
    """phi(x)/Phi(x) = 1/Mills(-x), where torch's own is off by a third at -5000 in float32."""
    x = torch.tensor([-1e12, -2e4, -5e3, -1e3, -30.0, -3.0, 0.0, 2.0, 9.0], dtype=dtype, requires_grad=True)
    get_family("gaussian").log_cdf(x, x.new_zeros(()), x.new_ones(())).sum().backward()
    with mpmath.workdps(40):
        exact = [
            mpmath.npdf(v) / mpmath.ncdf(v) if v > -1e3 else -v - 1 / v + 2 / v**3 for v in map(mpmath.mpf, x.tolist())
        ]
    torch.testing.assert_close(x.grad, torch.tensor([float(v) for v in exact], dtype=dtype), rtol=digits, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_curvature_of_a_gaussian_tail_is_right_too(dtype):
    """-h (x + h), by automatic differentiation and by torch.func."""
    x = torch.tensor([-1e6, -300.0, -30.0, -3.0, 0.0, 2.0, 20.0, 60.0], dtype=dtype)
    family, zero, one = get_family("gaussian"), x.new_zeros(()), x.new_ones(())

    def log_cdf(v):
        return family.log_cdf(v, zero, one)

    with mpmath.workdps(60):
        hazard = [
            mpmath.npdf(v) / mpmath.ncdf(v) if v > -1e3 else -v - 1 / v + 2 / v**3 for v in map(mpmath.mpf, x.tolist())
        ]
        exact = [float(-h * (v + h)) for v, h in zip(x.tolist(), hazard, strict=True)]
    curved = torch.func.grad(lambda v: torch.func.grad(lambda u: log_cdf(u).sum())(v).sum())(x)
    digits = 2e-3 if dtype == torch.float32 else 1e-7
    torch.testing.assert_close(curved, torch.tensor(exact, dtype=dtype), rtol=digits, atol=1e-30)
