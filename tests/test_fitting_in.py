"""Grafted models among other libraries: transformers' loaders and pipelines, the hub and its cards, `datasets`, trackers."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from huggingface_hub import EvalResultEntry, HfApi, ModelCard, eval_result_entries_to_yaml, parse_eval_result_entries
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, pipeline

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import EncodedRows, RowError, encode_rows
from causalqwen.evaluation import predict_file, predict_rows
from causalqwen.modeling import card
from causalqwen.modeling import remote_code as remote_code_file
from causalqwen.training import LoraStage, TrainSettings, ValueStage, train
from conftest import graft_tiny
from test_generation import eager

ROOT = Path(__file__).parent.parent
ROWS = [
    {"prompt": f"The {'long' if i % 2 else 'short'} one of {i} is", "value": 50.0 + 40 * (i % 2) + i % 5}
    for i in range(60)
]
BRIEF = TrainSettings(values=ValueStage(epochs=3, batch_size=8), logging_steps=5, evaluations=1)


@pytest.fixture(scope="module")
def trained(tiny_tokenizer, tmp_path_factory):
    """A small model that has learned numbers, and its folder."""
    model = graft_tiny("llama", tiny_tokenizer)
    folder = tmp_path_factory.mktemp("fitting") / "trained"
    examples = encode_rows(ROWS, model.processor)
    train(model, examples[:40], examples[40:], folder, BRIEF)
    return model, folder


# ---- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["digits", "both"])
def test_a_pipeline_writes_what_generate_and_the_processor_write(tiny_tokenizer, tmp_path, context):
    """Text in, text out, numbers as text; and messages."""
    eager(graft_tiny("qwen2", tiny_tokenizer, number_context=context)).save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path), device="cpu")
    model = pipe.model
    assert isinstance(model, CausalQwenForCausalLM)
    model.generation_config.eos_token_id = None
    prompt = "My friends, we have come"
    inputs = model.processor(prompt, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
    expected = model.processor.batch_decode(out.sequences, out.numeric_values)[0]
    (said,) = pipe(prompt, max_new_tokens=24, do_sample=False)
    new = out.sequences[0, inputs["input_ids"].shape[1] :]
    assert (new == model.config.num_token_id).sum() > 1 and any(letter.isdigit() for letter in said["generated_text"])
    # A number that the last token breaks off is whole for the processor, which has its value.
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said["generated_text"], expected, strict=False))
    whole = len(list(pairs))
    assert said["generated_text"].startswith(prompt)
    assert len(said["generated_text"]) - whole < 12 and whole > len(prompt) + 10

    messages = [{"role": "user", "content": "How many came here?"}]
    (answer,) = pipe(messages, max_new_tokens=16, do_sample=False)
    text = model.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    of_text = pipe(text, max_new_tokens=16, do_sample=False, return_full_text=False)[0]["generated_text"]
    assert answer["generated_text"] == [*messages, {"role": "assistant", "content": of_text}]

    (held,) = pipe(prompt, max_new_tokens=8, do_sample=False, temperature=None, causal_decoding="persona")
    assert held["generated_text"].startswith(prompt)
    assert np.size(held["numeric_values"]) == inputs["input_ids"].shape[1] + 8


def test_numbers_without_digits_are_missed_aloud(tiny_tokenizer, monkeypatch):
    """Where `<NUM>` alone stands for a number, ids have no place for its value."""
    model = eager(graft_tiny("llama", tiny_tokenizer, number_context="value"))
    told: list[str] = []
    monkeypatch.setattr("causalqwen.modeling.generation.logger", SimpleNamespace(warning_once=told.append))
    inputs = model.processor("My friends, we have come", return_tensors="pt")
    model.generate(**inputs, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
    assert not told
    model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert len(told) == 1 and "return_dict_in_generate" in told[0]


def test_transformers_own_classes_load_what_was_saved(trained):
    model, folder = trained
    inputs = model.processor("The long one of 3 is", return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is CausalQwenForCausalLM
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    processor = AutoProcessor.from_pretrained(folder)
    assert processor("It is 5")["numeric_values"] == model.processor("It is 5")["numeric_values"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("It is 5")["input_ids"] == model.processor.tokenizer("It is 5")["input_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["pipeline", "processor"])
def test_one_file_lets_transformers_find_this_library(trained, tmp_path, first):
    """Only where it was asked for, only with `trust_remote_code`, always the same file; and it does not spread."""
    _, folder = trained
    assert not (folder / remote_code_file.FILE).exists() and "auto_map" not in (folder / "config.json").read_text()
    CausalQwenForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "with", remote_code=True)
    assert (tmp_path / "with" / remote_code_file.FILE).read_text() == remote_code_file.TEXT
    assert len(remote_code_file.TEXT.splitlines()) == 2
    script = f"""
import sys
from transformers import AutoConfig, AutoProcessor, pipeline
folder, bare = {str(tmp_path / "with")!r}, {str(folder)!r}
for one, trust in ((bare, None), (bare, True), (folder, False)):
    try:
        AutoConfig.from_pretrained(one, trust_remote_code=trust)
        raise SystemExit("loaded without being trusted")
    except ValueError:
        assert "causalqwen" not in sys.modules
if {first!r} == "processor":
    assert type(AutoProcessor.from_pretrained(folder, trust_remote_code=True)).__name__ == "CausalQwenProcessor"
pipe = pipeline("text-generation", model=folder, trust_remote_code=True)
print(type(pipe.model).__name__, pipe("It is", max_new_tokens=2)[0]["generated_text"][:5])
pipe.model.save_pretrained({str(tmp_path / "again")!r})
"""
    env = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **env})
    assert done.stdout.split() == ["CausalQwenForCausalLM", "It", "is"], done.stderr
    assert not list((tmp_path / "again").glob("*.py"))
    assert all("auto_map" not in file.read_text() for file in (tmp_path / "again").glob("*.json"))


# ---- the card --------------------------------------------------------------------------------------------------------


def test_a_card_tells_what_is_known_and_no_more(trained):
    _, folder = trained
    text = (folder / "README.md").read_text(encoding="utf-8")
    facts = json.loads((folder / "training.json").read_text())
    known = ModelCard(text)
    assert known.data.library_name == "causalqwen" and known.data.pipeline_tag == "text-generation"
    assert known.data.base_model is None and known.data.license is None  # nobody said where the backbone is from
    results = {result.metric_type: result.metric_value for result in known.data.eval_results}
    metrics = facts["metrics"]
    assert results["crps"] == metrics["quantile_crps"] and results["coverage_90"] == metrics["coverage"]["0.9"]
    assert facts["rows"] == 40 and facts["held_out"] == 20 and facts["numbers"] == 40
    assert "40 rows with 40 numbers were learned; 20 further rows were held out. Values lie between 50 and 94." in text
    for place in ("quantile_crps", "median_error", "num_recall"):
        assert f"{metrics[place]:.4g} |" in text
    assert f"| 80% | {metrics['coverage']['0.8']:.1%} ({metrics['coverage_raw']['0.8']:.1%}) |" in text
    assert "| `stage values` |" not in text and "| stage values | epochs 3, batch_size 8 |" in text.replace("`", "")


def test_a_graft_that_learned_nothing_claims_no_scores(tiny_llama, tmp_path):
    tiny_llama.config.text_config._name_or_path = "Qwen/Qwen2.5-0.5B"
    tiny_llama.save_pretrained(tmp_path)
    known = ModelCard.load(tmp_path / "README.md")
    assert known.data.base_model == "Qwen/Qwen2.5-0.5B" and known.data.eval_results is None
    assert "None were taken." in known.text and "mean nothing until it is trained" in known.text
    assert not (tmp_path / "training.json").exists()
    named = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct", str(tmp_path): None, "a folder/of mine": None}
    for name, base in named.items():
        tiny_llama.config.text_config._name_or_path = name
        data = ModelCard(card.card_text(tiny_llama.config, None)).data
        assert data.base_model == base and data.license == ("apache-2.0" if base else None)
    tiny_llama.config.text_config._name_or_path = "smollm2-135m"
    facts = {"rows": 1, "numbers": 1, "held_out": 0, "stages": {}, "metrics": {}}
    assert ModelCard(card.card_text(tiny_llama.config, facts)).data.license is None  # its rows have terms of their own


def test_a_card_that_somebody_changed_stays_and_travels(trained, tmp_path):
    _, folder = trained
    own = (folder / "README.md").read_text(encoding="utf-8")
    assert card.is_own(own.encode()) and not card.is_own(own.replace("Limits", "Limit").encode())
    assert not card.is_own(b"# A title") and not card.is_own(b"\xff\xfe")
    CausalQwenForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "one")
    assert (tmp_path / "one/README.md").read_text(encoding="utf-8") == own  # and so is training.json
    edited = own.replace("# CausalQwen", "# Boiling points, by me")
    (tmp_path / "one/README.md").write_text(edited, encoding="utf-8")
    model = CausalQwenForCausalLM.from_pretrained(tmp_path / "one")
    for place in ("one", "two"):  # in place, and elsewhere
        model.save_pretrained(tmp_path / place)
        assert (tmp_path / place / "README.md").read_text(encoding="utf-8") == edited
    (tmp_path / "three").mkdir()
    (tmp_path / "three/README.md").write_text("# Notes\n", encoding="utf-8")
    train(model, encode_rows(ROWS[:8], model.processor), [], tmp_path / "three", BRIEF)
    assert (tmp_path / "three/README.md").read_text(encoding="utf-8") == "# Notes\n"
    model.save_pretrained(tmp_path / "four")  # another model than the one whose card it was
    text = (tmp_path / "four/README.md").read_text(encoding="utf-8")
    assert "8 rows with 8 numbers were learned." in text and "No rows were held out" in text and "by me" not in text
    (tmp_path / "six").mkdir()
    (tmp_path / "six/README.md").write_text("# Six\n", encoding="utf-8")
    model.save_pretrained(tmp_path / "six")
    assert (tmp_path / "six/README.md").read_text(encoding="utf-8") == "# Six\n"
    assert (tmp_path / "six/training.json").is_file()
    (tmp_path / "four/README.md").write_bytes(b"\xff mine")  # whatever it is, it is somebody's
    CausalQwenForCausalLM.from_pretrained(tmp_path / "four").save_pretrained(tmp_path / "four")
    assert (tmp_path / "four/README.md").read_bytes() == b"\xff mine"
    (tmp_path / "two/training.json").write_text('{"rows": 3}')
    with pytest.raises(ValueError, match=r"training\.json of .* is damaged \(KeyError: 'numbers'\); remove it"):
        CausalQwenForCausalLM.from_pretrained(tmp_path / "two").save_pretrained(tmp_path / "five")
    assert not (tmp_path / "five").exists()


@pytest.mark.parametrize("content", ["- dataset: {id: cais/hle}\n  value: 1\n", "some words", "{", ""])
def test_scores_that_the_hub_would_not_take_are_named_before_anything_is_written(trained, tmp_path, content):
    CausalQwenForCausalLM.from_pretrained(trained[1]).save_pretrained(tmp_path / "m")
    (tmp_path / "m/.eval_results").mkdir()
    (tmp_path / "m/.eval_results/hle.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"hle\.yaml holds no scores as the hub takes them .*task_id"):
        CausalQwenForCausalLM.from_pretrained(tmp_path / "m").save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_stages_that_were_trained_are_told(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer)
    settings = dataclasses.replace(BRIEF, seed=7, lora=LoraStage(rank=2, batch_size=4))
    train(model, encode_rows(ROWS[:8], model.processor), [], tmp_path / "out", settings)
    told = json.loads((tmp_path / "out/training.json").read_text())
    assert told["stages"] == {"values": {"epochs": 3, "batch_size": 8}, "lora": {"batch_size": 4, "rank": 2}}
    assert told["seed"] == 7 and told["metrics"] == {}
    assert "| stage lora | batch_size 4, rank 2 |" in (tmp_path / "out/README.md").read_text()


def test_push_to_hub_uploads_model_processor_and_card_in_one_commit(trained, tmp_path, monkeypatch):
    model, _ = trained
    model.save_pretrained(tmp_path / "mine")
    entry = EvalResultEntry(dataset_id="cais/hle", task_id="default", value=20.9)
    (tmp_path / "mine/.eval_results").mkdir()
    (tmp_path / "mine/.eval_results/hle.yaml").write_text(yaml.safe_dump(eval_result_entries_to_yaml([entry])))
    model = CausalQwenForCausalLM.from_pretrained(tmp_path / "mine")
    hub, files, there = create_autospec(HfApi), {}, {}
    hub.return_value.create_repo.return_value.repo_id = "me/x"

    def upload_folder(*, folder_path, ignore_patterns, **settings):
        found = {str(path.relative_to(folder_path)): path for path in Path(folder_path).rglob("*") if path.is_file()}
        left = found.keys() - set(ignore_patterns or ())
        files.clear()
        files.update({name: found[name].read_bytes().decode("utf-8", "replace") for name in left})
        return "commit"

    hub.return_value.upload_folder.side_effect = upload_folder
    monkeypatch.setattr(card, "HfApi", hub)
    file_of = card._file_of

    def looked_up(name, source, **where):
        return there.get(name) if source == "me/x" else file_of(name, source, **where)

    monkeypatch.setattr(card, "_file_of", looked_up)
    assert model.push_to_hub("x", private=True, revision="next") == "commit"
    hub.return_value.create_repo.assert_called_once_with("x", private=True, exist_ok=True)
    hub.return_value.create_branch.assert_called_once_with("me/x", branch="next", exist_ok=True)
    assert hub.return_value.upload_folder.call_args.kwargs["repo_id"] == "me/x"
    own = {"config.json", "model.safetensors", "processor_config.json", "tokenizer.json", "training.json"}
    assert own <= files.keys()
    assert files["README.md"] == (tmp_path / "mine/README.md").read_text(encoding="utf-8")
    assert parse_eval_result_entries(yaml.safe_load(files[".eval_results/hle.yaml"])) == [entry]
    assert remote_code_file.FILE not in files
    there["README.md"] = files["README.md"].encode()  # ours, as it was
    model.push_to_hub("x", remote_code=True)
    assert "README.md" in files and files[remote_code_file.FILE] == remote_code_file.TEXT
    there["README.md"] = b"# Theirs"
    model.push_to_hub("x")
    assert "README.md" not in files and "config.json" in files
    with pytest.raises(ValueError, match=r"upload with model\.push_to_hub\(repo_id\)"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True)


# ---- datasets --------------------------------------------------------------------------------------------------------


def test_dictionaries_are_rows_wherever_rows_are(trained):
    """What iterating over a `datasets.Dataset` gives: fields that are not there are None."""
    model, _ = trained
    fields = [row | {"text": None, "individual": None} for row in ROWS[:4]]
    read = encode_rows(fields, model.processor)
    assert read == encode_rows(ROWS[:4], model.processor) == list(EncodedRows(fields, model.processor))
    predicted = list(predict_rows(model, fields, batch_size=3))
    assert [row["value"] for row in predicted] == [row["value"] for row in ROWS[:4]] and predicted[0]["crps"] >= 0
    for take in (lambda rows: encode_rows(rows, model.processor), lambda rows: list(predict_rows(model, rows))):
        with pytest.raises(RowError, match="row 2, field value: expected a number, found"):
            take([ROWS[0], ROWS[1] | {"value": "much"}])
    with pytest.raises(RowError, match=r"row 2: expected exactly one of the fields text, .* found words"):
        EncodedRows([ROWS[0], {"words": "?"}], model.processor)


def test_a_dataset_goes_in_and_predictions_come_out_as_one(trained, tmp_path):
    datasets = pytest.importorskip("datasets")
    model, _ = trained
    rows = datasets.Dataset.from_list(ROWS[:20])
    texts = datasets.Dataset.from_list([{"text": "The short one of 3 is 53 in all."}])
    graft = graft_tiny("llama", model.processor.tokenizer)
    mixed = datasets.concatenate_datasets([rows, texts])  # what a row does not have is None
    examples = encode_rows(mixed, graft.processor)
    assert examples == encode_rows([*ROWS[:20], *texts], graft.processor)
    train(graft, examples, [], tmp_path / "out", BRIEF)
    predicted = datasets.Dataset.from_list(list(predict_rows(model, rows)))
    assert predicted["value"][:] == [row["value"] for row in ROWS[:20]]
    assert predicted[0]["intervals"]["0.9"][0] < predicted[0]["median"]
    (of_text,) = datasets.Dataset.from_list(list(predict_rows(model, texts)))
    assert [number["value"] for number in of_text["numbers"]] == [3, 53]
    mixed.to_json(tmp_path / "rows.jsonl")
    predict_file(model, tmp_path / "rows.jsonl", tmp_path / "predicted.parquet")
    both = datasets.Dataset.from_parquet(str(tmp_path / "predicted.parquet"), cache_dir=str(tmp_path / "cache"))
    assert both[20]["numbers"][1]["median"] == pytest.approx(of_text["numbers"][1]["median"], rel=1e-5)
    assert both[0]["median"] == pytest.approx(predicted[0]["median"], rel=1e-5)


@pytest.mark.parametrize("kind", ["arrow", "datasets"])
def test_a_regressor_takes_columns_of_datasets_and_arrow(tiny_tokenizer, tmp_path, kind):
    from causalqwen.sklearn import NumberRegressor
    from conftest import make_backbone

    make_backbone("llama", tiny_tokenizer).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    columns = {"what": [f"thing {i % 7}" for i in range(40)], "size": [float(i) for i in range(40)]}
    y = [2.0 * size + 1 for size in columns["size"]]

    def fitted(X, y):
        return NumberRegressor(str(tmp_path)).fit(X, y).predict(X)

    if kind == "arrow":
        X, target = pa.table(columns), y
    else:
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_dict(columns | {"y": y})
        X, target = table.remove_columns("y"), table["y"]
    assert np.array_equal(fitted(X, target), fitted(columns, y))
    stream = SimpleNamespace(column_names=["what"])
    with pytest.raises(ValueError, match="has its rows one after the other; collect them into a datasets.Dataset"):
        NumberRegressor(str(tmp_path)).fit(stream, y)


# ---- trackers --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("tracker", ["trackio", "mlflow"])
def test_metrics_reach_a_tracker(tiny_tokenizer, tmp_path, monkeypatch, tracker):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    pytest.importorskip(tracker)
    model = graft_tiny("llama", tiny_tokenizer)
    rows = encode_rows(ROWS, model.processor)
    train(model, rows[:40], rows[40:], tmp_path / "out", dataclasses.replace(BRIEF, report_to=(tracker,)))
    if tracker == "trackio":
        (file,) = (tmp_path / "trackio").rglob("*.db")
        kept = file.read_bytes()
        assert all(name in kept for name in (b"train/total_loss", b"eval/num_f1", b"dist/U_scale_median"))
    else:
        names = {path.name for path in (tmp_path / "mlruns").rglob("metrics/**/*")}
        assert {"total_loss", "eval_num_f1", "U_scale_median"} <= names
