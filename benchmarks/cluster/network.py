"""A cluster on one machine: every node is a network namespace, and links between nodes have a rate (Linux, root).

    node 0                node 1                      each node: interface eth0, a hostname (node0, node1, ...), and
    ┌────────────┐        ┌────────────┐              a hosts file that names all nodes; each rank: a CPU quota
    │ rank rank  │        │ rank rank  │
    │   eth0     │        │   eth0     │              eth0 and its port are shaped by tc (token bucket), so each
    └────┬───────┘        └────┬───────┘              direction of a node's link has its own rate and burst
       port0 ───── bridge ── port1                    bridge: in a namespace of its own, so no address and no interface
                                                      exists outside of these namespaces

Ranks of one node reach each other without leaving the kernel's loopback, at full speed.

Everything has the owner's process id in its name. It is removed when the ``with`` block ends. A watcher process removes
it when the owner was killed, and ``remove_orphans`` what is left of owners whose watcher was killed too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bytescale.common.errors import ConfigError

PREFIX = "bytescale-"
OWNER = "BYTESCALE_CLUSTER_OWNER"
"""Environment variable of every process on a node: the owner's process id."""
NAMESPACES = Path("/run/netns")
HOSTS = Path("/etc/netns")
"""``ip netns exec NAME`` shows the files of ``/etc/netns/NAME`` in place of those of ``/etc``."""
CPU_1, CPU_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
"""Where cgroups of version 1 and 2 limit CPU time."""
PERIOD_MICROSECONDS, LEAST_QUOTA_MICROSECONDS = 5000, 1000
"""Length of a CPU quota's period. It is short, so that a rank computes slowly and does not compute in bursts. Where the
quota would be below the least one that the kernel takes, the period is longer."""
QUEUE_SECONDS = 0.2
"""What a link's queue holds at most, in seconds of its rate."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A node's link to the switch, the same in both directions."""

    bytes_per_second: float
    burst_bytes: int = 98304
    """Bytes that pass at once after a pause. Below 64 KiB and headers, the kernel cuts every packet that TCP makes into
    small ones, which costs a node of half a core most of its CPU time."""
    delay_seconds: float = 0.0
    """Added to each packet in each direction of each of the two links that it passes."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine of the cluster."""

    link: Link
    cpus: float | None = None
    """CPU time of each rank in cores; None: no limit. Launchers have no limit."""
    ranks: int = 1


def missing() -> list[str]:
    """What this machine lacks, as sentences. Empty: a cluster can be made here."""
    if sys.platform != "linux":
        return [f"network namespaces exist on Linux only, and this is {sys.platform}"]
    found = []
    if os.geteuid() != 0:
        found.append("this process is not root, so it may not make network namespaces (use sudo)")
    tools = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if tools:
        verb = "is" if len(tools) == 1 else "are"
        found.append(f"{', '.join(tools)} {verb} not installed (apt-get install iproute2 util-linux)")
    if found:
        return found
    probe = f"{PREFIX}{os.getpid()}-probe"
    for command in (
        f"ip netns add {probe}",
        f"ip -n {probe} link add eth0 type veth peer name port0",
        f"ip -n {probe} link add bridge0 type bridge",
        f"tc -n {probe} qdisc add dev eth0 root tbf rate 1mbit burst 32kb latency 100ms",
    ):
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            found.append(f"`{command}` fails: {done.stderr.strip()}")
            break
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return found


def missing_for_quotas() -> str | None:
    """Why ranks cannot have a CPU quota here; None: they can."""
    return None if _cpu_root() else f"no cgroup with the controller cpu can be written below {CPU_2}"


class Network:
    """Context manager: makes the nodes, and removes them and every process in them."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        """Raises ``ConfigError`` where a cluster cannot be made."""
        lacks = missing()
        if any(node.cpus is not None for node in nodes) and not lacks:
            lacks = [text for text in [missing_for_quotas()] if text]
        if not nodes:
            lacks = ["no node is given"]
        if lacks:
            raise ConfigError("a cluster cannot be made here: " + "; ".join(lacks), fix="mend that")
        self.nodes = list(nodes)
        self.owner = os.getpid()
        self._watcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        remove_orphans()
        watch = [sys.executable, "-m", "benchmarks.cluster.network", "watch", str(self.owner)]
        self._watcher = subprocess.Popen(
            watch, stdin=subprocess.PIPE, start_new_session=True, cwd=Path(__file__).parents[2]
        )
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything. May be called twice."""
        remove(self.owner)
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.stdin.close()
            self._watcher.wait()
            self._watcher = None

    def name(self, node: int) -> str:
        """The namespace of a node."""
        return f"{PREFIX}{self.owner}-node{node}"

    def address(self, node: int) -> str:
        """The address of a node inside the cluster."""
        return f"10.77.{(node + 1) // 250}.{(node + 1) % 250}"

    def start(
        self, node: int, command: Sequence[str], *, environment: Mapping[str, str] | None = None, output: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process on a node. Its output goes to the file ``output``."""
        enter = ["ip", "netns", "exec", self.name(node)]
        rename = ["unshare", "--uts", "sh", "-c", f'hostname node{node} && exec "$@"', "sh"]
        with output.open("ab") as file:
            return subprocess.Popen(
                [*enter, *rename, *command],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {}), OWNER: str(self.owner)},
            )

    def bytes_sent(self, node: int) -> int:
        """Bytes that the node's interface has sent so far, with all headers."""
        return self._counter(node, "tx_bytes")

    def bytes_received(self, node: int) -> int:
        """Bytes that the node's interface has received so far, with all headers."""
        return self._counter(node, "rx_bytes")

    def place(self, node: int, local_rank: int, pid: int) -> None:
        """Give a process that runs on a node the CPU quota of one of the node's ranks."""
        for group in self._groups(node)[local_rank : local_rank + 1]:
            (group / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def set_cpus(self, node: int, cpus: float) -> None:
        """Change the CPU quota of the ranks of a node that was made with one, while they run."""
        for group in self._groups(node):
            _set_quota(group, cpus)

    def throttled_seconds(self, node: int) -> float:
        """Seconds for which quotas have stopped the node's ranks so far."""
        total = 0.0
        for group in self._groups(node):
            for line in (group / "cpu.stat").read_text(encoding="ascii").splitlines():
                name, value = line.split()
                total += {"throttled_time": 1e-9, "throttled_usec": 1e-6}.get(name, 0.0) * int(value)
        return total

    def _counter(self, node: int, name: str) -> int:
        path = f"/sys/class/net/eth0/statistics/{name}"
        return int(_run(f"ip netns exec {self.name(node)} cat {path}"))

    def _groups(self, node: int) -> list[Path]:
        """The CPU group of each rank of a node."""
        root, made = _cpu_root(), self.nodes[node]
        if made.cpus is None or root is None:
            return []
        return [root / f"{self.name(node)}-rank{rank}" for rank in range(made.ranks)]

    def _make(self) -> None:
        switch = f"{PREFIX}{self.owner}-switch"
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add bridge0 type bridge")
        _run(f"ip -n {switch} link set bridge0 up")
        names = "".join(f"{self.address(node)} node{node}\n" for node in range(len(self.nodes)))
        for number, node in enumerate(self.nodes):
            name, port = self.name(number), f"port{number}"
            folder = HOSTS / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="ascii")
            _run(f"ip netns add {name}")
            _run(f"ip -n {switch} link add {port} type veth peer name eth0 netns {name}")
            _run(f"ip -n {switch} link set {port} master bridge0 up")
            _run(f"ip -n {name} addr add {self.address(number)}/16 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
            shape(name, "eth0", node.link)
            shape(switch, port, node.link)
            for group in self._groups(number):
                group.mkdir()
                _put_first(group)
                _set_quota(group, node.cpus or 1.0)


def shape(namespace: str, interface: str, link: Link) -> None:
    """Give what an interface sends the rate, burst and delay of ``link``."""
    parent = "root"
    if link.delay_seconds:
        delay = f"{link.delay_seconds * 1e6:.0f}us"
        _run(f"tc -n {namespace} qdisc add dev {interface} root handle 1: netem delay {delay} limit 100000")
        parent = "parent 1:1"
    bits = round(8 * link.bytes_per_second)
    latency = f"{QUEUE_SECONDS * 1e3:.0f}ms"
    _run(
        f"tc -n {namespace} qdisc add dev {interface} {parent} handle 10: tbf rate {bits}bit "
        f"burst {link.burst_bytes}b latency {latency}"
    )


def remove(owner: int) -> None:
    """Kill every process in the nodes of ``owner``, and remove the nodes."""
    mine = re.compile(rf"{PREFIX}{owner}-")
    _kill(owner, mine)
    for namespace in _matching(NAMESPACES, mine):
        subprocess.run(["ip", "netns", "del", namespace.name], capture_output=True)
    _kill(owner, mine)  # those that were about to enter a namespace; no other can enter one now
    for folder in _matching(HOSTS, mine):
        shutil.rmtree(folder, ignore_errors=True)
    root = _cpu_root()
    for group in _matching(root, mine) if root else []:
        with suppress(OSError):
            group.rmdir()


def remove_orphans() -> list[int]:
    """Remove the nodes of owners that do not live any more. Returns their process ids."""
    places = [folder for folder in (NAMESPACES, HOSTS, _cpu_root()) if folder is not None]
    found = {int(match[1]) for folder in places for path in _matching(folder, _ANY) if (match := _ANY.match(path.name))}
    orphans = sorted(owner for owner in found if not Path(f"/proc/{owner}").exists())
    for owner in orphans:
        remove(owner)
    return orphans


_ANY = re.compile(rf"{PREFIX}(\d+)-")


def _kill(owner: int, mine: re.Pattern[str]) -> None:
    """Kill the processes of ``owner``: those in its nodes, and those that it started and that are not there yet.

    Neither look finds all of them. A process may overwrite its environment, as Ray's workers do with their titles.
    """
    for _ in range(50):
        pids = _processes(mine) | _started_by(owner)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.05)


def _started_by(owner: int) -> set[int]:
    """Ids of the processes that ``owner`` started on its nodes, whether or not they have entered them yet."""
    found, mark = set(), f"{OWNER}={owner}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # the process has ended
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
    return found - {os.getpid()}


def _processes(mine: re.Pattern[str]) -> set[int]:
    """Ids of the processes in the namespaces and CPU groups whose names match."""
    root = _cpu_root()
    texts = [(group / "cgroup.procs").read_text(encoding="ascii") for group in (_matching(root, mine) if root else [])]
    for namespace in _matching(NAMESPACES, mine):
        texts.append(subprocess.run(["ip", "netns", "pids", namespace.name], capture_output=True, text=True).stdout)
    return {int(word) for text in texts for word in text.split()} - {os.getpid()}


def _matching(folder: Path, names: re.Pattern[str]) -> list[Path]:
    return [path for path in folder.iterdir() if names.match(path.name)] if folder.is_dir() else []


def _cpu_root() -> Path | None:
    """The folder in which CPU groups are made; None: there is none."""
    if (CPU_1 / "cpu.shares").exists() and os.access(CPU_1, os.W_OK):
        return CPU_1
    control = CPU_2 / "cgroup.subtree_control"
    if control.exists() and os.access(control, os.W_OK):
        if "cpu" not in control.read_text(encoding="ascii").split():
            with suppress(OSError):
                control.write_text("+cpu", encoding="ascii")
        if "cpu" in control.read_text(encoding="ascii").split():
            return CPU_2
    return None


def _put_first(group: Path) -> None:
    """Give the group as large a share as may be, so that other processes of the machine hardly disturb the nodes."""
    old = group / "cpu.shares"
    if old.exists():
        old.write_text("262144", encoding="ascii")
    else:
        (group / "cpu.weight").write_text("10000", encoding="ascii")


def _set_quota(group: Path, cpus: float) -> None:
    period = max(PERIOD_MICROSECONDS, round(LEAST_QUOTA_MICROSECONDS / cpus))
    quota = round(cpus * period)
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_quota_us").write_text("-1", encoding="ascii")
        (group / "cpu.cfs_period_us").write_text(str(period), encoding="ascii")
        (group / "cpu.cfs_quota_us").write_text(str(quota), encoding="ascii")
    else:
        (group / "cpu.max").write_text(f"{quota} {period}", encoding="ascii")


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"`{command}` failed: {done.stderr.strip()}", so="the cluster was not made", fix="mend that")
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    """``watch PID``: remove the nodes of PID when standard input ends. ``reap``: remove what nobody owns any more."""
    if arguments[:1] == ["watch"]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        sys.stdin.buffer.read()
        remove(int(arguments[1]))
        return 0
    if arguments == ["reap"]:
        print(f"removed the nodes of {remove_orphans() or 'nobody'}")
        return 0
    print("\n".join(missing()) or "a cluster can be made here", missing_for_quotas() or "", sep="\n")
    return int(bool(missing()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
