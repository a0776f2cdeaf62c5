"""The slow twin of ``planner.evaluate``: event by event, in plain Python."""

from __future__ import annotations

from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan


def evaluate_slowly(plan: Plan, *, cluster: Cluster, cost: CostModel) -> float:
    """``evaluate(...).end_seconds``, event by event."""
    queues = [list(plan.micro_batches_of(rank)) for rank in range(plan.num_ranks)]
    clock = [0.0] * plan.num_ranks
    while any(queues):
        for queue in queues:
            if not queue:
                continue
            members = plan.ranks_of(int(plan.groups_of(queue[0])[0])).tolist()
            heads = [queues[member][0] if queues[member] else -1 for member in members]
            group = plan.groups_of(queue[0])[0]
            if all(head >= 0 and plan.groups_of(head)[0] == group for head in heads):
                seconds = max(
                    _one_member_seconds(plan, head, member, cluster, cost)
                    for head, member in zip(heads, members, strict=True)
                )
                end = max(clock[member] for member in members) + seconds
                for member in members:
                    clock[member] = end
                    queues[member].pop(0)
                break
        else:
            raise AssertionError("no rank can go on: the plan deadlocks")
    return max(clock)


def _one_member_seconds(plan: Plan, micro_batch: int, rank: int, cluster: Cluster, cost: CostModel) -> float:
    seconds = cost.micro_batch_seconds
    for group in plan.groups_of(micro_batch).tolist():
        lengths = plan.lengths[plan.sequences_of(group)].astype(float)
        ranks, weights = plan.ranks_of(group).tolist(), plan.weights_of(group)
        share = weights[ranks.index(rank)] / weights.sum()
        tokens, squares, degree = lengths.sum(), cost.squares_of(lengths).sum(), len(ranks)
        columns = int(plan.group_columns[group])
        nodes = [member // cost.ranks_per_node for member in ranks]
        column_far = any(len(set(nodes[column::columns])) > 1 for column in range(columns))
        row_far = any(len(set(nodes[row : row + columns])) > 1 for row in range(0, degree, columns))
        member = ranks.index(rank)
        row, column = member - member % columns, member % columns
        tile = weights[row : row + columns].sum() * weights[column::columns].sum() / weights.sum() ** 2
        compute = float(cost.compute_seconds(tokens, 0.0)) * share + float(cost.compute_seconds(0.0, squares)) * tile
        compute += cost.attention_block_seconds * (degree - 1) * len(lengths)
        seconds += compute / cluster.speeds[rank]
        seconds += float(cost.exposed_seconds(tokens, squares, degree, column_far, columns, row_far))
    return seconds
