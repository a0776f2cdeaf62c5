"""What a rank prepares before it joins the others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from bytescale.common.errors import ConfigError, RankFailure
from bytescale.config.schema import Config, ParallelConfig
from bytescale.parity import thread_ranks
from bytescale.runtime.group import RankGroup, limit_of
from bytescale.train import ranks
from bytescale.train.ranks import FILES_BESIDE_SOCKETS, group_options, leave_early, open_ranks, prepare_gloo
from tests.helpers.effort import one_of
from tests.helpers.forks import run_forked


def test_the_limit_of_open_files_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    limits = [(1024, 4096)]
    monkeypatch.setattr(ranks.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(ranks.resource, "setrlimit", lambda kind, limit: limits.append(limit))
    prepare_gloo(512)
    assert limits == [(1024, 4096)]
    prepare_gloo(2000)
    assert limits[-1] == (2000 + FILES_BESIDE_SOCKETS, 4096)
    with pytest.raises(ConfigError, match=r"may open 4096 files, and a gloo group over 4096 ranks needs up to 4352"):
        prepare_gloo(4096)
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    prepare_gloo(100_000)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_error_is_told_before_anything_can_wait(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destroying NCCL's groups may take for ever, so these are aborted."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    left = list[tuple[str, bool]]()
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks, "abort_process_groups", lambda: left.append(("aborted", file.exists())))
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda: left.append(("destroyed", file.exists())))
    leave_early(ValueError("the cause"), torch.device(device))
    assert left == [("aborted" if device == "cuda" else "destroyed", True)]
    assert "the cause" in file.read_text()


def test_groups_are_left_after_an_error() -> None:
    with pytest.raises(ValueError, match="the cause"), open_ranks(Config()):
        raise ValueError("the cause")
    assert not dist.is_initialized()
    with open_ranks(Config()) as opened:
        assert opened.world.size == 1


def test_a_message_may_take_half_an_hour_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[float]()

    def told(*_: object, timeout: timedelta, **__: object) -> None:
        given.append(timeout.total_seconds())
        raise InterruptedError

    monkeypatch.setattr(ranks.dist, "init_process_group", told)
    monkeypatch.setattr(ranks.torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(ranks, "group_options", lambda *_: None)
    for device, config in (
        ("cpu", Config()),
        ("cuda", Config()),
        ("cuda", Config(parallel=ParallelConfig(timeout_seconds=7))),
    ):
        monkeypatch.setattr(ranks, "choose_device", lambda *_, device=device: torch.device(device))
        with pytest.raises(InterruptedError), open_ranks(config):
            pass
    assert given == [120, 1800, 7]


def test_messages_that_computation_waits_for_go_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    gpu, limit = torch.device("cuda"), timedelta(seconds=1800)
    for name in ("world", "HDP 0", "HDP node 8", "TP 0", "pipeline forward 0 0", "pipeline backward 1 3"):
        options = group_options(name, gpu, limit)
        assert (options.is_high_priority_stream, options._timeout) == (True, limit)
    assert group_options("HDP gradients 0", gpu, limit) is None
    assert group_options("HDP 0", torch.device("cpu"), limit) is None


def test_ranks_close_their_groups_together() -> None:
    """Six times in the same processes. No rank closes its sockets before the slowest has written its last message."""

    def one_rank(rank: int) -> list[tuple[float, float]]:
        times = []
        for slow_rank in (2, 0, 1, 0, 2, 1):
            with open_ranks(Config()) as opened:
                assert opened.world.size == 3
                time.sleep(0.1 * (rank == slow_rank))
                ready = time.monotonic()
            times.append((ready, time.monotonic()))
        return times

    for ranks_times in zip(*run_forked(3, one_rank), strict=True):
        ready, closed = zip(*ranks_times, strict=True)
        assert min(closed) > max(ready)


def test_a_first_message_to_a_stopped_rank_keeps_the_time_limit() -> None:
    """Connected at their first message, ranks 0 and 2, which do not meet before, would take five times the limit."""
    first, measured, opened_all = multiprocessing.Value("i", 0), multiprocessing.Event(), multiprocessing.Barrier(4)
    config = replace(Config(), parallel=ParallelConfig(timeout_seconds=2.0))

    def one_rank(rank: int) -> float:
        seconds = 0.0
        with contextlib.suppress(RuntimeError, RankFailure), open_ranks(config) as opened:
            opened_all.wait(60)
            if rank == 0:
                first.value = os.getpid()
                os.kill(os.getpid(), signal.SIGSTOP)
            elif rank == 2:
                while not first.value or "T (stopped)" not in Path(f"/proc/{first.value}/status").read_text():
                    time.sleep(0.01)
                began = time.monotonic()
                with pytest.raises(RuntimeError, match=r"[Tt]ime"):
                    dist.recv(torch.empty(4), 0, group=opened.world.group)
                seconds = time.monotonic() - began
                os.kill(first.value, signal.SIGCONT)
                measured.set()
            measured.wait(60)  # a rank that leaves closes its sockets, and the message would fail by that
        return seconds

    assert 1.9 < run_forked(4, one_rank, timeout_seconds=60.0)[2] < 8.0


@pytest.mark.parametrize("lazy", one_of(["0", "1"], "0"))
def test_ranks_that_do_not_meet_have_no_socket(lazy: str) -> None:
    """Ten ranks, a ring and a sum: each knows its neighbours, and not all nine others in both of two groups."""

    all_have_ended = multiprocessing.get_context("fork").Barrier(10)

    def sockets() -> int:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sum(os.readlink(link).startswith("socket:") for link in links if os.path.exists(link))

    def one_rank(rank: int) -> int:
        os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
        before = sockets()
        dist.init_process_group("gloo")
        group = dist.new_group(backend="gloo")
        received, sent = torch.empty(4), torch.full((4,), float(rank))
        works = [group.recv([received], (rank - 1) % 10, 0), group.send([sent], (rank + 1) % 10, 0)]
        for work in works:
            work.wait()
        assert received[0] == (rank - 1) % 10
        total = torch.ones(8)
        dist.all_reduce(total, group=group)
        assert total[0] == 10
        made = sockets() - before
        all_have_ended.wait(300)  # gloo's own barrier fails now and then when a faster rank closes its sockets
        dist.destroy_process_group()
        return made

    most = max(run_forked(10, one_rank))
    assert (most < 18) == (lazy == "1"), most


def test_a_part_of_a_subset_does_not_split_the_communicator_of_all_ranks() -> None:
    """NCCL's split is a call of all of WORLD's ranks, and those outside of the subset do not come."""

    def one_rank(rank: int) -> list[object]:
        dist.init_process_group("gloo")
        world = dist.group.WORLD
        assert world is not None
        subset = dist.new_group([rank], use_local_synchronization=True)
        world.bound_device_id = torch.device("cuda:0")  # as of init_process_group(device_id=...)
        seen = []
        with patch.object(dist, "new_group", lambda members, **_: seen.append((members, world.bound_device_id))):
            RankGroup(subset).make_part("part", [0])
            seen.append(world.bound_device_id)
            RankGroup(world).make_part("part", [0, 1])
        world.bound_device_id = None
        dist.destroy_process_group()
        return seen

    device = torch.device("cuda:0")
    for rank, seen in enumerate(run_forked(2, one_rank)):
        assert seen == [([rank], None), device, ([0, 1], device)]


def test_parts_of_a_group_have_its_time_limit() -> None:
    """Whether PyTorch knows it by a name or not."""

    def limits(group: dist.ProcessGroup) -> list[float]:
        part = RankGroup(group).make_part("part", [0, 1])
        return [limit_of(own, torch.device("cpu")).total_seconds() for own in (group, part)]

    def one_rank(rank: int) -> list[float]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=37))
        world = dist.group.WORLD
        assert world is not None
        found = limits(world)
        dist.destroy_process_group()
        return found

    assert run_forked(2, one_rank) == [[37, 37]] * 2
    assert thread_ranks.run_ranks(2, limits, timeout_seconds=41) == [[41, 41]] * 2
