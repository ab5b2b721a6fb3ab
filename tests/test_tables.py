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
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import nnls
from sklearn.base import clone
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor
from sklearn.exceptions import DataConversionWarning
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from causalqwen.data import Row, encode_rows
from causalqwen.data.columns import (
    UNKNOWN,
    ColumnError,
    TableReader,
    TableRows,
    decimals_of,
    mostly_numbers,
    read_table,
    table_of,
    told_of_decimals,
)
from causalqwen.files import write_sums, writing_folder
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.loading import load_model
from causalqwen.modeling.prediction import describe
from causalqwen.numbers import CRPS_LEVELS
from causalqwen.parts.branch import ValueBranch
from causalqwen.parts.copying import Candidates
from causalqwen.sklearn import OUTPUT_TYPES, NumberRegressor, _folds
from causalqwen.training import FactStore, experts, features, kept_rows, stages
from causalqwen.training.experts import Experts, fit_experts
from causalqwen.training.gaussian_process import GaussianProcess
from causalqwen.training.kept_rows import KeptRows
from causalqwen.training.mean import FittedMean
from conftest import graft_tiny, make_backbone
from test_docs import ROOT, python_blocks
from test_numbers import likeliest

BRIEF = {"values": {"epochs": 2, "batch_size": 32, "center": True}, "evaluations": 1}
SMALL = {"value_branch_hidden_size": 8, "value_branch_members": 1}


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("backbone")
    make_backbone("llama", tiny_tokenizer).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def few_trees():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_TREES", 10)
        patch.setattr(experts, "_STEPS", 12)
        patch.setattr(experts, "_PENALTIES", (0.1, 10.0))
        yield


@pytest.fixture
def brief(folder):
    return lambda **given: NumberRegressor(folder, **({"settings": BRIEF, "config": SMALL, "random_state": 0} | given))


def products(rows: int = 60, seed: int = 0) -> tuple[pd.DataFrame, pd.Series]:
    random = np.random.default_rng(seed)
    kind = random.choice(["chair", "table", "lamp"], rows)
    weight = random.gamma(2.0, 2.0, rows)
    weight[::7] = np.nan
    day = [datetime.date(2020, 1, 1) + datetime.timedelta(int(d)) for d in random.integers(0, 900, rows)]
    name = [
        f"{adjective} {k} no. {i}"
        for i, (adjective, k) in enumerate(zip(random.choice(["red", "old"], rows), kind, strict=True))
    ]
    frame = pd.DataFrame({"name": name, "kind": kind, "weight": weight, "sold": pd.to_datetime(day)})
    price = pd.Series(
        20.0 * (kind == "table") + 3 * np.nan_to_num(weight, nan=4.0) + random.normal(0, 1, rows), name="price"
    )
    return frame, price


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
    assert reader.texts(table, words=True)[3] == f"name: {frame.name[3]}"
    assert "weight" not in reader.texts(table)[0]
    numbers = reader.rows(table).numbers
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
    assert again == reader and np.array_equal(again.rows(table).numbers, numbers)


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
    numbers = reader.rows(table).numbers[:, -6:]
    away = {row: (size - second.center) / second.width for row, size in sizes.items()}
    for row, one in away.items():
        assert numbers[row, :3] == pytest.approx([np.clip(one, -4, 4), np.arcsinh(one), 0], rel=1e-5, abs=1e-6)
        most = 900 if row == 5 else max(row, sizes[row], 10)
        assert numbers[row, 4] == pytest.approx(np.arcsinh((most - reader.inside[2].center) / reader.inside[2].width))
    assert numbers[3].tolist() == numbers[4].tolist() == [0, 0, 1, 0, 0, 1]
    rows = reader.rows(table)
    assert len(rows.columns) == 5 and np.array_equal(np.concatenate(rows.columns[3:], axis=1), numbers)
    assert np.array_equal(rows.taken(np.array([7])).columns[3], rows.columns[3][7:8])
    again = TableReader.from_dict(json.loads(json.dumps(reader.to_dict())))
    assert again == reader
    short = TableReader.fit(table, "price", text=["told"], characters=10)  # no more is read than the text has
    assert [one.place for one in short.inside] == [0]
    assert not TableReader.fit({"told": ["is 5 long", "is 5 wide"]}, None, text=["told"]).inside


def test_odd_numbers_in_texts():
    def read(texts, asked, **given):
        reader = TableReader.fit({"told": texts}, None, text=["told"], **given)
        return reader, reader.rows({"told": asked}).numbers

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
        plain = TableReader.fit({"size": known}, "y").rows({"size": [asked, -1e308]}).numbers
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
    assert (
        numbers.shape == (1, 2)
        and not read([f"{row} m" for row in range(9)], ["x" * 30 + " 8"], characters=20)[1].any()
    )
    assert [one.place for one in cut.inside] == [0]
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
    for changed, told in (
        (
            frame.assign(weight=[1.0, math.inf] + [2.0] * (len(frame) - 2)),
            "column 'weight', row 2: a number is infinite",
        ),
        ({"a": [1, 2], "b": [1]}, "different numbers of rows: 2 in 'a' and 1 in 'b'"),
    ):
        with pytest.raises(ColumnError, match=told):
            table_of(changed)
    assert table_of({"a": (row for row in range(3))}) == {"a": [0, 1, 2]}
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
    assert table_of(days.reshape(2, 1)) == {"x0": [day, None]} and table_of(pd.DataFrame({"d": days})) == {
        "d": [day, None]
    }
    assert table_of(Polars()) == {"a": [1, None], "b": ["x", "y"]}
    with pytest.raises(ColumnError, match="column 'd', row 1: expected text, a number or a date, found timedelta"):
        TableReader.fit(table_of({"d": np.array([5], dtype="timedelta64[ns]")}), "y")
    for wrong, told in (
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
        rows = reader.rows(table)
        assert rows.numbers.shape == (1, 2) and len(rows.columns) == 1 and rows.words == [""]
    forced = TableReader.fit({"a": [1, 2], "same": ["x", "x"]}, "y", text=["same"])
    assert kinds(forced)["same"] == "constant"
    assert (
        kinds(TableReader.fit({"a": [1, 2, 3], "some": [5, None, 5]}, "y"))["some"] == "number"
    )  # which tells two things
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

    def far(value, end):
        return abs(
            np.arcsinh((value - number.center) / number.width) - np.arcsinh((end - number.center) / number.width)
        )

    for value, end in ((10.5, 10.0), (1e140, 10.0), (-3, 0.0)):
        assert number.nearest(value) == (end, pytest.approx(far(value, end)))
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
    within = by_name["year"].nearest(years[-1] + datetime.timedelta(200))[0].date()  # and of its season
    assert within == years[-1] + datetime.timedelta(200 - 364)
    assert by_name["year"].nearest(years[-1] + datetime.timedelta(20))[0].date() == years[-1] + datetime.timedelta(
        20 - 21
    )
    assert by_name["day"].nearest("2024-01-02") == ("2024-01-02", 0)
    row = {name: [cells[0]] for name, cells in table.items()}
    moved = row | {"n": [1e6], "kind": ["what?"], "t": ["a 5000"]}
    assert reader.texts(moved)[0].startswith("n: 10; gaps: 1;") and "kind: red" in reader.texts(moved)[0]
    assert reader.texts(moved, exact=True)[0].startswith("n: 1000000; gaps: 1;")
    assert reader.outside(moved).keys() == {"n", "kind", "t"} and not reader.outside(row)
    ends = row | {"n": [10.0], "kind": ["red"], "t": ["a 8"]}
    assert np.array_equal(reader.rows(moved).numbers, reader.rows(ends).numbers)
    again = TableReader.from_dict(json.loads(json.dumps(reader.to_dict())))
    assert again.outside(moved) == reader.outside(moved) and again == reader


AMOUNTS = {
    ",": [
        ["1.234,50 EUR", "950,00 EUR", None], ["12,5 %", "3 %"], ["1 234,50 kr", "12 kr"], ["−5,5", "3"], ["1.234.567", "5"],
        ["R$ 1.500,00", "R$ 3,20"], ["1,5 kg", "2 kg"], ["zł 5", "zł 12,50"], ["EUR1,5", "EUR 2,25"], ["-1,5 €", "€ 2"],
    ],
    ".": [
        ["1,288", "950"], ["1,288.5", "3"], ["R1,500", "R950"], ["$1,234.50", "-$ 45.10"], ["USD1,234.50", "USD5"],
        ["CHF 1'250.50", "CHF 80.-"], ["12,34,567", "5"], ["₩1,500", "₩900"], ["5 元", "1,200 元"], ["+$5", "$-5"],
    ],
}  # fmt: skip
READ: dict[str, list[list[float | None]]] = {
    ",": [
        [1234.5, 950, None], [12.5, 3], [1234.5, 12], [-5.5, 3], [1234567, 5], [1500, 3.2],
        [1.5, 2], [5, 12.5], [1.5, 2.25], [-1.5, 2]
    ],
    ".": [
        [1288, 950], [1288.5, 3], [1500, 950], [1234.5, -45.1], [1234.5, 5], [1250.5, 80],
        [1234567, 5], [1500, 900], [5, 1200], [5, -5]
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("mark", "cells", "read"), [(mark, *pair) for mark in ",." for pair in zip(AMOUNTS[mark], READ[mark], strict=True)]
)
def test_strings_that_are_amounts_are_numbers(mark, cells, read):
    reader = TableReader.fit({"p": cells, "x": [0, 1, 2][: len(cells)]}, "y")
    assert reader.known["p"].kind == "number" and reader.known["p"].decimal == mark
    table = {"p": cells, "x": [0] * len(cells)}
    assert reader.checked(table)["p"] == read == TableReader.from_dict(reader.to_dict()).checked(table)["p"]
    assert f"is read with a decimal {'comma' if mark == ',' else 'point'}: " in reader.remarks({"p": cells})[0]


def test_marks_are_found_where_columns_tell_and_told():
    assert decimals_of({"a": ["1,288", "950"], "b": ["1,5", "2"]}) == {"a": ",", "b": ","}
    assert decimals_of({"a": ["1,288", "950"], "b": ["1,5", "2"], "c": ["$1.5", "$2"]}) == {
        "a": ".",
        "b": ",",
        "c": ".",
    }
    assert decimals_of({"a": ["1,288", "950"]}, ",") == {"a": ","} and decimals_of({"a": ["1,5", "2"]}, ".") == {}
    assert decimals_of({"a": ["1,288", "950"], "b": ["1,5", "2"]}, {"b": ","}, ["a"]) == {"b": ","}
    for cells in (["34.000"], ["34.000", "12"], [None, "-1.234.567", "34.000"], ["0", "1.000"]):
        assert decimals_of({"a": cells}, ",") == {"a": ","} and decimals_of({"a": cells}, ".") == {}
        assert decimals_of({"a": cells, "b": ["1,5"]}) == {"a": ",", "b": ","}
    assert decimals_of({"a": ["34", "12"], "b": ["12.5"]}, ",") == {}
    reader = TableReader.fit({"a": ["34.000", "1.500", "2.000"]}, "y", decimal=",")
    assert reader.checked({"a": ["34.000", "12"]})["a"] == [34000.0, 12.0]
    (line,) = told_of_decimals({"a": ["1,288", "950"]}, {"a": "."})
    assert (
        line
        == "column 'a' is read with a decimal point: '1,288' is 1288 (with a decimal comma, '1,288' would be 1.288)"
    )
    for words in (
        ["A1", "A2"], ["SKU1", "SKU20"], ["3 CAT", "7 CAT"],
        ["01234", "10115"], ["5 EUR", "7 USD"], ["12.5", "3"], ["5-7", "3"], ["12:30", "1:15"], ["v1.2", "v1.3"],
        ["2020-01-01", "2020-01-02"], ["1.2.3", "1.2.4"], ["192.168.0.1", "10.0.0.1"], ["0,001.5", "1"], ["1,288", "about 9"],
    ):  # fmt: skip
        assert decimals_of({"a": words}) == {}, words
    (line,) = mostly_numbers({"a": ["5 EUR", "7 USD"]})
    assert line == "column 'a' is read as words: its amounts are of several units, EUR, USD"
    (line,) = mostly_numbers({"a": ["1.234,50 EUR"] * 9 + ["ask"]})
    assert line == "column 'a' is read as words: 9 of 10 cells are numbers, but row 10 says 'ask'"
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


def test_two_rows_are_too_few_whatever_their_groups(brief):
    with pytest.raises(ValueError, match="n_samples=2 are too few: a regressor needs 10 rows$"):
        brief().fit({"a": [1, 2]}, [1, 2])
    with pytest.raises(
        ValueError, match="n_samples=2 in 2 groups are too few: a regressor needs 10 rows, and 5 groups$"
    ):
        brief().fit({"a": [1, 2]}, [1, 2], groups=[1, 2])


def test_dates_are_told_from_texts_and_long_rows_are_cut():
    dates = TableReader.fit({"day": ["2020-02-29", "2021-03-01T12:00:00Z", None]}, "y")
    assert dates.columns[0].kind == "date" and dates.rows({"day": ["2020-02-29", None]}).numbers.shape == (2, 7)
    assert TableReader.fit({"day": ["2020-02-30", "2021-03-01"]}, "y").columns[0].kind != "date"
    long = TableReader.fit({"a": ["x" * 50, "y" * 50]}, "y", text=["a"], characters=20)
    assert long.texts({"a": ["x" * 50]}) == ["a: " + "x" * 17 + "; y:"]
    assert long.rows({"a": ["x" * 50, None]}).columns[0] == ["x" * 20, ""]


# ---- what the value head does with columns ---------------------------------------------------------------------------


def test_the_branch_reads_columns_as_its_formula_says():
    torch.manual_seed(0)
    branch = ValueBranch(4, 3, 5, members=2, columns=2).eval()
    for parameter in branch.parameters():
        torch.nn.init.normal_(parameter)
    branch.feature_mean.copy_(torch.arange(6.0))
    branch.feature_std.copy_(torch.arange(1.0, 7.0))
    wide, loc, scale = torch.randn(7, 6), torch.randn(7, 3), torch.rand(7, 3)
    x = (wide - torch.arange(6.0)) / torch.arange(1.0, 7.0)
    r = sum(member(x) for member in (branch.residual, *branch.others)) / 2
    d, e = branch.direct
    found = branch(wide, loc, scale)
    torch.testing.assert_close(found[0], loc + r[:, :3] + torch.outer(x @ d, branch.along))
    torch.testing.assert_close(found[1], scale * (r[:, 3:] + (x @ e)[:, None]).clamp(-20, 20).exp())
    each = branch(wide, loc, scale, each=True)[0]
    torch.testing.assert_close(each.mean(0), found[0])
    at_mean = torch.cat([wide[:, :4], torch.tensor([4.0, 5.0]).expand(7, 2)], dim=1)
    torch.testing.assert_close(branch(wide[:, :4], loc, scale), branch(at_mean, loc, scale))


def test_a_graft_without_columns_is_what_it_was_and_one_with_them_reads_them(tiny_tokenizer, tmp_path):
    plain = graft_tiny("llama", tiny_tokenizer)
    assert plain.value_branch.direct is None and len(plain.value_branch.feature_mean) == 32
    model = graft_tiny("llama", tiny_tokenizer, value_columns=3, **SMALL)
    torch.nn.init.normal_(model.value_branch.direct[0])
    torch.nn.init.normal_(model.value_branch.along)
    features = torch.randn(5, 35)
    chain = Chain(model, features)
    assert torch.equal(chain.features, features[:, :32])
    whole = chain.value()[0]
    torch.testing.assert_close(chain[1:3].value()[0], whole[1:3])
    moved = features.clone()
    moved[:, 33] += 1
    branch = model.value_branch
    step = branch.direct[0, 33] * (branch.along * model.action.value_head.weight[0]).sum()
    torch.testing.assert_close(Chain(model, moved).value()[0] - whole, step.expand(5), rtol=1e-4, atol=1e-4)
    assert torch.equal(Chain(model, moved).loc_S, chain.loc_S)
    model.save_pretrained(tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model")
    assert again.config.value_columns == 3 and torch.equal(Chain(again, features).value()[0], whole)
    with pytest.raises(ValueError, match="value_columns needs value_branch=True"):
        graft_tiny("llama", tiny_tokenizer, value_columns=3, value_branch=False)


def prompts(model, count: int, columns: int = 0) -> list:
    from dataclasses import replace

    rows = [
        Row("prompt", f"row {n}", {"prompt": f"The price of thing {n} is", "value": float(n)}) for n in range(count)
    ]
    made = encode_rows(rows, model.processor)
    return [
        replace(
            one,
            learned=[False] * (len(one) - 1) + [True],
            columns=tuple(float(place + k) for k in range(columns)) or None,
        )
        for place, one in enumerate(made)
    ]


def test_columns_stand_behind_the_kept_features_and_are_no_part_of_what_is_kept(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer, value_columns=2, **SMALL)
    examples = prompts(model, 5, columns=2)
    store = FactStore.build(model, examples, tmp_path)
    wide = store.facts.tensor("features")
    assert wide.shape == (5, 34) and torch.equal(wide[:, 32:], torch.arange(5.0)[:, None] + torch.arange(2.0))
    assert store.facts.features.shape == (5, 32)
    assert torch.equal(store[3].tensor("features"), wide[3:4])
    others = [type(one)(**vars(one) | {"columns": (7.0, 8.0)}) for one in examples]
    again = FactStore.build(model, others, tmp_path)
    assert again.folder == store.folder and again.facts.tensor("features")[0, 32:].tolist() == [7.0, 8.0]
    with pytest.raises(ValueError, match="example 0 has 0 columns beside its text; this model reads 2"):
        FactStore.build(model, prompts(model, 5), tmp_path)


def test_kept_rows_are_read_once_and_give_the_store_that_build_gives(tiny_tokenizer, tmp_path, monkeypatch):
    model, read = graft_tiny("llama", tiny_tokenizer), []
    examples = prompts(model, 6)
    plain = FactStore.build(model, examples[1:5], tmp_path / "plain")
    taken = features.token_facts
    monkeypatch.setattr(features, "token_facts", lambda m, some, **kw: read.append(len(some)) or taken(m, some, **kw))
    kept = KeptRows(tmp_path / "kept", model)
    first = kept.features(examples[:4])
    assert sum(read) == 4
    kept.put(examples[1:5], tmp_path / "work")
    assert sum(read) == 5
    store = FactStore.build(model, examples[1:5], tmp_path / "work")
    assert sum(read) == 5 and store.folder.name == plain.folder.name
    assert np.array_equal(store.facts.values, plain.facts.values)
    np.testing.assert_allclose(store.facts.features, plain.facts.features, atol=1e-5)
    assert np.array_equal(KeptRows(tmp_path / "kept", model).features(examples[3::-1]), first[::-1])
    assert sum(read) == 5 and kept_rows.FORMAT == features.FORMAT


def test_rows_are_kept_block_by_block(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_rows, "_OF_BLOCK", 2)
    model, read = graft_tiny("llama", tiny_tokenizer), []
    examples = prompts(model, 5)
    whole = KeptRows(tmp_path / "whole", model).features(examples)
    taken = features.token_facts

    def until_killed(m, some, **kw):
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(len(some))
        return taken(m, some, **kw)

    monkeypatch.setattr(features, "token_facts", until_killed)
    with pytest.raises(KeyboardInterrupt):
        KeptRows(tmp_path / "kept", model).features(examples)
    read[:] = []  # what was read before is there
    assert np.array_equal(KeptRows(tmp_path / "kept", model).features(examples), whole)
    assert read == [1]


def test_numbers_in_rows_are_kept_for_a_model_that_copies(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_rows, "_OF_BLOCK", 3)
    model, plain = (graft_tiny("llama", tiny_tokenizer, copy_numbers=copies) for copies in (True, False))
    told = ["Nothing is", "1 and 2.5 of 7 is", "It costs 12 or", "9, 8, 7, 6 is", "A thing is", "A thing is"]
    rows = [Row("prompt", f"row {n}", {"prompt": text, "value": float(n)}) for n, text in enumerate(told)]
    examples = [replace(one, learned=[False] * (len(one) - 1) + [True]) for one in encode_rows(rows, model.processor)]
    kept = KeptRows(tmp_path / "kept", model)
    kept.features(examples[2:4])
    order = [3, 0, 5, 1, 2, 4, 3]
    asked = [examples[row] for row in order]

    def offered(numbers):
        found = Candidates(**numbers.candidates())
        return found.offered, found.at, *(of[found.rows][found.offered] for of in (found.values, found.features))

    found = offered(kept.numbers(asked))
    assert found[0].sum(1).tolist() == [4, 0, 0, 3, 1, 0, 4]
    read = offered(FactStore.build(model, asked, tmp_path / "plain").facts.numbers)
    torch.testing.assert_close(read, found, rtol=0, atol=1e-5)
    kept.put(asked, tmp_path / "work")
    monkeypatch.setattr(features, "token_facts", None)  # nothing is read again
    served = offered(FactStore.build(model, asked, tmp_path / "work").facts.numbers)
    torch.testing.assert_close(served, found, rtol=0, atol=0)
    theirs = KeptRows(tmp_path / "kept", plain)
    assert np.array_equal(theirs.features(asked), kept.features(asked)) and theirs.numbers(asked) is None


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
settings = {"values": {"epochs": 2}}
for workers in (0, 2):
    rows, predicted = folder / f"rows-{workers}", []
    for copies in (False, True):
        given = {"config": {"copy_numbers": copies}, "settings": settings, "workers": workers, "cache_dir": str(rows)}
        made = NumberRegressor(random_state=0, **given).fit(texts, values)
        predicted.append(made.predict(texts, "median"))
    assert len(list(rows.iterdir())) == 2 and all(len(list(one.glob("features-*/rows.npy"))) > 2 for one in rows.iterdir())
    np.save(folder / f"{workers}.npy", predicted)
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
    made = NumberRegressor(
        tmp_path / "backbone",
        settings=BRIEF,
        config=SMALL | {"causal_size": 8},
        cache_dir=tmp_path / "kept",
        random_state=0,
    )
    X, y = products()
    made.fit(X, y).save(tmp_path / "made")  # folders as Paths, which a file holds as text
    again = NumberRegressor.load(tmp_path / "made")
    assert again.model_.score_head.weight.dtype == torch.bfloat16
    np.testing.assert_array_equal(again.predict(X), made.predict(X))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text_columns": "name"}, r"text_columns is a list of names: \['name'\]"),
        ({"config": {"value_branch_members": lambda: 1}}, "config: a function cannot be written to a file"),
        ({"settings": {"values": True, "heads": {"score_matrix": "shared"}}}, "train the backbone, which a regressor"),
        ({"settings": {"values": True, "lora": {"rank": 2}}}, "train the backbone, which a regressor"),
    ],
)
def test_what_no_regressor_can_keep_is_refused_before_anything_is_learned(brief, given, message):
    with pytest.raises(ValueError, match=message):
        brief(**given).fit(*products())


# ---- experts ---------------------------------------------------------------------------------------------------------


def expert_rows(rows: int = 50):
    frame, price = products(rows)
    table = table_of(frame)
    reader = TableReader.fit(table, "price")
    return reader.rows(table), price.to_numpy()


def test_experts_answer_as_scikit_learns_trees_do_and_as_before_they_were_saved():
    rows, values = expert_rows()
    found = Experts.fit(rows, values)
    answers = found.answers(rows)
    assert answers.shape == (50, found.width) == (50, 11)
    x = found._narrow(found.grams.counts(rows.words), rows.numbers)
    wanted = np.stack([values, np.log1p(np.abs(values)) * np.sign(values)], axis=1)
    wanted_mean, wanted_std = wanted.mean(0), wanted.std(0)
    wanted = (wanted - wanted_mean) / wanted_std
    forest = ExtraTreesRegressor(10, min_samples_leaf=2, max_features=0.3, random_state=0).fit(x, wanted)
    np.testing.assert_allclose(answers[:, 2:4], forest.predict(x), atol=1e-5)
    for axis in range(2):
        boosted = HistGradientBoostingRegressor(max_iter=12, learning_rate=0.06, early_stopping=False, random_state=0)
        np.testing.assert_allclose(answers[:, 4 + axis], boosted.fit(x, wanted[:, axis]).predict(x), atol=1e-5)
    assert np.corrcoef(answers[:, 0], values)[0, 1] > 0.8
    weight = np.arange(50.0)
    weighted, both = Experts.fit(rows, values, weight=weight).process, GaussianProcess.fit(rows, wanted, weight=weight)
    np.testing.assert_allclose(weighted.answers(rows), both.answers(rows), atol=2e-3)  # a search ends by last bits
    assert np.abs(weighted.answers(rows) - found.process.answers(rows)).max() > 0.02
    tensors, about = found.state("experts.")
    again = Experts.from_state(tensors, json.loads(json.dumps(about)), "experts.")
    np.testing.assert_allclose(again.answers(rows), answers, atol=1e-5)
    np.testing.assert_allclose(answers[:, 6:], found.process.answers(rows), atol=1e-5)
    assert again.width == answers.shape[1]


def test_the_mixture_has_the_least_squared_errors_of_answers_on_either_axis():
    rows, values = expert_rows(60)
    fold = np.arange(60) % 5
    whole, answers = fit_experts(rows, values, fold)
    assert answers.shape == (60, whole.width) == (60, 13)
    center, width = whole.arrays["center"], whole.arrays["width"]
    own, bent = (answers[:, axis:8:2] * width[axis] + center[axis] for axis in (0, 1))
    bent = bent.clip(*(np.sign(whole.arrays["ends"]) * np.log1p(np.abs(whole.arrays["ends"]))))
    said = np.concatenate([own, np.sign(bent) * np.expm1(np.abs(bent))], axis=1)
    penalty = np.sqrt(1e-4 * 60) * np.eye(8)
    facts = np.concatenate([(said - center[0]) / width[0], penalty])
    weights, _ = nnls(facts, np.concatenate([(values - center[0]) / width[0], np.zeros(8)]))
    np.testing.assert_allclose(whole.arrays["mixture"][0], weights, atol=1e-3)
    mixed = (said - center[0]) @ weights + center[0]
    by_all = np.concatenate([answers[:, :-2], whole._mixed(answers[:, :-2], whole.arrays["mixture"])], axis=1)
    np.testing.assert_allclose(whole.in_units(by_all)[:, 0], mixed, atol=1e-3 * values.std())
    errors = np.square(np.concatenate([said, mixed[:, None]], axis=1) - values[:, None]).mean(0)
    assert errors.argmin() == 8
    logged = np.sign(said) * np.log1p(np.abs(said))
    of_log = ((logged - center[1]) / width[1]) @ whole.arrays["mixture"][1]
    np.testing.assert_allclose(by_all[:, 12], of_log, atol=1e-3)
    far = np.abs(whole._on_axes(np.full((1, 11), 1e6))[0] * width[0] + center[0])
    assert far.max() < 3 * np.abs(whole.arrays["ends"]).max()
    twice = np.r_[:60, :20]
    weighted = np.repeat([2.0, 1.0], [20, 40])
    whole.mix(answers[twice, :-2], values[twice], fold[twice], None)
    repeated = whole.arrays["mixture"]
    whole.mix(answers[:, :-2], values, fold, weighted)
    np.testing.assert_allclose(whole.arrays["mixture"], repeated, atol=1e-6)
    answers[:, 4] = np.random.default_rng(0).normal(
        0, 1e-15, 60
    )  # trees of so few rows that none has a leaf of its own
    whole.mix(answers[:, :-2], values, fold, None)
    assert whole.arrays["mixture"].max() < 2


@pytest.mark.parametrize("row", [5, 6])
def test_a_row_is_answered_by_experts_that_never_saw_it(monkeypatch, row):
    monkeypatch.setattr(experts, "_PENALTIES", (1.0,))
    rows, values = expert_rows()
    fold = np.arange(50) % 5

    def told(values):
        whole, answers = fit_experts(rows, values, fold)
        center, width = np.tile(whole.arrays["center"], 4), np.tile(whole.arrays["width"], 4)
        return np.concatenate([answers[:, :8] * width + center, answers[:, 8:11]], axis=1), whole, answers

    before, *_ = told(values)
    moved = values.copy()
    moved[row] += 1000
    after, other, others = told(moved)
    same_fold = fold == fold[row]
    np.testing.assert_allclose(after[same_fold], before[same_fold], rtol=1e-3, atol=1e-3)
    assert not np.allclose(after[~same_fold], before[~same_fold], rtol=0.1)
    # What the mixture of the others says follows from the answers without the row alone.
    again = other.mix(others[:, :11], np.where(same_fold, 0, moved), fold, None)
    np.testing.assert_allclose(again[same_fold], others[same_fold, 11:], atol=1e-4)


def test_new_rows_are_told_by_the_folds_lengths_on_average(monkeypatch):
    """Nearness, and how far the rows near by are off, is measured by lengths: those of all rows may not be others."""
    rows, values = expert_rows()
    fits, fit = [], GaussianProcess.fit.__func__

    def fitted(cls, *given, **named):
        fits.append(fit(cls, *given, **named))
        return fits[-1]

    monkeypatch.setattr(GaussianProcess, "fit", classmethod(fitted))
    whole, _ = fit_experts(rows, values, np.arange(50) % 5)
    *folds, last = (one.lengths for one in fits)
    assert len(folds) == 5 and not np.allclose(folds[0], folds[1])
    np.testing.assert_allclose(last, np.mean(folds, axis=0))
    np.testing.assert_array_equal(whole.process.lengths, last)


def test_of_noise_a_process_tells_a_row_nothing_of_its_own_value():
    """Lengths are learned from values: those that had seen a row's own would tell it."""
    told = []
    for seed in range(3):
        random = np.random.default_rng(seed)
        x, values = random.normal(size=(160, 8)).astype(np.float32), random.normal(size=160)
        rows = TableRows([""] * 160, x, list(np.split(x, 8, axis=1)))
        _, answers = fit_experts(rows, values, np.arange(160) % 5)
        told.append(np.corrcoef(answers[:, 6], values)[0, 1])
    assert np.mean(told) < 0.1


def test_a_known_row_is_told_nothing_that_rows_were_not_told_before_they_were_known():
    """Their texts are letters by chance: what a known row is told lies thousands of deviations off what others were."""
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), 20)) for _ in range(60)]
    rows = TableReader.fit({"text": texts}, "value").rows({"text": texts})
    whole, answers = fit_experts(rows, random.normal(size=60), np.arange(60) % 5)
    low, high = answers[:, :11].min(0), answers[:, :11].max(0)
    beyond = np.where(np.arange(11) < 2, high - low, 0)
    said = whole.answers(rows)[:, :11]
    assert (said >= low - beyond - 1e-6).all() and (said <= high + beyond + 1e-6).all()
    assert np.abs(whole.process.answers(rows)[:, 0]).max() > 2 * high[6]  # it knows them, and is not heard
    tensors, about = whole.state("experts.")
    again = Experts.from_state(tensors, json.loads(json.dumps(about)), "experts.")
    np.testing.assert_allclose(again.answers(rows), whole.answers(rows), atol=1e-5)


# ---- the estimator ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(folder):
    frame, price = products()
    return NumberRegressor(folder, settings=BRIEF, config=SMALL, random_state=0).fit(frame, price), frame, price


@pytest.mark.parametrize("name", ["tables.md", "tables.zh.md"])
def test_the_python_of_tables_runs(folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks(ROOT / "docs" / name)
    X, y = products()
    brief = "NumberRegressor(folder, settings=BRIEF, config=SMALL, "
    exec(
        block.replace("NumberRegressor(", brief, 1), {"X": X, "y": y, "folder": folder, "BRIEF": BRIEF, "SMALL": SMALL}
    )
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


def test_a_mean_is_the_mixtures_moved_to_the_laws_as_far_as_held_out_rows_ask():
    random = np.random.default_rng(0)
    mixed = random.lognormal(3, 1, 300)
    law = mixed + random.normal(0, 5, 300)
    noise = random.normal(0, 1, 300)
    both = np.stack([law, law], axis=1)
    for share in (0.0, 0.4, 1.0):
        values = mixed + share * (law - mixed) + noise
        made = FittedMean.fit(law[:200], mixed[:200], values[:200])
        found = 1 - made.weights[3]
        assert share - 0.06 < found <= min(1.0, share + 0.02) and not made.weights[:3].any()
        np.testing.assert_allclose(made.of(both, mixed[:, None]), mixed + found * (law - mixed))
    plain = np.square(values[:200] - mixed[:200])  # less a standard error, by the formula
    apart, missed = law[:200] - mixed[:200], values[:200] - mixed[:200]
    slope = (missed @ apart) / (apart @ apart)
    error = np.sqrt(np.square((missed - slope * apart) * apart).sum()) / (apart @ apart)
    assert plain.mean() > 1 and found == pytest.approx(min(1.0, slope - error))
    weights = np.repeat([2.0, 1.0], [50, 150])
    twice = np.r_[:200, :50]
    weighted = FittedMean.fit(law[:200], mixed[:200], values[:200] / 2, weights)
    again = FittedMean.fit(law[twice], mixed[twice], values[twice] / 2)
    assert weighted.weights[3] == pytest.approx(again.weights[3], abs=0.02)
    wild = FittedMean.fit(law, mixed, mixed + random.standard_cauchy(300))
    assert wild.weights[3] > 0.9
    assert FittedMean.fit(mixed[:1], mixed[:1], values[:1]).weights[3] == 1
    for unit in (1e-200, 1e200):
        far = FittedMean.fit(law[:200] * unit, mixed[:200] * unit, values[:200] * unit)
        assert far.weights[3] == pytest.approx(1 - found)


def test_a_mean_is_what_was_fitted_and_stays_in_the_support(fitted, tmp_path):
    regressor, frame, _ = fitted
    law, loc, scale, *_ = regressor._laws(frame)
    kept = regressor.mean_
    assert len(kept.weights) == 4
    m = law.clip(law.quantile(loc, scale, CRPS_LEVELS)).mean(-1).numpy()
    q = regressor.predict(frame, "median")
    said = regressor.experts_.in_units(regressor.experts_.answers(regressor.reader_.rows(table_of(frame))))
    try:
        w, c = np.array([0.3, 0.1, 0.2, 0.05]), np.array([0.0, 10.0, 1.0, 2.0])
        regressor.mean_ = FittedMean(w, c)
        told = [m - c[1], q - m - c[2], said[:, 0] - m - c[3]]
        low, high = regressor.predict_interval(frame, 0.9).T
        moved = (m + w[0] + w[1:] @ np.stack(told)).clip(np.minimum(low, m), np.maximum(high, m))
        np.testing.assert_allclose(regressor.predict(frame), moved, rtol=1e-6)
        np.testing.assert_array_equal(regressor.predict(frame, "full")["mean"], regressor.predict(frame))
        for far, end in ((-1e9, np.minimum(low, m)), (1e9, np.maximum(high, m))):
            regressor.mean_ = replace(kept, weights=kept.weights + far * np.eye(4)[0])
            np.testing.assert_allclose(regressor.predict(frame), end)
            assert (regressor.predict(frame) >= law.transform.support.low).all()
        regressor.mean_ = None
        of_law = regressor.predict(frame)
        np.testing.assert_array_equal(of_law, m)
        regressor.save(tmp_path / "older")  # as one from before it was fitted
    finally:
        regressor.mean_ = kept
    older = NumberRegressor.load(tmp_path / "older")
    assert older.mean_ is None
    np.testing.assert_array_equal(older.predict(frame), of_law)


def test_columns_tell_what_the_text_alone_does_not(folder):
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 2))
    y = 10 * x[:, 0] + random.normal(0, 0.1, 120)
    regressor = NumberRegressor(folder, settings=BRIEF, config=SMALL, random_state=0).fit(x[:90], y[:90])
    assert regressor.score(x[90:], y[90:]) > 0.9
    own = NumberRegressor(folder, settings=BRIEF, config=SMALL, random_state=0, experts=False).fit(x[:90], y[:90])
    assert own.experts_ is None and own.model_.config.value_columns == 4 and own.score(x[90:], y[90:]) > 0.7


def test_a_row_is_told_the_same_beside_others(brief):
    """Its place among them moves the last bits of a product, which float64 keeps out of the figures."""
    frame, prices = products()
    regressor = brief().fit(frame, prices)
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
        low, high = brief(experts=False).fit(x, y).predict_interval(at, 0.8).T
        ratios.append((high - low)[0] / (high - low)[1])
    assert 4 < ratios[0] < 14 and 0.8 < ratios[1] < 1.25  # e^2 is 7.4


@pytest.mark.parametrize("told", [True, False], ids=["spreads follow a column", "spreads follow none"])
def test_the_start_is_as_wide_as_rows_are_off(brief, monkeypatch, told):
    found, lean = [], stages._lean

    def spied(model, store):
        lean(model, store)
        with torch.no_grad():
            features = store.facts.tensor("features").to(model.device)
            loc, scale = (column.cpu() for column in Chain(model.eval(), features).value())
        off = (model.value_transform.forward(store.facts.tensor("values")) - loc).abs() / scale
        median = off.median() / model.action.value_law.quantile(torch.tensor(0.75))
        found.append((float(median), float(model.value_branch.direct[1].detach().abs().max())))

    monkeypatch.setattr(stages, "_lean", spied)
    random = np.random.default_rng(0)
    x = np.concatenate([random.normal(size=(300, 1)), random.exponential(size=(300, 1))], axis=1)
    noise = random.normal(0, 0.1, 300) * (np.exp(1.5 * x[:, 1]) if told else 1)
    brief(experts=False).fit(x, 5 * x[:, 0] + noise)
    assert found and all(0.9 < median < 1.1 for median, _ in found), found
    assert all((follows > 0) == told for _, follows in found), found


def test_a_mean_is_the_laws_where_few_rows_are_held_out(brief):
    frame, price = products()
    few = brief().fit(frame[:40], price[:40])
    assert few.mean_ is None and brief().fit(frame, price).mean_ is not None
    law, loc, scale, *_ = few._laws(frame)
    np.testing.assert_array_equal(few.predict(frame), law.clip(law.quantile(loc, scale, CRPS_LEVELS)).mean(-1))


def test_texts_alone_may_be_a_list(brief):
    frame, price = products()
    texts = [f"{name}, {kind}" for name, kind in zip(frame.name, frame.kind, strict=True)]
    regressor = brief().fit(texts, price)
    assert regressor.reader_.target is None and regressor.reader_.texts({"text": ["a chair is"]}) == ["a chair is"]
    assert regressor.predict(texts[:3]).shape == (3,)


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
        asked = [of_none, "a lamp", "never seen", "the very last", "a lamp, almost new"]
        medians = made.predict(asked, "median")
        assert np.isfinite(medians).all() and made.predict([of_none], "median") == pytest.approx(medians[:1], rel=1e-4)
        assert alone.predict(asked[1:], "median") == pytest.approx(medians[1:], rel=1e-4)
        for held in (np.array(asked, dtype=object), pd.Series(asked), pd.Series(asked, dtype="string")):
            assert made.predict(held, "median") == pytest.approx(medians)


def test_a_row_without_anything_to_predict_from_is_not_kept(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer)
    nothing = encode_rows([Row("prompt", "row 2", {"prompt": "", "value": 1.0})], model.processor)[0]
    first, last = prompts(model, 2)
    examples = [first, replace(nothing, learned=[True]), last]
    kept = KeptRows(tmp_path, model)
    for _ in range(2):
        with pytest.raises(ValueError, match="a row's text holds nothing to predict a number from"):
            kept.features(examples)
    assert len(kept.features([examples[0], examples[2]])) == 2


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
    for groups in (
        [*"ab" * 19, None, "c"],
        [*range(38), float("nan"), 1.0],
        pd.Series([*"ab" * 19, None, "c"], dtype="str"),
    ):
        with pytest.raises(ValueError, match="groups, row 39: expected a name, found nothing"):
            brief().fit(texts, range(40), groups=groups)
    names = [row % 8 if row % 2 else f"g{row % 8}" for row in range(40)]
    names[1] = 1.0  # the group 1
    assert (
        len({fold for fold, name in zip(_folds(40, names, np.random.RandomState(0)), names, strict=True) if name == 1})
        == 1
    )
    with pytest.warns(DataConversionWarning):
        brief().fit(texts, pd.DataFrame({"name": range(40)}), groups=names)
    with pytest.raises(ValueError, match=r"Found array with 0 sample\(s\)"):
        made.predict({"column_names": [], "to_pydict": []})
    with pytest.raises(
        ValueError, match="row 2: the number 9.* is too large for float64|column 'text', row 2: the number 9"
    ):
        brief().fit(texts, range(40)).predict(["a", "9" * 400])


def test_a_backbone_by_a_relative_path_is_found_from_elsewhere(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(folder).parent)
    texts = [f"thing {row}" for row in range(40)]
    made = NumberRegressor(f"./{Path(folder).name}", settings=BRIEF, config=SMALL, random_state=0).fit(texts, range(40))
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
    np.testing.assert_array_equal(again.predict(frame, "quantiles"), before)
    np.testing.assert_array_equal(again.predict(frame), mean)
    pickled = pickle.dumps(regressor)
    assert b"backbone.model" not in pickled
    other = pickle.loads(pickled)
    np.testing.assert_array_equal(other.predict(frame, "quantiles"), before)
    np.testing.assert_array_equal(other.predict(frame), mean)
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


def test_what_is_chosen_is_told_and_kept(brief, monkeypatch, capsys, tmp_path):
    import causalqwen.sklearn as module

    def learn(model, learned, held, output, settings, say):
        output.mkdir(parents=True, exist_ok=True)
        (output / "choice.json").write_text('{"chosen": {"axis": "log"}, "tried": []}')
        say("chosen: the log axis")
        return {"crps": 1.0}

    frame, price = products(20)
    brief(experts=False).fit(frame, price)
    assert "chosen" not in capsys.readouterr().err
    monkeypatch.setattr(module, "learn", learn)
    brief(experts=False).fit(frame, price)
    assert "chosen" not in capsys.readouterr().err
    regressor = brief(experts=False, verbose=True).fit(frame, price)
    assert "chosen: the log axis\n" in capsys.readouterr().err
    regressor.save(tmp_path / "saved")
    for one in (regressor, NumberRegressor.load(tmp_path / "saved"), pickle.loads(pickle.dumps(regressor))):
        assert one.choice_ == {"chosen": {"axis": "log"}, "tried": []}


def test_a_loaded_regressor_reads_its_rows_here(brief, tmp_path):
    frame, price = products(20)
    regressor = brief(experts=False, cache_dir=str(tmp_path / "rows")).fit(frame, price)
    regressor.workers = 2
    regressor.save(tmp_path / "saved")
    shutil.rmtree(tmp_path / "rows")
    again = NumberRegressor.load(tmp_path / "saved")
    assert (again.workers, again.cache_dir) == (0, None) and len(again.predict(frame)) == 20
    assert not (tmp_path / "rows").exists()


def test_rows_longer_than_the_context_are_cut_before_the_question(brief):
    frame, price = products(20)
    long = frame.assign(name=["1 2 3 4 5 6 7 8 9 " * 60] * 20)
    regressor = brief(text_columns=["name"]).fit(long, price)
    made = regressor._examples(table_of(long), np.zeros((20, 1)), np.zeros(20))
    assert max(len(one) for one in made) <= 256
    told = regressor.model_.processor.decode(made[0].input_ids[:-1], made[0].numeric_values[:-1])
    assert told.endswith("; price:") and told.count("price") == 1


def test_groups_are_never_on_both_sides_and_weights_draw_rows(brief, monkeypatch):
    import causalqwen.sklearn as module

    seen = {}

    def learn(model, learned, held, *args, **kwargs):
        seen["learned"], seen["held"] = ([one.numeric_labels[-1] for one in part] for part in (learned, held))
        return {}

    monkeypatch.setattr(module, "learn", learn)
    frame, _ = products()
    groups = np.arange(60) // 4
    brief().fit(frame, np.arange(60.0), groups=[f"g{group}" for group in groups])
    sides = [{groups[int(value)] for value in seen[part]} for part in ("learned", "held")]
    assert not sides[0] & sides[1] and len(sides[1]) == 3
    weights = np.array([0.0, 2.0, 1.0] * 20)
    brief().fit(frame, np.arange(60.0), sample_weight=weights)
    taken = sorted(int(value) for value in seen["learned"] + seen["held"])
    assert not any(value % 3 == 0 for value in taken) and set(range(1, 60, 3)) <= set(taken)
    held = module.fit_experts

    def fit_experts(rows, values, *args, **given):
        assert [one.split()[-1] for one in rows.columns[0]] == [str(int(value)) for value in values]
        return held(rows, values, *args, **given)

    with monkeypatch.context() as spied:
        spied.setattr(module, "fit_experts", fit_experts)
        brief().fit(frame, np.arange(60.0), sample_weight=weights)
    with pytest.raises(ValueError, match="n_samples=60 in 3 groups are too few"):
        brief().fit(frame, np.arange(60.0), groups=np.arange(60) % 3)
    with pytest.raises(ValueError, match="sample_weight: 1 rows count, too few to part them in 5"):
        brief().fit(frame, np.arange(60.0), sample_weight=np.eye(60)[7])
    with pytest.raises(ValueError, match="expected one group per row, got 2 for 60"):
        brief().fit(frame, np.arange(60.0), groups=[1, 2])


def test_rows_are_not_read_again_in_another_fold(brief, monkeypatch, tmp_path):
    read, taken = [], features.token_facts
    texts = lambda some: [tuple(one.input_ids) for one in some]  # noqa: E731
    monkeypatch.setattr(features, "token_facts", lambda m, some, **kw: read.extend(texts(some)) or taken(m, some, **kw))
    frame, price = products()
    search = GridSearchCV(brief(cache_dir=str(tmp_path)), {"experts": [False, True]}, cv=2)
    search.fit(frame, price)
    assert len(read) == len(set(read)) < 75 and search.best_params_ == {"experts": search.best_estimator_.experts}
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
    settings = {"values": {"epochs": 1}, "evaluations": 1}
    weighted = "check_sample_weight_equivalence_on_dense_data"  # whole rows are drawn: a weight of 2 is no second row
    found = check_estimator(
        NumberRegressor(folder, settings=settings, config=SMALL, random_state=0),
        on_skip=None,
        on_fail=None,
        expected_failed_checks={weighted: "rows are drawn by their weights, which is the same on average only"},
    )
    assert {one["check_name"] for one in found if one["status"] != "passed"} <= {"check_array_api_input", weighted}
