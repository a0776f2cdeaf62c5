"""Point-to-point messages: between the members of slice groups, inside the one HDP process group, and between stages.

No communicator is ever made for a slice group (paper section 5.1): a message is addressed by the peer's rank in the HDP
group, its tag and its size, all three known from the plan on both sides. Three facts shape the code (torch 2.13):

* Two blocking gloo sends that face each other hang. So receives are posted first, and both are asynchronous.
* A gloo receive into a buffer of another size aborts or passes silently. So sizes are never guessed.
* NCCL runs the operations of one communicator one after the other. Around a ring, everybody's lone receive would wait
  for a send that stands behind somebody's receive. So both directions go through one ``batch_isend_irecv``, which is
  one operation (``tests/nccl`` shows what hangs otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from bytescale.attention.clock import Clock, HostClock
from bytescale.common.errors import RankFailure, problem


@dataclass
class Transfer:
    """A send and a receive under way. Holds the buffers: gloo reads them until both are done."""

    exchange: Exchange
    works: Sequence[dist.Work]
    buffers: tuple[Tensor, ...]
    peers: tuple[int, ...]

    def wait(self) -> None:
        """Block (CPU) or order the current stream (CUDA) until both directions are done."""
        with self.exchange.clock.span():
            for work in self.works:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self.exchange.lost(self.peers, error) from error
        self.works, self.buffers = (), ()


class Exchange:
    """One rank's end of the HDP group's point-to-point traffic, with counters that the metrics and the tests read.

    Attributes:
        clock: of waiting for messages.
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
        """``group`` may be None for a single rank, which never sends; ``rank`` is the rank inside ``group``.

        ``members``: what callers and messages call the group's ranks, in the group's order, ``rank`` included; None:
        their ranks in the group.

        ``batched``: pair each send with its receive in one ``batch_isend_irecv``, as NCCL needs. ``name``: of the
        group, for messages. ``clock``: the host's, unless it is given.
        """
        self.group = group
        self.rank = rank
        self.name = name
        self.bytes_sent = 0
        self.messages_sent = 0
        self.clock = HostClock() if clock is None else clock
        self._batched = batched
        self._group_ranks = None if members is None else {member: rank for rank, member in enumerate(members)}

    def start(self, *, send: Tensor | None, to: int, receive: Tensor | None, source: int, tag: int) -> Transfer:
        """Post a receive and a send, contiguous tensors, either of which may be None or empty (then not posted)."""
        if self.group is None:
            raise RuntimeError("a single rank has no peer to exchange with: the plan names a group of several ranks")
        send = send if send is not None and send.numel() else None
        receive = receive if receive is not None and receive.numel() else None
        if send is not None:
            self.bytes_sent += send.numel() * send.element_size()
            self.messages_sent += 1
        try:
            works = self._post(send, to, receive, source, tag)
        except RuntimeError as error:
            raise self.lost((to, source), error) from error
        buffers = tuple(tensor for tensor in (send, receive) if tensor is not None)
        return Transfer(exchange=self, works=works, buffers=buffers, peers=(to, source))

    def lost(self, peers: Sequence[int], error: RuntimeError) -> RankFailure:
        """What to raise when a message to or from ``peers`` failed."""
        return RankFailure(
            problem(
                f"{self.name} rank {self.rank} lost its peer ({self.name} rank "
                f"{' or '.join(str(peer) for peer in sorted(set(peers)))}): {str(error).splitlines()[0]}",
                so="the step cannot be finished, every rank stops",
                fix="look for the first error in the log of the rank that is named, then resume",
            )
        )

    def _post(self, send: Tensor | None, to: int, receive: Tensor | None, source: int, tag: int) -> list[dist.Work]:
        assert self.group is not None, "start() has looked"
        if self._group_ranks is not None:
            to, source = self._group_ranks[to], self._group_ranks[source]
        works: list[dist.Work] = []
        if self._batched:
            operations = []
            if receive is not None:
                operations.append(dist.P2POp(dist.irecv, receive, group=self.group, group_peer=source))
            if send is not None:
                operations.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=to))
            works = dist.batch_isend_irecv(operations) if operations else []
        else:
            if receive is not None:
                works.append(self.group.recv([receive], source, tag))
            if send is not None:
                works.append(self.group.send([send], to, tag))
        return works
