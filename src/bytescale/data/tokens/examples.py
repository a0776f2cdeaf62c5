"""Turns the records of a unit into tokens: texts, and fine-tuning data with the weight of each token's loss.

The weight of a token says how much predicting THIS token counts; 0: it is read and not trained on. A document's first
token is never predicted. Weights and other fields of a token are kept in fp32, and labels as int32.

=================  =================================================  ====================================
``data.content``   tokens                                             weight
=================  =================================================  ====================================
``messages``       the conversation, written by the chat template     1 in what the assistant said, 0 elsewhere;
                                                                      ``weight`` of a message scales its own
``prompt``         prompt, completion and EOS                         0 in the prompt, 1 behind it
``tokens``         as given                                           ``weights``; 0 where a label is -100
=================  =================================================  ====================================

``labels`` of ``tokens`` may name other ids than the tokens: ``labels[i]`` is what is predicted at the place of token i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.errors import DataError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import CorpusConfig, DataConfig
from bytescale.data.sources.records import ReadCounts, Record, RecordKind, WorkUnit, iter_records, kind_of
from bytescale.data.tokens.chat import ChatTemplate, load_template, texts_of_message
from bytescale.data.tokens.indexed import LABELS, WEIGHTS, field_dtype, token_dtype
from bytescale.data.tokens.tokenizer import Tokenizer
from bytescale.storage.retry import with_retries

_BATCH_CHARACTERS = 1 << 20
"""Text handed to the tokenizer at once. The tokenizer's results take some 100 bytes a token until they are arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedUnit:
    """The tokens of one unit of work."""

    tokens: NDArray[np.integer]  # [sum of lengths] tokens of all documents, each with its EOS
    lengths: IntArray  # [number of documents] tokens of each document
    counts: ReadCounts
    fields: Mapping[str, NDArray] = field(default_factory=dict)  # [sum of lengths] each


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEncoder:
    """Reads a unit and encodes it. Each worker process gets one copy."""

    tokenizer: Tokenizer
    config: DataConfig
    kind: RecordKind
    template: ChatTemplate | None = None
    """For conversations."""

    @staticmethod
    def of(config: DataConfig, tokenizer: Tokenizer) -> UnitEncoder:
        """Return what encodes the records of ``config``.

        Raises ``ConfigError`` if messages have no chat template, and ``DataError`` if the template is not one.
        """
        return UnitEncoder(
            tokenizer=tokenizer,
            config=config,
            kind=kind_of(config),
            template=load_template(config.chat_template, config.tokenizer) if config.content == "messages" else None,
        )

    @property
    def fingerprint(self) -> str:
        """A text that changes with the tokens that the same files give."""
        template = self.template.fingerprint if self.template else ""
        records = f"{self.config.content} {' '.join(self.config.fields)} {template}"
        return f"{self.config.text_key if self.kind.is_text else records} {self.tokenizer.fingerprint}"

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.tokenizer.vocab_size)

    @property
    def field_names(self) -> tuple[str, ...]:
        return {"text": (), "tokens": (WEIGHTS, LABELS, *self.config.fields)}.get(self.kind.content, (WEIGHTS,))

    def __call__(self, unit: WorkUnit) -> EncodedUnit:
        """Encode a unit; a read that may succeed later is tried again. Raises ``DataError`` as ``iter_records``."""
        encode = self._encode_texts if self.kind.is_text else self._encode_records
        return with_retries(partial(encode, unit), self.config.read_retries)

    def _encode_records(self, unit: WorkUnit) -> EncodedUnit:
        counts = ReadCounts(max_corrupt=self.config.max_corrupt_records)
        examples: list[Example] = []
        for record in iter_records(unit, self.kind, counts):
            try:
                examples.append(example_of(record, self.config, self.tokenizer, self.template))
            except DataError as error:
                counts.leave_out(error)
        columns = {}
        for name, dtype in (("tokens", self.dtype), *((name, field_dtype(name)) for name in self.field_names)):
            columns[name] = np.concatenate([np.zeros(0, dtype), *(one[name].astype(dtype) for one in examples)])
        lengths = np.array([len(example["tokens"]) for example in examples], dtype=np.int64)
        return EncodedUnit(tokens=columns.pop("tokens"), lengths=lengths, counts=counts, fields=columns)

    def _encode_texts(self, unit: WorkUnit) -> EncodedUnit:
        counts = ReadCounts(max_corrupt=self.config.max_corrupt_records)
        encoded: list[NDArray[np.integer]] = []
        texts: list[str] = []
        num_characters = 0
        for record in iter_records(unit, self.kind, counts):
            texts.append(record.values[self.config.text_key])
            num_characters += len(texts[-1])
            if num_characters >= _BATCH_CHARACTERS:
                encoded.extend(self.tokenizer.encode_batch(texts))
                texts, num_characters = [], 0
        encoded.extend(self.tokenizer.encode_batch(texts))
        documents = [ids for ids in encoded if len(ids)]  # the tokenizer's normaliser may leave nothing of a text
        counts.num_empty += len(encoded) - len(documents)
        end = np.array([self.tokenizer.eos_id])
        return EncodedUnit(
            tokens=np.concatenate([end[:0], *(part for ids in documents for part in (ids, end))]).astype(self.dtype),
            lengths=np.array([len(ids) + 1 for ids in documents], dtype=np.int64),
            counts=counts,
        )


Example = dict[str, NDArray]
"""One document: ``tokens [T]``, and its fields ``[T]`` by name, of which ``weights`` is one."""


def example_of(
    record: Record, config: CorpusConfig, tokenizer: Tokenizer, template: ChatTemplate | None = None
) -> Example:
    """Return the example of a record of ``data.content``, which is not text. Conversations need a ``template``.

    Raises ``DataError``, which begins with the record's place.
    """
    try:
        match config.content:
            case "messages":
                assert template is not None, "conversations need a template"
                example = _conversation(record.values, tokenizer, template)
            case "prompt":
                example = _completion(record.values, tokenizer)
            case _:
                example = _tokens(record.values, tokenizer, config.fields)
        if not example[WEIGHTS][1:].any():
            raise DataError(
                "there is nothing to train on: no token behind the first one has a weight",
                so="the record would only take time",
                fix="delete it; a run may leave such records out (data.max_corrupt_records)",
            )
    except UnicodeEncodeError as error:
        raise DataError(f"{record.place()} holds half a surrogate pair (\\ud8..)", fix="mend the record") from error
    except DataError as error:
        raise DataError(f"{record.place()}: {error}") from error
    return example


def _conversation(values: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate) -> Example:
    messages = _checked_messages(values["messages"])
    text, spans = template.render_with_spans(messages, values.get("tools"))
    scales = {number: _message_weight(message, number) for number, message in enumerate(messages)}
    if any(number < 0 for _, _, number in spans) and set(scales.values()) != {1.0}:
        raise DataError(
            "messages have weights, but the template marks several runs of text in one turn",
            so="it is not known which message a run belongs to",
            fix="leave the weights out, or mark each turn of the assistant once",
        )
    text.encode()  # raises if it has no UTF-8 form
    tokens, offsets = tokenizer.encode_with_offsets(text)
    weights = np.zeros(len(tokens), dtype=np.float32)
    for start, stop, number in spans:
        weights[(offsets[:, 0] < stop) & (offsets[:, 1] > start)] = scales.get(number, 1.0)
    return {"tokens": tokens, WEIGHTS: weights}


def _completion(values: Mapping[str, Any], tokenizer: Tokenizer) -> Example:
    for name in ("prompt", "completion"):
        if not isinstance(values[name], str):
            raise DataError(
                f"{name!r} is a {type(values[name]).__name__}, not a string",
                fix="write text; conversations belong under 'messages' (data.content = 'messages')",
            )
    (values["prompt"] + values["completion"]).encode()  # raises if they have no UTF-8 form
    prompt, completion = tokenizer.encode_batch([values["prompt"], values["completion"]])
    if not len(completion):
        raise DataError("the completion is empty", so="there is nothing to train on", fix="delete it")
    tokens = np.concatenate([prompt, completion, [tokenizer.eos_id]]).astype(np.int64)
    weights = np.ones(len(tokens), dtype=np.float32)
    weights[: len(prompt)] = 0
    return {"tokens": tokens, WEIGHTS: weights}


def _tokens(values: Mapping[str, Any], tokenizer: Tokenizer, names: Sequence[str]) -> Example:
    (name,) = [name for name in ("tokens", "input_ids") if name in values]
    tokens = _numbers(name, values[name], whole=True)
    if not len(tokens):
        raise DataError(f"{name!r} is empty", so="there is nothing to train on", fix="delete the record")
    if tokens.min() < 0 or tokens.max() >= tokenizer.vocab_size:
        wrong = int(tokens[(tokens < 0) | (tokens >= tokenizer.vocab_size)][0])
        raise DataError(
            f"{name!r} holds id {wrong}, but tokenizer {tokenizer.name!r} has the ids 0 to {tokenizer.vocab_size - 1}",
            so="the model would have no embedding for it",
            fix="set data.tokenizer to the one that made the tokens",
        )
    fields = {key: _aligned(key, values[key], tokens) for key in names}
    weights = np.ones(len(tokens), dtype=np.float32)
    if "weights" in values:
        weights = _aligned("weights", values["weights"], tokens)
    labels = tokens
    if "labels" in values:
        labels = _labels(values["labels"], tokens, tokenizer)
        weights = np.where(labels == IGNORE_INDEX, np.float32(0), weights)
        labels = np.where(labels == IGNORE_INDEX, tokens, labels)
    return {"tokens": tokens, WEIGHTS: weights, LABELS: labels, **fields}


def _labels(values: Any, tokens: IntArray, tokenizer: Tokenizer) -> IntArray:
    """``[T]`` for each token its label as in transformers: an id of the vocabulary, or -100; not shifted."""
    labels = _numbers("labels", values, whole=True, count=len(tokens))
    wrong = np.flatnonzero((labels != IGNORE_INDEX) & ((labels < 0) | (labels >= tokenizer.vocab_size)))
    if len(wrong):
        raise DataError(
            f"labels[{wrong[0]}] is {labels[wrong[0]]}, but tokenizer {tokenizer.name!r} has the ids 0 to "
            f"{tokenizer.vocab_size - 1}",
            so="the model could not predict it",
            fix=f"write an id, or {IGNORE_INDEX} for a token without loss",
        )
    others = np.flatnonzero((labels != IGNORE_INDEX) & (labels != tokens))
    is_next = (labels[:-1] == tokens[1:]) | (labels[:-1] == IGNORE_INDEX)
    if len(others) > 1 and is_next.all():
        raise DataError(
            f"'labels' are the next tokens: labels[{others[0]}] is token {others[0] + 1}",
            so="the model would learn to leave a token out",
            fix="write labels as transformers has them: labels[i] belongs to token i itself",
        )
    return labels


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise DataError("'messages' is not a list of messages", fix="write [{'role': ..., 'content': ...}, ...]")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"message {number} has no role", fix="write {'role': ..., 'content': ...}")
        if "content" not in message and "tool_calls" not in message:
            raise DataError(
                f"message {number} ({message['role']}) has no content", fix="write its text under 'content'"
            )
        if any("\ufdd0" in text or "\ufdd1" in text for text in texts_of_message(message)):
            raise DataError(f"message {number} holds U+FDD0 or U+FDD1, which are no characters", fix="delete them")
    return messages


def _message_weight(message: Mapping[str, Any], number: int) -> float:
    weight = message.get("weight", 1.0)
    if isinstance(weight, (bool, int, float)) and math.isfinite(weight):
        return float(weight)
    raise DataError(
        f"the weight of message {number} is {weight!r}",
        so="the loss would not be a number",
        fix="write a finite number, or leave it out for 1",
    )


def _aligned(name: str, values: Any, tokens: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers of a field as fp32, one per token."""
    numbers = _numbers(name, values, whole=False, count=len(tokens))
    with np.errstate(over="ignore"):
        kept = numbers.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(kept))
    if len(bad):
        raise DataError(
            f"{name}[{bad[0]}] is {numbers[bad[0]]}",
            so="the loss would not be a number",
            fix="write numbers that are finite in fp32",
        )
    return kept


def _numbers(name: str, values: Any, *, whole: bool, count: int | None = None) -> NDArray[Any]:
    """``[T]`` int64 if ``whole``, else float64. ``count``: T; None: any."""
    is_list = isinstance(values, list) and all(isinstance(value, (int, float)) for value in values)
    if is_list and count not in (None, len(values)):
        raise DataError(
            f"{name!r} has {len(values)} numbers for {count} tokens",
            so="they could not be given to their tokens",
            fix="write one number per token",
        )
    if is_list and not (whole and any(isinstance(value, (bool, float)) for value in values)):
        with suppress(OverflowError):
            return np.array(values, dtype=np.int64 if whole else np.float64)
    raise DataError(
        f"{name!r} is not a list of {'whole ' if whole else ''}numbers",
        so="its tokens are not known" if whole else "it cannot be given to the tokens",
        fix=f"write one {'whole ' if whole else ''}number per token",
    )
