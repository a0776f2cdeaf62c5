"""Opens the loader of a process. ``data.loader`` says who reads: this process, or the servers of the remote loader."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

from bytescale.common.units import format_bytes
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.loading.loader import Loader, Reader
from bytescale.data.tokens.progress import Progress, ProgressCallback, ignore_progress

logger = logging.getLogger(__name__)

_LOG_SECONDS = 5.0


@contextmanager
def opened_loader(
    data: DataConfig, reader: Reader, log: Callable[[str], None] = logger.warning, *, kind: type[Loader] = Loader
) -> Iterator[Loader]:
    """Open the loader of one process for the time of the block. Every process calls it.

    ``log`` is called with lines for people while somebody has to wait for tokens, in the first process alone.

    Raises ``ConfigError`` or ``DataError`` as ``prepare_corpus``, and if Ray is missing or does not answer.
    """
    progress = logged_now_and_then(log) if reader.is_first else ignore_progress
    with ExitStack() as opened:
        if data.loader == "local":
            corpus = opened.enter_context(closing(prepare_corpus(data, progress, text_later=True, ahead=True)))
        else:
            from bytescale.data.remote.ray_cluster import check_installed, joined_ray

            check_installed()
            session = opened.enter_context(joined_ray(reader))
            from bytescale.data.remote.served_corpus import served_corpus  # imports Ray, which reads its token once

            corpus = opened.enter_context(served_corpus(data, session, reader, progress))
        yield kind(corpus, data, reader.hdp_rank)


def logged_now_and_then(log: Callable[[str], None]) -> ProgressCallback:
    """A progress callback that calls ``log`` at intervals, so that people see what the run is waiting for."""
    last = -math.inf

    def callback(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last > _LOG_SECONDS:
            last = time.monotonic()
            share = progress.done_bytes / max(1, progress.total_bytes)
            log(f"data    {progress.stage}: {share:.0%} of {format_bytes(progress.total_bytes)}")

    return callback
