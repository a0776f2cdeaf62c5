"""Plans for loops that are not ours. Free of torch: a driver without a model can plan, and send plans to workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from bytescale.common.errors import ConfigError
from bytescale.config.schema import PlannerConfig, PlannerName
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan.limits import MemoryLimits
from bytescale.planner.verified import VerifiedPlanner

if TYPE_CHECKING:
    from bytescale.cost.offload_rule import OffloadRule


def make_planner(
    *,
    num_ranks: int,
    capacity_tokens: int,
    cost: CostModel | None = None,
    planner: PlannerName = "adaptive",
    equal_counts: bool = False,
    domain: int = 1,
    offload: OffloadRule | None = None,
    limits: MemoryLimits | None = None,
    num_stages: int = 1,
) -> VerifiedPlanner:
    """A function from the lengths of a global batch's documents to a plan, which can be pickled.

    Args:
        capacity_tokens: tokens that one micro-batch of a rank may hold.
        cost: tells times (``HDP.cost``); None: work that grows as s^2 + 24576 s, and free links.
        planner: ``adaptive`` balances the ranks' times. ``static`` is a mesh of data and context parallelism, ``naive``
            and ``paper`` are Algorithms 1 and 2 of the paper, ``greedy`` is our change of the latter.
        equal_counts: whether all ranks run equally many micro-batches side by side, as loops need in which all ranks
            communicate in every pass (FSDP): all ranks are one lockstep domain (``plan.Plan``).
        domain: otherwise, consecutive ranks that run in lockstep.
        offload: what a micro-batch may offload, so that it holds more than ``capacity_tokens``; None: nothing.
        limits: memory that plans are checked against; None: they are not.
        num_stages: of a pipeline, in which plans let no stages wait for each other for ever.

    Raises ``ConfigError`` for a planner that does not exist, or numbers that are not positive.
    """
    if planner not in get_args(PlannerName):
        raise ConfigError(f"there is no planner {planner!r}", fix=f"use one of {', '.join(get_args(PlannerName))}")
    return VerifiedPlanner(
        PlannerConfig(name=planner),
        Cluster.uniform(num_ranks, capacity_tokens, offload=offload),
        CostModel.from_work() if cost is None else cost,
        limits,
        num_stages,
        domain=num_ranks if equal_counts else domain,
    )
