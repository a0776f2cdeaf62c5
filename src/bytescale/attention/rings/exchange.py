"""Point-to-point messages between the members of a shared group, and between pipeline stages.

All messages of shared groups go through the one HDP process group (paper section 5.1). The peer's rank, a tag and a
size identify a message, and the plan tells all three to both sides. Three facts about torch 2.13 shape the code:

* Two ranks that send to each other with blocking gloo calls hang. Therefore receives are posted first, and sends and
  receives are asynchronous.
* A gloo receive into a buffer of the wrong size either aborts or goes unnoticed. Therefore sizes are never guessed.
* NCCL runs the operations of one communicator one after the other, so a ring of single receives would hang. Therefore
  the send and the receive are one operation, ``batch_isend_irecv`` (``tests/nccl`` shows what hangs otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from bytescale.attention.clock import Clock
from bytescale.common.errors import RanksLost

Message = tuple[Tensor, int]
"""A contiguous tensor, and the rank that gets it or sends it."""


@dataclass
class Transfer:
    """A send and a receive that have been started. It keeps the buffers alive, which gloo uses until both are done."""

    exchange: Exchange
    works: Sequence[dist.Work]
    buffers: tuple[Tensor, ...]
    peers: tuple[int, ...]

    def wait(self) -> None:
        """Wait until both directions are done. On CUDA the current stream waits, and the host does not."""
        with self.exchange.clock.span():
            for work in self.works:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self.exchange.lost(self.peers, error) from error
        self.works, self.buffers = (), ()


class Exchange:
    """One rank's end of a group's point-to-point messages, with counters that metrics and tests read.

    Attributes:
        clock: measures the time spent waiting for messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        *,
        batched: bool = False,
        name: str = "HDP",
        clock: Clock | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """Make this rank's end of the group.

        Args:
            group: the process group. None for a single rank, which never sends.
            rank: this rank: its entry in ``members``, or its rank in ``group`` if ``members`` is None.
            batched: whether each send and its receive form one ``batch_isend_irecv``, as NCCL requires.
            clock: the clock for waiting; None: that of the host.
            members: the numbers by which callers and error messages refer to the ranks, in the group's order. None: the
                ranks in the group.
        """
        self.group = group
        self.rank = rank
        self.name = name
        self.bytes_sent = 0
        self.clock = clock or Clock()
        self._batched = batched
        self._group_ranks = None if members is None else {member: rank for rank, member in enumerate(members)}

    def start(self, *, send: Tensor | None, to: int, receive: Tensor | None, source: int, tag: int) -> Transfer:
        """Post a receive and a send of contiguous tensors. A tensor that is None or empty is not posted."""
        sends = [] if send is None else [(send, to)]
        return self.start_all(sends, [] if receive is None else [(receive, source)], tag=tag)

    def start_all(self, sends: Sequence[Message], receives: Sequence[Message], *, tag: int) -> Transfer:
        """Post several receives and sends as one operation; of those between the same two ranks, in the same order."""
        if self.group is None:
            raise RuntimeError("a single rank has no peer to exchange with: the plan names a group of several ranks")
        sends, receives = ([message for message in part if message[0].numel()] for part in (sends, receives))
        self.bytes_sent += sum(tensor.numel() * tensor.element_size() for tensor, _ in sends)
        peers = tuple(peer for _, peer in [*sends, *receives])
        try:
            works = self._post(sends, receives, tag)
        except RuntimeError as error:
            raise self.lost(peers, error) from error
        buffers = tuple(tensor for tensor, _ in [*sends, *receives])
        return Transfer(exchange=self, works=works, buffers=buffers, peers=peers)

    def lost(self, peers: Sequence[int], error: RuntimeError) -> RanksLost:
        """Return the error to raise when a message to or from ``peers`` failed."""
        return RanksLost(
            f"{self.name} rank {self.rank} lost its peer ({self.name} rank "
            f"{' or '.join(str(peer) for peer in sorted(set(peers)))}): {str(error).splitlines()[0]}",
            so="the step cannot be finished, every rank stops",
            fix="look for the first error in the log of the rank that is named, then resume",
        )

    def _post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> list[dist.Work]:
        assert self.group is not None, "start_all() has already checked that there is a group"
        known = self._group_ranks
        outgoing, incoming = (
            [(tensor, peer if known is None else known[peer]) for tensor, peer in part] for part in (sends, receives)
        )
        if self._batched:
            operations = [
                dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for tensor, peer in incoming
            ]
            operations += [
                dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer) for tensor, peer in outgoing
            ]
            return dist.batch_isend_irecv(operations) if operations else []
        works = [self.group.recv([tensor], peer, tag) for tensor, peer in incoming]
        return works + [self.group.send([tensor], peer, tag) for tensor, peer in outgoing]
