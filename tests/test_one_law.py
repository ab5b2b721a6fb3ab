"""What is drawn is what is integrated: P(y | x) is the mean of P(y | u) over U (theory 2.4, 3.5, 3.9)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from causalqwen import CausalDecoding
from causalqwen.decoding import BoundDecoding
from causalqwen.distributions import upcast
from causalqwen.modeling.chain import Chain
from conftest import action_of, graft_tiny

TEXT = "They say that -3.5 of the people who came here went on to count 1,000 more"
SOURCES = [("token", "marginal"), ("marginal", "token"), ("sequence", "token"), ("marginal", "sequence")]


def law_of(model, places: int = -1) -> torch.Tensor:
    """z [-places, H] of the last positions of a real text."""
    inputs = model.processor(TEXT, return_tensors="pt")
    with torch.no_grad():
        return model.features(**inputs).last_hidden_state[0, places:]


def drawn(model, z: torch.Tensor, plan: CausalDecoding, count: int) -> Chain:
    """The chain at one position under `count` draws of the plan, each of a text of its own."""
    bound = BoundDecoding.bind(plan, count, model.config.causal_size, z.device, copies=count)
    return Chain(model, z.expand(count, 1, -1), bound.at(torch.zeros(count, 1, dtype=torch.int64)))


def uneven(model):
    """scale_U and |b_noise| that differ from coordinate to coordinate, and follow the context."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        net = model.abduction.scale_net
        net.weight.copy_(0.1 * torch.randn(net.weight.shape, generator=generator))
        net.bias += 0.5 * torch.randn(net.bias.shape, generator=generator)
        model.action.b_noise *= torch.rand(model.action.b_noise.shape, generator=generator)
    return model


def unlike(model):
    """Rows of the matrix whose length differs from block to block, and that share a large part."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight *= torch.linspace(0.1, 2, len(weight)).unsqueeze(-1)
        weight += weight.norm(dim=1).mean() * torch.nn.functional.normalize(
            torch.randn(weight.shape[1], generator=generator), dim=0
        )
    return model


@pytest.mark.parametrize("is_uneven", [False, True])
@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
@pytest.mark.parametrize(("temperature", "own"), [(1.0, "marginal"), (0.5, "token"), (1.6, "marginal")])
@pytest.mark.parametrize(("individual", "noise"), SOURCES)
def test_the_mean_of_what_is_drawn_is_what_is_integrated(
    tiny_tokenizer, individual, noise, temperature, own, family, is_uneven
):
    """P_k given any of the sources, whether own noise is drawn beside them or not: the mean is P_k at that temperature."""
    model = graft_tiny("qwen2", tiny_tokenizer, vocabulary_family=family)
    model = uneven(model) if is_uneven else model
    z, count = law_of(model), 12_000
    plans = [CausalDecoding(individual, noise, own, temperature, seed=seed) for seed in range(0, count, 2_000)]
    with torch.no_grad():
        wanted = drawn(model, z, CausalDecoding(temperature=temperature), 1).scores.p()[0, 0].double()
        found = torch.cat([drawn(model, z, plan, 2_000).scores.p() for plan in plans])[:, 0].double()
    error = found.std(0) / count**0.5
    sure = (error > 1e-9) & (wanted > 1e-3)  # rarer ones need more draws
    assert bool(sure.sum() > 5) and float(found.std(0).max()) > 1e-3  # something is drawn
    standing = ((found.mean(0) - wanted) / error)[sure]
    assert standing.abs().max() < 4.5 and standing.square().mean() < 3, standing.abs().max()  # tokens share draws


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
@pytest.mark.parametrize("preset", ["sample", "persona"])
def test_scores_with_all_drawn_pass_their_thresholds_as_often_as_p_says(tiny_tokenizer, preset, family, temperature):
    model = uneven(graft_tiny("qwen2", tiny_tokenizer, vocabulary_family=family))
    z, count = law_of(model), 12_000
    with torch.no_grad():
        whole = drawn(model, z, CausalDecoding(temperature=temperature), 1)
        passed = torch.zeros(len(model.action.vocabulary_mask))
        for seed in range(0, count, 2_000):
            chain = drawn(model, z, CausalDecoding.preset(preset, seed=seed, temperature=temperature), 2_000)
            passed += (chain.raced() > chain.threshold).sum(0)[0]
    p = whole.scores.p()[0, 0].double()
    sure = p * count > 20
    assert sure.sum() > 5
    standing = ((passed / count - p) / (p * (1 - p) / count).sqrt())[sure]
    assert standing.abs().max() < 4.5 and standing.square().mean() < 3, standing.abs().max()


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
@pytest.mark.parametrize("preset", ["causal", "noise", "persona", "sample"])
def test_next_to_nothing_drawn_is_nothing_drawn(tiny_tokenizer, preset, family):
    """The decision, and the law of the value, as the temperature goes to 0, and there."""
    model = uneven(graft_tiny("qwen2", tiny_tokenizer, vocabulary_family=family, value_family=family))
    z = law_of(model)
    with torch.no_grad():
        whole = Chain(model, z)
        for temperature in (1e-6, 0.0):
            chain = drawn(model, z, CausalDecoding.preset(preset, seed=1, temperature=temperature), 1)
            assert chain.decision_scores().argmax() == whole.decision_scores().argmax()
            for found, wanted in zip(chain.value(), whole.value(), strict=True):
                torch.testing.assert_close(found[0], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("value_family", ["gaussian", "cauchy"])
@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_the_mean_of_the_values_that_are_drawn_is_their_law(tiny_tokenizer, value_family, temperature):
    model = uneven(graft_tiny("qwen2", tiny_tokenizer, value_family=value_family))
    z, count = law_of(model), 20_000
    with torch.no_grad():
        loc, scale = Chain(model, z).value()
        at = (loc + scale * torch.tensor([-2.0, -1.0, -0.3, 0.0, 0.5, 1.5])).double()
        wanted = model.action.value_law.cdf(at, loc.double(), scale.double())
        for preset in ("causal", "noise"):
            plan = CausalDecoding.preset(preset, seed=3, temperature=temperature)
            own, left = (column[:, 0].double() for column in drawn(model, z, plan, count).value())
            each = model.action.value_law.cdf(at, own.unsqueeze(-1), left.unsqueeze(-1))
            assert each.std(0).min() > 1e-3  # something is drawn
            assert ((each.mean(0) - wanted) / (each.std(0) / count**0.5)).abs().max() < 4.5


@given(st.integers(0, 10**6), st.sampled_from(["gaussian", "cauchy"]), st.floats(0.0, 3.0))
def test_no_row_exceeds_the_common_scale(seed, family, unevenness):
    generator = torch.Generator().manual_seed(seed)
    action, lm_head = action_of(6, 9, vocabulary_family=family, initial_noise=0.3)
    with torch.no_grad():
        lm_head.weight.copy_(torch.randn(9, 6, generator=generator) * 3 ** torch.randn(9, 1, generator=generator))
        action.num_row.copy_(10 * torch.randn(6, generator=generator))
    scale = (unevenness * torch.randn(4, 6, generator=generator)).exp()
    words = action.vocabulary(lm_head)
    common = action.score_scale_of(scale, words)
    rows = action.law.linear_scale(scale, words.rows_of_all()[0])
    assert bool((rows <= common * (1 + 1e-5)).all())
    if unevenness == 0:  # the longest row reaches it
        torch.testing.assert_close(rows.amax(-1, keepdim=True), common)


@pytest.mark.parametrize("preset", ["causal", "noise", "individual-only", "persona", "sample"])
def test_decisions_are_those_of_somebody_who_reads_the_law(tiny_tokenizer, preset):
    """In numpy, from loc_U, scale_U, |b_noise|, W, C and the formulas of theory 3.5 alone."""
    model = graft_tiny("qwen2", tiny_tokenizer)
    z, count, T = law_of(model), 30_000, 2.0
    with torch.no_grad():
        chain = Chain(model, z)
        loc, scale, noise, c = (
            part.double().numpy()
            for part in (chain.loc_U[0], chain.scale_U[0], model.action.noise, model.action.threshold)
        )
        rows, bias, used = (part.double().numpy() for part in chain.words.rows_of_all())
        made = [drawn(model, z, CausalDecoding.preset(preset, seed=seed, temperature=T), 2_000).decision_scores()
                for seed in range(0, count, 2_000)]  # fmt: skip
    found = torch.cat([part[:, 0].masked_fill(~torch.from_numpy(used > 0), -torch.inf).argmax(-1) for part in made])
    chance, plan = np.random.default_rng(0), CausalDecoding.preset(preset)
    has_U, has_noise = plan.individual_mode != "marginal", plan.noise == "token"
    moved = scale * chance.standard_normal((count, len(loc))) * has_U
    moved += noise * chance.standard_normal((count, len(loc))) * has_noise
    scores = (loc + T * moved) @ rows.T + bias
    if preset != "individual-only":  # there nothing is left
        marginal = loc @ rows.T + bias
        threshold = T * (c + np.log(np.exp(marginal[model.action.rest_mask] / T).sum()))
        longest = np.sqrt((rows[: model.action.rows] ** 2 * used[: model.action.rows, None]).sum(-1).max())
        common = longest**2 * (scale[0] ** 2 + noise[0] ** 2) + model.config.score_noise**2
        taken = (rows**2).sum(-1) * (has_U * scale[0] ** 2 + has_noise * noise[0] ** 2)
        own = np.sqrt(T**2 * (common - taken) + T * model.config.score_slope * np.maximum(threshold - marginal, 0))
        races = plan.own == "token"
        scores = scores + own * chance.standard_normal(scores.shape) if races else (scores - threshold) / own
    wanted = np.where(used > 0, scores, -np.inf).argmax(-1)
    counts = np.stack([np.bincount(side, minlength=len(rows)) for side in (found.numpy(), wanted)])
    often = counts.sum(0) >= 20
    table = np.c_[counts[:, often], counts[:, ~often].sum(-1)]
    assert often.sum() > 3
    assert stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 1e-3


@pytest.mark.parametrize("value_family", ["gaussian", "cauchy"])
def test_token_and_value_of_one_draw_move_together(tiny_tokenizer, value_family):
    """The rank correlation that W_k, W_reg and scale_U predict, from one e1 read by both heads."""
    model = uneven(graft_tiny("qwen2", tiny_tokenizer, value_family=value_family))
    z, count = law_of(model), 20_000
    with torch.no_grad():
        chain = drawn(model, z, CausalDecoding.preset("causal", seed=2), count)
        scale, of_value = upcast(Chain(model, z).scale_U[0]), model.action.value_linear[0][0]
        rows = upcast(model.vocabulary().weight)
        row = rows[(torch.nn.functional.normalize(rows) @ (scale.square() * of_value)).abs().argmax()]
        of_token = upcast(chain.loc[:, 0]) @ row
        of_values = chain.value()[0][:, 0]
        g = torch.randn(200_000, len(row), generator=torch.Generator().manual_seed(1))
        read = g if value_family == "gaussian" else torch.tan(torch.pi * (torch.special.ndtr(g.double()) - 0.5)).float()
        wanted = stats.spearmanr((g * (scale * row)).sum(-1), (read * (scale * of_value)).sum(-1)).statistic
    found = stats.spearmanr(of_token, of_values).statistic
    assert abs(wanted) > 0.05 and found == pytest.approx(wanted, abs=0.03)


def test_values_are_drawn_by_their_law_whatever_temperature_words_have(tiny_tokenizer):
    model = graft_tiny("qwen2", tiny_tokenizer)
    z = law_of(model)
    with torch.no_grad():
        loc, scale = (part.item() for part in Chain(model, z).value())
        for temperature in (1.0, 7.0):
            plan = CausalDecoding.preset("persona", temperature=temperature, seed=4)
            found = drawn(model, z, plan, 5_000).value()[0][:, 0]
            assert stats.kstest(found.double().numpy(), stats.cauchy(loc, scale).cdf).pvalue > 1e-3


@pytest.mark.slow
def test_it_holds_on_the_real_backbone(smollm2):
    """100,000 draws at each of 20 places of a speech, the 50 likeliest tokens (three minutes on one core)."""
    from causalqwen.data.texts import HELD_OUT_YEARS, speeches

    model, count, at_once = smollm2, 100_000, 1_000
    ids = torch.tensor([model.processor.tokenizer(speeches(HELD_OUT_YEARS))["input_ids"][:420]])
    with torch.no_grad():
        z = model.features(ids).last_hidden_state[0, 19::20][:20]
        whole = Chain(model, z)
        likely = whole.scores.p().topk(50)
        one = BoundDecoding.bind(CausalDecoding.preset("causal"), 1, model.config.causal_size, z.device)
        left = Chain(model, z[None], one.at(torch.arange(20)[None])).own()[0]
        left = left.gather(-1, likely.indices).double()
        rows = upcast(model.vocabulary().weight)[likely.indices].transpose(-1, -2)  # [20, C, 50]
        total = squares = torch.zeros(20, 50).double()
        for seed in range(0, count, at_once):
            plan = CausalDecoding.preset("causal", seed=seed)
            bound = BoundDecoding.bind(plan, at_once, model.config.causal_size, z.device, copies=at_once)
            chain = Chain(model, z.expand(at_once, 20, -1), bound.at(torch.arange(20).expand(at_once, 20)))
            scores = (upcast(chain.loc).transpose(0, 1) @ rows).double()  # [20, draws, 50]
            p = torch.special.ndtr((scores - whole.threshold.double().unsqueeze(1)) / left.unsqueeze(1))
            total, squares = total + p.sum(1), squares + p.square().sum(1)
    mean = total / count
    error = ((squares / count - mean.square()) / count).sqrt()
    standing = (mean - likely.values.double()) / error
    print(f"within 3 standard errors: {float((standing.abs() <= 3).float().mean()):.4f}; "
          f"largest {float(standing.abs().max()):.2f}; mean square {float(standing.square().mean()):.3f}")  # fmt: skip
    assert (standing.abs() > 3).float().mean() < 0.01  # 0.0027 by chance
    assert standing.abs().max() < 5 and 0.7 < standing.square().mean() < 1.4


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
@pytest.mark.parametrize("size", [1, 7, 1024])
def test_scales_of_all_tokens_are_the_formula_s(tiny_tokenizer, monkeypatch, family, size):
    """Values and gradients, float64, block by block of the matrix's rows."""
    monkeypatch.setattr("causalqwen.modeling.scores._ROWS_AT_ONCE", {"cpu": size})
    model = graft_tiny("qwen2", tiny_tokenizer, vocabulary_family=family).double()
    words, generator = model.vocabulary(), torch.Generator().manual_seed(0)
    scale = torch.rand(3, 2, model.config.causal_size, generator=generator, dtype=torch.float64).requires_grad_()
    rows, power = words.rows_of_all()[0].detach(), words.action.law.alpha
    used = rows.abs().amax(-1) > 0  # the root of 0 has no gradient
    wanted = ((scale**power) @ (rows[used].abs() ** power).T) ** (1 / power)
    found = words.scales(scale)[..., used]
    torch.testing.assert_close(found, wanted)
    weights = torch.rand(wanted.shape, generator=generator, dtype=torch.float64)
    slow, fast = (torch.autograd.grad((of * weights).sum(), scale)[0] for of in (wanted, found))
    torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 2, 16, 17, 40])
def test_the_fastest_product_is_the_product(tiny_tokenizer, dtype, count):
    words, generator = graft_tiny("qwen2", tiny_tokenizer).to(dtype).vocabulary(), torch.Generator().manual_seed(count)
    loc = torch.randn(count, words.weight.shape[1], generator=generator).to(dtype).requires_grad_()
    wanted, found = (loc.double() @ words.weight.double().T).to(dtype), words.products(loc)
    slow, fast = (torch.autograd.grad(of.sum(), (loc, words.weight)) for of in (wanted, found))
    torch.testing.assert_close((found, *fast), (wanted, *slow))


def test_a_layer_that_has_a_product_of_its_own_is_asked_for_it(tiny_tokenizer):
    """vLLM keeps the rows packed as its kernel wants them, in half of the time that the matrix takes."""
    model, asked = graft_tiny("qwen2", tiny_tokenizer), []

    class Packed:
        weight, bias = model.get_output_embeddings().weight, None

        def products(self, loc):
            asked.append(len(loc))
            return torch.nn.functional.pad(loc @ self.weight.T, (0, 3))[:, :-3]  # as of rows that are padded

    words = model.action.vocabulary(Packed())
    z, plan = law_of(model).unsqueeze(1), CausalDecoding.preset("sample", seed=3)
    with torch.no_grad():
        chain = drawn(model, z, plan, 3)
        found, wanted = Chain(model, chain.features, chain.draws, words).decision_scores(), chain.decision_scores()
    assert asked[0] == 6  # with what is drawn and without
    torch.testing.assert_close(found, wanted)
