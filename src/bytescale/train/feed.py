"""The data of a run on one rank: read in this process, or by the servers of the remote loader."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from bytescale.config import Config
from bytescale.data import Feed, LocalFeed, prepare_corpus
from bytescale.train.ranks import Ranks


@contextmanager
def open_feed(config: Config, ranks: Ranks) -> Iterator[Feed]:
    """What ``data.loader`` names, for the time of the block; the corpus is made by whoever gets there first.

    Raises:
        ConfigError, DataError: as ``prepare_corpus``; and where Ray is missing or does not answer.
    """
    if config.data.loader == "local":
        yield LocalFeed(prepare_corpus(config.data), config.data, ranks.hdp.rank)
        return
    from bytescale.data.remote.cluster import check_installed

    check_installed()
    with _join_ray(config, ranks) as session:
        from bytescale.data.remote.feed import RemoteFeed

        feed = RemoteFeed(config.data, session, ranks.hdp.rank, ranks.hdp.size)
        try:
            yield feed
        finally:
            feed.close()


@contextmanager
def _join_ray(config: Config, ranks: Ranks) -> Iterator[str]:
    """Join the configured Ray, or the one that the first rank starts; yields a name that this attempt alone has."""
    from bytescale.data.remote.cluster import connect, disconnect, import_ray, is_joined, keys_to_join, ray_cluster

    if is_joined():  # a rank that Ray itself has started
        told: list[Any] = [f"bytescale-{uuid.uuid4().hex[:12]}"]
        dist.broadcast_object_list(told, src=0, group=ranks.checkpoint_group)
        yield told[0]
        return
    starts = ray_cluster(config.data.ray_address, ranks.hdp.size) if ranks.is_first else nullcontext("")
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
