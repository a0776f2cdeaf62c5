"""Waiting for a rank that is gone ends where nothing else tells of it.

On CPUs, shut connections stand for NCCL's abort. A gloo host that waits for a process whose sockets stay open sleeps
on, as a host does that waits for a kernel.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bytescale.common.errors import RanksLost
from bytescale.runtime import members as members_file
from bytescale.runtime import watch as watch_file
from bytescale.runtime.group import ABORTED, RankGroup, answered
from bytescale.runtime.members import Members
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.plain_data import unpacked
from bytescale.runtime.sockets import listening_ports, shut_connections
from bytescale.runtime.watch import abort_nccl, watch
from tests.helpers.forks import run_forked
from tests.runtime.test_members import open_group

OF_ALONE = RankGroup()


WELL: Any = SimpleNamespace(get_error=lambda: SimpleNamespace(name="SUCCESS"))
"""A group of NCCL that has met no error."""


def watches() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "bytescale-watch"]


@contextmanager
def quick() -> Iterator[mock.Mock]:
    """Watches look often, and what would abort NCCL is counted."""
    with (
        mock.patch.object(watch_file, "_LOOK_SECONDS", 0.02),
        mock.patch.object(watch_file, "_nccl", return_value=[WELL]),
        mock.patch.object(watch_file, "abort_nccl") as aborted,
    ):
        yield aborted


def die_with_open_sockets(seconds: float) -> None:
    """Kill this process, whose sockets a copy of it keeps open for a while."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    for number in map(int, os.listdir("/proc/self/fd")):
        path = f"/proc/self/fd/{number}"
        if number > 2 and os.path.lexists(path) and not os.readlink(path).startswith("socket:"):
            os.close(number)
    time.sleep(seconds)
    os._exit(0)


@pytest.mark.parametrize("how", ["killed", "left on another machine"])
def test_a_host_wakes_up(tmp_path: Path, how: str) -> None:
    """Rank 0 waits for rank 1, which dies or leaves; its connections stay open."""

    def one_rank(rank: int) -> float:
        open_group(tmp_path, rank, 2)
        ports = [0, 0]
        dist.all_gather_object(ports, listening_ports())
        members = Members.at_first(dist.FileStore(str(tmp_path / "members"), 2), rank, 2)
        mesh = Mesh.of_hdp(RankGroup(dist.group.WORLD))
        mock.patch.object(members_file, "_machine", return_value="one" if how == "killed" else f"of {rank}").start()
        with quick() as aborted:
            aborted.side_effect = lambda: shut_connections({port for own in ports for port in own})
            members.opened(mesh)
            begun = time.monotonic()
            if rank == 1:
                time.sleep(0.3)
                if how == "killed":
                    die_with_open_sockets(8.0)
                members.end_watch()
                members.store.set("left/0", "")
                time.sleep(4.0)
                return 0.0
            with pytest.raises(RanksLost):
                mesh.world.all_reduce(torch.ones(3))
            woken = time.monotonic() - begun
            members.end_watch()
        return woken

    woken = run_forked(2, one_rank, timeout_seconds=30, lost={1} if how == "killed" else ())[0]
    assert woken < 3.0


def test_without_a_watch_it_sleeps_on(tmp_path: Path) -> None:
    """The slow twin: what the other tests show is the watch's doing."""

    def one_rank(rank: int) -> bool:
        open_group(tmp_path, rank, 2)
        if rank == 1:
            die_with_open_sockets(3.0)
        work = dist.irecv(torch.zeros(3), 1)
        assert work is not None
        time.sleep(2.0)
        return work.is_completed()

    assert run_forked(2, one_rank, timeout_seconds=30, lost={1})[0] is False


class Waited:
    """Numbers on a device: the host waits for them until an abort, which raises nothing."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def tolist(self) -> list[float]:
        assert self.released.wait(10.0)
        return [float("nan")]


def test_what_is_read_behind_an_abort_is_no_result() -> None:
    numbers: Any = Waited()
    with quick() as aborted:
        aborted.side_effect = numbers.released.set
        end = watch(lambda: True, bool)
        with pytest.raises(RanksLost, match="a rank is gone"):
            OF_ALONE.read(numbers)
        end()
    assert aborted.call_count == 1
    assert OF_ALONE.read(torch.ones(2)) == [1.0, 1.0]


def test_garbage_of_an_abort_is_told_as_a_lost_rank() -> None:
    """Sizes and JSON that nobody has sent raise all kinds of errors."""
    with pytest.raises(ValueError), answered("this"):
        unpacked(torch.zeros(4, dtype=torch.uint8))
    ABORTED.set()
    try:
        with pytest.raises(RanksLost, match="this: "), answered("this"):
            unpacked(torch.zeros(4, dtype=torch.uint8))
    finally:
        ABORTED.clear()


def test_behind_its_end_nothing_is_aborted() -> None:
    lost = threading.Event()
    with quick() as aborted:
        end = watch(lost.is_set, bool)
        end()
        lost.set()
        time.sleep(0.1)
        assert not watches()
    aborted.assert_not_called()
    assert not ABORTED.is_set()


@pytest.mark.parametrize("told", ["TIMEOUT", "COMM_ERROR"])
def test_an_error_of_nccl_aborts_every_group_once(told: str) -> None:
    """Of one group NCCL tells; all that are of NCCL are aborted in one group call, and gloo's are not."""
    calls = list[str]()

    def group(name: str, error: str) -> Any:
        backend = SimpleNamespace(
            get_error=lambda: SimpleNamespace(name=error),
            abort=lambda: calls.append(name),
            _group_start=lambda: calls.append("start"),
            _group_end=lambda: calls.append("end"),
        )
        return SimpleNamespace(_get_backend=lambda device: backend)

    groups = [group("world", "SUCCESS"), group("ring", told), group("gloo", told)]
    kinds = [("cuda:nccl"), ("cpu:gloo,cuda:nccl"), ("cpu:gloo,cuda:gloo")]
    known = SimpleNamespace(items=lambda: list(zip(groups, kinds, strict=True)))
    with (
        mock.patch.object(watch_file, "_LOOK_SECONDS", 0.02),
        mock.patch.object(watch_file, "_world", SimpleNamespace(pg_backend_config=known)),
    ):
        end = watch(lambda: False, bool)
        until = time.monotonic() + 10.0
        while "end" not in calls and time.monotonic() < until:
            time.sleep(0.02)
        end()
        assert calls == ["start", "world", "ring", "end"]
        abort_nccl()  # as ``leave`` does


def test_a_rank_tells_that_it_lives_from_a_loss_on_until_it_comes() -> None:
    lost, told = threading.Event(), list[float]()
    with quick() as aborted, mock.patch.object(watch_file, "_nccl", return_value=[]):
        end = watch(lost.is_set, lambda: told.append(time.monotonic()))
        time.sleep(0.2)
        assert not told
        lost.set()
        until = time.monotonic() + 10.0
        while len(told) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        assert not ABORTED.is_set(), "on CPUs nothing is aborted"
        end()
    assert len(told) >= 3
    aborted.assert_not_called()
    assert not watches()


def test_who_ends_is_not_lost() -> None:
    """A rank that has left the groups is lost, and nobody is once the run has ended."""
    store = dist.HashStore()
    first, second = (Members.at_first(store, rank, 2) for rank in range(2))
    assert not first.has_lost()
    second.leave()
    assert first.has_lost()
    second.end()
    assert not first.has_lost()
