"""From a pretrained model to numbers with intervals: graft, train, predict, write (two minutes on two cores).

python examples/basic_usage.py [--backbone smollm2-135m] [--output runs/basic_usage]

Water boils at a lower temperature where the air is thinner: on mountains, at 100 - h / 300 degrees Celsius or so. Eighty
sentences teach it.
"""

import argparse
import random
from pathlib import Path

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.data import Row, encode_rows
from causalqwen.training import TrainSettings, ValueStage, train

parser = argparse.ArgumentParser()
parser.add_argument("--backbone", default="smollm2-135m", help="any decoder of transformers: a folder or a hub name")
parser.add_argument("--output", type=Path, default=Path("runs/basic_usage"))
given = parser.parse_args()

# Graft. The backbone keeps every logit; <NUM>, who speaks and the value of a number are new.
model = CausalQwenForCausalLM.from_backbone(given.backbone)

# Rows: a prompt, and the number that follows. The number inside the prompt is read.
chance = random.Random(0)
rows = []
for index in range(100):
    height = chance.randrange(0, 6000, 10)
    prompt = f"On a mountain {height} metres high, water boils, in degrees Celsius, at"
    rows.append(Row("prompt", f"row {index}", {"prompt": prompt, "value": 100 - height / 300 + chance.gauss(0, 0.3)}))
examples = encode_rows(rows, model.processor)

# Train the number channel. The backbone stays as it is and runs over the rows once.
settings = TrainSettings(values=ValueStage(epochs=60, batch_size=16))
metrics = train(model, examples[:80], examples[80:], given.output, settings)
print(f"median error on 20 other rows: {metrics['median_error']:.2f} degrees")

# Predict: a distribution, not digits.
prompts = [f"On a mountain {height} metres high, water boils, in degrees Celsius, at" for height in (120, 2345, 4810)]
for prompt, prediction in zip(prompts, model.predict_number(prompts), strict=True):
    print(f"{prompt} {prediction}")

# Write text and numbers; the same model, saved and loaded.
model = CausalQwenForCausalLM.from_pretrained(given.output)
inputs = model.processor(prompts[:1], return_tensors="pt")
written = model.generate(**inputs, max_new_tokens=1, causal_decoding=CausalDecoding.preset("standard"))
print(model.processor.batch_decode(written.sequences, written.numeric_values, skip_special_tokens=True)[0])
