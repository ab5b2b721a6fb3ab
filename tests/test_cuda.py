"""What an accelerator alone can show: that nothing mixes devices, and that kernels give there what they give here. Runs where
there is one. Commands with `--device auto` run there too wherever other tests run them."""

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.speed.generation import compiled_steps
from causalqwen import (
    PRESETS,
    CausalDecoding,
    Individual,
    Intervention,
    Observation,
    Population,
    Question,
    linear_ovr_loss,
)
from causalqwen.data import encode_rows, parse_row
from causalqwen.evaluation.evaluate import evaluate
from causalqwen.kernels import inclusion_probabilities, sample_negatives
from causalqwen.modeling.loading import load_model
from causalqwen.sklearn import NumberRegressor
from causalqwen.training import BackboneStage, HeadStage, LoraStage, TrainSettings, ValueStage, train
from conftest import graft_tiny, make_backbone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

SAID = [Observation(f" {value}, and then", "They say that it is") for value in (12.5, 17.0, 14.25)]


@pytest.fixture(params=["cauchy", "gaussian"])
def model(request, tiny_tokenizer):
    made = graft_tiny("llama", tiny_tokenizer, value_family=request.param).cuda()
    made.config.value_range = [0.0, 100.0]
    return made


def test_individuals_are_inferred_in_every_way(model):
    for settings in ({}, {"likelihood": "values"}, {"likelihood": "ovr"}):
        who = model.abduct(SAID, **settings)
        assert who.factor.device.type == "cpu"
        assert model.predict_number("They say", individual=who)[0].interval(0.9)[0] < 1e300
    again = model.abduct(SAID, likelihood="values", prior=model.abduct(SAID[:1], likelihood="values"))
    assert again.evidence[-1].values == 3
    assert model.abduct_population({"Ann": "They say so. " * 8, "Bob": "So it is. " * 8}).precision is not None


def test_a_population_is_asked_for_numbers_words_and_texts(model):
    questions = [
        Question("They say that it is", name="number"),
        Question("She said", ("blue", "red"), "word"),
        Question("They say", name="text", max_new_tokens=3),
    ]
    people = Population.drawn(4, model.config.causal_size)
    there = model.survey(people, questions, seed=2)
    assert there.equals(model.survey(people, questions, seed=2))
    here = model.cpu().survey(people, questions, seed=2)
    assert there["word"].equals(here["word"]) and np.allclose(there["number"], here["number"], rtol=1e-3)


def test_worlds_under_observed_noise(model):
    observed = SAID[0]
    (was,), (other,) = model.counterfactual_samples(observed, [Intervention(), Intervention(values={0: 99.0})])
    assert was.text == observed.text and other.text.startswith(" 99")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_text_is_the_same_as_on_the_processor(model, preset):
    inputs = model.processor(["It is 5 and then", "A new year"], padding=True, padding_side="left", return_tensors="pt")
    plan = CausalDecoding.preset(preset, seed=3)
    there = model.generate(**inputs.to("cuda"), causal_decoding=plan, max_new_tokens=8)
    here = model.cpu().generate(**inputs.to("cpu"), causal_decoding=plan, max_new_tokens=8)
    assert preset == "softmax" or torch.equal(there.sequences.cpu(), here.sequences)


def test_an_individual_speaks_there(model):
    plan = CausalDecoding(individual=Individual.from_seed(3, 32), noise="token", seed=1)
    inputs = model.processor("They say", prompt=True, return_tensors="pt").to("cuda")
    assert model.generate(**inputs, causal_decoding=plan, max_new_tokens=4).sequences.shape[1] > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["cauchy", "gaussian"])
@pytest.mark.parametrize("own_scale", [False, True])
def test_the_kernel_at_full_size(dtype, family, own_scale):
    """Triton's kernel on thousands of positions and words, against the reference in float64: as near as blocks in torch."""
    generator = torch.Generator().manual_seed(0)
    loc, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((2000, 128), (9001, 128), (9001,)))
    scale = torch.rand(2000, *[128] * own_scale, generator=generator) + 0.2
    thresholds = torch.randn(9001, generator=generator) + 9.0
    targets = torch.randint(9001, (2000,), generator=generator)
    leaves = [loc * 0.5, scale, weight, bias, thresholds]
    settings = {"family": family, "slope": 0.4, "reduction": "mean"}

    def found(impl, dtype, **more):
        here = [leaf.to("cuda", dtype, copy=True).requires_grad_(True) for leaf in leaves]
        loss = linear_ovr_loss(*here, targets.cuda(), impl=impl, **settings, **more)
        loss.backward()
        return [loss.double(), *(leaf.grad.double() for leaf in here)]

    sample = sample_negatives(inclusion_probabilities(torch.rand(9001, generator=generator) + 0.1, 600), generator)
    for more in ({}, {"negatives": sample}):
        exact = found("chunked" if more else "reference", torch.float64, **more)
        blocks, kernel = found("chunked", dtype, **more), found("triton", dtype, **more)
        for name, a, b, c in zip(
            ("loss", "loc", "scale", "weight", "bias", "thresholds"), kernel, blocks, exact, strict=True
        ):
            assert (a - c).norm() <= 1.05 * (b - c).norm() + 2e-6 * c.norm(), (name, more.keys())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", PRESETS)
def test_half_precision_decodes_the_same_text_each_time(tiny_tokenizer, dtype, preset):
    model = graft_tiny("qwen2", tiny_tokenizer).to(dtype).cuda()
    inputs = model.processor(["It is 5 and then", "A new year"], padding=True, padding_side="left", return_tensors="pt")
    plan = CausalDecoding.preset(preset, seed=3)
    said = [model.generate(**inputs.to("cuda"), causal_decoding=plan, max_new_tokens=12).sequences for _ in range(2)]
    assert torch.equal(*said) and said[0].shape[1] > inputs["input_ids"].shape[1]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # of torch.compile's; float32 is meant here
def test_compiled_steps_give_the_same_text(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer).cuda()
    inputs = model.processor("They say", prompt=True, return_tensors="pt").to("cuda")
    for preset in ("standard", "persona"):
        plan = CausalDecoding.preset(preset, seed=5)
        plain, compiled = (
            model.generate(**inputs, causal_decoding=plan, max_new_tokens=8, **way).sequences
            for way in ({}, compiled_steps())
        )
        assert torch.equal(plain, compiled)


@pytest.mark.parametrize("stage", ["values", "heads", "lora", "backbone"])
def test_what_is_trained_there_answers_alike_here(tiny_tokenizer, tmp_path, stage):
    model = graft_tiny("qwen2", tiny_tokenizer).cuda()
    rows = [f'{{"text": "The {word} one is {2 * n + 1} long."}}' for n, word in enumerate(["old", "new", "far"] * 12)]
    examples = encode_rows([parse_row(row, "rows") for row in rows], model.processor)
    more = {"heads": HeadStage(epochs=1), "lora": LoraStage(epochs=1), "backbone": BackboneStage(epochs=1, layers=1)}
    brief = {"values": ValueStage(epochs=2, batch_size=8)} | ({} if stage == "values" else {stage: more[stage]})
    metrics = train(model, examples[:28], examples[28:], tmp_path / "made", TrainSettings(evaluations=1, **brief))
    assert np.isfinite(metrics["crps"])
    assert evaluate(model, examples[28:], tmp_path / "work")["metrics"]["crps"] == pytest.approx(metrics["crps"])
    laws = [load_model(tmp_path / "made", device).predict_number("The old one is")[0] for device in ("cuda", "cpu")]
    assert laws[0].median == pytest.approx(laws[1].median, rel=1e-3)


def test_a_table_is_fitted_there_and_asked_here(tiny_tokenizer, tmp_path):
    make_backbone("llama", tiny_tokenizer).save_pretrained(tmp_path / "bare")
    tiny_tokenizer.save_pretrained(tmp_path / "bare")
    random = np.random.default_rng(0)
    x = pd.DataFrame({"name": random.choice(["a red chair", "an old table"], 90), "weight": random.gamma(2.0, 2.0, 90)})
    y = 3 * x["weight"] + random.normal(0, 0.2, 90)
    made = NumberRegressor(str(tmp_path / "bare")).fit(x, y)
    assert made.model_.device.type == "cuda"
    made.save(tmp_path / "made")
    here = NumberRegressor.load(tmp_path / "made", device="cpu")
    for asked in ("mean", "median"):
        np.testing.assert_allclose(made.predict(x[:20], asked), here.predict(x[:20], asked), rtol=1e-3)
