"""The data of a run on one rank: read in this process, or by the servers of the remote loader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bytescale.config import Config
from bytescale.data import Feed, LocalFeed, prepare_corpus
from bytescale.train.ranks import Ranks


@contextmanager
def open_feed(config: Config, ranks: Ranks) -> Iterator[Feed]:
    """What ``data.loader`` names, for the time of the block; the corpus is made by whoever gets there first.

    Raises:
        ConfigError, DataError: as ``prepare_corpus``.
    """
    yield LocalFeed(prepare_corpus(config.data), config.data, ranks.hdp.rank)
