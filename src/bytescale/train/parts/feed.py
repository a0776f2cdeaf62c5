"""The data of a run on one rank: read in this process, or by the servers of the remote loader."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bytescale.common.units import format_bytes
from bytescale.config import Config
from bytescale.data import Feed, LocalFeed, prepare_corpus
from bytescale.data.loading.record import RecordingFeed, new_attempt_folder
from bytescale.data.tokens.progress import Progress, ProgressCallback
from bytescale.train.ranks import Ranks
from bytescale.train.run_folder import RunFolder

_SAY_SECONDS = 5.0


@contextmanager
def open_feed(config: Config, ranks: Ranks, say: Callable[[str], None] = lambda line: None) -> Iterator[Feed]:
    """Open the loader that ``data.loader`` names, for the time of the block.

    The first process to arrive makes the corpus.

    Raises:
        ConfigError, DataError: as ``prepare_corpus``, and if Ray is missing or does not answer.
    """
    with _chosen_feed(config, ranks, say) as feed:
        if not config.data.record:
            yield feed
            return
        folder = RunFolder(Path(config.trainer.run_dir)).data
        yield RecordingFeed(feed, ranks.hdp.rank, ranks.hdp.size, lambda: _new_attempt(folder, ranks))


@contextmanager
def _chosen_feed(config: Config, ranks: Ranks, say: Callable[[str], None]) -> Iterator[Feed]:
    if config.data.loader == "local":
        corpus = prepare_corpus(config.data, said_now_and_then(say), text_later=True, ahead=True)
        local = LocalFeed(corpus, config.data, ranks.hdp.rank)
        try:
            yield local
        finally:
            local.close()
        return
    from bytescale.data.remote.ray_cluster import check_installed

    check_installed()
    with _join_ray(config, ranks) as session:
        from bytescale.data.remote.remote_feed import RemoteFeed

        feed = RemoteFeed(config.data, session, ranks.hdp.rank, ranks.world.size, is_owner=ranks.is_first, say=say)
        try:
            yield feed
        finally:
            feed.close()


def said_now_and_then(say: Callable[[str], None]) -> ProgressCallback:
    """A progress callback that calls ``say`` at intervals, so that people see what the run is waiting for."""
    last = -math.inf

    def callback(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last > _SAY_SECONDS:
            last = time.monotonic()
            share = progress.done_bytes / max(1, progress.total_bytes)
            say(f"data    {progress.stage}: {share:.0%} of {format_bytes(progress.total_bytes)}")

    return callback


def _new_attempt(folder: Path, ranks: Ranks) -> Path | None:
    """The folder in which this attempt records its data. The first rank chooses it, once the run folder exists.

    None on ranks that get the same data as another rank: those that are not on the first stage, or not the first
    tensor-parallel rank.
    """
    told: list[Any] = [new_attempt_folder(folder) if ranks.is_first else None]
    dist.broadcast_object_list(told, src=0, group=ranks.checkpoint_group)
    return told[0] if ranks.mesh.stage == ranks.mesh.tp.rank == 0 else None


@contextmanager
def _join_ray(config: Config, ranks: Ranks) -> Iterator[str]:
    """Join the configured Ray cluster, or the one that the first rank starts. Yields a name unique to this attempt."""
    from bytescale.data.remote.ray_cluster import connect, disconnect, import_ray, is_joined, keys_to_join, ray_cluster

    if is_joined():  # a rank that Ray itself has started
        told: list[Any] = [f"bytescale-{uuid.uuid4().hex[:12]}"]
        dist.broadcast_object_list(told, src=0, group=ranks.checkpoint_group)
        yield told[0]
        return
    starts = ray_cluster(config.data.ray_address, ranks.world.size) if ranks.is_first else nullcontext("")
    with starts as address:
        told = [address, f"bytescale-{uuid.uuid4().hex[:12]}", keys_to_join()]
        dist.broadcast_object_list(told, src=0, group=ranks.checkpoint_group)
        address, session, keys = told
        os.environ.update(keys)  # before Ray is imported, which reads them once
        if not import_ray().is_initialized():
            connect(address)
        try:
            yield session
        finally:
            if not ranks.is_first:
                disconnect()
