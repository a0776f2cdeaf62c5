"""The speeds that planning assumes without a profile: round numbers for two kinds of devices.

All ranks must get the same plan, so no measurement of a rank may enter. A profile (``cost.profile``) replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bytescale.common.limits import limits
from bytescale.config.schema import Checkpointing, Config, Experts
from bytescale.config.sharing import sharing_domain
from bytescale.cost.links import Links
from bytescale.cost.memory.device_kernels import DeviceKind
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCosts:
    """What one HDP rank of a mesh takes: the trainer, ``plan`` and ``simulate``, and loops that are not ours ask here.

    Attributes:
        kind: the kind of device that is assumed where no profile was measured.
        bytes_per_element: of a number in activations.
        domain: consecutive HDP ranks that gather the parameters in every round (``plan.Plan``), or all but the experts.
        ranks_per_node: consecutive HDP ranks with the links of one node between them.
    """

    kind: DeviceKind
    bytes_per_element: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    domain: int = 1
    ranks_per_node: int = 8
    experts: Experts = "gathered"
    checkpointing: Checkpointing = "none"

    @staticmethod
    def of_run(
        config: Config, kind: DeviceKind, bytes_per_element: int, *, num_ranks: int, ranks_per_node: int
    ) -> MeshCosts:
        """Those of a run on ``num_ranks`` HDP ranks. Raises ``ConfigError`` as ``sharing_domain``."""
        parallel = config.parallel
        return MeshCosts(
            kind=kind,
            bytes_per_element=bytes_per_element,
            tensor_parallel=parallel.tp,
            pipeline_parallel=parallel.pp,
            domain=sharing_domain(parallel.shard, parallel.domain, num_ranks, ranks_per_node),
            ranks_per_node=ranks_per_node,
            experts=parallel.experts,
            checkpointing=config.memory.checkpointing,
        )

    def times(self, spec: ModelSpec, measured: Profile | None = None, rates: Rates | None = None) -> Profile:
        """The times of a model's layers: the measured ones, else its operations at ``rates`` (None: ``ASSUMED``).

        A profile of another tp is scaled by operation counts. Raises ``ConfigError`` if other layers were measured.
        """
        if measured is None:
            found = (rates or ASSUMED[self.kind]).profile(
                spec, tensor_parallel=self.tensor_parallel, bytes_per_element=self.bytes_per_element
            )
        else:
            require_model(measured, spec)
            found = measured.scaled_to(spec, tensor_parallel=self.tensor_parallel)
        found = replace(found, checkpointing=self.checkpointing)
        if self.experts == "gathered":
            return found
        return found.with_parallel_experts(domain=self.domain, ranks_per_node=self.ranks_per_node)

    def planner_costs(self, times: Profile, *, is_measured: bool = False) -> CostModel:
        """The cost model of planners, from ``times``."""
        cost = times.cost_model(ranks_per_node=self.ranks_per_node, pipeline_parallel=self.pipeline_parallel)
        if not (is_measured or cost.micro_batch_seconds):  # rates may count launches
            cost = replace(cost, micro_batch_seconds=ASSUMED_MICRO_BATCH_SECONDS[self.kind])
        if self.domain == 1:
            return cost
        from bytescale.cost.gradient_sync import round_seconds  # of lockstep domains alone

        a_round = round_seconds(times, domain=self.domain, ranks_per_node=self.ranks_per_node)
        return replace(cost, gather_seconds=sum(a_round))

    def assumed(self, spec: ModelSpec) -> CostModel:
        """The cost model of a model without any measurement."""
        return self.planner_costs(self.times(spec))
