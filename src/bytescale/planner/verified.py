"""The configured planner with its check, as one value: it can be sent to another process, which then plans alike."""

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
    """From lengths ``[S]`` to a plan that was checked as ``config.verify`` says before anybody runs it."""

    config: PlannerConfig
    cluster: Cluster
    cost: CostModel
    limits: MemoryLimits | None = None
    num_stages: int = 1
    """Of the pipeline."""
    num_chunks: int = 1
    """Of layers on each stage."""

    @cached_property
    def _plan(self) -> Callable[[ArrayLike], Plan]:
        return make_planner(self.config, self.cluster, self.cost, num_stages=self.num_stages)

    def __call__(self, lengths: ArrayLike) -> Plan:
        """Raises ``PlanError`` when there is no plan, or the planner made one that breaks a rule."""
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
