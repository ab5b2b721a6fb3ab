"""The plug-in against `generate`, in float32: the same tokens, the same values."""

import pytest
from reference import PROMPTS, Engines, gap_where_they_part, reference, write_tiny

import causalqwen_vllm
from causalqwen import PRESETS, CausalDecoding
from causalqwen.modeling.loading import load_model

pytestmark = pytest.mark.filterwarnings("default")  # vLLM warns of what it uses itself
TOKENS = 64
SETTINGS = {  # temperatures at which a tiny model's texts differ from greedy ones, and from each other
    "softmax": {"temperature": 0.7, "top_p": 0.9},
    "persona": {"temperature": 0.3, "noise_temperature": 0.95},
}


def compare(llm, model, preset, prompts=PROMPTS, tokens=TOKENS, **settings):
    seeds = list(range(100, 100 + len(prompts)))
    answers = causalqwen_vllm.generate(
        llm, prompts, preset=preset, seed=seeds, max_tokens=tokens, params={"ignore_eos": True}, **settings
    )
    top_p = settings.pop("top_p", 1.0)
    plan = CausalDecoding.preset(preset, **settings)
    wanted = reference(model, prompts, plan, seeds, tokens, top_p)
    same, ties, numbers = 0, 0, 0
    for row, answer in enumerate(answers):
        if answer.token_ids == wanted.tokens[row]:
            same += 1
            assert answer.values == pytest.approx(wanted.values[row], rel=1e-4, abs=1e-4)
            numbers += len(answer.numbers)
            continue
        one = CausalDecoding(**(vars(plan) | {"seed": seeds[row]}))
        gap = gap_where_they_part(model, prompts[row], answer.token_ids, wanted.tokens[row], wanted.values[row], one)
        assert gap < 1e-3, f"row {row} parts where its two best scores are {gap:.2g} apart"
        ties += 1
    print(f"{preset}: {same} of {len(prompts)} texts the same, {ties} part at a tie, {numbers} numbers")
    return same, numbers


@pytest.fixture(scope="session")
def engines():
    return Engines()


@pytest.fixture(scope="session")
def tiny_folder(tiny_tokenizer, tmp_path_factory):
    return lambda family, **settings: write_tiny(tmp_path_factory.mktemp(family), family, tiny_tokenizer, **settings)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_preset_writes_what_generate_writes(family, tiny_folder, engines):
    folder = tiny_folder(family)
    llm, model = engines(folder), load_model(folder)
    for preset in PRESETS:
        same, numbers = compare(llm, model, preset, **SETTINGS.get(preset, {}))
        assert same >= 60 and numbers > 100
