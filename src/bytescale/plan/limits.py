"""The limits of a rank's memory, as plain numbers. ``verify`` checks every micro-batch of a plan against them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.common.errors import ConfigError
from bytescale.common.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a micro-batch, and the memory that it needs in addition to states and saved activations, in bytes."""

    name: str
    fixed_bytes: float = 0.0
    bytes_per_token: float = 0.0
    bytes_per_shared_token: float = 0.0  # per token of this rank's slice of a shared group
    bytes_per_grid_token: float = 0.0  # the same, in addition, in a grid of several columns
    bytes_per_row_token: float = 0.0  # per token of the slices of the other columns of a grid
    chunk_tokens: float = math.inf  # tokens in one chunk of the work that is done chunk by chunk
    bytes_per_chunk_token: float = 0.0

    def bytes(self, tokens: ArrayLike, shared: ArrayLike, row: ArrayLike = 0) -> FloatArray:
        """Bytes of a micro-batch with ``tokens`` on the rank, ``shared`` of them in a shared group. Broadcasts.

        ``row``: tokens of other columns, whose queries visit this rank; 0 in a ring, and otherwise at least ``shared``.
        """
        tokens, shared, row = (np.asarray(values, dtype=np.float64) for values in (tokens, shared, row))
        chunk = self.bytes_per_chunk_token * np.minimum(tokens, self.chunk_tokens)
        slices = self.bytes_per_shared_token * shared + self.bytes_per_row_token * row
        slices = slices + self.bytes_per_grid_token * np.minimum(row, shared)
        return self.fixed_bytes + chunk + self.bytes_per_token * tokens + slices


_FEW_TOKENS = 8192
"""Of a micro-batch: a chunk of fewer is taken to be full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """The memory of one device and its share of host memory.

    A micro-batch of ``n`` tokens, ``m`` of them offloaded and ``k`` of them in a slice of a shared group, needs, if the
    other columns of the group's grid hold ``j`` tokens::

        device    states + saved n - movable m
                  + max over phases (fixed + per token n + per shared token k + per chunk token min(n, chunk)
                                     + per row token j, and per grid token k unless j is 0)
        host      movable m
    """

    states_bytes: float  # parameters, gradients, optimizer
    saved_bytes_per_token: float  # by all layers, for backward
    movable_bytes_per_token: float  # the part that layers which may offload save
    phases: tuple[Phase, ...]
    device_bytes: float | tuple[float, ...] = math.inf
    """Of every rank, or of each."""
    host_bytes: float = math.inf
    first_stage: MemoryLimits | None = None
    """Of a pipeline's first stage, whose ranks encode pictures; None: these are its own."""

    def device_room(self, ranks: IntArray) -> FloatArray:
        """Bytes of the device of each of ``ranks``."""
        rooms = np.asarray(self.device_bytes, dtype=np.float64)
        return rooms[ranks] if rooms.ndim else np.full(len(ranks), float(rooms))

    def device_peak(self, tokens: ArrayLike, moved: ArrayLike, shared: ArrayLike, row: ArrayLike = 0) -> FloatArray:
        """Bytes in the most demanding phase of each micro-batch. Broadcasts."""
        held, moved, shared = (np.asarray(values, dtype=np.float64) for values in (tokens, moved, shared))
        saved = self.saved_bytes_per_token * held - self.movable_bytes_per_token * moved
        return self.states_bytes + saved + np.max([phase.bytes(held, shared, row) for phase in self.phases], axis=0)

    def most_tokens(self, device_bytes: float, moved_share: float = 0.0) -> int:
        """Tokens of the largest micro-batch that fits if all of it is a slice of a shared group (0: none fits).

        ``moved_share`` of them are offloaded.
        """
        fits, too_many = 0, 2**36
        while too_many - fits > 1:
            tokens = (fits + too_many) // 2
            if self.device_peak(tokens, moved_share * tokens, tokens) <= device_bytes:
                fits = tokens
            else:
                too_many = tokens
        return fits

    def beside(self, waiting: float, alone: float, least: int = 1) -> tuple[MemoryLimits, int]:
        """Those where pictures hold ``waiting`` bytes of a device while text runs; and how many tokens then fit.

        Raises ``ConfigError`` where fewer tokens fit than ``least``, or not the bytes that encoders need ``alone``.
        """
        rooms, first = self.device_bytes, self.first_stage or self
        room, there = min(rooms) if isinstance(rooms, tuple) else rooms, first.states_bytes
        encoding = replace(first, states_bytes=there + waiting, device_bytes=rooms)
        fits, limits = min(((own.most_tokens(room), own) for own in (encoding, self)), key=lambda found: found[0])
        if fits < least or there + alone > room:
            raise ConfigError(
                f"the pictures of a batch need {format_bytes(alone)} a rank while they are encoded and "
                f"{format_bytes(waiting)} meanwhile, beside {format_bytes(there)} for parameters, gradients and "
                f"optimizer and a micro-batch of {least} tokens or more, of {format_bytes(room)} that a rank may use",
                so="training would run out of memory",
                fix="use checkpointing, with which an encoder keeps one picture's activations at a time, smaller "
                "pictures, fewer in a batch, more ranks, or a larger device_gib; or freeze the encoder",
            )
        return limits, fits

    def worst_phase(self, tokens: int, shared: int) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: float(phase.bytes(tokens, shared)))

    @property
    def movable_share(self) -> float:
        """The share of an additional token's device memory, in the most demanding phase, that offloading can move.

        A chunk of so many tokens that a micro-batch may be smaller counts as growing with it. The paper's Eq. 3 uses
        (l - 2) / l here, because it considers the memory of layers only.
        """
        steepest = max(
            phase.bytes_per_token
            + phase.bytes_per_shared_token
            + (phase.bytes_per_chunk_token if phase.chunk_tokens > _FEW_TOKENS else 0.0)
            for phase in self.phases
        )
        return self.movable_bytes_per_token / (self.saved_bytes_per_token + max(steepest, 0.0))
