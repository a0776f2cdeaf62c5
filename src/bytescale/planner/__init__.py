"""Floor 3: from lengths, a cluster and a cost model to a plan. Pure: no torch, no clock, no randomness, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from numpy.typing import ArrayLike

from bytescale.common.errors import ConfigError, problem
from bytescale.config import PlannerConfig
from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.planner.adaptive import adaptive_plan
from bytescale.planner.evaluate import Outcome, evaluate
from bytescale.planner.naive import naive_plan
from bytescale.planner.paper import paper_plan
from bytescale.planner.static import static_plan

__all__ = [
    "Outcome",
    "adaptive_plan",
    "balanced_plan",
    "evaluate",
    "make_planner",
    "naive_plan",
    "paper_plan",
    "static_plan",
]


def balanced_plan(
    lengths: ArrayLike, *, cluster: Cluster, cost: CostModel, mode: Literal["adaptive", "paper"] = "adaptive"
) -> Plan:
    """Equal time on every rank: ``mode`` "paper" is Algorithm 2 as published, "adaptive" is ours."""
    plan = adaptive_plan if mode == "adaptive" else paper_plan
    return plan(lengths, cluster=cluster, cost=cost)


def make_planner(
    config: PlannerConfig, cluster: Cluster, cost: CostModel, *, context_length: int = 0
) -> Callable[[ArrayLike], Plan]:
    """The planner that ``config`` names, as a function of the batch's lengths alone.

    Args:
        config: the ``[planner]`` section.
        cluster: the ranks.
        cost: tells times.
        context_length: the longest sequence that may come; sizes the static mesh when ``static_cp`` is not set.

    Raises:
        ConfigError: for a planner that does not exist.
    """
    if config.name == "static":
        return partial(static_plan, cluster=cluster, cost=cost, cp=config.static_cp, context=context_length)
    if config.name == "naive":
        return partial(naive_plan, cluster=cluster, cost=cost)
    if config.name == "balanced" and config.balance in ("adaptive", "paper"):
        return partial(balanced_plan, cluster=cluster, cost=cost, mode=config.balance)
    raise ConfigError(
        problem(
            f"planner.name = {config.name!r} with planner.balance = {config.balance!r} does not exist",
            fix='use "static", "naive" or "balanced", the latter with "adaptive" or "paper"',
        )
    )
