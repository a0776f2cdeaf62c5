"""The planner of a run that calibrates its costs (``cost.calibration``): every step has costs and speeds of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.common.errors import LoaderFailure
from bytescale.cost import Cluster, CostModel
from bytescale.cost.calibration import Calibrator, State
from bytescale.plan import Plan
from bytescale.planner.verified import VerifiedPlanner

KEPT_LAGS = 3
"""States are kept for so many times the lag."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What the plan of a step depends on, besides its lengths."""

    cost: CostModel
    speeds: tuple[float, ...] = ()
    """Of all ranks; empty: they are equal."""


@dataclass
class CalibratedPlanner:
    """Plans step k with the state after step ``k - lag``. Every rank plans alike.

    Under the remote loader, the ranks send ``costs_of`` a step to the planner actor; ``plan_with`` needs no state.
    """

    planner: VerifiedPlanner
    """With the first cost model, and with ranks of equal speed."""
    calibrator: Calibrator
    lag: int
    first: int = 0
    """The first step of which the state after it is known; the plans of steps before ``first + lag`` use the costs
    without calibration."""
    states: dict[int, State] = field(default_factory=dict)
    """Step, counted from 0, to the state after it."""

    def __call__(self, lengths: ArrayLike) -> Plan:
        """Plan a batch with the costs without calibration. Raises as ``VerifiedPlanner``."""
        return self.planner(lengths)

    def costs_of(self, step: int) -> StepCosts:
        """The costs of a step. Raises ``LoaderFailure`` if they are not known."""
        if not self.knows(step):
            raise LoaderFailure(
                f"step {step + 1} was to be planned before step {step - self.lag + 1} had ended",
                so="its costs are not known, and ranks would plan differently",
                fix="report this, and train with cost.calibrate = false",
            )
        found = self.with_state(self.states.get(step - self.lag, State()))
        speeds = () if found.cluster is self.planner.cluster else tuple(found.cluster.speeds.tolist())
        return StepCosts(cost=found.cost, speeds=speeds)

    def plan_with(self, lengths: IntArray, costs: StepCosts) -> Plan:
        """Plan a batch with the costs of its step. Raises as ``VerifiedPlanner``."""
        cluster = self.planner.cluster
        if costs.speeds:
            measured = self.at_speeds(np.array(costs.speeds))
            # Ranks that differ offload nothing. A batch that has to be offloaded is planned for equal ranks.
            cluster = measured if int(lengths.max()) <= measured.room else cluster
        return replace(self.planner, cost=costs.cost, cluster=cluster)(lengths)

    def knows(self, step: int) -> bool:
        wanted = step - self.lag
        return wanted < self.first or wanted in self.states

    def with_state(self, state: State) -> VerifiedPlanner:
        """The planner with the costs and speeds of ``state``."""
        return replace(self.planner, cost=self.calibrator.cost(state), cluster=self.cluster(state))

    def cluster(self, state: State) -> Cluster:
        """The ranks with the speeds of ``state``. Only the adaptive planner plans for unequal ranks."""
        equal, config = self.planner.cluster, self.planner.config
        known = state.speeds or self.calibrator.first_speeds
        if not known or config.name != "adaptive":
            return equal
        return self.at_speeds(self.calibrator.speeds(state))

    def at_speeds(self, speeds: FloatArray) -> Cluster:
        """The ranks with these ``speeds [R]``."""
        differ, cluster = bool((speeds != speeds[0]).any()), self.planner.cluster
        return replace(cluster, speeds=speeds, offload=None if differ else cluster.offload)

    def add(self, states: Mapping[int, State]) -> None:
        """Take the states after some steps. Old ones are dropped."""
        known = {**self.states, **states}
        latest = max(known, default=0)
        # A new dictionary, because a loader's thread may be reading the old one.
        self.states = {step: known[step] for step in sorted(known) if step > latest - KEPT_LAGS * self.lag}
