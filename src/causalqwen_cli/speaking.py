"""Commands that write texts: generate, and what individuals would have said."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from causalqwen_cli.base import AsJson, Device, Individuals, Model, Page, command, say, show


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
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Multiplies all noise of the scores, as a softmax sampler's does. Default: 1, the model's own distribution."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="With sample, persona and softmax: the best so many tokens.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="With sample, persona and softmax: the nucleus of this mass.")
    ] = None,
    individual: Annotated[
        Path | None, typer.Option(help="File of the individual who speaks (abduct or --save-individual made it).")
    ] = None,
    save_individual: Annotated[
        Path | None, Individuals, typer.Option(help="Keep the individual that the seed draws.")
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="The prompt is a user's message; use the backbone's chat template.")
    ] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a text, printed word by word; the preset says what of individual and noise is drawn."""
    from causalqwen import CausalDecoding, Individual, NumberTextStreamer
    from causalqwen.modeling.loading import load_model

    if not prompt:
        raise ValueError("the prompt is empty")
    settings: dict[str, Any] = {"seed": seed, "temperature": 1.0 if temperature is None else temperature}
    if individual is not None:
        settings["individual"] = Individual.load(individual)
    plan = CausalDecoding.preset(preset, **settings)
    if temperature is not None and not plan.draws and plan.decision != "softmax":
        raise ValueError(
            f"--temperature does nothing with the preset {preset}, which draws nothing that it could change: use sample, "
            "persona or softmax"
        )
    if save_individual is not None:
        if seed is None:
            raise ValueError("--save-individual keeps the individual of a seed: give --seed")
        if plan.individual != "sequence":
            raise ValueError(
                f"--save-individual: the preset {preset} draws nobody for the whole text, so that there is nobody to save"
            )
    given = {"top_k": top_k, "top_p": top_p}
    samplers: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    loaded = load_model(model, device)
    processor = loaded.processor
    if save_individual is not None:
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
    output: Annotated[Path, Individuals, typer.Option(help="File for the individual (safetensors).")],
    text: Annotated[
        list[Path] | None, typer.Option(help="File of text that somebody wrote; may be given several times.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Rows of one `individual` (JSONL, CSV, Parquet): numbers, choices, words.")
    ] = None,
    name: Annotated[str, typer.Option(help="What to call them.")] = "",
    prior: Annotated[
        Path | None, typer.Option(help="File of an individual, a population (--population) or voices to start from.")
    ] = None,
    spread: Annotated[
        float | None, typer.Option(help="Prior standard deviation; by default the likeliest one.", min=1e-6)
    ] = None,
    likelihood: Annotated[
        str, typer.Option(help="Likelihood of the tokens: softmax, or ovr (one-vs-rest); or values, of numbers alone.")
    ] = "softmax",
    population: Annotated[
        bool, typer.Option("--population", help="Each text is another person's: learn a --prior for people like them.")
    ] = False,
    html: Annotated[
        Path | None,
        Page,
        typer.Option(help="HTML page that draws the individual and the words that told most about them."),
    ] = None,
    beside: Annotated[
        list[Path] | None, typer.Option(help="File of another individual for the picture; may be given several times.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Infer the individual who wrote some texts, and how well they are known."""
    from causalqwen import Individual
    from causalqwen.data import stream_rows
    from causalqwen.data.people import people_of_rows
    from causalqwen.data.texts import read_text
    from causalqwen.decoding import load_prior
    from causalqwen.modeling.loading import load_model

    text = text or []
    if not text and rows is None:
        raise ValueError("nothing was observed: give --text, or --rows")
    if population and rows is not None:
        raise ValueError(
            "--population learns from texts: leave --rows out (`causalqwen population` infers people from rows)"
        )
    texts = [read_text(path) for path in text]
    given = [] if rows is None else list(stream_rows(rows))  # a row that cannot be read stops the run here
    if beside and html is None:
        raise ValueError("--beside is for the picture: give --html")
    if population and (prior is not None or spread is not None or html is not None):
        raise ValueError(
            "--population learns a prior from several people: it goes without --prior, --spread and --html"
        )
    if html is not None:
        from causalqwen.evaluation.portrait import write_portrait
    others = [(path, Individual.load(path)) for path in beside or []]
    before = None if prior is None else load_prior(prior)
    loaded = load_model(model, device)
    if population:
        people = {str(path): words for path, words in zip(text, texts, strict=True)}
        individual = loaded.abduct_population(people, likelihood=likelihood, name=name)
    else:
        said, _, _ = people_of_rows(given, loaded.processor)
        if len(said) > 1:
            raise ValueError(f"{rows} holds rows of {len(said)} individuals, expected one: {', '.join(list(said)[:5])}")
        heard = [one for answers in said.values() for one in answers]
        name = name or next(iter(said), "")
        individual = loaded.abduct([*texts, *heard], name=name, prior=before, spread=spread, likelihood=likelihood)
    if html is not None:
        named = [(other.name or path.stem, other) for path, other in others]
        write_portrait(html, loaded, individual, texts, named, heard)
    individual.save(output)
    about: dict[str, Any] = {"name": individual.name, "evidence": [vars(observed) for observed in individual.evidence]}
    paths = {"output": str(output)} | ({} if html is None else {"html": str(html)})
    show(paths | about, f"{output}: {individual}", as_json)


@command
def voices(
    model: Model,
    rows: Annotated[
        Path,
        typer.Option(help="Rows that name an `individual` (JSONL, CSV, Parquet): texts of many people, long or short."),
    ],
    output: Annotated[
        Path, Individuals, typer.Option(help="File for the voices (safetensors), a --prior of `causalqwen abduct`.")
    ],
    directions: Annotated[int, typer.Option(min=1, help="In which people differ, at most.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Of each of the two searches.")] = 150,
    seed: Annotated[int, typer.Option(help="Seed of what is read at which step.")] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Learn from the texts of many people how somebody is heard at every depth of the backbone."""
    from causalqwen import Observation
    from causalqwen.data import stream_rows
    from causalqwen.data.people import people_of_rows
    from causalqwen.modeling.loading import load_model
    from causalqwen.training import learn_voices

    given = list(stream_rows(rows))  # a row that cannot be read stops the run here
    loaded = load_model(model, device)
    said, _, kinds = people_of_rows(given, loaded.processor)
    if kinds != {"words"}:
        raise ValueError(f"{rows} holds {', '.join(sorted(kinds))}, and voices are learned from words alone")
    say(f"{rows.name}: {len(said):,} people")
    words = {name: [one for one in of if isinstance(one, Observation)] for name, of in said.items()}
    learned = learn_voices(loaded, words, directions=directions, steps=steps, seed=seed)
    learned.save(output)
    result = {
        "output": str(output),
        "people": learned.people,
        "directions": len(learned.loadings),
        "gained": learned.gained,
    }
    show(result, f"{output}: {learned}", as_json)


@command
def counterfactual(
    model: Model,
    prompt: Annotated[str, typer.Option(help="What came before the observed text.")],
    text: Annotated[str, typer.Option(help="The observed text.")],
    edit: Annotated[
        list[str] | None,
        typer.Option(help="Another prompt, which makes a world of its own; may be given several times."),
    ] = None,
    value: Annotated[
        list[str] | None,
        typer.Option(
            help="POSITION=NUMBER: put this number behind so many tokens of the text; in every edit, or as a world of its own."
        ),
    ] = None,
    force: Annotated[
        list[str] | None,
        typer.Option(
            help="POSITION=TEXT: put these words behind so many tokens of the text; in every edit, or as a world of its own."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder of another grafted model that speaks in every edit, or in a world of its own."),
    ] = None,
    individual: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of the writer; by default inferred from the text itself. Several are put side by side."
        ),
    ] = None,
    noise: Annotated[
        str, typer.Option(help="abduct: keep the noise that explains the text; redraw: draw it anew.")
    ] = "abduct",
    samples: Annotated[int, typer.Option(min=1, help="Worlds per edit.")] = 1,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to write at most (default: as many as were observed).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    html: Annotated[
        Path | None, Page, typer.Option(help="HTML page of individuals beside edits; the world that was comes first.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """What the individual behind a text would have written in other worlds; changes are marked word by word."""
    from causalqwen import Individual, Intervention, Observation
    from causalqwen.evaluation.worlds import mark_changes, write_worlds
    from causalqwen.modeling.loading import load_model
    from causalqwen.modeling.worlds import word_changes, world_numbers

    if not prompt:
        raise ValueError("the prompt is empty")
    for place, other in enumerate(edit or []):
        if not other:
            raise ValueError(f"--edit {place + 1} is empty")
    values = {place: _finite("--value", number) for place, number in _at_places("--value", value).items()}
    tokens = _at_places("--force", force)
    if both := values.keys() & tokens.keys():
        raise ValueError(f"--value and --force both set position {min(both)}")
    if not (edit or values or tokens or checkpoint):
        raise ValueError("nothing is different in the other world: give --edit, --value, --force or --checkpoint")
    people = [(path.stem, Individual.load(path)) for path in individual or []]
    loaded = load_model(model, device)
    if values and not loaded.reads_numbers:
        raise ValueError(
            "--value needs a model whose values were trained: to this one numbers are digits (use --force)"
        )
    observed = Observation(text, prompt)
    people = people or [("", loaded.abduct(observed, name="inferred from the text"))]
    named = [(who.name or stem, who) for stem, who in people]
    speaker = None if checkpoint is None else load_model(checkpoint, device)
    edits = [Intervention(other, tokens, values, speaker) for other in edit or [prompt]]
    asked = [Intervention(), *edits] if html is not None else edits
    told = []
    for _, who in named:
        worlds = loaded.counterfactual_samples(
            observed,
            asked,
            noise=noise,
            individual=who,
            num_samples=samples,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        told.append(
            [
                [(world, world_numbers(one.model or loaded, world, who)) for world in of_edit]
                for one, of_edit in zip(asked, worlds, strict=True)
            ]
        )
    if html is not None:
        write_worlds(html, observed, asked, named, told, noise)
        told = [of_person[1:] for of_person in told]
    rows = [
        (name, world, numbers)
        for (name, _), of_person in zip(named, told, strict=True)
        for of_edit in of_person
        for world, numbers in of_edit
    ]
    if noise == "abduct" and any(number.low is not None for _, _, numbers in rows for number in numbers):
        say("intervals are those of fresh noise; the values themselves keep the noise of what was observed")
    described = [
        {
            "individual": name,
            "prompt": world.prompt,
            "text": world.text,
            "values": [number.value for number in numbers],
            "numbers": [number.plain for number in numbers],
            "changes": word_changes(text, world.text),
        }
        for name, world, numbers in rows
    ]
    lines = [
        (f"{name}: " if len(named) > 1 else "")
        + f"{mark_changes(prompt, world.prompt)} |{mark_changes(text, world.text, numbers)}"
        for name, world, numbers in rows
    ]
    about: dict[str, Any] = {"prompt": prompt, "text": text, "worlds": described}
    show(about | ({} if html is None else {"html": str(html)}), "\n".join(lines), as_json)


def _at_places(option: str, given: list[str] | None) -> dict[int, str]:
    """POSITION=SOMETHING, each position once."""
    by_place: dict[int, str] = {}
    for one in given or []:
        place, equals, what = one.partition("=")
        if not (equals and place.strip().isdecimal() and what):
            raise ValueError(f"{option} {one!r} is not POSITION=..., a count of tokens and what comes behind them")
        if int(place) in by_place:
            raise ValueError(f"{option} sets position {int(place)} twice")
        by_place[int(place)] = what
    return by_place


def _finite(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{option}: {text!r} is not a finite number")
    return number
