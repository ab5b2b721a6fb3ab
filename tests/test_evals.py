"""Grafted models in lm-evaluation-harness and inspect-ai; without the extra `evals` what needs neither."""

import importlib
import json
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.losses import quantile_crps
from causalqwen.numbers import CRPS_LEVELS
from causalqwen_evals import TASKS, rows
from conftest import FREE_ROWS, graft_tiny, make_backbone

ROOT = Path(__file__).parent.parent
NAMES = {"continuations", "last_words", "paragraphs", "numbers_to_choose", "numbers_to_find", "boiling_points"}
theirs = pytest.mark.filterwarnings("ignore")  # they warn of each other


def test_rows_are_the_same_each_time_and_answers_are_among_the_choices():
    for name in NAMES:
        make = getattr(rows, name.removesuffix("_points"))
        made = make(12)
        assert made == make(12) and len(made) == 12 and all(row["text"] for row in made)
        for row in made:
            offered = row.get("choices", [0, 1])
            assert row.get("answer", 0) in range(len(offered)) and len(set(offered)) > 1
    assert all(row["word"].isalnum() and not row["text"].endswith(" ") for row in rows.last_words())
    assert {row["answer"] for row in rows.continuations()} == {0, 1, 2, 3}
    chosen = rows.numbers_to_choose()[0]
    assert chosen["text"].endswith("Answer:") and all(choice in chosen["text"] for choice in chosen["choices"])
    found = rows.numbers_to_find()[0]
    assert found["number"] in found["text"]


def test_a_number_is_scored_as_a_distribution_or_as_a_text(tiny_llama):
    tiny_llama.config.value_range = [0.0, 500.0]
    tiny_llama.config.interval_levels = [min(step / 90, 1.0) for step in range(101)]  # which no CRPS looks at
    (prediction,) = tiny_llama.predict_number("The boiling point is")
    law = rows.law_of(prediction)
    scored = rows.score_number(351.4, "nothing said", law)
    own = prediction.law.quantile_crps(*prediction._parameters(), torch.tensor(351.4, dtype=torch.float64)).item()
    assert scored["crps"] == pytest.approx(own, rel=1e-9)
    low, high = prediction.interval(0.9)
    assert scored["covered_90"] == float(low <= 351.4 <= high) and scored["has_number"] == 1
    assert scored["error"] == pytest.approx(abs(min(max(prediction.median, -500), 1000) - 351.4))
    told = rows.score_number(351.4, " about 350 K, or 77 C")
    assert told == {"crps": pytest.approx(1.4), "error": pytest.approx(1.4), "covered_90": 0.0, "has_number": 1.0}
    assert rows.score_number(351.4, " very hot")["crps"] == pytest.approx(351.4)
    assert rows.score_number(351.4, " very hot")["has_number"] == 0
    sharp = {"quantiles": [351.4] * len(CRPS_LEVELS), "interval_90": [350.0, 352.0]}
    assert rows.score_number(351.4, "", sharp) == {"crps": 0.0, "error": 0.0, "covered_90": 1.0, "has_number": 1.0}
    assert quantile_crps(torch.tensor(0.0), torch.ones(199, dtype=torch.float64), CRPS_LEVELS) == pytest.approx(1.0)


def test_entry_points_and_tasks_are_there():
    """What lm-eval's next release and inspect-ai look for leads somewhere, and no task is left out of the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    points = project["project"]["entry-points"]
    assert points["lm_eval.models"] == {"causalqwen": "causalqwen_evals.harness:CausalQwenLM"}
    assert points["inspect_ai"] == {"causalqwen_evals": "causalqwen_evals.inspection"}
    for target in ("harness", "inspection"):
        assert (ROOT / f"src/causalqwen_evals/{target}.py").is_file()
    assert "src/causalqwen_evals" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {path.stem for path in TASKS.glob("*.yaml")} == NAMES


def test_without_the_extra_one_line_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    main = importlib.import_module("causalqwen_evals.__main__").main
    with pytest.raises(SystemExit, match=r"pip install 'causalqwen\[evals\]'"):
        main()


# ---- lm-evaluation-harness -------------------------------------------------------------------------------------------


@pytest.fixture
def lm_eval():
    return pytest.importorskip("lm_eval")


def evaluated(lm, tasks, **settings):
    import lm_eval
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=str(TASKS), include_defaults=False)
    return lm_eval.simple_evaluate(lm, tasks=tasks, task_manager=known, bootstrap_iters=0, **settings)


@theirs
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_log_likelihoods_and_texts_are_those_of_the_bare_backbone(lm_eval, tiny_tokenizer, family):
    """Whether `<NUM>` lies on a row of the matrix or behind it, however its own row and bias were trained."""
    from lm_eval.models.huggingface import HFLM

    from causalqwen_evals.harness import CausalQwenLM

    own = {"tokenizer": tiny_tokenizer, "batch_size": 3, "max_length": 200}
    bare = HFLM(make_backbone(family, tiny_tokenizer), backend="causal", **own)
    graft = graft_tiny(family, tiny_tokenizer)
    with torch.no_grad():
        graft.action.num_row.normal_()
    ours = CausalQwenLM(graft, batch_size=3, max_length=200)
    assert bool(FREE_ROWS[family]) == (graft.config.num_token_id < graft.config.text_config.vocab_size)
    told, expected = (evaluated(lm, ["causalqwen"], limit=3) for lm in (ours, bare))
    assert len(told["samples"]) == 5
    for task, samples in expected["samples"].items():
        if FREE_ROWS[family] and task == "causalqwen_numbers_to_find":
            continue  # a random backbone says rows that no token uses, and a graft never does
        assert [sample["resps"] for sample in told["samples"][task]] == [sample["resps"] for sample in samples], task
        assert told["results"][task] == pytest.approx(expected["results"][task], nan_ok=True), task


@theirs
def test_a_number_is_scored_by_its_law_in_the_harness(lm_eval, tiny_tokenizer):
    from lm_eval.models.huggingface import HFLM

    from causalqwen_evals.harness import Answer, CausalQwenLM

    graft = graft_tiny("llama", tiny_tokenizer)
    graft.config.value_range = [0.0, 500.0]
    found = evaluated(CausalQwenLM(graft, batch_size=2), ["causalqwen_boiling_points"], limit=4)
    asked = rows.boiling(4)
    laws = graft.predict_number([row["text"] for row in asked])
    expected = [rows.score_number(row["value"], "", rows.law_of(law)) for row, law in zip(asked, laws, strict=True)]
    scores = found["results"]["causalqwen_boiling_points"]
    assert scores["crps,none"] == pytest.approx(sum(one["crps"] for one in expected) / 4)
    assert scores["has_number,none"] == 1
    bare = HFLM(make_backbone("llama", tiny_tokenizer), tokenizer=tiny_tokenizer, backend="causal")
    of_text = evaluated(bare, ["causalqwen_boiling_points"], limit=4)["samples"]["causalqwen_boiling_points"]
    assert all(sample["crps"] == pytest.approx(sample["error"]) for sample in of_text)
    kept = pickle.loads(pickle.dumps(Answer("5 K", lambda: laws)))
    assert type(kept) is str and kept == "5 K"
    alone = CausalQwenLM(graft_tiny("llama", tiny_tokenizer, number_context="value"))
    with pytest.raises(ValueError, match="number_context='value' has no tokens for the digits of a number"):
        evaluated(alone, ["causalqwen_numbers_to_find"], limit=1)


@theirs
@pytest.mark.slow
def test_lm_evals_own_command_line_finds_model_and_tasks(lm_eval, tiny_tokenizer, tmp_path):
    graft_tiny("llama", tiny_tokenizer).save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "causalqwen_evals", "run", "--model", "causalqwen", "--model_args"]
    command += [f"pretrained={tmp_path / 'model'}", "--tasks", "causalqwen_boiling_points", "--limit", "2"]
    done = subprocess.run([*command, "--output_path", str(tmp_path / "out")], capture_output=True, text=True)
    assert "|causalqwen_boiling_points|" in done.stdout.replace(" ", ""), done.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(file.read_text())["results"]["causalqwen_boiling_points"]["crps,none"] > 0


@theirs
@pytest.mark.slow
@pytest.mark.backbone
def test_five_tasks_on_the_default_backbone_bare_and_grafted(lm_eval, smollm2, smollm2_folder):
    """float32, the same batches: every log-likelihood and every text, bit for bit."""
    from lm_eval.models.huggingface import HFLM

    from causalqwen_evals.harness import CausalQwenLM

    bare = HFLM(str(smollm2_folder), backend="causal", dtype="float32", device="cpu", batch_size=4)
    told, expected = (evaluated(lm, ["causalqwen"], limit=4) for lm in (CausalQwenLM(smollm2, batch_size=4), bare))
    for task, samples in expected["samples"].items():
        assert [sample["resps"] for sample in told["samples"][task]] == [sample["resps"] for sample in samples], task
    assert expected["results"]["causalqwen_continuations"]["acc,none"] >= 0.5


@theirs
def test_the_server_gives_lm_eval_what_the_bare_backbone_gives(lm_eval, tiny_tokenizer, tmp_path):
    """By lm-eval's client for OpenAI's API, from our server: each log-likelihood within 1e-4 nats a token, the same texts."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from test_serving import serving

    tiny_tokenizer.save_pretrained(tmp_path)
    backbone, other = (make_backbone("llama", tiny_tokenizer, max_position_embeddings=4096) for _ in range(2))
    bare = HFLM(backbone, tokenizer=tiny_tokenizer, backend="causal", batch_size=2, max_length=4096)
    own = {"tokenizer": str(tmp_path), "tokenizer_backend": "huggingface", "batch_size": 2, "max_length": 4096}
    with serving(CausalQwenForCausalLM.from_backbone(other, tokenizer=tiny_tokenizer)) as server:
        client = LocalCompletionsAPI(f"http://127.0.0.1:{server.port}/v1/completions", model="tiny", **own)
        told, expected = (evaluated(lm, ["causalqwen"], limit=2)["samples"] for lm in (client, bare))
    compared = 0
    for task, samples in expected.items():
        for sample, of_server in zip(samples, told[task], strict=True):
            for asked, (one,), (other,) in zip(sample["arguments"], sample["resps"], of_server["resps"], strict=True):
                if isinstance(one, str):
                    assert other == one, task
                    continue
                one, other = (found if isinstance(found, tuple) else (found,) for found in (one, other))
                assert other[0] == pytest.approx(one[0], abs=1e-4 * len(bare.tok_encode(asked[-1])))
                assert other[1:] == one[1:]
                compared += 1
    assert compared > 10


# ---- inspect-ai ------------------------------------------------------------------------------------------------------


@pytest.fixture
def inspect_ai(tmp_path, monkeypatch):
    found = pytest.importorskip("inspect_ai")
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path / "logs"))
    return found


@theirs
def test_a_number_is_scored_by_its_law_in_inspect(inspect_ai, tiny_tokenizer, tmp_path):
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    from causalqwen_evals.inspection import boiling_points

    graft = graft_tiny("llama", tiny_tokenizer)
    graft.config.value_range = [0.0, 500.0]
    graft.save_pretrained(tmp_path / "model")
    model = get_model(f"causalqwen/{tmp_path / 'model'}", device="cpu", memoize=False)
    (log,) = inspect_ai.eval(boiling_points(4), model=model, display="none")
    assert log.status == "success", log.error
    asked = rows.boiling(4)
    laws = CausalQwenForCausalLM.from_pretrained(tmp_path / "model").predict_number([row["text"] for row in asked])
    expected = [rows.score_number(row["value"], "", rows.law_of(law)) for row, law in zip(asked, laws, strict=True)]
    found = {score.name: score.metrics["mean"].value for score in log.results.scores}
    for name in ("crps", "error", "covered_90"):
        assert found[name] == pytest.approx(sum(one[name] for one in expected) / 4), name
    usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # else the mock asks the network
    answers = [ModelOutput.from_content("mock", text) for text in ("It is 400 K.", "Very hot")]
    mock = get_model("mockllm/model", custom_outputs=[answer.model_copy(update={"usage": usage}) for answer in answers])
    (other,) = inspect_ai.eval(boiling_points(2), model=mock, display="none")
    assert other.status == "success", other.error
    scores = [sample.scores["crps"].value for sample in other.samples]
    assert [score["has_number"] for score in scores] == [1, 0]
    assert [score["crps"] for score in scores] == pytest.approx([abs(asked[0]["value"] - 400), asked[1]["value"]])


@theirs
def test_inspect_gets_texts_with_their_numbers(inspect_ai, tiny_tokenizer, tmp_path):
    import asyncio

    from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, get_model

    from test_generation import eager

    eager(graft_tiny("llama", tiny_tokenizer)).save_pretrained(tmp_path)
    model = get_model(f"causalqwen/{tmp_path}", device="cpu", memoize=False)
    own = model.api.model
    own.generation_config.eos_token_id = None
    messages = [ChatMessageSystem(content="Be brief."), ChatMessageUser(content="How many came?")]
    greedy = GenerateConfig(max_tokens=20, temperature=0)
    output = asyncio.run(model.generate(messages, config=greedy))
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many came?"}]
    prompt = own.processor.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    inputs = own.processor(prompt, prompt=True, return_tensors="pt")
    made = own.generate(**inputs, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    length = inputs["input_ids"].shape[1]
    text = own.processor.batch_decode(
        made.sequences[:, length:], made.numeric_values[:, length:], skip_special_tokens=True
    )
    assert [output.completion] == text and any(letter.isdigit() for letter in output.completion)
    assert output.usage.output_tokens == 20
    sampled = GenerateConfig(max_tokens=12, temperature=1.0, top_p=0.9, seed=3)
    assert len({asyncio.run(model.generate(messages, config=sampled)).completion for _ in range(2)}) == 1
    stopped = GenerateConfig(max_tokens=20, temperature=0, stop_seqs=[output.completion[3:6]])
    assert len(asyncio.run(model.generate(messages, config=stopped)).completion) < len(output.completion)
    with pytest.raises(ValueError, match="has no argument devise; it has device"):
        get_model(f"causalqwen/{tmp_path}", devise="cpu", memoize=False)
