"""Numbers from the rows of a table, as scikit-learn has it (docs/tables.md)."""

import atexit
import copy
import hashlib
import json
import math
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from causalqwen.data import Example, Row, encode_rows
from causalqwen.data.cells import Columns, as_python
from causalqwen.data.columns import FAR, TableReader, is_frame, table_of
from causalqwen.extras import extra
from causalqwen.files import check_sums, write_sums, writing_folder
from causalqwen.modeling import CausalQwenConfig, CausalQwenForCausalLM, CausalQwenProcessor, NumberPrediction
from causalqwen.modeling.backbones import DEFAULT_BACKBONE, resolve_backbone, resolve_device
from causalqwen.modeling.grafting import renew_values
from causalqwen.modeling.heads import VALUE_MODULES
from causalqwen.modeling.prediction import or_copied
from causalqwen.modeling.reader import NUMBERS
from causalqwen.numbers import CRPS_LEVELS
from causalqwen.parts.copying import Candidates, joined
from causalqwen.training import FactStore, TrainSettings
from causalqwen.training.copies import values_repeat_context
from causalqwen.training.features import Reads, TokenFacts
from causalqwen.training.kept_rows import KeptRows, RayReaders
from causalqwen.training.settings import STAGES
from causalqwen.training.whole_backbone import WholeBackbone, blocks_of

with extra("tables", "a table"):
    import pandas as pd
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils import check_array, check_consistent_length, check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data

OUTPUT_TYPES = ("mean", "median", "mode", "quantiles", "full")
QUANTILES = tuple(round(0.1 * place, 1) for place in range(1, 10))
STATE, ABOUT = "estimator.safetensors", "estimator.json"
FORMAT = 4
_FEWEST, _FEWEST_GROUPS = 10, 5
_ROWS_AT_ONCE = 1024


def _plain(value: Any) -> Any:
    """What JSON holds of a parameter that it does not know. TypeError for what cannot be written to a file."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} cannot be written to a file: give plain values")


@dataclass(eq=False, repr=False)
class NumberRegressor(RegressorMixin, BaseEstimator):
    """The distribution of a number, from texts or from the rows of a table.

    X is a list of strings, a pandas DataFrame with text, category, number, date and missing columns, a `datasets.Dataset`, an
    Arrow table, a dict of columns, or a 2-D array. A row is read twice: as a text, by the whole backbone, and as numbers, those
    of its number, category and date columns. Values follow from both in closed form (`training.closed_form`), and all is chosen
    and calibrated by rows that are left out one by one, or group by group.

    Args:
        backbone: smollm2-135m, a hub name, or a folder with a decoder; read once in a process.
        target: what the number is called in a row's text; the name of y, or else "value", by default.
        text_columns: columns that are texts, whatever they look like.
        config: fields of `CausalQwenConfig`, over the defaults. settings: of `TrainSettings`, as in a YAML file.
        characters: how many characters of a row's text are read at most.
        decimal: the decimal mark of strings that are numbers, as 1.234,50 EUR: "." or ",", by column as a dict, or "auto", what
            each column tells (`decimals_of`).
        bf16: take the backbone's products in bfloat16; "auto", where this machine is faster so (`bf16_pays`).
        cache_dir: folder where the features of rows are kept, 1,024 rows at a time; by default they last as the process does.
        workers: how many workers of Ray read rows into cache_dir, which all machines have to share (`causalqwen[ray]`); 0 to
            read them here.
        device: auto, or a torch device.
        verbose: tell on stderr what is chosen.
        random_state: of the rows that are drawn by `sample_weight`: an int, a RandomState, or None.

    Attributes:
        model_: the graft. reader_: how rows are read.
        metrics_: scores of the training rows, each predicted without it. choice_: what was chosen: axis, law, kernel, ridge.
        n_features_in_, feature_names_in_: as scikit-learn has them.
    """

    backbone: str = "smollm2-135m"
    _: KW_ONLY
    target: str | None = None
    text_columns: Sequence[str] | None = None
    config: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    characters: int = 2000
    decimal: str | dict[str, str] = "auto"
    bf16: bool | str = "auto"
    cache_dir: str | None = None
    workers: int = 0
    device: str = "auto"
    verbose: bool = False
    random_state: Any = None

    # ---- fitting -----------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> "NumberRegressor":
        """Learn y [n] from the rows X.

        Args:
            sample_weight: [n], not negative: how often a row counts, 1 on average. Rows are repeated at random accordingly.
            groups: [n], names; rows of one group never stand on both sides of a split.

        Raises:
            ValueError: too few rows or groups, values that are not finite numbers, or a column that cannot be used.
        """
        if y is None:
            raise ValueError("this regressor requires y to be passed, but the target y is None")
        if self.workers and self.cache_dir is None:
            raise ValueError("workers need cache_dir, a folder that all machines see")
        if isinstance(self.text_columns, str):
            raise ValueError(f"text_columns is a list of names: [{self.text_columns!r}]")
        if self.characters < 1:
            raise ValueError(f"characters={self.characters}: a row's text has one at least")
        if gradients := (self.settings or {}).keys() & {*STAGES, "class_transforms"}:
            reason = "a regressor is fitted in closed form, of one kind of number"
            raise ValueError(f"settings: {reason}; leave {gradients.pop()} out")
        self._written_params()
        X = _as_columns(X)
        table, values = self._table(X, y)
        random = check_random_state(self.random_state)
        of_group = _of_groups(len(values), groups)
        times = _times(sample_weight, values, random)
        used = np.repeat(np.arange(len(values)), times)
        if len(np.unique(of_group[used])) < _FEWEST_GROUPS:
            raise ValueError(f"sample_weight: {(times > 0).sum()} rows count, too few to leave some out")
        named = getattr(y, "name", None)
        own = named if isinstance(named, str | int) else None  # a DataFrame's may be a column
        target = None if _is_strings(X) else str(self.target or own or "value")
        say = partial(print, file=sys.stderr) if self.verbose else lambda line: None
        given = tuple(self.text_columns or ())
        self.reader_ = TableReader.fit(table, target, given, self.characters, self.decimal)
        for line in self.reader_.remarks(table):
            say(line)
            if " would be " in line and self.decimal == "auto" and not self.verbose:
                warnings.warn(line, UserWarning, stacklevel=2)
        table, started = self.reader_.checked(table), time.perf_counter()
        self.model_ = _grafted(self.backbone, self.device, self.config or {})
        self.model_.bf16 = self._settings.takes_bf16(self.model_)
        examples = self._examples(table, values)
        learned = [replace(examples[row], group=f"{of_group[row]}") for row in used]
        if "copy_numbers" not in (self.config or {}) and values_repeat_context(
            learned, self.model_.config.num_token_id
        ):
            renew_values(self.model_, copy_numbers=True)
        facts = self._facts(learned, self.reader_.numbers(table)[used])
        fit = WholeBackbone(self.model_, [(learned, FactStore.of_rows(facts))], set(), self._settings)
        fit.install()
        fit.tell(say, time.perf_counter() - started)
        self.choice_, self.metrics_ = fit.chosen, fit.scores()
        return self

    def _table(self, X: Any, y: Any = None) -> tuple[Columns, Any]:
        """X as columns; with y, which is checked too, what later X are held against."""
        X = _as_columns(X)
        reset = y is not None
        if reset:
            y = column_or_1d(y, warn=True)
            if y.dtype.kind == "f" and y.dtype.itemsize < 8:  # 0.1, which a text may say, and not 0.10000000149
                y = np.where(y == np.rint(y), y.astype(np.float64), y.astype(str).astype(np.float64))
            y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
            if np.abs(y).max(initial=0.0) > FAR:
                raise ValueError(f"y, row {1 + int(np.abs(y).argmax())}: values are learned to {FAR:.0e}; scale them")
        # A DataFrame for whoever was fitted on columns by name, as `causalqwen fit` is: in any order, and nothing to warn of.
        by_name = is_frame(X) and not reset and not hasattr(self, "feature_names_in_")
        by_name = by_name and [*self.reader_.known] != [f"x{place}" for place in range(len(self.reader_.columns))]
        plain = _is_columns(X) or _is_strings(X)
        if not (plain or by_name):
            if isinstance(X, list | tuple):
                X = np.array(X, dtype=object)  # which would make texts of the numbers beside texts
            own: dict[str, Any] = {"dtype": None, "ensure_all_finite": "allow-nan"}
            X = validate_data(self, X, reset=reset, **({"skip_check_array": True} if is_frame(X) else own))
        table = table_of(X)
        if not table:
            raise ValueError("there is no column to predict from")
        if not next(iter(table.values())):
            raise ValueError("Found array with 0 sample(s) (0 rows) while a minimum of 1 is required.")
        if reset:
            if plain:
                self.n_features_in_ = len(table)
            check_consistent_length(next(iter(table.values()), []), y)
        else:
            table = self.reader_.checked(table)
        return table, y

    def _examples(self, table: Columns, values: np.ndarray) -> list[Example]:
        """The rows as the model reads them, cut from the right to fit its context, of which the value alone is learned.
        ValueError for a text that cannot be read, by row."""
        processor, limit = self.model_.processor, self.model_.config.context_length or math.inf
        texts = self.reader_.texts(table, exact=self.model_.copies)
        for row, text in enumerate(texts):  # two tokens have a character at least: `<NUM>` and a digit
            shown = text.removesuffix(self.reader_.asked("..")[2:])
            try:
                while 2 * len(text) >= limit and (tokens := 1 + len(processor(text, prompt=True)["input_ids"])) > limit:
                    shown = shown[: min(len(shown) - 1, int(len(shown) * limit / tokens))]
                    text = texts[row] = self.reader_.asked(shown)
            except ValueError as error:
                raise ValueError(f"row {row + 1}: {error}") from None
        pairs = enumerate(zip(texts, values.tolist(), strict=True), start=1)
        rows = [Row("prompt", f"row {row}", {"prompt": text, "value": value}) for row, (text, value) in pairs]
        encoded = encode_rows(rows, processor, self.model_.config.context_length)
        return [replace(example, learned=[False] * (len(example) - 1) + [True]) for example in encoded]

    def _facts(self, examples: list[Example], columns: np.ndarray) -> TokenFacts:
        """Features before each row's value: the whole backbone's, then those of the columns [n, K], each a block."""
        readers = None
        if self.workers:
            config = (self.config or {}) | {"copy_numbers": self.model_.copies}
            make = partial(_grafted, self.backbone, self.device, config, self.model_.bf16)
            readers = RayReaders(make, self.workers, gpus=float(self.model_.device.type == "cuda"))
        facts = KeptRows(Path(self.cache_dir or _process_cache()), self.model_, readers).facts(examples)
        blocks = facts.reads.blocks[:-NUMBERS]  # the columns hold the numbers of the texts
        joined = np.concatenate([facts.reads.array[:, : sum(blocks)], columns], axis=1)
        return replace(facts, reads=Reads(joined, [*blocks, *self.reader_.widths], facts.reads.at))

    @property
    def _settings(self) -> TrainSettings:
        return TrainSettings.from_dict({"bf16": self.bf16} | (self.settings or {}))

    # ---- predicting --------------------------------------------------------------------------------------------------

    def predict(self, X: Any, output_type: str = "mean", quantiles: Sequence[float] = QUANTILES) -> Any:
        """One of `OUTPUT_TYPES` for each row.

        mean: of the law's 199 quantiles k/200, clipped to the training range widened by its own width (theory 3.11). mode: the
        likeliest quantile where these lie closest (`ValueLaw.mode`). quantiles: a list of arrays [n], one per level. full: all
        of these by name, and `predictions`, a `NumberPrediction` for each row.
        """
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"unknown output_type {output_type!r}; use one of {', '.join(OUTPUT_TYPES)}")
        law, loc, scale = self._laws(X)
        of_new = self.model_.value_law

        def mean() -> torch.Tensor:
            return of_new.clip(of_new.quantile(loc, scale, CRPS_LEVELS)).mean(-1, keepdim=True)

        asked = {
            "mean": lambda: law.mean_beside(mean()),
            "median": lambda: law.quantile(loc, scale, torch.tensor([0.5])),
            "mode": lambda: law.or_said(of_new.mode(loc, scale)),
            "quantiles": lambda: law.quantile(loc, scale, torch.tensor(list(quantiles))),
        }

        def answer(name: str) -> Any:
            columns = list(asked[name]().T.numpy())
            return columns if name == "quantiles" else columns[0]

        if output_type != "full":
            return answer(output_type)
        laws = zip(loc[:, 0].tolist(), scale[:, 0].tolist(), strict=True)
        predictions = [NumberPrediction(*parameters, None, of_new) for parameters in laws]
        return {name: answer(name) for name in asked} | {"predictions": or_copied(predictions, law)}

    def predict_interval(self, X: Any, level: float = 0.9) -> np.ndarray:
        """Central intervals [n, 2] that cover `level` in (0, 1), calibrated by the training rows, each without itself."""
        law, loc, scale = self._laws(X)
        return torch.cat(law.interval(loc, scale, level), dim=1).numpy()

    def sample(self, X: Any, n: int = 1, seed: int = 0) -> np.ndarray:
        """n draws [rows, n] from each row's distribution, calibrated; the same seed gives the same."""
        law, loc, scale = self._laws(X)
        levels = np.random.default_rng(seed).uniform(1e-9, 1 - 1e-9, size=(len(loc), n))
        return law.quantile(loc, scale, torch.from_numpy(levels)).numpy()

    @torch.no_grad()
    def _laws(self, X: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """The law of the rows X, loc and scale float64 [n, 1] on the axis of a new number's.

        loc lies within the training range widened by its own width, and a row that lies outside of what the training rows held
        has so much more scale (`TableReader.outside`): half the distance of the quartiles of t(y) is 1.
        """
        check_is_fitted(self, "model_")
        table, _ = self._table(X)
        columns, model = self.reader_.numbers(table), _in_float64(self.model_)
        away = np.stack([np.zeros(len(columns)), *self.reader_.outside(table).values()]).max(0)
        facts = self._facts(self._examples(table, np.zeros(len(columns))), columns)
        parts, copies = list[torch.Tensor](), list[Any]()
        for start in range(0, len(columns), _ROWS_AT_ONCE):
            part = facts[start : start + _ROWS_AT_ONCE]
            parts.append(model.value_kernel.told(torch.from_numpy(part.reads.array[part.reads.at]).double()))
            if part.numbers is not None:
                offered = Candidates(**part.numbers.candidates())
                offered = replace(offered, features=offered.features.double())
                copies.append(model.copy_law(part.tensor("features").double(), offered))
        loc, log_scale = torch.cat(parts).unsqueeze(-2).unbind(-1)
        law: Any = model.value_law
        ends = law.transform.cell(law.clip(torch.tensor([-torch.inf, torch.inf], dtype=torch.float64)))
        loc, scale = loc.clamp(ends[0][0], ends[1][1]), law.widened(log_scale.exp(), torch.from_numpy(away)[:, None])
        if copies:
            law = joined(law, *zip(*((copy.candidates, copy.log_weights) for copy in copies), strict=True))
        return law.beside_levels(), loc, scale

    # ---- keeping -----------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write what was learned to a new folder: safetensors and JSON. The backbone is named there, not copied.
        FileExistsError where the folder is there."""
        check_is_fitted(self, "model_")
        if Path(folder).exists():
            raise FileExistsError(f"{folder} exists already; choose another folder")
        weights, about = self._state()
        with writing_folder(Path(folder)) as part:
            (part / STATE).write_bytes(weights)
            params = self._written_params()
            about["backbone_at"] = resolve_backbone(self.backbone)
            (part / ABOUT).write_text(json.dumps({"params": params} | about, indent=1) + "\n", encoding="utf-8")
            write_sums(part)

    def _written_params(self) -> dict[str, Any]:
        """Parameters as a file holds them. ValueError for one that no file can hold."""
        params = self.get_params(deep=False)
        if not isinstance(params["random_state"], int | None):
            params["random_state"] = None
        for name, value in params.items():
            try:
                params[name] = json.loads(json.dumps(value, default=_plain))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: {error}") from None
        return params

    @classmethod
    def load(cls, folder: str | Path, device: str | None = None) -> "NumberRegressor":
        """What `save` wrote, whose rows are read here and kept by nobody until `set_params` gives `workers` and `cache_dir`;
        device: another than it was fitted on. ValueError where the folder holds no such thing, or another than was saved, or
        where the backbone is another one."""
        folder = Path(folder)
        if not (folder / ABOUT).is_file():
            raise ValueError(f"{folder} holds no regressor of tables (no {ABOUT}); make one with `causalqwen fit`")
        try:
            check_sums(folder)
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            here = {"workers": 0, "cache_dir": None} | ({} if device is None else {"device": device})
            params, at = about.pop("params"), about.get("backbone_at", "")
            if params["backbone"] != DEFAULT_BACKBONE and Path(at).is_dir():
                params["backbone"] = at  # for whoever stands elsewhere; as it was given where everything was moved
            made = cls(**params | here)
            tensors = tensors_of((folder / STATE).read_bytes())
        except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
            raise ValueError(f"the regressor in {folder} is damaged: {error}") from None
        try:
            made._restore(tensors, about)
        except (TypeError, KeyError, AttributeError) as error:  # of one without checksums
            raise ValueError(f"the regressor in {folder} is damaged: {ABOUT} lacks or mistakes {error}") from None
        return made

    def _state(self) -> tuple[bytes, dict[str, Any]]:
        """Tensors as safetensors, and the rest as JSON holds it."""
        own = {name: tensor for name, tensor in self.model_.state_dict().items() if not name.startswith("backbone.")}
        return bytes_of({f"model.{name}": tensor.detach().cpu().contiguous() for name, tensor in own.items()}), {
            "format": FORMAT,
            "reader": self.reader_.to_dict(),
            "config": json.loads(self.model_.config.to_json_string()),
            "metrics": self.metrics_,
            "choice": self.choice_,
            "fingerprint": _backbone(self.backbone, self.device)[2],
            "n_features_in": self.n_features_in_,
            "feature_names_in": [str(name) for name in getattr(self, "feature_names_in_", ())],
        }

    def _restore(self, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        if (kept := about.get("format")) != FORMAT:
            raise ValueError(f"a regressor of format {kept} cannot be read here; this is format {FORMAT}")
        backbone, tokenizer, fingerprint = _backbone(self.backbone, self.device)
        if fingerprint != about["fingerprint"]:
            raise ValueError(f"the backbone {self.backbone} is not the one that this regressor was fitted on")
        config = CausalQwenConfig.from_dict(about["config"])
        config._attn_implementation = backbone.config._attn_implementation
        model: Any = CausalQwenForCausalLM(config, backbone=backbone)
        for part in (model.abduction.loc_net, model.score_head):
            if part is not None:
                part.to(backbone.dtype)
        model.to(backbone.device)
        wrong = model.load_state_dict({name.removeprefix("model."): one for name, one in tensors.items()}, strict=False)
        missing = [name for name in wrong.missing_keys if not name.startswith("backbone.")]
        if missing or wrong.unexpected_keys:
            raise ValueError(f"the weights of the regressor do not fit its configuration: {(missing or wrong[1])[0]}")
        model.processor = CausalQwenProcessor.of(tokenizer, config)
        model.reads_backbone = blocks_of(model)
        model.bf16 = self._settings.takes_bf16(model)
        self.model_, self.reader_ = model.eval(), TableReader.from_dict(about["reader"])
        self.metrics_, self.choice_, self.n_features_in_ = about["metrics"], about["choice"], about["n_features_in"]
        if about["feature_names_in"]:
            self.feature_names_in_ = np.array(about["feature_names_in"], dtype=object)

    def __getstate__(self) -> dict[str, Any]:
        """Parameters, and what was learned as the bytes that `save` writes: a pickle holds no more code than its parameters."""
        state = dict(super().__getstate__())
        if "model_" not in state:
            return state
        return {name: value for name, value in state.items() if not name.endswith("_")} | {"learned": self._state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        learned = state.pop("learned", None)
        super().__setstate__(state)
        if learned is not None:
            self._restore(tensors_of(learned[0]), learned[1])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.categorical = tags.input_tags.allow_nan = True
        return tags


@cache
def _backbone(name: str, device: str) -> tuple[Any, PreTrainedTokenizerBase, str]:
    """A backbone, its tokenizer and its fingerprint, read once: whoever is fitted on it shares it."""
    path = resolve_backbone(name)
    backbone: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    backbone = backbone.to(resolve_device(device)).eval()
    digest = hashlib.sha256()
    for key, tensor in sorted(backbone.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        digest.update(f"{key}{tuple(tensor.shape)}{flat[:: max(1, len(flat) // 64)][:64].tolist()}".encode())
    return backbone, AutoTokenizer.from_pretrained(path), digest.hexdigest()


def _grafted(name: str, device: str, config: dict[str, Any], bf16: bool = False) -> CausalQwenForCausalLM:
    """A graft whose start values never vary, that tells what the whole backbone tells: all of them read the same."""
    backbone, tokenizer, _ = _backbone(name, device)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model: Any = CausalQwenForCausalLM.from_backbone(backbone, tokenizer=tokenizer, quiet=True, **config)
    model.reads_backbone, model.bf16 = blocks_of(model), bf16
    return model


@cache
def _process_cache() -> str:
    """A folder that is gone with the process."""
    folder = tempfile.mkdtemp(prefix="causalqwen-rows-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _of_groups(rows: int, groups: Any) -> np.ndarray:
    """The group of each row, int [n]; without groups each row is one."""
    of_group = np.arange(rows)
    if groups is not None:
        if isinstance(groups, list | tuple):
            groups = np.array([*groups, None], dtype=object)[:-1]  # 1 and 1.0 are one name, whatever stands beside them
        names = [as_python(name) for name in column_or_1d(groups).tolist()]
        if len(names) != rows:
            raise ValueError(f"expected one group per row, got {len(names)} for {rows}")
        of_group = pd.factorize(pd.Series(names, dtype=object), sort=True)[0]
        if of_group.min(initial=0) < 0:
            raise ValueError(f"groups, row {1 + int(of_group.argmin())}: expected a name, found nothing")
    count = int(of_group.max()) + 1
    if rows < _FEWEST or count < _FEWEST_GROUPS:
        in_groups, and_groups = (
            ("", "") if groups is None else (f" in {count} groups", f", and {_FEWEST_GROUPS} groups")
        )
        raise ValueError(f"n_samples={rows}{in_groups} are too few: a regressor needs {_FEWEST} rows{and_groups}")
    return of_group


def _times(weight: Any, values: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """How often each row is taken, int [n], for weights that are 1 on average."""
    if weight is None:
        return np.ones(len(values), dtype=np.int64)
    weights = _check_sample_weight(weight, values, dtype=np.float64, ensure_non_negative=True)
    if not weights.sum() > 0:
        raise ValueError("sample_weight: all weights are 0")
    wanted = weights / weights[weights > 0].mean()
    return np.floor(wanted + random.uniform(size=len(wanted))).astype(np.int64)


def _as_columns(X: Any) -> Any:
    """A `datasets.Dataset` or an Arrow table as a dict of columns; anything else as it is."""
    if is_frame(X) or not hasattr(X, "column_names"):  # whose column may be called so
        return X
    if to_columns := getattr(X, "to_pydict", None) or getattr(X, "to_dict", None):
        return to_columns()
    kind = type(X).__name__
    raise ValueError(f"a {kind} has its rows one after the other; collect them into a datasets.Dataset first")


def _is_columns(X: Any) -> bool:
    return isinstance(X, dict) and not hasattr(X, "shape")  # one kind of sparse matrix is a dict


def _is_strings(X: Any) -> bool:
    """Whether X is a flat list, array or Series of texts, of which some may be missing."""
    if is_frame(X) or _is_columns(X):
        return False
    if hasattr(X, "tolist") or hasattr(X, "to_list"):
        X = np.asarray(X)
        X = X.tolist() if X.ndim == 1 and X.dtype.kind in "UOT" else None
    return isinstance(X, list | tuple) and len(X) > 0 and all(isinstance(x, str) or as_python(x) is None for x in X)


def _in_float64(model: CausalQwenForCausalLM) -> CausalQwenForCausalLM:
    """The model above the same backbone, its value parts in float64 on the processor (Apple's accelerator has none): where a
    row stands among others moves the last bits of a product, and those of float32 would be seen in what is predicted."""
    twin, parts = copy.copy(model), {name: getattr(model, name) for name in VALUE_MODULES}
    twin._modules = model._modules | {name: part and copy.deepcopy(part).cpu().double() for name, part in parts.items()}
    return twin
