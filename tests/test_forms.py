"""Forms that the documents describe beside the default: thresholds per token, a small causal size, multiplied numbers."""

import json

import pytest
import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import encode_rows, parse_row
from causalqwen.losses import ovr_log_probs, ovr_loss
from causalqwen.training import HeadStage, TrainSettings, train
from causalqwen.training.calibration import summarize_scores, text_chunks
from conftest import graft_tiny

WORDS = "the long road goes past the small house and the old mill by the river, "


def ids_of(model, text=WORDS):
    return model.processor(text, return_tensors="pt")["input_ids"]


# ---- thresholds per token --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("score_scale", ["equal", "documents"])
def test_every_token_decides_against_a_threshold_of_its_own(tiny_tokenizer, family, score_scale):
    """P_k = P(S_k > C + c(z) + eps_k) with the backbone's own scores, and L_cls and its gradients are those of such P_k."""
    start = {"start": "minimal", "vocabulary_family": "cauchy"} if score_scale == "documents" else {}
    model = graft_tiny(family, tiny_tokenizer, token_thresholds=0.5, **start)
    assert model.config.score_scale == score_scale
    action, own = model.action, model.action.token_thresholds
    assert own.shape == (action.rows,) and 0.4 < own.std() < 0.6
    ids = ids_of(model)
    theirs = model.backbone(input_ids=ids).logits[..., : action.rows]
    out = model(ids, output_ovr=True)
    thresholds = model.thresholds(out.features, out.loc_U, out.scale_U) + own
    scales = action.score_scale_of(action.law.add(out.scale_U, action.noise), model.get_output_embeddings())
    log_p, _ = ovr_log_probs(
        theirs, scales[..., : action.rows], thresholds, family=action.law.name, slope=action.score_slope
    )
    rest = action.rest_mask
    torch.testing.assert_close(out.ovr_probs[..., : action.rows][..., rest], log_p.exp()[..., rest])
    chosen = ((theirs - thresholds) / scales[..., : action.rows]).masked_fill(~rest, -torch.inf).argmax(-1)
    assert (out.decisions == chosen).float().mean() > 0.9  # but for `<NUM>`

    written_out = ovr_loss(
        theirs[:, :-1], scales[:, :-1, : action.rows], ids[:, 1:], thresholds[:, :-1], family=action.law.name,
        slope=action.score_slope, vocabulary_mask=rest, reduction="none",
    )  # fmt: skip
    (wanted,) = torch.autograd.grad(written_out.sum(), own, retain_graph=True)
    for skip_logits in (False, True):
        loss = model(ids, labels=ids, skip_logits=skip_logits).loss_cls * (ids.shape[1] - 1)
        (found,) = torch.autograd.grad(loss, own)
        torch.testing.assert_close(found[rest], wanted[rest], rtol=5e-3, atol=1e-4)


def test_thresholds_per_token_are_kept_read_and_learned(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer, token_thresholds=0.5)
    model.save_pretrained(tmp_path / "model")
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path / "model")
    ids = ids_of(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    facts = summarize_scores(model, text_chunks(model, WORDS * 2, 64))
    head = model.get_output_embeddings()
    torch.testing.assert_close(facts.log_partition, head(facts.loc).logsumexp(-1))
    torch.testing.assert_close(head(facts.loc), torch.nn.functional.linear(facts.loc, head.weight, head.bias))

    before = loaded.action.token_thresholds.detach().clone()
    rows = encode_rows([parse_row(json.dumps({"text": WORDS}), "x")] * 8, loaded.processor)
    settings = TrainSettings(values=None, heads=HeadStage(epochs=4, batch_size=8, learning_rate=1e-2))
    train(loaded, rows, [], tmp_path / "run", settings)
    moved = loaded.action.token_thresholds.detach() - before
    seen = torch.zeros(len(moved), dtype=torch.bool)
    seen[ids[0, 1:]] = True
    assert moved[seen].mean() < 0 < moved[~seen].mean()  # lower for what comes often, higher for what never does


def test_one_threshold_costs_nothing(tiny_llama):
    assert tiny_llama.get_output_embeddings() is tiny_llama.backbone.get_output_embeddings()
    assert tiny_llama.action.token_thresholds is None
