"""This process's place among the training ranks: process groups, device and precision.

Under torchrun the process joins the group that torchrun's environment describes. Otherwise it is a group of one.
"""

from __future__ import annotations

import itertools
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_groups
from torch.distributed.elastic.utils.store import barrier

from bytescale.common.environment import ranks_of_torchrun, told
from bytescale.common.errors import ConfigError
from bytescale.config.schema import Config
from bytescale.config.sharing import sharing_domain
from bytescale.runtime.group import RankGroup, answered
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.flat import DTYPES
from bytescale.train.changing import ChangingRanks
from bytescale.train.stop import record_for_launcher

STORE_FILE = "BYTESCALE_STORE_FILE"
"""Environment variable with the file through which the ranks of one machine find each other. It lies in a folder that
no other user can enter, whereas a key-value store at a port answers everybody."""
LAUNCHER_PID = "BYTESCALE_LAUNCHER_PID"
"""Environment variable with the launcher's process id. The launcher may end before its ranks have imported torch."""
FILES_BESIDE_SOCKETS = 256
"""Open files that a rank needs beside one socket for each other rank: libraries, the corpus, the run folder."""
CONNECTED_AT_ONCE = 32
"""Ranks up to which a gloo group connects all of them when it is made: some six groups of 31 sockets each."""
TIMEOUT_SECONDS = {"cpu": 120.0, "cuda": 1800.0}
"""How long a message may take. NCCL counts from posting, and a rank may post while its peers begin a long context."""
_LOOK_SECONDS = 0.2
_NCCL_NUMBERS = (
    "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_P2P_NCHANNELS",
    "NCCL_MAX_P2P_NCHANNELS", "NCCL_NCHANNELS_PER_NET_PEER", "NCCL_BUFFSIZE",
)  # fmt: skip
"""Variables of NCCL that all ranks must have alike."""
_OPENINGS = itertools.count()
"""Numbers the times that this process joined others: the same number in all ranks. Each has keys of its own."""
_RENDEZVOUS: dict[tuple[str | None, ...], tuple[dist.Store, int, int]] = {}
"""What each file or address gave this process: the store, this rank and the number of ranks."""


@dataclass(frozen=True)
class Ranks:
    """This process's place in the mesh, its device and its precision."""

    mesh: Mesh
    checkpoint_group: dist.ProcessGroup  # gloo, so that checkpoints can be written from a thread while NCCL trains
    device: torch.device
    dtype: torch.dtype

    @property
    def world(self) -> RankGroup:
        return self.mesh.world

    @property
    def hdp(self) -> RankGroup:
        """The ranks with the same weights as this one."""
        return self.mesh.hdp

    def hdp_ranks_per_node(self) -> int:
        """HDP ranks of one stage that share a node, on the node that has fewest. Every rank calls it."""
        nodes = nodes_of(self.world)
        return max(1, min(nodes.count(node) for node in nodes) // self.mesh.shape.tp)

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and keeps the run folder."""
        return self.world.rank == 0


def end_with_launcher() -> None:
    """End this process when its launcher ends. Otherwise ranks of a killed launcher would keep training.

    A thread checks for it. The kernel's parent death signal would come when the thread that forked this process ends.
    """
    launcher = int(os.environ.get(LAUNCHER_PID, os.getppid()))

    def look() -> None:
        while os.getppid() == launcher:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=look, name="bytescale-launcher", daemon=True).start()


@contextmanager
def open_ranks(config: Config, changing: ChangingRanks | None = None) -> Iterator[Ranks]:
    """Join the process group for the time of the block. ``changing``: knows which ranks there are now.

    All ranks that reach the end of the block leave it together. A lazily connected gloo group lets a fast rank finish a
    collective and close its sockets while a slower rank still writes to it, which the slower one reports as a failure.
    The same processes can join again.
    """
    local_rank = told("LOCAL_RANK", 0)
    local_size = told("LOCAL_WORLD_SIZE", 1, least=1)
    device = choose_device(config.trainer.device, local_rank, local_size)
    dtype = choose_dtype(config.trainer.dtype, device)
    timeout = timedelta(seconds=config.parallel.timeout_seconds or TIMEOUT_SECONDS[device.type])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world_size = told("WORLD_SIZE", 1, least=1)
    prepare_gloo(world_size)
    if sys.platform == "linux" and (STORE_FILE in os.environ or local_size == world_size):
        # All ranks are on this machine: sockets of gloo and NCCL need not be reached from another one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    store: dist.Store = dist.HashStore()
    rank, num_ranks = 0, 1
    if ranks_of_torchrun() is not None:
        store, rank, num_ranks = _rendezvous(timeout)
    if changing is None or not changing.is_elastic:
        store = dist.PrefixStore(f"opening-{next(_OPENINGS)}", store)
    else:
        store, rank, num_ranks = changing.place(store, rank, num_ranks, timeout)
    try:
        with answered("ranks that were to meet did not all come"):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
                pg_options=group_options("world", device, timeout),
            )
            ranks = Ranks(
                mesh=_open_mesh(config, RankGroup(dist.group.WORLD, device=device), timeout),
                checkpoint_group=dist.new_group(backend="gloo", timeout=timeout),
                device=device,
                dtype=dtype,
            )
            if changing is not None and changing.is_elastic:
                changing.members.opened(ranks.mesh)
        yield ranks
        _meet_at_the_end(store, rank, num_ranks, timeout)
    except BaseException as error:
        leave_early(error, device, is_last=changing is None or not changing.goes_on_after(error))
        raise
    dist.destroy_process_group()


def leave_early(error: BaseException, device: torch.device, *, is_last: bool = True) -> None:
    """Tell the error, if it ends this process, and leave all groups.

    Destroying NCCL's would wait for what has been posted, maybe for ever.
    """
    if isinstance(error, Exception) and is_last:
        record_for_launcher(error)
    if not dist.is_initialized():
        return
    if device.type == "cuda":
        abort_process_groups()
    else:
        dist.destroy_process_group()


def _rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The key-value store of all ranks, this rank, and their number. A store serves its process to the end.

    The first rank may be the one that serves it, and a second store at the same port would not do: a fast rank could
    still reach the first one, read addresses there at which nobody listens any more, and wait for ever.
    """
    file = os.environ.get(STORE_FILE)
    place = (file or os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), str(os.getpid()))
    if place not in _RENDEZVOUS and file is not None:
        rank, num_ranks = told("RANK", 0), told("WORLD_SIZE", 1)
        _RENDEZVOUS[place] = dist.FileStore(file, num_ranks), rank, num_ranks
    elif place not in _RENDEZVOUS:
        try:
            _RENDEZVOUS[place] = next(dist.rendezvous("env://", timeout=timeout))
        except ValueError as error:
            raise ConfigError(f"torchrun's variables do not say where to meet ({error})", fix="unset RANK") from error
    store, rank, num_ranks = _RENDEZVOUS[place]
    store.set_timeout(timeout)
    return store, rank, num_ranks


def _meet_at_the_end(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
    """Wait for all ranks. The first, which may serve the store, goes on when all others have read its last answer."""
    with answered(f"rank {rank} was done, and others did not come to the end"):
        barrier(store, num_ranks, "end", timeout.total_seconds(), rank)
        if rank:
            store.set(f"gone-{rank}", "")
        else:
            store.wait([f"gone-{other}" for other in range(1, num_ranks)], timeout)


def prepare_gloo(num_ranks: int) -> None:
    """Make room for the sockets of gloo groups over ``num_ranks`` ranks. Raises ``ConfigError`` where there is none.

    By default, gloo connects every rank to every other one when a group is made, so 1000 ranks exceed the usual limit
    of 1024 open files. With lazy initialisation (since torch 2.8), it connects two ranks at their first message. Then
    only the first rank, to which checkpoints are announced, has a socket for each of the others; but a first message to
    a rank that is stopped takes up to five times the time limit, so a few ranks connect at once.
    """
    if num_ranks > CONNECTED_AT_ONCE:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    needed = num_ranks + FILES_BESIDE_SOCKETS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"this process may open {hard} files, and a gloo group over {num_ranks} ranks needs up to {needed}",
            so="ranks could not connect to each other, and the run would stop at its first checkpoint",
            fix=f"raise the limit before the launch (ulimit -Hn {needed}, or LimitNOFILE of the service), "
            "or train on fewer ranks",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _open_mesh(config: Config, world: RankGroup, timeout: timedelta) -> Mesh:
    """The groups of this rank. Under NCCL all of them are connected here, while no rank waits for anything else."""

    def make_group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        return world.make_part(name, ranks, group_options(name, world.device, timeout))

    if world.device.type == "cuda":
        check_same_nccl_options(world)
    parallel = config.parallel
    shape = MeshShape(hdp=world.size // (parallel.tp * parallel.pp), tp=parallel.tp, pp=parallel.pp)
    nodes = nodes_of(world)
    per_node = max(1, min(nodes.count(node) for node in nodes) // parallel.tp)
    domain = sharing_domain(parallel.shard, parallel.domain, shape.hdp, per_node)
    mesh = Mesh.of(world, shape, make_group, overlapped=domain == 1, nodes=nodes, domain=domain)
    mesh.connect()
    return mesh


def check_same_nccl_options(world: RankGroup, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ``ConfigError`` on every rank where ranks have different numbers: both ends of a channel must agree."""
    given = [environment.get(name, "") for name in _NCCL_NUMBERS]
    own = [float(text) if text.isdigit() else -1.0 for text in given]  # NCCL ignores what is no number
    for name, high, low in zip(_NCCL_NUMBERS, world.max_of(own), world.min_of(own), strict=True):
        if high != low:
            values = " and ".join("unset" if number < 0 else f"{number:.0f}" for number in (low, high))
            raise ConfigError(
                f"{name} is {values} on different ranks",
                so="their ends of a connection would not fit together, and messages would hang",
                fix="set it alike on every node, or nowhere",
            )


def group_options(name: str, device: torch.device, timeout: timedelta) -> Any:
    """NCCL's options of a group, by its name in the mesh (``Mesh.of``).

    Messages of rings and pipelines, and TP's sums, take the next free multiprocessor. They would otherwise wait behind
    attention or products, after which they are waited for. Sums of gradients do not have to hurry.
    """
    if device.type != "cuda" or "gradients" in name:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # PyTorch warns of another one, and sets it
    return options


def nodes_of(world: RankGroup) -> list[int]:
    """The node of every rank: torchrun's number, or else that of the node's first rank. Every rank calls it."""
    own = float(os.environ.get("GROUP_RANK", world.rank - int(os.environ.get("LOCAL_RANK", "0"))))
    return [int(node) for (node,) in world.share([own])]


def choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """The device of a rank. ``auto`` is CUDA if every rank of the node gets a GPU of its own, else the CPU."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and num_gpus < local_size:
        raise ConfigError(
            f"trainer.device is cuda but this node has {num_gpus} GPUs for {local_size} ranks",
            so="two ranks on one GPU would wait for each other inside NCCL",
            fix=f"set parallel.ranks to {max(num_gpus, 1)}, or trainer.device to cpu",
        )
    if wanted == "cuda" or (wanted == "auto" and num_gpus >= local_size > 0):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """``auto`` is bf16 on GPU and fp32 on CPU."""
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[wanted]
