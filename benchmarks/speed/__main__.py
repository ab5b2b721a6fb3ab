"""`python -m benchmarks.speed`."""

from pathlib import Path
from typing import Annotated

import typer

from causalqwen.extras import extra
from causalqwen_cli.base import Device, Made, command, say

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


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
) -> None:
    """Time each case beside its rival, taking turns, as ratios: loss, generation, epoch, tokenizer (an hour on two cores)."""
    with extra("benchmark", "the benchmark of speed"):
        from benchmarks.speed.report import picture, table
        from benchmarks.speed.run import FULL, QUICK, measure
    from causalqwen.files import write_text

    asked = [part.strip() for part in parts.split(",")]
    results = measure(output, asked, repeats, backbone=backbone, device=device, sizes=QUICK if quick else FULL, say=say)
    write_text(output / "speed.svg", picture(results))
    print(f"{table(results)}\n{output / 'speed.svg'}")


command(speed, app)

if __name__ == "__main__":
    app()
