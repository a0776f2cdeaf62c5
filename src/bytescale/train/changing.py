"""Ranks that come and go inside a run (``parallel.elastic``).

A rank that loses another one leaves all groups, which ends the waiting of the others, and agrees with them on who is
left (``runtime.members``). They open their groups again, build the job for their number, and fill it from the copies of
optimizer states that they have kept (``runtime.optimizer.copies``). The step that was under way begins again. Where a
new rank waits, all do the same behind a whole step.

A step is *completed* when every rank has begun the next one: whatever belongs to it, its row, its evaluation and the
start of its checkpoint, is done then.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict

import torch
import torch.distributed as dist

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.manifest import RunState
from bytescale.common.errors import ConfigError, RankFailure, RanksLost
from bytescale.config.schema import Config
from bytescale.config.validate import validate
from bytescale.runtime.members import Members
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.copies import StateCopies, restore_from_copies
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.plain_data import broadcast_json
from bytescale.train.stop import record_for_launcher

JOINS = "BYTESCALE_JOINS"
"""Environment variable of a process that joins a run which goes on: the number of ranks that the run began with."""
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
        parallel = config.parallel
        domain = parallel.domain if parallel.shard == "parameters" else 1
        self._unit = MeshShape(hdp=domain, tp=parallel.tp, pp=parallel.pp)
        self.are_due, self._goes_on = False, True
        self.unsaved: RunState | None = None
        self._members: Members | None = None
        self._group: dist.ProcessGroup | None = None
        self._copies_group: dist.ProcessGroup | None = None
        self._position = 0
        self._device = torch.device("cpu")
        self._per_node = 1
        self._checkpoints: Checkpointer | None = None
        self._kept: list[StateCopies] = []
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

    def place(self, store: dist.Store, rank: int, size: int) -> tuple[dist.Store, int, int]:
        """Where the groups meet, this rank in them and their size, from what the launcher has said.

        Raises ``ConfigError`` where the ranks that are left cannot hold the context.
        """
        if not self.is_elastic:
            return store, rank, size
        if self._members is None and JOINS in os.environ:
            self._members = Members.joining(store, int(os.environ[JOINS]), _JOIN_SECONDS, self._unit)
            if self._members is None:
                raise SystemExit(0)
        members = self._members = self._members or Members.at_first(store, rank, size, self._unit)
        if self.has_changed:
            try:
                validate(self._config, num_ranks=members.size)
            except ConfigError as error:
                raise ConfigError(
                    f"{members.size} ranks are left: {error}",
                    so="checkpoints written before are whole",
                    fix=f"continue on more ranks with `bytescale train --resume {self._config.trainer.run_dir}`",
                ) from error
        return members.groups_store(), members.rank, members.size

    def opened(self, mesh: Mesh, make_group: Callable[[list[int]], dist.ProcessGroup], ranks_per_node: int) -> None:
        """All groups are open. ``make_group``: of gloo. ``ranks_per_node``: of HDP ranks. Every rank calls it."""
        assert self._members is not None, "place() has been called"
        shape, world = mesh.shape, mesh.world
        self._group = self._copies_group = group = make_group(list(range(world.size)))
        if self._unit.size > 1:
            tp = mesh.tp.rank
            self._copies_group = make_group([shape.rank(mesh.stage, hdp, tp) for hdp in range(shape.hdp)])
        self._position = mesh.stage * shape.tp + mesh.tp.rank
        self._device, self._per_node = world.device, ranks_per_node
        self.are_due, self.unsaved, self._checkpoints = False, None, None
        self._members.introduce(group)

    def num_waiting(self) -> int:
        """New ranks that wait, and make a whole unit. For the first rank."""
        if self._members is not None:
            with suppress(RuntimeError):  # a store that is gone counts when ranks have to meet there
                return self._members.num_waiting()
        return 0

    def goes_on_after(self, error: BaseException) -> bool:
        return isinstance(error, RanksLost) and bool(self._kept)

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

    def leave(self) -> None:
        assert self._members is not None, "there are copies"
        self._members.leave(self._device)
        for copies in self._kept:
            copies.close()
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _agree(self, error: RanksLost | None = None) -> None:
        assert self._members is not None, "there are copies"
        began = self._change[0] if self._change else time.monotonic()
        try:
            self._members.next_generation(error)
        except RankFailure as failure:
            record_for_launcher(failure)
            raise
        self._change, self._goes_on = (began, self._members.gone), True
        gc.collect()
        if self._members.is_spare:
            self._kept, self._states, self._completed, self._change = [], {}, None, None
            if not self._members.wait_until_taken(math.inf):
                raise SystemExit(0)

    def restored(self, optimizer: ShardedOptimizer) -> RunState | None:
        """Fill the optimizer from the copies, after a change. None: there was no change.

        Raises ``CheckpointError`` if a rank's states are lost.
        """
        if not self.has_changed:
            return None
        step = restore_from_copies(optimizer, self._kept, self._group, at_most=self._completed)
        told = broadcast_json(asdict(self._states[step]) if step in self._states else None, self._group)
        return RunState(**told)

    def begin(self, optimizer: ShardedOptimizer, state: RunState, checkpoints: Checkpointer) -> str:
        """Keep copies from now on, beside the state of the run. Every rank calls it. Returns what to tell people."""
        if not self.is_elastic:
            return ""
        assert self._members is not None, "groups are open"
        assert self._copies_group is not None, "groups are open"
        generation = self._members.generation
        self._checkpoints = checkpoints
        self._kept.append(
            StateCopies(
                optimizer,
                self._copies_group,
                generation=generation,
                per_node=self._per_node,
                unit=self._unit.hdp,
                position=self._position,
            )
        )
        del self._kept[:-1]
        self._states, self._completed = {state.step: state}, state.step
        if not self.has_changed:
            return ""
        began, gone = self._change or (time.monotonic(), [])
        self._change = None
        lost = f"rank {', '.join(map(str, gone))} is gone, and " if gone else ""
        spares = len(self._members.spares)
        waiting = f"; {spares} more wait{'s' * (spares == 1)} for a whole copy of the model" if spares else ""
        later = f"{time.monotonic() - began:.1f} s later"
        return f"ranks   {lost}{self._members.size} go on behind step {state.step}, {later}{waiting}"

    def did(self, state: RunState) -> None:
        """Remember the state behind a step that this rank has done."""
        if self.is_elastic:
            self._states = {step: own for step, own in self._states.items() if step >= state.step - 1}
            self._states[state.step] = state

    def completed(self, step: int) -> None:
        self._completed = step
