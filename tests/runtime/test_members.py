"""Who is left, and how waiting for those who are not ends."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bytescale.common.errors import RankFailure
from bytescale.runtime import members as members_file
from bytescale.runtime.members import Members
from bytescale.runtime.sockets import listening_ports, shut_connections
from bytescale.runtime.watch import watch
from tests.helpers.forks import run_forked


def open_group(tmp_path: Path, rank: int, size: int) -> None:
    store = dist.FileStore(str(tmp_path / "store"), size)
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    dist.all_reduce(torch.ones(3))


def seconds_until_error(source: int, begun: list[float]) -> float:
    with pytest.raises(RuntimeError):
        dist.recv(torch.zeros(4), source)
    return time.monotonic() - begun[0]


@pytest.mark.parametrize("shuts", [False, True])
def test_shut_connections_end_the_waiting_at_both_ends(tmp_path: Path, shuts: bool) -> None:
    """Of two ranks that wait for each other, one leaves. PyTorch's own abort ends neither wait: that is why we shut."""

    def one_rank(rank: int) -> float:
        open_group(tmp_path, rank, 2)
        ports = [0, 0]
        dist.all_gather_object(ports, listening_ports())
        begun = [time.monotonic()]
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(seconds_until_error, 1 - rank, begun)
            time.sleep(0.3)
            if rank == 0 and shuts:
                shut_connections({port for own in ports for port in own})
            elif rank == 0:
                dist.group.WORLD._get_backend(torch.device("cpu")).abort()
                time.sleep(1.5)
                assert not waiting.done()
                shut_connections({port for own in ports for port in own})
            return waiting.result()

    low, high = (0.2, 1.3) if shuts else (1.7, 5.0)
    assert all(low < seconds < high for seconds in run_forked(2, one_rank, timeout_seconds=30))


def agree(*present: Members) -> list[Any]:
    """What comes of ``next_generation`` for each of them, at the same time."""

    def one(members: Members) -> Any:
        try:
            members.next_generation()
        except RankFailure as error:
            return error
        return members.numbers, members.rank, members.gone

    with ThreadPoolExecutor(len(present)) as threads:
        return list(threads.map(one, present))


def test_members_agree_on_who_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without word of their machines, they wait for a while. Who comes later is told that it is too late."""
    monkeypatch.setattr(members_file, "GRACE_SECONDS", 0.3)
    store = dist.HashStore()
    four = [Members.at_first(store, rank, 4) for rank in range(4)]
    assert agree(four[3], four[0], four[2]) == [([0, 2, 3], rank, [1]) for rank in (2, 0, 1)]
    assert "came too late" in str(agree(four[1])[0])


@pytest.mark.parametrize("lives", [True, False])
def test_who_computes_for_long_is_waited_for(monkeypatch: pytest.MonkeyPatch, lives: bool) -> None:
    """Rank 1 dies while rank 2 computes for longer than silent ranks are waited for. Its watch tells that it lives."""
    monkeypatch.setattr(members_file, "GRACE_SECONDS", 0.5)
    store = dist.HashStore()
    first, _dead, busy = (Members.at_first(store, rank, 3) for rank in range(3))
    end = watch(busy.has_lost, busy._tell_life) if lives else bool

    def compute() -> Any:
        time.sleep(2.5)
        end()
        return agree(busy)[0]

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(compute)
        first.leave()
        (agreed,) = agree(first)
        came = coming.result()
    assert agreed == (([0, 2], 0, [1]) if lives else ([0], 0, [1, 2]))
    assert came == ([0, 2], 1, [1]) if lives else "came too late" in str(came)


@pytest.mark.parametrize("known", [True, False], ids=["its process is gone", "it tells nothing any more"])
def test_the_next_one_proposes_where_the_first_that_came_dies(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    monkeypatch.setattr(members_file, "GRACE_SECONDS", 0.3)
    store = dist.HashStore()
    four = [Members.at_first(store, rank, 4) for rank in range(4)]
    first = four[2].store
    first.set(f"there/0/{first.add('there/0', 1)}", "2")
    if known:
        for members in four:
            members._about[2] = {**members_file._about_this_process(), "start": "0"}
    numbers = [0, 1, 3] if known else [0, 1, 2, 3]  # it came, and nobody can see that it is gone: they find out
    assert [agreed[0] for agreed in agree(four[3], four[0], four[1])] == [numbers] * 3


def test_who_lives_and_never_comes_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_file, "GRACE_SECONDS", 0.2)
    first, stuck = (Members.at_first(dist.HashStore(), rank, 2) for rank in range(2))
    first.timeout, stuck.store = timedelta(seconds=1.5), first.store
    with ThreadPoolExecutor(1) as thread:
        begun, agreed = time.monotonic(), thread.submit(agree, first)
        while not agreed.done():
            stuck._tell_life()
            time.sleep(0.05)
    assert agreed.result() == [([0], 0, [1])]
    assert 1.4 < time.monotonic() - begun < 4.0


def test_a_new_process_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_file, "GRACE_SECONDS", 0.3)
    store = dist.HashStore()
    two = [Members.at_first(store, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(Members.joining, store, 20.0)
        until = time.monotonic() + 10.0
        while not two[0].num_waiting() and time.monotonic() < until:
            time.sleep(0.01)
        assert agree(*two) == [([0, 1, -1], 0, []), ([0, 1, -1], 1, [])]
        made = joining.result()
    assert (made.numbers, made.rank, made.former) == ([0, 1, -1], 2, [0, 1, None])
    assert made.generation == two[0].generation == 1
    assert two[0].num_waiting() == 0


def test_who_waits_ends_with_the_run() -> None:
    store = dist.HashStore()
    first = Members.at_first(store, 0, 1)
    threading.Timer(0.2, first.end).start()
    with pytest.raises(SystemExit):
        Members.joining(store, 20.0)
    with pytest.raises(RankFailure, match="did not take this process in within 0 s"):
        Members.joining(dist.HashStore(), 0.1)
