"""How likely tokens are where they stand, and what else could have stood there, with nothing drawn: under the softmax, and one
against the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.chain import POSITIONS_AT_ONCE, Chain
from causalqwen.modeling.individuals import share_of_who
from causalqwen.modeling.processor import NUM_TOKEN
from causalqwen.parts.copying import Candidates

_CONTEXT = 8  # tokens before it that decide how a token is written
_UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Alternative:
    """A token that can stand at a place: softmax, exp(loc_S) of it over the sum of all; ovr, its P_k.

    name: as the tokenizer lists it. text: what it adds to the text before it; None where it is no text of its own: a special
    token, or a part of a character. `<NUM>` adds the number that the model would write there.
    """

    token: int
    name: str
    text: str | None
    softmax: float
    ovr: float


@dataclass(frozen=True)
class Place:
    """A place of a text, with everything drawn integrated out.

    chosen: the token that stands there. who: how much of what varies in it is who speaks, as in `shares`. alternatives: the
    likeliest tokens under the softmax, likeliest first. decided: argmax_k P_k, a token's id.
    """

    chosen: Alternative
    who: float
    alternatives: tuple[Alternative, ...]
    decided: int


@torch.no_grad()
def alternatives(
    model: GraftedModel,
    features: Tensor,
    tokens: Sequence[int],
    before: Sequence[tuple[Sequence[int], Sequence[float]]],
    count: int,
    candidates: Candidates | None = None,
) -> list[Place]:
    """The place after each of the features [n, H], where the tokens [n] stand, with the `count` likeliest.

    before: of each, ids and values of the text before it (its end is enough). candidates: what each may be a copy of.
    """
    chain = Chain(model, features)
    scores = chain.scores
    softmax, p = scores.masked(scores.loc, -torch.inf).double().softmax(-1), scores.p()
    chosen = torch.tensor(tokens, device=features.device)
    who = share_of_who(model, chain, chosen).tolist()
    likeliest = softmax.topk(min(count, softmax.shape[-1]), dim=-1).indices
    shown = torch.cat([chosen.unsqueeze(-1), likeliest], dim=-1)
    columns = zip(shown.tolist(), softmax.gather(-1, shown).tolist(), p.gather(-1, shown).tolist(), strict=True)
    number = model.config.num_token_id
    values = [0.0] * len(who)
    if bool((shown == number).any()):
        values = model.said_values(features, model.generated_values(chain.value()[0]), candidates).tolist()
    places = []
    for (ids, of_softmax, of_ovr), text, value, share, decided in zip(
        columns, before, values, who, scores.decide().tolist(), strict=True
    ):
        each = [
            Alternative(token, _name(model, token), _added_text(model, text, token, value), *of)
            for token, *of in zip(ids, of_softmax, of_ovr, strict=True)
        ]
        places.append(Place(each[0], share, tuple(each[1:]), decided))
    return places


def _name(model: GraftedModel, token: int) -> str:
    listed = model.processor.tokenizer.convert_ids_to_tokens(token)
    return NUM_TOKEN if token == model.config.num_token_id else str(listed)


def _added_text(
    model: GraftedModel, before: tuple[Sequence[int], Sequence[float]], token: int, value: float
) -> str | None:
    """What a token adds to a text of ids and values; None where that is no text of its own."""
    processor = model.processor
    ids, values = (list(column[-_CONTEXT:]) for column in before)
    if processor.context.writes:  # the digits are there too
        kept = [place for place, known in enumerate(ids) if known != processor.num_token_id]
        ids, values = [ids[place] for place in kept], [values[place] for place in kept]
    if token in processor.tokenizer.all_special_ids:
        return None
    known = processor.decode(ids, values)
    whole = processor.decode([*ids, token], [*values, value])
    added = whole[len(known) :] if whole.startswith(known) else ""
    return None if _UNFINISHED in added else added or None


@dataclass(frozen=True)
class Likelihood:
    """A token at a place, in nats.

    log_prob: of a word, given that a word comes, the backbone's own softmax over all rows of its matrix; of `<NUM>`, its share
    of the softmax over all tokens (theory 2.5). log_ovr: log P_k against its own threshold.
    """

    token: int
    log_prob: float
    log_ovr: float


@torch.no_grad()
def likelihoods(model: GraftedModel, features: Tensor, tokens: Tensor, count: int) -> list[tuple[Likelihood, ...]]:
    """Behind each of the features [n, H]: the token int64 [n] that stands there, then the `count` likeliest words in order."""
    parts = zip(features.split(POSITIONS_AT_ONCE), tokens.unsqueeze(-1).split(POSITIONS_AT_ONCE), strict=True)
    return [each for part, stands in parts for each in _of_part(model, Chain(model, part), stands, count)]


def _of_part(model: GraftedModel, chain: Chain, stands: Tensor, count: int) -> list[tuple[Likelihood, ...]]:
    words = chain.words(chain.loc).float().log_softmax(-1)
    in_use, number = chain.action.rest_in_use, model.config.num_token_id
    usable = words if in_use is None else words.masked_fill(~in_use, -torch.inf)
    shown = torch.cat([stands, usable.topk(min(count, usable.shape[-1]), dim=-1).indices], dim=-1)
    log_probs = words.gather(-1, shown.clamp(max=words.shape[-1] - 1))
    scores = chain.scores
    if bool((stands == number).any()):
        shares = scores.masked(scores.loc, -torch.inf).float().log_softmax(-1)[:, number, None]
        log_probs[:, :1] = torch.where(stands == number, shares, log_probs[:, :1])
    columns = shown.tolist(), log_probs.tolist(), scores.at(shown).log_p()[0].tolist()
    return [tuple(map(Likelihood, *row)) for row in zip(*columns, strict=True)]
