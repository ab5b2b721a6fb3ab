"""Text to tokens and values, and back (theory 2.1).

A number becomes one token `<NUM>` and a float64 value. Inside, a slot, an added token that no text can hold by accident, marks
its place in a copy of the tokenizer, which then splits the rest as it always does around an added token. The string "<NUM>"
typed by a user is ordinary text.

Where digits stand in the context (`modeling.context`), the text is split as if it held no number, and `<NUM>` is put before
the first token that reaches into one: a token that holds the end of a word too ("(-") counts as the number's.
"""

import copy
import itertools
import string
from collections.abc import Sequence
from decimal import Decimal
from functools import cached_property
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase, ProcessorMixin

from causalqwen.decoding import ObservedNumber
from causalqwen.modeling.backbones import free_rows, resolve_backbone
from causalqwen.modeling.configuration import STARTS
from causalqwen.modeling.context import Context, context_of
from causalqwen.modeling.encoded import (
    NumberText,
    NumericEncoding,
    TokenizedText,
    announced,
    as_tensor,
    read_as_prompt,
    rows_of,
)
from causalqwen.modeling.ends import NumberEnds
from causalqwen.modeling.reader import MARKS
from causalqwen.numbers import NumberRules, NumberStyle, find_numbers, format_number, spaced
from causalqwen.numbers.grammar import money_inside

SLOT = "\ufdd0NUM\ufdd1"  # two Unicode noncharacters around a name: not for interchange, so no text holds it
NUM_TOKEN = "<NUM>"  # as it is shown in listings of tokens and where its value is not known

_PADDING = ("padding", "padding_side", "pad_to_multiple_of")
_TRUNCATION = ("truncation", "max_length", "truncation_side")
_NUMERIC, _LONGEST = set(string.digits), 18  # digits that fit an int64
_CONTEXT, _BEFORE = 8, 16  # tokens, and characters, that decide how a number after them is written


class CausalQwenProcessor(ProcessorMixin):
    """A tokenizer that reads and writes numbers.

    Args:
        tokenizer: a fast tokenizer, unmodified.
        num_token_id: id of `<NUM>` in `input_ids`; the tokenizer's next free id by default.
        chat_template: as in transformers.
        number_rules: which numbers of a text are read; kept with a checkpoint.
        number_context: what stands in the context for a number, see `modeling.context`; that of the model's configuration.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_token_id: int | None = None,
        chat_template: str | None = None,
        number_rules: NumberRules | dict[str, Any] | None = None,
        number_context: str = "value",
        **kwargs: Any,
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer, which numbers in text need")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        super().__init__(tokenizer, chat_template=chat_template or getattr(tokenizer, "chat_template", None))
        self.num_token_id = len(tokenizer) if num_token_id is None else num_token_id
        self.number_rules = NumberRules.of(number_rules)
        self.context = context_of(number_context)
        self._digits: Tensor | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, config: Any) -> "CausalQwenProcessor":
        return cls(tokenizer, num_token_id=config.num_token_id, number_context=config.number_context)

    @property
    def context(self) -> Context:
        """What stands in the context for a number."""
        return context_of(self.number_context)

    @context.setter
    def context(self, context: Context) -> None:
        if not isinstance(context, Context):
            raise ValueError(f"a processor's context is one of modeling.context.CONTEXTS, not {context!r}")
        self.number_context = context.name

    @cached_property
    def slotted_tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy of the tokenizer that knows the slot."""
        slotted = copy.deepcopy(self.tokenizer)
        slotted.add_tokens([AddedToken(SLOT, normalized=False, special=False)])
        return slotted

    @cached_property
    def ends(self) -> NumberEnds:
        """What may follow a number, by `number_rules`."""
        return NumberEnds(self)

    def digits(self, device: torch.device) -> Tensor:
        """What each token writes of a number, int64 [3, V], for `read_numbers`: the number, how many digits it has (0 where a
        token is not digits alone, less where it is one of `MARKS`), and whether a space comes before them."""
        if self._digits is None:
            tokens = self.tokenizer.get_vocab()
            self._digits = torch.zeros(3, 1 + max(tokens.values()), dtype=torch.int64)
            for name, token in tokens.items():
                text = self.tokenizer.decode([token]).strip() if any(sign in _NUMERIC for sign in name) else ""
                if name in MARKS:
                    self._digits[1, token] = MARKS[name]
                elif text.isascii() and text.isdigit() and len(text) < _LONGEST:
                    self._digits[:, token] = torch.tensor([int(text), len(text), name != text])
        self._digits = self._digits.to(device)
        return self._digits

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "numeric_values"]

    def to_dict(self) -> dict[str, Any]:
        settings = super().to_dict()
        for made in ("slotted_tokenizer", "ends", "_digits"):
            settings.pop(made, None)
        return settings | {"number_rules": self.number_rules.to_dict()}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoProcessor") -> None:
        """Nothing, as for `CausalQwenConfig`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> "CausalQwenProcessor":  # type: ignore[override] # passed on
        """Load the processor of a grafted model, or make the one that a bare backbone would get."""
        path = resolve_backbone(pretrained_model_name_or_path)
        config = AutoConfig.from_pretrained(path)
        is_bare = config.model_type != "causalqwen"
        if is_bare:
            kwargs.setdefault("number_context", STARTS["faithful"]["number_context"])
        processor = super().from_pretrained(path, **kwargs)
        if is_bare:
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
            prompt: drop one trailing space of each text, because what follows brings its own (`read_as_prompt`).
            return_tensors: "pt" or None. kwargs: what the tokenizer takes: padding, truncation, max_length...

        Returns:
            `input_ids`, `attention_mask`, `numeric_values` (float64, 0 off `<NUM>`), all of one shape.

        Raises:
            ValueError: a number that float64 cannot hold (with the text's index), what is no text, lone surrogates too.
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
            texts = [read_as_prompt(item) for item in texts]
        spans = []
        for row, item in enumerate(texts):
            try:
                spans.append(self._spans(item))
            except ValueError as error:
                raise ValueError(f"text {row}: {error}" if not single else str(error)) from None
        encode = self._beside_digits if self.context.writes else self._in_slots
        data, numeric_values, number_texts, digits = encode(texts, spans, **kwargs)
        data["numeric_values"] = numeric_values
        if return_tensors == "pt":
            data = {key: as_tensor(key, rows) for key, rows in data.items()}
        elif single:
            data = {key: rows[0] for key, rows in data.items()}
        result = NumericEncoding(data)
        result.number_texts, result.digits = number_texts, digits
        return result

    def _spans(self, text: str) -> list[tuple[int, int, float]]:
        """Start, end and value of each number of a text, with the space that it absorbs."""
        numbers, spans = find_numbers(text, self.number_rules), list[tuple[int, int, float]]()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start} is half of a surrogate pair, which is no text") from None
        if SLOT in text:
            raise ValueError(
                "the text holds the noncharacters U+FDD0 and U+FDD1, which mark numbers inside this library"
            )
        for span in numbers:
            absorbs = span.start > (spans[-1][1] if spans else 0) and text[span.start - 1] == " "
            spans.append((span.start - absorbs, span.end, span.value))
        return spans

    def _in_slots(self, texts: Sequence[str], spans: list, **kwargs: Any) -> tuple[dict, list, list, list]:
        """Each number one token: columns, values, written forms of the numbers, and no digits."""
        marked = []
        for text, of_row in zip(texts, spans, strict=True):
            starts, ends = [start for start, _, _ in of_row], [end for _, end, _ in of_row]
            parts = zip([0, *ends], [*starts, len(text)], strict=True)
            marked.append(SLOT.join(text[start:end] for start, end in parts))
        encoded = self.slotted_tokenizer(marked, **kwargs)
        slot_id = self.slotted_tokenizer.convert_tokens_to_ids(SLOT)
        side = kwargs.get("truncation_side") or self.slotted_tokenizer.truncation_side
        numeric_values, number_texts = [], []
        for row, ids in enumerate(encoded["input_ids"]):
            count = ids.count(slot_id)
            # Truncation drops numbers from the end that it cuts.
            kept = spans[row][len(spans[row]) - count :] if side == "left" else spans[row][:count]
            upcoming = (value for _, _, value in kept)
            numeric_values.append([next(upcoming) if token == slot_id else 0.0 for token in ids])
            if count and slot_id != self.num_token_id:
                encoded["input_ids"][row] = [self.num_token_id if token == slot_id else token for token in ids]
            number_texts.append([NumberText.of(texts[row][start:end], value) for start, end, value in kept])
        data = {key: encoded[key] for key in encoded if key != "token_type_ids"}
        return data, numeric_values, number_texts, [[False] * len(ids) for ids in encoded["input_ids"]]

    def _beside_digits(self, texts: Sequence[str], spans: list, **kwargs: Any) -> tuple[dict, list, list, list]:
        """As `_in_slots`, each number a `<NUM>` and the tokens that it has in the text."""
        padding = {name: kwargs.pop(name) for name in _PADDING if name in kwargs}
        truncation, max_length, side = (kwargs.pop(name, None) for name in _TRUNCATION)
        plain = self.tokenizer(texts, **kwargs | {"return_offsets_mapping": True})
        limit = (max_length or self.tokenizer.model_max_length) if truncation else None
        from_left = (side or self.tokenizer.truncation_side) == "left"
        input_ids, numeric_values, number_texts, digits = [], [], [], []
        for text, of_row, ids, offsets in zip(texts, spans, plain["input_ids"], plain["offset_mapping"], strict=True):
            tokens = announced(ids, offsets, of_row, self.num_token_id)
            if limit is not None and len(tokens) > limit:
                tokens = tokens[-limit:] if from_left else tokens[:limit]
            kept = {number for _, number, _ in tokens}
            input_ids.append([token for token, _, _ in tokens])
            numeric_values.append([0.0 if n is None else of_row[n][2] for _, n, _ in tokens])
            written = [NumberText.of(text[start:end], value) for start, end, value in of_row]
            number_texts.append([form for n, form in enumerate(written) if n in kept])
            digits.append([written for _, _, written in tokens])
        padding = {"padding": False, "max_length": max_length} | padding
        data = dict(self.tokenizer.pad({"input_ids": input_ids}, **padding))
        on_left = (padding.get("padding_side") or self.tokenizer.padding_side) == "left"
        for values, ids in zip(numeric_values, data["input_ids"], strict=True):
            room = [0.0] * (len(ids) - len(values))
            values[:] = room + values if on_left else values + room
        return data, numeric_values, number_texts, digits

    def tokenize(self, text: str) -> "TokenizedText":
        """Tokens as strings, `<NUM>` for a number, and their values, kinds and units, without special tokens."""
        spans = iter(find_numbers(text, self.number_rules))
        encoded = self(text, add_special_tokens=False)
        shown = [next(spans) if token == self.num_token_id else None for token in encoded["input_ids"]]
        tokens = [
            self.tokenizer.convert_ids_to_tokens(token) if span is None else NUM_TOKEN
            for token, span in zip(encoded["input_ids"], shown, strict=True)
        ]
        tokenized = TokenizedText((tokens, [span.value if span else 0.0 for span in shown]))
        tokenized.kinds, tokenized.units = ([getattr(span, name, "") for span in shown] for name in ("kind", "unit"))
        return tokenized

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
            number_texts: written forms of the first numbers; those of an encoding by default. Other numbers, and those whose
                value is another one now, are written in the shortest form that reads back as the same float64, with a space
                before them where the script sets words apart.
        """
        if isinstance(token_ids, NumericEncoding):
            return self.batch_decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)[0]
        ids = token_ids.tolist() if isinstance(token_ids, Tensor) else list(token_ids)
        values = numeric_values.tolist() if isinstance(numeric_values, Tensor) else numeric_values
        if values is not None and len(values) != len(ids):
            raise ValueError(f"{len(values)} values for {len(ids)} tokens")
        if values is not None and self.context.writes:
            ids = self._without_cut(ids, values)
        return self._write(ids, values, number_texts or [], skip_special_tokens=skip_special_tokens, **kwargs)

    def _write(self, ids: list[int], values: Sequence[float] | None, number_texts: Sequence[str], **kwargs: Any) -> str:
        """`decode` of ids whose numbers are whole."""
        places = [place for place, token in enumerate(ids) if token == self.num_token_id]
        numbers = [(None if values is None else values[place], index) for index, place in enumerate(places)]
        if places and self.context.writes:
            ids, alone = self._without_announced(ids, len(places))
            numbers = [numbers[index] for index in alone]
        slot_id: Any = self.slotted_tokenizer.convert_tokens_to_ids(SLOT)
        ids = [slot_id if token == self.num_token_id else token for token in ids]
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        marked = str(self.slotted_tokenizer.decode(ids, **kwargs))
        text, *pieces = marked.split(SLOT)
        for place, piece in enumerate(pieces):
            value, index = numbers[place] if place < len(numbers) else (None, 0)
            known = number_texts[index] if index < len(number_texts) else None
            if value is None:
                text += NUM_TOKEN
            elif known is not None and getattr(known, "value", value) == value:
                text += known
            else:
                text += self.spaced_number(text, value, known or "")
            text += piece
        return text

    def _without_cut(self, ids: list[int], values: Sequence[float]) -> list[int]:
        """Ids without the first of the digits that `tokens_of` gives, where a text that was generated breaks off in them: its
        last `<NUM>`, which has the whole value, then stands for them."""
        last = max((place for place, token in enumerate(ids) if token == self.num_token_id), default=len(ids))
        special = set(self.tokenizer.all_special_ids)
        begun = list(itertools.takewhile(lambda token: token not in special, ids[last + 1 :]))
        whole = self.tokens_of(ids[:last], values[last]) if begun else []
        is_cut = len(begun) < len(whole) and begun == whole[: len(begun)]
        return ids[: last + 1] + ids[last + 1 + len(begun) :] if is_cut else ids

    def _without_announced(self, ids: list[int], numbers: int) -> tuple[list[int], list[int]]:
        """Ids without each `<NUM>` whose digits follow, and which of the numbers are left: what follows is digits unless it is
        a special token."""
        special = set(self.tokenizer.all_special_ids)
        kept, alone = [], []
        next_is_text, index = False, numbers
        for token in reversed(ids):
            if token == self.num_token_id:
                index -= 1
                if next_is_text:
                    continue
                alone.append(index)
            else:
                next_is_text = token not in special
            kept.append(token)
        return kept[::-1], alone[::-1]

    def tokens_of(self, before: Sequence[int], value: float, said: ObservedNumber | None = None) -> list[int]:
        """The tokens that write `value` after the ids `before`, its space among them. said: a number that was written there,
        whose tokens are taken where they are read as this value."""
        text = self.decode(list(before[-_CONTEXT:]))
        if said is not None and said.value == value and self.reads(text, said.text, value):
            return said.tokens
        marked = SLOT + self.spaced_number(text, value)
        return self.slotted_tokenizer(marked, add_special_tokens=False)["input_ids"][1:]

    def spaced_number(self, before: str, value: float, like: str = "") -> str:
        """`value` as it is written after the text `before`, with a space where the script asks for one, or where it would be
        read as another number without. like: how a number there was written."""
        written = self.write_number(value)
        if money := money_inside(like):  # -$1,200
            money += " " * money[-1].isalpha()
            written = "-" * (value < 0) + money + written.removeprefix("-")
        if spaced(before[-_BEFORE:], written, self.number_rules):
            return " " + written
        is_apart = not before or before[-1].isspace() or self.reads(before, written, value)
        return written if is_apart or not self.reads(before, " " + written, value) else " " + written

    def reads(self, before: str, written: str, value: float) -> bool:
        """Whether what is written after the text `before` is read there as one number, of this value."""
        before = before[-_BEFORE:]
        start = len(before) + len(written) - len(written.lstrip(" "))
        spans = find_numbers(before + written, self.number_rules)
        return bool(spans) and spans[-1][:2] == (start, len(before + written)) and spans[-1].value == value

    def write_number(self, value: float) -> str:
        """The shortest text that these rules read as `value`: with a power of ten where its digits alone are read as a name
        (13800138000, a phone number)."""
        style = NumberStyle(decimal=self.number_rules.decimal)
        written = format_number(value, style)
        if self.reads("", written, value):
            return written
        return f"{Decimal(repr(value)).normalize():e}".replace(".", style.decimal)

    def batch_decode(self, token_ids: Any, numeric_values: Any = None, **kwargs: Any) -> list[str]:
        """`decode` of several sequences: ids [B, L] and values [B, L], or one `NumericEncoding`."""
        if isinstance(token_ids, NumericEncoding):
            return [self._decode_read(*row, **kwargs) for row in zip(*rows_of(token_ids), strict=True)]
        values = [None] * len(token_ids) if numeric_values is None else numeric_values
        return [self.decode(*row, **kwargs) for row in zip(token_ids, values, strict=True)]

    def _decode_read(
        self, ids: list[int], values: list[float], texts: list[NumberText], digits: list[bool], **kwargs: Any
    ) -> str:
        """A text that was read; where its digits are tokens, those of values that were changed since, and of a last number
        that was cut, are written anew."""
        if not self.context.writes:
            return self._write(ids, values, texts, **kwargs)
        text, start, first = "", 0, 0
        places = [place for place, token in enumerate(ids) if token == self.num_token_id]
        for i, (place, written) in enumerate(zip(places, texts, strict=True)):
            end = place + 1
            while end < len(digits) and digits[end]:
                end += 1
            changed, may_be_cut = values[place] != written.value, place + 1 < end == len(ids)
            if not changed and not may_be_cut:
                continue
            before, known, after = str(self.tokenizer.decode(ids[place + 1 : end])).partition(written.strip(" "))
            if not changed and known:
                continue
            of_before = slice(start, place)  # as it stands
            text += self._write(ids[of_before], values[of_before], texts[first:i], **kwargs)
            text += before.rstrip(" ") if known else ""  # of a number that was cut, nothing is left
            text += (self.spaced_number(text, values[place], written) if changed else written) + after
            start, first = end, i + 1
        return text + self._write(ids[start:], values[start:], texts[first:], **kwargs)
