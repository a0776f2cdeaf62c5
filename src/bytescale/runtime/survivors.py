"""What outlives a rank's groups where ranks die and come: who the members are, and the copies that this rank keeps.

The trainer (``train.changing``) and loops of one's own (``hf.loop.recovery``) go the same way. A rank that loses
another one leaves all groups, which ends the waiting of the others, and agrees with them on who is left
(``runtime.members``). They open groups again, build what they train for their new places, and fill it from copies
(``runtime.optimizer.copies``).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from bytescale.common.environment import ranks_here
from bytescale.common.errors import RanksLost
from bytescale.runtime.members import Members
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.copies import StateCopies, restore_from_copies
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.watch import Watch, abort_nccl, nccl_has_failed


class Survivors:
    """The members of a run, and the copies of optimizer states from which this one goes on.

    Attributes:
        group: of gloo, over all ranks of this generation.
        has_copies: whether this rank could go on without another one.
    """

    group: dist.ProcessGroup
    _copies_group: dist.ProcessGroup
    _position = 0

    def __init__(self, members: Members, timeout: timedelta) -> None:
        """``timeout``: of the groups that it makes."""
        self.members, self._timeout = members, timeout
        self._device, self._per_node = torch.device("cpu"), 1
        self._kept: list[StateCopies] = []
        self._watch: Watch | None = None

    @property
    def has_copies(self) -> bool:
        return bool(self._kept)

    def opened(self, mesh: Mesh) -> None:
        """All groups of ``mesh`` are open. Every rank calls it."""
        make = partial(dist.new_group, backend="gloo", timeout=self._timeout, use_local_synchronization=True)
        shape, tp = mesh.shape, mesh.tp.rank
        unit = MeshShape(hdp=mesh.domain.size, tp=shape.tp, pp=shape.pp)
        self.group = self._copies_group = make(list(range(mesh.world.size)))
        if unit.size > 1:
            self._copies_group = make([shape.rank(mesh.stage, hdp, tp) for hdp in range(shape.hdp)])
        self._position, self._device = mesh.stage * shape.tp + tp, mesh.world.device
        per_node = int(mesh.world.min_of([ranks_here(mesh.world.size)])[0])
        self._per_node = max(1, per_node // shape.tp)
        self.members.introduce(self.group, unit)
        if self._device.type == "cuda":
            self.watch(mesh, lambda: self.members.has_lost() or nccl_has_failed(), abort_nccl)

    def watch(self, mesh: Mesh, has_lost: Callable[[], bool], abort: Callable[[], None]) -> None:
        self._watch = Watch(has_lost, abort)
        for group in mesh.groups:
            group.was_aborted = self._watch.has_aborted

    def end_watch(self) -> None:
        """From now on others may end."""
        if self._watch is not None:
            self._watch.stop()

    def num_waiting(self) -> int:
        """New processes that wait, and make a whole unit, on the first rank; 0 on others."""
        with suppress(RuntimeError):  # a store that is gone counts when ranks have to meet there
            return 0 if self.members.rank else self.members.num_waiting()
        return 0

    def settle(self) -> None:
        """Wait until every rank has its copies of the last update. Raises ``RankFailure``."""
        for copies in self._kept:
            copies.complete()

    def leave(self) -> None:
        """Leave all groups, behind an error or a step. What is complete of the copies is kept."""
        self.end_watch()
        self.members.leave(self._device)
        for copies in self._kept:
            copies.close()

    def agree(self, error: RanksLost | None = None) -> None:
        """Agree on the next members, behind ``leave``; a spare waits until it is one. Raises as ``next_generation``.

        Raises ``SystemExit`` on a spare whose run has ended without it.
        """
        self.members.next_generation(error)
        gc.collect()
        if self.members.is_spare:
            self._kept = []
            if not self.members.wait_until_taken(math.inf):
                raise SystemExit(0)

    def restore(self, optimizer: ShardedOptimizer, at_most: int | None = None) -> int:
        """See ``restore_from_copies``."""
        return restore_from_copies(optimizer, self._kept, self.group, at_most=at_most)

    def keep(self, optimizer: ShardedOptimizer) -> None:
        """Keep copies of these ranks' states in place of all former ones. Every rank calls it."""
        members = self.members
        copies = StateCopies(
            optimizer, self._copies_group, generation=members.generation, per_node=self._per_node,
            unit=members.shape.hdp, position=self._position,
        )  # fmt: skip
        self._kept.append(copies)  # beside the former ones, until all ranks have theirs
        copies.complete()
        del self._kept[:-1]
