"""Scores of a whole corpus as a Parquet file, which survives being killed.

Every global batch becomes a part ``FILE.parquet.parts/000012.parquet``, which the first rank writes whole or not at
all. The same command continues behind the last part. When all are there, they become ``FILE.parquet``. The batches
depend on the corpus and ``batch_tokens`` alone, never on the ranks, so another number of ranks may continue.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bytescale.common.atomic import remove_stale_temporaries, whole_file, write_atomically
from bytescale.common.errors import ConfigError, DataError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.common.parsing import parse_json, read_input
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import Corpus, place_of_document
from bytescale.data.order.batches import GlobalBatch, batches_once
from bytescale.data.tokens.indexed import WEIGHTS
from bytescale.hf.batch.documents import ITEM_NAMES, TOKEN_NAMES, Documents, RankBatch
from bytescale.hf.loop.hdp import HDP
from bytescale.hf.loop.planned_batch import PlannedBatch
from bytescale.plan import RankPlan

_NEEDED = (*TOKEN_NAMES, *ITEM_NAMES, "labels")


def score(hdp: HDP, documents: Iterable[Mapping[str, Any]], *, batch_tokens: int = 2**18) -> Iterator[Tensor]:
    """Yield ``[length]`` log-probabilities of every document's labels, on every rank, in the order of ``documents``.

    At most ``batch_tokens`` tokens (or one longer document) are read ahead and planned together. The logits of a few
    rows exist at a time, whatever the vocabulary. A label of -100 (a document's last token has one) gives 0. Fields
    besides tokens, labels and images (``ITEM_NAMES``) are not read.

    Args:
        hdp: attached to the model, which is in evaluation mode, best with ``forward_only=True``.
        documents: mappings as ``HDP.plan`` takes them, with ``tokens`` and perhaps ``labels``; the same on every rank.

    Raises:
        DataError, PlanError: as ``HDP.plan``; a document may be longer than all ranks hold.
    """
    held: list[Mapping[str, Any]] = []
    num_tokens = 0
    for document in documents:
        length = len(document.get("tokens", document.get("input_ids", ())))
        if held and num_tokens + length > batch_tokens:
            yield from score_batch(hdp, held)
            held, num_tokens = [], 0
        held.append(document)
        num_tokens += length
    yield from score_batch(hdp, held) if held else ()


@torch.no_grad()
def score_batch(hdp: HDP, documents: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The log-probabilities of one global batch; see ``score``."""
    # Other fields are not read: weights, for example, may sum to zero, which a loss could not be divided by.
    needed = [{name: document[name] for name in _NEEDED if name in document} for document in documents]
    return _scored(hdp, hdp.plan(needed, share_prefixes=True))


def _scored(hdp: HDP, planned: PlannedBatch) -> list[Tensor]:
    planned.forward_backward(lambda micro: hdp.collect(micro, micro.logprobs(hdp.model)))  # forward, for stages, too
    return hdp.collected()


@torch.no_grad()
def score_pictures(
    hdp: HDP, corpus: Corpus, data: DataConfig, batch: GlobalBatch, documents: Sequence[Mapping[str, Any]]
) -> list[Tensor]:
    """The same of a corpus' batch, some of whose ``documents`` have pictures; each rank reads those that it encodes."""
    from bytescale.hf.loop.pictures import read_pictures  # few corpora have them

    given = [{name: document[name] for name in ("tokens", "labels")} for document in documents]
    rank_plan = RankPlan.of(hdp.planner(batch.lengths), hdp.mesh.hdp.rank)
    pictures = read_pictures(corpus, data, batch, rank_plan, hdp.mesh.encoding, next(hdp.model.parameters()).dtype)
    assert pictures is not None, "it was asked"
    hdp.agree("the plan of a batch", rank_plan.digest)
    part = RankBatch.of(rank_plan, Documents.of(given))
    return _scored(hdp, PlannedBatch(hdp, part, encode=pictures.encoded))


@dataclass(frozen=True)
class ScoreFile:
    """The output of a scoring run, and what has been written of it."""

    path: Path

    @property
    def parts(self) -> Path:
        return self.path.with_name(self.path.name + ".parts")

    def check_is_new(self) -> None:
        """Raise ``ConfigError`` if the file exists, or if there can be none."""
        parent = next(folder for folder in self.path.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ConfigError(
                f"{self.path} cannot be written ({parent} is no folder that you may write to)",
                so="the scores would be lost",
                fix="name another --out",
            )
        if self.path.exists():
            raise ConfigError(
                f"{self.path} exists", so="its scores would be lost", fix="name another --out, or delete it"
            )

    def begin(self, settings: Mapping[str, Any]) -> int:
        """Create the folder, or continue in it. Returns how many parts are there. Only the first rank calls it.

        Raises ``ConfigError`` if parts were made with other ``settings``.
        """
        self.check_is_new()
        self.parts.mkdir(parents=True, exist_ok=True)
        known = self.parts / "settings.json"
        if not known.exists():
            write_atomically(known, json.dumps(settings, indent=2, sort_keys=True).encode())
        found = parse_json(read_input(known))
        for name in sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name)):
            raise ConfigError(
                f"{self.parts} was begun with {name} = {found.get(name)!r}, and now it is {settings.get(name)!r}",
                so="one file would hold scores of both",
                fix="repeat the command as it was, or delete the folder to start again",
            )
        return next(done for done in itertools.count() if not self.part(done).exists())

    def part(self, number: int) -> Path:
        return self.parts / f"{number:06d}.parquet"

    def write(self, number: int, rows: Mapping[str, Any]) -> None:
        """Write a part, whole or not at all. ``rows``: values by column."""
        import pyarrow
        import pyarrow.parquet

        with self._written(self.part(number)) as temporary:
            pyarrow.parquet.write_table(pyarrow.table(dict(rows)), temporary)

    def finish(self, num_parts: int) -> None:
        import pyarrow.parquet

        with self._written(self.path) as temporary:
            schema = pyarrow.parquet.read_schema(self.part(0))
            with pyarrow.parquet.ParquetWriter(temporary, schema) as writer:
                for number in range(num_parts):
                    writer.write_table(pyarrow.parquet.read_table(self.part(number)))
        shutil.rmtree(self.parts)

    @contextmanager
    def _written(self, path: Path) -> Iterator[Path]:
        """``whole_file(path)``. Raises ``DataError`` if the disk is full or gone."""
        try:
            remove_stale_temporaries(path)
            with whole_file(path) as temporary:
                yield temporary
        except OSError as error:
            raise DataError(
                f"{path} cannot be written ({error})",
                so=f"the parts in {self.parts} are whole, and no score in them is lost",
                fix="make room, then repeat the command: it continues behind them",
            ) from error


def score_corpus(
    hdp: HDP,
    corpus: Corpus,
    output: ScoreFile,
    *,
    data: DataConfig,
    batch_tokens: int,
    model_name: str,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Score every document of the corpus of ``data``. Every rank calls it; the first one writes, and ``log``s how far.

    The columns: ``document`` (from 0), ``num_tokens``, ``num_targets``, ``logprob`` (sum of weight x log-probability),
    ``logprobs`` (of every token behind the first, or of its label), and ``weights`` of the same tokens if any exist.

    Raises ``ConfigError`` if the file exists, or was begun with other settings; ``DataError`` if a document is longer
    than all ranks hold, or empty, so that rows would not be the caller's.
    """
    check_documents(corpus, hdp.mesh.hdp.size, hdp.capacity_tokens, data)
    batches = list(batches_once(corpus.index, batch_tokens))
    settings = {
        "model": model_name,
        "dtype": str(next(hdp.model.parameters()).dtype),
        "corpus": corpus.index.content_hash(range(corpus.index.num_parts)),
        "batch_tokens": batch_tokens,
        **({"invariant": True} if hdp.engine.decoder.is_invariant else {}),
    }
    begun = output.begin(settings) if hdp.group.rank == 0 else 0
    done = int(hdp.group.max_of([float(begun)])[0])
    if done:
        log(f"continuing after {done} of {len(batches)} batches")
    first = sum(len(batch.samples) for batch in batches[:done])
    for batch in batches[done:]:
        documents = corpus.documents(batch.samples)
        if corpus.pictures_of(batch.samples):
            found = score_pictures(hdp, corpus, data, batch, documents)
        else:
            found = score_batch(hdp, documents)
        scores = [values.cpu().numpy() for values in found]
        if hdp.group.rank == 0:
            output.write(batch.step, _rows(first, documents, scores, corpus.index.has_weights))
            log(f"{batch.step + 1}/{len(batches)} batches, {batch.num_tokens} tokens")
        first += len(batch.samples)
    if hdp.group.rank == 0:
        output.finish(len(batches))


def check_documents(corpus: Corpus, num_ranks: int, capacity_tokens: int, data: DataConfig) -> None:
    """Raise ``DataError`` for documents that cannot be scored: longer than the ranks hold, or without a token."""
    counts = corpus.metadata.counts
    left_out = counts.num_empty_documents + len(corpus.metadata.skipped_files)
    if left_out:
        raise DataError(
            f"{left_out} documents are empty or not text",
            so="the rows of the output would not be those of the input",
            fix="delete them from the sources",
        )
    samples = corpus.samples
    longest, row = int(samples.length.max()), int(samples.length.argmax())
    if longest > num_ranks * capacity_tokens:
        place = place_of_document(data, int(samples.part[row]), int(samples.document[row]))
        raise DataError(
            f"{place}: the document has {longest} tokens, but {num_ranks} ranks of {capacity_tokens} "
            f"tokens hold {num_ranks * capacity_tokens}",
            so="the whole cluster could not hold it",
            fix=f"use {-(-longest // capacity_tokens)} ranks, a capacity of {-(-longest // num_ranks)} tokens, or "
            "take it out",
        )


def _rows(
    first: int, documents: Sequence[Mapping[str, Any]], scores: Sequence[np.ndarray], has_weights: bool
) -> dict[str, Any]:
    targets = [(document["labels"] != IGNORE_INDEX) & (document[WEIGHTS] != 0) for document in documents]
    rows = {
        "document": np.arange(first, first + len(documents)),
        "num_tokens": np.array([len(document["tokens"]) for document in documents]),
        "num_targets": np.array([int(counted.sum()) for counted in targets]),
        "logprob": np.array(
            [  # of what is counted alone: a weight of 0 times minus infinity is no number
                float(document[WEIGHTS].astype(np.float64)[counted] @ values[counted])
                for document, counted, values in zip(documents, targets, scores, strict=True)
            ]
        ),
        "logprobs": [values[:-1] for values in scores],
    }
    if has_weights:
        rows["weights"] = [document[WEIGHTS][:-1] for document in documents]
    return rows
