"""`number_encoding="fourier"`: the digits of a number in the context, as Fourier features beside its logarithm."""

import json
import math
from fractions import Fraction

import pytest
import torch

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.data import Row, encode_rows
from causalqwen.modeling.embedding import PERIODS, fourier_features
from causalqwen.training import BackboneStage, LoraStage, TrainSettings, train
from causalqwen_cli.base import config_fields
from conftest import graft_tiny

VALUES = (0.0, 7.0, -2.5, 3.14, 0.07, 127.0, 1272.5, -999_999.99, 1e6 + 7, 123_456_789.01)


@pytest.fixture
def model(tiny_tokenizer):
    return graft_tiny("llama", tiny_tokenizer, number_context="value", number_encoding="fourier")


def features_of(value: float) -> list[float]:
    """f(v), the remainders taken in fractions."""
    periods = [Fraction(10) ** power for power in range(-1, 7)]
    angles = [2 * math.pi * float(Fraction(value) % period / period) for period in periods]
    return [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]


def prompt_of(model, text="from -2.5 to 1272.5 and 3, then 123456789.01 of them"):
    return model.processor(text, return_tensors="pt")


def test_features_are_the_formula():
    found = fourier_features(torch.tensor(VALUES))  # float32 as well
    assert found.dtype == torch.float64 and found.shape == (len(VALUES), 2 * len(PERIODS))
    values = torch.tensor(VALUES, dtype=torch.float64)
    wanted = torch.tensor([features_of(value) for value in VALUES], dtype=torch.float64)
    torch.testing.assert_close(fourier_features(values), wanted, rtol=0, atol=1e-6)
    ends = fourier_features(torch.tensor([1.7e308, 1e300, 1e15, -1.7e308, 5e-324], dtype=torch.float64))
    assert torch.equal(ends[:3], ends[2:3].expand(3, -1)) and ends.abs().max() <= 1


def test_a_digit_has_a_pair_of_its_own_whatever_stands_around_it():
    ones = PERIODS.index(10.0)
    same = fourier_features(torch.tensor([7.0, 127.0, 1_000_007.0, 987_654_321_987.0, -3.0], dtype=torch.float64))
    for place in (ones, ones + len(PERIODS)):
        torch.testing.assert_close(same[:, place], same[:1, place].expand(5), rtol=0, atol=1e-9)
    digits = fourier_features(torch.arange(10.0))[:, [ones, ones + len(PERIODS)]]
    assert torch.pdist(digits).min() > 0.6  # of ten points on a circle


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_number_adds_logarithm_and_digits(tiny_tokenizer, family):
    """e = embed(<NUM>) + phi(v) + B f(v), values and gradients; nothing off `<NUM>`, nothing of an unknown value."""
    model = graft_tiny(family, tiny_tokenizer, number_context="value", number_encoding="fourier").double()
    network, embed = model.numeric_embedding, model.get_input_embeddings()
    inputs = prompt_of(model)
    ids, values = inputs["input_ids"], inputs["numeric_values"]
    places = (ids[0] == model.config.num_token_id).nonzero().squeeze(-1)
    values[0, places[2]], values[0, 0] = math.nan, 5.0
    found = network(ids, values, embed)
    weights = torch.randn(len(places), found.shape[-1], dtype=torch.float64)
    gradients = torch.autograd.grad((found[0, places] * weights).sum(), network.directions)

    plain = network.row if model.config.num_token_appended else embed.weight[model.config.num_token_id] + network.row
    known = [None if math.isnan(value) else value for value in values[0, places].tolist()]
    logs = [0.0 if v is None else math.copysign(math.log1p(abs(v)), v) for v in known]
    digits = [[0.0] * 2 * len(PERIODS) if v is None else features_of(v) for v in known]
    logs, digits = torch.tensor(logs, dtype=torch.float64), torch.tensor(digits, dtype=torch.float64)
    w, B = network.directions
    torch.testing.assert_close(found[0, places], plain + logs[:, None] * w + digits @ B.T, rtol=1e-9, atol=2e-6)
    torch.testing.assert_close(gradients[0], logs @ weights, rtol=1e-9, atol=2e-6)
    torch.testing.assert_close(gradients[1], weights.T @ digits, rtol=1e-9, atol=2e-6)
    words = ids[0] != model.config.num_token_id
    assert torch.equal(found[0, words], embed(ids[0, words]))
    assert torch.equal(network(ids, None, embed)[0, places], plain.expand(len(places), -1))


def test_everything_else_starts_as_it_does_with_the_logarithm_alone(tiny_tokenizer, model):
    plain = graft_tiny("llama", tiny_tokenizer, number_context="value")
    own = dict(model.named_parameters())
    assert set(own) - {name for name, _ in plain.named_parameters()} == {"numeric_embedding.fourier.weight"}
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, own[name]), name
    columns = own["numeric_embedding.fourier.weight"].detach().norm(dim=0)
    assert columns.mean().item() == pytest.approx(0.2, rel=0.1)
    inputs = prompt_of(plain)
    with torch.no_grad():
        assert not torch.equal(model(**inputs).logits, plain(**inputs).logits)
        words = {"input_ids": inputs["input_ids"][:, :1]}
        assert torch.equal(model(**words).logits, plain(**words).logits)


def test_it_is_saved_and_loaded_and_older_checkpoints_can_take_it_up(tiny_tokenizer, model, tmp_path):
    inputs = prompt_of(model)
    model.save_pretrained(tmp_path / "fourier")
    with torch.no_grad():
        wanted = model(**inputs).logits
        assert torch.equal(CausalQwenForCausalLM.from_pretrained(tmp_path / "fourier")(**inputs).logits, wanted)

    older = graft_tiny("llama", tiny_tokenizer, start="documents")
    with torch.no_grad():
        older.numeric_embedding.direction *= 3.0  # as training may
    older.save_pretrained(tmp_path / "older")
    settings = json.loads((tmp_path / "older" / "config.json").read_text())
    del settings["settings"]["numbers_in"]["number_encoding"]
    (tmp_path / "older" / "config.json").write_text(json.dumps(settings))
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path / "older")
    assert loaded.config.number_encoding == "log"
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, older(**inputs).logits)
    extended = CausalQwenForCausalLM.from_pretrained(tmp_path / "older", number_encoding="fourier")
    w, B = extended.numeric_embedding.directions
    assert torch.equal(w, older.numeric_embedding.direction) and 0.8 < B.norm(dim=0).mean() < 1.2


def test_graft_takes_it_as_a_setting(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer, **config_fields(["number_context=value", "number_encoding=fourier"]))
    assert model.numeric_embedding.fourier is not None
    with pytest.raises(ValueError, match="number_encoding: input should be 'log' or 'fourier', got 'digits'"):
        graft_tiny("llama", tiny_tokenizer, number_encoding="digits")
    with pytest.raises(ValueError, match="number_encoding='fourier' needs number_embedding='added'"):
        graft_tiny("llama", tiny_tokenizer, number_encoding="fourier", number_embedding="multiplied")
    assert graft_tiny("llama", tiny_tokenizer, number_encoding="log").config.context.hides
    for unseen in ({"number_encoding": "fourier"}, {"number_embedding": "multiplied"}):
        with pytest.raises(ValueError, match="needs number_context='value' or 'both', but this model has 'digits'"):
            graft_tiny("llama", tiny_tokenizer, **unseen)


def test_generated_values_are_read_back_with_their_digits(model):
    """Greedy search with numbers, step by step with a cache, against one pass over what it wrote."""
    with torch.no_grad():
        model.action.num_bias += 20.0  # numbers, mostly
        model.action.value_head.weight.normal_()
        model.numeric_embedding.fourier.weight *= 5.0
    inputs = prompt_of(model)
    out = model.generate(**inputs, max_new_tokens=8, causal_decoding=CausalDecoding())
    start = inputs["input_ids"].shape[1]
    written = out.numeric_values[0, start:][out.sequences[0, start:] == model.config.num_token_id]
    assert len(written.unique()) >= 3
    with torch.no_grad():
        again = model(out.sequences, numeric_values=out.numeric_values)
        expected = model.generated_values(again.loc_Y[:, start - 1 : -1])[0]
        expected = expected[out.sequences[0, start:] == model.config.num_token_id]
        torch.testing.assert_close(written, expected, rtol=1e-4, atol=1e-4)
        other = model(out.sequences, numeric_values=out.numeric_values.round())
    assert not torch.allclose(other.loc_Y, again.loc_Y, atol=1e-3)


@pytest.mark.parametrize(("stage", "trained"), [("lora", True), ("lora", False), ("backbone", True)])
def test_a_stage_that_trains_w_trains_the_digits(model, tmp_path, stage, trained):
    start = [parameter.detach().clone() for parameter in model.numeric_embedding.directions]
    rows = [Row("prompt", f"row {i}", {"prompt": f"After {i}.5 comes", "value": float(i)}) for i in range(8)]
    kind = {"lora": LoraStage, "backbone": BackboneStage}[stage]
    made = kind(epochs=1, batch_size=4, learning_rate=1e-2, direction=trained)
    settings = TrainSettings(values=None, **{stage: made})
    train(model, encode_rows(rows, model.processor), [], tmp_path / "out", settings)
    for parameter, before in zip(model.numeric_embedding.directions, start, strict=True):
        assert torch.equal(parameter, before) != trained
