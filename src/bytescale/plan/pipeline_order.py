"""Can a plan hang under 1F1B? The graph of all actions, with the members of a shared group meeting at once.

An *action* is (stage, forward or backward, micro-batch of a rank). It waits for

1. the action before it on its rank and stage: 1F1B runs ``p - 1 - stage`` warm-up forwards, then one forward and one
   backward in turn, then the backwards that are left;
2. for a forward, the same micro-batch's forward on the stage before; for a backward, its backward on the stage after;
3. all members of its shared group: ring attention needs every one of them, so their actions are ONE node here.

A plan cannot hang if and only if this graph has no cycle::

    rank A  g1 g2          stage 0 of 2 runs   F1 F2 B1 B2             A wants F2 before B1,
    rank B  g1 y y' g2                         F1 Fy B1 Fy' ... F2     B wants B1 before F2: a cycle
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bytescale.plan.plan import Plan, offsets_of
from bytescale.plan.rank_plan import concatenated_ranges

IntArray = NDArray[np.int64]


def find_cycle(plan: Plan, num_stages: int) -> list[str]:
    """The actions of one cycle, in words, the first repeated at the end; empty when the plan cannot hang."""
    node_of, num_units = _nodes(plan)
    before, after = _edges(plan, num_stages, node_of, num_units)
    keep = before != after
    before, after = before[keep], after[keep]
    left = _left_after_peeling(before, after, 2 * num_stages * num_units)
    if not left.any():
        return []
    return [_words(plan, num_stages, node_of, num_units, node) for node in _walk_back(before, after, left)]


def _nodes(plan: Plan) -> tuple[IntArray, int]:
    """``[M]`` unit of each micro-batch (equal for the members of a shared group), and the number of units.

    The node of an action is ``(2 * stage + is_backward) * num_units + unit``.
    """
    first_group = plan.micro_batch_groups[plan.micro_batch_group_offsets[:-1]]
    shared = plan.group_sizes[first_group] > 1
    key = np.where(shared, first_group, plan.num_groups + np.arange(plan.num_micro_batches))
    units, node_of = np.unique(key, return_inverse=True)
    return node_of.astype(np.int64), len(units)


def _edges(plan: Plan, num_stages: int, node_of: IntArray, num_units: int) -> tuple[IntArray, IntArray]:
    """Waiting pairs of nodes: ``before[i]`` has to end before ``after[i]`` starts."""
    before, after = [], []
    for stage in range(num_stages):
        forward, backward = 2 * stage * num_units, (2 * stage + 1) * num_units
        order = _one_f_one_b(plan, num_stages - 1 - stage)
        nodes = np.where(order < 0, backward + node_of[-order - 1], forward + node_of[order])
        ranks = np.repeat(np.arange(plan.num_ranks), 2 * np.diff(plan.rank_micro_batch_offsets))
        same_rank = ranks[1:] == ranks[:-1]
        before.append(nodes[:-1][same_rank])
        after.append(nodes[1:][same_rank])
        if stage + 1 < num_stages:
            units = np.arange(num_units)
            before += [forward + units, backward + 2 * num_units + units]
            after += [forward + 2 * num_units + units, backward + units]
    return np.concatenate(before), np.concatenate(after)


def _one_f_one_b(plan: Plan, warm_up: int) -> IntArray:
    """``[2M]`` actions of one stage, rank by rank in order: ``m`` forward of micro-batch m, ``-m - 1`` its backward.

    On a rank with n micro-batches and w = min(warm_up, n): forward i runs at place i for i < w and at 2i - w after;
    backward i at place w + 2i + 1 while forwards are left (i < n - w), and at n + i in the end.
    """
    counts = np.diff(plan.rank_micro_batch_offsets)
    first = np.repeat(plan.rank_micro_batch_offsets[:-1], counts)
    number = np.arange(plan.num_micro_batches)
    index, count = number - first, np.repeat(counts, counts)
    warm = np.minimum(warm_up, count)
    forward_place = np.where(index < warm, index, 2 * index - warm)
    backward_place = np.where(index < count - warm, warm + 2 * index + 1, count + index)
    order = np.empty(2 * plan.num_micro_batches, dtype=np.int64)
    order[2 * first + forward_place] = number
    order[2 * first + backward_place] = -number - 1
    return order


def _left_after_peeling(before: IntArray, after: IntArray, num_nodes: int) -> NDArray[np.bool_]:
    """``[num_nodes]`` nodes that lie on or behind a cycle: peel, wave by wave, those that wait for nothing."""
    waits_for = np.bincount(after, minlength=num_nodes)
    order = np.argsort(before, kind="stable")
    followers = after[order]
    offsets = offsets_of(np.bincount(before, minlength=num_nodes))
    left = np.ones(num_nodes, dtype=bool)
    wave = np.flatnonzero(waits_for == 0)
    while len(wave):
        left[wave] = False
        released = followers[concatenated_ranges(offsets[wave], offsets[wave + 1])]
        np.subtract.at(waits_for, released, 1)
        released = np.unique(released)
        wave = released[waits_for[released] == 0]
    return left


def _walk_back(before: IntArray, after: IntArray, left: NDArray[np.bool_]) -> list[int]:
    """Nodes of one cycle in waiting order. Every node that is left waits for another that is left."""
    inside = left[before] & left[after]
    cause = dict(zip(after[inside].tolist(), before[inside].tolist(), strict=True))
    node, seen = next(iter(cause)), {}
    path: list[int] = []
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = cause[node]
    return [*path[seen[node] :], node][::-1]


def _words(plan: Plan, num_stages: int, node_of: IntArray, num_units: int, node: int) -> str:
    action, unit = divmod(node, num_units)
    micro_batch = int(np.flatnonzero(node_of == unit)[0])
    group = int(plan.groups_of(micro_batch)[0])
    direction = "backward" if action % 2 else "forward"
    members = sorted(plan.ranks_of(group).tolist())
    shown = ", ".join(map(str, members[:4])) + (", ..." if len(members) > 4 else "")
    return f"{direction} of group {group} on stage {action // 2} (rank{'s' if len(members) > 1 else ''} {shown})"
