"""Numbers read from the whole backbone in closed form: its features, its fit, and all that asks a model that has one."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.data import Row, encode_rows
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.outputs import CACHE
from causalqwen.modeling.reader import EVERY
from causalqwen.parts.kernel_reader import KernelReader
from causalqwen.training import TrainSettings, ValueStage, closed_form, train
from causalqwen.training import run as training_run
from causalqwen.training.closed_form import AXES, INTERCEPT, BlockKernel, KernelRidge, likeliest_shares, normal_scores
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


@pytest.fixture(scope="module")
def tokenizer():
    from conftest import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="module")
def fitted(tokenizer, tmp_path_factory):
    """A tiny model with values in closed form, its folder, its scores, and what was said."""
    model, said = graft_tiny("qwen2", tokenizer, number_context="digits"), []
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


def test_sequences_in_one_row_are_read_apart(tiny_tokenizer):
    model = reading(graft_tiny("qwen2", tiny_tokenizer))
    parts = [inputs(model, [text])[0]["input_ids"] for text in ("A new year", "They say that the old one is")]
    places = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    values = torch.zeros(1, places.shape[1], dtype=torch.float64)
    with torch.no_grad():
        packed = model.features(torch.cat(parts, 1), None, values, position_ids=places).last_hidden_state
        apart = torch.cat(
            [model.features(p, None, torch.zeros(p.shape, dtype=torch.float64)).last_hidden_state for p in parts], 1
        )
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)


def test_means_are_attention_queries_of_zeros_and_the_rest_every_third_layer_s_states(tiny_tokenizer):
    model = reading(graft_tiny("qwen2", tiny_tokenizer))
    found, _ = inputs(model, TEXTS)
    with torch.no_grad():
        out = model.features(**found, use_cache=True, output_hidden_states=True)
    layers, size = out[CACHE].layers, model.config.hidden_size
    blocks = out.last_hidden_state[:, -1, size:].split(model.reads_backbone, -1)
    states, means = blocks[: -len(layers)], blocks[-len(layers) :]
    assert len(states) == -(-len(layers) // EVERY) and torch.equal(states[0], out.last_hidden_state[:, -1, :size])
    seen = model.seen(found["input_ids"], found["attention_mask"], None)[0].bool()[:, None, None]
    for mean, layer in zip(means, layers, strict=True):
        query = torch.zeros_like(layer.keys[:, :, :1])
        wanted = F.scaled_dot_product_attention(query, layer.keys, layer.values, attn_mask=seen)
        torch.testing.assert_close(mean, wanted.flatten(1), rtol=1e-5, atol=1e-6)


# ---- the fit ---------------------------------------------------------------------------------------------------------


def test_rows_of_a_group_are_left_out_together():
    generator = np.random.default_rng(0)
    x, groups = generator.normal(size=(30, 4)), np.array([0, 0, 0, *range(1, 25), 25, 25, 25])
    values = 50 + x @ [3.0, -2.0, 0.0, 1.0] + 0.3 * generator.normal(size=30)
    made = KernelRidge(x @ x.T, values, groups=groups)
    whole, y = (x @ x.T) / made.unit + INTERCEPT, AXES[made.axis][0](values)
    for group in (0, 3, 25):
        rest = groups != group
        solved = np.linalg.solve(whole[rest][:, rest] + made.location.ridge * np.eye(rest.sum()), y[rest])
        np.testing.assert_allclose(made.location.left_out[~rest], whole[~rest][:, rest] @ solved, rtol=1e-6)


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
    np.testing.assert_allclose(
        KernelRidge(kernel, values, among=kernel).predict(kernel),
        KernelRidge(kernel, values).predict(kernel),
        rtol=1e-6,
    )


@pytest.mark.parametrize(("curve", "kinds"), [(lambda x: np.sin(3 * x), (0.5, 1.0)), (lambda x: x, (0.0, 4.0, 8.0))])
def test_the_kernel_is_as_narrow_as_the_rows_ask(curve, kinds):
    x = np.random.default_rng(0).uniform(-3, 3, size=(200, 1)).astype(np.float32)
    features = np.concatenate([x, np.full((200, 2), 7.0, dtype=np.float32)], axis=1)
    made = BlockKernel(features, [1, 2], 10 + curve(x[:, 0].astype(float)), np.arange(200))
    assert made.kind in kinds and (made.inverse[1:] == 0).all()


def test_a_block_has_the_share_that_makes_the_values_likeliest():
    """What values were drawn from, of kernels of which half tell nothing; and no other shares make them likelier."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(8, 300, 2))
    kernels = np.exp(-np.square(x[:, :, None] - x[:, None]).sum(-1)).astype(np.float32)
    drawn = [root * np.linalg.cholesky(kernels[b] + 1e-6 * np.eye(300)) for b, root in ((1, 1.0), (2, 0.5))]
    y = normal_scores(
        np.exp(sum(root @ generator.normal(size=300) for root in drawn) + 0.3 * generator.normal(size=300))
    )
    assert (
        y == pytest.approx(stats.norm.ppf(stats.rankdata(y) / 300 - 0.5 / 300)) and normal_scores(np.ones(3)).max() == 0
    )
    shares = likeliest_shares(kernels, y)
    assert (
        shares.argmax() == 1 and 0.05 < shares[2] < 0.4 and shares[[0, *range(3, 8)]].max() < 0.05 and shares.sum() == 1
    )

    def likelihood(shares):
        covariances = [10 + size * np.tensordot(shares, kernels, 1) + noise * np.eye(300) for size, noise in sizes]
        return max(stats.multivariate_normal(np.zeros(300), covariance).logpdf(y) for covariance in covariances)

    sizes = [(size, noise) for size in (0.3, 1.0, 3.0) for noise in (0.03, 0.1, 0.3)]
    for other in (np.full(8, 1 / 8), np.eye(8)[1], 0.7 * shares + 0.3 * np.eye(8)[0]):
        assert likelihood(shares) > likelihood(other)


def test_features_that_tell_nothing_are_refused():
    for features in (np.ones((9, 3), np.float32), np.full((9, 3), np.nan, np.float32)):
        with pytest.raises(ValueError, match="features"):
            BlockKernel(features, [3], np.arange(9.0), np.arange(9))


# ---- a model that has one --------------------------------------------------------------------------------------------


def test_numbers_are_learned_in_closed_form_and_their_intervals_hold(fitted):
    model, _, scores, said = fitted
    test = rows(200, seed=9)
    found = model.predict_number([row["prompt"] for row in test])
    values = np.array([row["value"] for row in test])
    error = np.abs(np.array([prediction.median for prediction in found]) - values)
    inside = [low <= v <= high for v, (low, high) in zip(values, (p.interval(0.9) for p in found), strict=True)]
    assert np.median(error) < 2 and scores["median_error"] < 4  # a constant misses by 10
    assert 0.8 <= np.mean(inside) <= 0.98
    assert any(line.startswith("values are read from the whole backbone") for line in said)
    assert any("held out" in line for line in said) and model.config.interval_levels is not None


def test_the_reader_s_kernel_is_the_formula_s(fitted):
    """The fast form, by the slow one: one row, one block, one kept row at a time; and what the chain makes of it."""
    model = fitted[0]
    features, generator = last(model, TEXTS), torch.Generator().manual_seed(0)
    blocks, sizes = model.value_kernel.blocks, (model.config.hidden_size, model.config.causal_size)
    shares = [place % 3 / 10 for place in range(len(blocks))]
    along = [place % 2 / 10 for place in range(len(blocks))]
    reader = KernelReader(*sizes, blocks, 5, [*shares, 0.4], along)
    reader.mean.copy_(model.value_kernel.mean), reader.inverse.copy_(model.value_kernel.inverse)
    reader.support.copy_(torch.randn(reader.support.shape, generator=generator).half().mul(0.1).view(torch.int16))
    reader.weights.normal_(generator=generator), reader.bias.normal_(generator=generator)
    reader.bounds.copy_(torch.tensor([[-0.5, -3.0], [4.0, 3.0]]))
    support = reader.support.view(torch.float16).double()
    x = (features[:, model.config.hidden_size :].double() - reader.mean) * reader.inverse
    for row, made in zip(x, reader.read(features), strict=True):
        total = reader.bias.double().clone()
        told = [of for of in zip(shares, along, row.split(blocks), strict=True) if any(of[:2])]
        for kept, weight in zip(support, reader.weights.T, strict=True):
            of = zip(told, kept.split([len(part) for *_, part in told]), strict=True)
            apart = [(share, far * (a - b).square().sum(), (a - b).square().sum()) for (share, far, a), b in of]
            total += weight * sum(share * torch.expm1(-alone) for share, _, alone in apart)
            total += weight * 0.4 * torch.expm1(-sum(of_all for _, of_all, _ in apart))
        torch.testing.assert_close(made.double(), total.clamp(*reader.bounds), rtol=1e-4, atol=1e-5)
    loc, log_scale = model.value_kernel.read(features).unbind(-1)
    for made, wanted in zip(Chain(model, features).value(), (loc, log_scale.exp()), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)


def test_a_curve_is_kept_by_its_rows(tokenizer, tmp_path):
    """A Gaussian kernel, saved and read again, support as it was to the bit; the rows held out are among its own in the end."""
    model = graft_tiny("qwen2", tokenizer, number_context="digits")
    given = [row | {"value": round((row["value"] - 40) ** 2, 1)} for row in rows(90, seed=5)]
    train(model, encoded(model, given), [], tmp_path / "out", CLOSED)
    again = CausalQwenForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert again.value_kernel.rows == 90 and again.value_kernel.support.dtype == torch.int16
    for name, kept in model.value_kernel.state_dict().items():
        assert torch.equal(again.value_kernel.state_dict()[name], kept)


def test_a_saved_model_says_the_same_and_text_is_the_backbone_s(fitted, tokenizer):
    model, folder, *_ = fitted
    again = CausalQwenForCausalLM.from_pretrained(folder).eval()
    prompts = [row["prompt"] for row in rows(5, seed=3)]
    both = [[(p.loc, p.scale, p.interval(0.8)) for p in one.predict_number(prompts)] for one in (model, again)]
    assert both[0] == both[1]
    found = inputs(model, TEXTS)[0]
    plain = graft_tiny("qwen2", tokenizer, number_context="digits").eval()
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


def test_somebody_is_inferred_from_what_they_said(fitted):
    model = fitted[0]
    who = model.abduct("It is 40 and then 50", likelihood="values")
    assert np.isfinite(model.predict_number("They say that it is", individual=who)[0].median)


def test_rows_that_are_held_out_score_a_fit_without_them_and_are_learned_in_the_end(fitted, tokenizer, tmp_path):
    scores = fitted[2]
    assert 20 <= scores["value_count"] <= 30
    given = graft_tiny("qwen2", tokenizer, number_context="digits")
    found = learn(given, encoded(given, rows(60)), encoded(given, rows(30, seed=2)), tmp_path / "a", CLOSED)
    assert found["value_count"] == 30


def test_texts_that_repeat_do_not_make_it_sure(tokenizer, tmp_path):
    """Each text with four values far apart: what is left out is the whole text, so that a scale is not that of a twin."""
    model = graft_tiny("qwen2", tokenizer, number_context="digits")
    generator = np.random.default_rng(0)
    texts = [f"They say that {a} and {b} is" for a in WORDS[:4] for b in WORDS[:4]]
    given = [{"prompt": text, "value": float(v)} for text in texts for v in generator.normal(50, 5, size=4).round(2)]
    learn(model, encoded(model, given), encoded(model, rows(20)), tmp_path / "run", CLOSED)
    low, high = model.predict_number(texts[0])[0].interval(0.8)
    assert 8 < high - low < 25  # 12.8 is right


def test_classes_have_axes_of_their_own(tokenizer, tmp_path):
    """A thousandth of one and a thousand of the other: each is read to its own units, and its intervals hold."""
    model, size = graft_tiny("qwen2", tokenizer, number_context="digits"), {"small": 1e-3, "large": 1e3}

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


def test_of_many_rows_some_are_kept(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(closed_form, "LANDMARKS", 60)
    model = graft_tiny("qwen2", tokenizer, number_context="digits")
    given = [row | {"value": round((row["value"] - 40) ** 2, 1)} for row in rows(150, seed=5)]
    scores = learn(model, encoded(model, given), encoded(model, rows(30, seed=2)), tmp_path / "run", CLOSED)
    assert model.value_kernel.rows in (0, 60) and np.isfinite(scores["crps"])
    found = model.predict_number([row["prompt"] for row in given[:50]])
    values = np.array([row["value"] for row in given[:50]])
    misses = np.median(np.abs([p.median for p in found] - values))
    assert misses < 0.7 * np.median(np.abs(values - np.median(values)))  # what a constant misses by


def test_an_axis_that_is_kept_and_levels_that_nobody_wants(tokenizer, tmp_path, monkeypatch):
    """`keep` has no axis to choose, so gradients learn; without `recalibrate` nothing is held out, and no levels are fitted."""
    monkeypatch.setattr(training_run, "FEWEST_UPDATES", 4)
    model = graft_tiny("qwen2", tokenizer)
    learn(model, encoded(model, rows(40)), [], tmp_path / "kept", TrainSettings(value_transform="keep"))
    assert model.value_kernel is None
    model = graft_tiny("qwen2", tokenizer)
    scores = learn(model, encoded(model, rows(120)), [], tmp_path / "raw", TrainSettings(recalibrate=False))
    assert scores == {} and model.value_kernel is not None and model.config.interval_levels is None
    assert model.trained_on["rows"] == 120


@pytest.mark.parametrize("given", [rows(5), rows(30, individual="one")])
def test_few_numbers_and_those_of_people_are_learned_by_gradients(tokenizer, tmp_path, monkeypatch, given):
    monkeypatch.setattr(training_run, "FEWEST_UPDATES", 4)
    model = graft_tiny("qwen2", tokenizer)
    learn(model, encoded(model, given), [], tmp_path / "run")
    assert model.value_kernel is None and model.config.value_range is not None


@pytest.mark.parametrize("seed", [0, 1])
def test_a_number_of_the_text_is_said_again_where_rows_say_so(tokenizer, tmp_path, seed):
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

    model = graft_tiny("qwen2", tokenizer, number_context="digits")
    scores = learn(model, encoded(model, told(150)), [], tmp_path / "run")
    assert model.copies and scores["copied"] > 0.5
    test = told(60)
    for row, found in enumerate(model.predict_number([each["prompt"] for each in test])):
        assert (found.median == test[row]["value"]) == bool(row % 3)
    other = graft_tiny("qwen2", tokenizer, number_context="digits")
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
