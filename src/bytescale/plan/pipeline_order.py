"""Can a plan hang under 1F1B? Searches the graph of all actions, and of what they wait for, for a cycle.

An *action* is (stage, forward or backward, micro-batch of a rank). An action waits for

1. the previous action on its rank and stage (``plan.schedule``, which the runtime follows exactly);
2. for a forward, the forward of the same micro-batch on the previous stage; for a backward, its backward on the next
   stage or, on the last stage, its forward;
3. all members of its shared group: ring attention needs every member, so their actions are ONE node of the graph;
4. the messages that its rank and stage have posted before it (``plan.schedule.messages``): under NCCL, any action may
   wait for everything that its device has been given. The action before which one end of a message is posted waits for
   the action after which the other end is posted.

If this graph has no cycle, the plan cannot hang. Under gloo, rules 1 to 3 are sufficient. A plan that hangs::

    rank A  g1 g2          stage 0 of 2 runs   F1 F2 B1 B2             A wants F2 before B1,
    rank B  g1 y y' g2                         F1 Fy B1 Fy' ... F2     B wants B1 before F2: a cycle
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.plan.plan import Plan, concatenated_ranges, offsets_of
from bytescale.plan.schedule import messages, stage_actions


def find_cycle(plan: Plan, num_stages: int, *, with_messages: bool = True) -> list[str]:
    """The actions of one cycle, in words, with the first repeated at the end. Empty if the plan cannot hang.

    ``with_messages=False`` leaves out rule 4: what then has a cycle hangs even if no rank ever waits for a message that
    it does not need, as under gloo and in the simulator.
    """
    node_of, num_units = _nodes(plan)
    before, after = _edges(plan, num_stages, node_of, num_units, with_messages=with_messages)
    keep = before != after
    before, after = before[keep], after[keep]
    left = _left_after_peeling(before, after, 2 * num_stages * num_units)
    if not left.any():
        return []
    return [_words(plan, node_of, num_units, node) for node in _walk_back(before, after, left)]


def _nodes(plan: Plan) -> tuple[IntArray, int]:
    """``[M]`` unit of each micro-batch (equal for the members of a shared group), and the number of units.

    The node of an action is ``(2 * stage + is_backward) * num_units + unit``.
    """
    first_group = plan.micro_batch_groups[plan.micro_batch_group_offsets[:-1]]
    shared = plan.group_sizes[first_group] > 1
    key = np.where(shared, first_group, plan.num_groups + np.arange(plan.num_micro_batches))
    units, node_of = np.unique(key, return_inverse=True)
    return node_of.astype(np.int64), len(units)


def _edges(
    plan: Plan, num_stages: int, node_of: IntArray, num_units: int, *, with_messages: bool
) -> tuple[IntArray, IntArray]:
    """The edges of the graph, as two arrays of nodes: ``before[i]`` has to end before ``after[i]`` starts."""
    before, after = [], []
    counts = np.diff(plan.rank_micro_batch_offsets)
    for count in np.unique(counts[counts > 0]).tolist():
        first = plan.rank_micro_batch_offsets[:-1][counts == count]
        in_order = []  # for each stage, the nodes [ranks, actions] of its actions
        for stage in range(num_stages):
            backward, index = stage_actions(count, num_stages, stage).T
            units = node_of[first[:, None] + index]
            in_order.append((2 * stage + backward) * num_units + units)
        before += [nodes[:, :-1].ravel() for nodes in in_order]
        after += [nodes[:, 1:].ravel() for nodes in in_order]
        for stage in range(num_stages if with_messages else 0):
            for message in messages(count, num_stages, stage):
                sender, receiver = in_order[message.maker], in_order[message.taker]
                before.append(sender[:, message.made_at])
                after.append(receiver[:, message.posted_before])
                if message.posted_before > 0 and message.made_at + 1 < sender.shape[1]:
                    before.append(receiver[:, message.posted_before - 1])
                    after.append(sender[:, message.made_at + 1])
    units = np.arange(num_units)
    for stage in range(num_stages - 1):
        forward, backward_of = 2 * stage * num_units, (2 * stage + 1) * num_units
        before += [forward + units, backward_of + 2 * num_units + units]
        after += [forward + 2 * num_units + units, backward_of + units]
    last = 2 * (num_stages - 1) * num_units
    before.append(last + units)
    after.append(last + num_units + units)
    return np.concatenate(before), np.concatenate(after)


def _left_after_peeling(before: IntArray, after: IntArray, num_nodes: int) -> NDArray[np.bool_]:
    """``[num_nodes]`` whether a node is on a cycle or waits for one.

    Removes the nodes that wait for nothing, wave by wave.
    """
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
    """Nodes of one cycle, in waiting order. It exists because every node that is left waits for another such node."""
    inside = left[before] & left[after]
    cause = dict(zip(after[inside].tolist(), before[inside].tolist(), strict=True))
    node, seen = next(iter(cause)), {}
    path: list[int] = []
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = cause[node]
    return [*path[seen[node] :], node][::-1]


def _words(plan: Plan, node_of: IntArray, num_units: int, node: int) -> str:
    action, unit = divmod(node, num_units)
    micro_batch = int(np.flatnonzero(node_of == unit)[0])
    group = int(plan.groups_of(micro_batch)[0])
    direction = "backward" if action % 2 else "forward"
    members = sorted(plan.ranks_of(group).tolist())
    shown = ", ".join(map(str, members[:4])) + (", ..." if len(members) > 4 else "")
    return f"{direction} of group {group} on stage {action // 2} (rank{'s' if len(members) > 1 else ''} {shown})"
