"""The baselines' plans, with which our planners compare theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from bytescale.common.arrays import IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.planner.adaptive.aligned import align
from bytescale.planner.adaptive.degrees import is_ideal
from bytescale.planner.baselines import greedy_plan, naive_plan, paper_plan, static_plan


def baseline_plans(
    lengths: IntArray,
    *,
    cluster: Cluster,
    cost: CostModel,
    context: int = 0,
    aligned: bool = False,
    in_order: bool = False,
    meshes_only: bool = False,
) -> Iterator[Plan]:
    """Plan a batch by one baseline after the other. None can, if equal shares are more than the smallest capacity.

    Args:
        lengths: ``[S]`` tokens per sequence.
        context: longest sequence that a static mesh has to hold, if it is longer than the batch's longest.
        aligned: whether groups have to be at equal places in their ranks' orders.
        in_order: whether planners are asked, too, whose plan depends on the order of the batch.
        meshes_only: whether only static meshes of the fewest ranks are asked.
    """
    longest = int(lengths.max())
    if longest > cluster.largest_sequence:
        return
    mesh_holds = longest <= cluster.num_ranks * int(cluster.capacity_tokens.min())  # a mesh does not offload
    asked: tuple[tuple[bool, Callable[..., Plan]], ...] = (
        (not meshes_only, partial(greedy_plan, num_buckets=1)),
        (not meshes_only, greedy_plan),
        (not meshes_only, partial(paper_plan, pipeline=aligned)),
        (in_order, naive_plan),
        (mesh_holds, static_plan),
        (mesh_holds and context > longest, partial(static_plan, context=context)),
        (mesh_holds and is_ideal(cost) and not meshes_only, partial(static_plan, cp=cluster.num_ranks)),
    )
    for planner in (planner for wanted, planner in asked if wanted):
        plan = planner(lengths, cluster=cluster, cost=cost)
        yield align(plan, cluster=cluster, cost=cost) if aligned else plan
