"""How long a plan's step takes on the ranks of a run: for planners, which compare plans by it, and for predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bytescale.cost import Cluster, CostModel, Profile
from bytescale.plan import Plan
from bytescale.simulator.cluster_config import ClusterConfig
from bytescale.simulator.result import SimulatedStep
from bytescale.simulator.simulate import simulate, step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The simulator with all that it has to know of a run besides the plan. It can be sent to another process."""

    profile: Profile
    """The times of the model's layers, without calibration."""
    devices: ClusterConfig
    recompute: bool = False
    """Whether backward computes every layer's forward again."""

    def __call__(self, cluster: Cluster, cost: CostModel) -> Callable[[Plan], float]:
        """Return the function from a plan to the seconds of its step at these speeds and costs (``step_seconds``)."""
        profile, speeds = self._at(cost), cluster.speeds
        return partial(step_seconds, profile=profile, cluster=self.devices, speeds=speeds, recompute=self.recompute)

    def simulated(self, plan: Plan, cost: CostModel) -> SimulatedStep:
        """Simulate ``plan`` at these costs. The data costs no time. Raises as ``simulate``."""
        return simulate(plan, self._at(cost), self.devices, recompute=self.recompute)

    def _at(self, cost: CostModel) -> Profile:
        # The planner's costs are sums over all layers, of which the stages of a pipeline have parts.
        return self.profile.with_costs(cost) if self.devices.pp == 1 else self.profile
