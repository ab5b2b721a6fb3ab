"""Intervals of an individual cover what people say whom nobody trained on (theory 3.14)."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from causalqwen import CausalQwenForCausalLM, Individual, Observation
from causalqwen.decoding import Population
from causalqwen.decoding.individual import Observed
from causalqwen.distributions import get_family
from causalqwen.evaluation.evaluate import evaluate
from causalqwen.modeling.prediction import describe_all
from causalqwen.modeling.survey import Question
from causalqwen.numbers.law import WANTED_LEVELS
from causalqwen.training import TrainSettings, ValueStage
from causalqwen.training import choice_of_people as people_held
from causalqwen.training.features import FactStore
from causalqwen.training.levels_of_people import (
    KNOWN,
    HeldPerson,
    _levels,
    asked_after,
    fit_individual_levels,
    people_of,
)
from causalqwen.training.run import learn
from conftest import graft_tiny
from test_choice_of_people import PROMPTS, said_by

BELIEVED = torch.tensor([[8.0], [8.0], [5.0], [5.0], [-5.0], [-5.0]])


def crowd(count, seed, who=1.0, noise=1.0, family="gaussian", numbers=6):
    """People as a model sees them that believes in `BELIEVED` and a noise of 2, where widths are so many times larger."""
    law, random = get_family(family), np.random.default_rng(seed)

    def draw(*shape):
        return law.quantile(torch.from_numpy(random.uniform(size=shape)))

    people, loadings = [], BELIEVED[torch.arange(numbers) % 6].double()
    for place in range(count):
        residuals = who * (loadings @ draw(1)) + noise * 2 * draw(numbers)
        ends, places = residuals.unsqueeze(-1).expand(-1, 2), torch.arange(numbers) + numbers * place
        people.append(HeldPerson(f"{place}", residuals, ends, loadings, torch.full((numbers,), 2.0).double(), places))
    return law, people


def covered(law, people, known, fitted, level):
    """How many numbers after so many others lie in intervals of a level."""
    block = asked_after(law, people, known)
    needed = WANTED_LEVELS if fitted is None else fitted["levels"]
    factors = (1.0, 1.0) if fitted is None else (fitted["who"], fitted["noise"])
    return (block.central(*factors) <= needed[round(100 * level)]).double().mean().item()


@pytest.mark.parametrize("known", [0, 1, 3])
def test_what_is_predicted_after_some_numbers_is_the_gaussian_of_all_of_them(known):
    law, (person,) = crowd(1, 0, numbers=known + 1)
    block, loadings = asked_after(law, [person], known), person.loadings[:, 0].numpy()
    assert set(block.places.tolist()) == set(range(known + 1))
    for asked in range(known + 1):
        row, seen = block.places.tolist().index(asked), [place for place in range(known + 1) if place != asked]
        covariance = np.outer(loadings, loadings) + 4 * np.eye(known + 1)
        weights = np.linalg.solve(covariance[np.ix_(seen, seen)], covariance[seen, asked]) if seen else np.zeros(0)
        left = person.residuals[asked].item() - weights @ person.residuals[seen].numpy()
        who = covariance[asked, asked] - weights @ covariance[seen, asked] - 4
        expected = stats.norm(0, math.sqrt(1.5**2 * who + 0.7**2 * 4))
        assert block.log_prob(*torch.tensor([1.5, 0.7]).double())[row].item() == pytest.approx(expected.logpdf(left))
        central = block.central(1.5, 0.7)[row]
        torch.testing.assert_close(central, torch.full((64,), abs(2 * expected.cdf(left) - 1)).double())


def test_on_a_line_what_is_predicted_is_the_cauchy_of_all_numbers():
    """Against a sum over a fine grid of places; the middle is where half of them lie."""
    law, (person,) = crowd(1, 3, family="cauchy", numbers=3)
    block = asked_after(law, [person], 2)
    row = block.places.tolist().index(2)
    t = torch.linspace(-400, 400, 1_600_001).double()
    zero, unit, wide = torch.zeros_like(t), torch.ones_like(t), torch.full_like(t, 2.0)
    log_p = law.log_prob(t, zero, unit)
    for place in (0, 1):
        log_p = log_p + law.log_prob(person.residuals[place].expand_as(t), person.loadings[place, 0] * t, wide)
    weights = log_p.softmax(0)
    middle, size = t[(weights.cumsum(0) < 0.5).sum()], person.loadings[2, 0]
    left = person.residuals[2] - size * middle
    assert block.residuals[row].item() == pytest.approx(left.item(), abs=0.1)
    moved = 1.5 * size * (t - middle)
    expected = (weights * law.log_prob(left.expand_as(t), moved, 0.7 * wide).exp()).sum().log()
    assert block.log_prob(*torch.tensor([1.5, 0.7]).double())[row].item() == pytest.approx(expected.item(), abs=0.02)


@pytest.mark.parametrize(("family", "noise"), [("gaussian", 1.6), ("gaussian", 0.6), ("cauchy", 1.6)])
def test_a_noise_that_is_wrong_by_a_known_factor_is_found_and_intervals_cover_again(family, noise):
    law, people = crowd(240, 0, noise=noise, who=noise, family=family)
    fitted = fit_individual_levels(law, people)
    assert fitted["noise"] == pytest.approx(noise, rel=0.12)
    law, others = crowd(480, 1, noise=noise, who=noise, family=family)
    for known in (1, 2, 4):
        for level in (0.5, 0.8, 0.9):
            assert covered(law, others, known, fitted, level) == pytest.approx(level, abs=0.06)
    assert abs(covered(law, others, 1, None, 0.5) - 0.5) > 0.05


def test_what_is_not_known_of_somebody_has_a_factor_of_its_own():
    """Two traits of which the model knows one: after one number in its context or another, what is open is who."""
    law, people = crowd(400, 0)
    random = np.random.default_rng(5)
    both = torch.cat([BELIEVED, BELIEVED.flip(0)], 1).double()
    wide = []
    for person in people:
        residuals = both @ torch.from_numpy(2 * random.normal(size=2)) + torch.from_numpy(0.5 * random.normal(size=6))
        made = vars(person) | {"loadings": both, "residuals": residuals, "ends": residuals.unsqueeze(-1).expand(-1, 2)}
        wide.append(HeldPerson(**made))
    fitted = fit_individual_levels(law, wide)
    assert fitted["who"] > 1.2 and fitted["noise"] < 0.7


def test_few_people_are_wide_and_fewer_calibrate_nothing():
    law, people = crowd(300, 2)
    many, few = fit_individual_levels(law, people), fit_individual_levels(law, people[:8])
    assert many["levels"][90] == pytest.approx(0.9, abs=0.03)
    assert few["levels"][90] > 0.97 and few["levels"][50] > 0.5 and 0.6 < few["who"] < 1.6
    assert fit_individual_levels(law, people[:5]) is None
    once = [
        HeldPerson(**{name: part if name == "name" else part[:1] for name, part in vars(one).items()}) for one in people
    ]
    assert fit_individual_levels(law, once) is None


def test_each_person_counts_as_much_and_so_do_those_who_said_more():
    law, people = crowd(40, 3)
    people += crowd(40, 4, noise=3.0, who=3.0, numbers=40)[1]
    blocks = [block for known in KNOWN if (block := asked_after(law, people, known)) is not None]
    fitted = _levels(blocks, (1.0, 1.0), 80, 0)
    inside = torch.cat([(block.central(1.0, 1.0) <= fitted[50]).double().mean(-1) for block in blocks])
    owner = torch.cat([block.owner for block in blocks])
    each = torch.zeros(80).double().index_add_(0, owner, inside) / owner.bincount()
    assert each.mean().item() == pytest.approx(0.5 * 81 / 80, abs=2e-3)


@pytest.mark.parametrize("family", ["gaussian", pytest.param("cauchy", marks=pytest.mark.slow)])
def test_people_who_choose_calibrate_and_everything_that_predicts_for_an_individual_uses_it(
    tiny_tokenizer, tmp_path, monkeypatch, family
):
    monkeypatch.setattr(people_held, "FEWEST_UPDATES", 12)
    model, said = graft_tiny("llama", tiny_tokenizer, value_family=family), []
    learn(model, said_by(model, 30, 0), [], tmp_path / "run", say=said.append)
    fitted = model.config.individual_levels
    assert said[-1].startswith("intervals of an individual are calibrated on ") and "few" not in said[-1]
    (who,) = [model.abduct([Observation(" 61.5", PROMPTS[0]), Observation(" 66", PROMPTS[1])], likelihood="values")]
    (found,) = model.predict_number(PROMPTS[0], individual=who)
    model.config.individual_levels = None
    (believed,) = model.predict_number(PROMPTS[0], individual=who)
    model.config.individual_levels = fitted
    assert found.median == believed.median and found.log_prob(60.0) == believed.log_prob(60.0)
    assert found.interval(0.9, raw=True) == believed.interval(0.9) != found.interval(0.9)
    wide = found.calibrated
    assert wide.interval(0.9) == found.interval(0.9) and wide.law.interval_levels == tuple(fitted["levels"])
    raw_p = 0.5 + fitted["levels"][90] / 2
    assert found.interval(0.9)[1] == pytest.approx(wide.quantile(raw_p, raw=True))
    if family == "gaussian":  # the squares of both parts add up
        scales = []
        for factors in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0)):
            model.config.individual_levels = fitted | dict(zip(("who", "noise"), factors, strict=True))
            scales.append(model.predict_number(PROMPTS[0], individual=who)[0].calibrated.scale)
        assert scales[0] == pytest.approx(believed.scale) and scales[0] < min(scales[1:])
        assert scales[1] ** 2 + scales[2] ** 2 == pytest.approx(5 * believed.scale**2)
        model.config.individual_levels = fitted
    assert describe_all([found, found])[1]["intervals"]["0.9"] == list(found.interval(0.9))
    assert describe_all([found, found], raw=True)[1]["intervals"]["0.9"] == list(believed.interval(0.9))
    model.save_pretrained(tmp_path / "saved")
    again = CausalQwenForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.individual_levels == fitted
    assert again.predict_number(PROMPTS[0], individual=who)[0].interval(0.9) == found.interval(0.9)


def test_a_survey_asks_people_with_the_widths_that_were_fitted(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer, value_family="gaussian")
    model.config.value_range = [0.0, 100.0]
    seen = Observed(0, 2, 1.0, 1.0, 1.0, "values")
    who = Individual.from_normal(torch.ones(32), "ann", precision=torch.eye(32).double() * 4, evidence=(seen,))
    people, asked = Population.of({"ann": who}), Question("It is", name="told")
    spread = {}
    for factors in ((1.0, 1.0), (2.0, 2.0), (1.0, 2.0)):
        model.config.individual_levels = {"who": factors[0], "noise": factors[1], "levels": WANTED_LEVELS.tolist()}
        spread[factors] = model.survey(people, asked, draws=4000)["told"].std()
    assert spread[2.0, 2.0] == pytest.approx(2 * spread[1.0, 1.0], rel=0.01)
    assert spread[1.0, 1.0] < spread[1.0, 2.0] < 1.99 * spread[1.0, 1.0]


def test_evaluation_tells_coverage_by_what_was_observed(tiny_tokenizer, tmp_path):
    model, said = graft_tiny("llama", tiny_tokenizer, value_family="gaussian"), []
    stage = TrainSettings(values=ValueStage(epochs=3, learning_rate=1e-3))
    learn(model, said_by(model, 24, 0), said_by(model, 24, 1), tmp_path / "run", stage, say=said.append)
    assert "calibrated on 24 people held out" in said[-1]
    rows = said_by(model, 12, 2)
    told = evaluate(model, rows, tmp_path / "work")["metrics"]["people"]
    assert told["people"] == 12 and list(told["known"]) == ["0", "1", "2", "4"]
    assert set(told["contexts"]) == set(PROMPTS)
    people = people_of(model, FactStore.build(model, rows, tmp_path / "work"), [row.individual for row in rows])
    fitted, law = model.config.individual_levels, model.action.value_law
    assert told["known"]["2"]["coverage"]["0.8"] == pytest.approx(covered(law, people, 2, fitted, 0.8))
    assert told["known"]["2"]["coverage_raw"]["0.8"] == pytest.approx(covered(law, people, 2, None, 0.8))
    json.dumps(told)


def test_without_people_held_out_the_run_says_so(tiny_tokenizer, tmp_path):
    model, said = graft_tiny("llama", tiny_tokenizer), []
    model.config.individual_levels = {"who": 1.0, "noise": 1.0, "levels": WANTED_LEVELS.tolist()}
    rows, held = said_by(model, 5, 0), said_by(model, 5, 1)
    learn(model, rows, held, tmp_path / "run", TrainSettings(values=ValueStage(epochs=1)), say=said.append)
    assert model.config.individual_levels is None and "intervals of an individual are not calibrated" in said[-1]
    model.config.individual_levels = {"who": 1.0, "noise": 1.0, "levels": WANTED_LEVELS.tolist()}
    plain = TrainSettings(values=ValueStage(epochs=1), recalibrate=False)
    learn(model, rows, held, tmp_path / "plain", plain)
    assert model.config.individual_levels is None  # they were those of other values


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"who": 1.0}, "expected who, noise, levels, got who"),
        ({"who": 0.0, "noise": 1.0, "levels": [0.5] * 101}, "who"),
    ],
)
def test_wrong_levels_of_individuals_are_refused(tiny_tokenizer, wrong, told):
    model = graft_tiny("llama", tiny_tokenizer)
    model.config.individual_levels = wrong
    with pytest.raises(ValueError, match=told):
        model.config.check()
