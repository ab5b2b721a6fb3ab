"""The vocabulary on two ranks, or half of the layers on each: the same tokens and values as `generate`."""

import pytest
from reference import PROMPTS, SETTINGS, Engines, compare, load_reference, write_closed, write_tiny

import causalqwen_vllm

pytestmark = pytest.mark.filterwarnings("default")  # vLLM warns of what it uses itself


@pytest.fixture
def engines(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    made = Engines()
    yield made
    made.close()


@pytest.mark.parametrize(
    "form",
    [{"score_scale": "common"}, {"score_scale": "documents"}, {"number_context": "digits", "value_digits": 2}],
    ids=lambda form: next(iter(form.values())),
)
def test_two_ranks_write_what_generate_writes(form, tiny_tokenizer, tmp_path, engines):
    folder = write_tiny(tmp_path / "model", "llama", tiny_tokenizer, **form)
    llm, model = engines(folder, tensor_parallel_size=2), load_reference(folder)
    for preset in ("standard", "causal", "persona", "softmax"):
        same, numbers = compare(llm, model, preset, PROMPTS[::4], 48, **SETTINGS[preset])
        assert same >= 15
        assert numbers > 16 or form.get("score_scale") == "documents"  # under which `<NUM>` hardly ever wins here


def test_two_ranks_read_the_whole_backbone(tiny_tokenizer, tmp_path, engines):
    """Each has half of the heads whose values are read."""
    folder = write_closed(tmp_path, "llama", tiny_tokenizer, "digits")
    llm = engines(folder, tensor_parallel_size=2)
    same, numbers = compare(llm, load_reference(folder), "standard", PROMPTS[::4], 32)
    assert same >= 15 and numbers > 16


@pytest.mark.parametrize("copies", [False, True])
def test_a_pipeline_of_two_ranks_writes_what_generate_writes(copies, tiny_tokenizer, tmp_path, engines):
    """The last rank decides. Where the first would have to embed what it decides, `refuse_settings` says so."""
    settings = {"number_context": "digits", "value_digits": 2, "copy_numbers": copies}
    folder = write_tiny(tmp_path / "model", "llama", tiny_tokenizer, **settings)
    # vLLM's runner for CPU makes what a rank is handed when it compiles, and nowhere else
    llm, model = engines(folder, pipeline_parallel_size=2, enforce_eager=False), load_reference(folder)
    for preset in ("standard", "persona", "softmax"):
        same, numbers = compare(llm, model, preset, PROMPTS[::4], 48, **SETTINGS[preset])
        assert same >= 15 and numbers > 16
    prompt = "We have 12.5 of"
    tokens, params = causalqwen_vllm.request(model.processor, prompt, key="k", max_tokens=1)
    llm.generate([tokens], [params], use_tqdm=False)
    (law,) = llm.collective_rpc("tell_laws", args=([("k", None)], [0.9], None))[-1]
    assert law["median"] == pytest.approx(model.predict_number(prompt)[0].median, rel=1e-3)
