"""Commands that write texts: generate, and what individuals would have written."""

import math
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from causalqwen_cli.base import AsJson, Device, Individuals, Model, Page, command, refuse, say, show

PRESET = Option(
    help="standard, causal, noise, shared-individual, shared-noise, individual-only, persona, sample, softmax"
)


@command
def generate(
    model: Model,
    prompt: Annotated[str, Option(help="Text to go on from.")],
    preset: Annotated[str, PRESET] = "standard",
    seed: Annotated[int | None, Option(help="Same seed, same text.")] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens to write at most.")] = 64,
    temperature: Annotated[
        float | None, Option(help="Multiplies all noise of the scores, as in a softmax sampler; 1 by default.")
    ] = None,
    top_k: Annotated[int | None, Option(help="With sample, persona and softmax: the best so many tokens.")] = None,
    top_p: Annotated[float | None, Option(help="With sample, persona and softmax: the nucleus of this mass.")] = None,
    individual: Annotated[
        Path | None, Option(help="File of the individual who speaks (abduct or --save-individual made it).")
    ] = None,
    save_individual: Annotated[
        Path | None, Individuals, Option(help="Keep the individual that the seed draws.")
    ] = None,
    chat: Annotated[bool, Option(help="The prompt is a user's message; use the backbone's chat template.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a text, printed word by word; the preset says what of individual and noise is drawn."""
    from causalqwen import Individual, NumberTextStreamer
    from causalqwen.modeling.loading import load_model

    refuse(not prompt, "the prompt is empty")
    plan = _plan(preset, seed, temperature, individual, save_individual is not None)
    how: dict[str, Any] = {name: value for name, value in (("top_k", top_k), ("top_p", top_p)) if value is not None}
    loaded = load_model(model, device)
    processor, text = loaded.processor, prompt
    if save_individual is not None:
        Individual.from_seed(seed, loaded.config.causal_size).save(save_individual)
    if chat:
        messages = [{"role": "user", "content": prompt}]
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(text, prompt=not chat, return_tensors="pt").to(loaded.device)
    how["streamer"] = None if as_json else NumberTextStreamer(processor, skip_prompt=chat, skip_special_tokens=True)
    result = loaded.generate(**inputs, causal_decoding=plan, max_new_tokens=max_new_tokens, **how)
    if as_json:
        (ids,), (values,), start = result.sequences, result.numeric_values, inputs["input_ids"].shape[1]
        numbers = values[start:][ids[start:] == loaded.config.num_token_id].tolist()
        written = processor.decode(ids, values, skip_special_tokens=True)
        show({"prompt": prompt, "preset": preset, "seed": seed, "text": written, "numbers": numbers}, "", True)


def _plan(preset: str, seed: int | None, temperature: float | None, individual: Path | None, is_saved: bool) -> Any:
    """The plan that the options of `generate` ask for. ValueError for one of them that would do nothing."""
    from causalqwen import CausalDecoding, Individual

    settings: dict[str, Any] = {"seed": seed, "temperature": 1.0 if temperature is None else temperature}
    if individual is not None:
        settings["individual"] = Individual.load(individual)
    plan = CausalDecoding.preset(preset, **settings)
    draws = plan.draws or plan.decision == "softmax"
    still = f"--temperature does nothing with the preset {preset}, which draws nothing that it could change: "
    refuse(temperature is not None and not draws, f"{still}use sample, persona or softmax")
    refuse(is_saved and seed is None, "--save-individual keeps the individual of a seed: give --seed")
    wrong = f"--save-individual: the preset {preset} draws no individual for the whole text, so there is none to save"
    refuse(is_saved and plan.individual != "sequence", wrong)
    return plan


@command
def abduct(
    model: Model,
    output: Annotated[Path, Individuals, Option(help="File for the individual (safetensors).")],
    text: Annotated[list[Path] | None, Option(help="File of text that somebody wrote; repeatable.")] = None,
    rows: Annotated[
        Path | None, Option(help="Rows of one `individual` (JSONL, CSV, Parquet): numbers, choices, words.")
    ] = None,
    name: Annotated[str, Option(help="What to call them.")] = "",
    prior: Annotated[
        Path | None, Option(help="File of an individual, of a population or of voices to start from.")
    ] = None,
    spread: Annotated[
        float | None, Option(help="Prior standard deviation; by default the likeliest one.", min=1e-6)
    ] = None,
    likelihood: Annotated[
        str, Option(help="Likelihood of the tokens: softmax, or ovr (one-vs-rest); or values, of numbers alone.")
    ] = "softmax",
    population: Annotated[
        bool, Option("--population", help="Each text is another person's: learn a --prior for people like them.")
    ] = False,
    html: Annotated[
        Path | None, Page, Option(help="HTML page that draws the individual and the words that say most about them.")
    ] = None,
    beside: Annotated[list[Path] | None, Option(help="File of another individual for the picture; repeatable.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Infer the individual who wrote some texts, and how well they are known."""
    from causalqwen.data import stream_rows
    from causalqwen.data.people import people_of_rows
    from causalqwen.data.texts import read_text
    from causalqwen.decoding import load_prior
    from causalqwen.modeling.loading import load_model

    text = text or []
    refuse(not text and rows is None, "nothing was observed: give --text, or --rows")
    refuse(population and rows, "--population learns from texts: leave --rows out, or use `causalqwen population`")
    texts = [read_text(path) for path in text]
    given = [] if rows is None else list(stream_rows(rows))  # a row that cannot be read stops the run here
    refuse(beside and html is None, "--beside is for the picture: give --html")
    alone = "--population learns a prior from several people: it goes without --prior, --spread and --html"
    refuse(population and {prior, spread, html} != {None}, alone)
    if html is not None:
        from causalqwen.evaluation.portrait import write_portrait
    others = _people(beside)
    before = None if prior is None else load_prior(prior)
    loaded = load_model(model, device)
    if population:
        people = {str(path): words for path, words in zip(text, texts, strict=True)}
        individual = loaded.abduct_population(people, likelihood=likelihood, name=name)
    else:
        by_name, _, _ = people_of_rows(given, loaded.processor)
        several = f"{rows} holds rows of {len(by_name)} individuals, expected one: {', '.join(list(by_name)[:5])}"
        refuse(len(by_name) > 1, several)
        named, observations = next(iter(by_name.items()), ("", []))
        how: dict[str, Any] = {"name": name or named, "prior": before, "spread": spread, "likelihood": likelihood}
        individual = loaded.abduct([*texts, *observations], **how)
    about: dict[str, Any] = {"output": str(output)}
    if html is not None:
        write_portrait(html, loaded, individual, texts, others, observations)
        about["html"] = str(html)
    individual.save(output)
    about |= {"name": individual.name, "evidence": [vars(observed) for observed in individual.evidence]}
    show(about, f"{output}: {individual}", as_json)


def _people(files: list[Path] | None) -> list[tuple[str, Any]]:
    """Individuals, each by name, or by that of the file."""
    from causalqwen import Individual

    loaded = [(path.stem, Individual.load(path)) for path in files or []]
    return [(who.name or stem, who) for stem, who in loaded]


@command
def voices(
    model: Model,
    rows: Annotated[
        Path, Option(help="Rows that name an `individual` (JSONL, CSV, Parquet): texts of many people, long or short.")
    ],
    output: Annotated[
        Path, Individuals, Option(help="File for the voices (safetensors), a --prior of `causalqwen abduct`.")
    ],
    directions: Annotated[int, Option(min=1, help="In which people differ, at most.")] = 64,
    steps: Annotated[int, Option(min=1, help="Of each of the two searches.")] = 150,
    seed: Annotated[int, Option(help="Seed of what is read at which step.")] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Learn from the texts of many people the voice of somebody at every depth of the backbone."""
    from causalqwen.data import stream_rows
    from causalqwen.data.people import people_of_rows
    from causalqwen.modeling.loading import load_model
    from causalqwen.training import learn_voices

    given = list(stream_rows(rows))  # a row that cannot be read stops the run here
    loaded = load_model(model, device)
    observed, _, kinds = people_of_rows(given, loaded.processor)
    wrong = f"{rows} holds {', '.join(sorted(kinds))}, and voices are learned from words alone"
    refuse(kinds != {"words"}, wrong)
    say(f"{rows.name}: {len(observed):,} people")
    texts: dict[str, Any] = dict(observed)
    learned = learn_voices(loaded, texts, directions=directions, steps=steps, seed=seed)
    learned.save(output)
    found = {"people": learned.people, "directions": len(learned.loadings), "gained": learned.gained}
    show({"output": str(output)} | found, f"{output}: {learned}", as_json)


Edits = Annotated[list[str] | None, Option(help="Another prompt, which makes a world of its own; repeatable.")]
Values = Annotated[
    list[str] | None,
    Option(
        help="POSITION=NUMBER: put this number after so many tokens of the text; in every edit, or as a world of its own."
    ),
]
Forced = Annotated[
    list[str] | None,
    Option(
        help="POSITION=TEXT: put these words after so many tokens of the text; in every edit, or as a world of its own."
    ),
]
Writers = Annotated[
    list[Path] | None,
    Option(help="File of the writer; by default inferred from the text itself. Several are put side by side."),
]


@command
def counterfactual(
    model: Model,
    prompt: Annotated[str, Option(help="What came before the observed text.")],
    text: Annotated[str, Option(help="The observed text.")],
    edit: Edits = None,
    value: Values = None,
    force: Forced = None,
    checkpoint: Annotated[
        Path | None, Option(help="Folder of another grafted model that speaks in every edit, or in a world of its own.")
    ] = None,
    individual: Writers = None,
    noise: Annotated[str, Option(help="abduct: keep the noise of the text; redraw: draw it anew.")] = "abduct",
    samples: Annotated[int, Option(min=1, help="Worlds per edit.")] = 1,
    max_new_tokens: Annotated[
        int | None, Option(min=1, help="Tokens to write at most (default: as many as were observed).")
    ] = None,
    seed: Annotated[int, Option(help="Seed of all draws.")] = 0,
    html: Annotated[
        Path | None, Page, Option(help="HTML page of individuals beside edits; the world that was comes first.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """What the individual who wrote a text would have written in other worlds; changes are marked word by word."""
    from causalqwen import Intervention, Observation
    from causalqwen.modeling.loading import load_model
    from causalqwen.modeling.worlds import world_numbers

    refuse(not prompt, "the prompt is empty")
    for place, other in enumerate(edit or [], 1):
        refuse(not other, f"--edit {place} is empty")
    values = {place: _finite("--value", number) for place, number in _at_places("--value", value).items()}
    tokens = _at_places("--force", force)
    for place in sorted(values.keys() & tokens.keys()):
        raise ValueError(f"--value and --force both set position {place}")
    same = not (edit or values or tokens or checkpoint)
    refuse(same, "nothing is different in the other world: give --edit, --value, --force or --checkpoint")
    if html is not None:
        from causalqwen.evaluation.worlds import write_worlds
    people = _people(individual)
    loaded, observed = load_model(model, device), Observation(text, prompt)
    untrained = "--value needs a model whose values were trained: to this one numbers are digits (use --force)"
    refuse(values and not loaded.reads_numbers, untrained)
    inferred = "inferred from the text"
    people = people or [(inferred, loaded.abduct(observed, name=inferred))]
    speaker = None if checkpoint is None else load_model(checkpoint, device)
    edits = [Intervention(other, tokens, values, speaker) for other in edit or [prompt]]
    asked = [Intervention(), *edits] if html is not None else edits
    draws: dict[str, Any] = {"num_samples": samples, "max_new_tokens": max_new_tokens, "seed": seed, "noise": noise}

    def lived(who: Any) -> list[list[tuple[Any, list]]]:
        """The worlds of each edit, each with its numbers."""
        worlds = zip(asked, loaded.counterfactual_samples(observed, asked, individual=who, **draws), strict=True)
        return [[(world, world_numbers(of.model or loaded, world, who)) for world in of_edit] for of, of_edit in worlds]

    made = [lived(who) for _, who in people]
    about: dict[str, Any] = {"prompt": prompt, "text": text}
    if html is not None:
        write_worlds(html, observed, asked, people, made, noise)
        made, about["html"] = [of_person[1:] for of_person in made], str(html)
    names = [name for name, _ in people]
    rows = [(name, *world) for name, edited in zip(names, made, strict=True) for of_edit in edited for world in of_edit]
    if noise == "abduct" and any(number.low is not None for _, _, numbers in rows for number in numbers):
        say("intervals are those of fresh noise; the values themselves keep the noise of what was observed")
    _show_worlds(rows, about, len(people) > 1, as_json)


def _show_worlds(rows: list[tuple[str, Any, list]], about: dict[str, Any], several: bool, as_json: bool) -> None:
    """Print worlds beside the text that was observed. several: whether they are of more than one individual."""
    from causalqwen.evaluation.worlds import mark_changes
    from causalqwen.modeling.worlds import word_changes

    prompt, text, lines, described = about["prompt"], about["text"], [], []
    for name, world, numbers in rows:
        changed = f"{mark_changes(prompt, world.prompt)} |{mark_changes(text, world.text, numbers)}"
        lines.append(f"{name}: {changed}" if several else changed)
        entry = {"individual": name, "prompt": world.prompt, "text": world.text}
        entry |= {"values": [number.value for number in numbers], "numbers": [number.plain for number in numbers]}
        described.append(entry | {"changes": word_changes(text, world.text)})
    show(about | {"worlds": described}, "\n".join(lines), as_json)


def _at_places(option: str, given: list[str] | None) -> dict[int, str]:
    """POSITION=SOMETHING, each position once."""
    by_place: dict[int, str] = {}
    for setting in given or []:
        place, equals, what = setting.partition("=")
        if not (equals and place.strip().isdecimal() and what):
            raise ValueError(f"{option} {setting!r} is not POSITION=..., a count of tokens and what comes after them")
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
