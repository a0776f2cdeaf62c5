"""Replays the recorded operations of all ranks under NCCL's rules, without NCCL, and finds out whether they hang.

A rank is a host, a compute stream, and a stream for each communicator. The rules, from NCCL's and PyTorch's sources:

1. An operation is put on its communicator's stream, behind everything that the compute stream has been given.
   Operations of one communicator run one after the other, in the order of posting.
2. A batch of messages is one operation. Nothing is buffered, and tags do not count: the k-th send from a to b meets the
   k-th receive that b has posted from a. The operation ends when the matching operation of every peer has started. A
   collective ends when all members have started theirs of the same number.
3. Waiting for an operation makes the compute stream wait, not the host.

The following can be switched on (``Rules``):

4. ``host_syncs``: at any kernel launch the host may wait for its compute stream (a copy from pageable memory, a size
   that has to be known).
5. ``first_use``: the first message between two ranks of a communicator blocks the host until the peer's host posts its
   side, and so do all others that the two batches connect for the first time.
6. ``device_waits``: at any launch or allocation the host may wait for all its streams (an allocator that returns memory
   to the driver, the lazy loading of a kernel).

Each of these can only add waiting. So one replay is enough: every wait that may happen does happen, and everything
happens as early as it then can. A program that ends in this replay ends under any timing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.nccl.recorder import SEND, Communicator, Compute, End, Event, Post, Wait

Operation = tuple[int, int]
"""World rank, and the number of one of its posts."""


@dataclass(frozen=True)
class Rules:
    """Which waits happen that need not."""

    host_syncs: bool = False
    first_use: bool = False
    device_waits: bool = False


STREAMS_ONLY = Rules()
EVERYTHING = Rules(host_syncs=True, first_use=True, device_waits=True)
ALL_RULES = [STREAMS_ONLY, Rules(host_syncs=True), Rules(first_use=True), Rules(device_waits=True), EVERYTHING]


class Mismatch(AssertionError):
    """Ranks posted operations that do not belong together."""


@dataclass
class _Rank:
    """How far one rank has come."""

    events: Sequence[Event]
    host: int = 0  # the next event
    posted: int = 0  # operations that the host has reached
    blocked_by: str = ""  # what the host waits for inside its latest event
    compute: list[int] = field(default_factory=list)  # of the compute stream: a number waited for, or -1 for a kernel
    computed: int = 0
    behind: dict[int, int] = field(default_factory=dict)  # post number -> items of the compute stream before it
    streams: dict[Communicator, list[int]] = field(default_factory=lambda: defaultdict(list))
    heads: dict[Communicator, int] = field(default_factory=lambda: defaultdict(int))
    done: set[int] = field(default_factory=set)


class Replay:
    """All ranks' programs under some rules."""

    def __init__(self, programs: Sequence[Sequence[Event]], rules: Rules) -> None:
        """Raises ``Mismatch`` where messages or collectives do not pair up."""
        self.rules = rules
        self.ranks = [_Rank(events) for events in programs]
        self.posts = {
            (rank, event.number): event
            for rank, events in enumerate(programs)
            for event in events
            if isinstance(event, Post)
        }
        self.peers, self.first = _paired(self.posts)

    def run(self) -> list[str]:
        """Let everything happen that can; returns who is stuck where and why, nothing when all come to their ends."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.ranks)):
                while self._step(rank):
                    moved = True
        return [self._stuck(rank) for rank, state in enumerate(self.ranks) if not self._ended(state)]

    def _ended(self, state: _Rank) -> bool:
        return state.host == len(state.events) and not state.blocked_by and self._drained(state)

    def _step(self, rank: int) -> bool:
        state = self.ranks[rank]
        return self._advance_streams(rank, state) or self._advance_host(rank, state)

    def _advance_streams(self, rank: int, state: _Rank) -> bool:
        moved = False
        while state.computed < len(state.compute):
            number = state.compute[state.computed]
            if number >= 0 and number not in state.done:
                break
            state.computed += 1
            moved = True
        for communicator, numbers in state.streams.items():
            while (head := state.heads[communicator]) < len(numbers):
                operation = rank, numbers[head]
                if not self._started(operation) or not all(map(self._started, self.peers[operation])):
                    break
                state.done.add(numbers[head])
                state.heads[communicator] += 1
                moved = True
        return moved

    def _started(self, operation: Operation) -> bool:
        """Whether it is at the head of its communicator's stream or done, with all kernels before it."""
        rank, number = operation
        state = self.ranks[rank]
        if number in state.done:
            return True
        if number not in state.behind or state.computed < state.behind[number]:
            return False
        communicator = self.posts[operation].communicator
        return state.streams[communicator][state.heads[communicator]] == number

    def _advance_host(self, rank: int, state: _Rank) -> bool:
        if state.blocked_by:
            if not self._may_go_on(rank, state):
                return False
            state.blocked_by = ""
            return True
        if state.host == len(state.events):
            return False
        event = state.events[state.host]
        state.host += 1
        if isinstance(event, Compute):
            state.compute.append(-1)
            if self.rules.device_waits:
                state.blocked_by = "everything that its device has been given"
            elif self.rules.host_syncs:
                state.blocked_by = "its compute stream"
        elif isinstance(event, Wait):
            state.compute.append(event.number)
        else:
            state.posted = event.number + 1
            state.behind[event.number] = len(state.compute)
            state.streams[event.communicator].append(event.number)
            if self.rules.first_use and self.first.get((rank, event.number)):
                state.blocked_by = "a peer that it is connected to for the first time"
        return True

    def _may_go_on(self, rank: int, state: _Rank) -> bool:
        """Whether what the host waits for has happened."""
        event = state.events[state.host - 1]
        if isinstance(event, Post):
            return self._connected((rank, event.number))
        if self.rules.device_waits:
            return self._drained(state)
        return state.computed == len(state.compute)

    def _drained(self, state: _Rank) -> bool:
        return state.computed == len(state.compute) and all(
            state.heads[communicator] == len(numbers) for communicator, numbers in state.streams.items()
        )

    def _connected(self, operation: Operation) -> bool:
        """Whether every host has reached its side of this operation's new connections, and of theirs."""
        seen, waiting = {operation}, [operation]
        while waiting:
            for peer in self.first.get(waiting.pop(), ()):
                if self.ranks[peer[0]].posted <= peer[1]:
                    return False
                if peer not in seen:
                    seen.add(peer)
                    waiting.append(peer)
        return True

    def _stuck(self, rank: int) -> str:
        """In words: where a rank stands, and which operation of whom it lacks."""
        state = self.ranks[rank]
        event = state.events[max(0, state.host - 1)]
        lines = [f"rank {rank} stands in the {event.during}"]
        if state.blocked_by:
            lines.append(f"its host waits for {state.blocked_by}")
        for communicator, numbers in state.streams.items():
            if state.heads[communicator] == len(numbers):
                continue
            operation = rank, numbers[state.heads[communicator]]
            missing = [peer for peer in self.peers[operation] if not self._started(peer)]
            post = self.posts[operation]
            lines.append(f"'{communicator.name}' has posted {_words(post)} in the {post.during}")
            lines += [
                f"rank {peer[0]} has not started its side of it, of the {self.posts[peer].during}" for peer in missing
            ]
        return "; ".join(lines)


def _words(post: Post) -> str:
    if post.collective:
        return post.collective
    return " and ".join(f"{end.kind} {end.num_bytes} bytes {_WITH[end.kind]} rank {end.peer}" for end in post.ends)


_WITH = {SEND: "to", "receive": "from"}


def _paired(
    posts: dict[Operation, Post],
) -> tuple[dict[Operation, list[Operation]], dict[Operation, list[Operation]]]:
    """Of every operation, those of other ranks that it needs, and those to which it is the first message."""
    sides: dict[tuple[Communicator, int, int, str], list[tuple[Operation, End]]] = defaultdict(list)
    collectives: dict[Communicator, dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    peers: dict[Operation, list[Operation]] = {operation: [] for operation in posts}
    first: dict[Operation, list[Operation]] = defaultdict(list)
    for (rank, number), post in posts.items():
        for end in post.ends:
            source, to = (rank, end.peer) if end.kind == SEND else (end.peer, rank)
            sides[post.communicator, source, to, end.kind].append(((rank, number), end))
        if post.collective:
            collectives[post.communicator][rank].append((rank, number))
    for communicator, source, to, _ in list(sides):
        sent, received = (sides[communicator, source, to, kind] for kind in (SEND, "receive"))
        if len(sent) != len(received):
            raise Mismatch(
                f"'{communicator.name}': rank {source} sends {len(sent)} messages to rank {to}, which receives "
                f"{len(received)}"
            )
    for (communicator, source, to, kind), sent in list(sides.items()):
        if kind != SEND:
            continue
        for place, ((a, end), (b, other)) in enumerate(
            zip(sent, sides[communicator, source, to, "receive"], strict=True)
        ):
            if end.num_bytes != other.num_bytes:
                raise Mismatch(
                    f"'{communicator.name}': message {place} from rank {source} to rank {to} has {end.num_bytes} bytes "
                    f"({posts[a].during}), its receive takes {other.num_bytes} ({posts[b].during})"
                )
            peers[a].append(b)
            peers[b].append(a)
            if place == 0:
                first[a].append(b)
                first[b].append(a)
    for communicator, of_rank in collectives.items():
        for together in _columns(communicator, of_rank):
            kinds = {posts[operation].collective for operation in together}
            if len(kinds) > 1:
                raise Mismatch(f"'{communicator.name}': ranks meet in different collectives: {sorted(kinds)}")
            for operation in together:
                peers[operation] += [other for other in together if other != operation]
    return peers, first


def _columns(communicator: Communicator, of_rank: dict[int, list[Operation]]) -> list[tuple[Operation, ...]]:
    counts = {rank: len(of_rank.get(rank, [])) for rank in communicator.ranks}
    if len(set(counts.values())) > 1:
        raise Mismatch(f"'{communicator.name}': ranks take part in different numbers of collectives: {counts}")
    return list(zip(*of_rank.values(), strict=True))
