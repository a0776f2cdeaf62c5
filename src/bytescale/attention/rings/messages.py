"""What members of a shared group send one another: buffers, tags, and what a row of a message holds.

Shape letters: n rows of a message; H query heads, G key/value heads, D width of queries and keys, Dv of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum, auto

import torch
from torch import Tensor


class Kind(IntEnum):
    """Messages of one shared group that can travel between the same two ranks at the same time. Their tags differ."""

    FORWARD_KV = 0
    BACKWARD_KV = auto()
    BACKWARD_GRADIENTS = auto()
    FORWARD_QUERIES = auto()
    FORWARD_RESULTS = auto()
    BACKWARD_QUERIES = auto()
    BACKWARD_RESULTS = auto()
    DOCUMENT_ROWS = auto()
    FORWARD_HALO = auto()
    BACKWARD_HALO = auto()
    FORWARD_STATES = auto()
    BACKWARD_STATES = auto()
    INDEX_KEYS = auto()

    def tag(self, group: int) -> int:
        """The tag of such a message of the shared group with this number."""
        return group * len(Kind) + self


class RingBuffers:
    """Buffers for the messages of shared groups. The first call of attention allocates them; later calls reuse them.

    The code that runs micro-batches calls ``release`` after the forward and after the backward of each micro-batch.
    Then the memory is free for work without messages, such as the loss or another micro-batch.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[Tensor]] = {}

    def take(self, what: str, count: int, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Return ``count`` contiguous tensors of this shape and dtype, on the device of ``like``.

        Calls with the same ``what`` share memory. The values in the tensors are undefined.
        """
        size = math.prod(shape)
        kept = self._kept.get(what, [])
        fits = all(room.numel() >= size and (room.dtype, room.device) == (dtype, like.device) for room in kept)
        if len(kept) < count or not fits:
            kept = self._kept[what] = [like.new_empty(size, dtype=dtype) for _ in range(count)]
        return [room[:size].view(*shape) for room in kept[:count]]

    def release(self) -> None:
        """Give the memory back to the allocator. The next call allocates again."""
        self._kept.clear()


def message_width(k: Tensor, v: Tensor) -> int:
    """Numbers in a row of keys and values: all heads of K, then all heads of V."""
    return k.shape[1] * (k.shape[2] + v.shape[2])


def keys_of(message: Tensor, k: Tensor) -> Tensor:
    """The keys ``[n, G, D]`` in the rows of a message ``[n, G (D + Dv)]``, or their gradients; D and G are ``k``'s."""
    return message[:, : k.shape[1] * k.shape[2]].unflatten(1, k.shape[1:])


def values_of(message: Tensor, v: Tensor) -> Tensor:
    """The values ``[n, G, Dv]`` in the rows of a message, or their gradients."""
    return message[:, -v.shape[1] * v.shape[2] :].unflatten(1, v.shape[1:])


def pack(k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
    """Copy ``k [n, G, D]`` and ``v [n, G, Dv]`` into the first rows of a message buffer ``[N, G (D + Dv)]``."""
    rows = buffer[: k.shape[0]]
    keys_of(rows, k).copy_(k)
    values_of(rows, v).copy_(v)
    return rows


Field = tuple[Sequence[int], torch.dtype]
"""A tensor in a message: the shape of one row, and the dtype."""


def fields_of(message: Tensor, num_rows: int, fields: Sequence[Field]) -> list[Tensor]:
    """Views ``[num_rows, *shape]`` of different dtypes that lie in one message, one after the other.

    ``message [bytes]`` is uint8, contiguous, and has at least ``message_bytes`` bytes.
    """
    return [
        message[start:stop].view(dtype).view(num_rows, *shape)
        for (start, stop), (shape, dtype) in zip(_places(fields, num_rows), fields, strict=True)
    ]


def message_bytes(fields: Sequence[Field], num_rows: int) -> int:
    """Bytes of a message: the sum of its fields, each of which starts at a multiple of its dtype's size."""
    return _places(fields, num_rows)[-1][1]


def _places(fields: Sequence[Field], num_rows: int) -> list[tuple[int, int]]:
    places, stop = [], 0
    for shape, dtype in fields:
        start = -(-stop // dtype.itemsize) * dtype.itemsize
        stop = start + num_rows * math.prod(shape) * dtype.itemsize
        places.append((start, stop))
    return places
