"""People who speak, and what one of them would have said: what both demos show of individuals."""

from collections.abc import Sequence
from dataclasses import dataclass

from causalqwen.decoding import CausalDecoding
from causalqwen.modeling import CausalQwenForCausalLM, Intervention, Observation

OPENINGS = ("When I was a child, my grandmother", "The best thing about a small town is")
"""Prompts on which a small model speaks sensibly."""

HEARD = ("My friends, we have come a long way together.", "My friends, let us go on.")
SAID = Observation(" and we shall not turn back now.", prompt="We have come a long way,")
EDITED = "They have come a long way,"
"""What a speaker was heard saying, what is asked about, and the prompt in whose place another one is put."""


@dataclass(frozen=True)
class Person:
    """Somebody whom a seed draws, and how they went on from each prompt."""

    seed: int
    texts: list[str]


@dataclass(frozen=True)
class OtherWorld:
    """A text that was said behind a prompt; what comes of it with nothing changed, and behind the edited prompt."""

    prompt: str
    said: str
    unchanged: str
    edited_prompt: str
    edited: str


def people(
    model: CausalQwenForCausalLM,
    seeds: Sequence[int] = (1, 2, 3),
    openings: Sequence[str] = OPENINGS,
    max_new_tokens: int = 32,
) -> list[Person]:
    """Who each seed draws, going on from each prompt: `persona`."""
    texts = []
    for opening in openings:
        plan = CausalDecoding.preset("persona", seed=list(seeds))
        inputs = model.processor([opening] * len(seeds), prompt=True, return_tensors="pt").to(model.device)
        made = model.generate(**inputs, max_new_tokens=max_new_tokens, causal_decoding=plan)
        written = model.processor.batch_decode(made.sequences, made.numeric_values, skip_special_tokens=True)
        texts.append([" ".join(text[len(opening) :].split()) for text in written])
    return [Person(seed, list(of_seed)) for seed, *of_seed in zip(seeds, *texts, strict=True)]


def other_world(model: CausalQwenForCausalLM) -> OtherWorld:
    """What the speaker of `SAID`, inferred from `HEARD`, would have said behind `EDITED`: the noise that explains the text is
    kept, so that nothing changed gives it back."""
    speaker = model.abduct(list(HEARD), name="the speaker")
    edits = [Intervention(), Intervention(prompt=EDITED)]
    (unchanged,), (edited,) = model.counterfactual_samples(SAID, edits, individual=speaker)
    return OtherWorld(SAID.prompt, SAID.text, unchanged.text, EDITED, edited.text)
