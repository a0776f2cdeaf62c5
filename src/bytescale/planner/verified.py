"""The configured planner and its check in one object, which can be sent to another process to plan identically."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from bytescale.config.schema import PlannerConfig
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.plan.limits import MemoryLimits
from bytescale.plan.slices import micro_batch_tokens
from bytescale.plan.verify import verify


def narrowed(plan: Plan, limits: MemoryLimits) -> Plan:
    """The plan with half the columns, and half of those again, in grids for whose messages a member has no memory.

    No sequence has to move to other ranks: those of a group hold it as a ring, which has one column.
    """
    room = limits.device_room(plan.micro_batch_ranks)
    while True:
        tokens = micro_batch_tokens(plan)
        fits = limits.device_peak(tokens.held, tokens.offloaded, tokens.shared, tokens.row) <= room
        too_large = np.repeat(~fits, np.diff(plan.micro_batch_group_offsets))
        columns = plan.group_columns.copy()
        of_these = np.unique(plan.micro_batch_groups[too_large])
        columns[of_these] = np.where(columns[of_these] % 2 == 0, columns[of_these] // 2, 1)
        if (columns == plan.group_columns).all():
            return plan
        plan = replace(plan, group_columns=columns)


@dataclass(frozen=True)
class VerifiedPlanner:
    """A function from lengths ``[S]`` to a plan that has been checked."""

    config: PlannerConfig
    cluster: Cluster
    cost: CostModel
    limits: MemoryLimits | None = None
    num_stages: int = 1
    """Pipeline stages."""
    domain: int = 1
    """Consecutive ranks that run in lockstep."""
    context_length: int = 0
    """The longest sequence of the run, which sizes a static mesh; 0: that of each batch."""
    step_times: Callable[[Cluster, CostModel], Callable[[Plan], float]] | None = None
    """Gives, for ranks and costs, the seconds of a plan's step, by which the adaptive planner compares plans."""

    @cached_property
    def _plan(self) -> Callable[[ArrayLike], Plan]:
        return self._planner(self.cost)

    def _planner(self, cost: CostModel) -> Callable[[ArrayLike], Plan]:
        from bytescale.planner.make import make_planner  # planners, when there is a batch

        return make_planner(
            self.config,
            self.cluster,
            cost,
            context_length=self.context_length,
            num_stages=self.num_stages,
            domain=self.domain,
            step_seconds=self._step_seconds,
        )

    @cached_property
    def _step_seconds(self) -> Callable[[Plan], float] | None:
        return None if self.step_times is None else self.step_times(self.cluster, self.cost)

    def __call__(self, lengths: ArrayLike, together: Sequence[Hashable] | None = None) -> Plan:
        """Plan one batch. Raises ``PlanError`` if there is no plan, or if the planner's plan breaks a rule.

        ``together``: labels ``[S]``; sequences of one label come into one micro-batch of one group. None: no matter.
        """
        if together is not None:
            from bytescale.planner.together import plan_together  # with labels alone

            plan = plan_together(self._plan, np.asarray(lengths, dtype=np.int64), together, self.check)
        else:
            plan = self._plan(lengths)
        if self.limits is not None and (plan.group_columns > 1).any():
            plan = self._in_memory(plan, self.limits)
        self.check(plan)
        return plan

    def beside(self, waiting: float, alone: float, longest: int) -> VerifiedPlanner:
        """The same for a batch with pictures. ``longest``: of its documents. Raises as ``MemoryLimits.beside``."""
        if self.limits is None or not alone:
            return self
        is_shared_evenly = self.cluster.is_uniform and self.cluster.offload is None and longest <= self.cluster.room
        limits, fits = self.limits.beside(
            waiting, alone, -(-longest // self.cluster.num_ranks) if is_shared_evenly else 1
        )
        capacity = np.minimum(self.cluster.capacity_tokens, fits)
        return replace(self, limits=limits, cluster=replace(self.cluster, capacity_tokens=capacity))

    def check(self, plan: Plan) -> None:
        """Raise ``PlanError`` if a plan breaks a rule."""
        verify(plan, num_stages=self.num_stages, limits=self.limits)

    def _in_memory(self, plan: Plan, limits: MemoryLimits) -> Plan:
        """The plan without grids for which there is no memory, or one with rings alone if that ends earlier."""
        narrow = narrowed(plan, limits)
        if narrow is plan:
            return plan
        from bytescale.planner.evaluate import evaluate  # with limits alone

        rings = self._planner(replace(self.cost, row_bytes_per_token=None))

        def end(plan: Plan) -> float:
            if self._step_seconds is not None:
                return self._step_seconds(plan)
            return evaluate(plan, cluster=self.cluster, cost=self.cost, num_stages=self.num_stages).end_seconds

        return min((narrow, rings(plan.lengths)), key=end)
