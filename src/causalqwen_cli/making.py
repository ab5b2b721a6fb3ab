"""Commands that make models and rows: graft, train, synthesize."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from causalqwen_cli.base import AsJson, Device, Made, Model, command, config_fields, in_words, refuse, say, show


@command
def graft(
    output: Annotated[Path, Made(), Option(help="Folder for the grafted model; it appears when it is complete.")],
    backbone: Annotated[str, Option(help="smollm2-135m, a hub name, or a folder with a decoder.")] = "smollm2-135m",
    start: Annotated[
        str, Option(help="Start values: faithful, documents, minimal, ordinary or architecture.")
    ] = "faithful",
    dtype: Annotated[str | None, Option(help="float32, bfloat16, ... (default: as stored).")] = None,
    settings: Annotated[
        list[str] | None,
        Option(
            "--set", help="A field of CausalQwenConfig, in place of the start's: token_thresholds=0.01; repeatable."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        Option(help="Text that a causal_size below the hidden size is fitted to (default: speeches in the package)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Graft a number channel and an individual onto a pretrained decoder."""
    import torch

    from causalqwen import CausalQwenForCausalLM
    from causalqwen.data.texts import read_text, speech_paragraphs
    from causalqwen.modeling.grafting import prove

    known = (None, "float32", "bfloat16", "float16", "float64")
    refuse(dtype not in known, f"unknown dtype {dtype}; use float32, bfloat16 or float16")
    fields = config_fields(settings)
    options = ", ".join(f"--{name}" for name in ("start", "dtype", "text") if name in fields)
    refuse(bool(options), f"--set is for fields of the configuration: {options} is an option of its own")
    say(f"grafting {backbone}")
    dtype_given = getattr(torch, dtype) if dtype else None
    words = read_text(text) if text is not None or fields.get("causal_size") else None
    model = CausalQwenForCausalLM.from_backbone(backbone, dtype=dtype_given, start=start, text=words, **fields)
    proof = prove(model, speech_paragraphs(numbers=False)[:4])
    save_model(model, output)
    config = model.config
    where = "after the matrix" if config.num_token_appended else "on a free row"
    free_rows = len(config.free_token_ids) + (not config.num_token_appended)
    result = {"model": str(output), "num_token_id": config.num_token_id, "free_rows": free_rows, "start": start}
    show(result | asdict(proof), f"{output}: <NUM> is token {config.num_token_id} ({where}); {proof}", as_json)


@command
def train(
    model: Model,
    train: Annotated[Path, Option("--train", help="Rows to train on: JSONL, CSV or Parquet.")],
    output: Annotated[
        Path,
        Made(whole="config.json"),
        Option(help="Folder for the trained model, metrics.jsonl and the work on the way."),
    ],
    evaluation: Annotated[
        Path | None, Option("--eval", help="Rows that are held out and scored; gradients choose and calibrate by them.")
    ] = None,
    config: Annotated[Path | None, Option(help="YAML file of settings (docs/training.md), or `documents`.")] = None,
    resume: Annotated[bool, Option(help="Go on with a stopped run in the same output folder.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Train the number channel (stage 1), and adapters in the backbone where the settings ask for them (stage 2).

    Started by torchrun or `accelerate launch`, all ranks train together.
    """
    from causalqwen.data import EncodedRows, stream_rows
    from causalqwen.modeling.loading import load_model
    from causalqwen.training import TrainSettings, ranks
    from causalqwen.training import train as run

    settings = TrainSettings.from_yaml(config) if config else TrainSettings()
    files = [path for path in (train, evaluation) if path is not None]
    for rows in [stream_rows(path, values_required=True) for path in files]:
        for _ in rows:  # a row that cannot be read stops the run here
            pass
    loaded = load_model(model, ranks.device_of_rank(device))

    def examples(path: Path) -> EncodedRows:
        rows, whole = stream_rows(path, values_required=True), loaded.config.context_length
        return EncodedRows(rows, loaded.processor, whole, assistant_only=settings.assistant_only_loss)

    held_out = [] if evaluation is None else examples(evaluation)
    metrics = run(loaded, examples(train), held_out, output, settings, resume=resume, say=say)
    text = f"{output}: trained on {loaded.trained_on['rows']:,} rows"
    if metrics:
        text += f"; on those held out {in_words(metrics)}"
    if ranks.rank() == 0:
        show({"model": str(output), "metrics": metrics}, text, as_json)
    ranks.leave()


@command
def synthesize(
    output: Annotated[Path, Made((".jsonl",)), Option(help="JSONL file of rows; it appears when it is complete.")],
    kind: Annotated[
        str, Option(help="statements, whose value nothing tells, or questions, whose context holds the answer.")
    ] = "statements",
    count: Annotated[int, Option(min=1, help="How many rows.")] = 1000,
    seed: Annotated[int, Option(help="Seed of the draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make up rows whose truth is known, to test with or to mix into real ones."""
    from causalqwen.data.synthetic import KINDS
    from causalqwen.files import write_text

    refuse(kind not in KINDS, f"unknown kind {kind!r}; use {' or '.join(KINDS)}")
    write_text(output, "".join(json.dumps(row) + "\n" for row in KINDS[kind](count, seed)))
    show({"output": str(output), "rows": count}, f"{output}: {count} {kind}", as_json)


def save_model(model: Any, output: Path) -> None:
    """Save beside the target and rename."""
    from causalqwen.files import writing_folder

    with writing_folder(output) as part:
        model.save_pretrained(part)
