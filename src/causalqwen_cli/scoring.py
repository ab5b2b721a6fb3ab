"""Commands that predict and score: predict, evaluate, benchmark, demo, doctor."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from causalqwen_cli.base import (
    AsJson,
    Device,
    Made,
    Model,
    benchmark,
    command,
    config_fields,
    figures_line,
    say,
    show,
)


@command
def predict(
    model: Model,
    input: Annotated[
        Path, typer.Option(help="Rows (JSONL, CSV, Parquet): prompts, or texts whose numbers are predicted.")
    ],
    output: Annotated[
        Path,
        Made((".jsonl", ".parquet")),
        typer.Option(help="JSONL or Parquet file: each row with its predictions; it appears when it is complete."),
    ],
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per forward pass.")] = 32,
    raw: Annotated[
        bool, typer.Option(help="Give the intervals of the model's own law, without recalibration.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stopped run of the same output.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Predict numbers as distributions, row by row, also by a model of `fit`; files may be larger than memory."""
    from causalqwen.evaluation.predict import check_output

    check_output(output)
    if (model / "estimator.json").is_file():
        from causalqwen_cli.tables import predict_table

        if resume:
            raise ValueError("--resume is for files of rows; a table is predicted at once")
        count, scored = predict_table(model, input, output, raw=raw, device=device)
        show_predicted(output, count, scored, as_json)
        return
    from causalqwen.data import stream_rows
    from causalqwen.evaluation import predict_file
    from causalqwen.modeling.backbones import bf16_pays
    from causalqwen.modeling.loading import load_model
    from causalqwen.modeling.prediction import Scored

    total = sum(1 for _ in stream_rows(input))  # a row that cannot be read stops the run here
    loaded = load_model(model, device)
    loaded.bf16 = bf16_pays(loaded)
    scored = Scored()
    count = predict_file(
        loaded, input, output, batch_size=batch_size, raw=raw, resume=resume, total=total, scored=scored
    )
    show_predicted(output, count, scored, as_json)


def show_predicted(output: Path, count: int, scored: Any, as_json: bool) -> None:
    """What was written, and in one sentence how good it is where the rows hold the values."""
    text = f"{output}: {count} rows" + (f"; {scored}" if scored.plain else "")
    show({"output": str(output), "rows": count, "scored": scored.plain}, text, as_json)


@command
def evaluate(
    model: Model,
    output: Annotated[Path, Made(whole="metrics.json"), typer.Option(help="Folder for metrics.json and report.html.")],
    data: Annotated[Path | None, typer.Option(help="JSONL rows to score numbers on.")] = None,
    language: Annotated[
        Path | None, typer.Option(help="Plain text to score the language on, beside the backbone.")
    ] = None,
    train: Annotated[Path | None, typer.Option("--train", help="Rows to fit the rivals on.")] = None,
    validation: Annotated[
        Path | None, typer.Option(help="Rows whose errors give the rivals' forecasts their width.")
    ] = None,
    unit: Annotated[str, typer.Option(help="Unit of the values, for the axes.")] = "units of the data",
    texts: Annotated[
        int, typer.Option(min=0, help="With --language: prompts to continue for the curves; 0 for none.")
    ] = 24,
    seed: Annotated[int, typer.Option(help="With --language: seed of all draws.")] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score a model on rows, beside rivals fitted on the training rows, or its language on a text; with a report."""
    from causalqwen.data import encode_rows, stream_rows
    from causalqwen.data.texts import read_text
    from causalqwen.evaluation.evaluate import evaluate as score
    from causalqwen.evaluation.evaluate import write_metrics
    from causalqwen.evaluation.predict import classes_of_rows
    from causalqwen.extras import extra
    from causalqwen.modeling.loading import load_model

    with extra("evaluate", "causalqwen evaluate"):
        from causalqwen.evaluation import figures
        from causalqwen.evaluation.language import evaluate_language, language_facts
        from causalqwen.evaluation.report import class_rows, table_rows, value_figures, write_report

    if data is None and language is None:
        raise ValueError("nothing to score: give --data or --language")
    if (train is None) != (validation is None):
        raise ValueError("rivals need both --train and --validation")
    if train is not None and data is None:
        raise ValueError("rivals need --data")
    files = [path for path in (data, train, validation) if path is not None]
    rows = [list(part) for part in [stream_rows(path, values_required=True) for path in files]]
    words = read_text(language) if language is not None else ""
    loaded = load_model(model, device)
    limit = loaded.config.context_length
    if data is not None:
        classes_of_rows(loaded, rows[0])  # an unknown class stops the run here
    metrics: dict[str, Any] = {}
    content: dict[str, Any] = {}
    facts, lead = [], []
    if data is not None:
        examples = [encode_rows(part, loaded.processor, limit) for part in rows]
        rivals = {"train_examples": examples[1], "validation_examples": examples[2]} if train else {}
        result = score(loaded, examples[0], output / "work", **rivals)
        metrics, values = result["metrics"], result["values"]
        lead.append(f"{len(rows[0]):,} rows, {len(values['value']):,} numbers")
        facts.append(figures_line(metrics))
        if len(values["value"]):
            content |= value_figures(result["law"], values, unit)
            content |= {"rows": table_rows(metrics), "classes": class_rows(metrics)}
            content["classes_note"] = (
                "Numbers of rows that name a class. Intervals of a class with levels of its own were recalibrated on its own "
                "validation rows, the others on all of them."
            )
            content["table_note"] = (
                "In the units of the data; CRPS from 199 quantiles with one clip for all. Lower is better for errors and CRPS, "
                "higher for the log score."
            )
    if language is not None:
        of_language = evaluate_language(loaded, words, texts=texts, seed=seed, say=say)
        metrics = metrics | {"language": of_language}
        lead.append(f"{of_language['tokens']:,} tokens of text")
        facts += language_facts(of_language)
        content["language"] = figures.language(of_language)
    output.mkdir(parents=True, exist_ok=True)
    write_metrics(output / "metrics.json", metrics)
    names = " and ".join(path.name for path in (data, language) if path is not None)
    write_report(
        output / "report.html",
        title=f"{model.name} on {names}",
        lead=", ".join(lead) + ".",
        facts=facts,
        footer="Made by `causalqwen evaluate`.",
        **content,
    )
    told = "\n".join(facts)
    show({"output": str(output), "metrics": metrics}, f"{told}\n{output / 'report.html'}", as_json)


def speed(
    output: Annotated[Path, Made(whole=""), typer.Option(help="Folder for speed.json and speed.svg.")] = Path(
        "runs/speed"
    ),
    parts: Annotated[
        str,
        typer.Option(
            help="Any of loss, growth, generate, ways, epochs, tokenizer, with commas; the others' results stay."
        ),
    ] = "loss,growth,generate,ways,epochs,tokenizer",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count; medians are taken over them.")] = 3,
    backbone: Annotated[str, typer.Option(help="Backbone of generate, ways, epochs and tokenizer.")] = "smollm2-135m",
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Toy sizes: does every case run? (a minute)")] = False,
    as_json: AsJson = False,
) -> None:
    """Time each case beside its rival, taking turns, as ratios: loss, generation, epoch, tokenizer (an hour on two cores)."""
    from causalqwen.extras import extra
    from causalqwen.files import write_text

    with extra("benchmark", "causalqwen benchmark"):
        from causalqwen.evaluation import figures
        from causalqwen.evaluation.speed import PARTS, Sizes, benchmark_speed, speed_table

    asked = tuple(part.strip() for part in parts.split(","))
    if unknown := [part for part in asked if part not in PARTS]:
        raise ValueError(f"unknown parts {', '.join(unknown)}; known: {', '.join(PARTS)}")
    sizes = Sizes.quick() if quick else Sizes.full()
    results = benchmark_speed(output, asked, repeats, backbone=backbone, device=device, sizes=sizes, say=say)
    write_text(output / "speed.svg", figures.speed(results))
    show({"output": str(output), "speed": results}, f"{speed_table(results)}\n{output / 'speed.svg'}", as_json)


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
            help="Any of constant, ridge, mlp, boosting, ngboost-normal, ngboost-laplace, lora-digits, lora-digits-ntl, "
            "regressor, causalqwen, with commas (default: all)."
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
    joint: Annotated[bool, typer.Option("--joint", help="Also train one model for all these tables.")] = False,
    bf16: Annotated[
        bool | None,
        typer.Option(help="Run the backbone in bfloat16, for all methods alike (default: where that is faster)."),
    ] = None,
    backbone: Annotated[str, typer.Option(help="Backbone of all methods that have one.")] = "smollm2-135m",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A field of CausalQwenConfig for every graft; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score distributions of numbers from text, beside what people would use instead (many hours; a stopped run goes on)."""
    from functools import partial

    from causalqwen.data.tables import records_of, split_records
    from causalqwen.extras import extra
    from causalqwen.files import write_text
    from causalqwen.modeling.backbones import bf16_pays
    from causalqwen_cli.tables import named as columns_named

    with extra("benchmark", "causalqwen benchmark"):
        from causalqwen.evaluation import figures
        from causalqwen.evaluation.numbers_benchmark import (
            JOINT,
            METHODS,
            Benchmark,
            graft,
            markdown,
            real_table,
            summary,
        )

    asked = [name.strip() for name in methods.split(",")] if methods else [name for name in METHODS if name != JOINT]
    asked += [JOINT] if joint and JOINT not in asked else []
    named = [name.strip() for name in tables.split(",")]
    fields = config_fields(settings)
    sizes = _sizes(rows)
    read = partial(real_table, rows=sizes, skip=skip)
    if (table is None) != (target is None):
        raise ValueError("a table of your own needs --table and --target")
    if table is None and (text or groups):
        raise ValueError("--text and --groups are for a table of your own: give --table")
    if table is not None:
        records = records_of(table, target, text=columns_named(text), groups=groups)
        parts = split_records(table.name, records, sizes, skip)
        named, read = [table.stem], lambda name: (target, parts)  # type: ignore[assignment]
    make = partial(graft, backbone)
    read_so = bf16_pays(make()) if bf16 is None else bf16
    made = Benchmark(output, named, backbone, make, read, fields, text=columns_named(text), bf16=read_so, say=say)
    made.run(asked, seeds)
    results = summary(made, METHODS, seeds)
    write_text(output / "numbers.json", json.dumps(results, indent=1) + "\n")
    write_text(output / "numbers.md", markdown(results))
    write_text(output / "numbers.svg", figures.numbers(results))
    show({"output": str(output), "numbers": results}, f"{markdown(results)}\n{output / 'numbers.svg'}", as_json)


def _sizes(rows: str) -> tuple[int, ...]:
    sizes = tuple(int(size) if re.fullmatch("[0-9]+", size.strip()) else 0 for size in rows.split(","))
    if len(sizes) != 3 or min(sizes) < 2:
        raise ValueError(f"--rows takes three sizes from 2 on, like 800,200,400, not {rows!r}")
    return sizes


command(speed, benchmark)
command(numbers, benchmark)


@command
def demo(
    output: Annotated[
        Path | None,
        Made(whole=""),
        typer.Option(help="Folder for data, model and report (default: runs/demo, or runs/quick)."),
    ] = None,
    backbone: Annotated[str, typer.Option(help="Backbone to graft.")] = "smollm2-135m",
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute: graft, a number, three people, a counterfactual; no report.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Boiling points on a real language model: graft, train, score, generate, report (minutes on two cores)."""
    from causalqwen.extras import extra
    from causalqwen.modeling.backbones import DEFAULT_BACKBONE, fetch_default_backbone

    output = output or Path("runs/quick" if quick else "runs/demo")
    if not quick:
        with extra("demo", "the whole demo"):
            from causalqwen.evaluation.demo import run_demo, summary
    if backbone == DEFAULT_BACKBONE:
        fetch_default_backbone(say)
    if quick:
        from causalqwen.evaluation.quick import quick_demo

        told = quick_demo(
            output, backbone, tell=(lambda text: None) if as_json else (lambda text: show({}, text, False))
        )
        if as_json:
            show(told, "", True)
        return
    metrics = run_demo(output, backbone, say=say)
    report = output / "report.html"
    text = f"{summary(metrics)}\nThe report is in {report.resolve()}"
    show({"report": str(report), "metrics": metrics}, text, as_json)


@command
def doctor(
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Fetch the default backbone (98 MB) if it is missing.")
    ] = False,
    scan: Annotated[
        Path | None, typer.Option(help="Folder of a saved model: does it hold known files alone, and no code?")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What is installed, what is missing, and what to do about it; or what a saved model's folder holds."""
    from causalqwen_cli.doctor import examine

    if scan is not None:
        from causalqwen.modeling.loading import check_files

        check_files(scan)
        show({"ok": True, "model": str(scan)}, f"{scan} holds the files of a saved model and nothing else", as_json)
        return
    report = examine(fetch, say)
    lines = [
        f"{'ok' if check['ok'] else 'MISSING' if check['needed'] else 'absent':7} {check['what']}: {check['found']}"
        for check in report["checks"]
    ]
    show(report, "\n".join(lines), as_json)
    if not report["ok"]:
        raise typer.Exit(1)
