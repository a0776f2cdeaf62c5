"""The makespan of a plan: the time of every micro-batch under a cost model, including waiting for group members.

The rules of time, the same for every planner:

* A rank runs its micro-batches in order. A micro-batch with a slice of a shared group starts when ALL members of the
  group have reached theirs, and it ends on all of them at the same moment: every layer's ring needs every member's keys
  and values, so no member can run ahead.
* Such a micro-batch takes as long as its slowest member: compute divided by speed, plus the exposed part of the ring,
  plus g, the fixed time of a micro-batch.

In a pipeline of p stages the cost model tells the time of one stage, and a rank ends later by its bubbles::

    (p - 1) * sum of max(0, t_i - t_{i-1})       t_i: time of its micro-batch i on a stage, t_0 = 0

A fall to a shorter micro-batch costs as much as the shorter cool-down saves. This is an estimate: it leaves out how a
bubble delays the other ranks of a group.

In a lockstep domain (``plan.domain`` > 1) all ranks of a domain begin a round together. It ends when the slowest has
ended it, and all parameters have been gathered. Domains that share a group go through its round together.

The slow twin is ``tests/planner/slow_evaluate.py``.
Shape letters: G groups, M micro-batches of all ranks, R ranks, E = (micro-batch, group) pairs = (group, member) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.plan.nodes import crossings
from bytescale.plan.plan import concatenated_ranges, offsets_of, segment_sums
from bytescale.plan.slices import member_places
from bytescale.plan.tiles import shares_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The times of a plan, in seconds at the cost model's scale, and its traffic."""

    end_seconds: float  # makespan: when the last rank ends
    rank_end_seconds: FloatArray  # [R] including the bubbles of a pipeline
    micro_batch_start_seconds: FloatArray  # [M]
    micro_batch_end_seconds: FloatArray  # [M]
    ideal_seconds: float  # lower bound: all compute spread evenly over the ranks' speeds
    traffic_tokens: int  # sum of s * (D - 1): tokens whose K/V pass a link, all ranks together
    minimal_traffic_tokens: int  # traffic with every sequence on the fewest ranks that hold it

    @property
    def over_ideal(self) -> float:
        """Makespan divided by the lower bound; 1 is perfect."""
        return self.end_seconds / self.ideal_seconds


def evaluate(plan: Plan, *, cluster: Cluster, cost: CostModel, num_stages: int = 1) -> Outcome:
    """The outcome of ``plan``, which has to pass ``verify``. ``cost`` tells the time of one pipeline stage."""
    own_seconds = _own_seconds(plan, cluster, cost)
    if plan.domain > 1:
        begins, stops = run_rounds(plan, np.maximum(own_seconds, cost.gather_seconds)[None])
        at = 0, plan.micro_batch_rounds, plan.micro_batch_ranks // plan.domain
        starts, ends, rank_ends = begins[at], stops[at], np.repeat(stops[0].max(axis=0, initial=0.0), plan.domain)
    else:
        starts, ends = run_in_order(plan, own_seconds)
        last, some = plan.rank_micro_batch_offsets[1:] - 1, np.diff(plan.rank_micro_batch_offsets) > 0
        rank_ends = np.where(some, ends[np.maximum(last, 0)] if len(ends) else 0, 0.0)
    rank_ends += (num_stages - 1) * segment_sums(_rises(plan, ends - starts), plan.rank_micro_batch_offsets)
    smallest = int(plan.capacity_tokens.min())
    return Outcome(
        end_seconds=float(rank_ends.max()),
        rank_end_seconds=rank_ends,
        micro_batch_start_seconds=starts,
        micro_batch_end_seconds=ends,
        ideal_seconds=float(cost.work_seconds(plan.lengths).sum() / cluster.speeds.sum()),
        traffic_tokens=int((plan.group_tokens * (plan.group_sizes - 1)).sum()),
        minimal_traffic_tokens=int((plan.lengths * (-(-plan.lengths // smallest) - 1)).sum()),
    )


def _rises(plan: Plan, seconds: FloatArray) -> FloatArray:
    """``[M]`` seconds by which each micro-batch is longer than the one before on its rank; 0 if it is shorter."""
    before = np.concatenate(([0.0], seconds[:-1]))[: len(seconds)]
    before[plan.rank_micro_batch_offsets[:-1][np.diff(plan.rank_micro_batch_offsets) > 0]] = 0.0
    return np.maximum(seconds - before, 0.0)


def _own_seconds(plan: Plan, cluster: Cluster, cost: CostModel) -> FloatArray:
    """``[M]`` time of each micro-batch if its rank never had to wait."""
    squares = segment_sums(cost.squares_of(plan.lengths[plan.group_sequences]), plan.group_sequence_offsets)
    work = cost.compute_seconds(plan.group_tokens, squares)
    sizes, columns = plan.group_sizes, plan.group_columns
    far = crossings(plan.group_ranks, sizes, columns, ranks_per_node=cost.ranks_per_node)
    exposed = cost.exposed_seconds(plan.group_tokens, squares, sizes, far.columns, columns, far.rows)
    shares = shares_of(plan.group_weights, sizes, columns)
    ranks, groups = np.repeat(plan.micro_batch_ranks, np.diff(plan.micro_batch_group_offsets)), plan.micro_batch_groups
    places = member_places(plan)
    compute = work[groups] * shares.own[places]
    if (plan.group_weights != 1).any():
        pairs = (shares.tile - shares.own)[places]
        compute += cost.compute_seconds(0.0, squares)[groups] * pairs
    compute += (cost.attention_block_seconds * (sizes - 1) * np.diff(plan.group_sequence_offsets))[groups]
    compute /= cluster.speeds[ranks]
    per_entry = compute + exposed[plan.micro_batch_groups]
    return segment_sums(per_entry, plan.micro_batch_group_offsets) + cost.micro_batch_seconds


def run_in_order(plan: Plan, own_seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Start and end of every micro-batch ``[M]``, from the time of each if its rank never had to wait ``[M]``.

    Only shared micro-batches are run in waves; a wave consists of those that all members have reached. ``local[m]`` is
    the time of all local micro-batches before m on its rank, and ``delay`` is the time that the shared ones add.
    """
    ranks, first_group = plan.micro_batch_ranks, plan.micro_batch_groups[plan.micro_batch_group_offsets[:-1]]
    shared = plan.group_sizes[first_group] > 1
    alone = np.where(shared, 0.0, own_seconds)
    sums = np.concatenate(([0.0], np.cumsum(alone)))
    local = sums[:-1] - np.repeat(sums[plan.rank_micro_batch_offsets[:-1]], np.diff(plan.rank_micro_batch_offsets))
    joint = np.flatnonzero(shared)  # the shared micro-batches, rank by rank in order
    joint_group = first_group[joint]
    by_group = np.argsort(joint_group, kind="stable")
    offsets = offsets_of(np.bincount(joint_group, minlength=plan.num_groups))
    delay = np.zeros(len(joint) + 1)  # of the rank when it reaches each shared micro-batch
    joint_end = np.zeros(len(joint))
    is_first = np.ones(len(joint), dtype=bool)
    is_first[1:] = ranks[joint[1:]] != ranks[joint[:-1]]
    missing = plan.group_sizes - np.bincount(joint_group[is_first], minlength=plan.num_groups)
    reached = joint_group[is_first]
    num_run = 0
    while len(wave := np.unique(reached[missing[reached] == 0])):
        sizes = plan.group_sizes[wave]
        places = by_group[concatenated_ranges(offsets[wave], offsets[wave + 1])]
        runs = np.cumsum(sizes) - sizes
        start = np.maximum.reduceat(delay[places] + local[joint[places]], runs)
        end = np.repeat(start + np.maximum.reduceat(own_seconds[joint[places]], runs), sizes)
        joint_end[places] = end
        num_run += len(places)
        following = places + 1
        goes_on = (following < len(joint)) & ~np.append(is_first, True)[following]
        delay[following[goes_on]] = (end - local[joint[places]])[goes_on]
        reached = joint_group[following[goes_on]]
        missing -= np.bincount(reached, minlength=plan.num_groups)
    assert num_run == len(joint), f"{len(joint) - num_run} shared micro-batches wait for each other: not verified?"
    # A local micro-batch starts when the last shared one before it on its rank has ended and the local ones between.
    since = np.zeros(plan.num_micro_batches)
    since[joint] = joint_end - local[joint]
    starts = _last_shared(since, shared, plan) + local
    ends = np.where(shared, 0.0, starts + alone)
    ends[joint] = joint_end
    group_length = np.zeros(plan.num_groups)
    np.maximum.at(group_length, joint_group, own_seconds[joint])
    starts[joint] = joint_end - group_length[joint_group]
    return starts, ends


def run_rounds(plan: Plan, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Begin and end of every round of every lockstep domain, both ``[phases, rounds, domains]``.

    A domain has no time for rounds after its last one. ``seconds [phases, M]``: of each micro-batch without waiting,
    forward and backward, or both. The plan's groups are aligned (rule 9 of ``verify``).
    """
    rounds, domains = plan.micro_batch_rounds, plan.micro_batch_ranks // plan.domain
    num_domains = plan.num_ranks // plan.domain
    longest: FloatArray = np.zeros((len(seconds), int(rounds.max(initial=-1)) + 1, num_domains))
    for phase, taken in zip(longest, seconds, strict=True):
        np.maximum.at(phase, (rounds, domains), taken)
    together = _together(plan, longest.shape[1])
    begins, ends, clock = np.zeros(longest.shape), np.zeros(longest.shape), np.zeros(num_domains)
    for number, joined in enumerate(together):
        takes_part = longest[0, number] > 0
        for phase in range(len(seconds)):
            begin, taken = np.zeros(num_domains), np.zeros(num_domains)
            np.maximum.at(begin, joined, np.where(takes_part, clock, 0.0))
            np.maximum.at(taken, joined, longest[phase, number])
            begins[phase, number] = np.where(takes_part, begin[joined], clock)
            clock = begins[phase, number] + np.where(takes_part, taken[joined], 0.0)
            ends[phase, number] = clock
    return begins, ends


def _together(plan: Plan, num_rounds: int) -> IntArray:
    """``[rounds, domains]`` the lowest domain with which each goes through the round, because they share groups."""
    num_domains = plan.num_ranks // plan.domain
    joined = np.tile(np.arange(num_domains), (num_rounds, 1))
    first_group = plan.micro_batch_groups[plan.micro_batch_group_offsets[:-1]]
    some = np.flatnonzero(plan.group_sizes[first_group] > 1)
    at, groups = (plan.micro_batch_rounds[some], plan.micro_batch_ranks[some] // plan.domain), first_group[some]
    lowest, before = np.full(plan.num_groups, num_domains), -joined
    while (joined != before).any():
        before = joined.copy()
        np.minimum.at(lowest, groups, joined[at])
        np.minimum.at(joined, at, lowest[groups])
    return joined


def _last_shared(values: FloatArray, shared: NDArray[np.bool_], plan: Plan) -> FloatArray:
    """``values`` of the last shared micro-batch up to each micro-batch on its rank, 0 before the first."""
    number = np.arange(plan.num_micro_batches)
    last = np.maximum.accumulate(np.where(shared, number, -1)) if len(number) else number
    first = np.repeat(plan.rank_micro_batch_offsets[:-1], np.diff(plan.rank_micro_batch_offsets))
    return np.where(last >= first, values[np.maximum(last, 0)], 0.0)
