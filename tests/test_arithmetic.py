"""Arithmetic of individuals (theory 3.16)."""

import pytest
import torch

from causalqwen import Individual, Population
from causalqwen.decoding import Observed, mean, mix, move, nearest

ANN, BOB = (Individual.from_seed(seed, 400, name) for seed, name in ((1, "Ann"), (2, "Bob")))
VALUES, WORDS = (Observed(0, 5, 1.0, 1.0, 1.0, "values"), Observed(9, 0, 1.0, 1.0, 1.0, "softmax"))


def known(seed, size, evidence=VALUES, wide=0.5):
    """Somebody who was inferred, with equal width in all directions."""
    g = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    precision = torch.eye(size, dtype=torch.float64) / wide**2
    return Individual.from_normal(g, f"known {seed}", precision=precision, evidence=(evidence,))


def test_a_mixture_begins_and_ends_at_the_two_and_nobody_leaves_themselves():
    torch.testing.assert_close(mix(ANN, BOB, 0.0).normal, ANN.normal)
    torch.testing.assert_close(mix(ANN, BOB, 1.0).normal, BOB.normal)
    for share in (0.2, 0.5, 0.9):
        torch.testing.assert_close(mix(ANN, ANN, share).normal, ANN.normal)
        torch.testing.assert_close(mix(ANN, BOB, share).normal, mix(BOB, ANN, 1 - share).normal)
    near, nobody = nearest(mix(ANN, BOB, 0.3), {"Ann": ANN, "Bob": BOB}, 2), Individual.nobody(400)
    assert [name for name, _ in near] == ["Ann", "Bob"]
    opposite = move(ANN, ANN, nobody, 2.0)
    torch.testing.assert_close(mix(ANN, opposite).normal, nobody.normal)
    assert mix(nobody, nobody).normal.abs().max() == 0


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_a_mixture_of_people_has_the_law_of_people(share):
    left, right = Population.drawn(200, 400, 0), Population.drawn(200, 400, 1000)
    pairs = zip(left.names, right.names, strict=True)
    g = torch.stack([mix(left[one], right[other], share).normal for one, other in pairs])
    assert abs(g.std().item() - 1) < 0.025 and abs(g.mean().item()) < 0.01
    assert g.norm(dim=-1).std() < 1.5  # of people 0.71: nobody is half a person


def test_what_is_not_known_of_two_is_not_known_of_their_mixture():
    one, other = known(1, 50, wide=0.4), known(2, 50, wide=0.8)
    for share in (0.0, 0.5, 1.0):
        made = mix(one, other, share)
        spread = (made.draws - made.normal).square().mean().item()
        assert spread == pytest.approx((1 - share) * 0.16 + share * 0.64, rel=0.1)
        assert made.is_inferred and made.knows_values and made.evidence == (VALUES,)
    assert not mix(one, known(3, 50, WORDS)).knows_values
    exact = Individual.from_seed(4, 50)
    assert (mix(one, exact).draws - mix(one, exact).normal).square().mean().item() == pytest.approx(0.08, rel=0.1)
    same = mix(one, one)
    assert (same.draws - same.normal).square().mean().item() == pytest.approx(0.16, rel=0.1)
    assert not move(exact, one, known(3, 50, WORDS)).knows_values


def test_draws_along_a_line_are_not_taken_in_their_order():
    places = torch.linspace(-1, 1, 101, dtype=torch.float64)
    draws = places.unsqueeze(-1).expand(-1, 4)
    line = [Individual.from_normal(torch.full((4,), at), draws=at + draws) for at in (1.0, 1.1)]
    width = (mix(*line).draws - mix(*line).normal).var().item()
    assert width == pytest.approx(places.var().item(), rel=0.15)  # hand in hand it would be twice that


def test_moving_goes_along_a_difference_and_back():
    there = move(ANN, ANN, BOB)
    torch.testing.assert_close(there.normal, BOB.normal)
    torch.testing.assert_close(move(there, ANN, BOB, -1.0).normal, ANN.normal)
    torch.testing.assert_close(move(ANN, BOB, BOB, 3.0).normal, ANN.normal)
    one = known(1, 50)
    assert (move(one, one, one).draws - one.normal).square().mean().item() == pytest.approx(0.25, rel=0.1)


def test_a_mean_is_what_they_share():
    crowd = Population.drawn(100, 400, 5)
    middle = mean(crowd)
    torch.testing.assert_close(middle.normal, torch.stack([crowd[name].normal for name in crowd.names]).mean(0))
    assert middle.normal.std().item() == pytest.approx(0.1, rel=0.1)
    torch.testing.assert_close(mean([ANN, ANN]).normal, ANN.normal)
    one = known(1, 50)
    assert (mean([one, one]).draws - one.normal).square().mean().item() == pytest.approx(0.25, rel=0.1)
    assert mean([one, known(2, 50)]).draws.shape == (200, 50)


def test_strangers_are_one_apart_and_the_nearest_is_found():
    crowd = Population.drawn(50, 400, 5)
    (found, far), *others = nearest(crowd["seed 17"], crowd, 50)
    assert found == "seed 17" and far < 1e-6
    assert [far for _, far in others] == sorted(far for _, far in others)
    assert sum(far for _, far in others) / 49 == pytest.approx(1.0, rel=0.05)


def test_a_mixture_is_an_individual_like_any(tmp_path):
    mixture = mix(ANN, BOB, 0.25)
    mixture.save(tmp_path / "both")
    again = Individual.load(tmp_path / "both")
    assert torch.equal(again.factor, mixture.factor) and again.name == "75% Ann, 25% Bob"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: mix(ANN, BOB, 1.5), "between 0 and 1"),
        (lambda: mix(ANN, Individual.from_seed(1, 3)), "causal size is 400"),
        (lambda: mean([]), "at least"),
        (lambda: nearest(ANN, {}), "no individual to compare with"),
    ],
)
def test_mistakes_are_told(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
