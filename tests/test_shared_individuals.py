"""Values that share an individual: likelihood, posterior, training, prediction."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from causalqwen import CausalDecoding, CausalQwenForCausalLM, Individual, Observation
from causalqwen.data import Example, Row, RowError, encode_rows
from causalqwen.data.rows import parse_row
from causalqwen.decoding import BoundDecoding
from causalqwen.distributions import get_family
from causalqwen.individuals.evidence import ValueEvidence
from causalqwen.individuals.marginal import line_posterior, loading_sizes, value_marginal
from causalqwen.individuals.posterior import find_posterior
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.prediction import MixedNumberPrediction
from causalqwen.parts.crossing import Crossing, held
from causalqwen.training import TrainSettings, ValueStage, train
from causalqwen.training.batches import FactRows
from causalqwen.training.features import FactStore, token_facts
from causalqwen.training.stages import let_cross
from conftest import graft_tiny

GAUSSIAN, CAUCHY = get_family("gaussian"), get_family("cauchy")


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the likelihood --------------------------------------------------------------------------------------------------


def test_the_gaussian_marginal_is_a_multivariate_normal():
    residuals, loadings, scale = draws(5), draws(5, 3, seed=1), draws(5, seed=2).exp()
    covariance = (loadings @ loadings.T + torch.diag(scale**2)).numpy()
    expected = stats.multivariate_normal(cov=covariance).logpdf(residuals.numpy())
    assert value_marginal(GAUSSIAN, residuals, loadings, scale).item() == pytest.approx(expected, rel=1e-10)


def exact_cauchy_marginal(residuals, sizes, scale):
    """The integral of a product of Cauchy densities over the line, by residues, in 120 digits."""
    with mpmath.workdps(120):
        poles = [mpmath.mpc(0, 1)]
        for r, s, w in zip(residuals, sizes, scale, strict=True):
            poles.append(mpmath.mpc(mpmath.mpf(r) / s, mpmath.mpf(w) / abs(s)))
        total = mpmath.mpc(0)
        for pole in poles:
            below = pole - mpmath.conj(pole)
            for other in poles:
                if other is not pole:
                    below *= (pole - other) * (pole - mpmath.conj(other))
            total += 1 / below
        factor = 2j * mpmath.pi / mpmath.pi
        for size, width in zip(sizes, scale, strict=True):
            factor *= mpmath.mpf(width) / mpmath.pi / mpmath.mpf(size) ** 2
        return float(mpmath.log((total * factor).real))


@given(seed=st.integers(0, 10**6), count=st.integers(1, 8))
def test_the_cauchy_marginal_is_exact_whatever_the_widths(seed, count):
    """Guesses that lie far apart, each sharp or wide by orders of magnitude; some values are reached the other way."""
    generator = torch.Generator().manual_seed(seed)

    def orders(low, high):
        return 10 ** (low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64))

    residuals = torch.randn(count, generator=generator, dtype=torch.float64) * orders(-1, 3)
    sizes, scale = orders(-1.5, 1.5) * torch.randn(count, generator=generator).sign(), orders(-3.5, 1.5)
    found = value_marginal(CAUCHY, residuals, sizes[:, None], scale).item()
    assert found == pytest.approx(exact_cauchy_marginal(*(t.tolist() for t in (residuals, sizes, scale))), abs=1e-5)


def test_one_value_alone_has_the_law_that_predicts_it():
    for law in (GAUSSIAN, CAUCHY):
        loadings, scale, residual = draws(1, 5), torch.tensor([0.7]), torch.tensor([1.3])
        marginal = law.add(law.linear_scale(loadings.abs(), torch.ones(1, 5).double())[:, 0], scale.double())
        expected = law.log_prob(residual.double(), torch.zeros(1), marginal)
        assert value_marginal(law, residual, loadings, scale).item() == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("law", [GAUSSIAN, CAUCHY], ids=str)
def test_many_individuals_at_once_are_each_one_of_them_and_gradients_flow(law):
    residuals, loadings, scale = draws(3, 4), draws(3, 4, 5, seed=1), draws(3, 4, seed=2).exp()
    together = value_marginal(law, residuals, loadings, scale)
    alone = [value_marginal(law, *columns).item() for columns in zip(residuals, loadings, scale, strict=True)]
    assert together.tolist() == pytest.approx(alone, rel=1e-9)
    inputs = [t[0].clone().requires_grad_(True) for t in (residuals, loadings, scale)]
    # where the grid lies moves with the inputs: finite differences see its error, not the gradient's
    torch.autograd.gradcheck(lambda *x: value_marginal(law, *x), inputs, eps=1e-5, atol=1e-4, rtol=1e-3)


# ---- who crosses -----------------------------------------------------------------------------------------------------


@given(turn=st.floats(-5, 5), toward=st.sampled_from([-1.0, 1.0]))
def test_a_turn_is_held_between_minus_one_and_one_and_may_always_come_back(turn, toward):
    at = torch.tensor(turn, dtype=torch.float64, requires_grad=True)
    r = held(at)
    (-toward * r).backward()  # descent moves r toward that side
    assert r.item() == min(max(turn, -1.0), 1.0)
    assert -at.grad.item() == (0.0 if turn * toward >= 1 else toward)


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_a_number_alone_has_the_same_law_however_an_individual_turns_around(tiny_tokenizer, family):
    """|r|^a + (1 - |r|^a) = 1 for every stable law (theory 3.14); of several numbers the association alone changes."""
    model = graft_tiny("llama", tiny_tokenizer, value_family=family)
    z = torch.randn(5, model.config.hidden_size)
    before, (whole, left) = Chain(model, z).value(), Chain(model, z).value_loadings()
    crossing = let_cross(model)
    assert model.config.value_crossing == (8 if family == "gaussian" else 1)
    torch.testing.assert_close(Chain(model, z).value(), before)
    torch.testing.assert_close(Chain(model, z).value_loadings(), (whole, left))  # nobody crosses yet
    torch.nn.init.normal_(crossing.turn.weight, std=3.0)
    law, (loadings, noise) = model.action.value_law, Chain(model, z).value_loadings()
    torch.testing.assert_close(Chain(model, z).value(), before)
    r = crossing(model.value_branch.standardize(z))
    assert (r < 0).any() and (r > 0).any()
    torch.testing.assert_close(loadings, r * whole)
    rest = loading_sizes(law, whole * (1 - r.abs() ** law.alpha) ** (1 / law.alpha))
    torch.testing.assert_close(noise, law.add(left, rest))


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_what_is_drawn_of_somebody_who_crosses_is_what_is_integrated(tiny_tokenizer, family):
    """An individual held over positions, with fresh noise: loc and what is left beside them, as `value_loadings` has them."""
    model = graft_tiny("llama", tiny_tokenizer, value_family=family)
    torch.nn.init.normal_(let_cross(model).turn.weight, std=0.3)
    z = torch.randn(1, 4, model.config.hidden_size)
    e1 = torch.rand(model.config.causal_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plan = CausalDecoding(individual=Individual(e1), noise="marginal")
    bound = BoundDecoding.bind(plan, 1, len(e1), torch.device("cpu"))
    loc, scale = Chain(model, z, bound.at(torch.arange(4)[None])).value()
    chain = Chain(model, z)
    loadings, left = chain.value_loadings()
    centre = model.action.value(*chain.read_by_values())[0]
    known = model.action.value_law.quantile(e1).float()
    torch.testing.assert_close(loc, centre + loadings @ known, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scale, left)


def test_residuals_tell_in_which_contexts_people_turn_around():
    """One trait of two signs: one direction. Two traits: two, as their covariance has it. No trait: hardly any."""
    n, people = 600, torch.arange(600) // 6
    x = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).unsqueeze(-1) * torch.tensor([1.0, 0.5, -1.0])
    trait, noise = draws(100)[people], draws(n, seed=1)
    side = x[:, 0].double()
    crossing = Crossing(3, 16, 8)
    size, rest = crossing.lean(x, 5 * trait * side * (1 + 0.4 * side) + noise + 3, people)
    r = crossing(x)
    torch.testing.assert_close(size[:2], torch.tensor([7.0, 3.0]).double(), atol=0.7, rtol=0.0)
    assert (
        rest == pytest.approx(1.0, abs=0.3) and r.shape == (n, 16) and (r.abs() > 0.9).all() and (r[0] * r[1] < 0).all()
    )
    other = draws(100, seed=2)[people]
    size, _ = crossing.lean(x, 5 * trait + 5 * other * (side < 0) + noise, people)
    found = sorted((crossing(x)[0] * crossing(x)[1]).tolist())
    assert found[0] < -0.05 and found[-1] > 0.3 and size[1] > size[0]  # each of two directions, in their shares
    size, rest = crossing.lean(x, noise, people)
    assert size.max() < 0.5 and rest == pytest.approx(1.0, abs=0.1)
    wild = torch.where(torch.arange(n) % 13 == 0, 300.0, noise)
    crossing.lean(x, 5 * trait * side + wild, people)
    assert (crossing(x)[0] * crossing(x)[1] < 0).all()
    before = crossing.turn.weight.clone()
    assert not crossing.lean(x, torch.zeros(n), people)[0].any() and torch.equal(crossing.turn.weight, before)


def test_nobody_crosses_where_levels_alone_differ():
    """Few people in many contexts: no component. People whose slopes differ too: the first at least."""
    contexts, place = draws(24, 5, seed=3), torch.arange(240) % 24
    contexts = torch.linalg.qr(contexts - contexts.mean(0))[0] * torch.tensor([9.0, 7.0, 5.0, 4.0, 3.0]).double()
    person, x = torch.arange(240) // 24, contexts[place].float()
    level, slope = (draws(10, seed=seed)[person] for seed in (1, 2))
    alike, crossing = 4 * level + draws(240, seed=4), Crossing(5, 16, 8)
    crossing.lean(x, alike + 3 * slope * contexts[place, 0], person)
    assert crossing.turn.weight.abs().max() > 1e-3
    _, left = crossing.lean(x, alike, person)
    assert crossing.turn.weight.abs().max() < 1e-6 and left == pytest.approx(1.0, abs=0.2)
    crossing.lean(x, alike, torch.full_like(person, 3))  # one person alone
    assert crossing.turn.weight.isfinite().all()


def test_contexts_that_are_alike_are_read_once_and_lose_the_same(tiny_tokenizer, monkeypatch):
    model = graft_tiny("llama", tiny_tokenizer, value_family="gaussian").eval()
    features = torch.randn(6, model.config.hidden_size)[torch.arange(60) % 6]
    values, group = draws(60) * 10, torch.arange(60) // 5
    each = model.value_losses(features, values, group)
    monkeypatch.setattr("causalqwen.modeling.heads._MANY", 50)
    seen = []
    value = Chain.value
    monkeypatch.setattr(Chain, "value", lambda chain, **kw: (seen.append(len(chain.features)), value(chain, **kw))[1])
    torch.testing.assert_close(model.value_losses(features, values, group), each, rtol=1e-6, atol=1e-6)
    assert seen == [6]


def test_the_widest_differences_come_first_where_directions_are_few():
    n, people = 600, torch.arange(600) // 6
    x = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).unsqueeze(-1) * torch.tensor([1.0, 0.5, -1.0])
    wide, narrow = 5 * draws(100)[people] * x[:, 0], 2 * draws(100, seed=2)[people]
    crossing = Crossing(3, 16, 1)
    crossing.lean(x, wide + narrow + draws(n, seed=1), people)
    r = crossing(x)
    assert (r[0] * r[1] < -0.5).all()
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    again = Crossing(3, 16, 1)
    again.lean(x[order], (wide + narrow + draws(n, seed=1))[order], people[order])
    torch.testing.assert_close(again(x), r, atol=1e-4, rtol=1e-4)
    again.lean(x * 1e-5, wide + narrow, people)  # one context, but for rounding
    assert again.turn.weight.abs().max() < 1


@pytest.mark.parametrize("case", ["most values equal", "all equal", "named but silent", "one value each"])
def test_people_who_tell_little_of_themselves_are_learned_from_all_the_same(tiny_tokenizer, tmp_path, case):
    model, rows = graft_tiny("llama", tiny_tokenizer, value_family="gaussian"), []
    for index in range(24):
        value = {"most values equal": 5.0 * (index % 10 == 9), "all equal": 5.0}.get(case, float(index))
        person = f"p{index if case == 'one value each' else index // 4}"
        fields = {"prompt": PROMPTS[0], "value": value} | ({} if case == "named but silent" else {"individual": person})
        rows.append(Row("prompt", f"row {index}", fields))
    if case == "named but silent":
        rows += [Row("text", f"row {i}", {"text": "Nothing was said.", "individual": f"p{i}"}) for i in range(5)]
    settings = TrainSettings(values=ValueStage(epochs=2), recalibrate=False)
    train(model, encode_rows(rows, model.processor), [], tmp_path / "run", settings)
    assert math.isfinite(model.predict_number(PROMPTS[0])[0].median)


def test_a_second_training_starts_where_the_first_one_did(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer, value_family="gaussian")
    encoded, medians = encode_rows(crossing_rows(12, 0), model.processor), []
    for turn in range(2):
        stage = ValueStage(epochs=1, learning_rate=1e-9, scalar_learning_rate=0.0)
        train(model, encoded, [], tmp_path / str(turn), TrainSettings(values=stage, recalibrate=False))
        medians.append([one.median for one in model.predict_number(list(PROMPTS))])
    assert medians[0] == pytest.approx([50, 75], abs=5)
    assert medians[1] == pytest.approx(medians[0], abs=0.5)


def test_whoever_crosses_in_several_directions_is_on_no_line(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer, value_family="gaussian")
    model.config.value_range = [0.0, 1.0]
    let_cross(model)
    with pytest.raises(ValueError, match="method 'quadrature' needs individuals on one line"):
        model.abduct(Observation(" 0.5", PROMPTS[0]), likelihood="values", method="quadrature")
    with pytest.raises(
        ValueError, match="value_crossing above 1 needs value_family='gaussian', but this model has 'cauchy'"
    ):
        graft_tiny("llama", tiny_tokenizer, value_family="cauchy", value_crossing=8)


def crossing_rows(people, seed):
    """50 + 8 a on the first day, 75 - 5 a on the second, and 2 of noise."""
    trait, noise, rows = draws(people, seed=seed), 2 * draws(people, 6, seed=seed + 1), []
    for person in range(people):
        for moment in range(6):
            value = (75 - 5 * trait[person] if moment % 2 else 50 + 8 * trait[person]) + noise[person, moment]
            fields = {"prompt": PROMPTS[moment % 2], "value": round(value.item(), 3), "individual": f"person {person}"}
            rows.append(Row("prompt", f"row {len(rows)}", fields))
    return rows


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_whoever_is_harmed_by_what_helps_others_is_told_apart(tiny_tokenizer, tmp_path, family):
    model = graft_tiny("llama", tiny_tokenizer, value_family=family)
    stage = ValueStage(epochs=60, learning_rate=1e-3, batch_size=64)
    settings = TrainSettings(values=stage, recalibrate=False)
    train(model, encode_rows(crossing_rows(40, 0), model.processor), [], tmp_path / "run", settings)
    model.save_pretrained(tmp_path / "kept")
    again = CausalQwenForCausalLM.from_pretrained(tmp_path / "kept")
    errors = []
    for person in range(12):
        mine = crossing_rows(12, 7)[6 * person : 6 * person + 6]
        told = [Observation(f" {row.fields['value']}", PROMPTS[0]) for row in mine[::2]]
        who = model.abduct(told, likelihood="values")
        (about,) = model.predict_number(PROMPTS[1], individual=who)
        assert again.predict_number(PROMPTS[1], individual=who)[0].median == about.median
        trait = draws(12, seed=7)[person].item()
        errors.append(about.median - (75 - 5 * trait))
        high = again.abduct(told, likelihood="values").factor
        torch.testing.assert_close(high, who.factor)
    assert math.sqrt(np.square(errors).mean()) < 2.5  # 5 is nobody's


# ---- the posterior ---------------------------------------------------------------------------------------------------


def test_the_line_posterior_is_the_gaussian_one():
    loadings = torch.tensor([0.5, 1.0, 2.0]).double()[:, None] * torch.tensor([1.0, -2.0]).double()
    residuals, scale = torch.tensor([1.0, 0.5, 3.0]).double(), torch.tensor([0.4, 0.5, 1.0]).double()
    sizes = loadings.square().sum(-1).sqrt()
    precision = 1 + (sizes / scale).square().sum()
    mean = (sizes * residuals / scale**2).sum() / precision
    places = line_posterior(GAUSSIAN, residuals, sizes, scale, 401)
    assert places[200].item() == pytest.approx(mean.item(), abs=0.01 * precision.rsqrt().item())
    assert places.std().item() == pytest.approx(precision.rsqrt().item(), rel=0.02)


def test_evidence_of_any_size_can_be_weighed():
    """Values of a head that was hardly trained may say 10^17 times as much as words: a sum that float64 cannot factor."""
    size, n = 32, 60
    loud = ValueEvidence(
        draws(n, size), 1e7 * draws(n, size, seed=1).exp(), draws(n, seed=2), draws(size, seed=3), torch.zeros(()).double(),
        torch.full((n,), 0.05).double(), CAUCHY,
    )  # fmt: skip
    found = find_posterior([loud], torch.zeros(size), 25.0)
    torch.linalg.cholesky(found.precision)
    assert found.mode.isfinite().all() and math.isfinite(found.gained)
    assert torch.equal(found.prior_precision, 25.0 * torch.eye(size, dtype=torch.float64))


# ---- rows, training --------------------------------------------------------------------------------------------------

PROMPTS = ("On the first day it is", "On the second day they say that it is")


def people_rows(people=8, seed=0, wild=False):
    """People differ by 10, moments by 1; the second day adds 5."""
    trait, noise = 10 * draws(people, seed=seed), draws(people, 6, seed=seed + 1)
    rows = []
    for person in range(people):
        for moment in range(6):
            value = 50 + trait[person] + 5 * (moment % 2) + noise[person, moment]
            fields = {"prompt": PROMPTS[moment % 2], "value": round(value.item(), 3), "individual": f"person {person}"}
            rows.append(Row("prompt", f"row {len(rows)}", fields))
    return rows, trait


def test_rows_name_their_individual():
    assert parse_row('{"text": "a 5", "individual": "Ann"}', "row 1").individual == "Ann"
    assert parse_row('{"text": "a 5", "individual": 7}', "row 1").individual == "7"
    assert parse_row('{"text": "a 5"}', "row 1").individual is None
    with pytest.raises(RowError, match="row 1, field individual"):
        parse_row('{"text": "a 5", "individual": [1]}', "row 1")


def test_facts_of_repeated_measures_are_those_of_each_row(tiny_tokenizer, tmp_path):
    """Rows that differ in their last value alone are read once; the facts are the same."""
    model = graft_tiny("llama", tiny_tokenizer)
    examples = encode_rows(people_rows(3)[0], model.processor)
    store = FactStore.build(model, examples, tmp_path / "together")
    for index in (0, 1, 4, len(examples) - 1):
        alone = FactStore.build(model, [examples[index]], tmp_path / f"alone {index}")
        assert store[index].values[-1] == examples[index].numeric_values[-1]
        for name in ("features", "targets", "values", "rest_loss", "num_scale"):
            torch.testing.assert_close(
                store[index].tensor(name), alone[0].tensor(name), rtol=1e-4, atol=1e-4, equal_nan=True
            )


def test_batches_say_who_shares(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer)
    examples = [Example([3, 4, 5, 6], [0.0] * 4) for _ in range(5)]
    store = FactStore.build(model, examples, tmp_path)
    rows = FactRows(store, ["a", None, "b", "a", None])
    assert len(rows) == 4 and rows.people == 2
    assert rows.collate(range(4))["group"].tolist() == [[0] * 6 + [1] * 3 + [-1] * 6]
    assert "group" not in FactRows(store).collate([0, 1])


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_value_losses_add_up_to_the_joint_likelihood(tiny_tokenizer, family):
    model = graft_tiny("llama", tiny_tokenizer, value_family=family)
    z, values = torch.randn(6, model.config.hidden_size), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    alone = model.value_losses(z, values)
    assert torch.equal(model.value_losses(z, values, torch.full((6,), -1)), alone)
    shared = model.value_losses(z, values, torch.tensor([2, -1, 5, 2, 5, 2]))
    assert shared[1] == alone[1]
    chain = Chain(model, z)
    loadings, left = chain.value_loadings()
    residuals = values - model.action.value(*chain.read_by_values())[0]
    for places in ([0, 3, 5], [2, 4]):
        joint = value_marginal(model.action.value_law, residuals[places], loadings[places], left[places])
        assert shared[places].sum().item() == pytest.approx(-joint.item(), rel=1e-4)


@pytest.mark.parametrize("family", ["gaussian", pytest.param("cauchy", marks=pytest.mark.slow)])
def test_training_learns_what_is_who_and_what_is_noise_and_observations_tell_people_apart(
    tiny_tokenizer, tmp_path, family
):
    model = graft_tiny("llama", tiny_tokenizer, value_family=family)
    rows, _ = people_rows(24)
    stage = ValueStage(epochs=150, learning_rate=1e-3, batch_size=64)
    train(
        model, encode_rows(rows, model.processor), [], tmp_path / "run", TrainSettings(values=stage, recalibrate=False)
    )
    share = model.shares(Observation(" 52", PROMPTS[0]))[-1]
    assert share.text.strip() == "52" and share.who > 0.7  # people differ by 10, moments by 1

    others, trait = people_rows(10, seed=7)
    own, alone = [], []
    for person in range(10):
        mine = others[6 * person : 6 * person + 6]
        said = [Observation(f" {row.value}", PROMPTS[0]) for row in mine[::2]]
        who = model.abduct(said, likelihood="values", name="somebody")
        assert "3 values" in str(who) and who.is_inferred
        (about,) = model.predict_number(PROMPTS[1], individual=who)
        (nobody,) = model.predict_number(PROMPTS[1])
        truth = 55 + trait[person].item()
        own.append(abs(about.median - truth))
        alone.append(abs(nobody.median - truth))
        low, high = about.interval(0.9)
        assert low < about.median < high and high - low < 0.7 * (nobody.interval(0.9)[1] - nobody.interval(0.9)[0])
        if family == "cauchy":
            assert isinstance(about, MixedNumberPrediction)
            assert about.cdf(about.quantile(0.3)) == pytest.approx(0.3, abs=1e-6)
            slope = (about.cdf(truth + 1e-3) - about.cdf(truth - 1e-3)) / 2e-3
            assert math.exp(about.log_prob(truth)) == pytest.approx(slope, rel=1e-3)
            assert about.crps(truth) < nobody.crps(truth) + 5 and who.draw(3).factor.shape == who.factor.shape
    assert sorted(own)[5] < 0.5 * sorted(alone)[5]


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_three_values_and_three_more_are_six_values(tiny_tokenizer, family, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer, value_family=family)
    model.config.value_range = [0.0, 1.0]
    said = [Observation(f" {v}", PROMPTS[i % 2]) for i, v in enumerate((0.2, 0.3, 0.25, 0.4, 0.1, 0.35))]
    at_once = model.abduct(said, likelihood="values")
    model.abduct(said[:3], likelihood="values", name="Ann").save(tmp_path / "ann.safetensors")
    before = Individual.load(tmp_path / "ann.safetensors")
    in_turn = model.abduct(said[3:], likelihood="values", prior=before)
    assert in_turn.name == "Ann" and [e.values for e in in_turn.evidence] == [3, 3]
    assert at_once.evidence[0].gained > 0.02 and sum(e.gained for e in in_turn.evidence) > 0.02
    a, b = (model.predict_number(PROMPTS[1], individual=who)[0] for who in (at_once, in_turn))
    width = a.quantile(0.75) - a.quantile(0.25)
    for level in (0.05, 0.5, 0.95):
        assert b.quantile(level) == pytest.approx(a.quantile(level), abs=1e-3 * width)
    if family == "cauchy":
        with pytest.raises(ValueError, match=r"known by draws and no width.*likelihood 'values'"):
            model.abduct("words and no more", prior=before)
        with pytest.raises(ValueError, match="method 'mode'"):
            model.abduct(said[3:], likelihood="values", prior=before, method="mode")


def test_values_and_words_teach_under_a_cauchy_law_too(tiny_tokenizer):
    """A quantile function whose slope at 1/2 is lost teaches nothing, whatever was observed."""
    model = graft_tiny("llama", tiny_tokenizer, vocabulary_family="cauchy", value_family="cauchy")
    model.config.value_range = [0.0, 1.0]
    said = [Observation(f" {v}", PROMPTS[0]) for v in (0.2, 0.3, 0.25)]
    by_mode = model.abduct(said, likelihood="values", method="mode")
    assert by_mode.evidence[0].gained > 0.1 and by_mode.evidence[0].directions > 0.1
    words = "We, the people, look back on what was done. " * 8
    assert model.abduct(words).evidence[0].gained > 0.1
    people = model.abduct_population({"Ann": words, "Bob": "They say so, and they say it again. " * 8})
    assert people.normal.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"likelihood": "words"}, "unknown likelihood"),
        ({"method": "guess"}, "unknown method"),
        ({"method": "quadrature"}, "is for likelihood 'values'"),
        ({"likelihood": "values"}, "hears numbers, and this model has not learned values yet"),
        ({"spread": 0.0}, "the prior's spread must be positive, got 0.0"),
        ({"spread": math.nan}, "the prior's spread must be positive, got nan"),
    ],
)
def test_what_does_not_fit_is_refused(tiny_llama, settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_llama.abduct("words and no more", **settings)
    tiny_llama.config.value_range = [0.0, 1.0]
    with pytest.raises(ValueError, match="hold no number"):
        tiny_llama.abduct("words and no more", likelihood="values")


def test_a_training_on_repeated_measures_names_the_context_that_reads_days_as_values(tiny_tokenizer, tmp_path):
    told = {}
    for context, prompt in (
        ("digits", "After 3 days it is"),
        ("digits", "Later it is"),
        ("value", "After 3 days it is"),
    ):
        model, name = graft_tiny("llama", tiny_tokenizer, number_context=context), f"{context} {prompt[:5]}"
        rows = [Row("prompt", "a row", row.fields | {"prompt": prompt}) for row in people_rows(4)[0]]
        settings, told[name] = TrainSettings(values=ValueStage(epochs=1), recalibrate=False), []
        train(model, encode_rows(rows, model.processor), [], tmp_path / name, settings, say=told[name].append)
    hints = {name: sum("number_context=value" in line for line in lines) for name, lines in told.items()}
    assert hints == {"digits After": 1, "digits Later": 0, "value After": 0}


def test_numbers_in_a_prompt_are_read_not_learned(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer, number_context="value")
    rows = [Row("prompt", "row 1", {"prompt": "After 3 days it is", "value": 351.0, "individual": "Ann"})]
    (example,) = encode_rows(rows, model.processor)
    numbers = [i for i, token in enumerate(example.input_ids) if token == model.config.num_token_id]
    assert [example.numeric_values[i] for i in numbers] == [3.0, 351.0]
    assert math.isnan(example.numeric_labels[numbers[0]]) and example.numeric_labels[numbers[1]] == 351.0
    facts = token_facts(model, [example])
    is_num = facts.targets == model.config.num_token_id
    assert is_num.sum() == 2  # both are announced
    assert facts.values[np.isfinite(facts.values)].tolist() == [351.0]  # one is a value to learn
    (text,) = encode_rows([Row("text", "row 1", {"text": "After 3 days it is 351.0"})], model.processor)
    assert not any(math.isnan(value) for value in text.numeric_labels)


def test_the_value_branch_sees_the_places_where_values_are_learned(tiny_tokenizer, tmp_path):
    """Standardized by the features before the prompts' own numbers too, ages would hardly differ."""
    model = graft_tiny("llama", tiny_tokenizer)
    rows = [Row("prompt", f"row {i}", {"prompt": f"At {i} it is", "value": 10.0 * i}) for i in range(1, 7)]
    examples = encode_rows(rows, model.processor)
    train(model, examples, [], tmp_path / "run", TrainSettings(values=ValueStage(epochs=1), recalibrate=False))
    prompts = [model.processor([row.fields["prompt"]], prompt=True, return_tensors="pt") for row in rows]
    with torch.no_grad():
        last = torch.stack([model.features(**inputs).last_hidden_state[0, -1] for inputs in prompts])
    assert torch.allclose(model.value_branch.feature_mean, last.mean(0), atol=1e-4)


def test_what_hardly_varies_is_not_blown_up_and_few_contexts_are_read_exactly(tiny_tokenizer, tmp_path, monkeypatch):
    """Rows of one prompt: a coordinate is divided by a part of its size, not by rounding. Named individuals: float32."""
    model = graft_tiny("llama", tiny_tokenizer)
    rows = [row for row in people_rows(3)[0] if row.fields["prompt"] == PROMPTS[0]]
    examples = encode_rows(rows, model.processor)
    train(model, examples, [], tmp_path / "run", TrainSettings(values=ValueStage(epochs=1), recalibrate=False))
    inputs = model.processor(PROMPTS[:1], prompt=True, return_tensors="pt")
    with torch.no_grad():
        last = model.features(**inputs).last_hidden_state[0, -1]
    torch.testing.assert_close(model.value_branch.feature_std, last.abs() / 512, rtol=1e-3, atol=1e-6)
    monkeypatch.setattr("causalqwen.training.settings.bf16_pays", lambda model: True)
    assert TrainSettings().takes_bf16(model) and not TrainSettings().takes_bf16(model, examples)
    assert TrainSettings(bf16=True).takes_bf16(model, examples)


def test_only_numbers_tell_of_numbers(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer, value_family="gaussian")
    model.config.value_range = [0.0, 100.0]
    said = [Observation(" 12.5", "It is"), Observation(" 17", "They say it is")]
    by_words, by_numbers = model.abduct(said), model.abduct(said, likelihood="values")
    nobody, same, other = (model.predict_number("We say", individual=who)[0] for who in (None, by_words, by_numbers))
    assert same == nobody and other.loc != nobody.loc
    mixed = model.abduct(said, prior=by_numbers)  # known by words as well: no longer by numbers alone
    assert not by_words.knows_values and by_numbers.knows_values and not mixed.knows_values
    with pytest.raises(ValueError, match="no words of Ann"):
        model.abduct_population({"Ann": said, "Bob": "They say it."})
    population = model.abduct_population({"Ann": "It is 12.5, they say.", "Bob": "They say it."})
    for prior in (by_words, population):
        with pytest.raises(ValueError, match="inferred from words"):
            model.abduct(said, prior=prior, likelihood="values")
