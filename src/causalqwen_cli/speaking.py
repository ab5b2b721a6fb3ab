"""Commands that write texts: generate, and what individuals would have said."""

from pathlib import Path
from typing import Annotated, Any

import typer

from causalqwen_cli.base import AsJson, Device, Model, command, show


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
