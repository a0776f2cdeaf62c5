"""Going on in a loop of one's own where ranks die and come (``HDP.recover``; ``runtime.members`` says how)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from bytescale.common.errors import ConfigError, RankFailure, RanksLost
from bytescale.hf.loop.session import Session
from bytescale.runtime.group import answered, limit_of
from bytescale.runtime.members import Members
from bytescale.runtime.optimizer.copies import restore_from_copies


class Recovery(Members):
    """What stays of a loop when ranks change. ``backend``: of WORLD."""

    backend: str

    def begin(self, hdp: Session, make_model: Callable[[], nn.Module] | None) -> None:
        """``HDP.keep_copies``, behind taking the others' states where this process has joined them."""
        domain = hdp.attach_anew.keywords["domain"]
        _require(not hdp.engine.others, "a second model is attached")
        _require(domain or hdp.mesh.domain.size == 1, 'shard = "parameters", and domain is no number')
        _require(make_model or self.shape.size == 1, "ranks have parts of the model, and model is None")
        self._make_model = make_model
        if self.generation:
            restore_from_copies(hdp.sharded(), self.copies, self.group)
        self.keep(hdp.sharded())

    def recover(self, hdp: Session, make_optimizer: Callable[[], object]) -> list[int]:
        """``HDP.recover``. ``make_optimizer``: as it was made."""
        lost, again = list[int](), None
        with suppress(RankFailure):  # one is lost, too
            for copies in self.copies if hdp.ranks_wait else ():
                copies.complete()
        while True:
            self.leave()
            self.next_generation(again)
            lost = lost or self.gone
            try:
                self.open_world()
                former = hdp.sharded()
                if self._make_model is not None:
                    hdp.model.__dict__ = vars(self._make_model())  # the loop has this object
                hdp.attach_anew()
                make_optimizer()
                hdp.sharded().stand_in_for(former)
                self.begin(hdp, self._make_model)
                return lost
            except RanksLost as error:
                again = error

    def open_world(self) -> None:
        with answered("ranks that were to meet did not all come"):
            dist.init_process_group(
                self.backend, store=self.groups_store(), rank=self.rank, world_size=self.size, timeout=self.timeout
            )


def recovery_of(hdp: Session, store: dist.Store | None) -> Recovery:
    """With the ranks of WORLD as its first members."""
    group, world = hdp.group, hdp.group.group
    _require(world is dist.group.WORLD, "the ranks are not those of WORLD, or there is one")
    assert world is not None, "there are several ranks"
    made = Recovery.at_first(store or _get_default_store(), group.rank, group.size)
    made.backend, made.timeout = dist.get_backend(), limit_of(world, group.device)
    made.opened(hdp.mesh)
    return made


def join(
    store: dist.Store, backend: str, *, timeout: timedelta = timedelta(minutes=30), wait_seconds: float = 3600.0
) -> Recovery:
    """Join a loop that other processes run, for ``HDP(..., joined=...)``: a new process calls it, and WORLD is open.

    The others take it in when their loop calls ``recover()``, behind a step or where one of them has died. From then on
    they wait for this process, so that it makes its model before. What they do in ``recover()``, it does by
    ``HDP(...)``, the optimizer and ``keep_copies()``, with nothing in between that waits for other ranks.

    Args:
        store: as they gave it to ``keep_copies``.
        backend: of WORLD, such as ``nccl``; ``timeout``: of its messages.
        wait_seconds: how long to wait to be taken in.

    Raises ``SystemExit`` if the loop has ended meanwhile (``HDP.detach``), ``RankFailure`` if it is not there.
    """
    made = Recovery.joining(store, wait_seconds)
    made.backend, made.timeout = backend, timeout
    made.open_world()
    return made


def _require(holds: object, what: str) -> None:
    if not holds:
        raise ConfigError(
            f"hdp.keep_copies() where {what}",
            so="nobody could go on without a rank that died",
            fix="leave it out, and continue from a checkpoint (hdp.save, hdp.load)",
        )
