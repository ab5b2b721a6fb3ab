"""Commands that predict and score: predict, evaluate, demo, doctor."""

from pathlib import Path
from typing import Annotated, Any

import typer

from causalqwen_cli.base import AsJson, Device, Made, Model, command, figures_line, say, show


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
        from causalqwen.evaluation import plots
        from causalqwen.evaluation.language import evaluate_language, language_facts
        from causalqwen.evaluation.page import write_page

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
            content |= plots.value_figures(result["law"], values, unit)
    if language is not None:
        of_language = evaluate_language(loaded, words, texts=texts, seed=seed, say=say)
        metrics = metrics | {"language": of_language}
        lead.append(f"{of_language['tokens']:,} tokens of text")
        facts += language_facts(of_language)
        content["language"] = plots.language(of_language)
    output.mkdir(parents=True, exist_ok=True)
    write_metrics(output / "metrics.json", metrics)
    names = " and ".join(path.name for path in (data, language) if path is not None)
    write_page(
        output / "report.html",
        "report.html",
        title=f"{model.name} on {names}",
        lead=", ".join(lead) + ".",
        facts=facts,
        metrics=metrics,
        footer="Made by `causalqwen evaluate`.",
        **content,
    )
    told = "\n".join(facts)
    show({"output": str(output), "metrics": metrics}, f"{told}\n{output / 'report.html'}", as_json)


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
