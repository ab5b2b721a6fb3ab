"""Text to tokens and values, and back (theory 2.1).

A number becomes one token `<NUM>` and a float64 value. Inside, each number's place is marked by a slot, an added token
that no text can hold by accident, in a copy of the tokenizer; the tokenizer then splits the rest of the text exactly as
it always does around an added token. The string "<NUM>" typed by a user is ordinary text.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoConfig, BatchEncoding, PreTrainedTokenizerBase, ProcessorMixin

from causalqwen.modeling.backbones import free_rows, resolve_backbone
from causalqwen.numbers import FIRST_RULES, NumberRules, NumberSpan, NumberStyle, find_numbers, format_number, spaced

SLOT = "\ufdd0NUM\ufdd1"
"""Two Unicode noncharacters around a name: not for interchange, so no text holds it."""

NUM_TOKEN = "<NUM>"
"""How `<NUM>` is shown in listings of tokens and where its value is not known."""


class NumericEncoding(BatchEncoding):
    """transformers' `BatchEncoding`, and `number_texts`: how each number of each text was written.

    `number_texts[i]` lists the written forms of row i's numbers, left to right, with the space that `<NUM>` absorbed.
    `processor.decode` and `processor.batch_decode` take it (or find it on `numeric_values`, or on a row of it), so that
    decoding gives the very text back.
    """

    number_texts: list[list[str]]


class TokenizedText(tuple[list[str], list[float]]):
    """Tokens and values of a text as the model reads it; printed as a table.

    tokens: `<NUM>` for a number. values: 0.0 off `<NUM>`. kinds, units: as of `NumberSpan`, "" off `<NUM>`.
    """

    kinds: list[str]
    units: list[str]

    def __str__(self) -> str:
        return "\n".join(
            f"{token:<16}{format_number(value) if kind else '':<16}{kind:<12}{unit}".rstrip()
            for token, value, kind, unit in zip(*self, self.kinds, self.units, strict=True)
        )


class CausalQwenProcessor(ProcessorMixin):
    """A tokenizer that reads and writes numbers.

    Args:
        tokenizer: a fast tokenizer, unmodified.
        num_token_id: id of `<NUM>` in `input_ids`; the tokenizer's next free id by default.
        chat_template: as in transformers.
        number_rules: which numbers of a text are read; kept with a checkpoint. One that has none was trained with
            `FIRST_RULES` and goes on with them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_token_id: int | None = None,
        chat_template: str | None = None,
        number_rules: NumberRules | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer, which numbers in text need")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        super().__init__(tokenizer, chat_template=chat_template or getattr(tokenizer, "chat_template", None))
        self.num_token_id = len(tokenizer) if num_token_id is None else num_token_id
        self.number_rules = NumberRules.of(number_rules)
        self._slotted: PreTrainedTokenizerBase | None = None

    @property
    def slotted_tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy of the tokenizer that knows the slot."""
        if self._slotted is None:
            self._slotted = copy.deepcopy(self.tokenizer)
            self._slotted.add_tokens([AddedToken(SLOT, normalized=False, special=False)])
        return self._slotted

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "numeric_values"]

    def to_dict(self) -> dict[str, Any]:
        settings = super().to_dict()
        settings.pop("_slotted", None)
        return settings | {"number_rules": self.number_rules.to_dict()}

    @classmethod
    def get_processor_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict, dict]:
        settings, kwargs = super().get_processor_dict(pretrained_model_name_or_path, **kwargs)
        if "num_token_id" in settings:
            settings.setdefault("number_rules", FIRST_RULES.to_dict())
        return settings, kwargs

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> "CausalQwenProcessor":
        """Load the processor of a grafted model, or make the one that a bare backbone would get."""
        path = resolve_backbone(pretrained_model_name_or_path)
        processor = super().from_pretrained(path, **kwargs)
        config = AutoConfig.from_pretrained(path)
        if config.model_type != "causalqwen":
            processor.num_token_id = free_rows(processor.tokenizer, config.vocab_size)[0]
        return processor

    # ---- text to tokens ----------------------------------------------------------------------------------------------

    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        *,
        prompt: bool = False,
        return_tensors: str | None = None,
        images: Any = None,
        videos: Any = None,
        audio: Any = None,
        **kwargs: Any,
    ) -> NumericEncoding:
        """Tokens and values of one text or several.

        Args:
            text: a string or a list of strings.
            prompt: drop one trailing space of each text, because the `<NUM>` (or word) that follows brings its own.
            return_tensors: "pt" or None.
            kwargs: what the tokenizer takes: padding, padding_side, truncation, max_length, add_special_tokens...

        Returns:
            `input_ids`, `attention_mask`, `numeric_values` (float64, 0 off `<NUM>`), all of one shape.

        Raises:
            ValueError: a number that float64 cannot hold (with the text's index), anything that is not text.
        """
        if images is not None or videos is not None or audio is not None:
            raise ValueError("this model reads text and numbers only")
        if return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors={return_tensors!r} is not supported; use 'pt' or None")
        single = isinstance(text, str)
        texts: Any = [text] if single else text
        if not isinstance(texts, list | tuple) or not all(isinstance(item, str) for item in texts):
            raise ValueError("the processor takes a string or a list of strings")
        if prompt:
            texts = [item[:-1] if item.endswith(" ") else item for item in texts]
        marked, values, written = [], [], []
        for row, item in enumerate(texts):
            try:
                marked_text, of_row, texts_of_row = self._mark(item, find_numbers(item, self.number_rules))
            except ValueError as error:
                raise ValueError(f"text {row}: {error}" if not single else str(error)) from None
            marked.append(marked_text)
            values.append(of_row)
            written.append(texts_of_row)

        encoded = self.slotted_tokenizer(marked, **kwargs)
        slot_id = self.slotted_tokenizer.convert_tokens_to_ids(SLOT)
        side = kwargs.get("truncation_side") or self.slotted_tokenizer.truncation_side
        numeric_values, number_texts = [], []
        for row, ids in enumerate(encoded["input_ids"]):
            count = ids.count(slot_id)
            # Truncation drops numbers from the end that it cuts.
            kept = slice(len(values[row]) - count, None) if side == "left" else slice(count)
            upcoming = iter(values[row][kept])
            numeric_values.append(_Values([next(upcoming) if token == slot_id else 0.0 for token in ids]))
            if count and slot_id != self.num_token_id:
                encoded["input_ids"][row] = [self.num_token_id if token == slot_id else token for token in ids]
            number_texts.append(written[row][kept])
            numeric_values[-1].number_texts = [number_texts[-1]]
        data = {key: encoded[key] for key in encoded if key != "token_type_ids"} | {"numeric_values": numeric_values}
        if return_tensors == "pt":
            data = {key: _as_tensor(key, rows) for key, rows in data.items()}
            data["numeric_values"].number_texts = number_texts
        elif single:
            data = {key: rows[0] for key, rows in data.items()}
        result = NumericEncoding(data)
        result.number_texts = number_texts
        return result

    @staticmethod
    def _mark(text: str, spans: list[NumberSpan]) -> tuple[str, list[float], list[str]]:
        """The text with a slot for each number, the values, and the written forms with the space they absorbed."""
        if SLOT in text:
            raise ValueError(
                "the text holds the noncharacters U+FDD0 and U+FDD1, which mark numbers inside this library"
            )
        parts, values, written, end = [], [], [], 0
        for span in spans:
            start = span.start - 1 if span.start > end and text[span.start - 1] == " " else span.start
            parts += [text[end:start], SLOT]
            values.append(span.value)
            written.append(text[start : span.end])
            end = span.end
        parts.append(text[end:])
        return "".join(parts), values, written

    def tokenize(self, text: str) -> "TokenizedText":
        """Tokens as strings, `<NUM>` for a number, and their values, kinds and units, without special tokens."""
        spans = iter(find_numbers(text, self.number_rules))
        encoded = self(text, add_special_tokens=False)
        shown = [next(spans) if token == self.num_token_id else None for token in encoded["input_ids"]]
        tokens = [
            self.tokenizer.convert_ids_to_tokens(token) if span is None else NUM_TOKEN
            for token, span in zip(encoded["input_ids"], shown, strict=True)
        ]
        told = TokenizedText((tokens, [span.value if span else 0.0 for span in shown]))
        told.kinds, told.units = ([getattr(span, name, "") for span in shown] for name in ("kind", "unit"))
        return told

    # ---- tokens to text ----------------------------------------------------------------------------------------------

    def decode(
        self,
        token_ids: Any,
        numeric_values: Any = None,
        number_texts: Sequence[str] | None = None,
        skip_special_tokens: bool = False,
        **kwargs: Any,
    ) -> str:
        """The text of one sequence, with its numbers written out.

        Args:
            token_ids: ids [L], or the `NumericEncoding` of one text, whose padding is then left out.
            numeric_values: values [L]. Without them `<NUM>` is written as such.
            number_texts: written forms of the first numbers, left to right; by default those that came with the
                encoding or with `numeric_values`. Further numbers are written from their values, in the shortest form
                that reads back as the same float64, with a space before them where the script sets words apart.
            skip_special_tokens, kwargs: as for the tokenizer.
        """
        if isinstance(token_ids, BatchEncoding):
            return self.batch_decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)[0]
        if number_texts is None:
            number_texts = _number_texts_of(numeric_values)
        ids = token_ids.tolist() if isinstance(token_ids, Tensor) else list(token_ids)
        values = numeric_values.tolist() if isinstance(numeric_values, Tensor) else numeric_values
        if values is not None and len(values) != len(ids):
            raise ValueError(f"{len(values)} values for {len(ids)} tokens")
        numbers = [None if values is None else values[i] for i, token in enumerate(ids) if token == self.num_token_id]
        slot_id = self.slotted_tokenizer.convert_tokens_to_ids(SLOT)
        ids = [slot_id if token == self.num_token_id else token for token in ids]
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        marked = str(self.slotted_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, **kwargs))
        text, *pieces = marked.split(SLOT)
        known = list(number_texts or [])
        for index, piece in enumerate(pieces):
            value = numbers[index] if index < len(numbers) else None
            if value is None:
                text += NUM_TOKEN
            elif index < len(known):
                text += known[index]
            else:
                text += (" " if spaced(text) else "") + self.write_number(value)
            text += piece
        return text

    def write_number(self, value: float) -> str:
        """The shortest text that these rules read as `value`."""
        return format_number(value, NumberStyle(decimal=self.number_rules.decimal))

    def batch_decode(self, token_ids: Any, numeric_values: Any = None, **kwargs: Any) -> list[str]:
        """`decode` of several sequences: ids [B, L] and values [B, L], or one `NumericEncoding`."""
        number_texts = None
        if isinstance(token_ids, BatchEncoding):
            token_ids, numeric_values, number_texts = _rows_of(token_ids)
        rows = len(token_ids)
        values = [None] * rows if numeric_values is None else numeric_values
        texts = [None] * rows if number_texts is None else number_texts
        return [
            self.decode(ids, numeric_values=of_row, number_texts=written, **kwargs)
            for ids, of_row, written in zip(token_ids, values, texts, strict=True)
        ]


class _Values(list):
    """Values of one text, with `number_texts` beside them."""

    number_texts: list[list[str]]


def _as_tensor(key: str, rows: list) -> Tensor:
    if len({len(row) for row in rows}) > 1:
        raise ValueError("the texts have different numbers of tokens: pass padding=True to stack them")
    return torch.tensor(rows, dtype=torch.float64 if key == "numeric_values" else torch.int64)


def _number_texts_of(values: Any) -> list[str] | None:
    """The written forms that came with values: on the list or tensor itself, or on the tensor that it is a row of."""
    found = getattr(values, "number_texts", None)
    if found is not None:
        return found[0] if len(found) == 1 else None
    whole = getattr(values, "_base", None)
    found = getattr(whole, "number_texts", None)
    if found is None or values.dim() != 1 or values.shape[0] != whole.shape[-1]:
        return None
    return found[values.storage_offset() // whole.stride(0)]


def _rows_of(encoding: BatchEncoding) -> tuple[list, list, list[list[str]]]:
    """Ids, values and written forms of an encoding's rows, without their padding."""
    ids, mask, values = encoding["input_ids"], encoding["attention_mask"], encoding["numeric_values"]
    if isinstance(ids, Tensor):
        ids, mask, values = ids.tolist(), mask.tolist(), values.tolist()
    elif not ids or not isinstance(ids[0], list):
        ids, mask, values = [ids], [mask], [values]
    real = [[index for index, one in enumerate(row) if one] for row in mask]
    pick = [[[row[i] for i in keep] for row, keep in zip(rows, real, strict=True)] for rows in (ids, values)]
    return pick[0], pick[1], encoding.number_texts
