"""Commands that predict and score: predict, evaluate, demo, doctor."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from causalqwen_cli.base import AsJson, Device, Made, Model, command, figures_line, refuse, say, show


@command
def predict(
    model: Model,
    input: Annotated[
        Path | None, Option(help="Rows (JSONL, CSV, Parquet): prompts, or texts whose numbers are predicted.")
    ] = None,
    output: Annotated[
        Path | None,
        Made((".jsonl", ".parquet")),
        Option(help="JSONL or Parquet file: each row with its predictions; it appears when it is complete."),
    ] = None,
    prompt: Annotated[str | None, Option(help="One prompt in place of rows: its number is printed and drawn.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Rows per forward pass.")] = 32,
    raw: Annotated[bool, Option(help="Give the intervals of the model's own law, without recalibration.")] = False,
    resume: Annotated[bool, Option("--resume", help="Go on with a stopped run of the same output.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Predict numbers as distributions, row by row, also by a model of `fit`; files may be larger than memory."""
    is_fitted = (model / "estimator.json").is_file()
    if prompt is not None:
        refuse((input, output) != (None, None), "--prompt is one row of its own: leave --input and --output out")
        refuse(is_fitted, f"{model} was made by `fit` and reads rows of its table: give --input and --output")
        refuse(not prompt.strip(), "the prompt is empty")
        return _predict_prompt(model, prompt, raw, device, as_json)
    if input is None or output is None:
        raise ValueError("nothing to predict: give --input and --output, or --prompt")
    from causalqwen.evaluation.predict import check_output

    check_output(output)
    if is_fitted:
        from causalqwen_cli.tables import predict_table

        refuse(resume, "--resume is for files of rows; a table is predicted at once")
        count, scored = predict_table(model, input, output, raw=raw, device=device)
    else:
        from causalqwen.data import stream_rows
        from causalqwen.evaluation import predict_file
        from causalqwen.modeling.backbones import bf16_pays
        from causalqwen.modeling.loading import load_model
        from causalqwen.modeling.prediction import Scored

        total = sum(1 for _ in stream_rows(input))  # a row that cannot be read stops the run here
        loaded, scored = load_model(model, device), Scored()
        loaded.bf16 = bf16_pays(loaded)
        how: dict[str, Any] = {"batch_size": batch_size, "raw": raw, "resume": resume}
        count = predict_file(loaded, input, output, total=total, scored=scored, **how)
    text = f"{output}: {count} rows" + (f"; {scored}" if scored.plain else "")
    show({"output": str(output), "rows": count, "scored": scored.plain}, text, as_json)


def _predict_prompt(model: Path, prompt: str, raw: bool, device: str, as_json: bool) -> None:
    """One number on stdout: its median, its intervals and a sketch of its distribution."""
    from causalqwen.evaluation.quick import in_intervals, sketch
    from causalqwen.modeling.loading import load_model
    from causalqwen.modeling.prediction import prediction_to_dict

    (prediction,) = load_model(model, device).predict_number(prompt)
    text = f"{prompt} {prediction}\n{in_intervals(prediction, raw=raw)}\n{sketch(prediction)}"
    show({"prompt": prompt} | prediction_to_dict(prediction, raw=raw), text, as_json)


@command
def evaluate(
    model: Model,
    output: Annotated[Path, Made(whole="metrics.json"), Option(help="Folder for metrics.json and report.html.")],
    data: Annotated[Path | None, Option(help="JSONL rows to score numbers on.")] = None,
    language: Annotated[Path | None, Option(help="Plain text to score the language on, beside the backbone.")] = None,
    train: Annotated[Path | None, Option("--train", help="Rows to fit the rivals on.")] = None,
    validation: Annotated[Path | None, Option(help="Rows whose errors give the rivals' forecasts their width.")] = None,
    unit: Annotated[str, Option(help="Unit of the values, for the axes.")] = "units of the data",
    texts: Annotated[int, Option(min=0, help="With --language: prompts to continue for the curves; 0 for none.")] = 24,
    seed: Annotated[int, Option(help="With --language: seed of all draws.")] = 0,
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

    refuse(data is None and language is None, "nothing to score: give --data or --language")
    refuse((train is None) != (validation is None), "rivals need both --train and --validation")
    refuse(train is not None and data is None, "rivals need --data")
    files = [path for path in (data, train, validation) if path is not None]
    rows = [list(part) for part in [stream_rows(path, values_required=True) for path in files]]
    words = read_text(language) if language is not None else ""
    loaded = load_model(model, device)
    metrics: dict[str, Any] = {}
    content: dict[str, Any] = {}
    facts, lead = [], []
    if data is not None:
        classes_of_rows(loaded, rows[0])  # an unknown class stops the run here
        examples = [encode_rows(part, loaded.processor, loaded.config.context_length) for part in rows]
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
    content |= {"title": f"{model.name} on {names}", "lead": ", ".join(lead) + "."}
    report, footer = output / "report.html", "Made by `causalqwen evaluate`."
    write_page(report, "report.html", facts=facts, metrics=metrics, footer=footer, **content)
    show({"output": str(output), "metrics": metrics}, "\n".join([*facts, str(report)]), as_json)


@command
def demo(
    output: Annotated[
        Path | None,
        Made(whole=""),
        Option(help="Folder for data, model and report (default: runs/demo, or runs/quick)."),
    ] = None,
    backbone: Annotated[str, Option(help="Backbone to graft.")] = "smollm2-135m",
    quick: Annotated[
        bool,
        Option("--quick", help="One to three minutes: graft, a number, three people, a counterfactual; no report."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Boiling points on a real language model: graft, train, score, generate, report (minutes on two cores)."""
    from causalqwen.extras import extra
    from causalqwen.modeling.backbones import DEFAULT_BACKBONE, fetch_default_backbone

    if quick:
        from causalqwen.evaluation.quick import quick_demo
    else:
        with extra("demo", "the whole demo"):
            from causalqwen.evaluation.demo import run_demo, summary
    if backbone == DEFAULT_BACKBONE:
        fetch_default_backbone(say)
    if quick:
        tell = (lambda text: None) if as_json else partial(print, flush=True)
        result = quick_demo(output or Path("runs/quick"), backbone, tell)
        if as_json:
            show(result, "", True)
        return
    output = output or Path("runs/demo")
    metrics, report = run_demo(output, backbone, say=say), output / "report.html"
    text = f"{summary(metrics)}\nThe report is in {report.resolve()}"
    show({"report": str(report), "metrics": metrics}, text, as_json)


@command
def doctor(
    fetch: Annotated[bool, Option("--fetch", help="Fetch the default backbone (98 MB) if it is missing.")] = False,
    scan: Annotated[
        Path | None, Option(help="Folder of a saved model: does it hold known files alone, and no code?")
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
