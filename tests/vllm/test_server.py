"""The same requests to `causalqwen serve` and to vLLM with the plug-in: the same texts, the same numbers."""

import pytest
from fastapi.testclient import TestClient
from reference import PROMPTS, Engines, write_tiny

import causalqwen_vllm
from causalqwen import PRESETS
from causalqwen.modeling.loading import load_model
from causalqwen.serving import ServerSettings, create_app

pytestmark = pytest.mark.filterwarnings("default")
SETTINGS = {"softmax": {"temperature": 0.7, "top_p": 0.9}, "persona": {"temperature": 0.9}}


def without(text, spans):
    """A text without the characters of its numbers."""
    for first, end in reversed(spans):
        text = text[:first] + "#" + text[end:]
    return text


def test_the_server_and_vllm_answer_alike(tiny_tokenizer, tmp_path):
    folder = write_tiny(tmp_path / "model", "llama", tiny_tokenizer)
    prompts, engines = PROMPTS[:8], Engines()
    llm = engines(folder)
    written = 0
    with TestClient(create_app(load_model(folder), ServerSettings(name="tiny"))) as client:
        for preset in PRESETS:
            settings = SETTINGS.get(preset, {})
            for row, answer in enumerate(
                causalqwen_vllm.generate(llm, prompts, preset=preset, seed=list(range(8)), max_tokens=40, **settings)
            ):
                plain = {name: settings[name] for name in ("temperature", "top_p") if name in settings}
                causal = {name: value for name, value in settings.items() if name not in plain}
                asked = {"model": "tiny", "prompt": prompts[row], "max_tokens": 40, "seed": row} | plain
                response = client.post("/v1/completions", json=asked | {"causal": {"preset": preset} | causal})
                (choice,) = response.json()["choices"]
                numbers = choice["causal"]["numbers"]
                words = [without(choice["text"], [number["span"] for number in numbers])]
                words.append(without(answer.text, [number.span for number in answer.numbers]))
                assert words[0] == words[1], (preset, row)  # the last digit of a number may differ by rounding
                assert choice["finish_reason"] == answer.finish
                for told, found in zip(numbers, answer.numbers, strict=True):
                    assert told["value"] == pytest.approx(found.value, rel=1e-4, abs=1e-4)
                    assert told["median"] == pytest.approx(found.median, rel=1e-3, abs=1e-4)
                written += len(numbers)
    engines.close()
    assert written > 50
