"""Ranks that die amid a step under NCCL's rules: the others leave it, and go on from states that somebody computed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from bytescale.runtime import group as group_file
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.copies import StateCopies, StatesCopy
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from tests.helpers.effort import one_in
from tests.nccl.leaving import Leaving
from tests.nccl.recorder import Event, Kept, Log, Look, RecordedGroup, record
from tests.nccl.replay import EVERYTHING, STREAMS_ONLY
from tests.nccl.steps import training_step, uneven

Programs = list[list[Event]]
MESHES = {"hdp": MeshShape(hdp=3), "pp": MeshShape(pp=2, hdp=2)}


@functools.cache
def programs_of(mesh: str, optimizer_name: str) -> Programs:
    """Two steps of all ranks with copies of states. Where a host looks is the runtime's own; copies go to nobody."""
    shape, logs = MESHES[mesh], list[Log]()  # of the rank that is being recorded

    def begun(mesh: Mesh, optimizer: ShardedOptimizer) -> None:
        of_world = mesh.world.group
        assert isinstance(of_world, RecordedGroup)
        logs.append(of_world.log)
        alone: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        StateCopies(optimizer, alone)
        optimizer.behind_update.append(lambda: of_world.log.kept(optimizer.num_updates))

    def waits(function: Callable[..., Any]) -> Any:
        """``function`` waits for its rank's compute stream."""

        def waiting(*arguments: Any) -> Any:
            for log in logs:
                log.drain()
            return function(*arguments)

        return waiting

    plan = uneven([2, 3] if shape.hdp == 2 else [2, 1, 3], [9, 4, 7])
    step = training_step(plan, 2 * shape.pp, bucket_bytes=256, optimizer_name=optimizer_name, begun=begun)

    def whole_step(mesh: Mesh) -> None:
        step(mesh)
        logs.clear()

    flag = SimpleNamespace(is_set=lambda: any(log.look() for log in logs))
    with (
        patch.object(group_file, "ABORTED", flag),
        patch.object(RankGroup, "read", waits(RankGroup.read)),
        patch.object(StatesCopy, "of", staticmethod(waits(StatesCopy.of))),
    ):
        return record(shape, whole_step, overlapped=True)


def left(programs: Programs, seed: int, **options: Any) -> Leaving:
    """What comes of a death anywhere, often just behind an update, in a random order of all that can happen."""
    draw = random.Random(seed)
    victim, rules = draw.randrange(len(programs)), draw.choice([EVERYTHING, STREAMS_ONLY])
    events = programs[victim]
    kept = [number + 1 for number, event in enumerate(events) if isinstance(event, Kept)]
    run = Leaving(programs, victim, draw.choice([draw.randrange(len(events)), *kept]), seed, rules=rules, **options)
    run.run()
    return run


CASES = [(mesh, name, seed) for seed in range(0, 400, 5) for mesh in MESHES for name in ("adamw", "muon")]


@pytest.mark.parametrize(("mesh", "optimizer_name", "seed"), one_in(39, CASES))
def test_the_others_leave_and_go_on_from_what_was_computed(mesh: str, optimizer_name: str, seed: int) -> None:
    programs = programs_of(mesh, optimizer_name)
    for number in range(seed, seed + 5):
        run = left(programs, number)
        assert not run.stuck(), number
        assert not run.deceived, number
        update, is_garbage = run.goes_on_from()
        assert not is_garbage, (number, update)


def behind_updates(programs: Programs) -> Programs:
    """Without the look behind the copying of states."""
    found = list[list[Event]]()
    for events in programs:
        kept = [number for number, event in enumerate(events) if isinstance(event, Kept)]
        dropped = {max(n for n in range(end) if isinstance(events[n], Look)) for end in kept}
        found.append([event for number, event in enumerate(events) if number not in dropped])
    return found


def anywhere(programs: Programs) -> Programs:
    """Without any look."""
    return [[event for event in events if not isinstance(event, Look)] for events in programs]


@pytest.mark.parametrize(
    ("fault", "options"),
    [(anywhere, {}), (behind_updates, {}), (list, {"flag_first": False})],
    ids=["nobody looks", "states are copied without a look", "the flag is raised behind the aborts"],
)
def test_garbage_is_found(fault: Callable[[Programs], Programs], options: dict[str, Any]) -> None:
    programs = fault(programs_of("pp", "muon"))
    runs = (left(programs, seed, **options) for seed in range(50, 150))
    assert any(run.goes_on_from()[1] or run.deceived for run in runs)


def test_without_a_watch_hosts_wait_for_ever() -> None:
    programs = programs_of("hdp", "adamw")
    assert any(left(programs, seed, watches=False).stuck() for seed in range(5))
