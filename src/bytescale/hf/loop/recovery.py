"""Going on in a loop of one's own where ranks have died (``HDP.recover``)."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bytescale.common.environment import ranks_here
from bytescale.common.errors import ConfigError, RanksLost
from bytescale.hf.loop.session import Session
from bytescale.runtime.group import answered
from bytescale.runtime.members import Members
from bytescale.runtime.optimizer.copies import StateCopies, restore_from_copies


class Recovery:
    """What stays when ranks change: the members, and the copies of states that this rank keeps."""

    def __init__(self, hdp: Session, store: dist.Store | None, make_optimizer: Callable[[], object]) -> None:
        """``HDP.keep_copies``. ``make_optimizer``: as it was made."""
        mesh, world = hdp.mesh, hdp.group.group
        hdp.require("hdp.keep_copies")
        _require(mesh.tp.size == mesh.domain.size == 1, "ranks share parameters or matrices")
        _require(not hdp.engine.others, "a second model is attached")
        _require(world is dist.group.WORLD, "the ranks are not those of WORLD, or there is one")
        assert world is not None, "there are several ranks"
        self._hdp, self._per_node = hdp, ranks_here(hdp.group.size)
        self._backend, self._make_optimizer = dist.get_backend(), make_optimizer
        self._timeout = world._get_backend(hdp.group.device).options._timeout
        self._members = Members.at_first(store or _get_default_store(), hdp.group.rank, hdp.group.size)
        group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._members.introduce(group)
        self._kept = [StateCopies(hdp.sharded(), group, per_node=self._per_node)]

    def recover(self) -> list[int]:
        """``HDP.recover``."""
        members, lost, again = self._members, list[int](), None
        while True:
            members.leave(self._hdp.group.device)
            for copies in self._kept:
                copies.close()
            members.next_generation(again)
            lost = lost or members.gone
            try:
                self._go_on()
                return lost
            except RanksLost as error:
                again = error

    def _go_on(self) -> None:
        hdp, members = self._hdp, self._members
        with answered("ranks that were to meet did not all come"):
            dist.init_process_group(
                self._backend,
                store=members.groups_store(),
                rank=members.rank,
                world_size=members.size,
                timeout=self._timeout,
            )
            group = dist.new_group(backend="gloo", timeout=self._timeout)
            members.introduce(group)
        former = hdp.sharded()
        hdp.attach_anew()
        self._make_optimizer()
        hdp.sharded().stand_in_for(former)
        restore_from_copies(hdp.sharded(), self._kept, group)
        copies = StateCopies(hdp.sharded(), group, generation=members.generation, per_node=self._per_node)
        self._kept.append(copies)
        del self._kept[:-1]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ConfigError(
            f"hdp.keep_copies() where {what}",
            so="nobody could go on without a rank that died",
            fix="leave it out, and continue from a checkpoint (hdp.save, hdp.load)",
        )
