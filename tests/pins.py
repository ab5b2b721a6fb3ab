"""What saved models give: checkpoints of every start and part, and all that came out of them when they were pinned.

    .venv/bin/python tests/pins.py           what they give now, into tests/pins/*.json: read the diff before you commit it
    .venv/bin/python tests/pins.py NAME ...  a checkpoint of a new case too; those that are there are never made again

Whatever is changed inside, these models must go on giving the same logits, losses, decisions and texts.
"""

import contextlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from causalqwen import CausalDecoding, CausalQwenForCausalLM, Intervention, Observation
from causalqwen.data import Row, encode_rows
from causalqwen.decoding import PRESETS
from causalqwen.numbers import ValueTransform
from causalqwen.parts.compatibility import missing
from causalqwen.training import TrainSettings, train

PINS = Path(__file__).parent / "pins"
SHARED = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
TEXTS = ("We have come 12 miles, and 3.5 of them", "The price rose from 1,200 to 45", "In 1999 they agreed that")
PROMPTS = ("It is", "Of the 20 men who came, 7 said that")
SAID = Observation(" we shall meet again.", prompt="My friends,")


def _levels(factor: float) -> list[float]:
    return [min(1.0, level / 100 * factor) for level in range(101)]


def _two_axes(model: CausalQwenForCausalLM) -> None:
    kinds = {"miles": ("affine", 30.0, 8.0, [1.0, 90.0], 0), "men": ("symlog", 2.0, 0.5, [0.0, 1e6], None)}
    model.config.class_values = {}
    for name, (kind, center, width, span, place) in kinds.items():
        transform = {"kind": kind, "center": center, "width": width}
        model.config.class_values[name] = {"value_transform": transform, "value_range": span, "value_place": place}
    model.config.class_interval_levels = {"miles": _levels(1.1), "men": None}


def _a_domain(model: CausalQwenForCausalLM) -> None:
    model.add_domain("news")
    model.set_domain("news")


def _atoms(model: CausalQwenForCausalLM) -> None:
    values = torch.cat([torch.zeros(40), torch.arange(1.0, 61.0) ** 1.5]).double()
    model.config.value_transform = ValueTransform.fit("quantile", values).to_dict()
    model.config.value_range, model.config.value_place = [0.0, 470.0], -1
    model.config.interval_levels = _levels(100 / 90)


CASES: dict[str, tuple[Any, ...]] = {
    "digits": ("llama", {}),
    "second": ("qwen2", {}),
    "value": ("qwen2", {"number_context": "value"}),
    "both": ("qwen3", {"number_context": "both"}),
    "features": ("llama", {"number_context": "value", "number_embedding": "features"}),
    "documents": ("qwen2", {"start": "documents"}),
    "minimal": ("llama", {"start": "minimal"}),
    "ordinary": ("qwen3", {"start": "ordinary", "token_thresholds": 0.1}),
    "architecture": ("mistral", {"start": "architecture", "max_scale": 3.0}),
    "deep": ("qwen2", {"deep_abduction": True, "abduction_hidden_size": 16}),
    "small": ("llama", {"causal_size": 12, "value_branch": False}),
    "copying": ("llama", {"copy_numbers": True, "copy_size": 8, "value_loss": "crps"}),
    "classes": ("qwen2", {"value_family": "gaussian"}, _two_axes),
    "domains": ("qwen3", {}, _a_domain),
    "atoms": ("llama", {"value_loss": "crps"}, _atoms),
}  # fmt: skip
"""Family of the backbone, settings of the graft, and what is fitted behind it, by name."""


def make(name: str) -> None:
    """A checkpoint of a case whose weights are all random."""
    from conftest import graft_tiny, make_tokenizer

    family, settings, *fits = CASES[name]
    small = {"value_branch_hidden_size": 8} if settings.get("value_branch", True) else {}
    model = graft_tiny(family, make_tokenizer(), **small, **settings)
    for fit in fits:
        fit(model)
    generator = torch.Generator().manual_seed(len(name))
    own = [(name, p) for name, p in model.named_parameters() if not name.startswith("backbone.")]
    for _, parameter in own:
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(PINS / name)
    for file in SHARED:
        (PINS / name / file).replace(PINS / file)


def load(name: str, folder: Path) -> CausalQwenForCausalLM:
    """The checkpoint of a case, put together in a folder."""
    shutil.copytree(PINS / name, folder, dirs_exist_ok=True)
    for file in SHARED:
        shutil.copy(PINS / file, folder)
    return CausalQwenForCausalLM.from_pretrained(folder).eval()


def _plain(value: Tensor) -> list:
    return value.detach().double().flatten().tolist()


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Everything that the model of a case gives: laws, losses, slopes, decisions, texts, an individual, worlds, steps."""
    model = load(name, folder / "model")
    given: dict[str, Any] = {}
    classes = list(model.config.class_values or {})
    batch = model.processor(list(TEXTS), padding=True, padding_side="left", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    if not classes:
        for kind, settings in (("scores", {}), ("blocks", {"skip_logits": True})):
            model.zero_grad()
            out = model(**batch, labels=labels, **settings)
            out.loss.backward()
            given[f"losses, {kind}"] = _plain(torch.stack([out.loss, out.loss_cls, out.loss_reg]))
            slopes = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
            given[f"slopes, {kind}"] = {n: slopes[n] for n in sorted(slopes)}
    with torch.no_grad():
        out = model(**batch, output_ovr=True)
        given["logits"] = _plain(out.logits[:, -1, ::50])
        given["probabilities"] = _plain(out.ovr_probs[:, -1, ::50])
        given["scales"] = _plain(out.scale_S[:, -1, ::200])
        given["P(NUM)"] = _plain(out.num_prob[:, -1])
        given["values"] = _plain(torch.stack([out.loc_Y, out.scale_Y])[..., -1])
        given["decisions"] = out.decisions.tolist()
        prompts = model.processor(list(PROMPTS), padding=True, padding_side="left", return_tensors="pt")
        given["texts"] = {}
        for preset in PRESETS:
            torch.manual_seed(3)
            plan = CausalDecoding.preset(preset, seed=3)
            told = model.generate(**prompts, causal_decoding=plan, max_new_tokens=10, return_dict_in_generate=True)
            given["texts"][preset] = [told.sequences.tolist(), _plain(told.numeric_values)]
        asked = {"classes": classes} if classes else {}
        found = model.predict_number(list(PROMPTS), **asked)
        given["predictions"] = [[p.median, *p.interval(0.8), p.cdf(30.0), p.crps(30.0), p.format(0.9)] for p in found]
        person = model.abduct(SAID)
        given["individual"] = _plain(torch.stack([person.factor.norm(), person.precision.norm()]))
        if not missing("a text under observed noise", vars(model.config)):
            edits = [Intervention(), Intervention(prompt="Your friends,")]
            worlds = model.counterfactual_samples(SAID, edits, individual=person, temperature=1.0)
            given["worlds"] = [world[0].text for world in worlds]
    names = classes or ["a"]
    rows = [{"prompt": f"We count {i} and", "value": i * 1.5, "class": names[i % len(names)]} for i in range(8)]
    examples = encode_rows([Row("prompt", str(i), row) for i, row in enumerate(rows)], model.processor)
    small = {"epochs": 1, "batch_size": 4, "learning_rate": 1e-3}
    stages: dict[str, Any] = {"values": small}
    if model.config.causal_size == model.config.hidden_size and not classes:
        stages |= {"heads": small, "lora": small | {"rank": 2}, "backbone": small}
    for stage, settings in stages.items():
        trained = load(name, folder / stage)
        wanted = {"values": False, "value_transform": "keep", "recalibrate": False, "logging_steps": 1, stage: settings}
        with contextlib.redirect_stderr(io.StringIO()):
            train(trained, examples, examples, folder / f"{stage} run", TrainSettings.from_dict(wanted))
        lines = (folder / f"{stage} run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        told = [json.loads(line) for line in lines]
        keys = "train/loss", "train/total_loss", "eval/loss", "eval/total_loss"
        given[f"steps, {stage}"] = [record[key] for record in told for key in keys if key in record]
    return given


def main() -> None:
    PINS.mkdir(exist_ok=True)
    for name in sys.argv[1:]:
        if (PINS / name).exists():
            raise SystemExit(f"{name} is there already: delete its folder if it really is to be made anew")
        make(name)
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            given = measure(name, Path(folder))
        lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in given.items())
        (PINS / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        print(name, flush=True)


if __name__ == "__main__":
    main()
