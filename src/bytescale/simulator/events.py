"""Prepares a plan for the simulator: what each micro-batch holds, and which micro-batches run together.

An *event* is a set of micro-batches that start and end together: a single local micro-batch, or the micro-batches of
all members of a shared slice group.

Shape letters: M micro-batches of all ranks, E events, R ranks, G groups, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost.model import windowed_squares
from bytescale.cost.stage import Loads
from bytescale.plan import Plan
from bytescale.plan.nodes import crossings
from bytescale.plan.plan import offsets_of, segment_sums
from bytescale.plan.slices import member_places
from bytescale.plan.tiles import Shares, shares_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Events:
    """A plan's micro-batches, and the events that they form. Shared groups come first, each kind in plan order."""

    loads: Loads  # the work of the M micro-batches
    micro_batch_ranks: IntArray  # [M] rank that runs each micro-batch
    micro_batch_events: IntArray  # [M] event that each micro-batch belongs to
    member_offsets: IntArray  # [E + 1] offsets into member_micro_batches
    member_micro_batches: IntArray  # [M] micro-batches, ordered by event
    ring_tokens: FloatArray  # [M] tokens of K/V that the rank sends to the next member of its column
    ring_is_near: NDArray[np.bool_]  # [M] whether that member is in its node
    row_tokens: FloatArray  # [M, 2] tokens of queries that it sends along its row, and of results that it sends home
    row_is_near: NDArray[np.bool_]  # [M] whether its row is in its node
    num_ranks: int

    @property
    def num_events(self) -> int:
        return len(self.member_offsets) - 1

    def longest_member(self, seconds: FloatArray) -> FloatArray:
        """Return seconds per event, ``[..., E]``, from seconds per micro-batch, ``[..., M]``.

        Members of an event run in lockstep, so the event lasts as long as its slowest member.
        """
        ordered = seconds[..., self.member_micro_batches]
        return np.maximum.reduceat(ordered, self.member_offsets[:-1], axis=-1)


def events_of(
    plan: Plan, *, ranks_per_node: int = 8, speeds: FloatArray | None = None, windows: Sequence[tuple[int, float]] = ()
) -> Events:
    """The events of a verified ``plan`` on nodes of ``ranks_per_node`` consecutive ranks.

    ``speeds [R]`` are relative; None: all are 1. ``windows``: as ``Profile.windows``.
    """
    relative = np.ones(plan.num_ranks) if speeds is None else np.asarray(speeds, dtype=float)
    shared = _Shared.of(plan)
    starts, sizes, columns = plan.group_rank_offsets[:-1], plan.group_sizes, plan.group_columns
    shares = shares_of(plan.group_weights, sizes, columns)
    # Member p Q + q of a group is in row p and column q. Arrays of members are ``[E]``, group by group.
    first, size, across = (np.repeat(values, sizes) for values in (starts, sizes, columns))
    member, node = np.arange(len(first)) - first, plan.group_ranks // ranks_per_node
    below = first + (member + across) % size
    head = first + member - member % across
    beside = head + (member + 1) % across
    strays = np.bincount(head, weights=node != node[head])  # members of a row that lie in another node than its first
    along_row = shared.of_member(shares.row - shares.own[beside]), shared.of_member(shares.row - shares.own)
    tokens = shared.of_group(plan.group_tokens)
    # The micro-batches of a shared group are one event. Every other micro-batch is an event of its own.
    local, number = ~shared.there, shared.group.copy()
    number[local] = shared.group.max(initial=-1) + 1 + np.arange(int(local.sum()))
    _, event, counts = np.unique(number, return_inverse=True, return_counts=True)
    return Events(
        loads=_loads(plan, shared, shares, ranks_per_node, relative, windows),
        micro_batch_ranks=plan.micro_batch_ranks,
        micro_batch_events=event,
        member_offsets=offsets_of(counts),
        member_micro_batches=np.argsort(event, kind="stable"),
        ring_tokens=tokens * shared.of_member(shares.column - shares.own[below]),
        ring_is_near=shared.of_member(node == node[below]),
        row_tokens=tokens[:, None] * np.stack(along_row, axis=1),
        row_is_near=shared.of_member((strays == 0)[head]),
        num_ranks=plan.num_ranks,
    )


class _Shared(NamedTuple):
    """The shared group of every micro-batch."""

    group: IntArray  # [M] its number, or -1
    place: IntArray  # [M] of the micro-batch's rank in ``plan.group_ranks``

    @property
    def there(self) -> NDArray[np.bool_]:
        return self.group >= 0

    def of_group(self, values: NDArray, otherwise: float = 0.0) -> FloatArray:
        """``[M]`` the entry of ``values [G]`` for each micro-batch's shared group; ``otherwise`` without one."""
        return np.where(self.there, values[self.group], otherwise).astype(np.float64)

    def of_member(self, values: NDArray) -> NDArray:
        """``[M]`` the entry of ``values [E]`` for each micro-batch as a member of its group; 0 or False without one."""
        return values[self.place] * self.there

    @staticmethod
    def of(plan: Plan) -> _Shared:
        entry_micro_batch = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.micro_batch_group_offsets))
        is_shared = plan.group_sizes[plan.micro_batch_groups] > 1
        group, place = np.full(plan.num_micro_batches, -1), np.zeros(plan.num_micro_batches, dtype=np.int64)
        group[entry_micro_batch[is_shared]] = plan.micro_batch_groups[is_shared]
        place[entry_micro_batch[is_shared]] = member_places(plan)[is_shared]
        return _Shared(group, place)


def _loads(
    plan: Plan,
    shared: _Shared,
    shares: Shares,
    ranks_per_node: int,
    speeds: FloatArray,
    windows: Sequence[tuple[int, float]],
) -> Loads:
    entry_micro_batch = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.micro_batch_group_offsets))
    tokens = plan.group_tokens.astype(np.float64)
    squares = segment_sums(windowed_squares(plan.lengths[plan.group_sequences], windows), plan.group_sequence_offsets)
    is_local = plan.group_sizes[plan.micro_batch_groups] == 1
    far = crossings(plan.group_ranks, plan.group_sizes, plan.group_columns, ranks_per_node=ranks_per_node)

    def of_locals(values: FloatArray) -> FloatArray:
        weights = values[plan.micro_batch_groups] * is_local
        return np.bincount(entry_micro_batch, weights=weights, minlength=plan.num_micro_batches).astype(np.float64)

    local_tokens, share = of_locals(tokens), shared.of_member(shares.own)
    sequences = np.diff(plan.group_sequence_offsets).astype(np.float64)
    own_shared = share * shared.of_group(tokens)
    offloaded = of_locals(tokens * plan.group_offload_ratio) + own_shared * shared.of_group(plan.group_offload_ratio)
    return Loads(
        local_tokens=local_tokens,
        local_squares=of_locals(squares),
        shared_tokens=shared.of_group(tokens),
        shared_squares=shared.of_group(squares),
        local_sequences=of_locals(sequences),
        shared_sequences=shared.of_group(sequences),
        degree=shared.of_group(plan.group_sizes, otherwise=1.0),
        columns=shared.of_group(plan.group_columns, otherwise=1.0),
        share=share,
        tile=shared.of_member(shares.tile),
        largest_share=shared.of_group(np.maximum.reduceat(shares.own, plan.group_rank_offsets[:-1])),
        inter_node=far.columns[shared.group] & shared.there,
        row_leaves_node=far.rows[shared.group] & shared.there,
        offload_ratio=offloaded / np.maximum(local_tokens + own_shared, 1.0),
        speed=speeds[plan.micro_batch_ranks],
    )
