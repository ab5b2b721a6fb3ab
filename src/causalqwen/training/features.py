"""What a frozen backbone says about every token of a data set, computed once.

While the backbone stands still, each position needs from it: the features z that the heads read, and, where it is scored, how
the rest of the vocabulary fares there (its share of L_cls, its best score). With those kept on disk, an epoch costs the heads
alone, and its scores are still those of the whole vocabulary. Rows that numbers alone are learned from do without the rest,
which takes longer than the backbone does.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from causalqwen.data import Example, collate
from causalqwen.data.encoding import most_also_right
from causalqwen.distributions import upcast
from causalqwen.files import check_sums, update_digest, write_sums
from causalqwen.losses import NO_TARGET
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.backbones import casting_once
from causalqwen.modeling.chain import Chain, Scores
from causalqwen.modeling.heads import NUMBER_PARTS
from causalqwen.training import ranks
from causalqwen.training.candidates import FEATURES as NUMBER_FEATURES
from causalqwen.training.candidates import KeptNumbers, numbers_in

FORMAT, READS = 5, "reads.npy"
_AT_ONCE = 256  # positions of which all scores are looked at

_NOT_MATHEMATICS = {"_name_or_path", "architectures", "dtype", "transformers_version"}


@dataclass
class Reads:
    """What the whole backbone tells at positions before a number: array float32 [M, R], its `blocks`, and at int64 [N], where a
    position's is in it, -1 where no number follows."""

    array: np.ndarray
    blocks: list[int]
    at: np.ndarray

    def __getitem__(self, index: slice | np.ndarray) -> "Reads":
        return Reads(self.array, self.blocks, self.at[index])


@dataclass
class TokenFacts:
    """Facts on N positions; each predicts the next token, `targets`, and its value where that is `<NUM>`.

    "Rest" is every token but `<NUM>`, rows that no token uses left out. Its columns (`REST`) are None where rows were read
    without it.

    features: z [N, H]. targets: int32 ids. values: float64, NaN off `<NUM>`.
    rest_loss: what the rest adds to L_cls. rest_prob_sum: its sum of P_k. rest_log_p: log P of the target (0 on `<NUM>`).
    target_logit: the target's score (0 on `<NUM>`). rest_log_partition: log sum exp of the scores of the rest.
    rival_score, rival_id: the best decision score of the rest, and whose it is. backbone_id, backbone_nll: the backbone's
        argmax, and its nats for the target (0 on `<NUM>`) over all rows of its matrix.
    num_scale, threshold: scale of `<NUM>`'s score when the facts were taken, and C + c(z). threshold is None where rows were
        read without the rest and nobody asks for `<NUM>`'s score (`learns_when`).
    also_right: int32 [N, R], further right tokens, which `rest_loss` takes as such; `NO_TARGET` where there are fewer.
    numbers: those in the positions' rows, where the model copies; it is no column.
    reads: where they are read from the whole backbone; no column either.
    """

    features: np.ndarray
    targets: np.ndarray
    values: np.ndarray
    num_scale: np.ndarray
    also_right: np.ndarray
    threshold: np.ndarray | None = None
    rest_loss: np.ndarray | None = None
    rest_prob_sum: np.ndarray | None = None
    rest_log_p: np.ndarray | None = None
    target_logit: np.ndarray | None = None
    rest_log_partition: np.ndarray | None = None
    rival_score: np.ndarray | None = None
    rival_id: np.ndarray | None = None
    backbone_id: np.ndarray | None = None
    backbone_nll: np.ndarray | None = None
    numbers: KeptNumbers | None = None
    reads: Reads | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: slice | np.ndarray) -> "TokenFacts":
        parts = {name: getattr(self, name) for name in (*COLUMNS, *_BESIDE)}
        return TokenFacts(**{name: None if part is None else part[index] for name, part in parts.items()})

    def features_at(self, taken: Tensor) -> Tensor:
        """Features of the positions `taken`, bool [N], before numbers: all that a value is read from."""
        features = self.tensor("features")[taken]
        if self.reads is None:
            return features
        return torch.cat([features, torch.from_numpy(self.reads.array[self.reads.at[taken.numpy()]])], dim=-1)

    @property
    def learned(self) -> np.ndarray:
        """Whether each position precedes a number that is learned, bool [N]."""
        return np.isfinite(self.values)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of those that there are."""
        return tuple(name for name in COLUMNS if getattr(self, name) is not None)

    def tensor(self, name: str) -> Tensor:
        """One column as a tensor; it shares the column's memory, and where that is a file, nothing is read yet. ValueError for
        one that these rows were read without."""
        if getattr(self, name) is None:
            raise ValueError(f"these facts were read without {name}: read them with the rest of the vocabulary")
        return torch.from_numpy(getattr(self, name))


_BESIDE = ("numbers", "reads")
COLUMNS = tuple(field.name for field in dataclasses.fields(TokenFacts) if field.name not in _BESIDE)
REST = COLUMNS[COLUMNS.index("rest_loss") :]
_INTEGERS = ("targets", "rival_id", "backbone_id", "also_right")
_DTYPES = dict.fromkeys(_INTEGERS, np.int32) | {"values": np.float64}


def _blocks_of(model: CausalQwenForCausalLM) -> list[int] | None:
    """The widths of what the whole backbone tells; None where it is not read."""
    return model.reads_backbone or (model.config.value_kernel or {}).get("blocks")


def learns_when(model: CausalQwenForCausalLM) -> bool:
    """Whether training on numbers alone reads `<NUM>`'s score at every position: its row is learned beside the values, or the
    gate asks for P_NUM. Else the row has a fit of its own (`announce`), and no threshold is taken, which is a product."""
    config = model.config
    return not model.action.scales.common or config.gate_alpha < 1


def _columns_of(model: CausalQwenForCausalLM, rest: bool) -> tuple[str, ...]:
    if rest:
        return COLUMNS
    without = REST if learns_when(model) else ("threshold", *REST)
    return tuple(name for name in COLUMNS if name not in without)


@torch.no_grad()
def token_facts(model: CausalQwenForCausalLM, examples: Sequence[Example], *, rest: bool = True) -> TokenFacts:
    """Facts on all positions of a few examples (one padded batch), in their order."""
    batch = collate(examples, model.processor.tokenizer.pad_token_id)
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    labels, values, also_right = (batch.pop(name, None) for name in ("labels", "numeric_labels", "also_right"))
    hidden = model.features(**batch).last_hidden_state
    keep = (labels[:, 1:] != -100) & batch["attention_mask"][:, 1:].bool()
    also_right = None if also_right is None else also_right[:, 1:][keep]
    at_positions = hidden[:, :-1][keep], labels[:, 1:][keep], values[:, 1:][keep]
    facts = facts_of(model, *at_positions, also_right, rest=rest)
    if model.copies:
        z = hidden[..., : model.config.hidden_size]
        facts.numbers = numbers_in(examples, model.config.num_token_id, z, model.config.context.hides)
    if (blocks := _blocks_of(model)) is not None:
        follows = np.flatnonzero(facts.targets == model.config.num_token_id)
        at = np.full(len(facts), -1)
        at[follows] = np.arange(len(follows))
        array = upcast(at_positions[0][follows, model.config.hidden_size :]).cpu().numpy()
        facts.reads = Reads(array, blocks, at)
    return facts


@torch.no_grad()
def facts_of(
    model: CausalQwenForCausalLM,
    z: Tensor,
    targets: Tensor,
    values: Tensor,
    also_right: Tensor | None = None,
    *,
    rest: bool = True,
) -> TokenFacts:
    """Facts under the heads as they are now: features z [N, H], int64 targets [N], float64 values [N] (read on `<NUM>`), int64
    also_right [N, R]. rest: of the rest of the vocabulary too."""
    words = model.vocabulary()
    is_num = targets == model.config.num_token_id
    values = torch.where(is_num, values, torch.nan)
    also_right = targets.new_empty(len(targets), 0) if also_right is None else also_right
    columns: dict[str, list[Tensor]] = {name: [] for name in _columns_of(model, rest)}
    for part in torch.arange(len(z), device=z.device).split(_AT_ONCE):
        chain = Chain(model, z[part], words=words)
        facts = _rest_facts(model, chain, targets[part], is_num[part], also_right[part]) if rest else {}
        facts |= {
            "features": upcast(chain.features),
            "targets": targets[part],
            "values": values[part],
            "num_scale": chain.number_scale,
            "also_right": also_right[part],
        }
        if "threshold" in columns:
            facts["threshold"] = chain.threshold.squeeze(-1)
        for name, tensor in facts.items():
            columns[name].append(tensor.cpu())
    made: dict[str, Any] = {
        name: torch.cat(parts).numpy().astype(_DTYPES.get(name, np.float32)) for name, parts in columns.items()
    }
    return TokenFacts(**made)


def _rest_facts(
    model: CausalQwenForCausalLM, chain: Chain, targets: Tensor, is_num: Tensor, also: Tensor
) -> dict[str, Tensor]:
    """The columns `REST` of a chain's positions [n]; also: int64 [n, R]."""
    backbone_head, words, rest = model.backbone.get_output_embeddings(), chain.words, chain.word_scores
    plain = words.layer is backbone_head and words.action.token_thresholds is None
    is_backbones = plain and torch.equal(chain.loc, chain.features)
    theirs = rest.loc if is_backbones else backbone_head(chain.features.to(backbone_head.weight.dtype))
    target = targets.masked_fill(is_num, 0).unsqueeze(-1)
    right = torch.cat([target, also.clamp(min=0)], dim=-1)
    is_right = torch.cat([~is_num.unsqueeze(-1), also != NO_TARGET], dim=-1)
    log_p_right, log_not_right = rest.at(right).log_p()
    rows = zip(rest.parts(), theirs.split(rest.at_once), strict=True)
    sums = [_sums_over_words(part, upcast(own)) for part, own in rows]
    made = {name: torch.cat([one[name] for one in sums]) for name in sums[0]}
    of_right = (log_p_right - log_not_right).masked_fill(~is_right, 0.0).sum(-1)
    own = theirs.gather(-1, target).squeeze(-1)
    return made | {
        "rest_loss": made["rest_loss"] - of_right,
        "rest_log_p": log_p_right[:, 0].masked_fill(is_num, 0.0),
        "target_logit": upcast(rest.loc.gather(-1, target).squeeze(-1)).masked_fill(is_num, 0.0),
        "backbone_nll": (made["backbone_nll"] - own).masked_fill(is_num, 0.0),
    }


def _sums_over_words(rest: Scores, theirs: Tensor) -> dict[str, Tensor]:
    """What takes all scores of some positions, and of the backbone's own [n, V]: `REST`, before what is right is looked at."""
    log_not_p, best = rest.masked(rest.log_not_p(), 0.0), rest.decision_scores().max(-1)
    backbones = theirs.max(-1)
    return {
        "rest_loss": -log_not_p.sum(-1),
        "rest_prob_sum": -torch.expm1(log_not_p).sum(-1),
        "rest_log_partition": rest.masked(upcast(rest.loc), -torch.inf).logsumexp(-1),
        "rival_score": best.values,
        "rival_id": best.indices,
        "backbone_id": backbones.indices,
        "backbone_nll": theirs.logsumexp(-1),
    }


def known_of_number(chain: Chain, num_scale: Tensor, threshold: Tensor | None) -> None:
    """Tell a chain at kept features what is known of its positions, [...]: `<NUM>` follows the heads as they are now."""
    abduction = chain.model.abduction
    weight = abduction.loc_net.weight
    if chain.features.numel() >= weight.numel() and abduction.keeps_features:  # to see that takes as long for fewer
        chain.loc_U = chain.features.to(weight.dtype)
    if threshold is not None:
        chain.threshold = threshold.unsqueeze(-1)
    if chain.action.scales.common:  # which does not follow `<NUM>`'s row
        chain.number_scale = num_scale


def grouped(keys: Iterable[Hashable]) -> list[list[int]]:
    """The places of equal keys, in the order in which they are met."""
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.values())


def batches_by_length(examples: Sequence[Sized], tokens: int) -> Iterator[list[int]]:
    """Indices of examples of similar lengths, together about `tokens` tokens with their padding; every one once."""
    order = sorted(range(len(examples)), key=lambda index: len(examples[index]))
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * len(examples[index]) > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def stream_facts(
    model: CausalQwenForCausalLM,
    examples: Sequence[Example],
    *,
    tokens: int = 1024,
    title: str = "reading",
    split: bool = False,
    rest: bool = True,
) -> Iterator[tuple[list[int], TokenFacts]]:
    """Facts batch by batch, with the indices of the examples that each holds; progress on stderr.

    rest: of the rest of the vocabulary too. split: this rank's `share` of the batches; a filler is computed too, and given as
    no facts on no examples.
    """
    every = list(batches_by_length(examples, tokens))
    batches = ranks.share(every) if split else [(indices, True) for indices in every]
    total = sum(len(examples[index]) for indices, _ in batches for index in indices)
    with tqdm(total=total, desc=title, unit="tok", leave=False, disable=ranks.rank() > 0) as bar:
        for indices, own in batches:
            chosen = [examples[index] for index in indices]
            facts = ranks.on_whole(model, partial(token_facts, rest=rest), chosen)
            yield (indices, facts) if own else ([], facts[:0])
            bar.update(sum(len(example) for example in chosen))


@contextmanager
def telling_kept(folder: Path) -> Iterator[None]:
    """Whatever is wrong with a folder of kept facts, as one ValueError that says what to do."""
    try:
        yield
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise ValueError(f"{folder} is damaged: {error}; remove it, and its rows are read again") from error


def _write_row(arrays: Mapping[str, np.ndarray], facts: TokenFacts, rows: slice, into: slice) -> None:
    """Write the facts of one example, `rows` of a batch, into their places of the arrays."""
    for name, array in arrays.items():
        made, there = getattr(facts, name)[rows], array[into]
        if name == "also_right":  # as wide as its batch needs
            there[:] = NO_TARGET
            there = there[:, : made.shape[1]]
        there[:] = made


class FactStore:
    """Facts of a data set in a folder of memory-mapped arrays. Example i has the positions offsets[i] to offsets[i+1].

    ValueError where what is kept is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with telling_kept(folder):
            check_sums(folder)
            # mapped, but as plain arrays: part of a memmap costs several times as much
            paths = {name: folder / f"{name}.npy" for name in COLUMNS}
            arrays: dict[str, Any] = {
                name: np.asarray(np.load(path, mmap_mode="c")) for name, path in paths.items() if path.exists()
            }
            self.offsets, reads = np.load(folder / "offsets.npy"), None
            if (folder / READS).exists():
                about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
                is_number = arrays["targets"] == about["num_token_id"]
                at = np.where(is_number, is_number.cumsum() - 1, -1)
                reads = Reads(np.asarray(np.load(folder / READS, mmap_mode="c")), about["blocks"], at)
            numbers = KeptNumbers.load(folder, np.diff(self.offsets))
        self.facts = TokenFacts(**arrays, numbers=numbers, reads=reads)

    @classmethod
    def of_rows(cls, facts: TokenFacts, offsets: np.ndarray | None = None) -> "FactStore":
        """Facts in memory, by default of rows that have one position each."""
        made = cls.__new__(cls)
        made.facts, made.offsets = facts, np.arange(len(facts) + 1) if offsets is None else offsets
        return made

    def of_some(self, rows: Sequence[int]) -> "FactStore":
        """The facts of some of the rows, in memory; numbers in them keep the places that they have among all."""
        facts = self.facts[np.concatenate([np.arange(*self.offsets[row : row + 2]) for row in rows])]
        return FactStore.of_rows(facts, np.cumsum([0, *np.diff(self.offsets)[list(rows)]]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> TokenFacts:
        return self.facts[self.offsets[index] : self.offsets[index + 1]]

    def blocks(self, positions: int = 8192, *, split: bool = False) -> Iterator[TokenFacts]:
        """All positions, some at a time; `split`: this rank's `share` of them, with an empty block for a filler."""
        starts = range(0, len(self.facts), positions)
        for start, own in ranks.share(starts) if split else [(start, True) for start in starts]:
            yield self.facts[start : start + positions if own else start]

    def renewed(
        self, model: CausalQwenForCausalLM, positions: int = 1024, *, split: bool = False
    ) -> Iterator[TokenFacts]:
        """All positions from their features under the heads that `model` has now, for heads that the facts depend on."""
        for block in self.blocks(positions, split=split):
            z, targets, values, also_right = (
                torch.from_numpy(getattr(block, name)).to(model.device)
                for name in ("features", "targets", "values", "also_right")
            )
            facts = ranks.on_whole(model, facts_of, z.to(model.dtype), targets.long(), values, also_right.long())
            yield dataclasses.replace(facts, numbers=block.numbers)

    @classmethod
    def build(
        cls,
        model: CausalQwenForCausalLM,
        examples: Sequence[Example],
        root: Path,
        *,
        title: str = "reading",
        rest: bool = True,
    ) -> "FactStore":
        """The facts of `examples` under `model`: found in `root` under their key, or computed and put there.

        rest: of the rest of the vocabulary too, without which numbers can be learned, but nothing be scored.

        The folder is named after a hash of the weights that the facts depend on, the settings and the data, so that it is never
        used for anything else. It appears by rename, complete. All ranks compute it together, each its share of the batches,
        and must see `root` on one filesystem.
        """
        # Rank 0's key: weights that were trained on unlike machines may differ in their last bits.
        folder = ranks.from_main(Path(root) / f"features-{facts_key(model, examples, rest=rest)[:24]}")
        if ranks.from_main(folder.is_dir()):
            return cls(folder)
        was_training = model.training
        model.eval()
        try:
            cast = nullcontext() if ranks.is_sharded(model) else casting_once(model)
            with ranks.writing_folder(folder) as part, cast:
                cls._fill(part, model, examples, title, rest)
        finally:
            model.train(was_training)
        return cls(folder)

    @staticmethod
    def _fill(part: Path, model: CausalQwenForCausalLM, examples: Sequence[Example], title: str, rest: bool) -> None:
        """Each rank its share of the batches, into arrays in `part` that all of them see."""
        offsets = np.concatenate([[0], np.cumsum([example.positions for example in examples], dtype=int)])
        size, num_id, names = model.config.hidden_size, model.config.num_token_id, _columns_of(model, rest)
        numbers = KeptNumbers.of(examples, num_id, np.empty(0)) if model.copies else None
        if ranks.rank() == 0:
            widths = {"features": (size,), "also_right": (most_also_right(examples),)}
            for name in names:
                shape = int(offsets[-1]), *widths.get(name, ())
                _make_array(part / f"{name}.npy", _DTYPES.get(name, np.float32), shape)
            if numbers is not None:
                _make_array(part / NUMBER_FEATURES, np.float32, (len(numbers.values), size))
                numbers.save(part)
            np.save(part / "offsets.npy", offsets)
            about = {"format": FORMAT, "num_token_id": num_id, "blocks": _blocks_of(model)}
            (part / "about.json").write_text(json.dumps(about) + "\n")
        ranks.barrier()
        arrays = {name: np.lib.format.open_memmap(part / f"{name}.npy", "r+") for name in names}
        of_numbers = None if numbers is None else np.lib.format.open_memmap(part / NUMBER_FEATURES, "r+")
        # What comes last is never read: rows that differ in their last value alone (repeated measures) share all else.
        sharing, reads = grouped(map(row_digest, examples)), dict[int, np.ndarray]()
        distinct: Any = torch.utils.data.Subset(examples, [indices[0] for indices in sharing])  # type: ignore[arg-type]
        for places, facts in stream_facts(model, distinct, title=title, split=True, rest=rest):
            said = facts.numbers
            counts = [distinct[place].positions for place in places]
            for row, (place, count, end) in enumerate(zip(places, counts, np.cumsum(counts).tolist(), strict=True)):
                rows = slice(end - count, end)
                for index in sharing[place]:
                    _write_row(arrays, facts, rows, slice(*offsets[index : index + 2]))
                    if facts.reads is not None:
                        reads[index] = facts.reads.array[(at := facts.reads.at[rows])[at >= 0]]
                    if numbers is not None:
                        into = slice(*numbers.offsets[index : index + 2])
                        of_numbers[into] = said.features[slice(*said.offsets[row : row + 2])]
                    if examples[index].input_ids[-1] == num_id and count:
                        arrays["values"][offsets[index + 1] - 1] = examples[index].numeric_labels[-1]
        for array in (*arrays.values(), of_numbers):
            if array is not None:
                array.flush()
        if reads:
            np.save(part / READS, np.concatenate([reads[index] for index in range(len(examples))]))
        if ranks.world_size() == 1:  # on other machines, not all that was written may be seen yet
            write_sums(part)


def _make_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    """An array to be filled through a map. OSError where the disk is full: a write through the map would end the process."""
    np.lib.format.open_memmap(path, "w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None


def _how_read(example: Example) -> list[float]:
    """What an example's facts depend on beside its tokens and their values."""
    pairs = [number for pair in example.also_right or () for number in pair]
    return [example.value_from, len(pairs), *pairs, *(example.learned or ())]


def row_digest(example: Example) -> bytes:
    """SHA-256 of what is read of an example: all but the value that comes last."""
    read = [*example.input_ids, *example.numeric_values[:-1], *_how_read(example)]
    return hashlib.sha256(np.array(read, dtype=np.float64).tobytes()).digest()


def update_with_rows(digest: Any, examples: Sequence[Example]) -> None:
    """A digest of what was there, and of these rows: tokens, values and what is right."""
    for example in examples:
        digest.update(np.array(example.input_ids, dtype=np.int64).tobytes())
        read = [*example.numeric_values, *_how_read(example)]
        digest.update(np.array(read, dtype=np.float64).tobytes())


def facts_key(model: CausalQwenForCausalLM, examples: Sequence[Example], *, rest: bool = True) -> str:
    """SHA-256 over everything that the facts depend on, with the `rest` of the vocabulary or without: weights, settings,
    tokens, values and what is right."""
    config = model.config
    digest = hashlib.sha256()
    settings = {
        "format": FORMAT,
        "num_token_id": config.num_token_id,
        "free_token_ids": config.free_token_ids,
        "score_scale": config.score_scale,
        "family": config.vocabulary_family,
        "score_noise": config.score_noise,
        "score_slope": config.score_slope,
        "scale_activation": config.scale_activation,
        "max_scale": config.max_scale,
        "domain": config.domain and config.domain_settings | {"name": config.domain},
        "backbone": {k: v for k, v in config.text_config.to_dict().items() if k not in _NOT_MATHEMATICS},
    }
    settings |= {"hides_numbers": True} if config.context.hides else {}
    if model.bf16:
        settings["bf16"] = True
    if (blocks := _blocks_of(model)) is not None:
        settings["reads"] = blocks
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith(NUMBER_PARTS):
            update_digest(digest, name, tensor)
    update_with_rows(digest, examples)
    digest.update(b"numbers" * model.copies + b"values" * (not rest) + b"when" * (not rest and learns_when(model)))
    return digest.hexdigest()
