"""The planner of a run that calibrates its costs (``cost.calibration``): every step has costs and speeds of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from numpy.typing import ArrayLike

from bytescale.common.arrays import IntArray
from bytescale.common.errors import LoaderFailure
from bytescale.cost.calibration import Calibrator, State
from bytescale.cost.cluster import Cluster
from bytescale.plan import Plan
from bytescale.plan.plan import PREFETCH_STEPS
from bytescale.planner.verified import VerifiedPlanner

LAG = PREFETCH_STEPS + 2
"""Steps between the one after which a state is known and the first one that is planned with it: while a rank runs step
k, its loader holds up to ``PREFETCH_STEPS`` steps after it and plans the next one."""
KEPT_LAGS = 3
"""States are kept for so many times the lag."""


@dataclass
class CalibratedPlanner:
    """Plans step k with the state after step ``k - LAG``. Every rank plans alike."""

    planner: VerifiedPlanner
    """With the first cost model, and with ranks of equal speed."""
    calibrator: Calibrator
    first: int = 0
    """The first step of which the state after it is known; the plans of steps before ``first + LAG`` use the costs
    without calibration."""
    states: dict[int, State] = field(default_factory=dict)
    """Step, counted from 0, to the state after it."""

    def __call__(self, lengths: ArrayLike) -> Plan:
        """Plan a batch with the costs without calibration. Raises as ``VerifiedPlanner``."""
        return self.planner(lengths)

    def plan_step(self, lengths: IntArray, step: int) -> Plan:
        """Plan a batch with the costs of its step. Raises ``LoaderFailure`` if they are not known."""
        wanted = step - LAG
        if wanted >= self.first and wanted not in self.states:
            raise LoaderFailure(
                f"step {step + 1} was to be planned before step {wanted + 1} had ended",
                so="its costs are not known, and ranks would plan differently",
                fix="report this, and train with cost.calibrate = false",
            )
        planner = self.with_state(self.states.get(wanted, State()))
        # Ranks that differ offload nothing. A batch that has to be offloaded is planned for equal ranks.
        fits = int(lengths.max()) <= planner.cluster.room
        return planner(lengths) if fits else replace(planner, cluster=self.planner.cluster)(lengths)

    def beside(self, waiting: float, alone: float, longest: int) -> CalibratedPlanner:
        """See ``VerifiedPlanner.beside``."""
        return replace(self, planner=self.planner.beside(waiting, alone, longest))

    def with_state(self, state: State) -> VerifiedPlanner:
        """The planner with the costs and speeds of ``state``."""
        return replace(self.planner, cost=self.calibrator.cost(state), cluster=self.cluster(state))

    def cluster(self, state: State) -> Cluster:
        """The ranks with the speeds of ``state``. Only the adaptive planner plans for unequal ranks."""
        equal, config = self.planner.cluster, self.planner.config
        known = state.speeds or self.calibrator.first_speeds
        if not known or config.name != "adaptive":
            return equal
        speeds = self.calibrator.speeds(state)
        differ = bool((speeds != speeds[0]).any())
        return replace(equal, speeds=speeds, offload=None if differ else equal.offload)

    def add(self, states: Mapping[int, State]) -> None:
        """Take the states after some steps. Old ones are dropped."""
        known = {**self.states, **states}
        latest = max(known, default=0)
        # A new dictionary, because a loader's thread may be reading the old one.
        self.states = {step: known[step] for step in sorted(known) if step > latest - KEPT_LAGS * LAG}
