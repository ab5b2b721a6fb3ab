"""Rows of files, examples, batches, and the boiling points."""

import json
import math
from decimal import Decimal

import numpy as np
import pytest
import torch

from causalqwen import CausalQwenProcessor
from causalqwen.data import EncodedRows, RowError, collate, encode_rows, parse_row, read_rows
from causalqwen.data.boiling_points import SIZES, boiling_points, sample_of_boiling_points, write_sentences
from causalqwen.data.people import people_of_rows
from causalqwen.data.rows import checked_rows
from causalqwen.data.splits import split_by_entity
from causalqwen.data.synthetic import BEST_CRPS, questions, statements
from causalqwen.data.texts import speech_paragraphs
from causalqwen.evaluation.quick import ASKED
from causalqwen.losses import quantile_crps
from causalqwen.numbers import find_numbers

BAD_ROWS = [
    ("not json", r"not JSON \(Expecting value at character 0\)"),
    ('{"text": "a"', "not JSON"),
    ("[1]", "expected an object .* found list"),
    ("{}", "exactly one of the fields text, prompt, messages and question; found no fields"),
    ('{"texts": "a"}', "found texts"),
    ('{"text": "a", "prompt": "b"}', "found text, prompt"),
    ('{"text": 5}', "field text: expected text, found int"),
    ('{"text": "  "}', "field text: the text is empty"),
    ('{"prompt": "a", "value": "5"}', 'field value: expected a number, found "5"'),
    ('{"prompt": "a", "value": true}', "field value: expected a number, found true"),
    ('{"prompt": "a", "value": NaN}', "NaN is not a finite number"),
    ('{"prompt": "a", "value": -Infinity}', "-Infinity is not a finite number"),
    ('{"prompt": "a", "value": 1e400}', "field value: the number is too large for float64"),
    ('{"prompt": "a", "value": ' + "9" * 400 + "}", "field value: the number is too large for float64"),
    ('{"prompt": "a", "value": ' + "9" * 5000 + "}", "too large for float64"),
    ('{"prompt": "a", "value": 1, "individual": true}', "field individual: expected a name, found true"),
    ('{"prompt": "a", "value": 1, "group": 1.5}', "field group: expected a name, found 1.5"),
    ('{"prompt": "a", "value": 1, "individual": ""}', 'field individual: expected a name, found ""'),
    ('{"prompt": "a", "value": 1, "class": false}', "field class: expected a name, found false"),
    ('{"messages": []}', "field messages: expected a list"),
    ('{"messages": [{"role": "user"}]}', r"field messages\[0\]: expected text under role and content"),
    ('{"question": "q", "answer": " "}', "field answer: the text is empty"),
    ('{"question": "q", "answer": true}', "field answer: expected a number, found true"),
    ('{"question": "q", "context": 3, "answer": 4}', "field context: expected text"),
    ('{"question": "q", "answer": []}', "field answer: a list of answers needs one at least"),
    ('{"question": "q", "answer": ["a", 5]}', r"field answer\[1\]: expected text, found 5"),
    ('{"question": "q", "answer": ["a", null]}', r"field answer\[1\]: expected text, found null"),
    ('{"question": "q", "answer": [" "]}', r"field answer\[0\]: the text is empty"),
    ('{"question": "q", "answer": ["a", "b", "a "]}', r'field answer\[2\]: "a " stands there already'),
]


@pytest.mark.parametrize(("line", "message"), BAD_ROWS)
def test_a_bad_row_is_named_with_its_field(line, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(RowError, match=f"^rows.jsonl, row 3.*{message}"):
        read_rows(path)


def test_rows_on_disk_are_those_in_memory(processor):
    rows = [
        parse_row('{"text": "It is 5.25, not 7.", "individual": "Ann"}', "a"),
        parse_row('{"prompt": "After 3 days it is ", "value": 5, "individual": "Bob"}', "b"),
        parse_row('{"text": "no number", "group": "some"}', "c"),
        parse_row('{"text": "-1e9", "individual": "Ann"}', "d"),
    ]
    assert list(EncodedRows(rows, processor)) == encode_rows(rows, processor)  # none with several right answers
    rows.append(parse_row('{"question": "How many?", "answer": "5 or so", "individual": "Ann"}', "e"))
    rows.append(parse_row('{"question": "Who?", "answer": ["the old man", "the new man", "nobody"]}', "f"))
    kept = EncodedRows(iter(rows[::-1]), processor)
    assert list(kept) == encode_rows(rows[::-1], processor) and len(kept) == 6 and kept[-1] == kept[5]
    assert len(kept[0].also_right) == 2
    with pytest.raises(IndexError):
        kept[6]
    with pytest.raises(RowError, match="no rows"):
        EncodedRows([], processor)
    with pytest.raises(RowError, match="^a: .* tokens, but the context"):
        EncodedRows(rows, processor, max_length=4)


def test_only_answers_are_learned_where_only_answers_are(processor, tiny_tokenizer):
    def learned(row, **settings):
        (example,) = encode_rows([parse_row(json.dumps(row), "x")], processor, **settings)
        if example.learned is None:
            return None, example
        ids = [token for token, is_label in zip(example.input_ids, example.learned, strict=True) if is_label]
        labels = collate([example], 0)["labels"][0]
        assert labels[labels != -100].tolist() == ids and example.positions == len(ids)
        return processor.decode(ids), example

    chat = [("user", "Is it 5?"), ("assistant", "It is 7."), ("user", "Not 5?"), ("assistant", "No.")]
    row = {"messages": [{"role": role, "content": text} for role, text in chat]}
    assert learned(row)[0] is None
    words, example = learned(row, assistant_only=True)
    assert words == "It is<NUM>.<|im_end|>\nNo.<|im_end|>\n"
    assert [value for value in example.numeric_labels if value == value and value] == [7]
    words, _ = learned({"context": "A town of 900 people.", "question": "Is it large?", "answer": "No, small."})
    assert words == " No, small."
    words, example = learned({"question": "How many?", "answer": 900})
    assert words is None and example.input_ids[-1] == processor.num_token_id and example.numeric_labels[-1] == 900
    with pytest.raises(RowError, match="^x, field messages: the assistant says nothing"):
        learned({"messages": [{"role": "user", "content": "Is it 5?"}]}, assistant_only=True)
    with pytest.raises(RowError, match="field answer: a question needs its answer"):
        parse_row('{"question": "How many?"}', "x", values_required=True)


def answered(*answers, **fields):
    return parse_row(json.dumps({"question": "Who is it?", "answer": list(answers)} | fields), "x")


def test_what_is_also_right_follows_the_tree_of_the_answers(processor):
    """At each place of the taught answer: the next tokens of all answers that have its tokens so far."""
    answers = ["the people of 3 states", "the people of it", "the peace", "nobody", "the people", "none of them"]
    for order in (answers, [answers[2], *answers[:2], *answers[3:]], answers[:0:-1], answers[3:]):
        (example,) = encode_rows([answered(*order, context="There were 5.")], processor)
        texts = [answered(answer, context="There were 5.").text(processor) for answer in order]
        paths = [processor(text)["input_ids"] for text in texts]
        wanted = set()
        for place, taught in enumerate(paths[0]):
            following = {path[place] for path in paths if path[:place] == paths[0][:place] and len(path) > place}
            wanted |= {(place, token) for token in following - {taught}}
        assert wanted and example.also_right == tuple(sorted(wanted)) and example.input_ids == paths[0]
        assert all(example.learned[place] for place, _ in wanted)
    (example,) = encode_rows([answered("5 men", "5.0 women", "five")], processor)  # the same number, then words
    before = example.input_ids.index(processor.num_token_id)
    assert [place for place, _ in example.also_right] == [before, before + 1]
    (alone,) = encode_rows([answered("the people", "the people of the land")], processor)
    assert alone.also_right is None and alone == encode_rows([answered("the people")], processor)[0]
    for other in ("5 men", "6 women"):
        with pytest.raises(RowError, match=r"^x, field question: answer\[2\] parts from answer\[0\] at a number"):
            encode_rows([answered("6 men" if other == "5 men" else "men", "all", other)], processor)


def test_a_batch_holds_what_is_also_right_where_it_stands(processor):
    rows = [answered("the man", "the old man", "nobody"), answered("nobody"), answered("no", "all", "the", "but")]
    rows.append(parse_row('{"text": "It is 5."}', "y"))
    examples = encode_rows(rows, processor)
    batch = collate(examples, 2)
    found = batch["also_right"]
    assert found.shape == (*batch["input_ids"].shape, 3)
    for row, example in enumerate(examples):
        for place in range(found.shape[1]):
            wanted = [token for at, token in example.also_right or () if at == place]
            assert found[row, place].tolist() == wanted + [-1] * (3 - len(wanted))
    assert "also_right" not in collate([examples[1], examples[3]], 2)


def test_made_up_rows_have_the_truth_that_they_claim(processor):
    rows = [parse_row(json.dumps(row), "x") for row in statements(2000, seed=3)]
    values = torch.tensor([row.value for row in rows], dtype=torch.float64)
    assert len({row.fields["prompt"] for row in rows}) == 5 and values.min() >= 0 and values.max() <= 100
    assert values.mean().item() == pytest.approx(50, abs=2) and values.max() > 99
    levels = torch.arange(1, 200, dtype=torch.float64) / 200
    best = quantile_crps(values, (100 * levels).expand(2000, -1), levels).mean()
    assert best.item() == pytest.approx(BEST_CRPS, abs=0.5)
    for row in (parse_row(json.dumps(row), "x") for row in questions(50, seed=3)):
        example = encode_rows([row], processor)[0]
        assert example.numeric_values[-1] == row.value and row.value in example.numeric_values[:-1]
    assert statements(5, seed=1) == statements(5, seed=1) != statements(5, seed=2)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a file"):
        read_rows(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RowError, match="holds no rows"):
        read_rows(tmp_path / "empty.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(RowError, match="not UTF-8"):
        read_rows(tmp_path / "bytes.jsonl")
    (tmp_path / "prompt.jsonl").write_text('{"prompt": "a"}\n')
    assert read_rows(tmp_path / "prompt.jsonl")[0].value is None
    with pytest.raises(RowError, match="row 1, field value: a prompt needs the value"):
        read_rows(tmp_path / "prompt.jsonl", values_required=True)


def test_bad_tables_are_named(tmp_path):
    for text, message in [
        ("prompt,value\nfine,1\nbad,five\n", "rows.csv, row 2, field value: expected a number, found five"),
        ("prompt,value\nfine,1,2\n", "rows.csv, row 1: 3 cells, and the header has 2"),
        ("prompt,value\nfine\n", "rows.csv, row 1: 1 cells, and the header has 2"),
        ('prompt,value\n"open,1\n', "rows.csv, after row 0: unexpected end of data"),
        ("prompt,value\nfine,nan\n", "rows.csv, row 1, field value: NaN is not a finite"),
        ("prompt,value\n", "rows.csv holds no rows"),
        ("prompt,value,prompt\nfine,1,too\n", "rows.csv: column 'prompt' is there twice"),
    ]:
        (tmp_path / "rows.csv").write_text(text)
        with pytest.raises(RowError, match=message):
            read_rows(tmp_path / "rows.csv")
    for name in ("rows.CSV", "rows.JSONL", "rows.ndjson"):  # of any case, with the mark that Excel writes
        text = "prompt,value\na,1\n" if "CSV" in name else '{"prompt": "a", "value": 1}\n'
        (tmp_path / name).write_text(text, "utf-8-sig")
        assert read_rows(tmp_path / name)[0].fields == {"prompt": "a", "value": 1}
    odd = {"prompt": "a", "value": Decimal("1.5"), "n": np.int64(3), "x": np.float32(0.5), "whole": Decimal("0.10")}
    (row,) = checked_rows([odd])
    plain = {"prompt": "a", "value": 1.5, "n": 3, "x": 0.5, "whole": "0.10"}  # as it is written back
    assert json.dumps(row.fields, default=str) == json.dumps(plain)
    (tmp_path / "rows.parquet").write_text("prompt,value\n")
    with pytest.raises(RowError, match="rows.parquet, after row 0: "):
        read_rows(tmp_path / "rows.parquet")


def test_a_choice_names_its_options_in_a_list(processor):
    row = {"prompt": "He said", "individual": "A", "chosen": "y", "options": ["y", "n"]}
    assert people_of_rows(checked_rows([row]), processor)[2] == {"choices"}
    for options in ("yes", None):
        with pytest.raises(RowError, match="row 1, field options: expected a list of words"):
            people_of_rows(checked_rows([row | {"options": options}]), processor)
    assert people_of_rows(checked_rows([row | {"chosen": None, "value": 3}]), processor)[2] == {"values"}


@pytest.fixture(scope="module")
def processor(tiny_tokenizer) -> CausalQwenProcessor:
    return CausalQwenProcessor(tiny_tokenizer)


def test_each_kind_of_row_becomes_an_example(processor):
    rows = [
        parse_row('{"text": "It is 5.", "id": 3}', "a"),
        parse_row('{"prompt": "It is ", "value": 5}', "b"),
        parse_row('{"messages": [{"role": "user", "content": "5?"}]}', "c"),
    ]
    text, prompt, chat = encode_rows(rows, processor)
    assert processor.decode(text.input_ids, text.numeric_values) == "It is 5."
    assert prompt.input_ids == text.input_ids[: len(prompt)] and prompt.numeric_values[-1] == 5.0
    assert processor.num_token_id in chat.input_ids
    (asked,) = encode_rows([parse_row('{"prompt": "Of 3, it is ", "value": 5}', "d")], processor)
    assert [value for value in asked.numeric_values if value] == [3.0, 5.0]  # one is read, the other learned
    assert [value for value in asked.numeric_labels if value and math.isfinite(value)] == [5.0]
    assert rows[0].fields["id"] == 3
    batch = collate([text, prompt], pad_token_id=2)
    assert batch["labels"][:, 0].tolist() == [-100, -100]
    assert batch["labels"][1, len(prompt) :].eq(-100).all() and batch["attention_mask"][1].sum() == len(prompt)
    assert batch["numeric_values"].dtype == torch.float64


def test_rows_that_do_not_fit_are_named(processor):
    with pytest.raises(RowError, match="^a: .* tokens, but the context of this model holds 4"):
        encode_rows([parse_row('{"text": "It is a long text."}', "a")], processor, max_length=4)
    with pytest.raises(RowError, match="^a, field text: the number 9{21}.* at characters 6-406 is too large"):
        encode_rows([parse_row('{"text": "It is ' + "9" * 400 + '"}', "a")], processor)


@pytest.fixture(scope="module")
def records():
    return boiling_points()


def test_boiling_points_are_one_number_each_and_split_by_compound(records, tmp_path):
    assert len(records) > 11_000 and len({r["name"] for r in records}) == len(records)
    kelvin = [r["kelvin"] for r in records]
    assert min(kelvin) < 5 and max(kelvin) > 5000
    parts = split_by_entity(records, {"train": 300, "test": 200})
    skeletons = [{r["entity"] for r in part} for part in parts.values()]
    assert not skeletons[0] & skeletons[1]
    assert abs(len(parts["train"]) - 300) < 5 and abs(len(parts["test"]) - 200) < 5
    assert split_by_entity(records[::-1], {"train": 300, "test": 200}) == parts
    write_sentences(tmp_path / "a.jsonl", parts["test"])
    for row, record in zip(read_rows(tmp_path / "a.jsonl"), parts["test"], strict=True):
        (number,) = find_numbers(row.fields["text"])
        assert number.value == pytest.approx(record["kelvin"], rel=1e-7)
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(ValueError, match="records asked for"):
        split_by_entity(records, {"train": 10**6})


def test_the_boiling_points_that_come_along_are_rows_of_the_table(records):
    """To make the file anew, write these records with `csv.DictWriter`."""
    assert sample_of_boiling_points() == split_by_entity(records, SIZES | {"sample": 600})["sample"]
    (asked,) = (record for record in records if record["name"] == ASKED["name"])
    assert {name: asked[name] for name in ASKED} == ASKED
    assert asked["entity"] not in {record["entity"] for record in sample_of_boiling_points()}


def test_the_speech_has_paragraphs_with_and_without_numbers():
    with_numbers, without = speech_paragraphs(), speech_paragraphs(numbers=False)
    assert len(without) < len(with_numbers) and not any(find_numbers(p) for p in without)
    assert json.dumps(without[0])
