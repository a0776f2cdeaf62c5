"""``bytescale data``: the commands ``tokenize``, ``stats``, ``show`` and ``audit``."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from bytescale.cli.options import parse
from bytescale.cli.trained_tokens import print_runs, runs_of_documents
from bytescale.common.arrays import IntArray
from bytescale.common.errors import ConfigError
from bytescale.common.limits import limits
from bytescale.common.text import visible
from bytescale.common.units import format_bytes, format_count, format_seconds, format_si
from bytescale.config import load_config
from bytescale.config.schema import CorpusConfig, DataConfig
from bytescale.data.length_distributions import bucket_edges, token_shares
from bytescale.data.loading.corpus import Corpus, choose_tokenizer, list_sources, prepare_corpus
from bytescale.data.loading.record import check_record
from bytescale.data.sources.files import SourceFile
from bytescale.data.stats import BUCKET_EDGES, LengthStats, length_stats
from bytescale.data.tokens.indexed import pair_paths, read_index
from bytescale.data.tokens.metadata import TokenMetadata
from bytescale.data.tokens.progress import progress_bar
from bytescale.data.tokens.shards import ShardReader, write_as_pair

_SHOWN_SKIPPED = 5


@dataclass(slots=True, kw_only=True)
class CorpusOptions(CorpusConfig):
    """The options with which a command reads a corpus. They mean the same as in the ``[data]`` section."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders, files, globs or URLs (s3://, webhdfs://, hdfs://, http://); `python:stdlib` is Python's own library, and
    `python:functions` the functions of it."""
    tokenizer: str = "bytes"
    """`bytes`, the path of a tokenizer.json, or `bpe` to train one on the sources (cached)."""

    def data_config(self) -> DataConfig:
        """Return the ``[data]`` section with these options."""
        return DataConfig(**{spec.name: getattr(self, spec.name) for spec in fields(CorpusOptions)})


@dataclass(slots=True, kw_only=True)
class TokenizeConfig(CorpusOptions):
    """Turn folders, text, JSONL, Parquet or .bin/.idx files into one Megatron .bin/.idx pair."""

    output: str
    """Prefix of the files: OUTPUT.bin, OUTPUT.idx, and OUTPUT.meta.json, which says how they were made."""
    read_retries: int = field(default=3, metadata=limits(least=0))
    """How many times a failing read is tried again, after 0.5, 1, 2, ... seconds."""
    overwrite: bool = False
    """Replace OUTPUT if it exists."""
    dry_run: bool = False
    """List what would be read, and write nothing."""


@dataclass(slots=True, kw_only=True)
class StatsConfig(CorpusOptions):
    """Show how the tokens of a corpus are distributed over document lengths. Of an .idx file, only these are read."""

    compare: tuple[Literal["github", "byted"], ...] = field(default=("github",))
    """Length distributions of the paper to print beside the corpus."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(slots=True, kw_only=True)
class ShowConfig(CorpusOptions):
    """Show what is trained on: runs of tokens with the same weight, in the first documents of a corpus."""

    documents: int = 3
    """Number of documents to show."""
    json: bool = False
    """Print one JSON object per run instead of a table."""


@dataclass(slots=True, kw_only=True)
class AuditConfig:
    """Check that a run with `data.record = true` lost no token and was given none twice, range by range."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run folder."""


def run(arguments: Sequence[str]) -> int:
    """Run ``bytescale data tokenize``, ``stats``, ``show`` or ``audit``. Returns the exit code."""
    name, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if name == "tokenize":
        return tokenize_command(parse(TokenizeConfig, rest, prog="bytescale data tokenize"))
    if name == "stats":
        return stats_command(parse(StatsConfig, rest, prog="bytescale data stats"))
    if name == "show":
        return show_command(parse(ShowConfig, rest, prog="bytescale data show"))
    if name == "audit":
        return audit_command(parse(AuditConfig, rest, prog="bytescale data audit"))
    usage = (
        "bytescale data tokenize SOURCE ... --output PREFIX   turn text, JSONL or Parquet into PREFIX.bin and .idx\n"
        "bytescale data stats SOURCE ...                      how the tokens are distributed over document lengths\n"
        "bytescale data show SOURCE ...                       which tokens are trained on, with which weights\n"
        "bytescale data audit RUN_FOLDER                      check that a run lost no token and had none twice\n"
        "\n`bytescale data tokenize --help` and so on list the options."
    )
    if name in ("-h", "--help"):
        print(usage)
        return 0
    raise ConfigError(f"`bytescale data {name}` is not a command".replace("  ", " "), fix=usage)


def tokenize_command(config: TokenizeConfig) -> int:
    """Run ``bytescale data tokenize``. Returns the exit code; raises what ``write_as_pair`` raises."""
    console, data = Console(soft_wrap=True), replace(config.data_config(), read_retries=config.read_retries)
    prefix = Path(config.output).expanduser()
    bin_path, idx_path = pair_paths(prefix)
    files = list_sources(data)
    _check_output(config, files, bin_path, idx_path)
    total_bytes = sum(file.num_bytes for file in files)
    console.print(f"{len(files)} files, {format_bytes(total_bytes)} -> {bin_path}, {idx_path.name}")
    if config.dry_run:
        _print_formats(console, files)
        return 0
    started = time.perf_counter()
    with progress_bar() as progress:
        reader = ShardReader.of(data, choose_tokenizer(data, files, progress))
        tokenizing = time.perf_counter()
        runs = itertools.groupby(files, key=lambda file: file.format == "bin")  # the pair has the order of the files
        shards = [shard for _, run in runs for shard in reader.plan(list(run))]
        metadata = write_as_pair(reader, shards, prefix, config.num_workers, progress)
    _print_metadata(
        console, metadata, seconds=time.perf_counter() - started, rate_seconds=time.perf_counter() - tokenizing
    )
    console.print(
        f"Next: bytescale data stats {bin_path}, or train with data.sources = [{str(bin_path)!r}]", markup=False
    )
    return 0


def stats_command(config: StatsConfig) -> int:
    """Run ``bytescale data stats``. Returns the exit code; raises what ``prepare_corpus`` raises."""
    if config.sources and all(source.endswith(".idx") and "://" not in source for source in config.sources):
        lengths = np.concatenate([read_index(Path(source).expanduser()).document_lengths for source in config.sources])
    else:
        with progress_bar() as progress:
            lengths = document_lengths(prepare_corpus(config.data_config(), progress))
    stats = length_stats(lengths)
    if config.json:
        print(json.dumps(_stats_as_dict(stats)))
    else:
        _print_stats(Console(soft_wrap=True), stats, config.compare)
    return 0


def show_command(config: ShowConfig) -> int:
    """Run ``bytescale data show``. Returns the exit code; raises what ``prepare_corpus`` raises."""
    with progress_bar() as progress:
        corpus = prepare_corpus(replace(config.data_config(), context_length=2**62), progress)
    shown = runs_of_documents(corpus, config.documents)
    if config.json:
        for row in shown:
            print(json.dumps(asdict(row), ensure_ascii=False))
    else:
        print_runs(Console(soft_wrap=True), shown)
    return 0


def audit_command(config: AuditConfig) -> int:
    """Run ``bytescale data audit``. Returns the exit code; raises what ``check_record`` raises."""
    settings = load_config(config.run / "config.toml").data
    with progress_bar() as progress:
        corpus = prepare_corpus(settings, progress)
    num_steps = len((config.run / "metrics.jsonl").read_bytes().splitlines())
    check = check_record(config.run / "data", num_steps, corpus, settings)
    print(
        f"{check.num_steps} steps in {check.num_attempts} attempts: {check.num_tokens} tokens, all as in the corpus, "
        "none lost, none doubled"
    )
    return 0


def document_lengths(corpus: Corpus) -> IntArray:
    """Return ``[D]`` the tokens of each document of a corpus, whether or not its documents were split into samples."""
    samples = corpus.samples
    begins = (np.diff(samples.part, prepend=-1) != 0) | (np.diff(samples.document, prepend=-1) != 0)
    return np.add.reduceat(samples.length, np.flatnonzero(begins))


def _check_output(config: TokenizeConfig, files: list[SourceFile], bin_path: Path, idx_path: Path) -> None:
    if bin_path.absolute() in {file.path for file in files}:
        raise ConfigError(
            f"{bin_path} is both a source and the output", so="the source would be lost", fix="name another output"
        )
    if idx_path.exists() and not config.overwrite:
        raise ConfigError(
            f"{idx_path} exists", so="it would be replaced", fix="name another output or pass --overwrite"
        )


def _print_formats(console: Console, files: list[SourceFile]) -> None:
    for file_format in sorted({file.format for file in files}):
        chosen = [file for file in files if file.format == file_format]
        console.print(f"  {file_format}: {len(chosen)} files, {format_bytes(sum(file.num_bytes for file in chosen))}")
    console.print("Nothing was written (--dry-run).")


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
            console.print(f"  {visible(str(path))}", markup=False)


def _print_stats(console: Console, stats: LengthStats, compare: tuple[str, ...]) -> None:
    table = Table(title="Documents by length in tokens", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("length", no_wrap=True)
    names = ("docs", "% docs", "tokens", "% tokens", "% sum")
    for name in (*names, *(f"{name} %" for name in compare)):
        table.add_column(name, justify="right", no_wrap=True)
    so_far = np.cumsum(stats.token_share)
    published = [_published_shares(name) for name in compare]
    for i, label in enumerate(stats.labels):
        table.add_row(
            label,
            str(stats.num_documents[i]),
            f"{100 * stats.document_share[i]:.1f}",
            format_si(int(stats.num_tokens[i])),
            f"{100 * stats.token_share[i]:.1f}",
            f"{100 * so_far[i]:.1f}",
            *(shares[i] for shares in published),
        )
    console.print(table, soft_wrap=False)
    console.print(
        f"{stats.num_documents.sum()} documents, {stats.num_tokens.sum()} tokens; longest {stats.longest_tokens}. Half "
        f"of the documents have at most {stats.median_tokens} tokens; half of the tokens sit in documents of at most "
        f"{stats.median_token_tokens}."
    )


def _published_shares(name: str) -> list[str]:
    """Return the published share of each bucket, on the line of the bucket's upper edge. The first is 512 to 2K."""
    shares = dict(zip(bucket_edges()[1:].tolist(), token_shares(name).tolist(), strict=True))
    return [f"{100 * shares[edge]:.1f}" if edge in shares else "" for edge in [*BUCKET_EDGES.tolist(), -1]]


def _stats_as_dict(stats: LengthStats) -> dict[str, object]:
    return {
        "upper_edges_tokens": BUCKET_EDGES.tolist(),
        "num_documents": stats.num_documents.tolist(),
        "num_tokens": stats.num_tokens.tolist(),
        "longest_tokens": stats.longest_tokens,
        "median_tokens": stats.median_tokens,
        "median_token_tokens": stats.median_token_tokens,
    }
