"""A run on one machine: nobody else can reach or block it, Ctrl-C loses no step, and nothing of it stays behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import bytescale
from bytescale.config.load import config_to_toml
from tests.train.runs import losses, on_ranks, small_run, write_corpus

COMMAND = [sys.executable, "-m", "bytescale", "train"]
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize(
    ("num_ranks", "loader"),
    [
        (2, "local"),
        (1, "local"),
        (2, "ray"),
    ],
)
@pytest.mark.exhaustive
def test_a_run_listens_on_loopback_alone_and_ctrl_c_saves(tmp_path: Path, num_ranks: int, loader: str) -> None:
    config = on_ranks(small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run"), num_ranks, 256 // num_ranks)
    (tmp_path / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [*COMMAND, str(tmp_path / "config.toml"), "--trainer.steps", "100000", "--checkpoint.every", "0",
         "--data.loader", loader],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path)},
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "the first step is not done"
            time.sleep(0.1)
        of_run = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        places = listening(of_run)
        assert len(places) >= num_ranks, "ranks of gloo listen somewhere"
        assert {host for host, _ in places} <= LOOPBACK
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    finally:
        for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            each.kill()
        process.kill()
    assert process.returncode == 128 + signal.SIGINT, output
    assert len(re.findall(r"SIGINT: .*a second signal ends", output)) == 1, output
    assert "Traceback" not in output
    assert output.count("stopped by SIGINT; continue with `bytescale train --resume") == 1
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step-{len(losses(tmp_path / 'run')):06d}"
    assert not (tmp_path / ".ray").exists(), "Ray's token would be in a file that all may read"
    left = [path.name for path in (tmp_path / "tmp").iterdir() if "bytescale" in path.name or "torch" in path.name]
    assert not [name for name in left if not name.startswith("torchinductor")]


def listening(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """Where these processes wait for connections or datagrams from anybody."""
    places = set()
    for process in processes:
        try:
            connections = process.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        for connection in connections:
            datagrams = connection.type == socket.SOCK_DGRAM and connection.laddr and not connection.raddr
            if connection.status == psutil.CONN_LISTEN or datagrams:
                places.add((connection.laddr.ip, connection.laddr.port))
    return places


def test_nothing_that_arrives_is_unpickled() -> None:
    """PyTorch's object collectives and its agent's rendezvous unpickle what other processes send."""
    forbidden = re.compile(r"gather_object|broadcast_object|scatter_object|recv_object|pickle\.loads?|elastic_launch")
    for path in Path(bytescale.__file__).parent.rglob("*.py"):
        assert not forbidden.search(path.read_text(encoding="utf-8")), path
