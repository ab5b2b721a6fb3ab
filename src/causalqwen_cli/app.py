"""`causalqwen`: graft, calibrate, train, predict, generate, evaluate, benchmark, demo, doctor."""

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Numbers with honest uncertainty and individuals who last, grafted onto a pretrained language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

benchmark = typer.Typer(help="Measure this machine's own figures.", no_args_is_help=True)
app.add_typer(benchmark, name="benchmark")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout instead of text.")]
Model = Annotated[Path, typer.Option("--model", help="Folder of a grafted model.")]
Device = Annotated[str, typer.Option(help="Torch device, or auto for an accelerator where there is one.")]


def say(message: str) -> None:
    """A line of progress, on stderr."""
    print(message, file=sys.stderr, flush=True)


def show(result: dict[str, Any], text: str, as_json: bool) -> None:
    """The result on stdout: as JSON, or as text for people."""
    print(json.dumps(result, ensure_ascii=False) if as_json else text, flush=True)


def command(function: Callable, group: typer.Typer = app) -> Callable:
    """Register a command: quiet libraries, and one line on stderr with exit status 1 for a mistake of the user's."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        try:
            function(*args, **kwargs)
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            message = str(error).strip() or type(error).__name__
            print(f"causalqwen: {message}", file=sys.stderr)
            raise typer.Exit(1) from None

    return group.command()(guarded)


@command
def graft(
    backbone: Annotated[str, typer.Option(help="smollm2-135m, a hub name, or a folder with a decoder.")],
    output: Annotated[Path, typer.Option(help="Folder for the grafted model; appears complete.")],
    start: Annotated[str, typer.Option(help="Start values: faithful, documents or minimal.")] = "faithful",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ... (default: as stored).")] = None,
    as_json: AsJson = False,
) -> None:
    """Graft a number channel and an individual onto a pretrained decoder."""
    _refuse_existing(output)
    import torch

    from causalqwen import CausalQwenForCausalLM
    from causalqwen.data.texts import speech_paragraphs
    from causalqwen.evaluation import compare_with_backbone

    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"unknown dtype {dtype}; use float32, bfloat16 or float16")
    say(f"grafting {backbone}")
    model = CausalQwenForCausalLM.from_backbone(backbone, dtype=getattr(torch, dtype) if dtype else None, start=start)
    check = compare_with_backbone(model, speech_paragraphs(numbers=False)[:4])
    own = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("backbone."))
    save_model(model, output)
    config = model.config
    where = "behind the matrix" if config.num_token_appended else "on a free row"
    result = {
        "model": str(output),
        "num_token_id": config.num_token_id,
        "free_rows": len(config.free_token_ids) + (not config.num_token_appended),
        "parameters": own,
        "start": start,
        **check,
    }
    text = (
        f"{output}: <NUM> is token {config.num_token_id} ({where}), {own:,} new parameters; on {check['tokens']} tokens the "
        f"logits equal the backbone's to the last bit on {check['identical_logits']}, the decision on "
        f"{check['agreement']:.1%}"
    )
    show(result, text, as_json)


def save_model(model: Any, output: Path) -> None:
    """Save beside the target and rename."""
    part = output.with_name(f"{output.name}.part-{os.getpid()}")
    model.save_pretrained(part)
    output.parent.mkdir(parents=True, exist_ok=True)
    part.rename(output)


def _refuse_existing(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already; choose another output")
    if output.exists():
        output.rmdir()


@command
def calibrate(
    model: Model,
    text: Annotated[
        Path | None,
        typer.Option(help="Plain text, a few thousand words or more (default: three speeches that come along)."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the calibrated model (default: in place).")] = None,
    threshold: Annotated[
        str, typer.Option(help="predicted from the features, or solved from all scores at every position.")
    ] = "predicted",
    seed: Annotated[int, typer.Option(help="Of the fit.")] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Make one-vs-rest probabilities mean something, and temperature 1 as diverse as the backbone's sampling."""
    from causalqwen.data.texts import read_text
    from causalqwen.modeling.loading import load_model
    from causalqwen.training import CalibrationSettings
    from causalqwen.training import calibrate as fit

    if threshold not in ("predicted", "solved"):
        raise ValueError(f"unknown threshold {threshold}; use predicted or solved")
    if output is not None:
        _refuse_existing(output)
    words = read_text(text)
    loaded = load_model(model, device)
    loaded.config.threshold_shift = threshold  # type: ignore[assignment]
    report = fit(loaded, words, CalibrationSettings(seed=seed), say=say)
    if output is not None:
        save_model(loaded, output)
    else:
        part = model / f"calibrated.part-{os.getpid()}"
        loaded.save_pretrained(part)
        for file in part.iterdir():
            file.replace(model / file.name)
        part.rmdir()
    where = str(output or model)
    told = f"{where}: on {report['tokens']:,} tokens the probabilities sum to {report['sum_median']:.2f} at the median"
    show({"model": where, **report}, f"{told}, within 0.8 to 1.25 on {report['sum_within']:.0%}", as_json)


@command
def train(
    model: Model,
    train: Annotated[Path, typer.Option("--train", help="JSONL rows to train on.")],
    output: Annotated[Path, typer.Option(help="Folder for the trained model, metrics.jsonl and the work on the way.")],
    evaluation: Annotated[Path | None, typer.Option("--eval", help="JSONL rows to choose and recalibrate by.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings (see docs/training.md).")] = None,
    resume: Annotated[bool, typer.Option(help="Take up a killed run in the same output.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Train the number channel (stage 1), and adapters in the backbone where the settings ask for them (stage 2)."""
    from causalqwen.data import encode_rows, read_rows
    from causalqwen.modeling.loading import load_model
    from causalqwen.training import TrainSettings
    from causalqwen.training import train as run

    settings = TrainSettings.from_yaml(config) if config else TrainSettings()
    rows = read_rows(train, values_required=True)
    eval_rows = read_rows(evaluation, values_required=True) if evaluation else []
    loaded = load_model(model, device)
    limit = getattr(loaded.config.text_config, "max_position_embeddings", None)
    examples, eval_examples = (encode_rows(part, loaded.processor, limit) for part in (rows, eval_rows))
    metrics = run(loaded, examples, eval_examples, output, settings, resume=resume)
    text = f"{output}: trained on {len(rows)} rows"
    if metrics:
        text += f"; validation rows: {_figures(metrics)}"
    show({"model": str(output), "metrics": metrics}, text, as_json)


def _figures(metrics: dict[str, Any]) -> str:
    keys = ("median_error", "mae", "crps", "log_score", "num_f1", "accuracy", "backbone_agreement")
    return ", ".join(f"{key.replace('_', ' ')} {metrics[key]:.4g}" for key in keys if key in metrics)


@command
def predict(
    model: Model,
    input: Annotated[Path, typer.Option(help="JSONL rows: prompts, or texts whose numbers are predicted.")],
    output: Annotated[Path, typer.Option(help="JSONL file: each row with its predictions; appears complete.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per forward pass.")] = 32,
    raw: Annotated[bool, typer.Option(help="Intervals of the model's own law, without recalibration.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Predict numbers as distributions, row by row."""
    from causalqwen.data import read_rows
    from causalqwen.evaluation import predict_rows, write_jsonl
    from causalqwen.modeling.loading import load_model

    rows = read_rows(input)
    loaded = load_model(model, device)
    count = write_jsonl(output, predict_rows(loaded, rows, batch_size=batch_size, raw=raw))
    show({"output": str(output), "rows": count}, f"{output}: {count} rows", as_json)


@command
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    preset: Annotated[
        str,
        typer.Option(
            help="standard, causal, noise, shared-individual, shared-noise, individual-only, persona or softmax."
        ),
    ] = "standard",
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="Multiplies whatever is drawn.")] = 1.0,
    noise_temperature: Annotated[
        float | None, typer.Option(help="Multiplies what is drawn of the noise instead (persona: 0.3 and 0.95).")
    ] = None,
    central_mass: Annotated[float | None, typer.Option(help="Draw from the central mass of each law.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Only with the preset softmax.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Only with the preset softmax.")] = None,
    individual: Annotated[Path | None, typer.Option(help="File of an individual who speaks.")] = None,
    save_individual: Annotated[Path | None, typer.Option(help="Keep the individual that the seed draws.")] = None,
    chat: Annotated[
        bool, typer.Option(help="The prompt is a user's message; use the backbone's chat template.")
    ] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a text: deterministically, or by an individual and a noise (the text comes word by word)."""
    from causalqwen import CausalDecoding, Individual, NumberTextStreamer
    from causalqwen.modeling.loading import load_model

    if not prompt.strip():
        raise ValueError("the prompt is empty")
    settings: dict[str, Any] = {"seed": seed, "temperature": temperature, "central_mass": central_mass}
    settings["noise_temperature"] = noise_temperature
    if individual is not None:
        settings["individual"] = Individual.load(individual)
    plan = CausalDecoding.preset(preset, **settings)
    given = {"top_k": top_k, "top_p": top_p}
    samplers: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    loaded = load_model(model, device)
    processor = loaded.processor
    if save_individual is not None:
        if seed is None:
            raise ValueError("--save-individual keeps the individual of a seed: give --seed")
        Individual.from_seed(seed, loaded.config.causal_size).save(save_individual)
    text = prompt
    if chat:
        messages = [{"role": "user", "content": prompt}]
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(text, prompt=not chat, return_tensors="pt").to(loaded.device)
    streamer = None if as_json else NumberTextStreamer(processor, skip_prompt=chat, skip_special_tokens=True)
    result = loaded.generate(
        **inputs, causal_decoding=plan, max_new_tokens=max_new_tokens, streamer=streamer, **samplers
    )
    if not as_json:
        return
    start = inputs["input_ids"].shape[1]
    new_ids, new_values = result.sequences[0, start:], result.numeric_values[0, start:]
    numbers = new_values[new_ids == loaded.config.num_token_id].tolist()
    written = processor.decode(result.sequences[0], result.numeric_values[0], skip_special_tokens=True)
    show({"prompt": prompt, "preset": preset, "seed": seed, "text": written, "numbers": numbers}, "", True)


@command
def abduct(
    model: Model,
    text: Annotated[list[Path], typer.Option(help="File of text that somebody wrote; may be given several times.")],
    output: Annotated[Path, typer.Option(help="File for the individual (safetensors).")],
    name: Annotated[str, typer.Option(help="What to call them.")] = "",
    prior: Annotated[Path | None, typer.Option(help="An individual known already, to be known better.")] = None,
    spread: Annotated[
        float | None, typer.Option(help="Prior standard deviation; by default the likeliest one.", min=1e-6)
    ] = None,
    likelihood: Annotated[str, typer.Option(help="Of the tokens: softmax or ovr.")] = "softmax",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Infer the individual who wrote some texts, and how well they are known."""
    from causalqwen import Individual
    from causalqwen.data.texts import read_text
    from causalqwen.modeling.loading import load_model

    texts = [read_text(path) for path in text]
    before = None if prior is None else Individual.load(prior)
    loaded = load_model(model, device)
    found = loaded.abduct(texts, name=name, prior=before, spread=spread, likelihood=likelihood)
    found.save(output)
    about = {"name": found.name, "evidence": [vars(observed) for observed in found.evidence]}
    show({"output": str(output)} | about, f"{output}: {found}", as_json)


@command
def counterfactual(
    model: Model,
    prompt: Annotated[str, typer.Option(help="What came before the observed text.")],
    text: Annotated[str, typer.Option(help="The observed text.")],
    edit: Annotated[list[str], typer.Option(help="Another prompt, a world; may be given several times.")],
    individual: Annotated[
        Path | None, typer.Option(help="File of who wrote it; by default inferred from the text itself.")
    ] = None,
    noise: Annotated[
        str, typer.Option(help="abduct: keep the noise that explains the text; redraw: draw it anew.")
    ] = "abduct",
    samples: Annotated[int, typer.Option(min=1, help="Worlds per edit.")] = 1,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="By default as many as were observed.")] = None,
    seed: int = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """What the individual behind a text would have written in other worlds; changes are marked word by word."""
    from causalqwen import Individual, Intervention, Observation
    from causalqwen.evaluation.worlds import mark_changes, word_changes
    from causalqwen.modeling.loading import load_model

    if not prompt.strip():
        raise ValueError("the prompt is empty")
    who = None if individual is None else Individual.load(individual)
    loaded = load_model(model, device)
    worlds = loaded.counterfactual_samples(
        Observation(text, prompt),
        [Intervention(prompt=other) for other in edit],
        noise=noise,
        individual=who,
        num_samples=samples,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    found = [
        {
            "prompt": w.prompt,
            "text": w.text,
            "values": w.values[w.values != 0].tolist(),
            "changes": word_changes(text, w.text),
        }
        for of_edit in worlds
        for w in of_edit
    ]
    lines = [f"{mark_changes(prompt, w.prompt)} |{mark_changes(text, w.text)}" for of_edit in worlds for w in of_edit]
    show({"prompt": prompt, "text": text, "worlds": found}, "\n".join(lines), as_json)


@command
def evaluate(
    model: Model,
    output: Annotated[Path, typer.Option(help="Folder for metrics.json and report.html.")],
    data: Annotated[Path | None, typer.Option(help="JSONL rows to score numbers on.")] = None,
    language: Annotated[
        Path | None, typer.Option(help="Plain text to score the language on, beside the backbone.")
    ] = None,
    train: Annotated[Path | None, typer.Option("--train", help="Rows to fit the rivals on.")] = None,
    validation: Annotated[Path | None, typer.Option(help="Rows that give the rivals their spread.")] = None,
    unit: Annotated[str, typer.Option(help="Unit of the values, for the axes.")] = "units of the data",
    texts: Annotated[int, typer.Option(help="With --language: prompts to continue for the curves; 0 for none.")] = 24,
    seed: Annotated[int, typer.Option(help="With --language: of all draws.")] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score a model on rows, beside rivals fitted on the training rows, or its language on a text; with a report."""
    from causalqwen.data import encode_rows, read_rows
    from causalqwen.data.texts import read_text
    from causalqwen.evaluation import figures
    from causalqwen.evaluation.evaluate import evaluate as score
    from causalqwen.evaluation.evaluate import write_metrics
    from causalqwen.evaluation.language import evaluate_language, language_facts
    from causalqwen.evaluation.report import table_rows, value_figures, write_report
    from causalqwen.modeling.loading import load_model

    if data is None and language is None:
        raise ValueError("nothing to score: give --data or --language")
    if (train is None) != (validation is None):
        raise ValueError("rivals need both --train and --validation")
    if train is not None and data is None:
        raise ValueError("rivals need --data")
    files = [path for path in (data, train, validation) if path is not None]
    rows = [read_rows(path, values_required=True) for path in files]
    words = read_text(language) if language is not None else ""
    loaded = load_model(model, device)
    limit = getattr(loaded.config.text_config, "max_position_embeddings", None)
    metrics: dict[str, Any] = {}
    content: dict[str, Any] = {}
    facts, lead = [], []
    if data is not None:
        examples = [encode_rows(part, loaded.processor, limit) for part in rows]
        rivals = {"train_examples": examples[1], "validation_examples": examples[2]} if train else {}
        result = score(loaded, examples[0], output / "work", **rivals)
        metrics, values = result["metrics"], result["values"]
        lead.append(f"{len(rows[0]):,} rows, {len(values['value']):,} numbers")
        facts.append(_figures(metrics))
        if len(values["value"]):
            content |= value_figures(loaded, values, unit) | {"rows": table_rows(metrics)}
            content["table_note"] = (
                "In the units of the data; CRPS from 199 quantiles with one clip for all. Lower is better for errors and CRPS, "
                "higher for the log score."
            )
    if language is not None:
        found = evaluate_language(loaded, words, texts=texts, seed=seed, say=say)
        metrics = metrics | {"language": found}
        lead.append(f"{found['tokens']:,} tokens of text")
        facts += language_facts(found)
        content["language"] = figures.language(found)
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
    output: Annotated[Path, typer.Option(help="Folder for speed.json and speed.svg.")] = Path("runs/speed"),
    parts: Annotated[
        str,
        typer.Option(
            help="Any of loss, growth, generate, ways, epochs, tokenizer, with commas; the others' results stay."
        ),
    ] = "loss,growth,generate,ways,epochs,tokenizer",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count; medians are taken over them.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Each case beside its rival, taking turns, as ratios: loss, generation, an epoch, tokenizer (an hour on two cores)."""
    from causalqwen.evaluation import figures
    from causalqwen.evaluation.speed import PARTS, benchmark_speed, speed_table
    from causalqwen.files import write_text

    asked = tuple(part.strip() for part in parts.split(","))
    if unknown := [part for part in asked if part not in PARTS]:
        raise ValueError(f"unknown parts {', '.join(unknown)}; known: {', '.join(PARTS)}")
    found = benchmark_speed(output, asked, repeats, say)
    write_text(output / "speed.svg", figures.speed(found))
    show({"output": str(output), "speed": found}, f"{speed_table(found)}\n{output / 'speed.svg'}", as_json)


command(speed, benchmark)


@command
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the data, the model and the report.")] = Path("runs/demo"),
    backbone: Annotated[str, typer.Option(help="Backbone to graft.")] = "smollm2-135m",
    as_json: AsJson = False,
) -> None:
    """Boiling points on a real language model: graft, train, score, generate, report (minutes on two cores)."""
    from causalqwen.evaluation.demo import run_demo, summary

    metrics = run_demo(output, backbone, say=say)
    report = output / "report.html"
    text = f"{summary(metrics)}\nThe report is in {report.resolve()}"
    show({"report": str(report), "metrics": metrics}, text, as_json)


@command
def doctor(
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Fetch the default backbone (98 MB) if it is missing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What is installed, what is missing, and what to do about it."""
    from causalqwen_cli.doctor import examine

    report = examine(fetch, say)
    lines = [
        f"{'ok     ' if check['ok'] else 'MISSING'} {check['what']}: {check['found']}" for check in report["checks"]
    ]
    show(report, "\n".join(lines), as_json)
    if not report["ok"]:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the console script."""
    app()
