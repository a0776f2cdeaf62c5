"""Replays recorded steps in which ranks die and the others leave, in a random order of everything that can happen.

``tests.nccl.replay`` says how a rank is modelled. Here, too:

- a rank dies: its host stops, and its streams sooner or later. What it has begun to send arrives, or does not.
- behind a death each other rank aborts its communicators (``runtime.watch``), at any time and in any order, while its
  host goes on. First it raises its flag (``group.ABORTED``).
- an operation that is aborted ends, and leaves *garbage*: so does whatever the rank computes behind it, or sends, and
  what others make of that.
- a host that posts to an aborted communicator raises, and so does one that looks at its flag (``Look``).
- ``Kept``: from then on this rank's states after an update count as complete.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.nccl.recorder import Communicator, Drain, Event, Kept, Look, Post, Wait
from tests.nccl.replay import EVERYTHING, Operation, Replay, Rules


@dataclass
class _Rank:
    """How far one rank has come. Operations are numbers of posts, and what they map to is whether it is garbage."""

    events: Sequence[Event]
    speeds: dict[str, float]
    host: int = 0
    blocked: bool = False
    compute: list[int] = field(default_factory=list)  # of the compute stream: a post that is waited for, or -1
    computed: int = 0
    has_garbage: bool = False  # from here on in the compute stream
    behind: dict[int, int] = field(default_factory=dict)
    streams: dict[Communicator, list[int]] = field(default_factory=dict)
    heads: dict[Communicator, int] = field(default_factory=lambda: defaultdict(int))
    begun: dict[int, bool] = field(default_factory=dict)
    done: dict[int, bool] = field(default_factory=dict)
    kept: dict[int, bool] = field(default_factory=dict)  # by update
    flag: bool = False
    to_abort: list[Communicator] | None = None
    has_raised: bool = False
    is_dead: bool = False  # its host
    has_stopped: bool = False  # its streams, too


class Leaving:
    """All ranks' programs, one of which ends early.

    Args:
        victim: the rank that dies once its host has had ``at`` events.
        watches: whether ranks abort. ``flag_first``: or raise their flag behind the aborts, which is a fault.
    """

    def __init__(
        self, programs: Sequence[Sequence[Event]], victim: int, at: int, seed: int, *,
        watches: bool = True, flag_first: bool = True, rules: Rules = EVERYTHING,
    ) -> None:  # fmt: skip
        self.replay, self.victim, self.at = Replay(programs, rules), victim, at
        self.watches, self.flag_first, self.random = watches, flag_first, random.Random(seed)
        kinds = ("host", "compute", "stream", "abort", "stop")
        self.ranks = [
            _Rank(events, {kind: 10.0 ** self.random.uniform(-2.0, 0.0) for kind in kinds}) for events in programs
        ]
        self.event_of = {
            (rank, event.number): number
            for rank, events in enumerate(programs)
            for number, event in enumerate(events)
            if isinstance(event, Post)
        }
        for (rank, _), post in self.replay.posts.items():
            self.ranks[rank].streams[post.communicator] = []
        self.lost: set[Operation] = set()  # what the victim had begun to send, and nobody gets
        self.deceived: list[int] = []  # ranks that looked behind their own aborts, and did not raise

    def run(self) -> None:
        """Until nothing more can happen."""
        while actions := [action for rank in range(len(self.ranks)) for action in self._actions(rank)]:
            (action,) = self.random.choices([do for _, do in actions], [speed for speed, _ in actions])
            action()

    def stuck(self) -> list[int]:
        """Living ranks whose hosts neither raised nor came to their ends."""
        return [
            rank
            for rank, state in enumerate(self.ranks)
            if rank != self.victim and not state.has_raised and (state.host < len(state.events) or state.blocked)
        ]

    def goes_on_from(self) -> tuple[int, bool]:
        """The newest update that all ranks have kept, and whether any of them kept garbage. 0: that of the beginning.

        What the victim kept, its neighbour has.
        """
        update = min(max(state.kept, default=0) for state in self.ranks)
        return update, any(state.kept.get(update, False) for state in self.ranks)

    def _actions(self, rank: int) -> list[tuple[float, Callable[[], None]]]:
        state, found = self.ranks[rank], list[tuple[float, Callable[[], None]]]()
        speeds = state.speeds
        if state.has_stopped:
            return []
        if state.is_dead:
            found.append((speeds["stop"], lambda: self._stop(rank)))
        elif not state.has_raised and self._host_may_go_on(rank):
            found.append((speeds["host"], lambda: self._advance_host(rank)))
        if state.computed < len(state.compute) and state.compute[state.computed] in {-1, *state.done}:
            found.append((speeds["compute"], lambda: self._compute(rank)))
        for communicator, numbers in state.streams.items():
            if communicator in self._aborted(rank) or state.heads[communicator] == len(numbers):
                continue
            number = numbers[state.heads[communicator]]
            if number not in state.begun and state.computed >= state.behind[number]:
                found.append((speeds["stream"], lambda number=number: self._begin(rank, number)))  # type: ignore[misc]
            elif number in state.begun and self._peers_have_begun(rank, number):
                found.append((speeds["stream"], lambda number=number: self._end(rank, number)))  # type: ignore[misc]
        if self.watches and not state.is_dead and self.ranks[self.victim].is_dead and state.to_abort != []:
            found.append((speeds["abort"], lambda: self._abort(rank)))
        return found

    def _aborted(self, rank: int) -> set[Communicator]:
        state = self.ranks[rank]
        return set() if state.to_abort is None else {*state.streams} - {*state.to_abort}

    def _stop(self, rank: int) -> None:
        state = self.ranks[rank]
        state.has_stopped = True
        self.lost = {(rank, number) for number in state.begun if self.random.random() < 0.5}

    def _host_may_go_on(self, rank: int) -> bool:
        state = self.ranks[rank]
        if not state.blocked:
            return state.host < len(state.events) or (rank == self.victim and self.at == state.host)
        event = state.events[state.host - 1]
        if isinstance(event, Post):
            is_aborted = event.communicator in self._aborted(rank)
            return is_aborted or all(self.ranks[to].host > self.event_of[to, of] for to, of in self._connects(rank))
        if isinstance(event, Drain) or not self.replay.rules.device_waits:
            return state.computed == len(state.compute)
        return state.computed == len(state.compute) and all(
            state.heads[communicator] == len(numbers) for communicator, numbers in state.streams.items()
        )

    def _connects(self, rank: int) -> list[Operation]:
        event = self.ranks[rank].events[self.ranks[rank].host - 1]
        assert isinstance(event, Post)
        return self.replay.first.get((rank, event.number), [])

    def _advance_host(self, rank: int) -> None:
        state, rules = self.ranks[rank], self.replay.rules
        if state.blocked:
            state.blocked, event = False, state.events[state.host - 1]
            state.has_raised = self._is_of_aborted(rank, event)
            return
        if rank == self.victim and state.host == self.at:
            state.is_dead = True
            return
        event = state.events[state.host]
        state.host += 1
        if isinstance(event, Post):
            state.has_raised = self._is_of_aborted(rank, event)
            if not state.has_raised:
                state.behind[event.number] = len(state.compute)
                state.streams[event.communicator].append(event.number)
                state.blocked = rules.first_use and bool(self._connects(rank))
        elif isinstance(event, Wait):
            state.compute.append(event.number)
        elif isinstance(event, Drain):
            state.blocked = True
        elif isinstance(event, Look):
            state.has_raised = state.flag
            self.deceived += [rank] if state.has_garbage and state.to_abort is not None and not state.flag else []
        elif isinstance(event, Kept):
            state.kept[event.update] = state.has_garbage
        else:
            state.compute.append(-1)
            state.blocked = rules.device_waits or rules.host_syncs

    def _is_of_aborted(self, rank: int, event: Event) -> bool:
        return isinstance(event, Post) and event.communicator in self._aborted(rank)

    def _compute(self, rank: int) -> None:
        state = self.ranks[rank]
        state.has_garbage |= state.done.get(state.compute[state.computed], False)
        state.computed += 1

    def _begin(self, rank: int, number: int) -> None:
        self.ranks[rank].begun[number] = self.ranks[rank].has_garbage

    def _peers_have_begun(self, rank: int, number: int) -> bool:
        peers = self.replay.peers[rank, number]
        return all(of in self.ranks[peer].begun and (peer, of) not in self.lost for peer, of in peers)

    def _end(self, rank: int, number: int) -> None:
        state = self.ranks[rank]
        sent = [state.begun[number], *(self.ranks[peer].begun[of] for peer, of in self.replay.peers[rank, number])]
        state.done[number] = any(sent)
        communicator = self.replay.posts[rank, number].communicator
        state.heads[communicator] += 1

    def _abort(self, rank: int) -> None:
        """The next thing that the watch of a rank does."""
        state = self.ranks[rank]
        if state.to_abort is None:
            state.to_abort = self.random.sample([*state.streams], len(state.streams))
            state.flag = self.flag_first
        else:
            communicator = state.to_abort.pop()
            numbers = state.streams[communicator]
            state.done |= dict.fromkeys(numbers[state.heads[communicator] :], True)
            state.heads[communicator] = len(numbers)
        state.flag |= not state.to_abort
