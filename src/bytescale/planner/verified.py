"""The configured planner and its check in one object, which can be sent to another process to plan identically."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from numpy.typing import ArrayLike

from bytescale.config import PlannerConfig
from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.plan.limits import MemoryLimits
from bytescale.plan.verify import verify
from bytescale.planner import make_planner


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
        if self.config.verify != "off":
            verify(
                plan,
                num_stages=self.num_stages,
                num_chunks=self.num_chunks,
                level=self.config.verify,
                limits=self.limits,
            )
        return plan
