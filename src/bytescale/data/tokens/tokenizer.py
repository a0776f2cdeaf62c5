"""Tokenizers: plain bytes, any ``tokenizer.json`` through the ``tokenizers`` library, or one trained on the sources.

A tokenizer turns text into ids and does nothing else. It recognises no special token inside text: a document that talks
about ``<|endoftext|>`` does not end there. It adds no special token, and neither truncates nor pads. Documents end with
``eos_id``, which the writer of the corpus appends.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.atomic import file_lock, write_atomically
from bytescale.common.errors import ConfigError, DataError, typed_path
from bytescale.common.parsing import parse_json, read_input, read_text
from bytescale.config.schema import Bos, DataConfig
from bytescale.data.sources.files import SourceFile, fingerprint_files
from bytescale.data.sources.records import ReadCounts, WorkUnit, iter_records, kind_of, plan_units
from bytescale.data.tokens.progress import Progress, ProgressCallback
from bytescale.data.tokens.tokenizer_limits import check_room, check_tokenizer, growth_of, rust_errors
from bytescale.storage.retry import with_retries

logger = logging.getLogger(__name__)

EOS_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|end▁of▁sentence|>",
    "<|eot_id|>",
    "<|im_end|>",
    "[SEP]",
)
"""End-of-text tokens of well-known tokenizers. The first one that a tokenizer has is its EOS."""


class ByteTokenizer:
    """UTF-8 bytes are the ids 0..255, and 256 is EOS."""

    name = "bytes"
    vocab_size = 257
    eos_id = 256
    eos_text = "<eos>"
    fingerprint = "bytes-eos-256"
    special = re.compile("(?!)")
    bos_id: int | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """``[num_bytes]`` uint8 per text."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def check_room(self, text: str) -> None:
        """There is room for any record that is read."""

    def encode_with_offsets(self, text: str, spelled: Sequence[tuple[int, int]] = ()) -> tuple[IntArray, IntArray]:
        """There are no special tokens. All bytes of a character have its place."""
        (ids,) = self.encode_batch([text])
        is_first = (ids & 0xC0) != 0x80  # not the second or a later byte of a character
        places = np.cumsum(is_first, dtype=np.int64) - 1
        return ids.astype(np.int64), np.stack([places, places + 1], axis=1)

    def to_json(self) -> str:
        """The same tokenizer as the content of a tokenizer.json."""
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        vocabulary = {letter: number for number, letter in enumerate(_letters_of_bytes())}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        made.pre_tokenizer, made.decoder = byte_level, tokenizers.decoders.ByteLevel()
        made.add_special_tokens([self.eos_text])
        return str(made.to_str())

    def tokens(self) -> dict[int, str]:
        """The token of each id, as ``JsonTokenizer.tokens``."""
        return _tokens_by_id(tokenizers.Tokenizer.from_str(self.to_json()))

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids. Bytes that are not UTF-8, such as a part of a character, become U+FFFD."""
        values = np.asarray(ids, dtype=np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer of the ``tokenizers`` library. It can be pickled: worker processes get a copy."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, name: str, eos_token: str | None = None, bos_token: str | None = None
    ) -> None:
        """Wrap ``tokenizer``, which this object then owns. Raises ``ConfigError`` unless it has these tokens."""
        tokenizer.encode_special_tokens = True  # a special token that is spelled out in text is encoded as text
        self._tokenizer = tokenizer
        self.name = name
        self.eos_id = _find_eos(tokenizer, name, eos_token)
        self.eos_text = str(tokenizer.id_to_token(self.eos_id))
        self.bos_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
        """With which documents of ``text`` and ``prompt`` begin (``data.bos``); None: with their first word."""
        special = {key: token.content for key, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special_ids = frozenset(special)
        # A longer one first: it counts where a shorter one is a part of it.
        longest_first = sorted(special.values(), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        content = f"{self.eos_id}\0{tokenizer.to_str()}".encode()
        self.fingerprint = hashlib.blake2b(content, digest_size=8).hexdigest()  # equal where all is encoded alike
        self._growth = growth_of(tokenizer)

    @staticmethod
    def from_file(path: Path, bos: Bos = "never") -> JsonTokenizer:
        """Read a ``tokenizer.json``, or the one inside a folder.

        EOS is what ``tokenizer_config.json`` beside it says, else the first of ``EOS_NAMES``.
        ``bos``: as ``data.bos``.

        Raises ``ConfigError`` if the tokenizer does not have the EOS; ``DataError`` if the file is not a tokenizer, or
        ``tokenizer_config.json`` is not JSON.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        with rust_errors(f"{file} is not a tokenizer.json"):
            tokenizer = tokenizers.Tokenizer.from_str(read_text(file))
            # The file may carry the truncation and padding of the model it was saved with.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            check_tokenizer(tokenizer, str(path))
        settings = tokenizer_settings(file.parent)
        return JsonTokenizer(
            tokenizer,
            name=str(path),
            eos_token=token_text(settings.get("eos_token")),
            bos_token=_bos_token(tokenizer, settings, bos, file),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle, and set the switch that the library does not pickle. Worker processes must encode as we do."""
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = True

    def check_room(self, text: str) -> None:
        """Raise ``DataError`` for a text whose encoding would fill the memory."""
        check_room(text, self._growth, self._encoded)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """``[num_tokens]`` int64 per text, without EOS. An empty text has none. Raises as ``check_room``."""
        for text in texts:
            self.check_room(text)
        return self._encoded(texts)

    def _encoded(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        with rust_errors(f"tokenizer {self.name} cannot encode a text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_with_offsets(self, text: str, spelled: Sequence[tuple[int, int]] = ()) -> tuple[IntArray, IntArray]:
        """Ids ``[T]`` of a text in which special tokens stand for themselves, and their characters ``[T, 2]``.

        For text that a chat template has written. Row i is the first character of token i, and one past the last.
        Special tokens in ``spelled``, ranges of characters, are encoded as text. Raises ``DataError`` if none is one.
        """
        self.check_room(text)
        self._tokenizer.encode_special_tokens = False
        try:
            with rust_errors(f"tokenizer {self.name} cannot encode a text"):
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        pairs = list(zip(encoding.ids, encoding.offsets, strict=True))
        if spelled:
            pairs = list(itertools.chain.from_iterable(self._as_text(text, *pair, spelled) for pair in pairs))
        offsets = np.array([offset for _, offset in pairs], dtype=np.int64).reshape(-1, 2)
        return np.array([token for token, _ in pairs], dtype=np.int64), offsets

    def _as_text(
        self, text: str, token: int, place: tuple[int, int], spelled: Sequence[tuple[int, int]]
    ) -> list[tuple[int, tuple[int, int]]]:
        """The tokens of a token that may be in ``spelled``."""
        first, last = place
        if token not in self._special_ids or not any(first < stop and last > start for start, stop in spelled):
            return [(token, place)]
        # Behind a line feed, the text has no space before it, which some tokenizers write where a text begins.
        plain, feed = (
            self._tokenizer.encode(part, add_special_tokens=False) for part in ("\n" + text[first:last], "\n")
        )
        if plain.ids[: len(feed.ids)] != feed.ids or token in plain.ids:
            raise DataError(f"{text[first:last]!r} has no tokens as text", fix="take it out of the messages")
        begun = len(feed.ids)
        return [
            (own, (first + start - 1, first + stop - 1))
            for own, (start, stop) in zip(plain.ids[begun:], plain.offsets[begun:], strict=True)
        ]

    def tokens(self) -> dict[int, str]:
        """The token of each id, in the letters of its tokenizer.json."""
        return _tokens_by_id(self._tokenizer)

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        return str(self._tokenizer.to_str())

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids. EOS gives no text."""
        values = np.asarray(ids, dtype=np.int64)
        return str(self._tokenizer.decode(values[values != self.eos_id].tolist(), skip_special_tokens=False))


Tokenizer = ByteTokenizer | JsonTokenizer


def _tokens_by_id(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}


def _letters_of_bytes() -> list[str]:
    """The 256 letters that stand for bytes in a byte-level vocabulary: printable ones for themselves (GPT-2)."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def choose_tokenizer(config: DataConfig, files: Sequence[SourceFile], progress: ProgressCallback) -> Tokenizer | None:
    """Return the tokenizer of ``config``, or None if there is no text and ``config`` names no tokenizer by its path.

    Raises ``ConfigError`` if there is no such tokenizer, or ``bpe`` is to be trained without text.
    """
    text_files = [file for file in files if file.format != "bin"]
    if config.tokenizer == "bpe":
        if not text_files:
            raise ConfigError(
                "data.tokenizer is 'bpe', but all sources are .bin files",
                so="there is no text to train it on",
                fix="set data.tokenizer to the tokenizer.json that made them, or leave it out",
            )
        return cached_bpe(text_files, config, progress)
    if config.tokenizer in ("auto", "bytes") and not text_files:
        return None  # .bin files need no tokenizer
    return load_tokenizer(config.tokenizer, config.bos)


def load_tokenizer(name: str, bos: Bos = "never") -> Tokenizer:
    """Return the tokenizer called ``name``: ``bytes`` (or ``auto``), or the path of a ``tokenizer.json`` or its folder.

    Raises ``ConfigError`` if there is no such tokenizer, or it has no EOS; ``DataError`` if the file is not a
    tokenizer.
    """
    if name in ("auto", "bytes"):
        return ByteTokenizer()
    path = typed_path(name)
    if not path.exists():
        raise ConfigError(
            f"data.tokenizer is {name!r}, which is no file",
            fix="use 'bytes', 'bpe' (trained on the sources) or the path of a tokenizer.json",
        )
    return JsonTokenizer.from_file(path, bos)


def _bos_token(tokenizer: Any, settings: Mapping[str, Any], bos: Bos, file: Path) -> str | None:
    """The token with which a document begins; None: no document begins with one. Raises ``ConfigError``."""
    named = token_text(settings.get("bos_token"))
    if bos == "always" and (named is None or tokenizer.token_to_id(named) is None):
        raise ConfigError(
            f'data.bos is "always", and {file.with_name("tokenizer_config.json")} names no bos_token that it has',
            so="there is nothing for documents to begin with",
            fix='set data.bos to "auto"',
        )
    if bos != "auto":
        return named if bos == "always" else None
    if isinstance(settings.get("add_bos_token"), bool):  # transformers goes by it
        return named if settings["add_bos_token"] else None
    with rust_errors(f"tokenizer {file} cannot encode a text"):
        first = tokenizer.encode("a", add_special_tokens=True).tokens[:1]
    return named if first == [named] else None


def _find_eos(tokenizer: Any, name: str, eos_token: str | None) -> int:
    for token in (eos_token,) if eos_token else EOS_NAMES:
        if (token_id := tokenizer.token_to_id(token)) is not None:
            return int(token_id)
    sought = f"no token {eos_token!r}" if eos_token else "none of the usual end-of-text tokens " + " ".join(EOS_NAMES)
    raise ConfigError(
        f"tokenizer {name} has {sought}",
        so="documents could not be told apart",
        fix='name the token that ends a document in the tokenizer_config.json beside it: {"eos_token": ...}',
    )


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """What a Hugging Face ``tokenizer_config.json`` says, if the folder has one. Raises ``DataError``."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        content = parse_json(read_input(path))
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path} is not JSON ({error})", so="its eos_token and chat template are unknown", fix="mend it"
        ) from error
    return content if isinstance(content, dict) else {}


def token_text(entry: Any) -> str | None:
    """The text of a special token in these settings."""
    found = entry.get("content") if isinstance(entry, dict) else entry
    return found if isinstance(found, str) else None


# A byte-level BPE tokenizer, which is trained on the sources and kept in the cache folder.
BPE_EOS = "<|endoftext|>"
TRAINING_BYTES = 256 * 1024**2
"""Bytes of text that training reads. More text changes the vocabulary little, and all word counts are in memory."""
TRAINING_CHARACTERS = 2**22
"""Of one text, from its beginning: the library counts the words of a whole text at once."""
_LONG_RUNS = re.compile(r"\S{257,}|\s{257,}")


def cached_bpe(files: Sequence[SourceFile], config: DataConfig, progress: ProgressCallback) -> JsonTokenizer:
    """Return the tokenizer trained on ``files``. It is trained now if the cache has none for these files and settings.

    Raises ``DataError`` if there is no text, or a file cannot be read (as ``iter_records``).
    """
    vocab_size = config.bpe_vocab_size
    settings = f"{fingerprint_files(files)} {config.text_key} {vocab_size} {TRAINING_BYTES}"
    key = hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
    path = typed_path(config.cache_dir) / "tokenizers" / f"bpe-{vocab_size}-{key}.json"
    with file_lock(path.with_suffix(".lock")):
        if not path.exists():
            tokenizer = train_bpe(files, config, progress)
            write_atomically(path, tokenizer.to_str().encode())
            logger.info("trained a BPE tokenizer of %d ids: %s", tokenizer.get_vocab_size(), path)
    return JsonTokenizer.from_file(path)


def train_bpe(files: Sequence[SourceFile], config: DataConfig, progress: ProgressCallback) -> tokenizers.Tokenizer:
    """Train a byte-level BPE of at most ``bpe_vocab_size`` ids. It has fewer if the text has no more pairs to merge."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config.bpe_vocab_size,
        special_tokens=[BPE_EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    units = with_retries(partial(plan_units, files, kind_of(config)))
    stride = max(1, -(-sum(unit.num_bytes for unit in units) // TRAINING_BYTES))
    tokenizer.train_from_iterator(_training_texts(units[::stride], config, progress), trainer)
    return tokenizer


def _texts_of(unit: WorkUnit, config: DataConfig) -> list[str]:
    """Return the texts of a unit. Corrupt records are left out here; tokenising finds them again and counts them."""
    records = iter_records(unit, kind_of(config), ReadCounts(max_corrupt=sys.maxsize))
    texts = (record.values[config.text_key] for record in records)
    return [_LONG_RUNS.sub(_pieces, text[:TRAINING_CHARACTERS]) for text in texts if text.strip()]


def _pieces(run: re.Match[str]) -> str:
    """A run in lines of 256 characters, of spaces one: the library would merge the pairs of one word for minutes."""
    return "\n".join(run[0][start : start + 256] for start in range(0, 256 if run[0].isspace() else len(run[0]), 256))


def _training_texts(units: list[WorkUnit], config: DataConfig, progress: ProgressCallback) -> Iterator[list[str]]:
    """Yield the texts of one unit at a time, because the library spreads the texts of one item over all cores."""
    total_bytes = sum(unit.num_bytes for unit in units)
    done_bytes = num_documents = 0
    for unit in units:
        texts = with_retries(partial(_texts_of, unit, config))
        num_documents += len(texts)
        yield texts
        done_bytes += unit.num_bytes
        progress(Progress(stage="training the tokenizer", done_bytes=done_bytes, total_bytes=total_bytes))
    if not num_documents:
        raise DataError("the sources hold no text to train a tokenizer on", fix="check data.sources")
