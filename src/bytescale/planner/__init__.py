"""Layer 3: from lengths, a cluster and a cost model to a plan. Pure: no torch, no clock, no randomness, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from numpy.typing import ArrayLike

from bytescale.common.errors import ConfigError
from bytescale.config import PlannerConfig
from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.planner.adaptive.aligned import align, aligned, is_aligned
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import greedy_plan, naive_plan, paper_plan, static_plan
from bytescale.planner.evaluate import Outcome, evaluate
from bytescale.planner.rounds.planner import rounds_plan

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
    "rounds_plan",
    "static_plan",
]


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
        context_length: the longest sequence that may occur; it sizes the static mesh when ``static_cp`` is not set.
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
    pipeline = num_stages > 1 or domain > 1
    planners: dict[str, Callable[..., Plan]] = {
        "adaptive": partial(adaptive_plan, num_stages=num_stages, context=context_length, step_seconds=step_seconds),
        "paper": partial(paper_plan, pipeline=pipeline),
        "greedy": greedy_plan,
        "naive": naive_plan,
        "static": partial(static_plan, cp=config.static_cp, context=context_length),
    }
    if domain > 1:
        planners["adaptive"] = partial(rounds_plan, domain=domain, num_stages=num_stages, context=context_length)
    if config.name not in planners:
        raise ConfigError(f"there is no planner {config.name!r}", fix=f"use one of {', '.join(planners)}")
    planner = planners[config.name]
    if pipeline and config.name in ("paper", "greedy", "naive"):
        planner = aligned(planner)
    if config.name == "adaptive" and not config.grids:
        cost = replace(cost, row_bytes_per_token=None)
    planner = partial(planner, cluster=cluster, cost=cost)
    return planner if domain == 1 else lambda lengths: replace(planner(lengths), domain=domain)
