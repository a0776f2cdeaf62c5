"""The data of a run on one rank: read in this process, or by the servers of the remote loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bytescale.config import Config
from bytescale.data.feed import opened_feed
from bytescale.data.loading.loader import Feed, LocalFeed, Reader
from bytescale.data.loading.record import new_attempt_folder, recorder
from bytescale.runtime.plain_data import broadcast_json
from bytescale.train.parts.prefix_feed import PrefixFeed
from bytescale.train.ranks import Ranks
from bytescale.train.run_folder import RunFolder


@contextmanager
def open_feed(config: Config, ranks: Ranks, say: Callable[[str], None] = lambda line: None) -> Iterator[Feed]:
    """Open the loader that ``data.loader`` names, for the time of the block. Raises as ``opened_feed``."""

    def tell(items: list[Any]) -> None:
        items[:] = broadcast_json(items, ranks.checkpoint_group)

    reader = Reader(hdp_rank=ranks.hdp.rank, num_processes=ranks.world.size, is_first=ranks.is_first, tell=tell)
    local = PrefixFeed if config.data.share_prefixes else LocalFeed
    with opened_feed(config.data, reader, say, local=local) as feed:
        folder = RunFolder(Path(config.trainer.run_dir)).data
        about = {"num_ranks": ranks.hdp.size, "batch_tokens": config.data.batch_tokens}
        if config.data.record:
            feed.record = lambda: recorder(_new_attempt(folder, ranks, tell), ranks.hdp.rank, about)
        yield feed


def _new_attempt(folder: Path, ranks: Ranks, tell: Callable[[list[Any]], None]) -> Path | None:
    """The folder in which this attempt records its data; None on ranks with the same data as another of their mesh."""
    told: list[Any] = [str(new_attempt_folder(folder)) if ranks.is_first else ""]
    tell(told)
    return Path(told[0]) if ranks.mesh.stage == ranks.mesh.tp.rank == 0 else None
