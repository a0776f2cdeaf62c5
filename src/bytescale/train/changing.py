"""Ranks that come and go inside a run (``parallel.elastic``).

They go on as ``runtime.members`` says: the trainer builds its job anew for the ranks that there are. The step that was
under way begins again. Where a new rank waits, all do the same behind a whole step.

A step is *completed* when every rank has begun the next one: whatever belongs to it, its row, its evaluation and the
start of its checkpoint, is done then.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.manifest import RunState
from bytescale.common.errors import RankFailure, RanksLost
from bytescale.config.schema import Config
from bytescale.config.validate import validate_for_ranks_left
from bytescale.runtime.members import Members
from bytescale.runtime.optimizer.copies import restore_from_copies
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.plain_data import broadcast_json
from bytescale.train.stop import record_for_launcher

JOINS = "BYTESCALE_JOINS"
"""Environment variable of a process that joins a run which goes on; it is not empty."""
_JOIN_SECONDS = 1800.0
"""How long it waits to be taken in: a step may take minutes."""


class ChangingRanks:
    """What outlives the groups of ranks. Without ``parallel.elastic`` the ranks stay, and nothing is kept.

    Attributes:
        are_due: whether a new rank waits; the same on all ranks behind a step.
        unsaved: the state behind a change, of which there is no checkpoint yet.
    """

    def __init__(self, config: Config) -> None:
        self._config, self.is_elastic = config, config.parallel.elastic
        self.are_due, self._goes_on = False, True
        self.unsaved: RunState | None = None
        self._members: Members | None = None
        self._checkpoints: Checkpointer | None = None
        self._states: dict[int, RunState] = {}  # behind the last two steps
        self._completed: int | None = None
        self._change: tuple[float, list[int]] | None = None  # when it began, and the ranks that are gone

    def goes_on(self) -> bool:
        """Whether to begin with the ranks that there are: at first, and after each change."""
        goes_on, self._goes_on = self._goes_on, False
        if self._members is not None and not goes_on:
            self._members.end()
        return goes_on

    @property
    def has_changed(self) -> bool:
        return self._members is not None and self._members.generation > 0

    @property
    def members(self) -> Members:
        assert self._members is not None, "place() has been called"
        return self._members

    def place(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> tuple[dist.Store, int, int]:
        """Where the groups meet, this rank in them and their size, from what the launcher has said.

        Raises ``ConfigError`` where the ranks that are left cannot hold the context.
        """
        if not self.is_elastic:
            return store, rank, size
        self.are_due, self.unsaved, self._checkpoints = False, None, None
        if self._members is None:
            joins = JOINS in os.environ
            self._members = Members.joining(store, _JOIN_SECONDS) if joins else Members.at_first(store, rank, size)
        members, self._members.timeout = self._members, timeout
        if self.has_changed:
            validate_for_ranks_left(self._config, members.size)
        return members.groups_store(), members.rank, members.size

    def num_waiting(self) -> int:
        """New ranks that wait, and make a whole unit; see ``Members``."""
        return 0 if self._members is None else self._members.num_waiting()

    def goes_on_after(self, error: BaseException) -> bool:
        return isinstance(error, RanksLost) and self._members is not None and bool(self._members.copies)

    @contextmanager
    def survived(self) -> Iterator[None]:
        """Agree on the next ranks where the block ends because some were lost, or new ones wait."""
        try:
            yield
        except RanksLost as error:
            if not self.goes_on_after(error):
                raise
            self.leave()
            error.__traceback__ = error.__cause__ = error.__context__ = None  # they hold the model
            self._agree(error)
        else:
            if self.are_due:
                self._agree()

    @contextmanager
    def left_at_once(self) -> Iterator[None]:
        """Leave all groups where ranks are lost, before anything is closed that has threads which wait for them."""
        try:
            yield
        except RanksLost as error:
            if self.goes_on_after(error):
                self._change = time.monotonic(), []
                self.leave()
            raise
        if self._members is not None:
            self._members.end_watch()

    def leave(self) -> None:
        self.members.leave()
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _agree(self, error: RanksLost | None = None) -> None:
        members, began = self.members, self._change[0] if self._change else time.monotonic()
        try:
            members.next_generation(error)
        except RankFailure as failure:
            record_for_launcher(failure)
            raise
        self._change, self._goes_on = (began, members.gone), True
        gc.collect()
        if not members.copies:  # it was a spare
            self._states, self._completed, self._change = {}, None, None

    def restored(self, optimizer: ShardedOptimizer) -> RunState | None:
        """Fill the optimizer from the copies, after a change. None: there was no change.

        Raises ``CheckpointError`` if a rank's states are lost.
        """
        if not self.has_changed:
            return None
        group = self.members.group
        step = restore_from_copies(optimizer, self.members.copies, group, at_most=self._completed)
        told = broadcast_json(asdict(self._states[step]) if step in self._states else None, group)
        return RunState(**told)

    def begin(self, optimizer: ShardedOptimizer, state: RunState, checkpoints: Checkpointer) -> str:
        """Keep copies from now on, beside the state of the run. Every rank calls it. Returns what to tell people."""
        if not self.is_elastic:
            return ""
        self._checkpoints, members = checkpoints, self.members
        members.keep(optimizer)
        self._states, self._completed = {state.step: state}, state.step
        if not self.has_changed:
            return ""
        began, gone = self._change or (time.monotonic(), [])
        self._change = None
        lost = f"rank {', '.join(map(str, gone))} is gone, and " if gone else ""
        spares = len(members.spares)
        waiting = f"; {spares} more wait{'s' * (spares == 1)} for a whole copy of the model" if spares else ""
        later = f"{time.monotonic() - began:.1f} s later"
        return f"ranks   {lost}{members.size} go on behind step {state.step}, {later}{waiting}"

    def did(self, state: RunState) -> None:
        """Remember the state behind a step that this rank has done."""
        if self.is_elastic:
            self._states = {step: own for step, own in self._states.items() if step >= state.step - 1}
            self._states[state.step] = state

    def completed(self, step: int) -> None:
        self._completed = step
