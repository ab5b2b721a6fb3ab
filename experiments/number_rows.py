"""How should `<NUM>` start, so that a frozen backbone can still read on after a number? (5 minutes)

Mean nats of the backbone on the token right after a number, with `<NUM>` in the context, for several embeddings of `<NUM>`
and several lengths of the direction w; beside it the same with the digits left in the text. No training.

    .venv/bin/python experiments/number_rows.py
"""

import torch
from tqdm.auto import tqdm

from causalqwen import CausalQwenForCausalLM
from causalqwen.data.boiling_points import boiling_points, sentence
from causalqwen.data.splits import split_by_entity
from causalqwen.data.texts import speech_paragraphs
from causalqwen.numbers import find_numbers


@torch.no_grad()
def with_num(model: CausalQwenForCausalLM, text: str) -> list[float]:
    """Nats on each token that follows a number."""
    inputs = model.processor(text, return_tensors="pt")
    ids, num = inputs["input_ids"][0], model.config.num_token_id
    log_p = model(**inputs).logits[0, :, : model.config.text_config.vocab_size].log_softmax(-1)
    places = [i for i in range(1, len(ids)) if ids[i - 1] == num and ids[i] != num]
    return [-log_p[i - 1, ids[i]].item() for i in places]


@torch.no_grad()
def with_digits(model: CausalQwenForCausalLM, text: str) -> list[float]:
    """The same tokens, with digits in the context."""
    encoded = model.processor.tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"][0].tolist()
    log_p = model.backbone(input_ids=ids).logits[0].log_softmax(-1)
    ends = {span.end for span in find_numbers(text)}
    return [-log_p[i - 1, ids[0, i]].item() for i, (start, _) in enumerate(offsets) if start in ends and i]


def mean(nats: list[list[float]]) -> float:
    flat = [x for part in nats for x in part]
    return sum(flat) / len(flat)


def main() -> None:
    model = CausalQwenForCausalLM.from_backbone("smollm2-135m", number_context="value")
    texts = {
        "speech": [p for p in speech_paragraphs(2012) if find_numbers(p)],
        "sentences": [sentence(r) for r in split_by_entity(boiling_points(), {"some": 60})["some"]],
    }
    print(f"{'<NUM> starts as':28}{'|w|':>6}" + "".join(f"{name:>12}" for name in texts))
    print(f"{'(digits in the context)':34}" + "".join(
        f"{mean([with_digits(model, t) for t in part]):12.2f}" for part in texts.values()))  # fmt: skip
    weight = model.get_input_embeddings().weight.detach()
    digits = [model.processor.tokenizer(d, add_special_tokens=False)["input_ids"][-1] for d in "0123456789"]
    rows = {f"digit {d}": weight[digits[d]] for d in (0, 1, 3, 5, 7, 9)}
    rows |= {"mean digit": weight[digits].mean(0), "mean token": weight.mean(0), "zero": torch.zeros_like(weight[0])}
    torch.manual_seed(0)
    direction = torch.randn_like(weight[0])
    direction /= direction.norm()
    for name, row in tqdm(rows.items()):
        for length in (0.0, 0.2, 1.0):
            with torch.no_grad():
                model.numeric_embedding.row.copy_(row)
                model.numeric_embedding.direction.copy_(length * direction)
            found = [mean([with_num(model, text) for text in part]) for part in texts.values()]
            print(f"{name:28}{length:6.1f}" + "".join(f"{nats:12.2f}" for nats in found), flush=True)


if __name__ == "__main__":
    main()
