"""The cluster of ``benchmarks/cluster``: links have the rate that they were given, and nothing stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.cluster import network
from benchmarks.cluster.network import HOSTS, NAMESPACES, Link, Network, Node, missing, missing_for_quotas

from bytescale.common.errors import ConfigError
from tests.helpers.effort import one_of

ROOT = Path(__file__).parents[1]
needs_cluster = pytest.mark.skipif(bool(missing()), reason="; ".join(missing()))

RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 5000))
open({ready!r}, "w").close()
connection, _ = server.accept()
while connection.recv(65536):
    pass
print(time.perf_counter())
"""
SEND = """
import socket, time
connection = socket.create_connection(("node0", 5000))
print(time.perf_counter(), flush=True)
connection.sendall(bytes({size}))
connection.close()
"""


@needs_cluster
def test_a_link_passes_what_it_was_given_and_the_interface_counts_it(tmp_path: Path) -> None:
    rate, size, ready = 4_000_000, 2_000_000, tmp_path / "ready"
    with Network([Node(link=Link(bytes_per_second=rate, burst_bytes=16384)) for _ in range(2)]) as cluster:
        receive = [sys.executable, "-c", RECEIVE.format(ready=str(ready))]
        receiver = cluster.start(0, receive, output=tmp_path / "receiver")
        while not ready.exists():
            assert receiver.poll() is None, (tmp_path / "receiver").read_text()
            time.sleep(0.01)
        sender = cluster.start(1, [sys.executable, "-c", SEND.format(size=size)], output=tmp_path / "sender")
        assert (sender.wait(), receiver.wait()) == (0, 0), (tmp_path / "sender").read_text()
        assert cluster.bytes_sent(1) > size
        assert cluster.bytes_received(0) > size
    start, end = (float((tmp_path / side).read_text()) for side in ("sender", "receiver"))
    assert size / (end - start) < 1.1 * rate


SPIN = """
import time
while "-rank" not in open("/proc/self/cgroup").read():
    time.sleep(0.01)
used, start = time.process_time(), time.perf_counter()
while time.perf_counter() < start + 1:
    pass
print(time.process_time() - used)
"""
OWNER = """
import sys, time
from pathlib import Path
from benchmarks.cluster.network import Link, Network, Node
with Network([Node(link=Link(bytes_per_second=1e6))] * 2) as cluster:
    process = cluster.start(0, ["sleep", "600"], output=Path(sys.argv[1]))
    print(process.pid, flush=True)
    time.sleep(600)
"""

SLOW_IP = """#!/bin/sh
case "$2" in
  exec) sleep 0.2; exec {ip} "$@";;
  pids) {ip} "$@"; sleep 0.3;;
  *) exec {ip} "$@";;
esac
"""
"""Processes enter their namespaces while somebody looks for processes there."""


@needs_cluster
@pytest.mark.parametrize("slow", one_of([False, True], True))
def test_everything_is_removed_when_the_owner_is_killed(tmp_path: Path, slow: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    if slow:
        (tmp_path / "ip").write_text(SLOW_IP.format(ip=shutil.which("ip")), encoding="ascii")
        (tmp_path / "ip").chmod(0o755)
        environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    command = [sys.executable, "-c", OWNER, str(tmp_path / "log")]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    sleeper = int(owner.stdout.readline())
    assert left_behind(owner.pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 60
    while (left_behind(owner.pid) or Path(f"/proc/{sleeper}").exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left_behind(owner.pid)
    assert not Path(f"/proc/{sleeper}").exists()


@needs_cluster
def test_what_a_killed_watcher_left_is_removed_by_the_next_start() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = f"{network.PREFIX}{gone.pid}-node0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with Network([Node(link=Link(bytes_per_second=1e6))]):
        assert not left_behind(gone.pid)


@needs_cluster
@pytest.mark.skipif(bool(missing_for_quotas()), reason=str(missing_for_quotas()))
def test_every_rank_gets_its_share_of_the_cpu(tmp_path: Path) -> None:
    with Network([Node(link=Link(bytes_per_second=1e6), cpus=0.25, ranks=2)]) as cluster:
        started = [cluster.start(0, [sys.executable, "-c", SPIN], output=tmp_path / f"log{rank}") for rank in range(2)]
        for rank, process in enumerate(started):
            cluster.place(0, rank, process.pid)
        assert [process.wait() for process in started] == [0, 0]
    assert max(float((tmp_path / f"log{rank}").read_text()) for rank in range(2)) < 0.35


def test_a_machine_without_root_or_tools_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    with pytest.raises(ConfigError, match=r"not root.*tc is not installed"):
        Network([Node(link=Link(bytes_per_second=1e6))])


def left_behind(owner: int) -> list[Path]:
    """What exists with the name of this owner: namespaces, host files, CPU groups."""
    places = [folder for folder in (NAMESPACES, HOSTS, network._cpu_root()) if folder is not None]
    return [
        path for folder in places for path in network._matching(folder, network.re.compile(f"{network.PREFIX}{owner}-"))
    ]
