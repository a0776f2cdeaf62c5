"""Copies of optimizer states in host memory, from which ranks go on that have lost one of them.

ZeRO-1 has every state once. So behind each update a rank copies its shards to host memory and sends them to a rank of
another node, if there is one, while the next step computes::

    update k | copy to host | step k + 1 computes ....... | wait for both | reduce | update k + 1
                            | send to and receive from a neighbour |

Each rank keeps its own shards of the last two updates, and those of one other rank. Ranks exchange the gradients' norm
before they update, and a rank takes part when its exchange of the last update is complete. So when a rank dies, in
whatever phase, there is one update that all others have: the newest of these counts, and weights follow from it. What
a copy contains is known by names of parameters, so whoever has a parameter's part afterwards finds it. With tensor
parallelism and pipelines, each *position* in the model has copies of its own, which a rank of any position may hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bytescale.common.errors import CheckpointError
from bytescale.runtime.group import answered
from bytescale.runtime.optimizer.flat import Range
from bytescale.runtime.plain_data import all_gather_json, packed, unpacked

if TYPE_CHECKING:
    from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer

_ALIGNMENT = 16
_DTYPES = {str(kind): kind for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8)}


@dataclass(frozen=True)
class Place:
    """Where one state of neighbouring weights lies: in a parameter's part, and in a copy's bytes."""

    part: str  # the parameter's name, and the number of its part
    state: str
    start: int  # in the part, in elements
    size: int
    dtype: str
    offset: int  # in the copy, in bytes

    @property
    def num_bytes(self) -> int:
        return self.size * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class StatesCopy:
    """One rank's optimizer states after one update.

    Attributes:
        about: ``num_updates`` and ``numbers`` (states that are single numbers).
        content: ``[bytes]`` in host memory.
    """

    about: dict[str, Any]
    places: Sequence[Place]
    content: Tensor

    @property
    def num_updates(self) -> int:
        return int(self.about["num_updates"])

    @staticmethod
    def of(optimizer: ShardedOptimizer, memory: Tensor | None) -> StatesCopy:
        """A copy of what ``optimizer`` has now. ``memory``: bytes of an older one, to be used again."""
        parts, places, offset = _parts(optimizer), list[Place](), 0
        for (name, state), ranges in parts.items():
            for own in ranges:
                places.append(Place(name, state, own.start, len(own.values), str(own.values.dtype), offset))
                offset += -(-own.values.nbytes // _ALIGNMENT) * _ALIGNMENT
        if memory is None or len(memory) != offset:
            memory = torch.empty(offset, dtype=torch.uint8, pin_memory=optimizer.group.device.type == "cuda")
        about = {"num_updates": optimizer.num_updates, "numbers": optimizer.state_numbers()}
        copy = StatesCopy(about, places, memory)
        for place, own in zip(places, chain(*parts.values()), strict=True):
            copy.values(place).copy_(own.values)
        return copy

    def values(self, place: Place) -> Tensor:
        return self.content[place.offset : place.offset + place.num_bytes].view(_DTYPES[place.dtype])

    def header(self) -> dict[str, Any]:
        return {**self.about, "places": [astuple(place) for place in self.places]}


class StateCopies:
    """The copies that one rank keeps: of the last two updates, its own states and those of its neighbour.

    Attributes:
        generation: of members (``runtime.members``), to whose ranks the copies belong.
        position: of the optimizer's ranks in the model.
        num_bytes: what this rank has sent since the last update.
    """

    def __init__(
        self, optimizer: ShardedOptimizer, group: dist.ProcessGroup, *,
        generation: int = 0, per_node: int = 1, unit: int = 1, position: int = 0,
    ) -> None:  # fmt: skip
        """Begin to keep copies of ``optimizer``. Every rank calls it. Behind ``complete``, all ranks have theirs.

        Args:
            group: of gloo, over the ranks of ``optimizer.group``, which nobody else uses.
            per_node: ranks of a node. The copy of a rank goes as many further, to another node if there are several.
            unit: ranks that are lost together; the copy goes to another unit if there are several.
        """
        self._optimizer, self._group = optimizer, group
        self.rank, self.num_ranks = group.rank(), group.size()
        self.shift = per_node if unit <= per_node <= self.num_ranks - unit else unit % self.num_ranks or 1
        self._own: list[StatesCopy] = []
        self._received: list[StatesCopy] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bytescale-copies")
        self._exchange: Future[None] | None = None
        self.generation, self.position, self.num_bytes = generation, position, 0
        optimizer.before_norm[:], optimizer.behind_update[:] = [self.finish], [self.keep]
        self.keep()

    def complete(self) -> None:
        """Wait until every rank has all copies of now. Raises ``RankFailure``."""
        self.finish()
        with answered(f"rank {self.rank} lost the others"):
            dist.barrier(self._group)

    def keep(self) -> None:
        """Copy the states, and begin to exchange them. The copies before the last ones are given up."""
        unused = self._own.pop(0).content if len(self._own) > 1 else None
        with answered("a rank was lost before states were copied"):  # an update may gather (``muon``)
            copy = StatesCopy.of(self._optimizer, unused)
        self._own.append(copy)
        room = self._received.pop(0).content if len(self._received) > 1 else None
        self._exchange = self._thread.submit(self._send_and_receive, copy, room)

    def finish(self) -> None:
        """Wait until the last exchange is complete. Raises ``RankFailure``."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            with answered(f"rank {self.rank} lost the rank that keeps its copies"):
                exchange.result()

    def close(self) -> None:
        """Give up what is under way. What is complete is kept."""
        self._exchange = None
        self._thread.shutdown(wait=True)

    def _send_and_receive(self, copy: StatesCopy, room: Tensor | None) -> None:
        if self.num_ranks == 1:
            return
        to, source = (self.rank + self.shift) % self.num_ranks, (self.rank - self.shift) % self.num_ranks
        header = packed(copy.header())
        sizes, theirs = torch.tensor([len(header), len(copy.content)]), torch.zeros(2, dtype=torch.int64)
        self._swap(sizes, theirs, to, source)
        their_header = torch.empty(int(theirs[0]), dtype=torch.uint8)
        self._swap(header, their_header, to, source)
        if room is None or len(room) != int(theirs[1]):
            room = torch.empty(int(theirs[1]), dtype=torch.uint8)
        self._swap(copy.content, room, to, source)
        about = unpacked(their_header)
        self._received.append(StatesCopy(about, [Place(*place) for place in about.pop("places")], room))
        self.num_bytes = len(header) + len(copy.content)

    def _swap(self, mine: Tensor, theirs: Tensor, to: int, source: int) -> None:
        sent = dist.isend(mine, group=self._group, group_dst=to)
        dist.recv(theirs, group=self._group, group_src=source)
        assert sent is not None, "this rank is in the group"
        sent.wait()

    def held(self) -> dict[int, list[StatesCopy]]:
        """Complete copies by rank, of this one and of the one that it keeps copies for."""
        if self.num_ranks == 1:
            return {self.rank: self._own}
        return {self.rank: self._own, (self.rank - self.shift) % self.num_ranks: self._received}


def restore_from_copies(
    optimizer: ShardedOptimizer,
    kept: Sequence[StateCopies],
    group: dist.ProcessGroup | None,
    *,
    at_most: int | None = None,
) -> int:
    """Continue on the ranks of ``group`` from what they have kept. Returns the number of updates that were made.

    Every rank calls it, with an optimizer of the same parameters over these ranks, or over those of its position.

    Args:
        kept: those of the ranks before. Two, if a rank died while the others made new ones; none: this rank is new.
        group: of gloo, over the ranks of all positions.
        at_most: the newest update that this rank wants to go on from; None: the newest that there is.

    Raises ``CheckpointError`` on every rank if the states of a rank are lost: it is gone, and so is its copy; and where
    a rank has parameters without copies.
    """
    own: dict[tuple[int, ...], StatesCopy] = {
        (copy.num_updates, copies.generation, copies.num_ranks, copies.position, rank): copy
        for copies in kept
        for rank, of_rank in copies.held().items()
        for copy in of_rank
    }
    num_positions = (1 if group is None else group.size()) // optimizer.group.size
    holders: dict[tuple[int, ...], dict[tuple[int, int], int]] = {}  # of each update: which rank has the copy of which
    everyone = all_gather_json([at_most, list(own)], group)
    for holder, (_, told) in enumerate(everyone):
        for *update, of_position, rank in told:
            holders.setdefault(tuple(update), {}).setdefault((of_position, rank), holder)
    newest = min((wanted for wanted, _ in everyone if wanted is not None), default=max(holders)[0])
    needed = {update: {*np.ndindex(num_positions, update[2])} for update in holders}
    whole = [update for update, known in holders.items() if not needed[update] - {*known} and update[0] <= newest]
    if not whole:
        last = max(update for update in holders if update[0] <= newest)
        of_position, rank = min(needed[last] - {*holders[last]})
        raise CheckpointError(
            f"the optimizer states of {'rank' if num_positions == 1 else 'HDP rank'} {rank} are lost: it is gone, and "
            "so is the rank that had their copy",
            so="this run cannot go on by itself",
            fix="continue from the last checkpoint",
        )
    at = max(whole)
    if at[0]:
        optimizer.require_states()
    order, rank = sorted(holders[at].items()), 0 if group is None else group.rank()
    copies = [own[(*at, *of)] if holder == rank else None for of, holder in order]
    told = [iter(headers) for headers in all_gather_json([copy.header() for copy in copies if copy], group)]
    headers = [next(told[holder]) for _, holder in order]
    wanted, places = _parts(optimizer), [[Place(*place) for place in header["places"]] for header in headers]
    with answered("a rank was lost while states came from copies"):
        arrived = _deliver(wanted, places, copies, [holder for _, holder in order], group)
    if arrived < sum(len(own.values) for ranges in wanted.values() for own in ranges):
        raise CheckpointError("the others have no copies of some parameters of this rank", so="its model is another",
                              fix="make the same model on every rank, with the same parameters frozen")  # fmt: skip
    optimizer.finish_restore(at[0], headers[-1]["numbers"])
    return at[0]


def _parts(optimizer: ShardedOptimizer) -> dict[tuple[str, str], list[Range]]:
    """What this rank has of each parameter's part and state. Ranges begin at elements of the part."""
    found: dict[tuple[str, str], list[Range]] = {}
    for zero in optimizer.zeros:
        for state, ranges in sorted(optimizer.states(zero).items()):
            for own in ranges:
                for piece in zero.parameters.pieces(own.place):
                    values, start = own.values[piece.inside(own.place)], piece.start - piece.entry.start
                    name = f"{piece.entry.name} {piece.entry.cut.index}"
                    found.setdefault((name, state), []).append(Range(start, values))
    return found


def _deliver(
    wanted: Mapping[tuple[str, str], Sequence[Range]], places: Sequence[Sequence[Place]],
    copies: Sequence[StatesCopy | None], holders: Sequence[int], group: dist.ProcessGroup | None,
) -> int:  # fmt: skip
    """Bring the states of all copies to the ranks that have these weights now. Returns how many numbers this rank got.

    Args:
        places: in each copy. ``copies``: those that this rank holds; ``holders``: of each, the rank that does.
    """
    needed, memory = [], []
    for copy, own_places in enumerate(places):
        for number, place in enumerate(own_places):
            for own in wanted.get((place.part, place.state), ()):
                low, high = max(place.start, own.place.start), min(place.start + place.size, own.place.stop)
                if low < high:
                    needed.append((copy, number, low - place.start, high - place.start))
                    memory.append(own.values[low - own.start : high - own.start])
    sent = []
    for other, ranges in enumerate(all_gather_json(needed, group)):
        for copy, number, low, high in ranges:
            if (held := copies[copy]) is not None and other != holders[copy]:
                values = held.values(places[copy][number])[low:high]
                sent.append(dist.isend(values, group=group, group_dst=other))
    for (copy, number, low, high), values in zip(needed, memory, strict=True):
        place = places[copy][number]
        if (held := copies[copy]) is not None:
            values.copy_(held.values(place)[low:high])
        else:
            arrived = torch.empty(high - low, dtype=_DTYPES[place.dtype])
            dist.recv(arrived, group=group, group_src=holders[copy])
            values.copy_(arrived)
    for work in sent:
        assert work is not None, "this rank is in the group"
        work.wait()
    return sum(map(len, memory))
