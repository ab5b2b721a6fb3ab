"""Voices learned from many people: where who speaks shows in a backbone (theory 3.17)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from tqdm.auto import tqdm

from causalqwen.decoding import Voices
from causalqwen.modeling import CausalQwenForCausalLM, Observation
from causalqwen.modeling.backbones import reading
from causalqwen.modeling.layer_shift import depths_of
from causalqwen.modeling.voice_likelihood import WINDOW, Context, Words, log_likelihood, scores, windows_of

Texts = list[list[Context]]
"""The texts of one person: each text as its windows; what is shorter than a window stands with others of its kind."""

FEWEST = 5  # people that voices are learned from at least
_BATCH = 8  # windows of a step
_OBSERVED, _TEXTS = 1024, 6  # tokens of a text, and texts of everybody, that somebody is inferred from
_MEAN_RATE, _RATE, _SHIFT_RATE = 2e-3, 0.02, 5e-4
_COMPONENTS, _CAUTION, _REACH = 200, 30.0, 2.0
"""Settings of the closed form: components of gradients, how many times less it trusts them than independent words deserve, and
how far out a voice may go, in those of the people it is made of."""
_HELD_OUT, _CHECKS, _JUDGED = 5, 6, 32
"""Every fifth person is held out, the first of them to choose when to stop, among so many times, by so many windows; the next
to say what that is worth, and so on."""


def learn_voices(
    model: CausalQwenForCausalLM,
    people: Mapping[str, str | Observation | Sequence[str | Observation]],
    *,
    directions: int = 64,
    steps: int = 150,
    seed: int = 0,
) -> Voices:
    """How people differ at every depth of a frozen backbone, and how that is inferred, from texts of many people.

    First what all have in common; then, in closed form, the directions in which gradients differ more between people than
    within them; then both by gradients, so that one text of a person makes another of theirs likelier. One person in five is
    held out: half of them choose how far that is taken, half say what it is worth (`Voices.gained`).

    people: their texts, by name, alone or after prompts, long or short; one text alone is cut into two. directions: at most;
    fewer than people. steps: of either search.

    Raises ValueError for fewer than 5 people, one whose words are too few to cut into two, or people who all say the same.
    """
    if directions < 1 or steps < 1:
        raise ValueError(f"directions and steps are positive, got {directions} and {steps}")
    if len(people) < FEWEST:
        raise ValueError(f"voices are learned from {FEWEST} people or more, got {len(people)}")
    if not depths_of(model.backbone)[0]:
        raise ValueError(
            f"{type(model.backbone).__name__} does not say what its layers are: no voice can be inferred from it"
        )
    was_training, chance = model.training, random.Random(seed)
    model.eval()
    try:
        with reading(model), torch.inference_mode(False), torch.enable_grad():
            said = {name: _texts(model, name, texts) for name, texts in people.items()}
            order = chance.sample(list(said), len(said))
            held_out, known = order[::_HELD_OUT], [name for at, name in enumerate(order) if at % _HELD_OUT]
            choosing, judging = held_out[::2], held_out[1::2] or held_out
            mean = _shared(model, [said[name] for name in known], steps, chance)
            progress = tqdm(said.items(), "reading people", leave=False)
            scored = {name: _scored(model, texts, mean, chance) for name, texts in progress}

            def pairs(names: Sequence[str]) -> list[Pair]:
                found = [pair for name in names for pair in _pairs(scored[name], said[name], chance)]
                return chance.sample(found, min(len(found), _JUDGED))

            start = _closed_form([scored[name] for name in known], mean, directions)
            voices = _tuned(
                model, start, [(scored[name], said[name]) for name in known], pairs(choosing), steps, chance
            )
            judged = pairs(judging)
            silent = replace(voices, loadings=torch.zeros_like(voices.loadings))
            bare, alone, own = (_worth(model, one, judged) for one in (None, silent, voices))
            return replace(voices, people=len(known), gained=(alone - bare, own - bare))
    finally:
        model.train(was_training)


def _texts(model: CausalQwenForCausalLM, name: str, texts: str | Observation | Sequence[str | Observation]) -> Texts:
    given = [texts] if isinstance(texts, str | Observation) else list(texts)
    if wrong := [one for one in given if not isinstance(one, str | Observation)]:
        raise ValueError(f"{name!r}: a voice is learned from texts, got {wrong[0]!r}")
    found: Texts = []
    gathering = 0  # tokens of short texts that stand together
    for windows in windows_of(model, given):
        size = sum(_size(one) for one in windows)
        if size >= WINDOW or not gathering or gathering + size > _OBSERVED:
            found, gathering = [*found, []], 0
        found[-1] += windows
        gathering = gathering + size if size < WINDOW else 0
    found = [windows for windows in found if windows]
    if len(found) == 1:
        half = len(found[0]) // 2
        found = [part for part in (found[0][:half], found[0][half:]) if part]
    if len(found) < 2:
        raise ValueError(
            f"{name!r}: a voice is learned from two texts at least, or one of more than {WINDOW} tokens, to be cut into two"
        )
    return found


def _size(context: Context) -> int:
    text, first = context
    return len(text.ids) - first


def _shared(model: CausalQwenForCausalLM, people: list[Texts], steps: int, chance: random.Random) -> Tensor:
    """The voice [L, H] under which everybody's words are likeliest."""
    mean = torch.zeros(depths_of(model.backbone), device=model.device, requires_grad=True)
    search = torch.optim.Adam([mean], lr=_MEAN_RATE)
    falling = CosineAnnealingLR(search, steps)
    for _ in tqdm(range(steps), "what people have in common", leave=False):
        windows = [chance.choice(chance.choice(texts)) for texts in chance.choices(people, k=_BATCH)]
        _descend(model, search, windows, mean)
        falling.step()
    return mean.detach()


def _descend(
    model: CausalQwenForCausalLM, search: torch.optim.Optimizer, windows: list[Context], voice: Tensor
) -> None:
    words = Words(model, windows)
    loss = -log_likelihood(model, words, voice).sum() / words.count.sum()
    search.zero_grad()
    loss.backward(inputs=[one for group in search.param_groups for one in group["params"]])
    search.step()


@dataclass(frozen=True)
class _Hearing:
    """What some windows of somebody's text say: scores [n, L, H] and counts of words [n]; text: which one it is."""

    scores: Tensor
    counts: Tensor
    text: int


def _scored(model: CausalQwenForCausalLM, texts: Texts, mean: Tensor, chance: random.Random) -> list[_Hearing]:
    hearings = []
    for index in sorted(chance.sample(range(len(texts)), min(_TEXTS, len(texts)))):
        windows, last, size = texts[index], 0, 0
        while last < len(windows) and size < _OBSERVED:  # so many at the end hold as much
            size, last = size + _size(windows[-1 - last]), last + 1
        start = chance.randrange(len(windows) - last + 1)
        observed: list[Context] = []
        for one in windows[start:]:
            if observed and sum(map(_size, observed)) + _size(one) > _OBSERVED:
                break
            observed.append(one)
        gradients, counts = zip(*scores(model, observed, mean), strict=True)
        hearings.append(_Hearing(torch.cat(gradients).cpu(), torch.cat(counts).cpu(), index))
    return hearings


def _closed_form(people: list[list[_Hearing]], mean: Tensor, directions: int) -> Voices:
    """Voices where the score of n words is n f v plus noise of covariance n f, v the voice beyond `mean`, and v is Gaussian
    between people: f is that of windows around their person, and voices differ along its eigenvectors."""
    hearings = [hearing for heard in people for hearing in heard]
    whose = torch.tensor([who for who, heard in enumerate(people) for _ in heard])
    counts = torch.cat([one.counts for one in hearings]).float()
    of_person = whose.repeat_interleave(torch.tensor([len(one.counts) for one in hearings]))
    by_word = torch.stack([one.scores.flatten(1).sum(0) / one.counts.sum() for one in hearings])
    centers = _means(by_word, whose)
    windows = torch.cat([one.scores.flatten(1) for one in hearings]) / counts.sqrt()[:, None]
    expected = centers.mean(0)
    left, total = (windows - counts.sqrt()[:, None] * one for one in (centers[of_person], expected))
    spread, freedom = total.std(0), len(windows) - len(people)
    if not float(left.abs().max()) > 1e-4 * float(windows.abs().max()):
        raise ValueError("each person says the same again and again: no voice can be learned from them")
    spread = spread.clamp(min=1e-6 * float(spread.max()))
    axes = torch.linalg.svd(total / spread, full_matrices=False)[2][: min(_COMPONENTS, max(freedom // 2, 1))]
    within = _covariance(left / spread @ axes.T, freedom)
    between_texts = _covariance((by_word - centers[whose]) / spread @ axes.T, len(hearings) - len(people))
    fewer = (1 / torch.bincount(whose)).mean()
    between = _covariance((centers - expected) / spread @ axes.T, len(people) - 1) - fewer * between_texts
    ridge = 1e-3 * within.diagonal().mean() * torch.eye(len(axes))
    root = torch.linalg.cholesky(within + ridge)
    halved = torch.linalg.solve_triangular(root, between, upper=False)
    whitened = torch.linalg.solve_triangular(root, halved.T, upper=False)
    sizes, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
    kept = min(directions, len(people) - 1, len(axes))
    sizes, vectors = sizes.flip(0)[:kept], vectors.flip(1)[:, :kept]
    sizes = sizes.clamp(min=max(1e-4 * float(sizes[0]), 1e-9))
    loadings = torch.linalg.solve_triangular(root.T, vectors * sizes.sqrt(), upper=True).T @ axes / spread
    shape = (kept, *mean.shape)
    voices = Voices(
        origin=mean,
        expected=expected.view_as(mean).to(mean),
        mean=mean,
        loadings=loadings.view(shape).to(mean),
        probes=(loadings / sizes[:, None]).view(shape).to(mean),
        patience=(_CAUTION / sizes).to(mean),
        reach=1e6,
    )
    places = torch.stack([voices.place(one.scores.sum(0), int(one.counts.sum())) for one in hearings])
    return replace(voices, reach=_REACH * float(places.square().sum(1).mean().sqrt()))


def _means(rows: Tensor, groups: Tensor) -> Tensor:
    counts = torch.bincount(groups)
    return torch.zeros(len(counts), rows.shape[1]).index_add_(0, groups, rows) / counts[:, None]


def _covariance(rows: Tensor, freedom: int) -> Tensor:
    return rows.T @ rows / max(freedom, 1)


Pair = tuple[Tensor, int, Context]
"""What somebody is inferred from: score [L, H] and tokens; and a window of another text of theirs."""


def _pairs(hearings: list[_Hearing], texts: Texts, chance: random.Random, short: bool = False) -> list[Pair]:
    """Each hearing with a window of another text; `short`: with some of its windows alone."""
    pairs = []
    for one in hearings:
        other = chance.choice([text for index, text in enumerate(texts) if index != one.text])
        some = chance.randint(1, len(one.scores)) if short else len(one.scores)
        pairs.append((one.scores[:some].sum(0), int(one.counts[:some].sum()), chance.choice(other)))
    return pairs


def _tuned(
    model: CausalQwenForCausalLM,
    voices: Voices,
    people: list[tuple[list[_Hearing], Texts]],
    choosing: list[Pair],
    steps: int,
    chance: random.Random,
) -> Voices:
    """`mean`, `loadings` and `probes` by gradients, as they are when the windows of `choosing` are predicted best."""
    sizes = [one.square().mean().sqrt() for one in (voices.loadings, voices.probes)]
    shift = torch.zeros_like(voices.mean, requires_grad=True)
    loadings, probes = (
        (one / size).requires_grad_(True) for one, size in zip((voices.loadings, voices.probes), sizes, strict=True)
    )
    groups = [{"params": [loadings, probes], "lr": _RATE}, {"params": [shift], "lr": _SHIFT_RATE}]
    search = torch.optim.Adam(groups)
    falling = LambdaLR(search, lambda step: min(1.0, 2 * (1 - step / steps)))

    def now() -> Voices:
        return replace(voices, mean=voices.mean + shift, loadings=loadings * sizes[0], probes=probes * sizes[1])

    best, most = voices, _worth(model, voices, choosing)
    bare = _worth(model, None, choosing)
    progress = tqdm(range(1, steps + 1), "how people differ", leave=False)
    for step in progress:
        progress.set_postfix(gained=f"{most - bare:.3f} nats a token")
        pairs = [
            _pairs([chance.choice(heard)], texts, chance, short=True)[0]
            for heard, texts in chance.choices(people, k=_BATCH)
        ]
        found = now()
        spoken = torch.stack([found.heard(told, tokens) for told, tokens, _ in pairs])
        _descend(model, search, [window for *_, window in pairs], spoken)
        falling.step()
        if step % max(steps // _CHECKS, 1) == 0 and (worth := _worth(model, now(), choosing)) > most:
            best, most = now().to(model.device), worth
    return best


@torch.no_grad()
def _worth(model: CausalQwenForCausalLM, voices: Voices | None, pairs: list[Pair]) -> float:
    """Mean log-likelihood of a word of the windows that are asked for, nats, under what was observed."""
    nats, words = 0.0, 0
    for start in range(0, len(pairs), _BATCH):
        part = pairs[start : start + _BATCH]
        asked = Words(model, [window for *_, window in part])
        spoken = None if voices is None else torch.stack([voices.heard(one, tokens) for one, tokens, _ in part])
        nats += float(log_likelihood(model, asked, spoken).sum())
        words += int(asked.count.sum())
    return nats / max(words, 1)
