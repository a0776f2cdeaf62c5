"""Which ranks a run has, where ranks may die and new ones may come.

Every process has a *number* for good. The members of a *generation* are numbers in the order of their ranks. When one
of them is gone, or a new process waits, all that are there leave the generation's groups, meet at the store, and agree
on the next one: the first list that is written there counts. Whoever is not in it has come too late. Where ranks work
in *units* (the tensor-parallel and pipeline ranks, or those of a lockstep domain, that hold one copy of a model),
whoever makes no whole unit waits as a spare, and is taken in when one can be made.

A process of this machine counts as gone once its id is; any other one if for a while it neither comes nor tells that it
lives: its rank may compute for minutes before it notices that others have left.

The trainer (``train.changing``) and loops of one's own (``hf.loop.recovery``) open groups again, build what they train
for their new ranks, and fill it from copies that other members have kept (``runtime.optimizer.copies``).
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_groups

from bytescale.common.errors import RankFailure, RanksLost
from bytescale.runtime.group import answered
from bytescale.runtime.mesh import Mesh, MeshShape, hdp_ranks_per_node
from bytescale.runtime.optimizer.copies import StateCopies
from bytescale.runtime.plain_data import all_gather_json
from bytescale.runtime.sockets import listening_ports, shut_connections
from bytescale.runtime.watch import watch

if TYPE_CHECKING:
    from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer

GRACE_SECONDS = 10.0
"""How long the others wait for a member that may be alive, and does not tell so."""
_LOOK_SECONDS = 0.02
_SECONDS_OF_A_RANK = 1e-4
"""So a store is asked 10,000 times a second at most. That of PyTorch answers ten times as much."""
_TELLING_SECONDS = 1.0
"""Between the asking of a new process and what it tells of itself, unless it has died."""


class Members:
    """This process and the others.

    Attributes:
        number: this process's, for good; below 0: it has joined.
        numbers: those of the members of this generation, in the order of ranks.
        generation: how many times members have changed.
        former: rank in the generation before of each member; None: it is new.
        shape: of a unit, whose HDP ranks are a domain's.
        spares: numbers of processes that are there, and make no whole unit.
        timeout: of the groups of gloo that are made here, and of waiting for a member that lives and does not come.
        group: of gloo, over all members.
        copies: what this process has kept of optimizer states; none: it is new.
        end_watch: from then on, members may end (``runtime.watch``).
    """

    group: dist.ProcessGroup
    _copies_of: Callable[[ShardedOptimizer], StateCopies]
    _device = torch.device("cpu")

    def __init__(self, store: dist.Store, number: int, first: Sequence[int]) -> None:
        self.store, self.number, self.generation, self.shape = store, number, 0, MeshShape(hdp=1)
        self.numbers, self.former, self.spares = list(first), list[int | None](first), list[int]()
        self._before = list(first)
        self.timeout, self.copies = timedelta(minutes=30), list[StateCopies]()
        self.end_watch: Callable[[], None] = lambda: None
        self._seen = 0  # processes that have asked to join, as far as members know
        self._about: dict[int, dict[str, Any]] = {}
        self._living = _LivingStore(store, self)  # PyTorch keeps the part of it in C++ alone

    @classmethod
    def at_first(cls, store: dist.Store, rank: int, size: int) -> Self:
        return cls(dist.PrefixStore("members", store), rank, range(size))

    @classmethod
    def joining(cls, store: dist.Store, wait_seconds: float) -> Self:
        """Ask to join the run that meets in ``store``, and wait until its members take this process in.

        Raises ``SystemExit`` if the run has ended meanwhile, ``RankFailure`` if it does not take this one in.
        """
        store = dist.PrefixStore("members", store)
        made = cls(store, -store.add("asked", 1), [])
        made._wait_until_taken(wait_seconds)
        return made

    def _wait_until_taken(self, wait_seconds: float) -> None:
        key, until = f"taken/{self.number}", time.monotonic() + wait_seconds
        self.store.set(f"about/{self.number}", json.dumps(_about_this_process()))
        while not self.store.check([key]) or int(self.store.get(key)) <= self.generation:
            if self.store.check(["ended"]):
                raise SystemExit(0)
            if not self._any_may_live():
                raise RankFailure(
                    "all ranks that this process was to join are gone",
                    so="nothing is left to go on with",
                    fix="continue from the last checkpoint",
                )
            if time.monotonic() > until:
                raise RankFailure(
                    f"the run did not take this process in within {wait_seconds:.0f} s",
                    so="it ends, and the run goes on without it",
                    fix="look whether the run makes steps, and meets in the same store",
                )
            time.sleep(_LOOK_SECONDS)
        self.generation = int(self.store.get(key))
        self._take(json.loads(self.store.get(f"members/{self.generation}")))

    @property
    def rank(self) -> int:
        return self.numbers.index(self.number)

    @property
    def size(self) -> int:
        return len(self.numbers)

    @property
    def pause(self) -> float:
        """Between two questions of a rank to the store, which all of them ask."""
        return max(_LOOK_SECONDS, self.size * _SECONDS_OF_A_RANK)

    @property
    def gone(self) -> list[int]:
        """Ranks of the generation before that are not there any more."""
        there = {*self.numbers, *self.spares}
        return [rank for rank, number in enumerate(self._before) if number not in there]

    def groups_store(self) -> dist.Store:
        """Where the groups of this generation meet. PyTorch's watchdog does not end this process for their errors."""
        for name in ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "WAIT_TIMEOUT_DUMP_MILSEC"):
            os.environ.setdefault(f"TORCH_NCCL_{name}", "0")
        return dist.PrefixStore(f"groups/{self.generation}", self._living)

    def all_may_live(self) -> bool:
        return all(map(self._may_live, self.numbers))

    def num_waiting(self) -> int:
        """How many processes could be taken in that are no members. Members but the first do not look: 0."""
        try:
            waiting = self.store.add("asked", 0) - self._seen + len(self.spares) if self.rank == 0 else 0
        except RuntimeError:  # a store that is gone counts when ranks have to meet there
            return 0
        return (self.size + waiting) // self.shape.size * self.shape.size - self.size

    def opened(self, mesh: Mesh) -> None:
        """All groups of ``mesh`` are open: tell the others where this process is. Every member calls it."""
        make = partial(dist.new_group, backend="gloo", timeout=self.timeout, use_local_synchronization=True)
        shape, tp, self._device = mesh.shape, mesh.tp.rank, mesh.world.device
        self.shape = MeshShape(hdp=mesh.domain.size, tp=shape.tp, pp=shape.pp)
        self.group = group = make(list(range(self.size)))
        if self.shape.size > 1:
            group = make([shape.rank(mesh.stage, hdp, tp) for hdp in range(shape.hdp)])
        per_node = hdp_ranks_per_node(mesh.world, shape.tp)
        position, unit = mesh.stage * shape.tp + tp, mesh.domain.size
        self._copies_of = partial(
            StateCopies, group=group, generation=self.generation, per_node=per_node, unit=unit, position=position
        )
        everyone = all_gather_json(_about_this_process(_port_of(self.store)), self.group)
        self._about = dict(zip(self.numbers, everyone, strict=True))
        if self.rank == 0:
            self.store.set("now", json.dumps(self._about))
        self.end_watch = watch(self.has_lost, self._tell_life, self.pause)

    def keep(self, optimizer: ShardedOptimizer) -> None:
        """Keep copies of this generation's states in place of former ones. Every member calls it."""
        self.copies.append(self._copies_of(optimizer))  # beside the former ones, until all members have theirs
        self.copies[-1].complete()
        del self.copies[:-1]

    def end(self) -> None:
        """Tell who waits to be taken in that there is nothing to join any more."""
        self.end_watch()
        self.store.set("ended", "")

    def _any_may_live(self) -> bool:
        """Whether the run may go on; for a process that is none of its members yet."""
        if self.store.check(["now"]):
            self._about = {int(number): about for number, about in json.loads(self.store.get("now")).items()}
        return not self._about or any(map(self._may_live, self._about))

    def leave(self) -> None:
        """End all groups of this process. Members that wait for it get an error at once, where gloo connects them."""
        self.end_watch()
        with suppress(RuntimeError):  # a store that is gone counts in ``next_generation``
            self.store.set(f"left/{self.generation}", "")
        shut_connections({port for about in self._about.values() for port in about["ports"]})
        if dist.is_initialized():
            (abort_process_groups if self._device.type == "cuda" else dist.destroy_process_group)()
        for copies in self.copies:
            copies.close()

    def has_lost(self) -> bool:
        """Whether a member of this generation is gone, or has left it, before the end. Any thread may ask."""
        try:
            is_lost = not self.all_may_live() or self.store.check([f"left/{self.generation}"])
            return is_lost and not self.store.check(["ended"])
        except RuntimeError:  # of the store
            return False

    def _tell_life(self) -> None:
        with suppress(RuntimeError):  # of the store
            self.store.add(f"lives/{self.generation}/{self.number}", 1)

    def next_generation(self, error: RanksLost | None = None) -> None:
        """Agree with all that are there on the next members. Every member that is there calls it, behind ``leave``.

        A spare waits here until it is a member. Raises ``SystemExit`` if the run ends before; ``RankFailure`` if the
        others went on without this process, or the store is gone; ``error`` if nobody is gone and nobody has come:
        ranks do not understand each other then, and would not do so the next time.
        """
        with answered("the store in which ranks meet does not answer; the process that served it may be gone"):
            self._next_generation()
        if self.number not in (*self.numbers, *self.spares):
            raise RankFailure(
                "the other ranks went on without this one, which came too late",
                so="it ends; it may join again as a new process",
                fix="look at what held it up (a stopped process, a slow disk)",
            )
        if error is not None and not self.gone and None not in self.former:
            raise error
        if self.number in self.spares:
            self.copies.clear()
            self._wait_until_taken(math.inf)

    def _next_generation(self) -> None:
        here, following = f"there/{self.generation}", f"members/{self.generation + 1}"
        place, first, told = self.store.add(here, 1), 1, dict[int, tuple[int, float]]()
        self.store.set(f"{here}/{place}", str(self.number))
        while not self.store.check([following]):
            if first == place:  # who came first waits for the others, and proposes: every rank asks for little then
                self.store.compare_set(following, "", json.dumps(self._proposal(here)))
            elif not (self.store.check([f"{here}/{first}"]) and self._may_come(self._came(here, first), told)):
                first += 1
            else:
                time.sleep(self.pause)
        self.generation += 1
        self._take(json.loads(self.store.get(following)))
        for number in [number for number, former in zip(self.numbers, self.former, strict=True) if former is None]:
            self.store.set(f"taken/{number}", str(self.generation))

    def _proposal(self, here: str) -> dict[str, Any]:
        """Members of the next generation: those of this one that come, and who has asked to join."""
        came = self._wait_for_members(here)
        there = [number for number in self.numbers if number in came and self._may_live(number)]
        units, now = self._units(), set(there)
        broken = {unit for number, unit in units.items() if number not in now}
        there.sort(key=lambda number: units[number] in broken)  # the next unit has copies of what these have
        asked, about = self.store.add("asked", 0), dict[int, Any]()
        for number in (*self.spares, *range(-1 - self._seen, -1 - asked, -1)):
            until = time.monotonic() + _TELLING_SECONDS
            while not self.store.check([f"about/{number}"]) and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
            if self.store.check([f"about/{number}"]):
                self._about[number] = about[number] = json.loads(self.store.get(f"about/{number}"))
                there += [number] if self._may_live(number) else []
        whole = len(there) // self.shape.size * self.shape.size
        whole = whole or len(there)  # too few ranks are refused where their mesh is made
        known = {"before": self.numbers, "seen": asked, "about": about}
        return {"numbers": there[:whole], "spares": there[whole:], **known}

    def _wait_for_members(self, here: str) -> set[int]:
        """Until each of this generation has come ``here``, is gone, or has not told for a while that it lives."""
        until, told = time.monotonic() + self.timeout.total_seconds(), dict[int, tuple[int, float]]()
        came, read, missing = set[int](), set[int](), {*self.numbers}
        while True:
            for place in {*range(1, self.store.add(here, 0) + 1)} - read:
                if self.store.check([f"{here}/{place}"]):
                    read.add(place)
                    came.add(self._came(here, place))
            missing = {number for number in missing - came if self._may_come(number, told)}
            if not missing or time.monotonic() > until:
                return came
            self._tell_life()
            time.sleep(_LOOK_SECONDS)

    def _came(self, here: str, place: int) -> int:
        return int(self.store.get(f"{here}/{place}"))

    def _may_come(self, number: int, told: dict[int, tuple[int, float]]) -> bool:
        """Whether a process may live, and has told so lately. ``told``: of each, how often, and when it was asked."""
        times, since = told.setdefault(number, (0, time.monotonic()))
        if not self._may_live(number) or time.monotonic() - since < GRACE_SECONDS:
            return self._may_live(number)
        now = self.store.add(f"lives/{self.generation}/{number}", 0)
        told[number] = now, time.monotonic()
        return now != times

    def _units(self) -> dict[int, int]:
        """Of each member the unit."""
        domain = self.shape.hdp
        shape = replace(self.shape, hdp=max(1, self.size // self.shape.size) * domain)
        return {number: shape.coordinates(rank)[1] // domain for rank, number in enumerate(self.numbers)}

    def _take(self, agreed: dict[str, Any]) -> None:
        self.numbers, self.spares, self._seen = agreed["numbers"], agreed["spares"], agreed["seen"]
        self._before = before = agreed["before"]
        self._about |= {int(number): about for number, about in agreed["about"].items()}
        self.former = [before.index(number) if number in before else None for number in self.numbers]

    def _may_live(self, number: int) -> bool:
        """Whether a process may be alive: False once this machine does not know it any more."""
        about = self._about.get(number)
        return about is None or about["machine"] != _machine() or _start_of(about["pid"]) == about["start"]


class _LivingStore(dist.Store):
    """A store in which nobody waits for a process that is gone: groups are made here, and one may die meanwhile."""

    def __init__(self, store: dist.Store, members: Members) -> None:
        super().__init__()
        self._store, self._members = store, members
        self._seconds = 300.0

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (self._seconds if timeout is None else timeout.total_seconds())
        while not self._store.check(list(keys)):
            if not self._members.all_may_live():
                raise RuntimeError("a rank is gone")
            if time.monotonic() > until:
                raise RuntimeError("ranks did not come in time")
            time.sleep(self._members.pause / 4)


def _passed_on(name: str) -> Callable[..., Any]:
    return lambda living, *given: getattr(living._store, name)(*given)


for _name in ("add", "check", "compare_set", "delete_key", "set"):  # C++ looks for them in the class
    setattr(_LivingStore, _name, _passed_on(_name))


def _about_this_process(store_port: int | None = None) -> dict[str, Any]:
    """``store_port``: of connections that are none of a group's."""
    ports = [port for port in listening_ports() if port != store_port]
    return {"machine": _machine(), "pid": os.getpid(), "start": _start_of(os.getpid()), "ports": ports}


def _port_of(store: dist.Store) -> int | None:
    """The port at which one of the ranks serves the store; None: it is no server."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None


@cache
def _machine() -> str:
    """What processes have in common that know each other by their ids."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # nobody else has it


def _start_of(pid: int) -> str:
    """When a process began, in the kernel's words; empty: there is none, or it has ended and nobody has looked yet."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state == "Z" else rest[18]
