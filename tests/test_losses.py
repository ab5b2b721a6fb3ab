"""OvR, value and total losses against hand arithmetic and their definitions."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from causalqwen import cauchy_crps, cauchy_nll, linear_ovr_loss, ovr_loss
from causalqwen.losses import NO_TARGET, gate, ovr_log_probs, quantile_crps, shift_targets, total_loss
from conftest import graft_tiny


def by_definition(loc: Tensor, scale: Tensor, target: int, threshold: float) -> float:
    """The documents' formula, term by term, in float64."""
    total = 0.0
    for k, (m, s) in enumerate(zip(loc.tolist(), scale.tolist(), strict=True)):
        p = 0.5 + math.atan((m - threshold) / s) / math.pi
        total -= math.log(p) if k == target else math.log(1 - p)
    return total


def test_ovr_loss_is_the_documents_formula():
    torch.manual_seed(0)
    loc, scale = torch.randn(7, dtype=torch.float64) * 3, torch.rand(7, dtype=torch.float64) + 0.1
    for target in range(7):
        ours = ovr_loss(loc[None], scale[None], torch.tensor([target]), 0.7)
        assert ours.item() == pytest.approx(by_definition(loc, scale, target, 0.7), rel=1e-12)


def test_ovr_loss_masks_reduces_and_refuses():
    loc, scale = torch.randn(2, 3, 5), torch.rand(2, 3, 1) + 0.1
    targets = torch.tensor([[0, -100, 4], [NO_TARGET, 1, -100]])
    mask = torch.tensor([True, True, False, True, True])
    each = ovr_loss(loc, scale, targets, vocabulary_mask=mask, reduction="none")
    assert each[0, 1] == 0 and each[1, 2] == 0
    kept = ovr_loss(loc[..., mask], scale, torch.tensor([[0, -100, 3], [NO_TARGET, 1, -100]]), reduction="none")
    torch.testing.assert_close(each, kept)
    torch.testing.assert_close(ovr_loss(loc, scale, targets, vocabulary_mask=mask), each.sum() / 4)
    torch.testing.assert_close(ovr_loss(loc, scale, targets, vocabulary_mask=mask, reduction="sum"), each.sum())
    with pytest.raises(ValueError, match="target 2 is a row"):
        ovr_loss(loc, scale, torch.full((2, 3), 2), vocabulary_mask=mask)
    with pytest.raises(ValueError, match="outside the vocabulary of 5 rows"):
        ovr_loss(loc, scale, torch.full((2, 3), 5))
    with pytest.raises(ValueError, match="unknown reduction"):
        ovr_loss(loc, scale, targets.clamp(min=0), reduction="median")


def test_ovr_loss_is_not_convex():
    """Foundations, theorem 3.2, claims that it is; a midpoint lies above the chord for a target far below its threshold."""

    def loss(loc):
        return ovr_loss(torch.tensor([[loc]], dtype=torch.float64), torch.ones(1, 1).double(), torch.tensor([0])).item()

    assert loss(-6.0) > (loss(-10.0) + loss(-2.0)) / 2


@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=9, unique=True),
    st.floats(-20, 20),
    st.floats(0.05, 5),
    st.floats(0, 2),
)
def test_a_slope_changes_no_order(locs, threshold, scale, slope):
    """The chance to pass rises with the location whatever the slope: decisions stay the backbone's (theory 3.5)."""
    loc = torch.tensor(sorted(locs), dtype=torch.float64)
    for family in ("cauchy", "gaussian"):
        log_p, log_not_p = ovr_log_probs(loc, torch.full_like(loc, scale), threshold, family=family, slope=slope)
        rounding = 1e-12 * (1 + log_p.abs() + log_not_p.abs())[1:]  # two locations may be one ulp apart
        assert (log_p.diff() >= -rounding).all() and (log_not_p.diff() <= rounding).all()


def test_the_tail_of_a_graded_gaussian_is_a_softmax():
    """log P falls by 1/(2 slope) per logit far below the threshold (theory 3.5)."""
    loc = torch.tensor([-200.0, -201.0], dtype=torch.float64)
    for slope in (0.25, 0.5, 0.56, 1.0):
        far, further = ovr_log_probs(loc, torch.ones(2).double(), 0.0, family="gaussian", slope=slope)[0].tolist()
        assert far - further == pytest.approx(1 / (2 * slope), rel=0.02)


@pytest.mark.parametrize("own_scale", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_several_tokens_may_be_right(own_scale, reduction):
    """L_cls = -sum_right log P - sum_wrong log(1 - P), written out; the linear loss has its values and gradients."""
    torch.manual_seed(3)
    targets = torch.tensor([4, 0, -100, 9, NO_TARGET])
    also = torch.tensor([[7, 2], [NO_TARGET, 5], [1, 1], [NO_TARGET, NO_TARGET], [3, NO_TARGET]])
    right = torch.zeros(5, 12, dtype=torch.bool)
    for row, tokens in enumerate([[4, 7, 2], [0, 5], [], [9], [3]]):
        right[row, tokens] = True
    mask = torch.ones(12, dtype=torch.bool)
    mask[11] = False
    scale = torch.rand(5, 6) + 0.2 if own_scale else torch.rand(5) + 0.2
    leaves = [torch.randn(5, 6), scale, torch.randn(12, 6), torch.randn(12), torch.randn(5, 1)]
    leaves = [leaf.double().requires_grad_(True) for leaf in leaves]
    loc, s, weight, bias, thresholds = leaves
    of_scores = s @ weight.abs().T if own_scale else s.unsqueeze(-1)
    scores = loc @ weight.T + bias
    log_p, log_not_p = ovr_log_probs(scores, of_scores, thresholds, slope=0.4)
    losses = -torch.where(right, log_p, log_not_p)[:, mask].sum(-1) * (targets != -100)
    wanted = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / 4}[reduction]
    settings = {"slope": 0.4, "vocabulary_mask": mask, "also_right": also, "reduction": reduction}
    torch.testing.assert_close(ovr_loss(scores, of_scores, targets, thresholds, **settings), wanted)
    gradients = []
    for impl in ("chunked", "reference"):
        found = linear_ovr_loss(*leaves, targets, impl=impl, **settings)
        torch.testing.assert_close(found, wanted)
        gradients.append(torch.autograd.grad((found * torch.arange(1, 6)).sum(), leaves))
    gradients.append(torch.autograd.grad((wanted * torch.arange(1, 6)).sum(), leaves))
    for a, b, c in zip(*gradients, strict=True):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)
    for bad in (12, 11):
        with pytest.raises(ValueError, match=r"outside the vocabulary|no token uses"):
            linear_ovr_loss(*leaves, targets, **(settings | {"also_right": torch.full((5, 1), bad)}))


def test_linear_ovr_loss_leaves_out_what_needs_no_gradient():
    loc = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(9, 4)
    loss = linear_ovr_loss(loc, torch.ones(3), weight, None, 0.0, torch.tensor([1, 2, 3]))
    loss.backward()
    assert loc.grad is not None and weight.grad is None
    with pytest.raises(ValueError, match="unknown impl"):
        linear_ovr_loss(loc, torch.ones(3), weight, None, 0.0, torch.tensor([1, 2, 3]), impl="magic")


@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4), st.floats(1e-3, 1e3))
def test_cauchy_nll_is_its_formula(value, loc, scale):
    value, loc, scale = (torch.tensor(x, dtype=torch.float64) for x in (value, loc, scale))
    expected = torch.log(torch.pi * scale) + torch.log(1 + ((value - loc) / scale) ** 2)
    torch.testing.assert_close(cauchy_nll(value, loc, scale), expected, rtol=1e-9, atol=1e-9)


def test_the_value_loss_can_be_negative():
    """Foundations, theorem 3.3, claims a lower bound of 0 for the gated loss."""
    assert cauchy_nll(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(0.01)) < 0


def test_quantile_crps_approaches_the_closed_form():
    levels = torch.arange(1, 20_000, dtype=torch.float64) / 20_000
    loc, scale, value = (torch.tensor(x, dtype=torch.float64) for x in (1.0, 2.0, 4.0))
    quantiles = loc + scale * torch.tan(torch.pi * (levels - 0.5))
    assert quantile_crps(value, quantiles, levels).item() == pytest.approx(
        cauchy_crps(value, loc, scale).item(), rel=2e-3
    )


def test_gate_opens_with_alpha_and_carries_no_gradient_unless_asked():
    prob = torch.tensor([0.0, 0.25, 1.0], requires_grad=True)
    assert gate(prob, 0.2).tolist() == pytest.approx([0.2, 0.4, 1.0])
    assert not gate(prob, 0.2).requires_grad
    gate(prob, 0.2, detach=False).sum().backward()
    assert prob.grad.tolist() == pytest.approx([0.8] * 3)
    with pytest.raises(ValueError, match="alpha"):
        gate(prob, 1.5)


def test_masks_follow_labels_padding_and_unknown_values():
    num = 9
    labels = torch.tensor([[1, num, 3, num, num], [1, num, 5, -100, -100]])
    values = torch.tensor([[0.0, 2.5, 0.0, torch.nan, 4.0], [0.0, 1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    masks = shift_targets(labels, values, mask, num)
    assert masks.cls_mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert masks.num_mask.tolist() == [[True, False, False, True], [True, False, False, False]]
    assert masks.values[masks.num_mask].tolist() == [2.5, 4.0, 1.0]
    assert masks.targets[1].tolist() == [num, -100, -100, -100]
    left = shift_targets(labels.flip(1), values.flip(1), mask.flip(1), num)  # padding predicts nothing
    assert left.cls_mask.tolist() == [[True] * 4, [False, False, False, True]]


def test_total_loss_counts_tokens_and_numbers_over_the_whole_batch():
    num = 9
    masks = shift_targets(torch.tensor([[1, num, 3]]), torch.tensor([[0.0, 2.0, 0.0]], dtype=torch.float64), None, num)
    of_number = torch.log(torch.tensor([[0.5, 0.25]])), torch.log(torch.tensor([[0.5, 0.75]]))
    rest, nll = torch.tensor([[1.0, 2.0]]), torch.tensor([3.0])
    parts = total_loss(masks, rest, of_number, nll, alpha=0.5, value_weight=2.0)
    cls = (1.0 + math.log(2) + 2.0 - math.log(0.75)) / 2
    assert parts.cls.item() == pytest.approx(cls)
    assert parts.reg.item() == pytest.approx((0.5 + 0.5 * 0.5) * 3.0)
    assert parts.total.item() == pytest.approx(cls + 2 * parts.reg.item())
    counted = replace(masks, num_items=8, num_numbers=4)
    shared = total_loss(counted, rest, of_number, nll)
    assert shared.cls.item() == pytest.approx(cls * 2 / 8) and shared.reg.item() == pytest.approx(3.0 / 4)
    none = shift_targets(torch.tensor([[1, 2, 3]]), None, None, num)
    assert total_loss(none, rest, of_number, nll[:0]).reg == 0


def test_a_row_of_zeros_gives_no_slope_that_is_not_a_number(tiny_tokenizer):
    """Its scale is the floor, and its score a thousand scales below the threshold."""
    model = graft_tiny("qwen2", tiny_tokenizer, score_scale="documents", score_noise=0.0)
    model.get_input_embeddings().weight.data[2] = 0.0
    model.action.threshold.data.fill_(1.0)
    inputs = model.processor("We have come 5 miles", return_tensors="pt")
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
