"""Who speaks, and what only happened: one individual in several worlds (a minute on two cores).

python examples/causal_demo.py [--model DIR]   # a grafted model; the default backbone is grafted where none is given
"""

import argparse

from causalqwen import CausalDecoding, CausalQwenForCausalLM, Individual, Intervention, Observation

parser = argparse.ArgumentParser()
parser.add_argument("--model")
given = parser.parse_args()
if given.model:
    model = CausalQwenForCausalLM.from_pretrained(given.model)
else:
    model = CausalQwenForCausalLM.from_backbone("smollm2-135m")


def write(prompt: str, plan: CausalDecoding) -> str:
    inputs = model.processor([prompt], return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=20, causal_decoding=plan)
    return model.processor.batch_decode(written.sequences, written.numeric_values, skip_special_tokens=True)[0]


# Randomness splits into who and noise. Held for a whole text, an individual is one person; drawn again, another.
prompt = "The best thing about the sea is"
print("likeliest  ", write(prompt, CausalDecoding.preset("standard")))
for seed in (1, 2):
    someone = Individual.from_seed(seed, model.config.causal_size)
    persona = CausalDecoding.preset("persona", individual=someone, seed=0)
    print(f"somebody {seed} ", write(prompt, persona))

# Abduction: who would have said this?
said = Observation(" and we shall not turn back now.", prompt="We have come a long way,")
who = model.abduct([said, "My friends, let us go on."], name="the speaker")
print(who)

# Worlds: the same person and the same noise, with something changed. With nothing changed the text comes back.
worlds = [Intervention(), Intervention(prompt="They have come a long way,")]
for world, (told,) in zip(worlds, model.counterfactual_samples(said, worlds, individual=who), strict=True):
    print("changed    " if world.prompt else "unchanged  ", world.prompt or said.prompt, told.text)
same, _ = model.counterfactual_samples(said, worlds, individual=who)
assert same[0].text == said.text
