"""`python -m benchmarks.numbers`."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from causalqwen.extras import extra
from causalqwen_cli.base import Made, command, config_fields, say
from causalqwen_cli.tables import named as columns_named

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def numbers(
    output: Annotated[
        Path,
        Made(whole=""),
        typer.Option(help="Folder for numbers.json, numbers.md and numbers.svg, and for what is kept."),
    ] = Path("runs/numbers"),
    tables: Annotated[
        str, typer.Option(help="Any of boiling, birds-height, birds-speed, breaches, movies, with commas.")
    ] = "boiling,birds-height,birds-speed,breaches,movies",
    methods: Annotated[
        str | None,
        typer.Option(
            help="Any of constant, ngram-ridge, mlp, boosting, boosting-numbers, lora-digits, regressor, causalqwen, with "
            "commas (default: all)."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of every method on every table.")] = 5,
    table: Annotated[Path | None, typer.Option(help="A table of your own (CSV, Parquet, JSON lines) instead.")] = None,
    target: Annotated[str | None, typer.Option(help="With --table: column of the number.")] = None,
    text: Annotated[str | None, typer.Option(help="With --table: columns that are texts, with commas.")] = None,
    groups: Annotated[
        str | None, typer.Option(help="With --table: column whose equal values never stand on both sides of a split.")
    ] = None,
    rows: Annotated[str, typer.Option(help="Rows of a table to train, to validate and to test on.")] = "800,200,400",
    skip: Annotated[
        int, typer.Option(min=0, help="Leave out so many records of a table first, to use rows that no run has seen.")
    ] = 0,
    bf16: Annotated[
        bool | None,
        typer.Option(help="Run the backbone in bfloat16, for all methods alike (default: where that is faster)."),
    ] = None,
    backbone: Annotated[str, typer.Option(help="Backbone of all methods that have one.")] = "smollm2-135m",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A field of CausalQwenConfig for every graft; repeatable.")
    ] = None,
) -> None:
    """Score distributions of numbers from text, beside what people would use instead (many hours; a stopped run goes on)."""
    with extra("benchmark", "the benchmark of numbers"):
        from benchmarks.numbers.report import markdown, picture, summary
        from benchmarks.numbers.run import METHODS, Benchmark, graft
        from benchmarks.numbers.tables import real_table, records_of, split_records
    from causalqwen.files import write_text
    from causalqwen.modeling.backbones import bf16_pays

    asked = [name.strip() for name in methods.split(",")] if methods else METHODS
    names, sizes = [name.strip() for name in tables.split(",")], _sizes(rows)
    read = partial(real_table, rows=sizes, skip=skip)
    if (table is None) != (target is None):
        raise ValueError("a table of your own needs --table and --target")
    if table is None and (text or groups):
        raise ValueError("--text and --groups are for a table of your own: give --table")
    if table is not None:
        records = records_of(table, target, text=columns_named(text), groups=groups)
        parts = split_records(table.name, records, sizes, skip)
        names, read = [table.stem], lambda name: (target, parts)  # type: ignore[assignment]
    make = partial(graft, backbone)
    read_so = bf16_pays(make()) if bf16 is None else bf16
    made = Benchmark(output, names, backbone, make, read, config_fields(settings), columns_named(text), read_so, say)
    made.run(asked, seeds)
    results = summary(made, METHODS, seeds)
    write_text(output / "numbers.json", json.dumps(results, indent=1) + "\n")
    write_text(output / "numbers.md", markdown(results))
    write_text(output / "numbers.svg", picture(results))
    print(f"{markdown(results)}\n{output / 'numbers.svg'}")


def _sizes(rows: str) -> tuple[int, ...]:
    sizes = tuple(int(size) if re.fullmatch("[0-9]+", size.strip()) else 0 for size in rows.split(","))
    if len(sizes) != 3 or min(sizes) < 2:
        raise ValueError(f"--rows takes three sizes from 2 on, like 800,200,400, not {rows!r}")
    return sizes


command(numbers, app)

if __name__ == "__main__":
    app()
