"""A token's own noise: its draws, the race of the scores, and the noise given what was observed (theory 3.6, 3.9, 3.13)."""

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from causalqwen import CausalDecoding, Individual, Intervention, Observation
from causalqwen.decoding import BoundDecoding, ObservedNoise
from causalqwen.distributions import BLOCK, block_largest, block_uniforms, own_uniforms, upcast
from causalqwen.individuals.observed_noise import LEAD, draw_best, observed_normals
from causalqwen.modeling.chain import Chain
from conftest import graft_tiny
from test_one_law import drawn, law_of, uneven, unlike

SEEDS = torch.tensor([0, 1, -1, 2**63 - 1, 7, 7])
POSITIONS = torch.tensor([0, 0, 3, 2**32 - 1, 5, 6])


# ---- draws -----------------------------------------------------------------------------------------------------------


def test_own_uniforms_are_uniform_and_independent():
    """200 tokens: three blocks and a part of one."""
    count, size = 100_000, 200
    seeds, positions, e = torch.arange(count) // 100, torch.arange(count) % 100, []
    for at in torch.arange(count).split(10_000):
        e.append(own_uniforms(seeds[at], positions[at], size))
    e = torch.cat(e)
    assert e.min() > 0 and e.max() < 1
    for column in (0, 63, 64, 199):
        assert stats.kstest(e[:, column].numpy(), "uniform").pvalue > 1e-3
    assert stats.chisquare(torch.bincount(e.argmax(-1), minlength=size).numpy()).pvalue > 1e-3
    assert stats.kstest(e[:, :64].amax(-1).numpy() ** 64, "uniform").pvalue > 1e-3
    assert stats.kstest(e.amin(-1).numpy(), stats.beta(1, size).cdf).pvalue > 1e-3  # which no dependence would leave
    correlation = torch.corrcoef(torch.special.ndtri(e[:20_000]).T).fill_diagonal_(0)
    assert correlation.abs().max() < 5.5 / 20_000**0.5
    after = torch.corrcoef(torch.stack([e[:-1, 3], e[1:, 3]]))[0, 1]
    assert abs(after) < 4 / count**0.5


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_own_uniforms_are_the_same_however_they_are_asked_for(size):
    whole, blocks = own_uniforms(SEEDS, POSITIONS, size), -(-size // BLOCK)
    assert torch.equal(whole, own_uniforms(SEEDS, POSITIONS, size + 100)[:, :size])
    for row in range(len(SEEDS)):
        assert torch.equal(own_uniforms(SEEDS[row : row + 1], POSITIONS[row : row + 1], size)[0], whole[row])
    assert len(whole.unique(dim=0)) == len(SEEDS)
    largest = block_largest(SEEDS, POSITIONS, blocks)
    assert np.array_equal(block_largest(SEEDS.numpy(), POSITIONS.numpy(), blocks), largest.numpy())
    for block in range(blocks):
        at = torch.full_like(SEEDS, block)
        found = block_uniforms(SEEDS, POSITIONS, at, largest[:, block])
        nobody = block_uniforms(SEEDS[:0], POSITIONS[:0], at[:0], largest[:0, block])
        assert nobody.shape == (0, BLOCK)
        by_numpy = block_uniforms(SEEDS.numpy(), POSITIONS.numpy(), at.numpy(), largest[:, block].numpy())
        assert np.array_equal(by_numpy, found.numpy()) and torch.equal(found.amax(-1), largest[:, block])
        assert torch.equal(found[:, : whole.shape[1] - block * BLOCK], whole[:, block * BLOCK : (block + 1) * BLOCK])


# ---- the race --------------------------------------------------------------------------------------------------------


def chains(model, places, plan, noise=None):
    """Two chains at the last `places` positions of a text under one plan, and how it is bound."""
    z = law_of(model, -places)
    bound = BoundDecoding.bind(plan, len(z), model.config.causal_size, z.device, copies=len(z))
    at = torch.arange(len(z)).unsqueeze(1)
    if noise is not None:
        bound.observed, bound.origins = [noise] * len(z), torch.zeros(len(z), dtype=torch.int64)
    return [Chain(model, z.unsqueeze(1), bound.at(at)) for _ in range(2)]


RACES = [
    ("sample", {}),
    ("persona", {}),
    ("standard", {"own": "token"}),
    ("causal", {"own": "token"}),
    ("individual-only", {"own": "token"}),
    ("shared-noise", {"own": "token", "top_k": 5}),
    ("sample", {"top_p": 0.7}),
    ("standard", {"own": "token", "min_p": 0.05, "top_p": 0.95}),
]
SHAPES = [("qwen2", lambda model: model, {}), ("llama", uneven, {}), ("qwen2", lambda model: uneven(unlike(model)), {}),
          ("llama", unlike, {"score_slope": 50.0}), ("llama", uneven, {"token_thresholds": 0.2})]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize(("preset", "settings"), RACES)
def test_the_race_is_won_by_the_best_of_all_scores(tiny_tokenizer, preset, settings, shape, dtype):
    """`<NUM>` appended, and on a free row among masked ones."""
    kind, change, fields = SHAPES[shape]
    model = change(graft_tiny(kind, tiny_tokenizer, **fields))
    with torch.no_grad():
        model.action.num_row.copy_(torch.randn(model.action.num_row.shape, generator=torch.Generator().manual_seed(2)))
    model, masked = model.to(dtype), ~model.action.vocabulary_mask
    if dtype == torch.bfloat16 and settings.keys() - {"own"}:
        return  # two products, each rounded, leave out other tokens
    for temperature in (0.0, 0.4, 1.0, 1.6, 8.0):
        for seed in range(3):
            plan = CausalDecoding.preset(preset, seed=seed, temperature=temperature, **settings)
            with torch.no_grad():
                one, other = chains(model, 12, plan)
                found, every = one.race().scores(), other.raced().flatten(0, -2)
            best = every.argmax(-1, keepdim=True)
            near = 1e-4 if dtype == torch.float32 else 0.05  # one product of two, which bfloat16 rounds
            assert (found[:, masked] == -torch.inf).all() and not found.isnan().any()
            if dtype == torch.float32:
                assert torch.equal(found.argmax(-1, keepdim=True), best), (temperature, seed)
            torch.testing.assert_close(found.amax(-1), every.gather(-1, best)[:, 0], rtol=near, atol=near)
            some = found > -torch.inf
            torch.testing.assert_close(found[some], every[some], rtol=near, atol=10 * near)


@pytest.mark.parametrize("preset", ["sample", "persona", "standard"])
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.9},
        {"top_p": 0.0},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.05},
    ],
    ids=str,
)
def test_the_tokens_of_a_race_are_those_of_transformers_samplers(tiny_tokenizer, preset, settings):
    """Whoever speaks: what is left out is what a sampler leaves out of the logits of the population average."""
    model = uneven(unlike(graft_tiny("qwen2", tiny_tokenizer)))
    for T in (0.6, 1.0, 1.7):
        logits = model.action.score_loc(Chain(model, law_of(model, -12)).loc_U, model.vocabulary()).detach()
        logits = TemperatureLogitsWarper(T)(None, logits.masked_fill(~model.action.vocabulary_mask, -torch.inf))
        for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
            logits = warper(settings[name])(None, logits) if name in settings else logits
        kept, plan = logits > -torch.inf, CausalDecoding.preset(preset, own="token", seed=1, temperature=T, **settings)
        with torch.no_grad():
            one, other = chains(model, 12, plan)
            assert torch.equal(one.raced().flatten(0, -2) > -torch.inf, kept)
            assert kept.gather(-1, other.race().scores().argmax(-1, keepdim=True)).all()


@pytest.mark.parametrize("asked", [{}, {"output_scores": True}, {"suppress_tokens": list(range(260, 340))}], ids=str)
@pytest.mark.parametrize("preset", ["sample", "persona"])
def test_whoever_has_one_token_left_says_the_backbones(tiny_tokenizer, preset, asked):
    """By bounds, by all scores, and where processors may take that token away, so that it is the next one."""
    model = uneven(unlike(graft_tiny("llama", tiny_tokenizer)))
    with torch.no_grad():
        model.action.num_bias -= 100.0  # a number's value would be theirs
    inputs, asked = model.processor("They say that", return_tensors="pt"), asked | {"max_new_tokens": 12}
    greedy = model.generate(**inputs, do_sample=False, **asked)
    one, free = (
        model.generate(**inputs, causal_decoding=CausalDecoding.preset(preset, seed=1, top_k=top_k), **asked).sequences
        for top_k in (1, None)
    )
    assert torch.equal(one, greedy) and not torch.equal(free, greedy)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_race_knows_observed_noise(tiny_tokenizer, kind):
    model = uneven(graft_tiny(kind, tiny_tokenizer))
    number, chance = model.config.num_token_id, np.random.default_rng(0)
    for case in range(30):
        places, count = 8, 40
        tokens = torch.from_numpy(chance.integers(0, 380, count))
        tokens[0] = number
        at = torch.from_numpy(np.sort(chance.integers(0, places, count)))
        normals, nothing = torch.from_numpy(chance.normal(0, (0.5, 3.0)[case % 2], count)), torch.zeros(places).double()
        T = (1.0, 0.5)[case % 2]
        noise = ObservedNoise(case, T, at, tokens, normals, places - 2, nothing, nothing, nothing)
        plan = CausalDecoding("sequence", own="token", seed=case, temperature=T)
        with torch.no_grad():
            one, other = chains(model, places, plan, noise)
            found, every = one.race().scores(), other.raced().flatten(0, -2)
        torch.testing.assert_close(found.amax(-1), every.amax(-1), rtol=1e-4, atol=1e-4)
        assert torch.equal(found.argmax(-1), every.argmax(-1))


def test_few_tokens_are_drawn(tiny_tokenizer):
    model = uneven(graft_tiny("qwen2", tiny_tokenizer))
    with torch.no_grad():
        found = chains(model, 12, CausalDecoding.preset("sample", seed=1))[0].race().scores()
    assert (found > -torch.inf).float().mean() < 0.2


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_autocast_moves_what_is_read_and_no_bound(tiny_tokenizer, kind):
    model = uneven(graft_tiny(kind, tiny_tokenizer))
    for preset in ("causal", "sample"):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            one, other = chains(model, 12, CausalDecoding.preset(preset, seed=1))
            found = one.decision_scores().flatten(0, -2)
            slow = other.raced().flatten(0, -2) if preset == "sample" else other.scores.decision_scores().flatten(0, -2)
        best = slow.gather(-1, found.argmax(-1, keepdim=True)).squeeze(-1)
        torch.testing.assert_close(best, slow.amax(-1), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("score", [-torch.inf, 3e38, torch.inf])
@pytest.mark.parametrize("every_score", [False, True])
@pytest.mark.parametrize("preset", ["causal", "sample"])
def test_scores_beyond_all_numbers_always_win_or_never(tiny_tokenizer, preset, every_score, score):
    model = uneven(graft_tiny("qwen2", tiny_tokenizer))
    bias = torch.zeros(model.action.rows)
    bias[7] = score
    model.get_output_embeddings().bias = torch.nn.Parameter(bias)
    z, plan = law_of(model).unsqueeze(1), CausalDecoding.preset(preset, seed=1, temperature=2.0)
    bound = BoundDecoding.bind(plan, 20, model.config.causal_size, z.device, copies=20, every_score=every_score)
    with torch.no_grad():
        ranked = Chain(model, z.expand(20, 1, -1), bound.at(torch.zeros(20, 1, dtype=torch.int64))).decision_scores()
    assert not ranked.isnan().any()
    assert (ranked[..., 7] == -torch.inf).all() if score < 0 else (ranked.argmax(-1) == 7).all()


@pytest.mark.parametrize("preset", ["causal", "sample"])
def test_a_vocabulary_that_says_nothing_leaves_the_number(tiny_tokenizer, preset):
    """Its last block is filled up with what no token has."""
    model = uneven(graft_tiny("llama", tiny_tokenizer))
    model.get_output_embeddings().bias = torch.nn.Parameter(torch.full((model.action.rows,), -torch.inf))
    with torch.no_grad():
        ranked = drawn(model, law_of(model).unsqueeze(1), CausalDecoding.preset(preset, seed=1), 3).decision_scores()
    assert (ranked.argmax(-1) == model.action.num_token_id).all()


@pytest.mark.parametrize("preset", ["causal", "sample"])
@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_a_gradient_goes_through_every_score(tiny_tokenizer, family, preset):
    """Where one may be asked for, and where the steps before were taken with one."""
    model = uneven(graft_tiny("llama", tiny_tokenizer, vocabulary_family=family))
    z, plan = law_of(model).unsqueeze(1), CausalDecoding.preset(preset, seed=1)
    chain = drawn(model, z, plan, 3)
    (gradient,) = torch.autograd.grad(chain.decision_scores().logsumexp(-1).sum(), model.abduction.scale_net.bias)
    assert gradient.isfinite().all() and gradient.any()
    chain = drawn(model, z, plan, 3).situated()
    with torch.no_grad():
        found, wanted = chain.decision_scores(), drawn(model, z, plan, 3).decision_scores()
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_number_s_row_may_change_while_the_vocabulary_stands(tiny_tokenizer, kind):
    """What is kept of the matrix says nothing of `<NUM>`'s own row."""
    model = uneven(graft_tiny(kind, tiny_tokenizer))
    z, generator = law_of(model).unsqueeze(1), torch.Generator().manual_seed(0)
    plan = CausalDecoding.preset("sample", seed=1)
    with torch.no_grad(), model.frozen_vocabulary():
        drawn(model, z, plan, 1).decision_scores()
        model.action.num_row.copy_(10 * torch.randn(model.action.num_row.shape, generator=generator))
        words, found = model.vocabulary(), drawn(model, z, plan, 1).decision_scores()
        rows, _, used = words.rows_of_all()
        torch.testing.assert_close(words.all_norms[used], upcast(rows).norm(dim=1)[used])
        wider = model.double()
        row = wider.vocabulary().number_row()
    with torch.no_grad():
        assert row.dtype == torch.float64  # not the one that was kept, though it is equal
        assert torch.equal(found, drawn(model.float(), z, plan, 1).decision_scores())
    with model.frozen_vocabulary():
        with torch.no_grad():
            kept = model.vocabulary().number_row()
        row = model.vocabulary().number_row()
        assert torch.equal(row, kept) and row.requires_grad


# ---- the threshold ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("kind", "fields"), [("qwen2", {}), ("llama", {}), ("qwen2", {"token_thresholds": 0.5})])
def test_the_threshold_is_a_constant_and_the_log_partition(tiny_tokenizer, kind, fields, temperature, dtype):
    """T (C + log sum_k exp(loc_k / T)) in float64, nothing drawn, over the tokens that may come but `<NUM>`."""
    model = uneven(graft_tiny(kind, tiny_tokenizer, **fields)).to(dtype)
    model.action.threshold.data.fill_(-0.7)
    z, action = law_of(model, -9), model.action
    weight, plan = model.get_output_embeddings().weight, CausalDecoding.preset("persona", temperature=temperature)
    with torch.no_grad():
        model.action.num_bias += 30.0  # its score has no part in it
        chain, ranked = chains(model, 9, plan)
        loc = Chain(model, z).loc_U.double() @ weight.double().T
        if action.token_thresholds is not None:
            loc -= action.token_thresholds.double()
        loc = loc.masked_fill(~action.rest_mask, -torch.inf)
        wanted = temperature * (-0.7 + (loc / temperature).logsumexp(-1))
        found = chain.threshold.flatten()
        assert found.dtype == torch.float32 and ranked.decision_scores() is not None
        near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0, "atol": 0.05}
        torch.testing.assert_close(found.double(), wanted, **near)
        torch.testing.assert_close(ranked.threshold.flatten(), found, **near)
        if temperature == 1:
            whole = Chain(model, z)
            torch.testing.assert_close(whole.threshold.flatten(), found, **near)
            assert whole.loc_S is not None
            torch.testing.assert_close(Chain(model, z).threshold, whole.threshold, **near)


def test_the_threshold_slopes_along_its_constant_alone(tiny_tokenizer):
    model = uneven(graft_tiny("llama", tiny_tokenizer))
    threshold = Chain(model, law_of(model, -5).requires_grad_()).threshold
    parameters = dict(model.named_parameters())
    slopes = torch.autograd.grad(threshold.sum(), list(parameters.values()), allow_unused=True)
    assert {name: slope.item() for name, slope in zip(parameters, slopes, strict=True) if slope is not None} == {
        "action.threshold": 5.0
    }


def test_the_documents_threshold_is_the_same_everywhere(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer, start="documents")
    model.action.threshold.data.fill_(3.0)
    for temperature in (0.5, 1.0):
        plan = CausalDecoding.preset("causal", temperature=temperature)
        assert torch.equal(chains(model, 4, plan)[0].threshold, torch.full((4, 1, 1), 3.0))


# ---- the decision is the softmax's -----------------------------------------------------------------------------------


def race_distribution(loc, own, count=4096):
    """P(argmax_k loc_k + own_k e_k = y) [V] of one position, by the integral over the best score, float64."""
    loc, own = loc.double(), own.double()
    centre, width = loc.logsumexp(-1), 10 * own[loc.argmax()]
    m = torch.linspace(float(centre - width), float(centre + width), count, dtype=torch.float64).unsqueeze(-1)
    z = (m - loc) / own
    log_all = torch.special.log_ndtr(z).sum(-1, keepdim=True)
    density = (-z.square() / 2 - own.log() - torch.special.log_ndtr(z) + log_all).exp()
    return density.sum(0) / density.sum()


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_the_race_decides_as_a_softmax_does(tiny_tokenizer, kind, temperature):
    """At T as the softmax of loc/T, by exact integrals."""
    model = graft_tiny(kind, tiny_tokenizer)
    with torch.no_grad():
        chain, _ = chains(model, 20, CausalDecoding(own="token", temperature=temperature, seed=0))
        own, loc = chain.own()[:, 0], upcast(chain.loc_S)[:, 0]
    used, divergences = model.action.vocabulary_mask, []
    for place in range(len(loc)):
        p = (loc[place, used].double() / temperature).softmax(-1)
        divergences.append((p * (p / race_distribution(loc[place, used], own[place, used])).log()).sum().item())
    assert np.mean(divergences) < 0.005, np.mean(divergences)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_races_are_won_as_often_as_the_integral_says(tiny_tokenizer, kind, temperature):
    model, count = graft_tiny(kind, tiny_tokenizer), 20_000
    z, used, picks = law_of(model), model.action.vocabulary_mask, torch.zeros(len(model.action.vocabulary_mask))
    with torch.no_grad():
        whole = drawn(model, z, CausalDecoding(own="token", temperature=temperature), 1)
        p = race_distribution(upcast(whole.loc_S)[0, 0, used], whole.own()[0, 0, used]) * count
        for seed in range(0, count, 2_000):
            chain = drawn(model, z, CausalDecoding(own="token", temperature=temperature, seed=seed), 2_000)
            picks += torch.bincount(chain.decision_scores()[:, 0].argmax(-1), minlength=len(picks))
    often = p > 10
    told = [np.append(one[often], one[~often].sum()) for one in (picks[used].double().numpy(), p.numpy())]
    assert often.sum() > 3 and picks[~used].sum() == 0
    assert stats.chisquare(*told, sum_check=False).pvalue > 1e-3


# ---- noise of what was observed --------------------------------------------------------------------------------------


def positions_of(size, rows, seed, spread, T=1.0, share=0.6):
    """Scores as grafts have them: own_k^2 = T^2 (1 - d_k) + T max(C - loc_k, 0)/2, d_k up to `share` drawn of U'."""
    generator = torch.Generator().manual_seed(seed)
    loc = spread * torch.randn(rows, size, generator=generator)
    below = (T * ((loc / T).logsumexp(-1, keepdim=True) - 0.6) - loc).clamp(min=0)
    own = T**2 * (1 - share * torch.rand(rows, size, generator=generator)) + T * below / 2
    return loc, own.sqrt()


def best_of(loc, own, y, uniform):
    """The quantiles at `uniform` of the best score of one position and its spread, by a fine grid with every token."""
    others = torch.arange(len(loc)) != y
    loc, own = loc.double(), own.double()

    def log_density(m):
        of_others = [
            torch.special.log_ndtr((part[:, None] - loc[others]) / own[others]).sum(-1) for part in m.split(100)
        ]
        return torch.cat(of_others) - ((m - loc[y]) / own[y]).square() / 2

    reach = 14 * torch.maximum(own[y], own[loc.argmax()])
    low, high = torch.minimum(loc.max(), loc[y]) - reach, torch.maximum(loc.max(), loc[y]) + reach
    for count in (200, 200, 200, 200, 1_000):  # closer every time
        m = torch.linspace(float(low), float(high), count, dtype=torch.float64)
        found = log_density(m)
        at = (found > found.max() - 30).nonzero().flatten()
        low, high = m[(at[0] - 1).clamp(min=0)], m[(at[-1] + 1).clamp(max=count - 1)]
    density = (found - found.max()).exp()
    mass = torch.cumulative_trapezoid(density)
    mean = (density * m).sum() / density.sum()
    spread = ((density * (m - mean).square()).sum() / density.sum()).sqrt()
    return np.interp(uniform, (mass / mass[-1]).numpy(), m[1:].numpy()), spread.item()


@pytest.mark.parametrize("share", [0.0, 0.6, 0.95])
@pytest.mark.parametrize("temperature", [8.0, 1.0, 0.02, 0.002])
@pytest.mark.parametrize(("size", "spread"), [(2, 3.0), (2, 15.0), (20, 3.0), (1000, 2.0), (1000, 0.05), (1000, 0.0)])
def test_the_best_score_has_its_density(size, spread, temperature, share):
    """For likely targets and for the least likely, which lead or trail by hundreds of scales, and among equals."""
    loc, own = positions_of(size, 1, size, spread, temperature, share)
    order, uniform = loc[0].argsort(descending=True), torch.linspace(0.01, 0.99, 5, dtype=torch.float64)
    for rank in {0, 1, size // 2, size - 1}:
        found = draw_best(loc.expand(5, -1), own.expand(5, -1), order[rank].expand(5), uniform)
        wanted, spread = best_of(loc[0], own[0], order[rank], uniform)
        assert np.abs(found.numpy() - wanted).max() < 0.03 * spread, rank


def test_noise_given_what_was_observed_is_the_noise_where_that_was_observed():
    """Own noise drawn freely, kept where a token wins, against what is abducted from that token."""
    size, count, seed = 70, 40_000, 5
    (loc,), (own,) = positions_of(size, 1, 3, 1.0)
    at = torch.arange(count)
    e = torch.special.ndtri(own_uniforms(torch.full_like(at, 77), at, size))
    order, won = loc.argsort(descending=True), (loc + own * e).argmax(-1)
    for y, others in ((order[0], order[1:3]), (order[4], order[[0, 1, 60]])):
        free = e[won == y]
        n = min(len(free), 4_000)
        rows, tokens, normals = observed_normals(
            loc.expand(n, -1), own.expand(n, -1), y.repeat(n), seed, torch.arange(n)
        )
        assert n > 300 and bool((rows.diff() >= 0).all())
        given = torch.special.ndtri(own_uniforms(torch.full((n,), seed), torch.arange(n), size))
        given[rows, tokens] = normals
        scores = loc + own * given
        assert torch.equal(scores.argmax(-1), y.expand(n))
        rest = scores.scatter(-1, y.expand(n, 1), -torch.inf).amax(-1)
        assert (scores[:, y] - rest).min() > LEAD / 2
        for token in (y, *others):
            assert stats.ks_2samp(free[:, token].numpy(), given[:, token].numpy()).pvalue > 1e-3, (y, token)
        of_free = (loc + own * free).scatter(-1, y.expand(len(free), 1), -torch.inf).amax(-1)
        assert stats.ks_2samp(of_free.numpy(), rest.numpy()).pvalue > 1e-3
        together = [stats.spearmanr(one[:, y], one[:, others[0]]).statistic for one in (free, given)]
        assert together[0] == pytest.approx(together[1], abs=0.09)


@pytest.mark.parametrize("change", [lambda model: model, uneven])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_scores_under_somebody_who_is_held_are_those_of_each_position(tiny_tokenizer, kind, change):
    """Where they move all positions alike, too."""
    model = change(graft_tiny(kind, tiny_tokenizer))
    with torch.no_grad():
        model.action.num_row.copy_(torch.randn(model.action.num_row.shape, generator=torch.Generator().manual_seed(2)))
        head = model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.randn(len(head.weight), generator=torch.Generator().manual_seed(3)))
    z, plan = (
        law_of(model, -9)[None],
        CausalDecoding(individual=Individual.from_seed(3, 32), own="token", temperature=0.7),
    )
    bound = BoundDecoding.bind(plan, 1, 32, z.device)
    one, other = (Chain(model, z, bound.at(torch.arange(9)[None])) for _ in range(2))
    with torch.no_grad():
        loc, own = one.of_held()
        torch.testing.assert_close(loc, other.in_race())
        torch.testing.assert_close(own, other.own())
    assert not torch.equal(one.loc_S, one.undrawn.loc_S)


CONTEXTS = [("llama", "value"), ("qwen2", "digits"), ("llama", "digits"), ("qwen3", "both")]


@pytest.mark.parametrize(("kind", "context"), CONTEXTS)
@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [(torch.float32, 1.0), (torch.float32, 0.05), (torch.bfloat16, 1.0)]
    + [pytest.param(torch.float32, T, marks=pytest.mark.slow) for T in (0.7, 1.3, 0.01)]
    + [pytest.param(torch.bfloat16, T, marks=pytest.mark.slow) for T in (0.1, 0.01)],
)
def test_an_empty_edit_gives_any_text_back(tiny_tokenizer, kind, context, temperature, dtype):
    """Random tokens, and numbers of 1 to 9 digits among them; of somebody known, drawn, or inferred."""
    model = uneven(graft_tiny(kind, tiny_tokenizer, number_context=context)).to(dtype)
    model.config.value_range, model.generation_config.eos_token_id = [0.0, 100.0], None
    chance = np.random.default_rng(int(10 * temperature))
    people = [Individual.nobody(32), Individual.from_seed(3, 32), None]
    for case in range(12):
        pieces = tiny_tokenizer.batch_decode([[int(token)] for token in chance.integers(260, 390, 12)])
        for digits in chance.integers(1, 10, case % 3):
            number = int(chance.integers(10 ** (digits - 1), 10**digits))
            pieces.insert(int(chance.integers(0, len(pieces))), f" {number:,}" if case % 2 else f" {number / 100}")
        observed = Observation(" we" + "".join(pieces).strip() + " so", "They say that")
        settings = {"individual": people[case % 3], "seed": case, "temperature": temperature}
        ((world,),) = model.counterfactual_samples(observed, Intervention(), **settings)
        assert world.text == observed.text, (case, observed.text, world.text)
