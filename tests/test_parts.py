"""The parts of a graft: one table chooses and checks them, and a new one is one class and one row."""

import pytest
import torch

from causalqwen import CausalDecoding, CausalQwenConfig, CausalQwenForCausalLM
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.context import CONTEXTS
from causalqwen.modeling.scores import SCORE_SCALES, ActionNetwork, CommonScale
from conftest import graft_tiny


class HighThreshold(CommonScale):
    """As a newcomer would write it: the default, its threshold three higher."""

    def threshold(self, *of_position) -> torch.Tensor:
        return super().threshold(*of_position) + 3


def test_a_new_variant_is_a_class_and_a_row(tiny_tokenizer, tmp_path, monkeypatch):
    """The recipe of CONTRIBUTING.md: nothing else is touched, and every road through the chain takes it."""
    monkeypatch.setitem(SCORE_SCALES, "high", HighThreshold())
    model, plain = (graft_tiny("llama", tiny_tokenizer, **named) for named in ({"score_scale": "high"}, {}))
    inputs = model.processor("It is 5 and so on", return_tensors="pt")
    labels = inputs["input_ids"]
    ours, theirs = (one(**inputs, labels=labels, output_ovr=True) for one in (model, plain))
    assert (ours.ovr_probs < theirs.ovr_probs + 1e-9).all() and torch.equal(ours.decisions, theirs.decisions)
    assert ours.loss_cls != theirs.loss_cls
    torch.testing.assert_close(model(**inputs, labels=labels, skip_logits=True).loss, ours.loss)
    model.save_pretrained(tmp_path)
    again = CausalQwenForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(**inputs, labels=labels).loss, ours.loss)
    plan = CausalDecoding.preset("causal", seed=1)
    assert len(again.generate(**inputs, max_new_tokens=3, causal_decoding=plan).sequences[0]) == labels.shape[1] + 3


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"initial_direction": 1.0}, "number_context='value' or 'both', but this model has 'digits'"),
        ({"normalize_direction": True}, "number_context="),
        ({"number_context": "value", "value_branch": False, "value_branch_direct": True}, "value_branch=True"),
        ({"value_branch": False, "value_branch_hidden_size": 8}, "value_branch=True"),
        ({"value_branch": False, "value_branch_dropout": 0.1}, "value_branch=True"),
        ({"abduction_hidden_size": 16}, "deep_abduction=True"),
        ({"copy_size": 8}, "copy_numbers=True"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(tiny_tokenizer, settings, needed):
    """Given to a graft, and other than what it would be; said again as it is, it is no mistake."""
    with pytest.raises(ValueError, match=f"the setting {list(settings)[-1]} needs {needed}"):
        graft_tiny("llama", tiny_tokenizer, **settings)
    with pytest.raises(ValueError, match="give causal_size too"):
        graft_tiny("llama", tiny_tokenizer, text="some words")
    same = graft_tiny("llama", tiny_tokenizer, initial_direction=0.2, copy_size=64)
    assert same.config.copy_size == 64


@pytest.mark.parametrize(("kind", "table"), [("score_scale", SCORE_SCALES), ("number_context", CONTEXTS)])
def test_the_table_says_which_names_there_are(kind, table):
    for name in table:
        config = CausalQwenConfig(**{kind: name})
        chosen = config.context if table is CONTEXTS else ActionNetwork(config).scales
        assert chosen is table[name]
    known = ", ".join(map(repr, list(table)[:-1]))
    with pytest.raises(ValueError, match=f"{kind}: input should be {known} or .*, got 'solvd'"):
        CausalQwenConfig(**{kind: "solvd"})


@pytest.mark.parametrize("score_scale", SCORE_SCALES)
@pytest.mark.parametrize("family", ["qwen2", "llama"])  # a free row, and one behind the matrix
def test_steps_taken_apart_are_the_steps_of_the_whole(tiny_tokenizer, family, score_scale):
    """Some of the positions, `<NUM>` alone and the rest alone, without what the others know."""
    start = {"start": "minimal"} if score_scale == "documents" else {}
    model = graft_tiny(family, tiny_tokenizer, **start)
    with torch.no_grad():
        model.action.num_row.normal_(std=0.3)
        model.action.num_bias.fill_(0.7)
        whole = Chain(model, torch.randn(2, 5, 32))
        number, rows = model.config.num_token_id, model.action.rows
        for one, other in zip(whole.number.log_p(), whole.scores.log_p(), strict=True):
            torch.testing.assert_close(one, other[..., number])
        rest = Chain(model, whole.features).word_scores
        words = model.action.rest_mask.nonzero().squeeze(-1)
        torch.testing.assert_close(rest.log_p()[0][..., words], whole.scores.log_p()[0][..., :rows][..., words])
        some = whole[:, 1:3]
        torch.testing.assert_close(some.scores.decision_scores(), whole.scores.decision_scores()[:, 1:3])
        assert torch.equal(whole.decide(), whole.scores.decide())
        targets = torch.randint(0, 300, (2, 5))
        targets[0, 0] = number
        torch.testing.assert_close(
            whole.rest_loss(targets), whole.word_scores.loss(whole.words_of(targets)), rtol=1e-4, atol=1e-4
        )
