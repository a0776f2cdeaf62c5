"""Layer 3: from lengths, a cluster and a cost model to a plan. Pure: no torch, no clock, no randomness, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from numpy.typing import ArrayLike

from bytescale.common.errors import ConfigError, problem
from bytescale.config import PlannerConfig
from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.planner.adaptive.aligned import align, aligned, is_aligned
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines.greedy import greedy_plan
from bytescale.planner.baselines.naive import naive_plan
from bytescale.planner.baselines.paper import paper_plan
from bytescale.planner.baselines.static import static_plan
from bytescale.planner.evaluate import Outcome, evaluate

__all__ = [
    "Outcome",
    "adaptive_plan",
    "align",
    "aligned",
    "balanced_plan",
    "evaluate",
    "greedy_plan",
    "is_aligned",
    "make_planner",
    "naive_plan",
    "paper_plan",
    "static_plan",
]


def balanced_plan(
    lengths: ArrayLike, *, cluster: Cluster, cost: CostModel, mode: Literal["adaptive", "greedy", "paper"] = "adaptive"
) -> Plan:
    """Equal time on every rank: "paper" is Algorithm 2 as published, "greedy" our change of it, "adaptive" ours."""
    plans: dict[str, Callable[..., Plan]] = {"adaptive": adaptive_plan, "greedy": greedy_plan, "paper": paper_plan}
    return plans[mode](lengths, cluster=cluster, cost=cost)


def make_planner(
    config: PlannerConfig,
    cluster: Cluster,
    cost: CostModel,
    *,
    context_length: int = 0,
    num_stages: int = 1,
    step_seconds: Callable[[Plan], float] | None = None,
) -> Callable[[ArrayLike], Plan]:
    """The planner that ``config`` names, as a function of the batch's lengths alone.

    Args:
        config: the ``[planner]`` section.
        cluster: the ranks.
        cost: tells the time of a group.
        context_length: the longest sequence that may occur; it sizes the static mesh when ``static_cp`` is not set.
        step_seconds: the time of a plan's step, by which the adaptive planner compares plans (``adaptive_plan``).
        num_stages: pipeline stages; with more than one, plans are aligned, so that 1F1B cannot hang.

    Raises:
        ConfigError: if the planner does not exist.
    """
    if config.name == "static":
        return partial(static_plan, cluster=cluster, cost=cost, cp=config.static_cp, context=context_length)
    if config.name == "balanced" and config.balance == "adaptive":
        cost = cost if config.grids else replace(cost, row_bytes_per_token=None)
        return partial(
            adaptive_plan,
            cluster=cluster,
            cost=cost,
            num_stages=num_stages,
            context=context_length,
            step_seconds=step_seconds,
        )
    planner: Callable[..., Plan] | None = None
    if config.name == "naive":
        planner = naive_plan
    if config.name == "balanced" and config.balance in ("greedy", "paper"):
        planner = partial(greedy_plan if config.balance == "greedy" else paper_plan, pipeline=num_stages > 1)
    if planner is not None:
        return partial(planner if num_stages == 1 else aligned(planner), cluster=cluster, cost=cost)
    raise ConfigError(
        problem(
            f"planner.name = {config.name!r} with planner.balance = {config.balance!r} does not exist",
            fix='use "static", "naive" or "balanced", the latter with "adaptive", "greedy" or "paper"',
        )
    )
