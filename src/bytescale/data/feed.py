"""Opens the loader that ``data.loader`` names: this process reads, or the servers of the remote loader do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bytescale.common.units import format_bytes
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.loading.loader import Feed, LocalFeed, Reader
from bytescale.data.tokens.progress import Progress, ProgressCallback

_SAY_SECONDS = 5.0


@contextmanager
def opened_feed(
    data: DataConfig,
    reader: Reader,
    say: Callable[[str], None] = lambda line: None,
    *,
    local: type[LocalFeed] = LocalFeed,
) -> Iterator[Feed]:
    """Open the feed of one process for the time of the block. Every process calls it.

    The first process to arrive makes the corpus. ``say`` is called with lines for people while somebody has to wait.
    ``local``: what reads in this process.

    Raises ``ConfigError`` or ``DataError`` as ``prepare_corpus``, and if Ray is missing or does not answer.
    """
    if data.loader == "local":
        corpus = prepare_corpus(data, said_now_and_then(say), text_later=True, ahead=True)
        feed: Feed = local(corpus, data, reader.hdp_rank)
        try:
            yield feed
        finally:
            feed.close()
        return
    from bytescale.data.remote.ray_cluster import check_installed, joined_ray

    check_installed()
    with joined_ray(data.ray_address, reader) as session:
        from bytescale.data.remote.remote_feed import RemoteFeed

        feed = RemoteFeed(data, session, reader.hdp_rank, reader.num_processes, is_owner=reader.is_first, say=say)
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
