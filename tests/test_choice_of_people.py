"""How values are read where rows name individuals is chosen by people held out (theory 3.14)."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from causalqwen.data import Row, encode_rows
from causalqwen.data.rows import parse_row
from causalqwen.modeling.chain import Chain
from causalqwen.training import TrainSettings, ValueStage, train
from causalqwen.training import choice_of_people as people_held
from causalqwen.training.axes import LearnedNumbers, certain_contexts, numbers_learned
from causalqwen.training.choice_of_people import ChoiceOfPeople, Tried, better_for_most, clearly_better
from causalqwen.training.features import FactStore
from causalqwen.training.run import learn
from causalqwen.training.scores import joint_losses
from conftest import graft_tiny

PROMPTS = ["On the first day it is", "On the second day it is"]


@pytest.fixture
def few_updates(monkeypatch):
    """Fits that are short: for what does not hang on how well values are learned."""
    monkeypatch.setattr(people_held, "FEWEST_UPDATES", 12)


def said_by(model, people, seed, shape=lambda level: level, wild=0.0, digits=3, moments=6):
    """So many numbers of each: a level of their own, 5 more on the second day, and noise, `shape`d; some of them wild."""
    rng, rows = np.random.default_rng(seed), []
    for person in range(people):
        level = 50 + 10 * rng.normal()
        for moment in range(moments):
            value = shape(level + 5 * (moment % 2) + rng.normal())
            value += (rng.random() < wild) * rng.choice([-1, 1]) * rng.uniform(100, 400)
            fields = {
                "prompt": PROMPTS[moment % 2],
                "value": round(float(value), digits),
                "individual": f"{seed}, {person}",
            }
            rows.append(Row("prompt", f"row {len(rows)}", fields))
    return encode_rows(rows, model.processor)


def encoded(model, *rows):
    return encode_rows([parse_row(json.dumps(row), "x") for row in rows], model.processor)


def choice_of(model, rows, held, folder, say=lambda line: None, certain=None):
    num_id = model.config.num_token_id
    certain = certain_contexts(rows, num_id) if certain is None else certain
    numbers = LearnedNumbers.of(rows, num_id, certain)
    return ChoiceOfPeople(model, rows, held, numbers, certain, TrainSettings(), folder, say)


WORLDS = {
    "level": ({}, ("affine", "gaussian")),
    "growth": ({"shape": lambda level: math.exp(level / 8)}, ("log", "gaussian")),
    "wild": ({"wild": 0.15}, ("affine", "cauchy")),
}


@pytest.mark.parametrize("world", WORLDS)
def test_people_held_out_choose_the_axis_and_the_law(tiny_tokenizer, tmp_path, monkeypatch, world):
    monkeypatch.setattr(people_held, "FEWEST_UPDATES", 30)
    monkeypatch.setattr(people_held, "HELD_PEOPLE", 8)
    how, (axis, family) = WORLDS[world]
    model, said = graft_tiny("llama", tiny_tokenizer), []
    rows = said_by(model, 24, 3, **how)
    learn(model, rows, [], tmp_path, say=said.append)
    told = json.loads((tmp_path / "choice.json").read_text())
    assert (told["chosen"]["axis"], told["chosen"]["value_family"]) == (axis, family)
    assert (model.value_transform.kind, model.config.value_family) == (axis, family)
    assert len(told["tried"]) == 4 and told["chosen"] in told["tried"]
    assert "4 ways, by about 8 people held out, in at most 10 passes over 96 rows" in said[0]
    assert said[5].startswith(f"chosen: {axis} axis, {family} law") and "; people held out at " in said[5]


@pytest.mark.parametrize(("at_once", "digits"), [(1, 3), (9, 3), (4096, 3), (4096, 0)])
def test_what_people_said_is_scored_by_its_joint_likelihood_in_its_own_units(
    tiny_tokenizer, tmp_path, monkeypatch, at_once, digits
):
    """Against scipy's Gaussian of each person's values, and the change of variables by hand; whole numbers, which are atoms
    where one stands alone, have a density there like others."""
    monkeypatch.setattr("causalqwen.training.scores._AT_ONCE", at_once)
    model = graft_tiny("llama", tiny_tokenizer, value_family="gaussian")
    settings = TrainSettings(values=ValueStage(epochs=3, learning_rate=1e-3), recalibrate=False, value_transform="log")
    learn(model, said_by(model, 12, 0, digits=digits), [], tmp_path / "run", settings)
    rows = said_by(model, 5, 1, digits=digits)
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    assert model.value_transform.support.step == (None if digits else 1)
    template = encoded(model, {"text": "Of 7 it is 47", "individual": "1, 0"})
    certain = {next(numbers_learned(template, model.config.num_token_id))[0]}
    rows += [*template, *encoded(model, {"text": "It is 47", "individual": "speaks once"})]
    made = choice_of(model, rows, [], tmp_path / "work", certain=certain)
    store = FactStore.build(model, rows, tmp_path / "facts")
    scores = made.scores_of(model, rows, store)
    owners = np.repeat([example.individual or "" for example in rows], np.diff(store.offsets))
    told = np.isfinite(store.facts.values) & (store.facts.values != 7)
    features, values = store.facts.tensor("features")[torch.from_numpy(told)], torch.tensor(store.facts.values[told])
    chain = Chain(model, features)
    loadings, left = (part.double() for part in chain.value_loadings())
    away = (model.value_transform.forward(values) - model.action.value(*chain.read_by_values())[0]).double()
    expected = []
    with torch.no_grad():
        for owner in list(dict.fromkeys(example.individual for example in rows))[:5]:
            of = torch.from_numpy(owners[told] == owner)
            covariance = loadings[of] @ loadings[of].T + torch.diag(left[of] ** 2)
            log_p = stats.multivariate_normal(cov=covariance.numpy()).logpdf(away[of].numpy())
            stretch = math.log(model.value_transform.width) + values[of].log().numpy()
            expected.append(-(log_p - stretch.sum()) / of.sum().item())
        assert of.sum() == 6 and 7 in [(owners[told] == owner).sum() for owner in owners]
    once = torch.from_numpy(owners[told] == "speaks once")
    log_p = model.value_law.log_prob(*(column[once] for column in chain.value()), values[once])
    np.testing.assert_allclose(scores, [*expected, -log_p.item()], rtol=1e-4)


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_joint_losses_are_those_of_each_persons_numbers_in_parts_of_any_size(
    tiny_tokenizer, tmp_path, monkeypatch, family
):
    model = graft_tiny("llama", tiny_tokenizer, value_family=family)
    model.config.value_range = [0.0, 100.0]
    rows = [*said_by(model, 3, 0), *encoded(model, {"text": "The first is 43 and the second is 54"})]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    owners, store = [example.individual for example in rows], FactStore.build(model, rows, tmp_path)
    losses, values, whose = joint_losses(model, store, owners)
    assert sorted(whose.unique().tolist()) == [-1, 0, 1, 2] and values[whose == -1].tolist() == [43.0, 54.0]
    features = store.facts.tensor("features")[torch.isfinite(store.facts.tensor("values"))]
    torch.testing.assert_close(losses, model.value_losses(features, values, whose.clip(min=-1)).double())
    kept = joint_losses(model, store, owners, whose == 2)[0]
    torch.testing.assert_close(kept, losses[whose == 2])
    monkeypatch.setattr("causalqwen.training.scores._OF_ONE", 4)
    parts, expected = joint_losses(model, store, owners)[0], losses.clone()
    for person in range(3):
        for part in (slice(0, 4), slice(4, 6)):
            at = (whose == person).nonzero().flatten()[part]
            expected[at] = model.value_losses(
                features[at], values[at], torch.zeros(len(at), dtype=torch.int64)
            ).double()
    torch.testing.assert_close(parts, expected)


def test_one_person_whom_nobody_resembles_does_not_outweigh_everybody():
    def tried(scores):
        return Tried({}, "affine", np.array(scores, dtype=float))

    plain = tried([3.0] * 8 + [30.0] * 4)
    few = tried([3.3] * 8 + [5.0] * 4)  # far better on average, for four of twelve
    assert clearly_better(plain, few) is few and better_for_most(plain, few) is plain
    most = tried([2.9] * 8 + [5.0] * 4)
    assert better_for_most(plain, most) is most
    assert better_for_most(plain, tried([2.9] * 8 + [31.0] * 4)) is plain  # for most, but not on average
    assert better_for_most(plain, tried([3.0] * 8 + [29.0, 29.0, 30.0, 30.5])) is plain  # two of three who differ


def test_no_person_is_taught_and_held_out_and_many_people_are_held_out_fewer_times(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer)
    for people, folds in ((6, 3), (24, 3), (45, 2), (90, 1)):
        rows, seen = said_by(model, people, 0), []
        made = choice_of(model, rows, [], tmp_path)
        assert made.has_enough and len(made.folds) == folds
        for taught, held in made.folds:
            assert not {row.individual for row in taught} & {row.individual for row in held}
            assert len(taught) + len(held) == 6 * people
            seen += sorted({row.individual for row in held})
        assert len(seen) == len(set(seen)) == math.ceil(people / 3) * folds
    ((taught, held),) = choice_of(model, rows, said_by(model, 6, 1), tmp_path).folds
    assert taught is rows and {row.individual for row in held} == {f"1, {i}" for i in range(6)}
    assert choice_of(model, rows, said_by(model, 6, 1), tmp_path).keeps_best
    few = choice_of(model, rows, said_by(model, 5, 1), tmp_path)  # the people of the training rows choose
    assert not few.keeps_best and {row.individual[0] for row in few.folds[0][1]} == {"0"}


@pytest.mark.slow
def test_who_chooses_said_a_number_that_is_no_part_of_a_template(tiny_tokenizer, tmp_path, few_updates):
    model = graft_tiny("llama", tiny_tokenizer)
    silent = encoded(model, *({"text": "nothing is here", "individual": f"p{i}"} for i in range(6)))
    same = encoded(model, *({"text": "Of 7 it is", "individual": f"q{i}"} for i in range(9)))
    nobodys = encoded(model, *({"text": f"It is {50 + i}"} for i in range(40)))
    five, six = said_by(model, 5, 0), said_by(model, 6, 0)
    assert not choice_of(model, [*five, *silent, *same, *nobodys], [], tmp_path).has_enough
    made = choice_of(model, [*six, *silent, *same, *nobodys], [], tmp_path)
    assert made.has_enough and [len(held) for _, held in made.folds] == [12, 12, 12]
    assert all(len(taught) == 24 + 40 for taught, _ in made.folds)  # what nobody said teaches, and is not held out
    learn(model, [*six, *silent, *same, *nobodys], [*silent, *same], tmp_path / "run")
    assert all(
        math.isfinite(one["score"]) for one in json.loads((tmp_path / "run" / "choice.json").read_text())["tried"]
    )
    learn(
        graft_tiny("llama", tiny_tokenizer), [*silent, *said_by(model, 1, 0)], silent, tmp_path / "few"
    )  # one person: learned, and evaluated without a number
    for line in (tmp_path / "few" / "metrics.jsonl").read_text().splitlines():
        assert "NaN" not in line and "joint_reg_loss" not in line


def test_a_value_that_no_axis_holds_does_not_choose_one(tiny_tokenizer, tmp_path, few_updates):
    model = graft_tiny("llama", tiny_tokenizer)
    rows = said_by(model, 12, 0)
    held = [*said_by(model, 6, 1), *encoded(model, {"prompt": PROMPTS[0], "value": 0.0, "individual": "1, 0"})]
    learn(model, rows, held, tmp_path)
    told = json.loads((tmp_path / "choice.json").read_text())["tried"]
    assert {one["axis"] for one in told} == {"affine", "log"} and min(one["score"] for one in told) > 1.5


def test_of_very_many_rows_some_people_choose_with_all_that_they_said(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(people_held, "MOST_ROWS", 80)
    model = graft_tiny("llama", tiny_tokenizer)
    rows, held = said_by(model, 40, 0), said_by(model, 30, 1)
    ((taught, scored),) = choice_of(model, rows, held, tmp_path).folds
    for part in (taught, scored):
        names = [row.individual for row in part]
        assert len(names) == 78 and {names.count(name) for name in names} == {6}
    long = said_by(model, 6, 0, moments=30)
    (fold, *_) = choice_of(model, long, [], tmp_path).folds
    for part, people in zip(fold, (4, 2), strict=True):
        names = [row.individual for row in part]
        assert [names.count(name) for name in sorted(set(names))] == [80 // 6] * people


def test_what_people_choose_is_trained_longer_than_it_was_tried_and_stands_when_a_run_is_taken_up(
    tiny_tokenizer, tmp_path, monkeypatch, few_updates
):
    from causalqwen.training import run

    stages, trainer = [], people_held.TRAINERS["values"]

    def noted(one):
        stages.append(one.settings.values)
        trainer(one)

    monkeypatch.setitem(people_held.TRAINERS, "values", noted)
    model = graft_tiny("llama", tiny_tokenizer)
    rows, held = said_by(model, 12, 0), said_by(model, 6, 1)
    settings = TrainSettings(recalibrate=False)
    with monkeypatch.context() as patched:
        patched.delattr(run, "fit_axes")  # a run that ends where the choice is made
        with pytest.raises(NameError):
            train(model, rows, held, tmp_path / "run", settings)
    model = graft_tiny("llama", tiny_tokenizer)
    found = train(model, rows, held, tmp_path / "run", settings, resume=True)
    chosen = json.loads((tmp_path / "run" / "choice.json").read_text())["chosen"]
    epochs = math.ceil(12 * chosen["share_of_passes"])
    # A third as long as what is chosen, three times as fast; a tenth of that (a hundredth is one pass as well); axis; law.
    assert [stage.epochs for stage in stages] == [4, 1, 4, 4, epochs]
    assert [stage.learning_rate for stage in stages] == pytest.approx([3e-4] * 4 + [1e-4])
    assert math.isfinite(found["loss"]) and not (tmp_path / "run" / "work" / "trial").exists()


def test_fewer_people_choose_nothing_and_are_learned_as_others(tiny_tokenizer, tmp_path, few_updates):
    model, said = graft_tiny("llama", tiny_tokenizer), []
    learn(model, said_by(model, 5, 0), [], tmp_path, TrainSettings(logging_steps=1), say=said.append)
    assert not (tmp_path / "choice.json").exists() and "too few to hold some out" in said[0]
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(step["step"] for step in steps) == 12
    assert (model.value_transform.kind, model.config.value_family) == ("affine", "cauchy")


def test_whoever_sets_the_axis_or_the_law_gets_that(tiny_tokenizer, tmp_path, few_updates):
    model = graft_tiny("llama", tiny_tokenizer, value_family="gaussian")
    learn(model, said_by(model, 9, 0), [], tmp_path, TrainSettings(value_transform="log"))
    told = json.loads((tmp_path / "choice.json").read_text())
    assert {(one["axis"], one["value_family"]) for one in told["tried"]} == {("log", "gaussian")}


def test_people_who_would_be_learned_by_heart_are_passed_over_less(tiny_tokenizer, tmp_path, monkeypatch):
    """Nothing but noise, each number behind words of its own: whatever is learned of it is wrong."""
    monkeypatch.setattr(people_held, "HELD_PEOPLE", 3)
    model, rng = graft_tiny("llama", tiny_tokenizer, value_family="gaussian"), np.random.default_rng(0)
    rows = [
        {"prompt": f"{'abcdefghij'[place]} is", "value": round(rng.normal(50, 3), 2), "individual": f"{person}"}
        for person in range(9)
        for place in range(10)
    ]
    made = encode_rows([Row("prompt", f"row {i}", row) for i, row in enumerate(rows)], model.processor)
    only = TrainSettings(value_transform="affine")
    learn(model, made, [], tmp_path, only)
    told = json.loads((tmp_path / "choice.json").read_text())
    assert told["chosen"]["share_of_passes"] < 1 and told["tried"][0]["share_of_passes"] == 1


def test_rows_of_people_are_evaluated_by_what_their_values_say_of_each_other(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer, value_family="gaussian")
    rows, held = said_by(model, 12, 0), said_by(model, 12, 1)
    stage = ValueStage(epochs=20, learning_rate=1e-3)
    learn(model, rows, held, tmp_path, TrainSettings(values=stage, recalibrate=False, evaluations=1))
    record = next(
        one
        for one in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        if "eval/joint_reg_loss" in one and one["step"] == 20
    )
    store = FactStore.build(model, held, tmp_path / "facts")
    losses, values, _ = joint_losses(model, store, [example.individual for example in held])
    assert record["eval/joint_reg_loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    alone = model.value_losses(store.facts.tensor("features")[torch.isfinite(store.facts.tensor("values"))], values)
    assert record["eval/reg_loss"] == pytest.approx(alone.mean().item(), rel=1e-4)
    assert record["eval/joint_reg_loss"] < record["eval/reg_loss"] - 0.3  # people differ by ten times the noise
