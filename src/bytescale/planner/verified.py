"""The configured planner and its check in one object, which can be sent to another process to plan identically."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from bytescale.config import PlannerConfig
from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.plan.limits import MemoryLimits
from bytescale.plan.slices import micro_batch_tokens
from bytescale.plan.verify import verify
from bytescale.planner import make_planner


def narrowed(plan: Plan, limits: MemoryLimits) -> Plan:
    """The plan with rings in place of those grids for whose messages a member has no memory.

    A grid that does not fit was to be faster than its ring. Planning again with fewer columns would not move any
    sequence to other ranks, since the ring's ranks hold it.
    """
    tokens = micro_batch_tokens(plan)
    peaks = limits.device_peak(tokens.held, tokens.offloaded, tokens.shared, tokens.row)
    fits = peaks <= limits.device_room(plan.micro_batch_ranks)
    too_large = np.repeat(~fits, np.diff(plan.micro_batch_group_offsets))
    columns = plan.group_columns.copy()
    columns[plan.micro_batch_groups[too_large]] = 1
    return replace(plan, group_columns=columns)


@dataclass(frozen=True)
class VerifiedPlanner:
    """A function from lengths ``[S]`` to a plan that has been checked as ``config.verify`` says."""

    config: PlannerConfig
    cluster: Cluster
    cost: CostModel
    limits: MemoryLimits | None = None
    num_stages: int = 1
    """Pipeline stages."""
    num_chunks: int = 1
    """Chunks of layers on each stage."""

    @cached_property
    def _plan(self) -> Callable[[ArrayLike], Plan]:
        return make_planner(self.config, self.cluster, self.cost, num_stages=self.num_stages)

    def __call__(self, lengths: ArrayLike) -> Plan:
        """Plan one batch. Raises ``PlanError`` if there is no plan, or if the planner's plan breaks a rule."""
        plan = self._plan(lengths)
        if self.limits is not None and (plan.group_columns > 1).any():
            plan = narrowed(plan, self.limits)
        if self.config.verify != "off":
            verify(
                plan,
                num_stages=self.num_stages,
                num_chunks=self.num_chunks,
                level=self.config.verify,
                limits=self.limits,
            )
        return plan
