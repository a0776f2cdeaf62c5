"""Prepares a plan for the simulator: what each micro-batch holds, and which micro-batches run together.

An *event* is a set of micro-batches that start and end together: a single local micro-batch, or the micro-batches of
all members of a shared slice group.

Shape letters: M micro-batches of all ranks, E events, R ranks, G groups, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost.model import windowed_squares
from bytescale.cost.stage import Loads
from bytescale.plan import Plan
from bytescale.plan.nodes import crossings
from bytescale.plan.plan import offsets_of, segment_sums
from bytescale.plan.slices import member_places
from bytescale.plan.tiles import shares_of


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
    plan: Plan,
    *,
    ranks_per_node: int = 8,
    speeds: FloatArray | None = None,
    windows: Sequence[tuple[int, float]] = (),
) -> Events:
    """The events of a verified ``plan`` on nodes of ``ranks_per_node`` consecutive ranks.

    ``speeds [R]`` are relative; None: all are 1. ``windows``: as ``Profile.windows``.
    """
    relative = np.ones(plan.num_ranks) if speeds is None else np.asarray(speeds, dtype=float)
    ranks = plan.micro_batch_ranks
    entry_micro_batch = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.micro_batch_group_offsets))
    is_shared = plan.group_sizes[plan.micro_batch_groups] > 1
    shared_group = np.full(plan.num_micro_batches, -1, dtype=np.int64)
    shared_group[entry_micro_batch[is_shared]] = plan.micro_batch_groups[is_shared]

    place = np.zeros(plan.num_micro_batches, dtype=np.int64)
    place[entry_micro_batch[is_shared]] = member_places(plan)[is_shared]
    members = _Members.of(plan, shared_group, place, ranks_per_node)
    shared_tokens = members.of_group(plan.group_tokens)
    row = np.stack((members.row_share - members.next_in_row_share, members.row_share - members.share), axis=1)
    # The micro-batches of a shared group are one event. Every other micro-batch is an event of its own.
    local = shared_group < 0
    number = shared_group.copy()
    number[local] = shared_group.max(initial=-1) + 1 + np.arange(int(local.sum()))
    _, event, counts = np.unique(number, return_inverse=True, return_counts=True)
    return Events(
        loads=_loads(plan, members, relative, windows),
        micro_batch_ranks=ranks,
        micro_batch_events=event,
        member_offsets=offsets_of(counts),
        member_micro_batches=np.argsort(event, kind="stable"),
        ring_tokens=shared_tokens * (members.column_share - members.next_share),
        ring_is_near=members.next_is_near,
        row_tokens=shared_tokens[:, None] * row,
        row_is_near=members.row_is_near,
        num_ranks=plan.num_ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Members:
    """Every micro-batch as a member of its shared group. Arrays are ``[M]``; without a shared group, 0 or False."""

    group: IntArray  # number of the shared group, or -1
    share: FloatArray  # share of the group's tokens that this member holds
    largest_share: FloatArray  # largest share of any member of the group
    column_share: FloatArray  # share of all members of its column
    next_share: FloatArray  # share of the next member of the column, to which this one sends
    next_is_near: NDArray[np.bool_]  # whether that member lies in the same node
    row_share: FloatArray  # share of all members of its row
    next_in_row_share: FloatArray  # share of the next member of the row
    row_is_near: NDArray[np.bool_]  # whether the row lies in one node
    columns_leave_node: NDArray[np.bool_]  # whether any column of the group does: the slowest link sets the pace
    rows_leave_node: NDArray[np.bool_]  # whether any row does

    def of_group(self, values: NDArray, otherwise: float = 0.0) -> FloatArray:
        """``[M]`` the entry of ``values [G]`` for each micro-batch's shared group; ``otherwise`` without one."""
        return np.where(self.group >= 0, values[self.group], otherwise).astype(np.float64)

    @staticmethod
    def of(plan: Plan, group: IntArray, place: IntArray, ranks_per_node: int) -> _Members:
        """``place [M]``: of each micro-batch's rank in ``plan.group_ranks``."""
        starts, sizes = plan.group_rank_offsets[:-1], plan.group_sizes
        shares = shares_of(plan.group_weights, sizes, plan.group_columns)
        share = shares.own
        # Member p Q + q of a group is in row p and column q.
        first, size, columns = (np.repeat(values, sizes) for values in (starts, sizes, plan.group_columns))
        member = np.arange(len(share)) - first
        following = first + (member + columns) % size
        row_head = first + member - member % columns
        next_in_row = row_head + (member + 1) % columns
        node = plan.group_ranks // ranks_per_node
        far = crossings(plan.group_ranks, sizes, plan.group_columns, ranks_per_node=ranks_per_node)
        shared = group >= 0
        return _Members(
            group=group,
            share=share[place] * shared,
            largest_share=np.maximum.reduceat(share, starts)[group] * shared,
            column_share=shares.column[place] * shared,
            next_share=share[following][place] * shared,
            next_is_near=(node == node[following])[place] & shared,
            row_share=shares.row[place] * shared,
            next_in_row_share=share[next_in_row][place] * shared,
            row_is_near=(np.bincount(row_head, weights=node != node[row_head]) == 0)[row_head[place]] & shared,
            columns_leave_node=far.columns[group] & shared,
            rows_leave_node=far.rows[group] & shared,
        )


def _loads(plan: Plan, members: _Members, speeds: FloatArray, windows: Sequence[tuple[int, float]]) -> Loads:
    entry_micro_batch = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.micro_batch_group_offsets))
    tokens = plan.group_tokens.astype(np.float64)
    squares = segment_sums(windowed_squares(plan.lengths[plan.group_sequences], windows), plan.group_sequence_offsets)
    is_local = plan.group_sizes[plan.micro_batch_groups] == 1

    def of_locals(values: FloatArray) -> FloatArray:
        weights = values[plan.micro_batch_groups] * is_local
        return np.bincount(entry_micro_batch, weights=weights, minlength=plan.num_micro_batches).astype(np.float64)

    local_tokens = of_locals(tokens)
    sequences = np.diff(plan.group_sequence_offsets).astype(np.float64)
    own_shared = members.share * members.of_group(tokens)
    offloaded = of_locals(tokens * plan.group_offload_ratio) + own_shared * members.of_group(plan.group_offload_ratio)
    return Loads(
        local_tokens=local_tokens,
        local_squares=of_locals(squares),
        shared_tokens=members.of_group(tokens),
        shared_squares=members.of_group(squares),
        local_sequences=of_locals(sequences),
        shared_sequences=members.of_group(sequences),
        degree=members.of_group(plan.group_sizes, otherwise=1.0),
        columns=members.of_group(plan.group_columns, otherwise=1.0),
        share=members.share,
        tile=members.row_share * members.column_share,
        largest_share=members.largest_share,
        inter_node=members.columns_leave_node,
        row_leaves_node=members.rows_leave_node,
        offload_ratio=offloaded / np.maximum(local_tokens + own_shared, 1.0),
        speed=speeds[plan.micro_batch_ranks],
    )
