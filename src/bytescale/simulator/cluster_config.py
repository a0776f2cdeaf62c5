"""The modelled cluster: devices in nodes, and the devices that tensor, pipeline and hybrid data parallelism use."""

from __future__ import annotations

from dataclasses import dataclass, field

from bytescale.common.errors import ConfigError
from bytescale.common.limits import check_limits, limits
from bytescale.config.schema import Config
from bytescale.config.sharing import ranks_beside
from bytescale.cost.gradient_sync import BUCKET_BYTES


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """The devices and their layout.

    tp is innermost, then HDP, then pp. So HDP ranks that are neighbours in a ring lie in the same node where possible.
    """

    num_gpus: int = field(default=1024, metadata=limits(least=1))
    """Number of devices. It must be a multiple of tp x pp."""
    gpus_per_node: int = field(default=8, metadata=limits(least=1))
    """Devices that share a node and its fast links."""
    tp: int = field(default=1, metadata=limits(least=1))
    """Tensor parallelism: devices that share a rank's heads and matrices."""
    pp: int = field(default=1, metadata=limits(least=1))
    """Pipeline parallelism: stages of layers."""
    gradient_bucket_mib: float = field(default=0.0, metadata=limits(least=0))
    """MiB of gradients that are reduced at once while ranks compute. The simulator works
    out how much of the sync computation hides. With 0, there is one reduction and one gathering between two steps."""
    optimizer_on_host: bool = False
    """Whether AdamW updates in host memory (optimizer.offload). Nothing computes meanwhile."""

    def __post_init__(self) -> None:
        check_limits(self)
        ranks_beside(self.num_gpus, self.tp, self.pp)
        if self.tp > self.gpus_per_node:
            raise ConfigError(
                f"parallel.tp = {self.tp} exceeds gpus_per_node = {self.gpus_per_node}",
                so="every layer's matrices would be split across nodes",
                fix="use at most the devices of one node",
            )

    @staticmethod
    def of_run(config: Config, num_gpus: int, gpus_per_node: int) -> ClusterConfig:
        """So many devices, laid out and reduced over as a run has them. Raises ``ConfigError`` as the class."""
        return ClusterConfig(
            num_gpus=num_gpus,
            gpus_per_node=gpus_per_node,
            tp=config.parallel.tp,
            pp=config.parallel.pp,
            gradient_bucket_mib=BUCKET_BYTES / 2**20,
            optimizer_on_host=config.optimizer.offload,
        )

    @property
    def num_ranks(self) -> int:
        return self.num_gpus // (self.tp * self.pp)

    @property
    def ranks_per_node(self) -> int:
        """Number of consecutive HDP ranks whose devices of one stage share a node."""
        return self.gpus_per_node // self.tp
