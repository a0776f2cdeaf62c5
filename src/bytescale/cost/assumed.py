"""The speeds that planning assumes without a profile: round numbers for two kinds of devices.

All ranks must get the same plan, so no measurement of a rank may enter. A profile (``cost.profile``) replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from bytescale.common.limits import limits
from bytescale.config.schema import Checkpointing, Config, Experts
from bytescale.cost.links import Links
from bytescale.cost.model import CostModel
from bytescale.cost.profile import Profile, require_model
from bytescale.cost.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one device computes and sends. The defaults are for an H100 or H200."""

    flops_per_second: float = field(default=400e12, metadata=limits(least=1))
    """Operations per second in matrix products."""
    attention_flops_per_second: float = field(default=300e12, metadata=limits(least=1))
    """Operations per second in attention."""
    intra_node_bytes_per_second: float = field(default=300e9, metadata=limits(least=1))
    """To a neighbour in the same node."""
    inter_node_bytes_per_second: float = field(default=40e9, metadata=limits(least=1))
    """To a neighbour in another node."""
    latency_seconds: float = field(default=10e-6, metadata=limits(least=0, most=60))
    """Seconds until the first byte of a transfer arrives."""
    launch_seconds: float = field(default=50e-6, metadata=limits(least=0, most=60))
    """Fixed seconds that attention takes in each layer, and that the rest of the layer takes too."""
    host_bytes_per_second: float = field(default=25e9, metadata=limits(least=1))
    """To and from pinned host memory, one direction."""
    host_update_bytes_per_second: float = field(default=40e9, metadata=limits(least=1))
    """Read and written by a rank's CPU cores in an update of an optimizer in host memory."""

    def profile(self, spec: ModelSpec, *, tensor_parallel: int = 1, bytes_per_element: int = 2) -> Profile:
        """The profile of a model by counted operations."""
        links = Links(
            intra_node_bytes_per_second=self.intra_node_bytes_per_second,
            inter_node_bytes_per_second=self.inter_node_bytes_per_second,
            latency_seconds=self.latency_seconds,
            device_to_host_bytes_per_second=self.host_bytes_per_second,
            host_to_device_bytes_per_second=self.host_bytes_per_second,
            host_update_bytes_per_second=self.host_update_bytes_per_second,
        )
        return Profile.from_flops(
            spec,
            flops_per_second=self.flops_per_second,
            attention_flops_per_second=self.attention_flops_per_second,
            launch_seconds=self.launch_seconds,
            links=links,
            tensor_parallel=tensor_parallel,
            bytes_per_element=bytes_per_element,
        )


def times_of(
    config: Config, spec: ModelSpec, measured: Profile | None, rates: Rates, *, bytes_per_element: int
) -> Profile:
    """The times of a model's layers at the tp of ``config``: the measured ones, else its operations at ``rates``.

    A profile of another tp is scaled by operation counts. Raises ``ConfigError`` if other layers were measured.
    """
    if measured is None:
        found = rates.profile(spec, tensor_parallel=config.parallel.tp, bytes_per_element=bytes_per_element)
    else:
        require_model(measured, spec)
        found = measured.scaled_to(spec, tensor_parallel=config.parallel.tp)
    return replace(found, checkpointing=config.memory.checkpointing)


ASSUMED: dict[str, Rates] = {
    # A core with AVX2, and gloo over loopback. Its copies use the cores themselves, so no transfer is hidden for free.
    # Bandwidth and latency are therefore a few times worse than those of the link alone.
    "cpu": Rates(
        flops_per_second=5e10,
        attention_flops_per_second=5e10,
        intra_node_bytes_per_second=2e8,
        inter_node_bytes_per_second=2e8,
        latency_seconds=2e-3,
        launch_seconds=0.0,
        host_bytes_per_second=4e9,
        host_update_bytes_per_second=4e9,
    ),
    # An H100-class GPU in bf16, NVLink inside a node and one 400 Gb/s adapter a GPU across nodes, half of each usable.
    "cuda": Rates(
        flops_per_second=4e14,
        attention_flops_per_second=4e14,
        intra_node_bytes_per_second=2e11,
        inter_node_bytes_per_second=2.5e10,
        latency_seconds=1e-5,
        launch_seconds=0.0,
        host_bytes_per_second=2.5e10,
    ),
}
ASSUMED_MICRO_BATCH_SECONDS = {"cpu": 3e-3, "cuda": 2e-3}
"""What starting a forward and a backward takes."""


def assumed_cost(
    spec: ModelSpec,
    *,
    device: Literal["cpu", "cuda"],
    bytes_per_element: int,
    domain: int = 1,
    experts: Experts = "gathered",
    checkpointing: Checkpointing = "none",
) -> CostModel:
    """The cost model of a model on a device of ``ASSUMED``, without any measurement.

    ``domain``: consecutive ranks that gather the parameters in every round (``plan.Plan``), or all but the experts.
    """
    profile = ASSUMED[device].profile(spec, bytes_per_element=bytes_per_element)
    profile = replace(profile, checkpointing=checkpointing)
    if experts == "parallel":
        profile = profile.with_parallel_experts(domain=domain)
    return planner_costs(profile, assumed=device, domain=domain)


def planner_costs(profile: Profile, *, assumed: str = "", domain: int = 1, **mesh: int) -> CostModel:
    """The cost model of planners.

    Args:
        assumed: the kind of device whose rates the profile has; empty: it is measured.
        domain: as in ``assumed_cost``.
        mesh: ``ranks_per_node`` and ``pipeline_parallel``, of ``Profile.cost_model``.
    """
    cost = profile.cost_model(**mesh)
    if assumed:
        cost = replace(cost, micro_batch_seconds=ASSUMED_MICRO_BATCH_SECONDS[assumed])
    if domain == 1:
        return cost
    from bytescale.cost.gradient_sync import round_seconds  # of lockstep domains alone

    a_round = round_seconds(profile, domain=domain, ranks_per_node=cost.ranks_per_node)
    return replace(cost, gather_seconds=sum(a_round))
