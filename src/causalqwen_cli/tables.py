"""Commands on tables: fit, and what `predict` does with a model that was fitted on one."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from causalqwen_cli.base import AsJson, Device, Made, command, figures_line, say, show


@command
def fit(
    table: Annotated[
        Path, typer.Argument(help="CSV, Parquet or JSON lines: columns of texts, numbers, dates, categories.")
    ],
    target: Annotated[str, Option(help="Column of the number to predict.")],
    output: Annotated[Path, Made(), Option(help="Folder for what is learned; it appears when it is complete.")],
    text: Annotated[str | None, Option(help="Columns that are texts, whatever they look like, with commas.")] = None,
    groups: Annotated[
        str | None, Option(help="Column whose equal values never stand on both sides of a split.")
    ] = None,
    backbone: Annotated[str, Option(help="smollm2-135m, a hub name, or a folder with a decoder.")] = "smollm2-135m",
    config: Annotated[Path | None, Option(help="YAML file of settings (see docs/training.md).")] = None,
    decimal: Annotated[str, Option(help="Decimal mark of numbers, . or , (auto: what each column tells).")] = "auto",
    characters: Annotated[int, Option(min=1, help="Characters of a row's text, at most.")] = 2000,
    bf16: Annotated[bool | None, Option(help="Run the backbone in bfloat16 (default: where that is faster).")] = None,
    cache: Annotated[
        Path | None, Made(whole=""), Option(help="Folder where rows that were read are kept for other runs.")
    ] = None,
    workers: Annotated[
        int, Option(min=0, help="Workers of Ray that read rows into --cache (of the extra ray); 0 reads them here.")
    ] = 0,
    seed: Annotated[int, Option(help="Seed of the split and the training.")] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Learn the distribution of a number from the rows of a table."""
    import yaml

    from causalqwen.sklearn import NumberRegressor
    from causalqwen.training import TrainSettings

    texts = named(text)
    columns, marks, values, of_group = _read(table, target, texts, groups, decimal)
    settings = None
    if config is not None:
        TrainSettings.from_yaml(config)  # a wrong key stops the run here
        settings = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    made = NumberRegressor(
        backbone, target=target, text_columns=texts, settings=settings, characters=characters, decimal=marks,
        bf16="auto" if bf16 is None else bf16, cache_dir=None if cache is None else str(cache), workers=workers,
        device=device, verbose=True, random_state=seed,
    )  # fmt: skip
    made.fit(columns, values, groups=of_group)
    made.save(output)
    kinds = {column.name: column.kind for column in made.reader_.columns}
    listing = "\n".join(f"{name}: {kind}" for name, kind in kinds.items())
    scores = figures_line(made.metrics_, words=False)
    about = {"model": str(output), "columns": kinds, "metrics": made.metrics_, "choice": made.choice_}
    show(about, f"{listing}\n{output}: fitted on {len(values):,} rows; each left out in turn: {scores}", as_json)


def _read(
    table: Path, target: str, texts: list[str], groups: str | None, decimal: str
) -> tuple[dict[str, list], dict[str, str], list[float], list[str] | None]:
    """The columns of a table without target and groups, their decimal marks, the targets, and the groups; how columns are read
    is shown."""
    from causalqwen.data import columns as reading
    from causalqwen.data.cells import mostly_numbers, told_of_decimals, with_numbers

    columns, marks = reading.read_with_decimals(table, reading.as_texts([*texts, groups]), decimal)
    for line in told_of_decimals(columns, {name: mark for name, mark in marks.items() if name == target}):
        say(line)
    if target in marks:
        columns |= with_numbers({target: columns[target]}, {target: marks[target]})
    values = reading.numbers_of(columns, target)
    of_group = reading.names_of(columns, groups) if groups else None
    say(f"{table.name}: {len(values):,} rows, columns {', '.join(columns)}")
    for line in mostly_numbers({name: cells for name, cells in columns.items() if name not in {*texts, *marks}}):
        say(line)
    return columns, marks, values, of_group


def named(columns: str | None) -> list[str]:
    """Names with commas."""
    return [name.strip() for name in columns.split(",")] if columns else []


def predict_table(model: Path, source: Path, output: Path, *, raw: bool, device: str) -> tuple[int, Any]:
    """Each row of a table with its prediction, as `predict` gives one, and its mean. Returns the rows, and those that were
    `Scored`.

    A column that is called as something of the prediction is written as `input_NAME`. ColumnError for one of several types
    where a Parquet file is asked for, which has none.
    """
    from causalqwen.data.columns import ColumnError, numbers_of, read_with_decimals, with_numbers
    from causalqwen.data.rows import arrow_for, kept_beside
    from causalqwen.files import finite, json_line, suffix_of, write_text, writing
    from causalqwen.modeling.prediction import DESCRIBED, Scored, describe_all
    from causalqwen.sklearn import NumberRegressor

    made = NumberRegressor.load(model, device)
    table = with_numbers(*read_with_decimals(source, made.reader_.known, made.decimal))
    target = made.reader_.target or "value"
    has_target = target in table
    known = numbers_of(table, target, some=True)
    to_parquet = suffix_of(output) == ".parquet"
    if to_parquet:
        arrow = arrow_for(output)
        for name, cells in table.items():
            try:
                arrow.array(cells)
            except (arrow.ArrowException, OverflowError) as error:
                why = " ".join(str(error).split())
                raise ColumnError(f"column {name!r}: no Parquet file holds it ({why}); name {output} .jsonl") from None
    for name, far in made.reader_.outside(made.reader_.checked(table)).items():
        held = f"column {name!r}: {int((far > 0).sum()):,} rows hold what no training row did"
        say(f"{held}; it is read as the nearest that one did, and intervals widen")
    full = made.predict(table, "full")
    described = describe_all(full["predictions"], known, raw=raw)
    scored = Scored()
    for entry, value in zip(described, known, strict=True):
        scored.add(entry, value)
    kept = kept_beside(table | ({target: known} if has_target else {}), ("mean", *DESCRIBED))
    rows = [
        {name: cells[row] for name, cells in kept.items()} | {"mean": mean} | described[row]
        for row, mean in enumerate(full["mean"].tolist())
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    if to_parquet:
        every = dict.fromkeys(name for row in rows for name in row)  # the first row may lack what others have
        plain = [finite({name: row.get(name) for name in every}) for row in rows]
        with writing(output) as part:
            arrow.parquet.write_table(arrow.Table.from_pylist(plain), part)
    else:
        write_text(output, "".join(map(json_line, rows)))
    return len(rows), scored
