"""Voices learned from many people: where who speaks is heard in a backbone (theory 3.17)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from tqdm.auto import tqdm

from causalqwen.decoding import Voices
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.depths import depths_of
from causalqwen.modeling.hearing import WINDOW, Words, log_likelihood, score
from causalqwen.modeling.precision import reading
from causalqwen.modeling.reading import EncodedText, Observation, contexts_of

Window = tuple[EncodedText, int]
Texts = list[list[Window]]
"""Of one person: each text as its windows."""

FEWEST = 4
"""People that voices are learned from at least."""
_BATCH, _HEARD, _TEXTS = 8, 4, 6
"""Windows of a step; windows of a text that its author is heard by; texts of everybody that they are heard by."""
_MEAN_RATE, _RATE, _SHIFT_RATE = 2e-3, 0.02, 5e-4
_COMPONENTS, _CAUTION, _REACH = 200, 30.0, 2.0
"""Of the closed form: components of gradients, how many times less it trusts them than independent windows deserve, and how
far out a voice may go, in those of the people it is made of."""
_HELD_OUT, _CHECKS, _JUDGED = 7, 6, 32
"""Every seventh person says when to stop, asked so many times, by so many windows."""


def learn_voices(
    model: CausalQwenForCausalLM,
    people: Mapping[str, Sequence[str | Observation]],
    *,
    directions: int = 64,
    steps: int = 150,
    seed: int = 0,
) -> Voices:
    """How people differ at every depth of a frozen backbone, and how that is heard, from texts of many people.

    First what all have in common; then, in closed form, the directions in which gradients differ more between people than
    between windows of a text; then both by gradients, so that one text of a person makes another of theirs likelier. Of
    every seven people one is held out, to say how far that helps.

    Args:
        people: their texts, by name, alone or behind prompts. A text counts by its whole windows of 256 tokens. Shorter texts
            without prompts are read one behind the other, and one text alone is cut into two.
        directions: at most; fewer than people. steps: of either search.

    Raises ValueError for fewer than 4 people, or one with less than two windows.
    """
    if directions < 1 or steps < 1:
        raise ValueError(f"directions and steps are positive, got {directions} and {steps}")
    if len(people) < FEWEST:
        raise ValueError(f"voices are learned from {FEWEST} people or more, got {len(people)}")
    was_training, chance = model.training, random.Random(seed)
    said = {name: _windows(model, name, texts) for name, texts in people.items()}
    held_out = list(said)[::_HELD_OUT]
    known = [name for name in said if name not in held_out]
    model.eval()
    try:
        with reading(model), torch.enable_grad():
            mean = _shared(model, [said[name] for name in known], steps, chance)
            told = tqdm(said.items(), "hearing people", leave=False)
            heard = {name: _hearings(model, texts, mean, chance) for name, texts in told}
            voices = _closed_form([heard[name] for name in known], mean, directions)
            pairs = [one for name in held_out for one in _pairs(heard[name], said[name], chance)]
            chance.shuffle(pairs)
            return _tuned(model, voices, [(heard[name], said[name]) for name in known], pairs[:_JUDGED], steps, chance)
    finally:
        model.train(was_training)


def _windows(model: CausalQwenForCausalLM, name: str, texts: Sequence[str | Observation]) -> Texts:
    length = min(WINDOW, model.config.context_length or WINDOW)

    def whole(text: str | Observation) -> list[Window]:
        return [one for one in contexts_of(model, text, length) if len(one[0].ids) == length]

    said = [
        Observation(text) if isinstance(text, str) else text for text in ([texts] if isinstance(texts, str) else texts)
    ]
    each = [whole(text) for text in said]
    short = [text.text for text, windows in zip(said, each, strict=True) if not windows and not text.prompt]
    each = [windows for windows in (*each, whole("\n\n".join(short))) if windows]
    if len(each) == 1:
        half = len(each[0]) // 2
        each = [part for part in (each[0][:half], each[0][half:]) if part]
    if len(each) < 2:
        raise ValueError(
            f"{name!r}: a voice is learned from {2 * length} tokens of text at least, {length} of them in one piece"
        )
    return each


# ---- what people have in common --------------------------------------------------------------------------------------


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


def _descend(model: CausalQwenForCausalLM, search: torch.optim.Optimizer, windows: list[Window], voice: Tensor) -> None:
    words = Words(model, windows)
    loss = -log_likelihood(model, words, voice).sum() / words.count.sum()
    parameters = [one for group in search.param_groups for one in group["params"]]
    search.zero_grad()
    loss.backward(inputs=parameters)
    search.step()


# ---- how they differ -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Hearing:
    """What some windows of somebody's text say: scores [n, L, H] and counts of words [n]; text: which one it is."""

    scores: Tensor
    counts: Tensor
    text: int


def _hearings(model: CausalQwenForCausalLM, texts: Texts, mean: Tensor, chance: random.Random) -> list[_Hearing]:
    hearings = []
    for index in sorted(chance.sample(range(len(texts)), min(_TEXTS, len(texts)))):
        start = chance.randrange(max(len(texts[index]) - _HEARD, 0) + 1)
        scores, counts = score(model, texts[index][start : start + _HEARD], mean)
        hearings.append(_Hearing(scores.cpu(), counts.cpu(), index))
    return hearings


def _closed_form(people: list[list[_Hearing]], mean: Tensor, directions: int) -> Voices:
    """Voices where a window's gradient is F v plus noise of covariance F, v the voice beyond `mean`, F that of gradients
    within a text, and v is Gaussian between people: their eigenvectors, in units of what varies between people."""
    texts = [hearing.scores.flatten(1) for hearings in people for hearing in hearings]
    whose = torch.tensor([who for who, hearings in enumerate(people) for _ in hearings])
    of_text = torch.tensor([index for index, one in enumerate(texts) for _ in one])
    windows = torch.cat(texts)
    spread = windows.std(0)
    spread = spread.clamp(min=1e-6 * float(spread.max()))
    count = min(_COMPONENTS, max((len(windows) - len(texts)) // 2, 1), *windows.shape)
    axes = torch.linalg.svd(windows / spread, full_matrices=False)[2][:count]
    places = (windows / spread) @ axes.T
    means = _means(places, of_text)
    centers = _means(means, whose)
    within = _covariance(places - means[of_text], len(windows) - len(texts))
    between_texts = _covariance(means - centers[whose], len(texts) - len(people))
    fewer = (1 / torch.bincount(whose)).mean()
    between = _covariance(centers - centers.mean(0), len(people) - 1) - fewer * between_texts
    ridge = 1e-3 * within.diagonal().mean() * torch.eye(count)
    root = torch.linalg.cholesky(within + ridge)
    whitened = torch.linalg.solve_triangular(
        root, torch.linalg.solve_triangular(root, between, upper=False).T, upper=False
    )
    sizes, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
    kept = min(directions, len(people) - 1, count)
    sizes, vectors = sizes.flip(0)[:kept].clamp(min=1e-3), vectors.flip(1)[:, :kept]
    loadings = torch.linalg.solve_triangular(root.T, vectors * sizes.sqrt(), upper=True).T @ axes / spread
    per_window = float(torch.cat([one.counts for hearings in people for one in hearings]).float().mean())
    shape = (kept, *mean.shape)
    voices = Voices(
        origin=mean,
        mean=mean,
        loadings=loadings.view(shape).to(mean),
        probes=(loadings * (per_window / sizes)[:, None]).view(shape).to(mean),
        patience=(per_window * _CAUTION / sizes).to(mean),
        reach=1e6,
    )
    told = [voices.place(one.scores.sum(0), int(one.counts.sum())) for hearings in people for one in hearings]
    return replace(voices, reach=_REACH * float(torch.stack(told).square().sum(1).mean().sqrt()))


def _means(rows: Tensor, groups: Tensor) -> Tensor:
    counts = torch.bincount(groups)
    return torch.zeros(len(counts), rows.shape[1]).index_add_(0, groups, rows) / counts[:, None]


def _covariance(rows: Tensor, freedom: int) -> Tensor:
    return rows.T @ rows / max(freedom, 1)


# ---- so that a text of somebody tells most of another ----------------------------------------------------------------

Pair = tuple[Tensor, int, Window]
"""What somebody is heard by: score [L, H] and tokens; and a window of another text of theirs."""


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
    held_out: list[Pair],
    steps: int,
    chance: random.Random,
) -> Voices:
    """`mean`, `loadings` and `probes` by gradients, as they are when people held out are told most; and what they gain."""
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

    bare = _worth(model, None, held_out)
    alone = _worth(model, replace(voices, loadings=0 * voices.loadings), held_out) - bare
    best, gained = voices, _worth(model, voices, held_out) - bare
    progress = tqdm(range(1, steps + 1), "how people differ", leave=False)
    for step in progress:
        progress.set_postfix(gained=f"{gained:.3f} nats a token")
        pairs = [
            _pairs([chance.choice(heard)], texts, chance, short=True)[0]
            for heard, texts in chance.choices(people, k=_BATCH)
        ]
        found = now()
        spoken = torch.stack([found.heard(told, tokens) for told, tokens, _ in pairs])
        _descend(model, search, [window for *_, window in pairs], spoken)
        falling.step()
        if step % max(steps // _CHECKS, 1) == 0:
            worth = _worth(model, now(), held_out) - bare
            if worth > gained:
                best, gained = now().to(model.device), worth
    return replace(best, people=len(people), gained=(alone, gained))


@torch.no_grad()
def _worth(model: CausalQwenForCausalLM, voices: Voices | None, pairs: list[Pair]) -> float:
    """Mean log-likelihood of a word of the windows that are asked for, nats, under what was heard."""
    told, words = 0.0, 0
    for start in range(0, len(pairs), _BATCH):
        part = pairs[start : start + _BATCH]
        asked = Words(model, [window for *_, window in part])
        spoken = None if voices is None else torch.stack([voices.heard(one, tokens) for one, tokens, _ in part])
        told += float(log_likelihood(model, asked, spoken).sum())
        words += int(asked.count.sum())
    return told / max(words, 1)
