"""What an accelerator alone can show: that nothing mixes devices. Runs where there is one."""

import pytest
import torch

from causalqwen import PRESETS, CausalDecoding, Individual, Intervention, Observation
from conftest import graft_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

SAID = [Observation(f" {value}, and then", "They say that it is") for value in (12.5, 17.0, 14.25)]


@pytest.fixture(params=["cauchy", "gaussian"])
def model(request, tiny_tokenizer):
    made = graft_tiny("llama", tiny_tokenizer, value_family=request.param).cuda()
    made.config.value_range = [0.0, 100.0]
    return made


def test_individuals_are_inferred_in_every_way(model):
    for settings in ({}, {"method": "sample", "draws": 20}, {"likelihood": "values"}, {"likelihood": "ovr"}):
        who = model.abduct(SAID, **settings)
        assert who.factor.device.type == "cpu"
        assert model.predict_number("They say", individual=who)[0].interval(0.9)[0] < 1e300
    again = model.abduct(SAID, likelihood="values", prior=model.abduct(SAID[:1], likelihood="values"))
    assert again.evidence[-1].values == 3
    assert model.abduct_population({"Ann": "They say so. " * 8, "Bob": "So it is. " * 8}).precision is not None


def test_worlds_and_noise_in_hindsight(model):
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
