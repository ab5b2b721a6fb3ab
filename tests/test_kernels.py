"""Fast paths against their references."""

import itertools
import math
import os
import shutil
from importlib.util import find_spec

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special
from torch import Tensor

from causalqwen import linear_ovr_loss
from causalqwen.distributions import get_family
from causalqwen.kernels import inclusion_probabilities, sample_negatives
from causalqwen.kernels.compiled_ovr import ATAN, MILLS
from causalqwen.losses import NO_TARGET

FAMILIES = ["cauchy", "gaussian"]


def test_the_polynomials_of_the_fused_kernels_are_as_exact_as_they_say():
    x = np.concatenate([np.linspace(0, 60, 6001), [1e3, 1e6]])
    wanted = math.sqrt(math.pi / 2) * special.erfcx(x / math.sqrt(2))
    found = sum(coefficient * (1 + x / 4) ** -power for power, coefficient in enumerate(MILLS, start=1))
    np.testing.assert_allclose(found, wanted, rtol=5e-8)
    z = np.linspace(1e-6, 1, 2001)
    np.testing.assert_allclose(np.polyval(ATAN, z**2), np.arctan(z) / z, rtol=3e-8)


# ---- the law's pair --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fast_form_of_a_law_is_exact_in_float32(family):
    """log F and F'/F against 50 digits, both tails, within a few units of the last place."""
    mpmath.mp.dps = 50
    x = torch.cat([torch.linspace(-40, 40, 321), torch.tensor([-1e4, 0.0, 1e-6, 300.0, 1e4])])
    for rows in (x.unsqueeze(1), x.abs().unsqueeze(0)):
        log_cdf, hazard = get_family(family).log_cdf_and_hazard(rows)
        for place, log_f, h in zip(
            rows.flatten().tolist(), log_cdf.flatten().tolist(), hazard.flatten().tolist(), strict=True
        ):
            at = mpmath.mpf(place)
            if family == "cauchy":
                cdf, density = mpmath.atan2(1, -at) / mpmath.pi, 1 / (mpmath.pi * (1 + at * at))
            else:
                cdf, density = mpmath.erfc(-at / mpmath.sqrt(2)) / 2, mpmath.npdf(at)
            assert log_f == pytest.approx(float(mpmath.log(cdf)), rel=1e-5, abs=1e-38)
            assert h == pytest.approx(float(density / cdf), rel=1e-5, abs=1e-38)


# ---- the loss --------------------------------------------------------------------------------------------------------


def problem(
    positions: int, size: int, vocabulary: int, own_scale: bool, kind: str
) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    scale = torch.rand(positions, *[size] * own_scale, generator=generator) + 0.2
    thresholds = {"one": torch.tensor(0.3), "token": normal(vocabulary), "position": normal(positions, 1)}[kind]
    leaves = [normal(positions, size), scale, normal(vocabulary, size), normal(vocabulary), thresholds]
    targets = torch.randint(vocabulary - 1, (positions,), generator=generator)
    targets[0], targets[1] = NO_TARGET, -100
    mask = torch.ones(vocabulary, dtype=torch.bool)
    mask[-1] = False
    return leaves, targets, mask


def run(leaves: list[Tensor], dtype: torch.dtype, targets: Tensor, reduction: str = "none", **settings) -> list[Tensor]:
    """The loss, and the gradient of each leaf; Triton's kernel on a GPU where there is one."""
    device = "cuda" if settings.get("impl") == "triton" and torch.cuda.is_available() else "cpu"
    leaves = [leaf.detach().clone().to(device, dtype).requires_grad_(True) for leaf in leaves]
    if settings.get("vocabulary_mask") is not None:
        settings["vocabulary_mask"] = settings["vocabulary_mask"].to(device)
    loss = linear_ovr_loss(*leaves, targets.to(device), reduction=reduction, **settings)
    weights = torch.linspace(0.5, 2.0, len(targets), device=device) if reduction == "none" else 1.0
    (loss * weights).sum().backward()
    return [loss.detach().double().cpu()] + [leaf.grad.double().cpu() for leaf in leaves]


def near(fast: list[Tensor], plain: list[Tensor], exact: list[Tensor], share: float) -> None:
    for a, b, c in zip(fast, plain, exact, strict=True):
        assert (a - c).abs().max() <= (b - c).abs().max() + share * c.abs().max()


NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="no compiler here")
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="no triton here")
IMPLEMENTATIONS = [
    "chunked",
    pytest.param("triton", marks=[NEEDS_TRITON, pytest.mark.slow]),
    pytest.param("compiled", marks=[NEEDS_COMPILER, pytest.mark.slow]),
]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own_scale", [False, True])
@pytest.mark.parametrize("slope", [0.0, 0.6])
def test_float32_is_within_rounding_of_the_float64_reference(impl, family, own_scale, slope):
    """Ragged shapes, all kinds of thresholds; within the error of the plain form in float32, plus 1e-5. In float64 blocks give
    the reference's values and gradients."""
    assert impl != "triton" or torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    for kind, reduction in itertools.product(("one", "token", "position"), ("none", "sum", "mean")):
        leaves, targets, mask = problem(5, 7, 37, own_scale, kind)
        settings = {"family": family, "slope": slope, "vocabulary_mask": mask, "reduction": reduction}
        exact = run(leaves, torch.float64, targets, impl="reference", **settings)
        if impl == "chunked":
            torch.testing.assert_close(run(leaves, torch.float64, targets, chunk_size=4, **settings), exact)
        plain = run(leaves, torch.float32, targets, impl="reference", **settings)
        near(run(leaves, torch.float32, targets, impl=impl, chunk_size=16, **settings), plain, exact, 1e-5)


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("own_scale", [False, True])
def test_the_compiled_stage_far_from_the_middle(own_scale):
    """Scores from far below to far above the thresholds, a sample of the negatives, and rows of the vocabulary left out."""
    leaves, targets, mask = problem(5, 7, 61, own_scale, "token")
    leaves[2] *= torch.logspace(-3, 1.5, 61).unsqueeze(1)
    for negatives in (None, sample_negatives(inclusion_probabilities(torch.ones(61) * mask, 30))):
        settings = {"vocabulary_mask": mask, "negatives": negatives, "reduction": "sum"}
        exact = run(leaves, torch.float64, targets, **settings)
        plain = run(leaves, torch.float32, targets, **settings)
        near(run(leaves, torch.float32, targets, impl="compiled", **settings), plain, exact, 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own_scale", [False, True])
def test_bfloat16_is_within_the_error_of_the_plain_form(family, own_scale):
    leaves, targets, mask = problem(33, 64, 301, own_scale, "position")
    settings = {"family": family, "vocabulary_mask": mask}
    exact = run(leaves, torch.float64, targets, impl="reference", **settings)
    plain = run(leaves, torch.bfloat16, targets, impl="reference", **settings)
    near(run(leaves, torch.bfloat16, targets, chunk_size=100, **settings), plain, exact, 1e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile, where a graph breaks
def test_under_autocast_checkpointing_and_compilation():
    leaves, targets, _ = problem(9, 16, 50, False, "one")
    plain = run(leaves, torch.float32, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = run(leaves, torch.float32, targets)
    for a, b in zip(low, plain, strict=True):
        assert (a - b).abs().max() <= 2e-2 * b.abs().max()
    wide = [leaf.clone().requires_grad_(True) for leaf in leaves]
    loss = torch.utils.checkpoint.checkpoint(
        lambda *parts: linear_ovr_loss(*parts, targets, reduction="sum"), *wide, use_reentrant=False
    )
    loss.backward()
    assert torch.equal(wide[0].grad.double(), run(leaves, torch.float32, targets, "sum")[1])
    compiled = torch.compile(lambda *parts, **settings: 1.0 * linear_ovr_loss(*parts, **settings), backend="aot_eager")
    wide = [leaf.clone().requires_grad_(True) for leaf in leaves]
    compiled(*wide, targets, reduction="sum").backward()
    torch.testing.assert_close(wide[2].grad.double(), run(leaves, torch.float32, targets, "sum")[3])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_backward_may_come_twice(reduction):
    leaves, targets, _ = problem(6, 5, 30, True, "one")
    leaves = [leaf.clone().requires_grad_(True) for leaf in leaves]
    loss = linear_ovr_loss(*leaves, targets, reduction=reduction).sum()
    loss.backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in leaves]
    (3 * loss).backward()
    for leaf, first in zip(leaves, once, strict=True):
        torch.testing.assert_close(leaf.grad, 4 * first, rtol=1e-4, atol=1e-5)


def test_a_pass_never_holds_tokens_by_vocabulary():
    """The largest tensor of a pass, in numbers, follows chunk_size."""
    positions, size, vocabulary = 64, 8, 4096
    loc, weight = torch.randn(positions, size, requires_grad=True), torch.randn(vocabulary, size)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                largest = max(largest, tensor.numel() if isinstance(tensor, Tensor) else 0)
            return out

    with Watch():
        linear_ovr_loss(
            loc, torch.ones(positions), weight, None, 3.0, torch.zeros(positions, dtype=torch.int64), chunk_size=128
        ).backward()
    assert largest <= max(positions * 128, vocabulary * size)


def test_a_sharded_weight_is_refused():
    from torch.distributed.tensor import DTensor

    sharded = torch.Tensor._make_subclass(DTensor, torch.ones(4, 3))
    with pytest.raises(ValueError, match="FSDP"):
        linear_ovr_loss(torch.ones(2, 3), torch.ones(2), sharded, None, 0.0, torch.tensor([0, 1]))


# ---- sampled negatives -----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 100.0), min_size=2, max_size=40), st.integers(1, 40))
def test_inclusion_probabilities_sum_to_the_size(importance, size):
    q = torch.tensor(importance, dtype=torch.float64)
    possible = int((q > 0).sum())
    if not 1 <= size <= possible:
        with pytest.raises(ValueError, match="negatives of"):
            inclusion_probabilities(q, size)
        return
    pi = inclusion_probabilities(q, size)
    assert pi.sum().item() == pytest.approx(size, rel=1e-9)
    assert (pi <= 1).all() and (pi[q == 0] == 0).all()
    assert (pi[q.argsort()].diff() >= -1e-12).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own_scale", [False, True])
def test_a_sample_of_negatives_is_unbiased(family, own_scale):
    """Mean over many samples against the whole, in units of its standard error; loss and every gradient."""
    leaves, targets, mask = problem(4, 5, 60, own_scale, "token")
    settings = {"family": family, "vocabulary_mask": mask, "reduction": "sum"}
    whole = run(leaves, torch.float64, targets, **settings)
    importance = torch.rand(60, generator=torch.Generator().manual_seed(0)) + 0.05
    importance[-1] = 0.0
    pi = inclusion_probabilities(importance, 15)
    generator = torch.Generator().manual_seed(1)
    draws = [
        run(leaves, torch.float64, targets, negatives=sample_negatives(pi, generator), **settings) for _ in range(600)
    ]
    for place, truth in enumerate(whole):
        found = torch.stack([draw[place] for draw in draws])
        error = found.std(0) / math.sqrt(len(found))
        z = ((found.mean(0) - truth).abs() / (error + 1e-9 * truth.abs().max() + 1e-12)).flatten()
        assert z.square().mean() < 2.0 and z.max() < 5.0
    every = sample_negatives(inclusion_probabilities(torch.ones(60) * mask, 59))
    torch.testing.assert_close(run(leaves, torch.float64, targets, negatives=every, **settings), whole)


@pytest.mark.parametrize("own_scale", [False, True])
def test_a_sample_never_counts_what_is_also_right_among_the_wrong(own_scale):
    """Whichever right token is the target, loss and gradients are the same; with every token, those of the whole."""
    leaves, targets, mask = problem(4, 5, 60, own_scale, "token")
    targets, also = torch.tensor([5, 8, 40, 9]), torch.tensor([7, 3, 11, 50])
    settings = {"vocabulary_mask": mask, "reduction": "sum"}
    pi = inclusion_probabilities(torch.ones(60) * mask, 30)
    for seed in range(4):
        sample = sample_negatives(pi, torch.Generator().manual_seed(seed))
        one, other = (
            run(leaves, torch.float64, first, negatives=sample, also_right=second.unsqueeze(-1), **settings)
            for first, second in ((targets, also), (also, targets))
        )
        torch.testing.assert_close(one, other)
    settings["also_right"] = also.unsqueeze(-1)
    every = sample_negatives(inclusion_probabilities(torch.ones(60) * mask, 59))
    whole = run(leaves, torch.float64, targets, **settings)
    torch.testing.assert_close(run(leaves, torch.float64, targets, negatives=every, **settings), whole)
