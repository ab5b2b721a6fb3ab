"""Tables on the command line: fit, predict, and the benchmark on a table of one's own."""

import json

import pytest

from causalqwen.data.columns import ColumnError, read_table
from causalqwen.data.tables import records_of
from causalqwen.evaluation.numbers_benchmark import regressor
from causalqwen.sklearn import NumberRegressor
from test_cli import run
from test_tables import BRIEF as QUICK
from test_tables import SMALL, folder, products  # noqa: F401  a fixture

BRIEF = "values: {epochs: 1, batch_size: 32}\nevaluations: 1\n"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "products.csv"
    frame, price = products()
    frame.assign(price=price, shop=[f"s{row // 3}" for row in range(60)]).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def model(folder, table, tmp_path_factory):  # noqa: F811
    work = tmp_path_factory.mktemp("fit")
    (work / "brief.yaml").write_text(BRIEF)
    given = ("--text", "name,kind", "--groups", "shop", "--seed", 3, "--characters", 300, "--device", "cpu")
    kept = ("--cache", work / "rows", "--backbone", folder, "--config", work / "brief.yaml", "--bf16")
    told = run("fit", table, "--target", "price", "--output", work / "model", *given, *kept, "--json")
    result = json.loads(told.stdout)
    assert result["columns"] == {"name": "text", "kind": "text", "weight": "number", "sold": "date"}
    assert result["metrics"]["num_count"] == 12 and any((work / "rows").iterdir())
    return work / "model"


def test_a_table_is_fitted_and_predicted_in_every_format(model, table, tmp_path):
    frame, price = products(6, seed=1)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.assign(price=price, sold=frame.sold.astype(str)).to_json(
        tmp_path / "rows.jsonl", orient="records", lines=True
    )
    frame.to_parquet(tmp_path / "rows.parquet")
    found = {}
    for suffix in ("csv", "jsonl", "parquet"):
        out = tmp_path / f"{suffix}-out.jsonl"
        run("predict", "--model", model, "--input", tmp_path / f"rows.{suffix}", "--output", out, "--device", "cpu")
        found[suffix] = [json.loads(line) for line in out.read_text().splitlines()]
    plain, known = found["csv"][2], found["jsonl"][2]
    assert plain["name"] == frame.name[2] and set(plain["intervals"]) == {"0.5", "0.8", "0.9"}
    assert known["mean"] == pytest.approx(plain["mean"]) == pytest.approx(found["parquet"][2]["mean"])
    assert known["price"] == pytest.approx(price[2]) and known["crps"] > 0 and "crps" not in plain
    source = tmp_path / "rows.csv"
    over = run("predict", "--model", model, "--input", source, "--output", source, code=1)
    assert "is read by this very command" in over.stderr
    named = run("predict", "--model", model, "--input", source, "--output", tmp_path / "out.csv", code=1)
    assert "name it .jsonl or .parquet" in named.stderr
    out = tmp_path / "out.parquet"
    base = ("predict", "--model", model, "--input", tmp_path / "rows.csv", "--device", "cpu", "--output")
    run(*base, out, "--raw")
    assert read_table(out)["median"] == pytest.approx([row["median"] for row in found["csv"]])
    assert "--resume is for files of rows" in run(*base, out, "--resume", code=1).stderr


def test_a_column_that_does_not_fit_gets_one_error_with_its_name(model, table, tmp_path):
    frame, price = products(6)

    def told(changed) -> str:
        changed.to_csv(tmp_path / "rows.csv", index=False)
        base = ("predict", "--model", model, "--input", tmp_path / "rows.csv", "--output", tmp_path / "out.jsonl")
        return run(*base, code=1).stderr

    assert "column 'kind' is missing" in told(frame.drop(columns="kind"))
    assert "column 'height' was not there" in told(frame.assign(height=1))
    heavy = frame.weight.astype(object).where(frame.index != 4, "heavy")
    assert "column 'weight', row 5: expected a number, as it was when the model was fitted, found 'heavy'" in told(
        frame.assign(weight=heavy)
    )
    assert "column 'price', row 2: expected a number to learn, found nothing" in told(
        frame.assign(price=price.where(price.index != 1))
    )
    assert (
        "there is no column 'cost'" in run("fit", table, "--target", "cost", "--output", tmp_path / "x", code=1).stderr
    )
    assert "exists already" in run("fit", table, "--target", "price", "--output", model, code=1).stderr


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


def test_the_benchmark_runs_on_a_table_of_ones_own(folder, table, tmp_path, monkeypatch):  # noqa: F811
    records = records_of(table, "price", groups="shop")
    assert len(records) == 60 and records[4]["entity"] == "s1" and records[4]["prompt"].endswith("; price:")
    base = ("benchmark", "numbers", "--output", tmp_path, "--seeds", 1)
    own = ("--table", table, "--target", "price", "--text", "name", "--groups", "shop", "--rows", "36,12,12")
    found = run(*base, *own, "--methods", "constant,ridge", "--backbone", folder, "--json")
    assert list(json.loads(found.stdout)["numbers"]["tables"]) == ["products"]
    assert "needs --table and --target" in run(*base, "--table", table, code=1).stderr
    assert "are for a table of your own" in run(*base, "--groups", "shop", code=1).stderr
    asked, sizes = [], []

    def brief(backbone, *, config, **given):
        asked.append(given["text_columns"])
        made = NumberRegressor(backbone, config=config | SMALL, settings=QUICK, **given)
        fit = made.fit
        monkeypatch.setattr(made, "fit", lambda X, y: (sizes.append((len(X["name"]), len(y))), fit(X, y))[1])
        return made

    monkeypatch.setattr(regressor, "NumberRegressor", brief)
    found = run(*base, *own, "--methods", "regressor", "--backbone", folder, "--json")
    methods = json.loads(found.stdout)["numbers"]["tables"]["products"]["methods"]
    assert asked == [["name"]] and set(methods) == {"constant", "ridge", "regressor"}
    assert sizes == [(48, 48)]  # the rows to validate on are learned from too
    of_regressor = methods["regressor"]
    assert of_regressor["crps"] < 0.7 * methods["constant"]["crps"]  # it reads the columns, not their text alone
    assert of_regressor["conformal_0.8"] == of_regressor["cover_0.8"] and "log_score" in of_regressor
