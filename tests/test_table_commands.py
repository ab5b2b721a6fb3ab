"""Tables on the command line: fit and predict."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from causalqwen.data.columns import Column, ColumnError, names_of, read_table, table_of
from causalqwen.sklearn import NumberRegressor
from test_cli import run
from test_tables import folder, products  # noqa: F401  a fixture


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "products.csv"
    frame, price = products()
    frame.assign(price=price, shop=[f"s{row // 3}" for row in range(60)]).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def model(folder, table, tmp_path_factory):  # noqa: F811
    work = tmp_path_factory.mktemp("fit")
    (work / "wide.yaml").write_text("support: [0, null]\n")
    given = ("--text", "name,kind", "--groups", "shop", "--seed", 3, "--characters", 300, "--device", "cpu")
    kept = ("--cache", work / "rows", "--backbone", folder, "--config", work / "wide.yaml", "--bf16")
    told = run("fit", table, "--target", "price", "--output", work / "model", *given, *kept, "--json")
    result = json.loads(told.stdout)
    assert result["columns"] == {"name": "text", "kind": "text", "weight": "number", "sold": "date"}
    assert 0 < result["metrics"]["crps"] < 20 and any((work / "rows").iterdir())
    return work / "model"


def test_a_table_is_fitted_and_predicted_in_every_format(model, table, tmp_path):
    frame, price = products(6, seed=1)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    price[5] = -1e308  # far from where any price may lie
    frame.assign(price=price, sold=frame.sold.astype(str)).to_json(
        tmp_path / "rows.jsonl", orient="records", lines=True
    )
    frame.to_parquet(tmp_path / "rows.parquet")
    found = {}
    for suffix in ("csv", "jsonl", "parquet"):
        out = tmp_path / f"{suffix}-out.jsonl"
        run("predict", "--model", model, "--input", tmp_path / f"rows.{suffix}", "--output", out, "--device", "cpu")
        found[suffix] = [json.loads(line, parse_constant=pytest.fail) for line in out.read_text().splitlines()]
    assert found["jsonl"][5]["crps"] is None
    plain, known = found["csv"][2], found["jsonl"][2]
    assert plain["name"] == frame.name[2] and set(plain["intervals"]) == {"0.5", "0.8", "0.9"}
    assert known["mean"] == pytest.approx(plain["mean"]) == pytest.approx(found["parquet"][2]["mean"])
    assert known["price"] == pytest.approx(price[2]) and known["crps"] > 0 and "crps" not in plain
    by_frame = NumberRegressor.load(model).predict(frame[["sold", "weight", "kind", "name"]])  # in an order of its own
    assert by_frame == pytest.approx([row["mean"] for row in found["csv"]])
    source = tmp_path / "rows.csv"
    over = run("predict", "--model", model, "--input", source, "--output", source, code=1)
    assert "name it .jsonl or .parquet" in over.stderr
    out = tmp_path / "out.parquet"
    base = ("predict", "--model", model, "--input", tmp_path / "rows.csv", "--device", "cpu", "--output")
    run(*base, out, "--raw")
    assert read_table(out)["median"] == pytest.approx([row["median"] for row in found["csv"]])
    assert "exists already" in run(*base, out, code=1).stderr
    assert "--resume is for files of rows" in run(*base, tmp_path / "other.parquet", "--resume", code=1).stderr


def test_a_column_that_does_not_fit_gets_one_error_with_its_name(model, table, tmp_path):
    frame, price = products(6)

    def told(changed) -> str:
        changed.to_csv(tmp_path / "rows.csv", index=False)
        base = ("predict", "--model", model, "--input", tmp_path / "rows.csv", "--output", tmp_path / "out.jsonl")
        return run(*base, code=1).stderr

    assert "column 'kind' is missing" in told(frame.drop(columns="kind"))
    assert "column 'height' was not there" in told(frame.assign(height=1))
    heavy = frame.assign(weight=frame.weight.astype(object).where(frame.index != 4, "heavy"))
    fitted = "as it was when the model was fitted"
    assert f"column 'weight', row 5: expected a number, {fitted}, found 'heavy'" in told(heavy)
    comma = frame.assign(price=price.astype(object).where(price.index != 1, "1,50"))
    assert "column 'price', row 2: expected a number, found '1,50'" in told(comma)
    lost = run("fit", table, "--target", "cost", "--output", tmp_path / "x", code=1).stderr
    assert "there is no column 'cost'" in lost
    assert "exists already" in run("fit", table, "--target", "price", "--output", model, code=1).stderr


def test_columns_called_as_a_prediction_are_kept_and_rows_without_a_target_predicted(model, tmp_path):
    """In Parquet too, whose first row does not say what others hold; whole numbers as they stand."""
    frame, price = products(4)
    made = NumberRegressor.load(model)
    renamed = {"name": "name", "kind": "crps", "weight": "input_crps", "sold": "mean"}
    columns = [replace(column, name=renamed[column.name]) for column in made.reader_.columns]
    made.reader_ = replace(made.reader_, columns=tuple(columns))
    made.save(tmp_path / "renamed")
    frame = frame.rename(columns=renamed).assign(price=price.where(price.index != 0))
    frame.input_crps = 10**16 + frame.index
    frame.to_csv(tmp_path / "rows.csv", index=False, na_rep="NA")
    base = ("predict", "--model", tmp_path / "renamed", "--input", tmp_path / "rows.csv", "--output")
    run(*base, tmp_path / "out.jsonl")
    run(*base, tmp_path / "out.parq")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["input_crps"] for line in lines] == [10**16 + row for row in range(4)]
    assert [line["input_input_crps"] for line in lines] == frame.crps.tolist()
    assert [line["input_mean"] for line in lines] == frame["mean"].dt.strftime("%Y-%m-%d").tolist()
    assert lines[0]["price"] is None and "crps" not in lines[0] and lines[1]["crps"] > 0
    table = read_table(tmp_path / "out.parq")
    assert table["crps"] == [None, *pytest.approx([line["crps"] for line in lines[1:]]).expected]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("".join(json.dumps(line | {"name": row or "x"}) + "\n" for row, line in enumerate([{}, {}])))
    base = ("predict", "--model", tmp_path / "renamed", "--input", mixed, "--output", tmp_path / "mixed.parquet")
    assert "column 'name': no Parquet file holds it (" in run(*base, code=1).stderr


def test_what_a_file_holds_is_said_before_anything_is_fitted(tmp_path, monkeypatch):
    """A target that is no number by its own row; a row without a group; words among numbers."""
    monkeypatch.setattr(NumberRegressor, "fit", lambda self, columns, values, groups: 1 / 0)
    rows = [f"thing {row},{row}.5,{row},g{row}" for row in range(40)]
    base = ("fit", tmp_path / "t.csv", "--target", "price", "--output", tmp_path / "x")

    def told(row: str, *words: str) -> str:
        (tmp_path / "t.csv").write_text("\n".join(["name,weight,price,shop", *rows, row]) + "\n")
        return run(*base, *words, code=1).stderr

    assert "column 'price', row 41: expected a number to learn, found 'about 7'" in told("a,1,about 7,g")
    assert "column 'price', row 41: expected a number to learn, found nothing" in told("a,1,NA,g")
    assert "column 'shop', row 41: expected a name, found nothing" in told("a,1,7,", "--groups", "shop")
    given = []
    monkeypatch.setattr(NumberRegressor, "fit", lambda self, columns, values, groups: given.append(groups) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        told(f"a,{2**70},7,{2**70}", "--groups", "weight")
    assert given[0][:2] == ["0.5", "1.5"] and given[0][-1] == str(2**70)
    lines = []
    monkeypatch.setattr("causalqwen_cli.tables.say", lines.append)
    for row, words, found in (("about 1", (), True), ("about 1", ("--text", "weight"), False), ("NA", (), False)):
        with pytest.raises(ZeroDivisionError):
            told(f"a,{row},7,g", *words)
        said = "column 'weight' is read as words: 40 of 41 cells are numbers, but row 41 says 'about 1'"
        assert (said in lines) == found
        lines.clear()


def test_precision_and_workers_of_the_command_are_those_of_the_class(table, tmp_path, monkeypatch):
    made = []
    base = ("fit", table, "--target", "price", "--output", tmp_path / "x", "--backbone", "nowhere")
    monkeypatch.setattr(NumberRegressor, "fit", lambda self, *given, **named: made.append(self) or 1 / 0)
    for words in ((), ("--bf16",), ("--no-bf16", "--workers", 2, "--cache", tmp_path)):
        with pytest.raises(ZeroDivisionError):
            run(*base, *words)
    assert [(one.bf16, one.workers) for one in made] == [("auto", 0), (True, 0), (False, 2)] and made[0].verbose
    monkeypatch.undo()
    assert "workers need cache_dir" in run(*base, "--workers", 2, code=1).stderr


def test_a_decimal_comma_is_found_said_and_kept(folder, tmp_path):  # noqa: F811
    """In the target too; and what is predicted later is read as what was learned, however few rows there are."""
    rows = [(row, f"{row % 7},{row % 10}5", f"{1000 + 50 * row:,}".replace(",", ".")) for row in range(60)]
    text = "".join(f'{row};"{size} kg";{price}\n' for row, size, price in rows)
    (tmp_path / "t.csv").write_text("row;size;price\n" + text)
    base = ("fit", tmp_path / "t.csv", "--target", "price", "--backbone", folder)
    told = run(*base, "--output", tmp_path / "m").stderr
    would = "'1.000' is 1000 (with a decimal point, '1.000' would be 1)"
    assert f"column 'price' is read with a decimal comma: {would}" in told
    assert "column 'size' is read with a decimal comma: '0,05 kg' is 0.05" in told
    made = NumberRegressor.load(tmp_path / "m")
    assert made.reader_.known["size"].decimal == "," and made.model_.value_law.value_range[0] >= 1000
    (tmp_path / "new.csv").write_text("row;size;price\n3;1.234;1.150\n")
    asked = ("predict", "--model", tmp_path / "m", "--input", tmp_path / "new.csv", "--output", tmp_path / "p.jsonl")
    said = "column 'size': 1 rows hold what no training row did; it is read as the nearest that one did, and intervals widen"
    assert said in run(*asked).stderr
    (line,) = (tmp_path / "p.jsonl").read_text().splitlines()
    assert json.loads(line)["price"] == 1150 and abs(json.loads(line)["crps"]) < 1500
    assert made.reader_.outside(made.reader_.checked({"row": [3], "size": ["1.234"]})).keys() == {"size"}
    refused = run(*base, "--output", tmp_path / "n", "--decimal", ";", code=1).stderr
    assert "expected '.', ',' or 'auto', got ';'" in refused


def test_files_that_are_no_tables_are_told(tmp_path):
    for name, text, told in (
        ("a.csv", "a,b\n1\n", "a.csv, row 1: 1 cells, and the header has 2"),
        ("b.csv", "a,a\n1,2\n", "b.csv: column 'a' is there twice"),
        ("c.csv", "a,b\n", "c.csv holds no rows"),
        ("d.jsonl", "[1]\n", "d.jsonl, row 1: expected an object of columns"),
        ("e.jsonl", "{\n", "e.jsonl, row 1: not JSON"),
        ("f.parquet", "no", "f.parquet: "),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ColumnError, match=told):
            read_table(tmp_path / name)
    (tmp_path / "g.csv").write_text("code,n\n01234,1.5\n,2\n")
    assert read_table(tmp_path / "g.csv") == {"code": ["01234", None], "n": [1.5, 2.0]}


def test_a_file_holds_what_pandas_reads_of_it(tmp_path):
    """Whole numbers to the last digit, what is true, and what stands for nothing; by names of files in any case."""
    text = "id,on,some,word,text\n1234567890123456789,True,NA,x,1.50\n7,False,1.5,null,2\n"
    (tmp_path / "a.csv").write_text(text)
    found = read_table(tmp_path / "a.csv", {"text": Column("text", "text")})
    frame = pd.read_csv(tmp_path / "a.csv", dtype={"text": str})
    assert found == table_of(frame)
    assert found == {
        "id": [1234567890123456789, 7], "on": [True, False], "some": [None, 1.5], "word": ["x", None], "text": ["1.50", "2"],
    }  # fmt: skip
    assert read_table(tmp_path / "a.csv", {"on": Column("on", "number")})["on"] == [True, False]
    known = {"on": Column("on", "category"), "some": Column("some", "category", seen=("NA",))}
    of_known = read_table(tmp_path / "a.csv", known)
    assert of_known["on"] == ["True", "False"] and of_known["some"] == ["NA", "1.5"]  # as a reader knows them
    (tmp_path / "n.csv").write_text("a,b,c,d,e\n12,07,18446744073709551616,1,1\n12.0,7,3,1\u0663,x\n")
    assert read_table(tmp_path / "n.csv") == {
        "a": [12.0, 12.0], "b": ["07", "7"], "c": [2**64, 3], "d": ["1", "1\u0663"], "e": ["1", "x"],
    }  # fmt: skip
    assert names_of(read_table(tmp_path / "n.csv"), "a") == ["12", "12"]
    as_they_stand = {name: Column(name, "text") for name in "ac"}
    assert names_of(read_table(tmp_path / "n.csv", as_they_stand), "a") == ["12", "12"]
    assert names_of(read_table(tmp_path / "n.csv", as_they_stand), "c") == [str(2**64), "3"]
    (tmp_path / "i.csv").write_text("a,b\n1,x\n-inf,y\n")
    with pytest.raises(ColumnError, match="column 'a', row 2: a number is infinite"):
        read_table(tmp_path / "i.csv")
    shuffled = frame[["id", "some"]].iloc[[1, 0]].set_axis([5, 3])
    for name in ("B.PARQUET", "b.parq"):
        shuffled.to_parquet(tmp_path / name)
        assert read_table(tmp_path / name) == {"id": [7, 1234567890123456789], "some": [1.5, None]}
        index = Column("__index_level_0__", "number")
        assert read_table(tmp_path / name, {index.name: index})[index.name] == [5, 3]
    for name in ("c.JSONL", "c.ndjson", "c.json"):
        (tmp_path / name).write_text('\ufeff{"id": 7}\n', encoding="utf-8")
        assert read_table(tmp_path / name) == {"id": [7]}
    for mark in ";\t":
        (tmp_path / "d.csv").write_text(f'name{mark}price\na{mark}1,5\n"b{mark}"{mark}2\n')
        assert read_table(tmp_path / "d.csv") == {"name": ["a", f"b{mark}"], "price": [1.5, 2.0]}
    (tmp_path / "e.csv").write_text("a;b\n1\n")
    assert read_table(tmp_path / "e.csv") == {"a;b": [1]}
