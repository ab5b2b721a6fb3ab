"""Numbers read from the whole backbone in closed form: its features, its fit, and all that asks a model that has one."""

import re

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.kernel_ridge import KernelRidge as Refit
from torch.nn import functional as F

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.data import Row, encode_rows
from causalqwen.evaluation.number_table import NumberTable
from causalqwen.evaluation.rivals import crps_of, fit_ngram_ridge, inside
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.outputs import CACHE
from causalqwen.modeling.reader import EVERY, NUMBERS
from causalqwen.numbers import CRPS_LEVELS, ValueLaw
from causalqwen.parts.kernel_reader import KernelReader
from causalqwen.training import TrainSettings, ValueStage, closed_form, train
from causalqwen.training import run as training_run
from causalqwen.training.closed_form import AXES, INTERCEPT, BlockKernel, KernelRidge, Shape, likeliest, normal_scores
from causalqwen.training.run import learn
from causalqwen.training.whole_backbone import blocks_of
from conftest import graft_tiny

TEXTS = ["They say that it is 5 and then", "A new year", "It is 12.5 of them, and the old one is"]
WORDS = ["old", "new", "year", "people", "and", "of", "the", "that", "then", "is", "they", "say"]
CLOSED = TrainSettings()


def rows(count, seed=0, **beside):
    """Rows whose number follows two words of their prompt."""
    generator = np.random.default_rng(seed)
    made = []
    for first, second in generator.integers(len(WORDS), size=(count, 2)).tolist():
        value = round(10 + 5 * (first % 7 + second % 7) + generator.normal(), 2)
        made.append({"prompt": f"They say that {WORDS[first]} and {WORDS[second]} is", "value": value} | beside)
    return made


def encoded(model, given):
    return encode_rows([Row("prompt", f"row {i}", row) for i, row in enumerate(given, 1)], model.processor)


def fresh(tokenizer):
    return graft_tiny("qwen2", tokenizer, number_context="digits")


@pytest.fixture(scope="module")
def fitted(tiny_tokenizer, tmp_path_factory):
    """A tiny model with values in closed form, its folder, its scores, and what was said."""
    model, said = fresh(tiny_tokenizer), []
    output = tmp_path_factory.mktemp("closed") / "out"
    scores = train(model, encoded(model, rows(120)), [], output, CLOSED, say=said.append)
    return model.eval(), output, scores, said


# ---- features --------------------------------------------------------------------------------------------------------


def reading(model):
    model.reads_backbone = blocks_of(model)
    return model.eval()


def inputs(model, texts, side="left"):
    found = model.processor(texts, padding=True, padding_side=side, return_tensors="pt", prompt=True)
    lengths = found["attention_mask"].sum(-1)
    return found, torch.full_like(lengths, found["input_ids"].shape[1] - 1) if side == "left" else lengths - 1


@torch.no_grad()
def last(model, texts, side="left"):
    found, ends = inputs(model, texts, side)
    return model.features(**found).last_hidden_state[torch.arange(len(texts)), ends]


@pytest.mark.parametrize("context", ["value", "digits"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_features_are_the_same_however_a_text_is_read(tiny_tokenizer, family, context):
    model = reading(graft_tiny(family, tiny_tokenizer, number_context=context))
    alone = torch.cat([last(model, [text]) for text in TEXTS])
    for side in ("left", "right"):
        torch.testing.assert_close(last(model, TEXTS, side), alone, rtol=1e-4, atol=1e-5)
    found, _ = inputs(model, TEXTS[:1])
    with torch.no_grad():
        first = model.features(**{name: column[:, :4] for name, column in found.items()}, use_cache=True)
        rest = {name: found[name][:, 4:] for name in ("input_ids", "numeric_values")}
        behind = model.features(**rest, attention_mask=found["attention_mask"], cache=first[CACHE])
    torch.testing.assert_close(behind.last_hidden_state[:, -1], alone[:1], rtol=1e-4, atol=1e-5)
    assert model.features(**found, use_cache=False).get(CACHE) is None
    cache = model.backbone(torch.ones(1, 4, dtype=torch.int64))[CACHE]
    with pytest.raises(ValueError, match="this cache was filled by the backbone alone"):
        model.features(**rest, attention_mask=found["attention_mask"], cache=cache)


def test_means_are_attention_queries_of_zeros_and_the_rest_every_third_layer_s_states(tiny_tokenizer):
    model = reading(graft_tiny("qwen2", tiny_tokenizer))
    found, _ = inputs(model, TEXTS)
    with torch.no_grad():
        out = model.features(**found, use_cache=True, output_hidden_states=True)
    layers, size = out[CACHE].layers[:-1], model.config.hidden_size
    blocks = out.last_hidden_state[:, -1, size:].split(model.reads_backbone, -1)[:-NUMBERS]
    states, means = blocks[: -len(layers)], blocks[-len(layers) :]
    assert len(states) == -(-len(layers) // EVERY) and torch.equal(states[0], out.last_hidden_state[:, -1, :size])
    seen = model.seen(found["input_ids"], found["attention_mask"], None)[0].bool()[:, None, None]
    for mean, layer in zip(means, layers, strict=True):
        query = torch.zeros_like(layer.keys[:, :, :1])
        wanted = F.scaled_dot_product_attention(query, layer.keys, layer.values, attn_mask=seen)
        torch.testing.assert_close(mean, wanted.flatten(1), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_numbers_before_a_position_are_those_of_its_text(tiny_tokenizer):
    model = reading(fresh(tiny_tokenizer))
    chance, pieces = np.random.default_rng(0), [*"0123456789", *"12.,-", ".", ",", " the", " and", " 7", "("]
    ids = [tiny_tokenizer.convert_tokens_to_ids(tiny_tokenizer.tokenize(piece)) for piece in pieces]
    found = 0
    for _ in range(30):
        row = [token for place in chance.integers(len(pieces), size=50) for token in ids[place]]
        told = model.features(torch.tensor([row])).last_hidden_state[0, :, -2 * NUMBERS :].view(-1, NUMBERS, 2)
        for end in range(1, len(row)):
            text = tiny_tokenizer.decode(row[: end + 1])
            slow = re.findall(r"\d+(?:[.,]\d+)*(?=[^\d.,]|[.,]\D)", text)[:NUMBERS]
            parts = [written.replace(",", "").rpartition(".") for written in slow]
            values = [float(whole.replace(".", "") + point + rest) for whole, point, rest in parts]
            assert told[end, :, 1].sum() == len(values)
            torch.testing.assert_close(told[end, : len(values), 0], torch.tensor(values).log1p())
            found += len(values)
    assert found > 1000
    five, word = ids[5], ids[pieces.index(" the")]
    assert model.features(torch.tensor([ids[0] * 400 + five + word])).last_hidden_state.isfinite().all()


# ---- the fit ---------------------------------------------------------------------------------------------------------


def linear(count, seed=0, noise=0.3):
    """x [n, 4], and values that are linear in x, noisier where x_0 is large, far from zero."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 4))
    return x, 50 + x @ [3.0, -2.0, 0.0, 1.0] + noise * np.exp(x[:, 0]) * generator.normal(size=count)


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_left_out_is_what_refits_predict(seed):
    x, values = linear(40, seed)
    kernel = x @ x.T
    made = KernelRidge(kernel, values)
    whole, y = kernel / made.unit + INTERCEPT, AXES[made.axis][0](values)
    spread = np.log(np.abs(y - made.location.left_out) + (y - made.location.left_out).std() / 20)
    for target, solution in ((y, made.location), (spread, made.log_scale)):
        for row in (0, 7, 39):
            rest = np.arange(40) != row
            refit = Refit(alpha=solution.ridge, kernel="precomputed").fit(whole[rest][:, rest], target[rest])
            assert solution.left_out[row] == pytest.approx(refit.predict(whole[None, row, rest])[0], rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("seed", [0, 1])
def test_with_rows_drawn_to_keep_left_out_is_what_refits_predict(seed):
    generator = np.random.default_rng(seed)
    x, groups = generator.normal(size=(40, 3)), np.array([0, 0, 0, *range(1, 38)])
    values, kept = 50 + np.sin(2 * x[:, 0]) + x[:, 1], np.arange(0, 40, 4)
    kernel = np.exp(-np.square(x[:, None] - x).sum(-1))
    made = KernelRidge(kernel[:, kept], values, groups=groups, among=kernel[np.ix_(kept, kept)])
    whole, y = kernel / made.unit + INTERCEPT, AXES[made.axis][0](values)
    for group in (0, 5, 37):
        rest = groups != group
        seen = whole[rest][:, kept]
        gram = seen.T @ seen + made.location.ridge * whole[np.ix_(kept, kept)]
        wanted = whole[~rest][:, kept] @ np.linalg.solve(gram, seen.T @ y[rest])
        np.testing.assert_allclose(made.location.left_out[~rest], wanted, rtol=1e-6)
    both = [KernelRidge(kernel, values, groups=groups, among=among) for among in (kernel, None)]
    np.testing.assert_allclose(*(one.location.left_out for one in both), rtol=1e-6)
    np.testing.assert_allclose(*(one.predict(kernel) for one in both), rtol=1e-6)


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
    x, values = linear(300)
    new, truth = linear(1000, seed=5)
    found = KernelRidge(x @ x.T, values).predict(new @ x.T)
    assert (np.diff(found) >= 0).all()
    for level, ends in ((0.5, [49, 149]), (0.9, [9, 189])):
        assert inside(found[:, ends], truth).mean() == pytest.approx(level, abs=0.05)
    width = found[:, 189] - found[:, 9]
    assert width[new[:, 0] > 1].mean() > 3 * width[new[:, 0] < -1].mean()


@pytest.mark.parametrize(("axis", "of"), [("log", np.exp), ("identity", lambda y: y)])
def test_the_axis_is_the_one_on_which_rows_are_linear(axis, of):
    x, values = linear(200, noise=0.05)
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


def test_the_kernel_is_as_narrow_as_the_rows_ask():
    """A line is one; what tells nothing of y is looked at all the same, for the scale's sake, unless it is constant."""
    generator = np.random.default_rng(0)
    x, beside = generator.normal(size=(2, 200, 1)).astype(np.float32)
    features, noise = np.hstack([x, np.full((200, 2), np.float32(7)), beside]), 0.2 * generator.normal(size=200)
    of = lambda y: BlockKernel(features, [1, 2, 1], 10 + y[:, 0] + noise, np.arange(200)).shape  # noqa: E731
    wavy, line = of(np.sin(2 * x)), of(x)
    assert 0.5 < wavy.narrow[0] < 8 and wavy.alone[0] > 0.9 and line.linear[0] > 0.6
    for shape in (wavy, line):
        assert shape.alone[1] == 0 and shape.alone[2] >= 0.01
        assert shape.alone.sum() + shape.linear.sum() + shape.together == pytest.approx(1)


def test_a_kernel_is_the_likeliest_one():
    """What values were drawn from, of blocks of which half tell nothing; and no other shape makes them likelier."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(6, 250, 2)).astype(np.float32)
    apart = np.square(x[:, :, None] - x[:, None]).sum(-1)
    made = np.exp(-apart[1] / 3), x[2] @ x[2].T / 2, 2 * np.exp(-(apart[3] + apart[4]) / 3)
    roots = [np.linalg.cholesky(kernel.astype(float) + 1e-5 * np.eye(250)) for kernel in made]
    y = normal_scores(
        np.exp(sum(root @ generator.normal(size=250) for root in roots) + 0.2 * generator.normal(size=250))
    )
    shape = likeliest(x, y, 0)
    assert shape.alone.argmax() == 1 and shape.linear.argmax() == 2 and shape.together > 0.1
    assert shape.along[[0, 1, 2, 5]].max() < 0.3 * shape.along[[3, 4]].min()

    def likelihood(of):
        kernel = of.together * np.exp(-np.tensordot(of.along, apart, 1)) + np.einsum("b,bik,bjk->ij", of.linear, x, x)
        kernel += sum(share * np.exp(-far * d) for share, far, d in zip(of.alone, of.narrow, apart, strict=True))
        covariances = [10 + size * kernel + noise * np.eye(250) for size in (0.3, 1, 3) for noise in (0.03, 0.1, 0.3)]
        return max(stats.multivariate_normal(np.zeros(250), covariance).logpdf(y) for covariance in covariances)

    tied = likeliest(x, y, 6)
    assert len(set(tied.linear)) == 1 < len(set(tied.alone)) and likelihood(shape) > likelihood(tied)
    others = {
        "alone": np.full(6, 1 / 6),
        "narrow": shape.narrow * 8,
        "linear": 0 * shape.linear,
        "along": shape.along / 8,
    }
    assert all(likelihood(shape) > likelihood(shape._replace(**{name: of})) for name, of in others.items())


def test_features_that_are_not_finite_are_refused_and_of_such_as_tell_nothing_all_are_one():
    with pytest.raises(ValueError, match="features"):
        BlockKernel(np.full((9, 3), np.nan, np.float32), [3], np.arange(9.0), np.arange(9))
    made = BlockKernel(np.ones((9, 3), np.float32), [3], np.arange(9.0), np.arange(9))
    assert made.ridge.predict(np.zeros((1, 9)))[0, 99] == pytest.approx(4, abs=0.5)


def test_a_curve_without_noise_has_a_kernel_and_so_have_more_rows_than_are_kept(monkeypatch):
    x = np.random.default_rng(0).uniform(-3, 3, size=(1000, 1)).astype(np.float32)
    monkeypatch.setattr(closed_form, "LANDMARKS", 64)
    made = BlockKernel(x, [1], np.sin(3 * x[:, 0].astype(float)), np.arange(1000))
    assert np.abs(made.ridge.residuals).mean() < 0.1


# ---- a model that has one --------------------------------------------------------------------------------------------


def test_numbers_are_learned_in_closed_form_and_their_intervals_hold(fitted):
    model, _, scores, said = fitted
    test = rows(200, seed=9)
    found = model.predict_number([row["prompt"] for row in test])
    values = np.array([row["value"] for row in test])
    error = np.abs(np.array([prediction.median for prediction in found]) - values)
    within = [low <= v <= high for v, (low, high) in zip(values, (p.interval(0.9) for p in found), strict=True)]
    assert np.median(error) < 2 and scores["median_error"] < 4  # a constant misses by 10
    assert 0.8 <= np.mean(within) <= 0.98
    assert any(line.startswith("values are read from the whole backbone") for line in said)
    assert any("held out" in line for line in said) and model.config.interval_levels is not None


def test_the_reader_s_kernel_is_the_formula_s(fitted):
    """The fast form, by the slow one: one row, one block, one kept row at a time; and what the chain makes of it."""
    model = fitted[0]
    features, generator = last(model, TEXTS), torch.Generator().manual_seed(0)
    blocks, sizes = model.value_kernel.blocks, (model.config.hidden_size, model.config.causal_size)
    alone, narrow, linear, along = ([place % every / 10 for place in range(len(blocks))] for every in (3, 4, 5, 2))
    reader = KernelReader(*sizes, blocks, 5, Shape(alone, narrow, linear, along, 0.4)._asdict())
    reader.mean.copy_(model.value_kernel.mean), reader.inverse.copy_(model.value_kernel.inverse)
    reader.support.copy_(torch.randn(reader.support.shape, generator=generator).half().mul(0.1).view(torch.int16))
    reader.weights.normal_(generator=generator), reader.bias.normal_(generator=generator)
    reader.bounds.copy_(torch.tensor([[-0.5, -3.0], [4.0, 3.0]]))
    support = reader.support.view(torch.float16).double()
    x = (features[:, model.config.hidden_size :].double() - reader.mean) * reader.inverse
    for row, made in zip(x, reader.read(features), strict=True):
        total = reader.bias.double().clone()
        every = zip(alone, narrow, linear, along, row.split(blocks), strict=True)
        told = [of for of in every if of[0] or of[2] or of[3]]
        for kept, weight in zip(support, reader.weights.T, strict=True):
            apart = torch.zeros((), dtype=torch.float64)
            for (share, width, slope, far, a), b in zip(told, kept.split([len(of[-1]) for of in told]), strict=True):
                total += weight * (share * torch.expm1(-width * (a - b).square().sum()) + slope * a @ b)
                apart += far * (a - b).square().sum()
            total += weight * 0.4 * torch.expm1(-apart)
        torch.testing.assert_close(made.double(), total.clamp(*reader.bounds), rtol=1e-4, atol=1e-5)
    loc, log_scale = model.value_kernel.read(features).unbind(-1)
    for made, wanted in zip(Chain(model, features).value(), (loc, log_scale.exp()), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)


def test_a_saved_model_says_the_same_and_text_is_the_backbone_s(fitted, tiny_tokenizer):
    model, folder, *_ = fitted
    again = CausalQwenForCausalLM.from_pretrained(folder).eval()
    assert again.value_kernel.rows == 120 and again.value_kernel.support.dtype == torch.int16
    twin = again.value_kernel.state_dict()
    assert all(torch.equal(twin[name], kept) for name, kept in model.value_kernel.state_dict().items())
    prompts = [row["prompt"] for row in rows(5, seed=3)]
    both = [[(p.loc, p.scale, p.interval(0.8)) for p in one.predict_number(prompts)] for one in (model, again)]
    assert both[0] == both[1]
    found = inputs(model, TEXTS)[0]
    plain = fresh(tiny_tokenizer).eval()
    size = model.config.num_token_id
    with torch.no_grad():
        assert torch.equal(model(**found).logits[..., :size], plain(**found).logits[..., :size])


def test_a_text_says_what_is_predicted(fitted):
    model = CausalQwenForCausalLM.from_pretrained(fitted[1]).eval()
    model.action.num_bias.data += 1e3  # a number comes at once
    prompt = rows(1, seed=4)[0]["prompt"]
    found = inputs(model, [prompt])[0]
    plan = CausalDecoding.preset("standard")
    out = model.generate(**found, max_new_tokens=8, causal_decoding=plan, return_dict_in_generate=True)
    said = out.numeric_values[out.sequences == model.config.num_token_id]
    wanted = model.predict_number(prompt)[0].median
    assert len(said) and said[0].item() == pytest.approx(wanted, rel=1e-3)
    drawn = {}
    for seed in (1, 2):
        plan = CausalDecoding.preset("persona", seed=seed)
        out = model.generate(**found, max_new_tokens=8, causal_decoding=plan, return_dict_in_generate=True)
        drawn[seed] = out.numeric_values[out.sequences == model.config.num_token_id][0].item()
    assert drawn[1] != drawn[2] and all(abs(value - wanted) < 60 for value in drawn.values())


def test_numbers_of_the_text_say_what_comes_however_it_is_decided(tiny_tokenizer, tmp_path):
    model, chance = fresh(tiny_tokenizer), np.random.default_rng(0)
    told = [(f"In {year} they had {size} and then", 3.0 * size) for year, size in chance.integers(100, 900, (150, 2))]
    examples = encoded(model, [{"prompt": prompt, "value": value} for prompt, value in told])
    scores = train(model, examples, [], tmp_path / "out", CLOSED)
    assert scores["median_error"] < 30  # of 300 to 2,700
    model.eval().action.num_bias.data += 1e3
    prompts = ["And so it is. In 300 they had 200 and then", "In 512 they had 640.5 and then"]
    wanted = [prediction.median for prediction in model.predict_number(prompts)]
    ways = {"use_cache": False}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}
    for way in ({}, *ways, {"cache_implementation": "static", "disable_compile": True}):
        for prompt, median in zip(prompts, wanted, strict=True):
            asked = inputs(model, [prompt])[0] | way | {"max_new_tokens": 9, "do_sample": False}
            out = model.generate(**asked, return_dict_in_generate=True)
            said = out.numeric_values[out.sequences == model.config.num_token_id]
            assert said[2].item() == pytest.approx(median, rel=1e-3), way  # behind the two of the prompt


def test_somebody_is_inferred_from_what_they_said(fitted):
    model = fitted[0]
    who = model.abduct("It is 40 and then 50", likelihood="values")
    assert np.isfinite(model.predict_number("They say that it is", individual=who)[0].median)


def test_rows_that_are_held_out_score_a_fit_without_them_and_are_learned_in_the_end(fitted, tiny_tokenizer, tmp_path):
    scores = fitted[2]
    assert 20 <= scores["value_count"] <= 30
    given = fresh(tiny_tokenizer)
    found = learn(given, encoded(given, rows(60)), encoded(given, rows(30, seed=2)), tmp_path / "a", CLOSED)
    assert found["value_count"] == 30


def test_texts_that_repeat_do_not_make_it_sure(tiny_tokenizer, tmp_path):
    """Each text with four values far apart: what is left out is the whole text, so that a scale is not that of a twin."""
    model = fresh(tiny_tokenizer)
    generator = np.random.default_rng(0)
    texts = [f"They say that {a} and {b} is" for a in WORDS[:4] for b in WORDS[:4]]
    given = [{"prompt": text, "value": float(v)} for text in texts for v in generator.normal(50, 5, size=4).round(2)]
    learn(model, encoded(model, given), encoded(model, rows(20)), tmp_path / "run", CLOSED)
    low, high = model.predict_number(texts[0])[0].interval(0.8)
    assert 8 < high - low < 25  # 12.8 is right


def test_classes_have_axes_of_their_own(tiny_tokenizer, tmp_path):
    """A thousandth of one and a thousand of the other: each is read to its own units, and its intervals hold."""
    model, size = fresh(tiny_tokenizer), {"small": 1e-3, "large": 1e3}

    def of_both(count, seed):
        return [
            row | {"prompt": f"{name} {row['prompt']}", "value": row["value"] * size[name], "class": name}
            for place, name in enumerate(size)
            for row in rows(count, seed + 100 * place)
        ]

    settings = TrainSettings.from_dict({"values": "auto", "class_transforms": True})
    learn(model, encoded(model, of_both(60, 0)), [], tmp_path / "run", settings)
    for name, unit in size.items():
        model.number_class, test = name, [row for row in of_both(40, 7) if row["class"] == name]
        found = model.predict_number([row["prompt"] for row in test])
        misses = [abs(p.median - row["value"]) / unit for p, row in zip(found, test, strict=True)]
        assert np.median(misses) < 3  # a constant misses by 10
        held = [
            low <= row["value"] <= high for row, (low, high) in zip(test, (p.interval(0.9) for p in found), strict=True)
        ]
        assert np.mean(held) > 0.7


def test_of_many_rows_some_are_kept(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(closed_form, "LANDMARKS", 60)
    model = fresh(tiny_tokenizer)
    given = [row | {"value": round((row["value"] - 40) ** 2, 1)} for row in rows(150, seed=5)]
    scores = learn(model, encoded(model, given), encoded(model, rows(30, seed=2)), tmp_path / "run", CLOSED)
    assert model.value_kernel.rows == 60 and np.isfinite(scores["crps"])
    found, values = (
        model.predict_number([row["prompt"] for row in given[:50]]),
        np.array([row["value"] for row in given[:50]]),
    )
    misses = np.median(np.abs([p.median for p in found] - values))
    assert misses < 0.7 * np.median(np.abs(values - np.median(values)))  # what a constant misses by


def test_an_axis_that_is_kept_and_levels_that_nobody_wants(tiny_tokenizer, tmp_path, monkeypatch):
    """`keep` has no axis to choose, so gradients learn; without `recalibrate` nothing is held out, and no levels are fitted."""
    monkeypatch.setattr(training_run, "FEWEST_UPDATES", 4)
    model = graft_tiny("qwen2", tiny_tokenizer)
    learn(model, encoded(model, rows(40)), [], tmp_path / "kept", TrainSettings(value_transform="keep"))
    assert model.value_kernel is None
    model = graft_tiny("qwen2", tiny_tokenizer)
    scores = learn(model, encoded(model, rows(120)), [], tmp_path / "raw", TrainSettings(recalibrate=False))
    assert scores == {} and model.value_kernel is not None and model.config.interval_levels is None
    assert model.trained_on["rows"] == 120


@pytest.mark.parametrize("given", [rows(5), rows(30, individual="one")])
def test_few_numbers_and_those_of_people_are_learned_by_gradients(tiny_tokenizer, tmp_path, monkeypatch, given):
    monkeypatch.setattr(training_run, "FEWEST_UPDATES", 4)
    model = graft_tiny("qwen2", tiny_tokenizer)
    learn(model, encoded(model, given), [], tmp_path / "run")
    assert model.value_kernel is None and model.config.value_range is not None


@pytest.mark.parametrize("seed", [0, 1])
def test_a_number_of_the_text_is_said_again_where_rows_say_so(tiny_tokenizer, tmp_path, seed):
    """Two of three texts say their value behind another number; the last third says the other number alone."""
    generator = np.random.default_rng(seed)

    def told(count):
        made = []
        for row, value in enumerate(generator.integers(20, 900, count).tolist()):
            end = f", and then {value}" if row % 3 else ""
            made.append(
                {"prompt": f"They say {generator.integers(1, 9)} of the people{end}. It is", "value": value + 0.0}
            )
        return made

    model = fresh(tiny_tokenizer)
    scores = learn(model, encoded(model, told(150)), [], tmp_path / "run")
    assert model.copies and scores["copied"] > 0.5
    test = told(60)
    for row, found in enumerate(model.predict_number([each["prompt"] for each in test])):
        assert (found.median == test[row]["value"]) == bool(row % 3)
    other = fresh(tiny_tokenizer)
    learn(other, encoded(other, rows(40)), [], tmp_path / "other")
    assert not other.copies


def test_a_model_in_closed_form_is_fitted_anew_and_not_trained_by_gradients(fitted, tmp_path):
    model = CausalQwenForCausalLM.from_pretrained(fitted[1])
    with pytest.raises(ValueError, match="training by gradients needs value_kernel=None.*values: auto"):
        learn(model, encoded(model, rows(30)), [], tmp_path / "a", TrainSettings(values=ValueStage()))
    higher = [row | {"value": row["value"] + 1000} for row in rows(40)]
    learn(model, encoded(model, higher), [], tmp_path / "b", CLOSED)
    assert model.predict_number(higher[0]["prompt"])[0].median > 900
    with pytest.raises(ValueError, match="whole backbone, and was given its last layer"):
        Chain(model, torch.zeros(1, model.config.hidden_size)).value()
