"""Forms that the documents describe beside the default: thresholds per token, a small causal size, gated features."""

import json

import pytest
import torch

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.data import encode_rows, parse_row
from causalqwen.losses import ovr_log_probs, ovr_loss
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.low_rank_head import narrow_head
from causalqwen.training import HeadStage, TrainSettings, ValueStage, train
from conftest import graft_tiny

WORDS = "the long road goes past the small house and the old mill by the river, "


def ids_of(model, text=WORDS):
    return model.processor(text, return_tensors="pt")["input_ids"]


# ---- thresholds per token --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("score_scale", ["common", "documents"])
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
    thresholds = Chain(model, out.features).threshold + own
    scales = action.score_scale_of(action.law.add(out.scale_U, action.noise), model.get_output_embeddings())
    log_p, _ = ovr_log_probs(
        theirs, scales[..., : action.rows], thresholds, family=action.law.name, slope=action.score_slope
    )
    rest = action.rest_mask
    torch.testing.assert_close(out.ovr_probs[..., : action.rows][..., rest], log_p.exp()[..., rest])
    chosen = ((theirs - thresholds) / scales[..., : action.rows]).masked_fill(~rest, -torch.inf).argmax(-1)
    assert (out.decisions == chosen).float().mean() > 0.9  # but for `<NUM>`
    plan = CausalDecoding.preset("standard")
    assert model.generate(ids, max_new_tokens=1, causal_decoding=plan).sequences[0, -1] == out.decisions[0, -1]

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
        loc, head = model(ids).loc_U, model.vocabulary()
        torch.testing.assert_close(head(loc), torch.nn.functional.linear(loc, head.weight, head.bias))

    before = loaded.action.token_thresholds.detach().clone()
    rows = encode_rows([parse_row(json.dumps({"text": WORDS}), "x")] * 8, loaded.processor)
    settings = TrainSettings(values=None, heads=HeadStage(epochs=4, batch_size=8, learning_rate=1e-2))
    train(loaded, rows, [], tmp_path / "run", settings)
    moved = loaded.action.token_thresholds.detach() - before
    seen = torch.zeros(len(moved), dtype=torch.bool)
    seen[ids[0, 1:]] = True
    assert moved[seen].mean() < 0 < moved[~seen].mean()  # lower for what comes often, higher for what never does


def test_one_threshold_costs_nothing(tiny_llama):
    layer = tiny_llama.backbone.get_output_embeddings()
    assert tiny_llama.get_output_embeddings() is layer and tiny_llama.vocabulary().weight is layer.weight
    assert tiny_llama.action.token_thresholds is None and tiny_llama.vocabulary().bias is layer.bias


# ---- a causal size below H -------------------------------------------------------------------------------------------


def test_a_narrow_head_is_the_closest_map_of_its_size():
    """Least mean square of the scores, by mean probability, less what all share; nothing is lost at C = H."""
    torch.manual_seed(0)
    head = torch.nn.Linear(12, 50)
    z = torch.randn(4000, 12) @ torch.randn(12, 12) + 3.0
    theirs = head(z).detach()
    mass = theirs.softmax(-1).mean(0)

    def error(scores):
        left = scores - theirs
        return ((left - (left * mass).sum(-1, keepdim=True)).square() * mass).sum(-1).mean().item()

    errors = []
    for size in (1, 4, 8, 12):
        narrow = narrow_head(head, z, size)
        loc = z @ narrow.loc_weight.T + narrow.loc_bias
        torch.testing.assert_close(loc.var(0)[0].item(), 1.0, atol=0.05, rtol=0)
        errors.append(error(loc @ narrow.weight.T + narrow.bias))
        rows = torch.linalg.svd(head.weight)[2][:size]  # a truncated SVD of W, which knows nothing of the features
        centre = z.mean(0)
        assert errors[-1] <= error(((z - centre) @ rows.T) @ (head.weight @ rows.T).T + head(centre)) + 1e-6
    assert errors[0] > errors[1] > errors[2] > errors[3] and errors[3] < 1e-6
    with pytest.raises(ValueError, match="causal_size 13 does not lie in 1 to 12"):
        narrow_head(head, z, 13)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_a_model_of_a_small_causal_size_is_a_model(tiny_tokenizer, family, tmp_path):
    """Its scores come from C numbers, its losses agree with and without logits, and it is kept, drawn from and trained."""
    model = graft_tiny(family, tiny_tokenizer, causal_size=16, text=WORDS * 8)
    ids = ids_of(model)
    with torch.no_grad():
        out = model(ids, labels=ids, output_ovr=True)
        assert out.loc_U.shape[-1] == model.action.b_noise.shape[0] == 16
        torch.testing.assert_close(out.logits[..., 5], model.score_head(out.loc_U)[..., 5])
        theirs = model.backbone(input_ids=ids).logits
        assert (out.logits[..., : theirs.shape[-1]].argmax(-1) == theirs.argmax(-1)).float().mean() > 0.3
        torch.testing.assert_close(model(ids, labels=ids, skip_logits=True).loss, out.loss, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "model")
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path / "model")
    plan = CausalDecoding.preset("persona", seed=3)
    texts = [m.generate(ids, max_new_tokens=6, causal_decoding=plan).sequences for m in (model, loaded)]
    assert torch.equal(*texts) and torch.equal(loaded(ids).logits, out.logits)

    rows = encode_rows([parse_row(json.dumps({"text": "it costs 5 dollars, " + WORDS}), "x")] * 4, model.processor)
    stages = {
        "values": ValueStage(epochs=1, batch_size=4),
        "heads": HeadStage(epochs=3, batch_size=4, learning_rate=1e-2),
    }
    before = [weight.detach().clone() for weight in (model.score_head.weight, model.backbone.lm_head.weight)]
    scores = train(model, rows, rows, tmp_path / "run", TrainSettings(**stages))
    assert not torch.equal(model.score_head.weight, before[0]) and torch.equal(model.backbone.lm_head.weight, before[1])
    assert scores["backbone_agreement"] < 1.0  # of the backbone's own decisions, not of this head's


# ---- gated features ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_number_may_multiply_the_features_behind_the_backbone(tiny_tokenizer, family, tmp_path):
    """z sigmoid(v w + b) at `<NUM>`, values and gradients; what stands behind it never sees it; generated ones are read."""
    model = graft_tiny(
        family, tiny_tokenizer, number_context="value", number_embedding="features", initial_direction=1.0
    )
    network = model.numeric_embedding
    with torch.no_grad():
        network.gate_bias.normal_()
        network.row.normal_()
    inputs = model.processor("from -2.5 to 1e300 and 3", return_tensors="pt")
    ids, values = inputs["input_ids"], inputs["numeric_values"].clone()
    places = (ids[0] == model.config.num_token_id).nonzero().squeeze(-1)
    plain = model.backbone.base_model(inputs_embeds=network(ids, None, model.get_input_embeddings()))[0][0].detach()
    found = model.features(**inputs).last_hidden_state[0]
    w, b = (part.detach().double().requires_grad_(True) for part in (network.direction, network.gate_bias))
    written_out = plain[places].double() * (values[0, places][:, None] * w + b).sigmoid()
    torch.testing.assert_close(found[places].double(), written_out, rtol=1e-5, atol=1e-6)
    others = ids[0] != model.config.num_token_id
    assert torch.equal(found[others], plain[others])
    weights = torch.randn(3, plain.shape[-1])
    own = torch.autograd.grad((found[places] * weights).sum(), (network.direction, network.gate_bias))
    wanted = torch.autograd.grad((written_out * weights).sum(), (w, b))
    for gradient, reference in zip(own, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=1e-5)
    values[0, places[0]] = torch.nan
    unknown = model.features(ids, inputs["attention_mask"], values).last_hidden_state[0]
    assert torch.equal(unknown[places[0]], plain[places[0]]) and torch.equal(unknown[places[1]], found[places[1]])
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.action.num_bias += 20.0  # numbers, mostly
        out = model.generate(**inputs, max_new_tokens=4, causal_decoding=CausalDecoding())
        whole = model(out.sequences, numeric_values=out.numeric_values)
        steps = model(out.sequences[:, :-1], numeric_values=out.numeric_values[:, :-1])
        assert (out.sequences[0, -4:] == model.config.num_token_id).any()
        torch.testing.assert_close(whole.loc_Y[:, :-1], steps.loc_Y)
        decided = whole.logits[0, ids.shape[1] - 1 : -1].argmax(-1)
        assert torch.equal(decided, out.sequences[0, -4:])
        model.action.num_bias -= 20.0
        assert torch.equal(CausalQwenForCausalLM.from_pretrained(tmp_path)(**inputs).logits, model(**inputs).logits)
    with pytest.raises(ValueError, match="vLLM needs number_embedding='added'"):
        model.config.require("vLLM")


# ---- several right tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["faithful", "minimal"])
def test_a_label_may_stand_beside_others_that_are_right_too(tiny_tokenizer, start):
    """The model's loss with and without logits, against the written-out one; trained, all three answers pass their thresholds,
    or under the common scale share a sum of about 1."""
    model = graft_tiny("llama", tiny_tokenizer, start=start)
    ids = ids_of(model)
    also = torch.full((*ids.shape, 2), -1)
    also[0, 3, 0], also[0, 5] = 20, torch.tensor([30, 40])
    out = model(ids, labels=ids, output_ovr=True)
    log_p, log_not_p = out.ovr_probs.log(), torch.log1p(-out.ovr_probs)
    moved = [(2, 20), (4, 30), (4, 40)]  # the positions that predict tokens 3 and 5
    difference = sum(log_not_p[0, place, token] - log_p[0, place, token] for place, token in moved)
    for skip_logits in (False, True):
        found = model(ids, labels=ids, also_right=also, skip_logits=skip_logits).loss_cls
        torch.testing.assert_close(
            found - out.loss_cls, difference / (ids.shape[1] - 1), rtol=1e-3, atol=1e-4 * out.loss_cls.item()
        )
    model.requires_grad_(False)
    model.backbone.requires_grad_(True)
    optimizer = torch.optim.Adam(model.backbone.parameters(), lr=1e-2)
    labels = torch.full_like(ids, -100)
    labels[0, 5] = ids[0, 5]
    for _ in range(25):
        optimizer.zero_grad()
        model(ids, labels=labels, also_right=also).loss_cls.backward()
        optimizer.step()
    with torch.no_grad():
        probs = model(ids, output_ovr=True).ovr_probs[0, 4]
    of_right = probs[[ids[0, 5].item(), 30, 40]]
    if start == "faithful":
        assert of_right.sum() > 0.8 and 0.8 < probs.sum() < 1.25
    else:
        assert (of_right > 0.7).all()  # which no softmax could give all three
