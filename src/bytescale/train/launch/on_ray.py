"""Starts ranks as Ray actors (``--launch ray``). Environment, groups and trainer of a rank are as under torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from bytescale.common.environment import use_expandable_segments
from bytescale.common.errors import BytescaleError, ConfigError, LoaderFailure, RankFailure, RanksRefused
from bytescale.common.ports import reserve_port
from bytescale.config import Config
from bytescale.train.ranks import STORE_FILE
from bytescale.train.stop import StopRequest

_PLACE_SECONDS = 60.0
_TRY_SECONDS = 3.0
_LOOK_SECONDS = 0.2
_BLAME_SECONDS = 30.0
"""Seconds to wait for the cause after a rank has reported that it lost another rank. Ray takes 15 s to notice that a
node is gone."""
_NODE_DEATH_SECONDS = 30.0


class RankActor:
    def __init__(self) -> None:
        self._stop = StopRequest()
        self._reservation = reserve_port()  # the first rank will listen there

    def address(self) -> tuple[str, str, int, int]:
        """The node's id, its address, a port on it that is kept for this rank, and this process's id."""
        port = int(self._reservation.getsockname()[1])
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port, os.getpid()

    def run(self, config: Config, environment: dict[str, str], console: Queue) -> None:
        """Train; the first rank's lines go to ``console``, on their way to the terminal."""
        os.environ.update(environment)
        use_expandable_segments()
        from bytescale.train.loop.trainer import train

        train(config, print_line=console.put, stop=self._stop)

    def stop(self) -> None:
        """Ask the rank to finish its step, save and end."""
        self._stop.heard = True


def launch_on_ray(config: Config, *, print_line: Callable[[str], None] = print) -> None:
    """Run ``config`` as ``parallel.ranks`` actors and wait for them. This process has joined Ray before.

    Raises:
        ConfigError: the cluster has no room for the ranks.
        RanksRefused: the ranks rejected the input.
        RankFailure: a rank failed; the message names the rank and the cause. The other ranks have ended.
        SystemExit: SIGTERM or SIGINT arrived; the ranks have saved a checkpoint and ended.
    """
    num_ranks = config.parallel.ranks
    bundle = _bundle(config)
    group = placement_group([bundle] * num_ranks, strategy="PACK")
    ranks: list[Any] = []
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    console = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})  # no other node takes it
    closing = ExitStack()
    try:
        if not group.wait(_PLACE_SECONDS):
            raise _no_room(num_ranks, bundle)
        for index in range(num_ranks):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "max_concurrency": 2}
            ranks.append(ray.remote(RankActor).options(scheduling_strategy=place, **options).remote())
        addresses = _addresses(ranks, config.trainer.run_dir)
        meeting = TemporaryDirectory(prefix="bytescale-ranks-", ignore_cleanup_errors=True)
        environments = _environments(addresses, Path(closing.enter_context(meeting)))
        running = {
            rank.run.remote(config, environment, console): number
            for number, (rank, environment) in enumerate(zip(ranks, environments, strict=True))
        }
        with StopRequest(tells=True) as asked:
            failures = _wait(running, ranks, console, print_line, asked)
        if failures:
            raise _failure(failures, [pid for *_, pid in addresses], config.trainer.run_dir)
        if asked.heard:
            again = f"bytescale train --resume {config.trainer.run_dir}"
            print_line(f"stopped by {asked.signal.name}; continue with: {again}")
            raise SystemExit(128 + asked.signal)
    finally:
        for rank in ranks:
            ray.kill(rank)
        remove_placement_group(group)
        console.shutdown(force=True)
        closing.close()


def ranks_there(config: Config) -> int:
    """How many of ``parallel.ranks`` Ray can place now, found out by placing them.

    Waits until a node that died has been noticed. Raises ``ConfigError`` when there is no room for any.
    """
    bundle = _bundle(config)
    deadline = time.monotonic() + _NODE_DEATH_SECONDS
    while time.monotonic() < deadline:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(min(node.get(name, 0) // need for name, need in bundle.items()) for node in nodes)
        count = min(config.parallel.ranks, int(room))
        if count and _can_place(count, bundle):
            return count
    for fewer in range(count - 1, 0, -1):  # somebody else has some of the nodes' resources
        if _can_place(fewer, bundle):
            return fewer
    raise _no_room(config.parallel.ranks, bundle)


def _can_place(num_ranks: int, bundle: dict[str, float]) -> bool:
    group = placement_group([bundle] * num_ranks, strategy="PACK")
    try:
        return group.wait(_TRY_SECONDS)
    finally:
        remove_placement_group(group)


def _addresses(ranks: list[Any], run_dir: str) -> list[tuple[str, str, int, int]]:
    """The address of each rank. Raises an error that names the first rank that died before it answered."""
    references = [rank.address.remote() for rank in ranks]
    addresses = []
    for number, reference in enumerate(references):
        try:
            addresses.append(ray.get(reference))
        except ray.exceptions.RayActorError as error:
            raise RankFailure(
                f"rank {number} died before it had started ({type(error).__name__})",
                so="the other ranks were stopped; checkpoints written before are whole",
                fix=f"mend the cause, then continue with `bytescale train --resume {run_dir}`",
            ) from error
    return addresses


def _environments(addresses: list[tuple[str, str, int, int]], folder: Path) -> list[dict[str, str]]:
    """The environment variables that torchrun would set. Ranks on this node alone find each other through ``folder``.

    Ray shows each rank only its own GPU, so every rank counts as the first of its node.
    """
    _, host, port, _ = addresses[0]
    here = {node for node, *_ in addresses} == {ray.get_runtime_context().get_node_id()}
    common = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(addresses)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        **({STORE_FILE: str(folder / "store")} if here else {}),
    }
    nodes = list(dict.fromkeys(node for node, *_ in addresses))
    return [
        {**common, "RANK": str(rank), "GROUP_RANK": str(nodes.index(node))} for rank, (node, *_) in enumerate(addresses)
    ]


def _wait(
    running: dict[Any, int], ranks: list[Any], console: Queue, print_line: Callable[[str], None], asked: StopRequest
) -> dict[int, Exception]:
    """Wait until all ranks have ended or one has failed. Returns the errors. Passes ``asked`` on to the ranks."""
    failures: dict[int, Exception] = {}
    left = list(running)
    told = False
    while left:
        if asked.heard and not told:
            told = True
            ray.wait([rank.stop.remote() for rank in ranks], num_returns=len(ranks), timeout=_TRY_SECONDS)
        patience = _BLAME_SECONDS if failures else _LOOK_SECONDS
        ended, left = ray.wait(left, num_returns=1, timeout=patience)
        for line in console.get_nowait_batch(console.qsize()):
            print_line(line)
        for reference in ended:
            try:
                ray.get(reference)
            except Exception as error:  # of whatever kind: it is sorted out below
                failures[running[reference]] = error
        if failures and (not ended or any(_blame(error) == 0 for error in failures.values())):
            break
    return failures


def _blame(error: Exception) -> int:
    """0: died; 1: an error of its own; 2: lost a peer."""
    if isinstance(error, ray.exceptions.ActorDiedError | ray.exceptions.ActorUnavailableError):
        return 0
    return 2 if isinstance(_cause(error), RankFailure) else 1


def _cause(error: Exception) -> Exception:
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error


def _failure(failures: dict[int, Exception], pids: list[int], run_dir: str) -> RankFailure:
    """One error that names the rank that failed first by its own cause."""
    rank, error = min(failures.items(), key=lambda item: (_blame(item[1]), item[0]))
    cause = _cause(error)
    if isinstance(cause, BytescaleError) and not isinstance(cause, RankFailure | LoaderFailure):
        return RanksRefused(str(cause))
    how = "died (killed, or out of memory)" if _blame(error) == 0 else f"failed: {cause}"
    return RankFailure(
        f"rank {rank} (pid {pids[rank]}) {how}",
        so="the other ranks were stopped; checkpoints written before are whole",
        fix=f"mend the cause, then continue with `bytescale train --resume {run_dir}`",
    )


def _bundle(config: Config) -> dict[str, float]:
    has_gpus = ray.cluster_resources().get("GPU", 0) >= config.parallel.ranks
    on_gpus = config.trainer.device == "cuda" or (config.trainer.device == "auto" and has_gpus)
    return {"CPU": 1.0, **({"GPU": 1.0} if on_gpus else {})}


def _no_room(num_ranks: int, bundle: dict[str, float]) -> ConfigError:
    free = ray.available_resources()
    held = ", ".join(f"{free.get(name, 0):.0f} {name}s" for name in bundle)
    return ConfigError(
        f"Ray has {held} free, {num_ranks} ranks need {num_ranks} of each",
        so="some ranks would never start",
        fix="lower parallel.ranks, or add nodes to the cluster",
    )
