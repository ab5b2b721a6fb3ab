"""A number ends where it ends: the numbers that are read in a generated text are those that were predicted."""

import pytest
import torch

from campaign.generated import PROMPTS, WAYS, write
from conftest import broken_numbers, graft_tiny
from test_generation import eager

CONTEXTS = ["value", "digits", "both"]


@pytest.fixture(scope="module", params=CONTEXTS)
def talker(request, tiny_tokenizer):
    return eager(graft_tiny("llama", tiny_tokenizer, number_context=request.param))


@pytest.mark.parametrize("fond", [False, True])
@pytest.mark.parametrize("way", list(WAYS))
def test_every_number_is_read_as_it_was_predicted(talker, way, fond):
    if way == "drafts" and fond:
        pytest.skip("drafts take no processor of one's own")
    torch.manual_seed(0)
    few = PROMPTS if way not in ("drafts", "drawn beams") else PROMPTS[::4]
    texts, count = write(talker, few, WAYS[way], fond=fond), 0
    for ids, values, _ in texts:
        assert broken_numbers(talker.processor, ids, values) == [], talker.processor.decode(ids, values)
        count += ids.count(talker.config.num_token_id)
    assert count  # or nothing was tried
