"""Trains a byte-level BPE tokenizer on the sources, and keeps it in the cache folder."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from bytescale.common.atomic import file_lock, write_atomically
from bytescale.common.errors import ConfigError, DataError
from bytescale.config.schema import DataConfig
from bytescale.data.sources.files import SourceFile, fingerprint_files
from bytescale.data.sources.records import ReadCounts, WorkUnit, iter_records, kind_of, plan_units
from bytescale.data.tokens.progress import Progress, ProgressCallback
from bytescale.data.tokens.tokenizer import JsonTokenizer
from bytescale.storage.retry import with_retries

logger = logging.getLogger(__name__)

BPE_EOS = "<|endoftext|>"
TRAINING_BYTES = 256 * 1024**2
"""Bytes of text that training reads. More text changes the vocabulary little, and all word counts are in memory."""
_LEAST_VOCABULARY = 257
_VERSION = 1


def cached_bpe(files: Sequence[SourceFile], config: DataConfig, progress: ProgressCallback) -> JsonTokenizer:
    """Return the tokenizer trained on ``files``. It is trained now if the cache has none for these files and settings.

    Raises ``ConfigError`` if ``bpe_vocab_size`` is below 257, the 256 bytes and EOS; ``DataError`` if there is no text,
    or a file cannot be read (as ``iter_records``).
    """
    vocab_size = config.bpe_vocab_size
    if vocab_size < _LEAST_VOCABULARY:
        raise ConfigError(
            f"data.bpe_vocab_size is {vocab_size}",
            so="not even the 256 bytes and an end-of-text token would fit",
            fix=f"use at least {_LEAST_VOCABULARY}, or data.tokenizer = 'bytes'",
        )
    settings = f"{fingerprint_files(files)} {config.text_key} {vocab_size} {TRAINING_BYTES} {_VERSION}"
    key = hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
    path = Path(config.cache_dir).expanduser() / "tokenizers" / f"bpe-{vocab_size}-{key}.json"
    with file_lock(path.with_suffix(".lock")):
        if not path.exists():
            tokenizer = train_bpe(files, config, progress)
            write_atomically(path, tokenizer.to_str().encode())
            logger.info("trained a BPE tokenizer of %d ids: %s", tokenizer.get_vocab_size(), path)
    return JsonTokenizer.from_file(path, BPE_EOS)


def train_bpe(files: Sequence[SourceFile], config: DataConfig, progress: ProgressCallback) -> tokenizers.Tokenizer:
    """Train a byte-level BPE of at most ``bpe_vocab_size`` ids. It has fewer if the text has no more pairs to merge."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.bpe_vocab_size,
        special_tokens=[BPE_EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    units = with_retries(partial(plan_units, files, kind_of(config)), config.read_retries)
    stride = max(1, -(-sum(unit.num_bytes for unit in units) // TRAINING_BYTES))
    tokenizer.train_from_iterator(_training_texts(units[::stride], config, progress), trainer)
    return tokenizer


def _texts_of(unit: WorkUnit, config: DataConfig) -> list[str]:
    """Return the texts of a unit. Corrupt records are left out here; tokenising finds them again and counts them."""
    counts = ReadCounts(max_corrupt=sys.maxsize)
    return [record.values[config.text_key] for record in iter_records(unit, kind_of(config), counts)]


def _training_texts(units: list[WorkUnit], config: DataConfig, progress: ProgressCallback) -> Iterator[list[str]]:
    """Yield the texts of one unit at a time, because the library spreads the texts of one item over all cores."""
    total_bytes = sum(unit.num_bytes for unit in units)
    done_bytes = num_documents = 0
    for unit in units:
        texts = with_retries(partial(_texts_of, unit, config), config.read_retries)
        num_documents += len(texts)
        yield texts
        done_bytes += unit.num_bytes
        progress(Progress(stage="training the tokenizer", done_bytes=done_bytes, total_bytes=total_bytes))
    if not num_documents:
        raise DataError("the sources hold no text to train a tokenizer on", fix="check data.sources")
