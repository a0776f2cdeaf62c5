"""Restarts a run from its last checkpoint after a rank has died, on as many ranks as before or as are available."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bytescale.common.errors import RankFailure, RanksRefused
from bytescale.config.schema import Config
from bytescale.config.validate import validate_for_ranks_left


def supervise(
    config: Config,
    start: Callable[[Config], None],
    *,
    max_restarts: int,
    ranks_there: Callable[[Config], int] | None = None,
    print_line: Callable[[str], None] = print,
) -> None:
    """Run ``start(config)`` until it ends well. Attempts after the first, ``max_restarts`` of them, resume the run.

    Args:
        start: starts all ranks and waits for them.
        ranks_there: returns how many ranks of a config can run now. It is called before each restart, so that a run
            shrinks and grows with its cluster. None: every attempt has as many ranks as the first.

    Raises:
        RankFailure: a rank failed and no restart is left, or starting again would not help.
        ConfigError: the ranks that are left cannot hold the context.
    """
    attempt = config
    for restarts_left in range(max_restarts, -1, -1):
        try:
            start(attempt)
            return
        except RanksRefused:
            raise
        except RankFailure as failure:
            if not restarts_left:
                raise
            print_line(f"{failure}")
            attempt = next_attempt(config, config.parallel.ranks if ranks_there is None else ranks_there(config))
            print_line(
                f"restarting on {attempt.parallel.ranks} ranks; {restarts_left - 1} restarts are left after this"
            )


def next_attempt(config: Config, num_ranks: int) -> Config:
    """The run resumed on ``num_ranks``, or as many of them as make a whole mesh.

    Raises ``ConfigError`` where these cannot hold the context.
    """
    num_ranks -= num_ranks % (config.parallel.tp * config.parallel.pp) if num_ranks < config.parallel.ranks else 0
    resumed = replace(config, trainer=replace(config.trainer, resume=True))
    validate_for_ranks_left(resumed, num_ranks)
    return replace(resumed, parallel=replace(config.parallel, ranks=num_ranks))
