"""Starts commands on all nodes of a ``Network`` with torchrun, as a user of several machines would."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmarks.cluster.network import Network

from bytescale.common.errors import BytescaleError

ROOT = Path(__file__).parents[2]
PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the interfaces of all nodes have counted, headers included."""

    sent: list[int]
    """Bytes that each node has sent."""


def told(main: Callable[[], int]) -> int | str:
    """The exit status of a command: errors that a user can mend are one line."""
    try:
        return main()
    except BytescaleError as error:
        return f"error: {error}"


def torchrun(network: Network, ranks_per_node: int, arguments: Sequence[str], log: Path, seconds: float) -> Traffic:
    """Run ``bytescale ARGUMENTS`` on all nodes and wait for the end. Every rank gets its CPU quota when it starts.

    Args:
        network: the nodes.
        ranks_per_node: ranks that torchrun starts on each node.
        arguments: the command line of bytescale.
        log: the file for the output of node 0; the other nodes' files have its name and a number.
        seconds: after this time the run is killed.

    Raises:
        RuntimeError: a node ended with an error, or the time was over. The text has the end of the node's output.
    """
    before = [network.bytes_sent(node) for node in range(len(network.nodes))]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(network.nodes))),
        *("--nproc-per-node", str(ranks_per_node), "--rdzv-id", "bytescale", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"node0:{PORT}", "-m", "bytescale", *arguments),
    ]
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT / "src")]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    logs = [log if node == 0 else log.with_name(f"{log.stem}-{node}{log.suffix}") for node in range(len(network.nodes))]
    processes = []
    for node, path in enumerate(logs):
        path.unlink(missing_ok=True)
        processes.append(network.start(node, command, environment=environment, output=path))
    deadline = time.monotonic() + seconds
    placed: set[int] = set()
    while any(process.poll() is None for process in processes):
        failed = [place for place, process in enumerate(processes) if process.poll()]
        if failed or time.monotonic() > deadline:
            break
        if len(placed) < ranks_per_node * len(processes):
            for node, process in enumerate(processes):
                place_ranks(network, node, process.pid, placed)
        time.sleep(0.1)
    # The first that failed says why; the others would only say that it is gone.
    for process, path in sorted(zip(processes, logs, strict=True), key=lambda pair: pair[0].poll() is None):
        code = process.poll()
        if code != 0:
            for other in processes:
                other.kill()
            what = f"did not end within {seconds:.0f} s" if code is None else f"ended with exit code {code}"
            raise RuntimeError(f"{' '.join(command)}\n{what}; end of {path}:\n{path.read_text()[-3000:]}")
    return Traffic(sent=[network.bytes_sent(node) - old for node, old in enumerate(before)])


def place_ranks(network: Network, node: int, launcher: int, placed: set[int]) -> None:
    """Give the ranks that a launcher has started their CPU quotas, and add their process ids to ``placed``."""
    with suppress(psutil.Error):
        for process in psutil.Process(launcher).children():
            if process.pid not in placed and "LOCAL_RANK" in (environment := process.environ()):
                network.place(node, int(environment["LOCAL_RANK"]), process.pid)
                placed.add(process.pid)
