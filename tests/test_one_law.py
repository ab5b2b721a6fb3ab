"""What is drawn is what is integrated: P(y | x) is the mean of P(y | u) over U (theory 2.4, 3.5, 3.9)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from causalqwen import CausalDecoding, Individual
from causalqwen.core import Chain
from causalqwen.decoding import BoundDecoding
from causalqwen.distributions import upcast
from causalqwen.kernels import Blocks, Decisions, drawn_decisions
from causalqwen.kernels.drawn_decisions import Found
from causalqwen.modeling.action import ActionNetwork, ActionSettings
from causalqwen.modeling.vocabulary import Vocabulary
from causalqwen.parts import common_scale
from conftest import graft_tiny

TEXT = "They say that -3.5 of the people who came here went on to count 1,000 more"
PLANS = {
    "causal": {},
    "noise": {},
    "persona": {},
    "shared-individual": {"temperature": 0.5},
    "shared-noise": {"temperature": 0.3},
}


def law_of(model, place: int = -1) -> torch.Tensor:
    """z [1, H] of one position of a real text."""
    inputs = model.processor(TEXT, return_tensors="pt")
    with torch.no_grad():
        return model.features(**inputs).last_hidden_state[0, place : place + 1 if place != -1 else None]


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
@pytest.mark.parametrize("preset", list(PLANS))
def test_the_mean_of_what_is_drawn_is_what_is_integrated(tiny_tokenizer, preset, family, is_uneven):
    model = graft_tiny("qwen2", tiny_tokenizer, vocabulary_family=family)
    model = uneven(model) if is_uneven else model
    z, count = law_of(model), 20_000
    with torch.no_grad():
        wanted = Chain(model, z).scores.p()[0].double()
        found = torch.cat([drawn(model, z, CausalDecoding.preset(preset, seed=seed, **PLANS[preset]), 2_000).scores.p()
                           for seed in range(0, count, 2_000)])[:, 0].double()  # fmt: skip
    error = found.std(0) / count**0.5
    sure = error > 1e-9
    assert bool(sure.sum() > 100) and float(found.std(0).max()) > 1e-3  # something is drawn
    standing = ((found.mean(0) - wanted) / error)[sure]
    assert standing.abs().max() < 4.5 and standing.square().mean() < 3, standing.abs().max()  # tokens share draws


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
@pytest.mark.parametrize("preset", ["causal", "noise", "persona"])
def test_next_to_nothing_drawn_is_nothing_drawn(tiny_tokenizer, preset, family):
    """P_k, and the law of the value, as the temperature goes to 0, and there."""
    model = uneven(graft_tiny("qwen2", tiny_tokenizer, vocabulary_family=family, value_family=family))
    z = law_of(model)
    with torch.no_grad():
        whole = Chain(model, z)
        for temperature in (1e-6, 0.0):
            chain = drawn(model, z, CausalDecoding.preset(preset, seed=1, temperature=temperature), 1)
            torch.testing.assert_close(chain.scores.p()[0], whole.scores.p(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(chain.number.p()[0], whole.number.p(), atol=1e-5, rtol=1e-5)
            for found, wanted in zip(chain.value(), whole.value(), strict=True):
                torch.testing.assert_close(found[0], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("value_family", ["gaussian", "cauchy", "stable-1.5"])
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
    action = ActionNetwork(6, 9, ActionSettings(vocabulary_family=family, initial_noise=0.3, num_token_id=9))
    with torch.no_grad():
        action.lm_head.weight.copy_(
            torch.randn(9, 6, generator=generator) * 3 ** torch.randn(9, 1, generator=generator)
        )
        action.num_row.copy_(10 * torch.randn(6, generator=generator))
    scale = (unevenness * torch.randn(4, 6, generator=generator)).exp()
    words = action.vocabulary()
    common = action.score_scale_of(scale, words)
    rows = action.law.linear_scale(scale, words.rows_of_all()[0])
    assert bool((rows <= common * (1 + 1e-5)).all())
    if unevenness == 0:  # the longest row reaches it
        torch.testing.assert_close(rows.amax(-1, keepdim=True), common)


@pytest.mark.parametrize("preset", ["causal", "noise", "persona", "individual-only"])
def test_decisions_are_those_of_somebody_who_reads_the_law(tiny_tokenizer, preset):
    """In numpy, from loc_U, scale_U, |b_noise|, W, C and the formulas of theory 3.5 alone."""
    model = graft_tiny("qwen2", tiny_tokenizer)
    z, count, temperature = law_of(model), 30_000, 2.0
    with torch.no_grad():
        chain = Chain(model, z)
        loc, scale, noise, threshold = (
            part.double().numpy() for part in (chain.loc_U[0], chain.scale_U[0], model.action.noise, chain.threshold[0])
        )
        rows, bias, used = (None if part is None else part.double().numpy() for part in chain.words.rows_of_all())
        made = [drawn(model, z, CausalDecoding.preset(preset, seed=seed, temperature=temperature), 2_000).ranked()
                for seed in range(0, count, 2_000)]  # fmt: skip
    found = torch.cat([part[:, 0].masked_fill(~torch.from_numpy(used > 0), -torch.inf).argmax(-1) for part in made])
    chance = np.random.default_rng(0)
    own_U = scale * chance.standard_normal((count, len(loc))) * (preset != "noise")
    own_noise = noise * chance.standard_normal((count, len(loc))) * (preset in ("noise", "persona"))
    scores = (loc + temperature * (own_U + own_noise)) @ rows.T + (0 if bias is None else bias)
    if preset != "individual-only":  # there nothing is left
        marginal = loc @ rows.T + (0 if bias is None else bias)
        longest = np.sqrt((rows[: model.action.rows] ** 2 * used[: model.action.rows, None]).sum(-1).max())
        common = longest**2 * (scale[0] ** 2 + noise[0] ** 2) + model.config.score_noise**2
        whole = common + model.config.score_slope * np.maximum(threshold - marginal, 0)
        taken = (rows**2).sum(-1) * (
            (preset != "noise") * scale[0] ** 2 + (preset in ("noise", "persona")) * noise[0] ** 2
        )
        scores = (scores - threshold) / np.sqrt(whole - taken)
    wanted = np.where(used > 0, scores, -np.inf).argmax(-1)
    counts = np.stack([np.bincount(side, minlength=len(rows)) for side in (found.numpy(), wanted)])
    often = counts.sum(0) >= 20
    table = np.c_[counts[:, often], counts[:, ~often].sum(-1)]
    assert often.sum() > 3
    assert stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 1e-3


def test_a_temperature_of_nothing_decides_as_nobody_in_particular(tiny_tokenizer):
    model = graft_tiny("qwen2", tiny_tokenizer)
    inputs = model.processor(TEXT, return_tensors="pt")
    with torch.no_grad():
        z = model.features(**inputs).last_hidden_state
        for preset in ("causal", "persona"):
            bound = BoundDecoding.bind(CausalDecoding.preset(preset, temperature=0.0, seed=1), 1, 32, z.device)
            assert torch.equal(
                Chain(model, z, bound.at(torch.arange(z.shape[1])[None])).ranked(), Chain(model, z).ranked()
            )


@pytest.mark.parametrize("value_family", ["gaussian", "cauchy"])
def test_token_and_value_of_one_draw_move_together(tiny_tokenizer, value_family):
    """The rank correlation that W_k, W_reg and scale_U predict, from one e1 read by both heads."""
    model = uneven(graft_tiny("qwen2", tiny_tokenizer, value_family=value_family))
    z, count = law_of(model), 20_000
    with torch.no_grad():
        chain = drawn(model, z, CausalDecoding.preset("causal", seed=2), count)
        scale, token = upcast(Chain(model, z).scale_U[0]), 7
        row, of_value = upcast(model.vocabulary().weight[token]), model.action.value_linear[0][0]
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


def test_presets_by_name_are_tempered():
    wanted = {"persona": (1.5, 5.0), "causal": (5.0, 1.0), "shared-individual": (1.5, 1.0), "softmax": (1.0, 1.0)}
    for preset, temperatures in wanted.items():
        plan = CausalDecoding.preset(preset).fresh_at(5.0)
        assert (plan.temperature, plan.temperature_of_noise) == temperatures
    drawn, inferred = Individual.from_seed(1, 8), Individual.from_normal(torch.ones(8))
    for who, own in ((drawn, 1.5), (inferred, 1.0), ([drawn, inferred], 1.0), ([drawn, drawn], 1.5)):
        plan = CausalDecoding.preset("persona", individual=who).fresh_at(5.0)
        assert (plan.temperature, plan.temperature_of_noise) == (own, 5.0)


def test_a_preset_by_name_is_at_the_models_own_temperature(tiny_tokenizer):
    model = graft_tiny("qwen2", tiny_tokenizer)
    assert model.config.text_temperature > 1
    inputs = model.processor(TEXT, prompt=True, return_tensors="pt")
    for name in ("softmax", "persona"):
        plan = CausalDecoding.preset(name)
        plan = plan if name == "softmax" else plan.fresh_at(model.config.text_temperature)
        texts = []
        for asked in (name, plan):
            torch.manual_seed(3)
            texts.append(model.generate(**inputs, causal_decoding=asked, max_new_tokens=12).sequences)
        assert torch.equal(*texts), name


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
        left = model.action.scales.left(whole, upcast(whole.scale_U)).gather(-1, likely.indices).double()
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


def all_tokens(task: Decisions) -> Found:
    """Of the matrix, at every position."""
    rows, tokens = np.indices(task.scores.shape).reshape(2, -1)
    return Found(rows, tokens, upcast(task.scores).flatten().numpy())


def every_rank(model, task: Decisions) -> torch.Tensor:
    """Of the matrix's tokens, -inf for rows that none uses, and of `<NUM>` where it stands, [N, V']."""
    ranks = torch.from_numpy(task.ranks(all_tokens(task))).view(task.scores.shape)
    ranks = ranks.masked_fill(task.scores == -torch.inf, -torch.inf)
    return model.action.number.put(model.action, ranks, lambda: torch.from_numpy(task.of_number))


@pytest.mark.parametrize("share", [1.0, 1 / 64, 0.0])
@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "kind", "slope"), [(lambda model: model, "qwen2", {}), (unlike, "qwen2", {}),
                                                      (lambda model: model, "llama", {"score_slope": 50.0})])  # fmt: skip
def test_tokens_that_are_left_out_lose(tiny_tokenizer, dtype, family, share, rows, kind, slope, monkeypatch):
    """Decisions by candidates are those by all scores, by bounds, by products of their rows or of all, or by all."""
    for name, value in (("_SHARE", share), ("_PRODUCT", 0.0), ("_RANKED", 1.0), ("_FEW", 0)):
        monkeypatch.setattr(drawn_decisions, name, value)
    slope = slope if family == "gaussian" else {}
    model = uneven(rows(graft_tiny(kind, tiny_tokenizer, vocabulary_family=family, **slope)))
    with torch.no_grad():
        model.action.num_row.copy_(torch.randn(model.action.num_row.shape, generator=torch.Generator().manual_seed(2)))
    model = model.to(dtype)
    z, left, narrower = law_of(model, -4).unsqueeze(1).repeat_interleave(50, 0), 0, 0
    places = torch.arange(len(z)).unsqueeze(1)
    for preset in PLANS:
        for temperature in (0.3, 1.0, 6.0, 60.0):
            plan = CausalDecoding.preset(preset, seed=7, temperature=temperature)
            bound = BoundDecoding.bind(plan, len(z), model.config.causal_size, z.device, copies=len(z))
            with torch.no_grad():
                found = Chain(model, z, bound.at(places)).ranked().flatten(0, -2)
                task = Decisions(Chain(model, z, bound.at(places)))
                of_all = all_tokens(task)
                every = every_rank(model, task)
                assert torch.isfinite(found.amax(-1)).all()
                if share == 1.0:
                    at = found.argmax(-1, keepdim=True)
                    torch.testing.assert_close(every.gather(-1, at).squeeze(-1), every.amax(-1), rtol=1e-5, atol=1e-5)
                kept, best = torch.zeros(2, *every.shape, dtype=torch.bool), every.argmax(-1, keepdim=True)
                for one, some in zip(kept, (task.candidates(), task.closer(of_all)), strict=True):
                    one[torch.from_numpy(some.rows), torch.from_numpy(some.tokens)] = True
                kept[..., model.action.num_token_id] = True
                words, (reach, together) = model.vocabulary(), map(torch.from_numpy, (task.reach, task.together))
                own = task.moved @ upcast(words.weight).T.to(task.moved.dtype) - together.unsqueeze(-1)
                counts = np.full(len(z), len(words.weight))
                told = torch.from_numpy(task._moves(counts, of_all)).view(own.shape)
                rounding = drawn_decisions._ROUNDING[dtype] * words.norms * reach.unsqueeze(-1)
                used = model.action.vocabulary_mask[: len(words.weight)]
                assert ((told - own - together.unsqueeze(-1)).abs() <= rounding + 1e-6)[:, used].all()
                within = words.distances * reach.unsqueeze(-1) * (1 + 1e-4) + 1e-6
                assert (own.abs() <= within)[:, used].all()
                assert kept.gather(-1, best.expand(2, -1, -1)).all(), (preset, temperature)
                narrower += int(kept.sum())
                slow = model.action.scales._all(Chain(model, z, bound.at(places))).flatten(0, -2)
                if dtype != torch.bfloat16:  # whose product of both locs is rounded
                    best = slow.gather(-1, found.argmax(-1, keepdim=True)).squeeze(-1)
                    torch.testing.assert_close(best, slow.amax(-1), rtol=1e-5, atol=1e-5)
                    some = found > -torch.inf
                    torch.testing.assert_close(found[some], slow[some], rtol=1e-4, atol=1e-4, check_dtype=False)
                    left += int(some.sum())
    assert narrower < (0.1 if slope else 0.06) * len(PLANS) * 4 * every.numel()
    if share == 1.0 and dtype != torch.bfloat16:
        assert left < 0.05 * len(PLANS) * 4 * every.numel()


@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 200), st.sampled_from(["row", "block", "nothing"]),
       st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))  # fmt: skip
def test_the_largest_scores_are_found_by_blocks(seed, rows, width, least, dtype):
    """Of rows that lie in a wider matrix, as the products of a padded vocabulary do."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, width + 3, generator=generator).to(dtype)[:, :width]
    scores[torch.rand(rows, width, generator=generator) < 0.2] = -torch.inf
    blocks = Blocks(scores)
    assert torch.equal(torch.from_numpy(blocks.best).to(dtype), scores.amax(-1))
    asked = {"row": (rows, 1), "block": blocks.reached.shape, "nothing": (rows, 1)}[least]
    bounds = (
        torch.randn(asked, generator=generator).double().numpy() + 1 if least != "nothing" else np.full(asked, -np.inf)
    )
    of_each = np.broadcast_to(bounds, blocks.reached.shape).repeat(64, axis=1)[:, :width]
    found = [
        set(zip(at.tolist(), tokens.tolist(), one.tolist(), strict=True))
        for at, tokens, one in [blocks.at_least(bounds)]
    ]
    every = upcast(scores).numpy()
    assert found == [
        {(at, token, every[at, token].item()) for at, token in zip(*np.nonzero(every >= of_each), strict=True)}
    ]


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_a_gradient_goes_through_every_score(tiny_tokenizer, family):
    """Where one may be asked for, and where the steps before were taken with one."""
    model = uneven(graft_tiny("llama", tiny_tokenizer, vocabulary_family=family))
    z, plan = law_of(model).unsqueeze(1), CausalDecoding.preset("causal", seed=1)
    chain = drawn(model, z, plan, 3)
    (gradient,) = torch.autograd.grad(chain.ranked().logsumexp(-1).sum(), model.abduction.scale_net.bias)
    assert gradient.isfinite().all() and gradient.any()
    chain = drawn(model, z, plan, 3).situated()
    with torch.no_grad():
        assert torch.equal(chain.ranked(), drawn(model, z, plan, 3).ranked())


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_autocast_moves_what_is_read_and_no_bound(tiny_tokenizer, kind):
    model = uneven(graft_tiny(kind, tiny_tokenizer))
    z, plan = law_of(model).unsqueeze(1), CausalDecoding.preset("causal", seed=1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = drawn(model, z, plan, 20).ranked().flatten(0, -2)
        slow = model.action.scales._all(drawn(model, z, plan, 20)).flatten(0, -2)
    best = slow.gather(-1, found.argmax(-1, keepdim=True)).squeeze(-1)
    torch.testing.assert_close(best, slow.amax(-1), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_number_is_ranked_with_the_last_bits_of_others(tiny_tokenizer, kind, dtype):
    model = uneven(graft_tiny(kind, tiny_tokenizer))
    with torch.no_grad():
        model.action.num_row.copy_(torch.randn(model.action.num_row.shape, generator=torch.Generator().manual_seed(2)))
        model, plan = model.to(dtype), CausalDecoding.preset("causal", seed=1, temperature=1e-6)
        chains = [drawn(model, law_of(model).unsqueeze(1), plan, 20) for _ in range(2)]
        slow = model.action.scales._all(chains[0])[:, 0, model.action.num_token_id]
        found = torch.from_numpy(Decisions(chains[1]).of_number)
    torch.testing.assert_close(found, slow, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_products_are_as_rough_as_the_matrix_whatever_the_bias_is(tiny_tokenizer, monkeypatch, kind):
    for name, value in (("_PRODUCT", 1e9), ("_FEW", 0)):
        monkeypatch.setattr(drawn_decisions, name, value)
    model = unlike(graft_tiny(kind, tiny_tokenizer, vocabulary_family="gaussian", score_slope=50.0))
    model = uneven(model).to(torch.bfloat16)
    model.get_output_embeddings().bias = torch.nn.Parameter(torch.zeros(model.action.rows))
    z = law_of(model, -4).unsqueeze(1).expand(50, 1, -1)
    for seed in range(12):
        plan = CausalDecoding.preset("causal", seed=seed // 2, temperature=(6.0, 60.0)[seed % 2])
        bound = BoundDecoding.bind(plan, len(z), model.config.causal_size, z.device, copies=len(z))
        with torch.no_grad():
            task = Decisions(Chain(model, z, bound.at(torch.arange(len(z)).unsqueeze(1))))
            every, (found, unasked) = every_rank(model, task), task.ranked()
        assert not unasked.any()
        best = every.gather(-1, found.argmax(-1, keepdim=True)).squeeze(-1)
        torch.testing.assert_close(best, every.amax(-1), rtol=1e-4, atol=1e-4)


def test_a_vocabulary_that_says_nothing_leaves_the_number(tiny_tokenizer):
    """Its last block is filled up with what no token has."""
    model = uneven(graft_tiny("llama", tiny_tokenizer))
    model.get_output_embeddings().bias = torch.nn.Parameter(torch.full((model.action.rows,), -torch.inf))
    with torch.no_grad():
        ranked = drawn(model, law_of(model).unsqueeze(1), CausalDecoding.preset("causal", seed=1), 3).ranked()
    assert (ranked.argmax(-1) == model.action.num_token_id).all()


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
@pytest.mark.parametrize("is_trained", [False, True])
def test_one_position_needs_neither_all_scales_nor_a_second_product(tiny_tokenizer, monkeypatch, family, is_trained):
    """Batch 1 under the scale that training leaves, which differs from coordinate to coordinate."""
    slope = {} if family == "gaussian" else {"score_slope": 0.0}
    model = graft_tiny("qwen2", tiny_tokenizer, vocabulary_family=family, **slope)
    model = uneven(model) if is_trained else model
    z = law_of(model).unsqueeze(1)
    for of, name in ((Vocabulary, "scales"), (Decisions, "_moves"), (common_scale.CommonScale, "_all")):
        monkeypatch.setattr(of, name, lambda *_: pytest.fail("all tokens were asked"))
    for seed in range(20):
        plan = CausalDecoding.preset("causal", seed=seed, temperature=0.5)
        bound = BoundDecoding.bind(plan, 1, model.config.causal_size, z.device)
        with torch.no_grad():
            ranked = Chain(model, z, bound.at(torch.zeros(1, 1, dtype=torch.int64))).ranked()
        assert (ranked > -torch.inf).any()


@pytest.mark.parametrize("every_score", [False, True])
def test_a_score_below_all_numbers_never_wins(tiny_tokenizer, every_score):
    model = uneven(graft_tiny("qwen2", tiny_tokenizer))
    bias = torch.zeros(model.action.rows)
    bias[7] = -torch.inf
    model.get_output_embeddings().bias = torch.nn.Parameter(bias)
    plan = CausalDecoding.preset("causal", seed=1, temperature=6.0)
    bound = BoundDecoding.bind(
        plan, 20, model.config.causal_size, law_of(model).device, copies=20, every_score=every_score
    )
    with torch.no_grad():
        z = law_of(model).unsqueeze(1).expand(20, 1, -1)
        ranked = Chain(model, z, bound.at(torch.zeros(20, 1, dtype=torch.int64))).ranked()
    assert not ranked.isnan().any()
    assert (ranked[..., 7] == -torch.inf).all()


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("score", [3e38, torch.inf])
def test_a_score_beyond_all_numbers_wins(tiny_tokenizer, count, score):
    model = graft_tiny("qwen2", tiny_tokenizer)
    z = law_of(model).unsqueeze(1)
    bias = torch.zeros(model.action.rows)
    bias[7] = score
    model.get_output_embeddings().bias = torch.nn.Parameter(bias)
    with torch.no_grad():
        chain = drawn(model, z, CausalDecoding.preset("causal", seed=1), count)
        assert (chain.ranked().flatten(0, -2).argmax(-1) == 7).all()


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_number_s_row_may_change_while_the_vocabulary_stands(tiny_tokenizer, kind):
    """What is kept of the matrix says nothing of `<NUM>`'s own row."""
    model = uneven(graft_tiny(kind, tiny_tokenizer))
    z, generator = law_of(model).unsqueeze(1), torch.Generator().manual_seed(0)
    plan = CausalDecoding.preset("causal", seed=1)
    with torch.no_grad(), model.standing():
        drawn(model, z, plan, 1).ranked()
        model.action.num_row.copy_(10 * torch.randn(model.action.num_row.shape, generator=generator))
        words, found = model.vocabulary(), drawn(model, z, plan, 1).ranked()
        rows, _, used = words.rows_of_all()
        torch.testing.assert_close(words.all_norms[used], upcast(rows).norm(dim=1)[used])
        wider = model.double()
        row = wider.vocabulary().number_row()
    with torch.no_grad():
        assert row.dtype == torch.float64  # not the one that was kept, though it is equal
        assert torch.equal(found, drawn(model.float(), z, plan, 1).ranked())
    with model.standing():
        with torch.no_grad():
            kept = model.vocabulary().number_row()
        row = model.vocabulary().number_row()
        assert torch.equal(row, kept) and row.requires_grad


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_every_score_of_a_trained_individual_is_made_block_by_block(tiny_tokenizer, monkeypatch, family):
    """A processor of `generate` wants them all: a matrix in float32, and its squares, would take ten times as long."""
    model = uneven(graft_tiny("qwen2", tiny_tokenizer, vocabulary_family=family))
    z, plan = law_of(model).unsqueeze(1), CausalDecoding.preset("causal", seed=3)
    bound = BoundDecoding.bind(plan, 1, model.config.causal_size, z.device, every_score=True)
    with torch.no_grad():
        at = bound.at(torch.zeros(1, 1, dtype=torch.int64))
        wanted = every_rank(model, Decisions(Chain(model, z, at))).flatten()
        monkeypatch.setattr(Vocabulary, "rows_of_all", lambda *_: pytest.fail("the whole matrix was made"))
        found = Chain(model, z, at).ranked().flatten()
    used = model.action.vocabulary_mask
    torch.testing.assert_close(found[used], wanted[used], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
@pytest.mark.parametrize("size", [1, 7, 1024])
def test_scales_of_all_tokens_are_the_formula_s(tiny_tokenizer, monkeypatch, family, size):
    """Values and gradients, float64, block by block of the matrix's rows."""
    monkeypatch.setattr("causalqwen.modeling.vocabulary._ROWS_AT_ONCE", {"cpu": size})
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
@pytest.mark.parametrize("count", [0, 1, 2, 8, 9, 40])
def test_the_fastest_product_is_the_product(tiny_tokenizer, dtype, count):
    words = graft_tiny("qwen2", tiny_tokenizer).to(dtype).vocabulary()
    loc = torch.randn(count, words.weight.shape[1], generator=torch.Generator().manual_seed(count)).to(dtype)
    wanted = (loc.double() @ words.weight.double().T).to(dtype)
    torch.testing.assert_close(words.products(loc), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_of_some_rows_are_the_product(tiny_tokenizer, dtype, monkeypatch):
    monkeypatch.setattr("causalqwen.modeling.vocabulary._ROWS_AT_ONCE", {"cpu": 5})
    words = graft_tiny("llama", tiny_tokenizer).to(dtype).vocabulary()
    loc = torch.randn(words.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    for tokens in (
        torch.arange(len(words.weight)).flip(0),
        torch.tensor([3, 3, 1]),
        torch.tensor([len(words.weight) - 1]),
    ):
        wanted = (words.weight.double() @ loc.double())[tokens].to(dtype)
        torch.testing.assert_close(words.products_at(tokens, loc), wanted)


def test_a_layer_that_has_a_product_of_its_own_is_asked_for_it(tiny_tokenizer):
    """vLLM keeps the rows packed as its kernel wants them, in half of the time that the matrix takes."""
    model, asked = graft_tiny("qwen2", tiny_tokenizer), []

    class Packed:
        weight, bias = model.get_output_embeddings().weight, None

        def products(self, loc):
            asked.append(len(loc))
            return torch.nn.functional.pad(loc @ self.weight.T, (0, 3))[:, :-3]  # as of rows that are padded

    words = model.action.vocabulary(Packed())
    z, plan = law_of(model).unsqueeze(1), CausalDecoding.preset("causal", seed=3)
    with torch.no_grad():
        chain = drawn(model, z, plan, 3)
        found, wanted = Chain(model, chain.features, chain.draws, words).ranked(), chain.ranked()
    assert asked[0] == 3
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_the_longest_row_may_win_though_next_to_nothing_is_left_of_its_scale(tiny_tokenizer, family):
    """Rounding decides then what its bound is: the best token that is known stays a candidate."""
    for seed in range(4):
        settings = {"vocabulary_family": family, "score_noise": 0.0, "score_slope": 0.0}
        model = graft_tiny("qwen2", tiny_tokenizer, **settings)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            model.action.num_row.copy_(10 * torch.randn(model.config.causal_size, generator=generator))
            model.action.num_bias.fill_(100.0)  # `<NUM>`'s row reaches as far as the longest, and wins
            z = torch.randn(200, 1, model.config.hidden_size, generator=generator)
            scale = Chain(model, z).scale_U.mean()
            for noise in (0.1, 0.03, 0.003, 3e-4):
                model.action.b_noise.fill_(noise * scale)
                plan = CausalDecoding.preset("causal", seed=1)
                bound = BoundDecoding.bind(plan, len(z), model.config.causal_size, z.device, copies=len(z))
                at = bound.at(torch.zeros(len(z), 1, dtype=torch.int64))
                found = Chain(model, z, at).ranked().argmax(-1)
                slow = model.action.scales._all(Chain(model, z, at))
                best = slow.gather(-1, found.unsqueeze(-1)).squeeze(-1)
                torch.testing.assert_close(best, slow.amax(-1), rtol=1e-3, atol=1e-3)
