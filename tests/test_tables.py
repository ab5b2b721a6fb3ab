"""Numbers from the rows of a table: how rows are read, what the value head does with columns, and scikit-learn's own checks."""

import datetime
import json
import math
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import DataConversionWarning
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from causalqwen.data import Row, encode_rows
from causalqwen.data.cells import decimals_of, mostly_numbers, told_of_decimals
from causalqwen.data.columns import UNKNOWN, ColumnError, TableReader, read_table, table_of
from causalqwen.files import write_sums, writing_folder
from causalqwen.modeling.loading import load_model
from causalqwen.modeling.prediction import describe
from causalqwen.sklearn import OUTPUT_TYPES, NumberRegressor, _of_groups
from causalqwen.training import FactStore, features, kept_rows
from causalqwen.training.closed_form import BlockKernel
from causalqwen.training.kept_rows import KeptRows
from causalqwen.training.whole_backbone import blocks_of
from conftest import graft_tiny, make_backbone
from test_docs import ROOT, python_blocks
from test_numbers import likeliest


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("backbone")
    make_backbone("llama", tiny_tokenizer).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def brief(folder):
    return partial(NumberRegressor, folder, random_state=0)


def products(rows: int = 60, seed: int = 0) -> tuple[pd.DataFrame, pd.Series]:
    random = np.random.default_rng(seed)
    kind = random.choice(["chair", "table", "lamp"], rows)
    weight = random.gamma(2.0, 2.0, rows)
    weight[::7] = np.nan
    day = [datetime.date(2020, 1, 1) + datetime.timedelta(int(d)) for d in random.integers(0, 900, rows)]
    adjectives = random.choice(["red", "old"], rows)
    name = [f"{adjective} {k} no. {i}" for i, (adjective, k) in enumerate(zip(adjectives, kind, strict=True))]
    frame = pd.DataFrame({"name": name, "kind": kind, "weight": weight, "sold": pd.to_datetime(day)})
    price = 20.0 * (kind == "table") + 3 * np.nan_to_num(weight, nan=4.0) + random.normal(0, 1, rows)
    return frame, pd.Series(price, name="price")


# ---- how rows are read -----------------------------------------------------------------------------------------------


def test_kinds_texts_and_numbers_of_a_table():
    frame, _ = products()
    frame.loc[3, "kind"] = None
    table = table_of(frame)
    reader = TableReader.fit(table, "price")
    assert [(c.name, c.kind) for c in reader.columns] == [
        ("name", "text"), ("kind", "category"), ("weight", "number"), ("sold", "date"),
    ]  # fmt: skip
    text = reader.texts(table)[3]
    assert text == f"name: {frame.name[3]}; weight: {frame.weight[3]:.6g}; sold: {frame.sold[3].date()}; price:"
    assert "weight" not in reader.texts(table)[0]
    numbers = reader.numbers(table)
    kind, weight, sold = reader.columns[1:]
    (number,) = reader.inside  # chair no. 7
    assert numbers.shape == (60, kind.size + weight.size + sold.size + number.size) and kind.size == 4
    assert numbers[3, :4].tolist() == [0, 0, 0, 1]
    there = frame.weight.dropna()
    width = there.quantile(0.75) - there.quantile(0.25)
    away = (frame.weight[3] - there.median()) / width
    assert numbers[3, 4:6] == pytest.approx([away, np.arcsinh(away)], rel=1e-5)
    assert numbers[0, 4:7].tolist() == [0, 0, 1] and numbers[:, 4].max() <= 4
    again = TableReader.from_dict(json.loads(json.dumps(reader.to_dict())))
    assert again == reader and np.array_equal(again.numbers(table), numbers)


def test_numbers_in_texts_are_numbers_of_the_row():
    random = np.random.default_rng(0)
    told = [f"Screen {row}, {size:.1f} inches, 10 ports" for row, size in enumerate(random.uniform(5, 30, 40))]
    told[3], told[4], told[5] = "Screen, seventeen inches", None, told[5] + " and 900 MB"
    table = {"told": told, "kind": ["a", "b"] * 20}
    reader = TableReader.fit(table, "price", text=["told"])
    # Ten ports are no news, and one row alone has a fourth number; but the greatest of a row counts it.
    assert [(one.name, one.kind, one.place, one.missing) for one in reader.inside] == [
        ("told", "number", 0, True), ("told", "number", 1, True), ("told", "number", -1, True),
    ]  # fmt: skip
    sizes = {row: float(text.split()[2]) for row, text in enumerate(told) if text and "inches, " in text}
    second = reader.inside[1]
    assert second.center == pytest.approx(np.median(list(sizes.values())))
    numbers = reader.numbers(table)[:, -6:]
    away = {row: (size - second.center) / second.width for row, size in sizes.items()}
    for row, one in away.items():
        assert numbers[row, :3] == pytest.approx([np.clip(one, -4, 4), np.arcsinh(one), 0], rel=1e-5, abs=1e-6)
        most = 900 if row == 5 else max(row, sizes[row], 10)
        assert numbers[row, 4] == pytest.approx(np.arcsinh((most - reader.inside[2].center) / reader.inside[2].width))
    assert numbers[3].tolist() == numbers[4].tolist() == [0, 0, 1, 0, 0, 1]
    assert reader.widths == [1, 2, 3, 3, 3] and reader.numbers(table).shape == (40, 12)
    again = TableReader.from_dict(json.loads(json.dumps(reader.to_dict())))
    assert again == reader
    short = TableReader.fit(table, "price", text=["told"], characters=10)  # no more is read than the text has
    assert [one.place for one in short.inside] == [0]
    assert not TableReader.fit({"told": ["is 5 long", "is 5 wide"]}, None, text=["told"]).inside


def test_odd_numbers_in_texts():
    def read(texts, asked, **given):
        reader = TableReader.fit({"told": texts}, None, text=["told"], **given)
        return reader, reader.numbers({"told": asked})

    texts = [f"from {place - 9} to {place + 3 * (place % 4)} m" for place in range(20)]
    reader, numbers = read(texts, [*texts, "from -30 to -40 m", "4006381333931 from 1 to 2 m", "1e308 m", "9" * 400])
    first, second, greatest = reader.inside
    assert first.ends == (-9, 10) and second.ends == (0, 28) and greatest.ends == second.ends
    unit = (np.array([-9, 10]) - first.center) / first.width
    # What no row had there is read as the end of what rows had; the greatest of two negative numbers is the nearer one.
    assert numbers[20, [0, 2]] == pytest.approx([unit[0], numbers[:20, 2].min()]) and numbers[20, 4] == numbers[20, 2]
    assert numbers[21, 0] == numbers[22, 0] == pytest.approx(unit[1]) and numbers[21, 4] == numbers[:20, 4].max()
    assert np.isfinite(numbers).all() and numbers[23, 0] == 0  # no number: as a missing one, which no row lacked
    for odd in ("1e308 m", "-1.7e308 m", "1e-320 m", "12e307 serial"):
        reader, numbers = read([*[f"{row}.5 m" for row in range(9)], odd], ["3 m", odd])
        assert np.isfinite(numbers).all() and json.dumps(reader.to_dict(), allow_nan=False)
    assert np.isfinite(read(["-1.7e308 m", "1.7e308 m"] * 10, ["1 m"])[1]).all()
    for known, asked in (([0.1, 0.2, 0.3], 1e308), ([1e-320, 2e-320, 3e-320], 5.0)):
        plain = TableReader.fit({"size": known}, "y").numbers({"size": [asked, -1e308]})
        assert np.isfinite(plain).all()
    # Ten numbers, of which six and the greatest are taken; half of the rows are enough, and fewer are not.
    many = [" ".join(str((row * place) % 11) for place in range(1, 11)) for row in range(20)]
    assert [one.place for one in read(many, many)[0].inside] == [0, 1, 2, 3, 4, 5, -1]
    some = [f"{row} m" if row < 10 else "none" for row in range(20)]
    assert [one.missing for one in read(some, some)[0].inside] == [True]
    assert not read([*some[1:], "none"], some)[0].inside
    assert [one.place for one in read(["1 m", "2 m"] * 3, [])[0].inside] == [0]  # two values vary
    # A number that is cut where the text is cut is none.
    cut, numbers = read(["x" * 17 + f" {row}23456789" for row in range(1, 9)], [], characters=20)
    assert not cut.inside
    cut, numbers = read([f"is {row} and {row}00" for row in range(9)], ["is 4 and 900"], characters=10)
    assert numbers.shape == (1, 2) and [one.place for one in cut.inside] == [0]
    assert not read([f"{row} m" for row in range(9)], ["x" * 30 + " 8"], characters=20)[1].any()
    category = TableReader.fit({"size": ["1 m", "2 m"] * 10, "told": texts}, "y", text=["told"])
    assert {one.name for one in category.inside} == {"told"}


def test_columns_that_do_not_fit_are_named():
    frame, _ = products()
    reader = TableReader.fit(table_of(frame), "price")
    reader.checked(table_of(frame.iloc[:2]))
    for changed, told in (
        (frame.drop(columns="kind"), "column 'kind' is missing"),
        (frame.assign(height=1), "column 'height' was not there"),
        (frame.assign(weight="heavy"), "column 'weight', row 1: expected a number, .* found 'heavy'"),
        (frame.assign(sold="soon"), "column 'sold', row 1: expected a date"),
    ):
        with pytest.raises(ColumnError, match=told):
            reader.checked(table_of(changed))
    with pytest.raises(ColumnError, match="there is no column 'title'; the columns: name, kind"):
        TableReader.fit(table_of(frame), "price", text=["title"])
    with pytest.raises(ColumnError, match="column 'a', row 2: expected text, a number or a date, found list"):
        TableReader.fit({"a": [1, [2]]}, "b")
    for nothing in ({}, pd.DataFrame(index=range(12))):
        with pytest.raises(ValueError, match="there is no column to predict from"):
            NumberRegressor("nowhere").fit(nothing, range(12))


class Polars:
    """As much of a polars DataFrame as is asked: its columns have no `tolist`."""

    columns, dtypes = ("a", "b"), ("Int64", "String")

    def __getitem__(self, name):
        return iter({"a": [1, None], "b": ["x", "y"]}[name])


def test_values_are_what_they_are_whoever_holds_them():
    days = np.array(["2020-01-02", "NaT"], dtype="datetime64[ns]")
    day = datetime.datetime(2020, 1, 2)
    assert table_of({"d": days, "n": [Decimal("1.5"), Decimal("NaN")]}) == {"d": [day, None], "n": [1.5, None]}
    assert table_of(days.reshape(2, 1)) == {"x0": [day, None]}
    assert table_of(pd.DataFrame({"d": days})) == {"d": [day, None]}
    assert table_of({"a": (row for row in range(3))}) == {"a": [0, 1, 2]}
    assert table_of(Polars()) == {"a": [1, None], "b": ["x", "y"]}
    with pytest.raises(ColumnError, match="column 'd', row 1: expected text, a number or a date, found timedelta"):
        TableReader.fit(table_of({"d": np.array([5], dtype="timedelta64[ns]")}), "y")
    for wrong, told in (
        ({"a": [1, 2], "b": [1]}, "different numbers of rows: 2 in 'a' and 1 in 'b'"),
        (pd.DataFrame({"n": [1.0, math.inf]}), "column 'n', row 2: a number is infinite"),
        ({1: [0], "1": [1]}, "column '1' is there twice"),
        (pd.DataFrame([[0, 1]], columns=[0, "x0"]), "column 'x0' is there twice"),
        ({"n": [1, 10**400]}, "column 'n', row 2: a number is too large for float64"),
        ({"t": ["a", "b\ud800"]}, "column 't', row 2: half of a surrogate pair is no character"),
    ):
        with pytest.raises(ColumnError, match=told):
            table_of(wrong)


def kinds(reader):
    return {name: column.kind for name, column in reader.known.items()}


DAY = datetime.date(2024, 1, 1)


@pytest.mark.parametrize(
    "constant", [None, "x", 5, 5.0, True, DAY, pd.Timestamp(DAY), "2024-01-01", "a longer text, 5 kg"]
)
def test_a_column_that_says_one_thing_is_left_out_whatever_it_holds_later(constant):
    learned = table_of(pd.DataFrame({"a": [1, 2], "same": pd.Series([constant] * 2, dtype=object)}))
    reader = TableReader.fit(learned, "y")
    assert kinds(reader) == {"a": "number", "same": "constant"}
    assert reader.remarks(learned) == ["column 'same' is left out: it says the same in all rows"]
    for later in ("word", 3.5, 1e300, datetime.date(2020, 1, 2), None):
        table = reader.checked({"a": [1], "same": [later]})
        assert reader.texts(table) == ["a: 1; y:"] and not reader.outside(table)
        assert reader.numbers(table).shape == (1, 2) and reader.widths == [2]
    forced = TableReader.fit({"a": [1, 2], "same": ["x", "x"]}, "y", text=["same"])
    assert kinds(forced)["same"] == "constant"
    some = TableReader.fit({"a": [1, 2, 3], "some": [5, None, 5]}, "y")
    assert kinds(some)["some"] == "number"  # which tells two things
    assert kinds(TableReader.fit({"text": ["x", "x"]}, None)) != {"text": "constant"}  # a list of texts


def test_a_value_that_no_row_held_is_read_as_the_nearest_one():
    days = [DAY + datetime.timedelta(day) for day in (0, 3, 6, 9)]
    years = [DAY + datetime.timedelta(day) for day in (0, 100, 400, 800)]
    table: dict = {
        "n": [0.0, 1.0, 2.0, 10.0], "gaps": [1.0, None, 2.0, 3.0], "day": days, "year": years,
        "kind": ["red", "red", "blue", "green"], "t": ["a 5", "b 6", "c 7", "d 8"],
    }  # fmt: skip
    table = {name: cells * 5 for name, cells in table.items()}
    reader = TableReader.fit(table, "y", text=["t"])
    by_name = reader.known
    number = by_name["n"]

    for value, end in ((10.5, 10.0), (1e140, 10.0), (-3, 0.0)):
        away, at = (np.arcsinh((one - number.center) / number.width) for one in (value, end))
        assert number.nearest(value) == (end, pytest.approx(abs(away - at)))
    assert number.nearest(7.5) == (7.5, 0) and number.nearest(None) == (1.5, UNKNOWN)
    assert by_name["gaps"].nearest(None) == (None, 0)
    kind = by_name["kind"]
    assert kind.nearest("Blue ") == ("blue", UNKNOWN) and kind.nearest("what?") == ("red", UNKNOWN)
    same = TableReader.fit({"n": [0.1] * 7 + [None]}, "y").known["n"]  # whose deviation rounding makes 1e-17
    assert same.width == 1 and same.nearest(1e300) == (0.1, pytest.approx(np.arcsinh(1e150)))
    few = TableReader.fit({"kind": ["red"] * 20 + ["dark blue", "green"] * 2 + ["ochre"]}, "y").known["kind"]
    assert few.levels == ("red",) and few.nearest("blue") == ("dark blue", 0) and few.nearest("7") == ("ochre", 0)
    assert kind.nearest("green") == ("green", 0) and kind.nearest(None) == ("red", UNKNOWN)
    assert by_name["t"].nearest("new") == ("new", 0) and by_name["t"].nearest(None) == (None, UNKNOWN)
    for later in (1, 10, 5000):  # the last one of its weekday
        for sign in (-1, 1):
            asked = (days[0] if sign < 0 else days[-1]) + datetime.timedelta(sign * later)
            near = by_name["day"].nearest(asked)[0].date()
            assert days[0] <= near <= days[-1] and near.weekday() == asked.weekday()
    for later, weeks in ((200, 52), (20, 3)):  # and of its season
        within = by_name["year"].nearest(years[-1] + datetime.timedelta(later))[0].date()
        assert within == years[-1] + datetime.timedelta(later - 7 * weeks)
    assert by_name["day"].nearest("2024-01-02") == ("2024-01-02", 0)
    row = {name: [cells[0]] for name, cells in table.items()}
    moved = row | {"n": [1e6], "kind": ["what?"], "t": ["a 5000"]}
    assert reader.texts(moved)[0].startswith("n: 10; gaps: 1;") and "kind: red" in reader.texts(moved)[0]
    assert reader.texts(moved, exact=True)[0].startswith("n: 1000000; gaps: 1;")
    assert reader.outside(moved).keys() == {"n", "kind", "t"} and not reader.outside(row)
    ends = row | {"n": [10.0], "kind": ["red"], "t": ["a 8"]}
    assert np.array_equal(reader.numbers(moved), reader.numbers(ends))
    again = TableReader.from_dict(json.loads(json.dumps(reader.to_dict())))
    assert again.outside(moved) == reader.outside(moved) and again == reader


AMOUNTS = {
    ",": [
        (["1.234,50 EUR", "950,00 EUR", None], [1234.5, 950, None]), (["12,5 %", "3 %"], [12.5, 3]),
        (["1 234,50 kr", "12 kr"], [1234.5, 12]), (["−5,5", "3"], [-5.5, 3]), (["1.234.567", "5"], [1234567, 5]),
        (["R$ 1.500,00", "R$ 3,20"], [1500, 3.2]), (["1,5 kg", "2 kg"], [1.5, 2]), (["zł 5", "zł 12,50"], [5, 12.5]),
        (["EUR1,5", "EUR 2,25"], [1.5, 2.25]), (["-1,5 €", "€ 2"], [-1.5, 2]),
    ],
    ".": [
        (["1,288", "950"], [1288, 950]), (["1,288.5", "3"], [1288.5, 3]), (["R1,500", "R950"], [1500, 950]),
        (["$1,234.50", "-$ 45.10"], [1234.5, -45.1]), (["USD1,234.50", "USD5"], [1234.5, 5]), (["+$5", "$-5"], [5, -5]),
        (["CHF 1'250.50", "CHF 80.-"], [1250.5, 80]), (["12,34,567", "5"], [1234567, 5]), (["₩1,500", "₩900"], [1500, 900]),
        (["5 元", "1,200 元"], [5, 1200]),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("mark", "cells", "read"), [(mark, *pair) for mark in ",." for pair in AMOUNTS[mark]])
def test_strings_that_are_amounts_are_numbers(mark, cells, read):
    reader = TableReader.fit({"p": cells, "x": [0, 1, 2][: len(cells)]}, "y")
    assert reader.known["p"].kind == "number" and reader.known["p"].decimal == mark
    table = {"p": cells, "x": [0] * len(cells)}
    assert reader.checked(table)["p"] == read == TableReader.from_dict(reader.to_dict()).checked(table)["p"]
    assert f"is read with a decimal {'comma' if mark == ',' else 'point'}: " in reader.remarks({"p": cells})[0]


def test_marks_are_found_where_columns_tell_and_told():
    assert decimals_of({"a": ["1,288", "950"], "b": ["1,5", "2"]}) == {"a": ",", "b": ","}
    told = decimals_of({"a": ["1,288", "950"], "b": ["1,5", "2"], "c": ["$1.5", "$2"]})
    assert told == {"a": ".", "b": ",", "c": "."}
    assert decimals_of({"a": ["1,288", "950"]}, ",") == {"a": ","} and decimals_of({"a": ["1,5", "2"]}, ".") == {}
    assert decimals_of({"a": ["1,288", "950"], "b": ["1,5", "2"]}, {"b": ","}, ["a"]) == {"b": ","}
    for cells in (["34.000"], ["34.000", "12"], [None, "-1.234.567", "34.000"], ["0", "1.000"]):
        assert decimals_of({"a": cells}, ",") == {"a": ","} and decimals_of({"a": cells}, ".") == {}
        assert decimals_of({"a": cells, "b": ["1,5"]}) == {"a": ",", "b": ","}
    assert decimals_of({"a": ["34", "12"], "b": ["12.5"]}, ",") == {}
    reader = TableReader.fit({"a": ["34.000", "1.500", "2.000"]}, "y", decimal=",")
    assert reader.checked({"a": ["34.000", "12"]})["a"] == [34000.0, 12.0]
    told = "column 'a' is read with a decimal point: '1,288' is 1288 (with a decimal comma, '1,288' would be 1.288)"
    assert told_of_decimals({"a": ["1,288", "950"]}, {"a": "."}) == [told]
    for words in (
        ["A1", "A2"], ["SKU1", "SKU20"], ["3 CAT", "7 CAT"],
        ["01234", "10115"], ["5 EUR", "7 USD"], ["12.5", "3"], ["5-7", "3"], ["12:30", "1:15"], ["v1.2", "v1.3"],
        ["2020-01-01", "2020-01-02"], ["1.2.3", "1.2.4"], ["192.168.0.1", "10.0.0.1"], ["0,001.5", "1"], ["1,288", "about 9"],
    ):  # fmt: skip
        assert decimals_of({"a": words}) == {}, words
    for words, told in (
        (["5 EUR", "7 USD"], "its amounts are of several units, EUR, USD"),
        (["1.234,50 EUR"] * 9 + ["ask"], "9 of 10 cells are numbers, but row 10 says 'ask'"),
    ):
        assert mostly_numbers({"a": words}) == [f"column 'a' is read as words: {told}"]
    with pytest.raises(ValueError, match="decimal: expected '.', ',' or 'auto', got ';'"):
        decimals_of({"a": ["1"]}, ";")


def test_prices_with_a_decimal_comma_are_columns_of_numbers(brief, tmp_path):
    """As floats are: nothing that is predicted depends on how a number was written."""
    random = np.random.default_rng(0)
    price = random.uniform(500, 5000, 60).round(2)
    strings = [f"{value:,.2f} EUR".translate(str.maketrans(",.", ".,")) for value in price]
    frames = [pd.DataFrame({"price": price}), pd.DataFrame({"price": strings})]
    floats, read = (brief().fit(frame, 2 * price).predict(frame, "median") for frame in frames)
    assert np.array_equal(floats, read)
    groups = pd.DataFrame({"price": [f"{value:,.0f}" for value in price]})
    with pytest.warns(UserWarning, match="column 'price' is read with a decimal point: .* would be"):
        made = brief().fit(groups, price)
    made.save(tmp_path / "m")
    assert NumberRegressor.load(tmp_path / "m").reader_.known["price"].decimal == "."
    assert brief(decimal=",").fit(groups, price).reader_.known["price"].center < 10


def test_dates_are_told_from_texts_and_long_rows_are_cut():
    dates = TableReader.fit({"day": ["2020-02-29", "2021-03-01T12:00:00Z", None]}, "y")
    assert dates.columns[0].kind == "date" and dates.numbers({"day": ["2020-02-29", None]}).shape == (2, 7)
    assert TableReader.fit({"day": ["2020-02-30", "2021-03-01"]}, "y").columns[0].kind != "date"
    long = TableReader.fit({"a": ["x" * 50, "y" * 50]}, "y", text=["a"], characters=20)
    assert long.texts({"a": ["x" * 50]}) == ["a: " + "x" * 17 + "; y:"]


# ---- rows that were read ---------------------------------------------------------------------------------------------


def prompts(model, count: int) -> list:
    rows = [{"prompt": f"The price of thing {n} is", "value": float(n)} for n in range(count)]
    return [replace(one, learned=[False] * (len(one) - 1) + [True]) for one in encode_rows(rows, model.processor)]


@pytest.fixture
def reader(tiny_tokenizer):
    """A graft that tells what the whole backbone tells."""
    model = graft_tiny("llama", tiny_tokenizer)
    model.reads_backbone = blocks_of(model)
    return model


def test_kept_rows_are_read_once_and_are_what_build_reads(reader, tmp_path, monkeypatch):
    read, taken, examples = [], features.token_facts, prompts(reader, 6)
    plain = FactStore.build(reader, examples, tmp_path / "plain", rest=False).facts.reads.array
    monkeypatch.setattr(features, "token_facts", lambda m, some, **kw: read.append(len(some)) or taken(m, some, **kw))
    kept = KeptRows(tmp_path / "kept", reader)
    first = kept.facts(examples[:4]).reads.array
    assert sum(read) == 4 and first.shape == (4, sum(reader.reads_backbone))
    np.testing.assert_allclose(first, plain[:4], atol=1e-5)
    assert np.array_equal(kept.facts(examples[3:]).reads.array[0], first[3]) and sum(read) == 6
    again = KeptRows(tmp_path / "kept", reader).facts(examples[3::-1])
    assert np.array_equal(again.reads.array, first[::-1]) and sum(read) == 6


def test_rows_are_kept_block_by_block(reader, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_rows, "_OF_BLOCK", 2)
    read, examples = [], prompts(reader, 5)
    whole = KeptRows(tmp_path / "whole", reader).facts(examples).reads.array
    taken = features.token_facts

    def until_killed(m, some, **kw):
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(len(some))
        return taken(m, some, **kw)

    monkeypatch.setattr(features, "token_facts", until_killed)
    with pytest.raises(KeyboardInterrupt):
        KeptRows(tmp_path / "kept", reader).facts(examples)
    read[:] = []  # what was read before is there
    assert np.array_equal(KeptRows(tmp_path / "kept", reader).facts(examples).reads.array, whole)
    assert read == [1]


@pytest.mark.slow
def test_workers_of_ray_read_what_is_read_here(tmp_path):
    pytest.importorskip("ray")
    script = tmp_path / "fit.py"  # a process of its own: Ray warns of what it uses itself
    script.write_text(FIT_WITH_WORKERS)
    subprocess.run([sys.executable, script, tmp_path], check=True, cwd=tmp_path, timeout=500)
    here, there = (np.load(tmp_path / f"{workers}.npy") for workers in (0, 2))
    np.testing.assert_allclose(here, there, rtol=1e-6)
    with pytest.raises(ValueError, match="workers need cache_dir"):
        NumberRegressor(workers=2).fit(["a b", "b c"] * 20, range(40))


FIT_WITH_WORKERS = """
import sys
from pathlib import Path
import numpy as np
import torch
import causalqwen.training.kept_rows as kept_rows
from causalqwen.sklearn import NumberRegressor
torch.set_num_threads(1)
kept_rows._OF_BLOCK = 16
folder = Path(sys.argv[1])
texts = [f"thing {n}, which weighs {n % 7}, and costs a little" for n in range(60)]
values = [float(n % 7) + n / 100 for n in range(60)]
for workers in (0, 2):
    rows = folder / f"rows-{workers}"
    made = NumberRegressor(workers=workers, cache_dir=str(rows)).fit(texts, values)
    assert len(list(rows.glob("*/features-*/rows.npy"))) > 2
    np.save(folder / f"{workers}.npy", made.predict(texts, "median"))
"""


@pytest.mark.parametrize("others", [[], ["S,0.3"]])
def test_cells_of_a_category_that_look_like_numbers_stay_as_they_are(tmp_path, others):
    """Whatever else the file holds: a reader knows its columns."""
    reader = TableReader.fit({"size": ["S", "10.50", "12.0", "07"] * 10, "w": [0.5, 1.5] * 20}, "price")
    (tmp_path / "rows.csv").write_text("\n".join(["size,w", "10.50,0.1", "12.0,0.2", *others]))
    assert read_table(tmp_path / "rows.csv", reader.known)["size"][:2] == ["10.50", "12.0"]
    assert read_table(tmp_path / "rows.csv", reader.known)["w"][:2] == [0.1, 0.2]


def test_a_narrow_regressor_on_a_backbone_in_bfloat16_predicts_after_loading(tiny_tokenizer, tmp_path):
    make_backbone("llama", tiny_tokenizer).to(torch.bfloat16).save_pretrained(tmp_path / "backbone")
    tiny_tokenizer.save_pretrained(tmp_path / "backbone")
    made = NumberRegressor(tmp_path / "backbone", config={"causal_size": 8}, cache_dir=tmp_path / "kept")
    X, y = products()
    made.fit(X, y).save(tmp_path / "made")  # folders as Paths, which a file holds as text
    again = NumberRegressor.load(tmp_path / "made")
    assert again.model_.score_head.weight.dtype == torch.bfloat16
    np.testing.assert_array_equal(again.predict(X), made.predict(X))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text_columns": "name"}, r"text_columns is a list of names: \['name'\]"),
        ({"config": {"causal_size": lambda: 1}}, "config: a function cannot be written to a file"),
        ({"settings": {"values": {"epochs": 2}}}, "settings: a regressor is fitted in closed form, .*leave values out"),
        ({"settings": {"lora": {"rank": 2}}}, "leave lora out"),
    ],
)
def test_what_no_regressor_can_keep_is_refused_before_anything_is_learned(brief, given, message):
    with pytest.raises(ValueError, match=message):
        brief(**given).fit(*products())


# ---- the estimator ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(folder):
    frame, price = products()
    return NumberRegressor(folder).fit(frame, price), frame, price


@pytest.mark.parametrize("name", ["tables.md", "tables.zh.md"])
def test_the_python_of_tables_runs(folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks(ROOT / "docs" / name)
    X, y = products()
    exec(block.replace("NumberRegressor(", "NumberRegressor(folder, ", 1), {"X": X, "y": y, "folder": folder})
    assert (tmp_path / "model").is_dir()


def test_what_is_predicted_of_rows(fitted):
    regressor, frame, price = fitted
    full = regressor.predict(frame, "full")
    assert full.keys() == {*OUTPUT_TYPES, "predictions"} - {"full"}
    assert np.array_equal(regressor.predict(frame), full["mean"]) and len(full["quantiles"]) == 9
    low, middle, high = regressor.predict(frame, "quantiles", quantiles=[0.05, 0.5, 0.95])
    inner = low > regressor.model_.value_transform.support.low  # at the end of the support quantiles and draws are one
    assert np.array_equal(middle, full["median"]) and (low < middle)[inner].all() and (middle < high).all()
    np.testing.assert_allclose(regressor.predict_interval(frame, 0.9), np.stack([low, high], axis=1))
    one = full["predictions"][4]
    assert str(one) == one.format(0.9) and "num_prob" not in describe(one, 1.0)
    assert one.median == pytest.approx(full["median"][4]) and one.interval(0.9) == pytest.approx((low[4], high[4]))
    law = regressor.model_.value_law
    fine = np.array([one.quantile(k / 200) for k in range(1, 200)]).clip(*law.clip(torch.tensor([-1e9, 1e9])).tolist())
    assert full["mode"][4] == pytest.approx(likeliest(fine.tolist(), [one.log_prob(value) for value in fine], law))
    drawn = regressor.sample(frame, 2000, seed=3)
    assert np.array_equal(drawn, regressor.sample(frame, 2000, seed=3))
    assert inner.mean() > 0.5 and abs((drawn < low[:, None])[inner].mean() - 0.05) < 0.01
    assert regressor.score(frame, price) > 0.7
    with pytest.raises(ValueError, match="unknown output_type 'average'"):
        regressor.predict(frame, "average")
    with pytest.raises(ColumnError, match="column 'kind' is missing"):
        regressor.predict({"name": ["a"], "weight": [1.0], "sold": ["2020-01-01"]})


def test_a_row_is_told_the_same_beside_others(fitted):
    """Its place among them moves the last bits of a product, which float64 keeps out of the figures."""
    regressor, frame, _ = fitted
    for output_type in ("mean", "median"):
        alone = [regressor.predict(frame[row : row + 1], output_type)[0] for row in range(20)]
        assert alone == pytest.approx(regressor.predict(frame[:20], output_type), rel=1e-9, abs=1e-9)


def test_spreads_follow_the_columns_from_the_start_where_these_tell_of_them(brief):
    random = np.random.default_rng(0)
    x = random.normal(size=(240, 2))
    noise = random.normal(0, 0.3, 240)
    at = np.array([[0.0, 1.0], [0.0, -1.0]])
    ratios = []
    for y in (5 * x[:, 0] + np.exp(x[:, 1]) * noise, 5 * x[:, 0] + noise):
        low, high = brief().fit(x, y).predict_interval(at, 0.8).T
        ratios.append((high - low)[0] / (high - low)[1])
    assert 2.5 < ratios[0] < 14 and 0.8 < ratios[1] < 1.25  # e^2 is 7.4


def test_a_y_of_few_bits_is_what_it_says(brief):
    texts = ["a"] * 4
    for kind in ("<f4", ">f4"):
        assert brief()._table(texts, np.array([0.1, 20.3, 123456784, -5e-7], dtype=kind))[1].tolist() == [
            0.1, 20.3, 123456784.0, -5e-7,
        ]  # fmt: skip
    with pytest.raises(ValueError, match="NaN"):
        brief()._table(texts, np.array([0.1, np.nan, 1, 2], dtype=np.float32))


def test_texts_of_which_some_are_missing_are_texts(brief, tmp_path):
    """In a list, an array or a Series; and none of them moves what is kept of the others."""
    texts, values = ["a lamp", *(f"thing {row}" for row in range(38)), "the last"], np.arange(40.0)
    for of_none in (None, "", " ", float("nan"), pd.NA):
        given = [*texts, of_none]
        made = brief(cache_dir=str(tmp_path / repr(of_none))).fit(given, [*values, 40.0])
        alone = brief(cache_dir=str(tmp_path / repr(of_none))).fit(given, [*values, 40.0])
        assert made.reader_.target is None and made.reader_.texts({"text": ["a chair is"]}) == ["a chair is"]
        asked = [of_none, "a lamp", "never seen", "the very last", "a lamp, almost new"]
        medians = made.predict(asked, "median")
        assert np.isfinite(medians).all() and made.predict([of_none], "median") == pytest.approx(medians[:1], rel=1e-4)
        assert alone.predict(asked[1:], "median") == pytest.approx(medians[1:], rel=1e-4)
        for held in (np.array(asked, dtype=object), pd.Series(asked), pd.Series(asked, dtype="string")):
            assert made.predict(held, "median") == pytest.approx(medians)


def test_a_row_without_anything_to_predict_from_is_not_kept(reader, tmp_path):
    nothing = encode_rows([Row("prompt", "row 2", {"prompt": "", "value": 1.0})], reader.processor)[0]
    first, last = prompts(reader, 2)
    examples = [first, replace(nothing, learned=[True]), last]
    kept = KeptRows(tmp_path, reader)
    for _ in range(2):
        with pytest.raises(ValueError, match="a row's text holds nothing to predict a number from"):
            kept.facts(examples)
    assert len(kept.facts([examples[0], examples[2]])) == 2


def test_what_cannot_be_read_is_told_by_its_row(brief, tmp_path):
    """Columns called as methods are columns; lists of unlike values are what they hold."""
    frame = pd.DataFrame({"column_names": np.arange(40.0), "to_pydict": np.arange(40.0) % 7})
    made = brief().fit(frame, frame.column_names)
    assert kinds(made.reader_) == {"column_names": "number", "to_pydict": "number"}
    assert made.reader_.columns[0].center == 19.5
    rows = [["chair" if row % 3 else "lamp", 1.5 + row, None if row % 5 else float("nan")] for row in range(40)]
    assert kinds(brief().fit(rows, frame.column_names).reader_) == {"x0": "category", "x1": "number", "x2": "constant"}
    texts = [f"thing {row}" for row in range(40)]
    with pytest.raises(ValueError, match=r"y, row 3: values are learned to 1e\+150; scale them"):
        brief().fit(texts, [0.0, 1.0, -1e151] + [2.0] * 37)
    with pytest.raises(ValueError, match="characters=0: a row's text has one at least"):
        brief(characters=0).fit(texts, range(40))
    strings = [*"ab" * 19, None, "c"]
    for groups in (strings, [*range(38), float("nan"), 1.0], pd.Series(strings, dtype="str")):
        with pytest.raises(ValueError, match="groups, row 39: expected a name, found nothing"):
            brief().fit(texts, range(40), groups=groups)
    names = [row % 8 if row % 2 else f"g{row % 8}" for row in range(40)]
    names[1] = 1.0  # the group 1
    groups = dict(zip(names, _of_groups(40, names).tolist(), strict=True))
    assert len(groups) == 8 and [groups[name] for name in names] == _of_groups(40, names).tolist()
    with pytest.warns(DataConversionWarning):
        brief().fit(texts, pd.DataFrame({"name": range(40)}), groups=names)
    with pytest.raises(ValueError, match=r"Found array with 0 sample\(s\)"):
        made.predict({"column_names": [], "to_pydict": []})
    with pytest.raises(ValueError, match="row 2: the number 9.* is too large for float64"):
        brief().fit(texts, range(40)).predict(["a", "9" * 400])


def test_a_backbone_by_a_relative_path_is_found_from_elsewhere(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(folder).parent)
    texts = [f"thing {row}" for row in range(40)]
    made = NumberRegressor(f"./{Path(folder).name}").fit(texts, range(40))
    made.save(tmp_path / "made")
    monkeypatch.chdir(tmp_path)
    assert NumberRegressor.load("made").backbone == folder
    (tmp_path / Path(folder).name).mkdir()  # another of that name
    assert NumberRegressor.load("made", torch.device("cpu")).predict(texts) == pytest.approx(made.predict(texts))
    shutil.copytree(folder, tmp_path / Path(folder).name, dirs_exist_ok=True)
    about = json.loads((tmp_path / "made" / "estimator.json").read_text())
    (tmp_path / "made" / "estimator.json").write_text(json.dumps(about | {"backbone_at": "/gone"}))
    write_sums(tmp_path / "made")
    assert NumberRegressor.load("made").backbone == f"./{Path(folder).name}"  # all of it was moved


def test_saved_and_pickled_it_predicts_the_same_without_the_backbones_weights(fitted, tmp_path):
    regressor, frame, _ = fitted
    before, mean = regressor.predict(frame, "quantiles"), regressor.predict(frame)
    regressor.save(tmp_path / "saved")
    written = {path.name for path in (tmp_path / "saved").iterdir()}
    assert written == {"estimator.json", "estimator.safetensors", "SHA256SUMS"}
    again = NumberRegressor.load(tmp_path / "saved")
    assert again.get_params() == regressor.get_params()
    pickled = pickle.dumps(regressor)
    assert b"backbone.model" not in pickled
    other = pickle.loads(pickled)
    for one in (again, other):
        np.testing.assert_array_equal(one.predict(frame, "quantiles"), before)
        np.testing.assert_array_equal(one.predict(frame), mean)
    assert other.model_.backbone is regressor.model_.backbone
    about = json.loads((tmp_path / "saved" / "estimator.json").read_text())
    (tmp_path / "saved" / "estimator.json").write_text(json.dumps(about | {"fingerprint": "0"}))
    write_sums(tmp_path / "saved")
    with pytest.raises(ValueError, match="is not the one that this regressor was fitted on"):
        NumberRegressor.load(tmp_path / "saved")
    with pytest.raises(ValueError, match="holds no regressor of tables"):
        NumberRegressor.load(tmp_path)


def test_a_damaged_regressor_is_told_so(fitted, tmp_path):
    saved = tmp_path / "saved"
    fitted[0].save(saved)
    for path in sorted(saved.iterdir()):
        whole = path.read_bytes()
        turned = bytearray(whole)
        turned[len(whole) // 2] ^= 4
        for damaged in (b"", whole[: len(whole) // 2], bytes(turned)):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="the regressor in .*saved is damaged: .*"):
                NumberRegressor.load(saved)
        path.write_bytes(whole)
    assert NumberRegressor.load(saved).metrics_ == fitted[0].metrics_
    with pytest.raises(ValueError, match="saved holds a regressor of tables: `causalqwen predict`"):
        load_model(saved)
    (saved / "SHA256SUMS").unlink()  # of a regressor saved before there were some
    weights = (saved / "estimator.safetensors").read_bytes()
    (saved / "estimator.safetensors").write_bytes(weights[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        NumberRegressor.load(saved)
    (saved / "estimator.safetensors").write_bytes(weights)
    about = json.loads((saved / "estimator.json").read_text())
    for name in about.keys() - {"format", "backbone_at"}:
        (saved / "estimator.json").write_text(json.dumps({one: about[one] for one in about if one != name}))
        with pytest.raises(ValueError, match=f"saved is damaged: .*{name}"):
            NumberRegressor.load(saved)


def test_what_is_chosen_is_told_and_kept(brief, capsys, tmp_path):
    """And a loaded regressor reads its rows here."""
    frame, price = products(20)
    chosen = {"settings": {"value_transform": "symlog"}, "config": {"value_family": "cauchy"}}
    regressor = brief(**chosen, cache_dir=str(tmp_path / "rows")).fit(frame, price)
    assert "closed form" not in capsys.readouterr().err
    regressor.set_params(verbose=True).fit(frame, price)
    assert "in closed form: symlog axis, cauchy law" in capsys.readouterr().err
    regressor.set_params(workers=2).save(tmp_path / "saved")
    shutil.rmtree(tmp_path / "rows")
    again = NumberRegressor.load(tmp_path / "saved")
    assert (again.workers, again.cache_dir) == (0, None) and len(again.predict(frame)) == 20
    assert not (tmp_path / "rows").exists()
    for one in (regressor, again, pickle.loads(pickle.dumps(regressor))):
        assert (one.choice_["axis"], one.choice_["family"]) == ("symlog", "cauchy")
        assert one.model_.value_law.family == "cauchy"


def test_rows_longer_than_the_context_are_cut_before_the_question(brief):
    frame, price = products(20)
    long = frame.assign(name=["1 2 3 4 5 6 7 8 9 " * 60] * 20)
    regressor = brief(text_columns=["name"]).fit(long, price)
    made = regressor._examples(table_of(long), np.zeros(20))
    assert max(len(one) for one in made) <= 256
    told = regressor.model_.processor.decode(made[0].input_ids[:-1], made[0].numeric_values[:-1])
    assert told.endswith("; price:") and told.count("price") == 1


def test_rows_of_a_group_are_left_out_together_and_weights_draw_rows(brief, monkeypatch):
    seen, fit = [], BlockKernel.__init__

    def spied(self, features, blocks, values, groups, *args):
        seen.append((values, groups))
        fit(self, features, blocks, values, groups, *args)

    monkeypatch.setattr(BlockKernel, "__init__", spied)
    frame, _ = products()
    brief().fit(frame, np.arange(60.0), groups=[f"g{row // 4:02}" for row in range(60)])
    np.testing.assert_array_equal(seen[-1], (np.arange(60), np.arange(60) // 4))
    brief().fit(frame, np.arange(60.0), sample_weight=np.array([0.0, 2.0, 1.0] * 20))
    values, groups = seen[-1]
    np.testing.assert_array_equal(np.unique(values, return_inverse=True)[1], groups)  # a row that is there twice is one
    assert not (values % 3 == 0).any() and set(range(1, 60, 3)) <= set(values.astype(int))


@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [
        (2, {}, "n_samples=2 are too few: a regressor needs 10 rows$"),
        (2, {"groups": [1, 2]}, "n_samples=2 in 2 groups are too few: a regressor needs 10 rows, and 5 groups$"),
        (60, {"groups": np.arange(60) % 3}, "n_samples=60 in 3 groups are too few"),
        (60, {"sample_weight": np.eye(60)[7]}, "sample_weight: 1 rows count, too few to leave some out"),
        (60, {"groups": [1, 2]}, "expected one group per row, got 2 for 60"),
    ],
)
def test_too_few_rows_or_groups_are_refused(brief, rows, given, message):
    with pytest.raises(ValueError, match=message):
        brief().fit(products(rows)[0], np.arange(float(rows)), **given)


def test_rows_are_not_read_again_in_another_fold(brief, monkeypatch, tmp_path):
    read, taken = [], features.token_facts
    texts = lambda some: [tuple(one.input_ids) for one in some]  # noqa: E731
    monkeypatch.setattr(features, "token_facts", lambda m, some, **kw: read.extend(texts(some)) or taken(m, some, **kw))
    frame, price = products()
    search = GridSearchCV(brief(cache_dir=str(tmp_path)), {"config": [{"value_family": "cauchy"}, None]}, cv=2)
    search.fit(frame, price)
    assert len(read) == len(set(read)) < 75 and search.best_params_ == {"config": search.best_estimator_.config}
    assert clone(search.best_estimator_).get_params() == search.best_estimator_.get_params()


def test_two_processes_may_read_the_same_rows_at_once(brief, monkeypatch, tmp_path):
    """As the folds of a search with n_jobs do, into one cache_dir."""
    fill, others = FactStore._fill, []

    def and_another_is_first(part, *args):
        fill(part, *args)
        if part.name.startswith("features-") and "rows" in str(part):
            others.append(part.with_name(part.name.partition(".part-")[0]))
            shutil.copytree(part, others[-1])

    monkeypatch.setattr(FactStore, "_fill", staticmethod(and_another_is_first))
    frame, price = products()
    made = brief(cache_dir=str(tmp_path / "rows")).fit(frame, price)
    assert others and not list((tmp_path / "rows").rglob("*.part*"))
    np.testing.assert_array_equal(made.predict(frame), brief().fit(frame, price).predict(frame))
    with pytest.raises(OSError, match="not empty"), writing_folder(tmp_path / "rows"):
        pass


def test_it_goes_into_pipelines_and_cross_validation(brief):
    frame, price = products()
    found = cross_val_predict(brief(), frame, price, cv=GroupKFold(2), groups=np.arange(60) // 3)
    assert np.corrcoef(found, price)[0, 1] > 0.7
    pipeline = make_pipeline(FunctionTransformer(lambda X: X.drop(columns="sold")), brief()).fit(frame, price)
    assert pipeline.predict(frame[:2]).shape == (2,)


def test_mapie_wraps_it(brief):
    from mapie.regression import SplitConformalRegressor

    random = np.random.default_rng(0)
    x = random.normal(size=(90, 2))
    y = x[:, 0] + random.normal(0, 0.1, 90)
    wrapped = SplitConformalRegressor(brief(), confidence_level=0.8, prefit=False)
    wrapped.fit(x[:60], y[:60]).conformalize(x[60:], y[60:])
    _, intervals = wrapped.predict_interval(x[60:])
    assert ((intervals[:, 0, 0] <= y[60:]) & (y[60:] <= intervals[:, 1, 0])).mean() >= 0.8


@pytest.mark.slow
def test_scikit_learns_own_checks_pass(folder):
    weighted = "check_sample_weight_equivalence_on_dense_data"  # whole rows are drawn: a weight of 2 is no second row
    found = check_estimator(
        NumberRegressor(folder, random_state=0),
        on_skip=None,
        on_fail=None,
        expected_failed_checks={weighted: "rows are drawn by their weights, which is the same on average only"},
    )
    assert {one["check_name"] for one in found if one["status"] != "passed"} <= {"check_array_api_input", weighted}
