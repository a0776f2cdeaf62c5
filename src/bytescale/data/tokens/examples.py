"""Turns the records of a unit into tokens: texts, and fine-tuning data with the weight of each token's loss.

The weight of a token says how much predicting THIS token counts; 0: it is read and not trained on. A document's first
token is never predicted. Weights and other fields of a token are kept in fp32, and labels as int32.

=================  =================================================  ====================================
``data.content``   tokens                                             weight
=================  =================================================  ====================================
``messages``       the conversation, written by the chat template     1 in what the assistant said, 0 elsewhere;
                                                                      ``weight`` of a message scales its own,
                                                                      ``train``: false is a weight of 0; 0 in what
                                                                      stands for a picture
``prompt``         prompt, completion and EOS                         0 in the prompt, 1 behind it
``tokens``         as given                                           ``weights``; 0 where a label is -100
=================  =================================================  ====================================

``labels`` of ``tokens`` may name other ids than the tokens: ``labels[i]`` is what is predicted at the place of token i.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.errors import DataError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import CorpusConfig, DataConfig
from bytescale.data.sources.records import ReadCounts, Record, RecordKind, WorkUnit, iter_records, kind_of
from bytescale.data.tokens.chat import ChatTemplate, Rendered, load_template
from bytescale.data.tokens.indexed import LABELS, WEIGHTS, field_dtype, token_dtype
from bytescale.data.tokens.messages import Conversation, conversation_of
from bytescale.data.tokens.pictures import Picture, processor_fingerprint, with_pictures
from bytescale.data.tokens.tokenizer import Tokenizer
from bytescale.storage.retry import UnreadableError, with_retries

_BATCH_CHARACTERS = 1 << 20
"""Text handed to the tokenizer at once. The tokenizer's results take some 100 bytes a token until they are arrays."""
_BATCH_RECORDS = 64
_EMPTY_THOUGHTS = re.compile(r"\s*<think>\s*</think>\s*")
_PIECE_TOKENS = 1 << 24
"""Tokens of a piece of a unit: a row group of a Parquet file may be far larger than a unit of other files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedUnit:
    """The tokens of one unit of work, or of one piece of it. The last piece has the counts of all."""

    tokens: NDArray[np.integer]  # [sum of lengths] tokens of all documents, each with its EOS
    lengths: IntArray  # [number of documents] tokens of each document
    counts: ReadCounts
    fields: Mapping[str, NDArray] = field(default_factory=dict)  # [sum of lengths] each
    pictures: Mapping[int, Sequence[Picture]] = field(default_factory=dict)  # by the document's number


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
            template=load_template(config) if config.content == "messages" else None,
        )

    @property
    def fingerprint(self) -> str:
        """A text that changes with the tokens that the same files give."""
        template = f"{self.template.fingerprint} {self.config.train_empty_thoughts}" if self.template else ""
        template += processor_fingerprint(self.config.tokenizer) if self.template else ""
        records = f"{self.config.content} {' '.join(self.config.fields)} {template}"
        begin = f" begins with {self.tokenizer.bos_id}" if self.puts_bos else ""
        return f"{self.config.text_key if self.kind.is_text else records} {self.tokenizer.fingerprint}{begin}"

    @property
    def puts_bos(self) -> bool:
        """Whether documents begin with the tokenizer's BOS. Chat templates write one by themselves."""
        return self.tokenizer.bos_id is not None and self.kind.content in ("text", "prompt")

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.tokenizer.vocab_size)

    @property
    def field_names(self) -> tuple[str, ...]:
        return {"text": (), "tokens": (WEIGHTS, LABELS, *self.config.fields)}.get(self.kind.content, (WEIGHTS,))

    def __call__(self, unit: WorkUnit) -> Iterator[EncodedUnit]:
        """Encode a unit in pieces; a read that may succeed later is tried again. Raises as ``iter_records``."""
        encode = self._encode_texts if self.kind.is_text else self._encode_records
        pieces, number = encode(unit), 0

        def piece() -> EncodedUnit | None:
            nonlocal pieces
            try:
                return next(pieces, None)
            except (OSError, UnreadableError):  # a generator that has raised is over
                pieces = itertools.islice(encode(unit), number, None)
                raise

        while found := with_retries(piece):
            number += 1
            yield found

    def _encode_records(self, unit: WorkUnit) -> Iterator[EncodedUnit]:
        counts, num_tokens = ReadCounts(max_corrupt=self.config.max_corrupt_records), 0
        examples: list[Example] = []
        records = iter_records(unit, self.kind, counts)
        for example in examples_of(records, self.config, self.tokenizer, self.template):
            if isinstance(example, DataError):
                counts.leave_out(example)
            else:
                examples.append(example)
                num_tokens += len(example["tokens"])
            if num_tokens >= _PIECE_TOKENS:
                yield self._joined(examples, ReadCounts())
                examples, num_tokens = [], 0
        yield self._joined(examples, counts)

    def _joined(self, examples: Sequence[Example], counts: ReadCounts) -> EncodedUnit:
        columns = {}
        for name, dtype in (("tokens", self.dtype), *((name, field_dtype(name)) for name in self.field_names)):
            columns[name] = np.concatenate([np.zeros(0, dtype), *(one[name].astype(dtype) for one in examples)])
        lengths = np.array([len(example["tokens"]) for example in examples], dtype=np.int64)
        pictures = {number: own[PICTURES] for number, own in enumerate(examples) if PICTURES in own}
        return EncodedUnit(
            tokens=columns.pop("tokens"), lengths=lengths, counts=counts, fields=columns, pictures=pictures
        )

    def _encode_texts(self, unit: WorkUnit) -> Iterator[EncodedUnit]:
        counts = ReadCounts(max_corrupt=self.config.max_corrupt_records)
        encoded: list[NDArray[np.integer]] = []
        texts: list[str] = []
        num_characters = 0
        for record in iter_records(unit, self.kind, counts):
            text = record.values[self.config.text_key]
            try:
                self.tokenizer.check_room(text)
            except DataError as error:
                counts.leave_out(DataError(f"{record.place()}: {error}"))
                continue
            texts.append(text)
            num_characters += len(text)
            if num_characters >= _BATCH_CHARACTERS:
                encoded.extend(self.tokenizer.encode_batch(texts))
                texts, num_characters = [], 0
                if sum(map(len, encoded)) >= _PIECE_TOKENS:
                    yield self._ended(encoded, counts, ReadCounts())
                    encoded = []
        encoded.extend(self.tokenizer.encode_batch(texts))
        yield self._ended(encoded, counts, counts)

    def _ended(self, encoded: Sequence[NDArray[np.integer]], counts: ReadCounts, told: ReadCounts) -> EncodedUnit:
        """Texts with BOS and EOS. ``counts`` learn how many are empty; the piece tells ``told``."""
        documents = [ids for ids in encoded if len(ids)]  # the tokenizer's normaliser may leave nothing of a text
        counts.num_empty += len(encoded) - len(documents)
        begin, end = _begin(self.tokenizer), np.array([self.tokenizer.eos_id])
        parts = [end[:0], *(part for ids in documents for part in (begin, ids, end))]
        return EncodedUnit(
            tokens=np.concatenate(parts, dtype=self.dtype, casting="unsafe"),
            lengths=np.array([len(begin) + len(ids) + 1 for ids in documents], dtype=np.int64),
            counts=told,
        )


def _begin(tokenizer: Tokenizer) -> IntArray:
    """The tokens with which a document begins: one, or none."""
    return np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype=np.int64)


PICTURES = "pictures"
Example = dict[str, Any]
"""One document: ``tokens [T]``, and its fields ``[T]`` by name, of which ``weights`` is one; its ``PICTURES``."""


def examples_of(
    records: Iterable[Record], config: CorpusConfig, tokenizer: Tokenizer, template: ChatTemplate | None = None
) -> Iterator[Example | DataError]:
    """Yield the example of each record of ``data.content``, which is not text. Conversations need a ``template``.

    An error is yielded, too, and begins with the record's place.
    """
    records = iter(records)
    while batch := list(itertools.islice(records, _BATCH_RECORDS)):
        read = [_conversation_or_error(record) for record in batch] if template else []
        written = template.render(read, tokenizer.special) if template else iter(())  # in one request to its process
        for record, conversation, rendered in itertools.zip_longest(batch, read, written):
            try:
                yield _example(record, config, tokenizer, (conversation, rendered))
            except UnicodeEncodeError:
                yield DataError(f"{record.place()} holds half a surrogate pair (\\ud8..)", fix="mend the record")
            except DataError as error:
                yield DataError(f"{record.place()}: {error}")


def _example(record: Record, config: CorpusConfig, tokenizer: Tokenizer, written: tuple[Any, Any]) -> Example:
    match config.content:
        case "messages":
            example = _conversation(*written, tokenizer, config.train_empty_thoughts)
            if sources := written[0].pictures:
                found = with_pictures(example["tokens"], example[WEIGHTS], sources, config, record.path)
                example = dict(zip(("tokens", WEIGHTS, PICTURES), found, strict=True))
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
    return example


def _conversation_or_error(record: Record) -> Conversation | DataError:
    try:
        return conversation_of(record.values)
    except DataError as error:
        return error
    except RecursionError:
        return DataError("it is nested too deeply", fix="mend the record")


def _conversation(
    record: Conversation, found: Rendered | DataError, tokenizer: Tokenizer, train_empty_thoughts: bool
) -> Example:
    if isinstance(found, DataError):
        raise found
    if any(number < 0 for _, _, number in found.spans) and set(record.weights) != {1.0}:
        raise DataError(
            "messages have weights, but the template marks several runs of text in one turn",
            so="it is not known which message a run belongs to",
            fix="leave the weights out, or mark each turn of the assistant once",
        )
    tokens, offsets = tokenizer.encode_with_offsets(found.text, found.spelled)
    weights = np.zeros(len(tokens), dtype=np.float32)
    for start, stop, number in found.spans:
        if not train_empty_thoughts and (thoughts := _EMPTY_THOUGHTS.match(found.text, start, stop)):
            start = thoughts.end()
        weights[(offsets[:, 0] < stop) & (offsets[:, 1] > start)] = record.weights[number] if number >= 0 else 1.0
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
    prompt = np.concatenate([_begin(tokenizer), prompt])
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
