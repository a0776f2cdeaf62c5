"""Starts a run again after a rank has died, from its last checkpoint, on as many ranks as before or on fewer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bytescale.common.errors import ConfigError, RankFailure, RanksRefused
from bytescale.config import Config, validate


def supervise(
    config: Config,
    start: Callable[[Config], None],
    *,
    max_restarts: int,
    elastic: bool,
    print_line: Callable[[str], None] = print,
) -> None:
    """Run ``start(config)`` until it ends well.

    Args:
        config: of the first attempt; later ones resume it.
        start: starts all ranks and waits for them.
        max_restarts: attempts after the first.
        elastic: leave a rank out after each failure, as long as the rest can hold the context.
        print_line: told of each restart.

    Raises:
        RankFailure: a rank failed and no restart is left, or starting again would not help.
    """
    for restarts_left in range(max_restarts, -1, -1):
        try:
            start(config)
            return
        except RanksRefused:
            raise
        except RankFailure as failure:
            if not restarts_left:
                raise
            config = next_attempt(config, elastic=elastic)
            print_line(f"{failure}")
            print_line(f"restarting on {config.parallel.ranks} ranks; {restarts_left - 1} restarts are left after this")


def next_attempt(config: Config, *, elastic: bool) -> Config:
    """The same run resumed, with one rank less if ``elastic`` and if that is enough for the context."""
    resumed = replace(config, trainer=replace(config.trainer, resume=True))
    if not elastic or config.parallel.ranks == 1:
        return resumed
    step = config.parallel.tp * config.parallel.pp  # a mesh has no holes
    fewer = replace(resumed, parallel=replace(config.parallel, ranks=config.parallel.ranks - step))
    try:
        validate(fewer)
    except ConfigError:  # too few to hold the context: go on with as many as before
        return resumed
    return fewer
