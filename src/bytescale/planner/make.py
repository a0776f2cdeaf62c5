"""The planner that a configuration names. Only the files of that one are imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

from numpy.typing import ArrayLike

from bytescale.common.errors import ConfigError
from bytescale.config.schema import PlannerConfig, PlannerName
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan


def make_planner(
    config: PlannerConfig,
    cluster: Cluster,
    cost: CostModel,
    *,
    context_length: int = 0,
    num_stages: int = 1,
    domain: int = 1,
    step_seconds: Callable[[Plan], float] | None = None,
) -> Callable[[ArrayLike], Plan]:
    """The planner that ``config`` names, as a function of the batch's lengths alone.

    Args:
        context_length: the longest sequence that may occur; it sizes the static mesh.
        step_seconds: the time of a plan's step, by which the adaptive planner compares plans (``adaptive_plan``).
        num_stages: pipeline stages; with more than one, plans are aligned, so that 1F1B cannot hang.
        domain: consecutive ranks that run in lockstep. With more than one, ``adaptive`` plans rounds (``rounds_plan``),
            and the plans of the others are aligned.

    Raises:
        ConfigError: if the planner does not exist, or the domain does not divide the ranks.
    """
    if domain < 1 or cluster.num_ranks % domain:
        raise ConfigError(
            f"a lockstep domain of {domain} ranks does not divide {cluster.num_ranks} ranks",
            so="some ranks would gather parameters with nobody",
            fix="use a divisor of the number of ranks",
        )
    if config.name not in get_args(PlannerName):
        raise ConfigError(f"there is no planner {config.name!r}", fix=f"use one of {', '.join(get_args(PlannerName))}")
    planner: Callable[..., Plan]
    if config.name == "adaptive" and domain > 1:
        from bytescale.planner.rounds.planner import rounds_plan

        planner = partial(rounds_plan, domain=domain, num_stages=num_stages, context=context_length)
    elif config.name == "adaptive":
        from bytescale.planner.adaptive.planner import adaptive_plan

        planner = partial(adaptive_plan, num_stages=num_stages, context=context_length, step_seconds=step_seconds)
    else:
        from bytescale.planner import baselines
        from bytescale.planner.adaptive.aligned import aligned

        pipeline = num_stages > 1 or domain > 1
        planners: dict[str, Callable[..., Plan]] = {
            "paper": partial(baselines.paper_plan, pipeline=pipeline),
            "greedy": baselines.greedy_plan,
            "naive": baselines.naive_plan,
            "static": partial(baselines.static_plan, context=context_length),
        }
        planner = planners[config.name]
        if pipeline and config.name != "static":
            planner = aligned(planner)
    planner = partial(planner, cluster=cluster, cost=cost)
    return planner if domain == 1 else lambda lengths: replace(planner(lengths), domain=domain)
