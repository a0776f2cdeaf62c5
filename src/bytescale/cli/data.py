"""``bytescale data``: the commands ``tokenize``, ``stats``, ``show`` and ``audit``."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from rich.text import Text

from bytescale.common.arrays import IntArray
from bytescale.common.errors import ConfigError, typed_path, visible
from bytescale.common.parsing import read_input
from bytescale.common.units import format_bytes, format_count, format_seconds, format_si
from bytescale.config.load import load_config
from bytescale.config.schema import CorpusConfig, DataConfig
from bytescale.data.loading.corpus import Corpus, list_sources, prepare_corpus
from bytescale.data.loading.record import check_record
from bytescale.data.stats import BUCKET_EDGES, LengthStats, length_stats
from bytescale.data.tokens.indexed import WEIGHTS, read_index
from bytescale.data.tokens.pairs import TokenMetadata
from bytescale.data.tokens.progress import progress_bar
from bytescale.data.tokens.shards import ShardReader, write_as_pair
from bytescale.data.tokens.tokenizer import choose_tokenizer
from bytescale.train.reporting.screen import Console, console_of

_SHOWN_SKIPPED = 5
_SHOWN_CHARACTERS = 240


@dataclass(slots=True, kw_only=True)
class CorpusOptions(CorpusConfig):
    """The options with which a command reads a corpus. They mean the same as in the ``[data]`` section."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders, files, globs or URLs (s3://, webhdfs://, hdfs://, http://); `python:stdlib` is Python's own library, and
    `python:functions` the functions of it."""
    tokenizer: str = "bytes"
    """`bytes`, the path of a tokenizer.json, or `bpe` to train one on the sources (cached)."""

    def data_config(self) -> DataConfig:
        return DataConfig(**{spec.name: getattr(self, spec.name) for spec in fields(CorpusOptions)})


@dataclass(slots=True, kw_only=True)
class TokenizeConfig(CorpusOptions):
    """Turn folders, text, JSONL, Parquet or .bin/.idx files into one Megatron .bin/.idx pair."""

    output: str
    """Prefix of the files: OUTPUT.bin, OUTPUT.idx, and OUTPUT.meta.json, which says how they were made."""
    overwrite: bool = False
    """Replace OUTPUT if it exists."""

    def run(self) -> int:
        """Return the exit code. Raises as ``write_as_pair``."""
        console, data = console_of(), self.data_config()
        output = typed_path(self.output.removesuffix(".idx").removesuffix(".bin") + ".bin")
        idx_path = output.with_suffix(".idx")
        files = list_sources(data)
        if output.absolute() in {file.path for file in files}:
            raise ConfigError(
                f"{output} is both a source and the output", so="the source would be lost", fix="name another output"
            )
        if idx_path.exists() and not self.overwrite:
            raise ConfigError(
                f"{idx_path} exists", so="it would be replaced", fix="name another output or pass --overwrite"
            )
        total_bytes = sum(file.num_bytes for file in files)
        console.print(f"{len(files)} files, {format_bytes(total_bytes)} -> {output}, {idx_path.name}")
        started = time.perf_counter()
        with progress_bar() as progress:
            reader = ShardReader.of(data, choose_tokenizer(data, files, progress))
            tokenizing = time.perf_counter()
            runs = itertools.groupby(files, key=lambda file: file.format == "bin")  # the pair has the files' order
            shards = [shard for _, run in runs for shard in reader.plan(list(run))]
            metadata = write_as_pair(reader, shards, output, self.num_workers, progress)
        ended = time.perf_counter()
        _print_metadata(console, metadata, seconds=ended - started, rate_seconds=ended - tokenizing)
        console.print(f"Next: bytescale data stats {output}, or train with data.sources = [{str(output)!r}]")
        return 0


@dataclass(slots=True, kw_only=True)
class StatsConfig(CorpusOptions):
    """Show how the tokens of a corpus are distributed over document lengths. Of an .idx file, only these are read."""

    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Return the exit code. Raises as ``prepare_corpus``."""
        if self.sources and all(source.endswith(".idx") and "://" not in source for source in self.sources):
            paths = [typed_path(source) for source in self.sources]
            lengths = np.concatenate([read_index(path).document_lengths for path in paths])
        else:
            with progress_bar() as progress:
                lengths = document_lengths(prepare_corpus(self.data_config(), progress))
        stats = length_stats(lengths)
        if self.json:
            counts = {"upper_edges_tokens": BUCKET_EDGES} | asdict(stats)
            print(json.dumps(counts, default=np.ndarray.tolist))
        else:
            _print_stats(console_of(), stats)
        return 0


@dataclass(slots=True, kw_only=True)
class ShowConfig(CorpusOptions):
    """Show what is trained on: runs of tokens with the same weight, in the first documents of a corpus."""

    documents: int = 3
    """Number of documents to show."""
    json: bool = False
    """Print one JSON object per run instead of a table."""

    def run(self) -> int:
        """Return the exit code. Raises as ``prepare_corpus``."""
        with progress_bar() as progress:
            corpus = prepare_corpus(replace(self.data_config(), context_length=2**62), progress)
        console = console_of()
        shown = corpus.samples[: self.documents]
        pictures = corpus.pictures_of(shown)
        for number, document in enumerate(corpus.documents(shown)):
            runs = list(_trained_runs(corpus, document))
            seen = [("video" if one.kind == "video" else "picture", one) for one in pictures.get(number, ())]
            if self.json:
                for run in [*runs, *({word: one.name, "tokens": one.rows} for word, one in seen)]:
                    print(json.dumps({"document": number, **run}, ensure_ascii=False))
            else:
                _print_runs(console, number, runs)
                for place, (word, one) in enumerate(seen, 1):
                    console.print(f"{word} {place}: {one.name}, {one.rows} tokens")
        return 0


@dataclass(slots=True, kw_only=True)
class AuditConfig:
    """Check that a run with `data.record = true` lost no token and was given none twice, range by range."""

    folder: Annotated[Path, tyro.conf.Positional]
    """The run folder."""

    def run(self) -> int:
        """Return the exit code. Raises as ``check_record``."""
        settings = load_config(self.folder / "config.toml").data
        with progress_bar() as progress:
            corpus = prepare_corpus(settings, progress)
        num_steps = len(read_input(self.folder / "metrics.jsonl", 2**30).splitlines())
        check = check_record(self.folder / "data", num_steps, corpus, settings)
        print(
            f"{check.num_steps} steps in {check.num_attempts} attempts: {check.num_tokens} tokens, all as in the "
            "corpus, none lost, none doubled"
        )
        return 0


def document_lengths(corpus: Corpus) -> IntArray:
    """Return ``[D]`` the tokens of each document of a corpus, whether or not its documents were split into samples."""
    samples = corpus.samples
    begins = (np.diff(samples.part, prepend=-1) != 0) | (np.diff(samples.document, prepend=-1) != 0)
    return np.add.reduceat(samples.length, np.flatnonzero(begins))


def _print_metadata(console: Console, made: TokenMetadata, seconds: float, rate_seconds: float) -> None:
    rate = format_si(made.num_tokens / rate_seconds)
    console.print(
        f"{made.num_documents} documents, {made.num_tokens} tokens in {format_seconds(seconds)} ({rate} tokens/s); "
        f"longest document {made.longest_document_tokens} tokens ({format_count(made.longest_document_tokens)})"
    )
    if made.tokenizer is not None:
        console.print(f"tokenizer {made.tokenizer}: {made.vocab_size} ids, end of document {made.eos_id}")
    if made.num_empty_documents:
        console.print(f"left out: {made.num_empty_documents} empty documents")
    if made.skipped_files:
        console.print(f"left out: {len(made.skipped_files)} files that are not UTF-8 text, such as")
        for path in made.skipped_files[:_SHOWN_SKIPPED]:
            console.print(f"  {visible(str(path))}")


def _print_stats(console: Console, stats: LengthStats) -> None:
    table = Table(title="Documents by length in tokens", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("length", no_wrap=True)
    for name in ("docs", "% docs", "tokens", "% tokens", "% sum"):
        table.add_column(name, justify="right", no_wrap=True)
    so_far = np.cumsum(stats.token_share)
    for i, label in enumerate(stats.labels):
        table.add_row(
            label,
            str(stats.num_documents[i]),
            f"{100 * stats.document_share[i]:.1f}",
            format_si(int(stats.num_tokens[i])),
            f"{100 * stats.token_share[i]:.1f}",
            f"{100 * so_far[i]:.1f}",
        )
    console.print(table, soft_wrap=False)
    console.print(
        f"{stats.num_documents.sum()} documents, {stats.num_tokens.sum()} tokens; longest {stats.longest_tokens}. Half "
        f"of the documents have at most {stats.median_tokens} tokens; half of the tokens sit in documents of at most "
        f"{stats.median_token_tokens}."
    )


def _trained_runs(corpus: Corpus, document: Mapping[str, NDArray]) -> Iterator[dict[str, Any]]:
    """Runs of tokens that have the same weight, and of which all or none are their own label. The first has 0."""
    tokens = document["tokens"]
    weights = np.roll(document[WEIGHTS], 1)  # the last one has no label: 0
    labels = np.roll(document["labels"], 1)
    differs = (labels != tokens) & (weights != 0)
    changes = (np.diff(weights) != 0) | (np.diff(differs.astype(np.int8)) != 0)
    for start, stop in itertools.pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(tokens)]):
        yield {
            "start": start,
            "stop": stop,
            "weight": float(weights[start]),
            "text": _text(corpus, tokens[start:stop]),
            "predicted": _text(corpus, labels[start:stop]) if differs[start] else "",  # where it is another text
        }


def _text(corpus: Corpus, ids: NDArray) -> str:
    """The text of tokens, the end of a document by its name: whether it is trained on is what people look for."""
    if corpus.tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    parts = np.split(ids, np.flatnonzero(ids == corpus.tokenizer.eos_id))
    texts = [corpus.tokenizer.decode(part) for part in parts]  # each part but the first begins with the end of a text
    return corpus.tokenizer.eos_text.join(texts)


def _print_runs(console: Console, number: int, runs: list[dict[str, Any]]) -> None:
    def shortened(text: str) -> str:
        shown, half = repr(text), _SHOWN_CHARACTERS // 2
        return f"{shown[:half]} ... {shown[-half:]}" if len(shown) > _SHOWN_CHARACTERS else shown

    table = Table(title=f"Document {number}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("tokens", "weight"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text")
    for run in runs:
        shown = shortened(run["text"]) + (f" -> {shortened(run['predicted'])}" if run["predicted"] else "")
        style = "bold green" if run["weight"] else "dim"
        table.add_row(f"{run['start']}-{run['stop'] - 1}", f"{run['weight']:g}", Text(shown, style=style))
    console.print(table, soft_wrap=False)
    trained = sum(run["stop"] - run["start"] for run in runs if run["weight"])
    console.print(f"{trained} of {runs[-1]['stop']} tokens are trained on.")
