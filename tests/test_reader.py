"""The backbone's features for numbers: those of an attention query of zeros, read whole, in pieces and beside padding."""

import pytest
import torch
from torch.nn import functional as F

from causalqwen.modeling.outputs import CACHE
from causalqwen.modeling.reader import EVERY, read_backbone
from conftest import graft_tiny

TEXTS = ["They say that it is 5 and then", "A new year", "It is 12.5 of them, and the old one is"]


def of_texts(model, texts, side):
    found = model.processor(texts, padding=True, padding_side=side, return_tensors="pt", prompt=True)
    lengths = found["attention_mask"].sum(-1)
    width = found["input_ids"].shape[1]
    return found, torch.full_like(lengths, width - 1) if side == "left" else lengths - 1


@pytest.mark.parametrize("context", ["value", "digits"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_features_are_the_same_however_a_text_is_read(tiny_tokenizer, family, context):
    model = graft_tiny(family, tiny_tokenizer, number_context=context).eval()
    rows, alone = torch.arange(len(TEXTS)), []
    for text in TEXTS:
        found, ends = of_texts(model, [text], "left")
        alone.append(read_backbone(model, **found, rows=torch.zeros(1, dtype=torch.int64), places=ends))
    for side in ("left", "right"):
        found, ends = of_texts(model, TEXTS, side)
        for block, parts in zip(
            read_backbone(model, **found, rows=rows, places=ends), zip(*alone, strict=True), strict=True
        ):
            torch.testing.assert_close(block, torch.cat(parts), rtol=1e-4, atol=1e-5)
    found, ends = of_texts(model, TEXTS[:1], "left")
    first = {name: column[:, :4] for name, column in found.items()}
    cache = model.features(**first, use_cache=True)[CACHE]
    rest = {"input_ids": found["input_ids"][:, 4:], "numeric_values": found["numeric_values"][:, 4:]}
    behind = read_backbone(
        model, **rest, attention_mask=found["attention_mask"], rows=rows[:1], places=ends - 4, cache=cache
    )
    for block, whole in zip(behind, alone[0], strict=True):
        torch.testing.assert_close(block, whole, rtol=1e-4, atol=1e-5)


def test_the_mean_is_an_attention_query_of_zeros_and_the_rest_are_every_third_layer_s_states(tiny_tokenizer):
    model = graft_tiny("qwen2", tiny_tokenizer).eval()
    found, ends = of_texts(model, TEXTS, "left")
    with torch.no_grad():
        out = model.features(**found, use_cache=True, output_hidden_states=True)
    blocks = read_backbone(model, **found, rows=torch.arange(3), places=ends)
    layers = out[CACHE].layers
    states, means = blocks[: -len(layers)], blocks[-len(layers) :]
    assert len(states) == -(-len(layers) // EVERY) and torch.equal(states[-1], out.last_hidden_state[:, -1])
    for mean, layer in zip(means, layers, strict=True):
        query = torch.zeros_like(layer.keys[:, :, :1])
        seen = model.seen(found["input_ids"], found["attention_mask"], None)[0].bool()[:, None, None]
        wanted = F.scaled_dot_product_attention(query, layer.keys, layer.values, attn_mask=seen)
        torch.testing.assert_close(mean, wanted.flatten(1), rtol=1e-5, atol=1e-6)
