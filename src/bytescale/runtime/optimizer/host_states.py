"""Transfers of an optimizer in host memory: gradients come down and updated weights go up, bucket by bucket.

::

    down      bucket 0 | bucket 1 | bucket 2 |
    update             | bucket 0 | bucket 1 | bucket 2 |
    up                            | bucket 0 | bucket 1 | bucket 2 |
    gather                                   | bucket 0 | bucket 1 | bucket 2

Clipping needs the norm of all gradients, so the first bucket comes down behind the last reduction. From then on an
update takes several times as long as its transfers, which move 4 and 2 bytes of a BF16 weight where AdamW reads and
writes 28. Two buffers, page-locked beside a GPU, are enough: a bucket's weights go up from the memory in which its
gradients came down.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bytescale.runtime.optimizer.zero import OptimizerShard
from bytescale.runtime.saved.copy_lane import CopyLane, Event, compute_mark, compute_waits


class HostTransfers:
    """Of all shards of a rank, in order: ``begin``, then ``fetch`` and ``send`` of one after the other."""

    def __init__(self, shards: Sequence[OptimizerShard], device: torch.device) -> None:
        self._shards, self._device = shards, device
        self._down, self._up = CopyLane(device), CopyLane(device)
        most = max(shards, key=lambda shard: shard.gradient.nbytes).gradient
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(most.nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in shards[:2]]
        self._arrived: list[Event] = [None for _ in self._buffers]
        self._left: list[Event] = [None for _ in self._buffers]
        self._number = 0
        self._ready: Event = None  # all gradients are final, and nobody computes with the old weights

    def begin(self) -> None:
        """Start with the first shard. What was launched before is complete when a transfer begins."""
        self._number, self._ready = 0, compute_mark(self._device)
        self._bring(0)

    def fetch(self) -> Tensor:
        """The gradient ``[n]`` of the current shard in host memory. The next one starts to come down."""
        if self._number + 1 < len(self._shards):
            self._bring(self._number + 1)
        arrived = self._arrived[self._number % 2]
        if arrived is not None:
            arrived.synchronize()
        return self._buffer(self._number)

    def send(self) -> None:
        """Round the current shard's updated masters and start to send them to the device; go on to the next shard.

        Whatever is launched on the device from now on finds them there.
        """
        value, number = self._shards[self._number].value, self._number
        rounded = self._buffer(number).view(value.dtype)[: len(value)]
        rounded.copy_(self._shards[number].master)
        self._left[number % 2] = self._up.copy([(value, rounded)], after=[self._ready])
        compute_waits(self._left[number % 2], self._device)
        self._number += 1

    def _bring(self, number: int) -> None:
        gradient = self._shards[number].gradient
        after = [self._ready, self._left[number % 2]]
        self._arrived[number % 2] = self._down.copy([(self._buffer(number), gradient)], after=after)

    def _buffer(self, number: int) -> Tensor:
        gradient = self._shards[number].gradient
        return self._buffers[number % 2][: gradient.nbytes].view(gradient.dtype)
