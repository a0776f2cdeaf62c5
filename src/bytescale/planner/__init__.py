"""Layer 3: from lengths, a cluster and a cost model to a plan. Pure: no torch, no clock, no randomness, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

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
    "evaluate",
    "greedy_plan",
    "is_aligned",
    "make_planner",
    "naive_plan",
    "paper_plan",
    "static_plan",
]


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
    pipeline = num_stages > 1
    planners: dict[str, Callable[..., Plan]] = {
        "adaptive": partial(adaptive_plan, num_stages=num_stages, context=context_length, step_seconds=step_seconds),
        "paper": partial(paper_plan, pipeline=pipeline),
        "greedy": partial(greedy_plan, pipeline=pipeline),
        "naive": naive_plan,
        "static": partial(static_plan, cp=config.static_cp, context=context_length),
    }
    if config.name not in planners:
        raise ConfigError(problem(f"there is no planner {config.name!r}", fix=f"use one of {', '.join(planners)}"))
    planner = planners[config.name]
    if pipeline and config.name in ("paper", "greedy", "naive"):
        planner = aligned(planner)
    if config.name == "adaptive" and not config.grids:
        cost = replace(cost, row_bytes_per_token=None)
    return partial(planner, cluster=cluster, cost=cost)
