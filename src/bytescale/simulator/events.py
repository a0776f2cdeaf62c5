"""A plan as the simulator runs it: what each micro-batch holds, and which of them run as one.

An *event* is what starts and ends together: a local micro-batch, or a shared slice group with the micro-batches of all
its members.

Shape letters: M micro-batches of all ranks, E events, R ranks, G groups, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytescale.cost.stage import Loads
from bytescale.plan import Plan
from bytescale.plan.plan import segment_sums

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Events:
    """A plan's micro-batches and how they join. Events are numbered by the plan's order, shared groups first."""

    loads: Loads  # of M micro-batches
    micro_batch_ranks: IntArray  # [M]
    micro_batch_events: IntArray  # [M]
    member_offsets: IntArray  # [E + 1] into member_micro_batches
    member_micro_batches: IntArray  # [M] micro-batches by event
    intra_node_ring_tokens: FloatArray  # [M] tokens of K/V that the rank sends to its neighbour inside its node
    inter_node_ring_tokens: FloatArray  # [M] the same, to a neighbour in another node
    num_ranks: int

    @property
    def num_events(self) -> int:
        return len(self.member_offsets) - 1

    def longest_member(self, seconds: FloatArray) -> FloatArray:
        """``[..., E]`` from ``[..., M]``: members run in step, hence an event lasts as long as its slowest member."""
        ordered = seconds[..., self.member_micro_batches]
        return np.maximum.reduceat(ordered, self.member_offsets[:-1], axis=-1)


def events_of(plan: Plan, *, ranks_per_node: int = 8, speeds: FloatArray | None = None) -> Events:
    """The events of ``plan`` on nodes of ``ranks_per_node`` consecutive ranks.

    Args:
        plan: a verified plan.
        ranks_per_node: consecutive HDP ranks with fast links between them.
        speeds: ``[R]`` relative speeds, all 1 when None.
    """
    ranks = plan.micro_batch_ranks
    entry_micro_batch = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.micro_batch_group_offsets))
    entry_group = plan.micro_batch_groups
    sizes = plan.group_sizes
    is_shared = sizes[entry_group] > 1
    tokens = plan.group_tokens.astype(np.float64)
    squares = segment_sums(
        np.square(plan.lengths[plan.group_sequences].astype(np.float64)), plan.group_sequence_offsets
    )

    shared_group = np.full(plan.num_micro_batches, -1, dtype=np.int64)
    shared_group[entry_micro_batch[is_shared]] = entry_group[is_shared]
    has_shared = shared_group >= 0
    place = _member_places(plan, shared_group[has_shared], ranks[has_shared])
    share, largest, next_share, next_is_near = _member_shares(plan, ranks_per_node)

    def of_group(values: NDArray, otherwise: float) -> FloatArray:
        return np.where(has_shared, values[shared_group], otherwise).astype(np.float64)

    def of_member(values: FloatArray) -> FloatArray:
        out = np.zeros(plan.num_micro_batches)
        out[has_shared] = values[place]
        return out

    def of_locals(values: FloatArray) -> FloatArray:
        weights = values[entry_group] * ~is_shared
        return np.bincount(entry_micro_batch, weights=weights, minlength=plan.num_micro_batches).astype(np.float64)

    local_tokens = of_locals(tokens)
    own_shared = of_member(share) * of_group(tokens, 0.0)
    offloaded = of_locals(tokens * plan.group_offload_ratio) + own_shared * of_group(plan.group_offload_ratio, 0.0)
    total = np.maximum(local_tokens + own_shared, 1.0)
    sent = of_group(tokens, 0.0) * of_member(1.0 - next_share) * has_shared
    near = of_member(next_is_near.astype(np.float64)) > 0
    loads = Loads(
        local_tokens=local_tokens,
        local_squares=of_locals(squares),
        shared_tokens=of_group(tokens, 0.0),
        shared_squares=of_group(squares, 0.0),
        degree=of_group(sizes, 1.0),
        share=of_member(share),
        largest_share=of_group(largest, 0.0),
        inter_node=has_shared & (of_group(_leaves_node(plan, ranks_per_node), 0.0) > 0),
        offload_ratio=offloaded / total,
        speed=np.ones(plan.num_micro_batches) if speeds is None else np.asarray(speeds, dtype=np.float64)[ranks],
    )
    event, offsets, members = _join(shared_group)
    return Events(
        loads=loads,
        micro_batch_ranks=ranks,
        micro_batch_events=event,
        member_offsets=offsets,
        member_micro_batches=members,
        intra_node_ring_tokens=np.where(near, sent, 0.0),
        inter_node_ring_tokens=np.where(near, 0.0, sent),
        num_ranks=plan.num_ranks,
    )


def _join(shared_group: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """``event [M]``, ``offsets [E + 1]``, ``members [M]``: micro-batches of one shared group become one event."""
    local = shared_group < 0
    number = shared_group.copy()
    number[local] = shared_group.max(initial=-1) + 1 + np.arange(int(local.sum()))
    _, event, counts = np.unique(number, return_inverse=True, return_counts=True)
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return event, offsets, np.argsort(event, kind="stable")


def _member_places(plan: Plan, groups: IntArray, ranks: IntArray) -> IntArray:
    """Where each (group, rank) pair stands in ``plan.group_ranks``."""
    owner = np.repeat(np.arange(plan.num_groups), plan.group_sizes)
    keys = owner * plan.num_ranks + plan.group_ranks
    order = np.argsort(keys)
    return order[np.searchsorted(keys, groups * plan.num_ranks + ranks, sorter=order)]


def _member_shares(plan: Plan, ranks_per_node: int) -> tuple[FloatArray, FloatArray, FloatArray, NDArray[np.bool_]]:
    """Per entry of ``group_ranks``: its share, the next member's share and whether that one is in the same node;
    per group ``[G]``: the largest share."""
    starts, sizes = plan.group_rank_offsets[:-1], plan.group_sizes
    share = plan.group_weights / np.repeat(np.add.reduceat(plan.group_weights, starts), sizes)
    largest = np.maximum.reduceat(share, starts)
    following = np.arange(len(share)) + 1
    last = plan.group_rank_offsets[1:] - 1
    following[last] = starts
    node = plan.group_ranks // ranks_per_node
    return share, largest, share[following], node == node[following]


def _leaves_node(plan: Plan, ranks_per_node: int) -> NDArray[np.bool_]:
    """``[G]`` whether a group's members sit in two nodes or more."""
    node = plan.group_ranks // ranks_per_node
    starts = plan.group_rank_offsets[:-1]
    return np.maximum.reduceat(node, starts) != np.minimum.reduceat(node, starts)
