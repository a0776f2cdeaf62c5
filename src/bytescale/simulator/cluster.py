"""The modelled cluster: devices in nodes, and how tensor, pipeline and hybrid data parallelism lie on them."""

from __future__ import annotations

from dataclasses import dataclass

from bytescale.common.errors import ConfigError, problem


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """Devices and their layout: tp innermost, then HDP, then pp, so that rings meet their neighbours in the node."""

    num_gpus: int = 1024
    """Devices in all; tp x pp must divide them."""
    gpus_per_node: int = 8
    """Devices that share a node and its fast links."""
    tp: int = 1
    """Tensor parallelism: devices that share a rank's heads and matrices."""
    pp: int = 1
    """Pipeline parallelism: stages of layers."""
    virtual_stages: int = 1
    """Chunks of layers on each stage; above 1 they are interleaved."""
    sync_overlap: float = 0.0
    """Share of the gradient sync that runs beside the last backwards and the next step's first forwards."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "virtual_stages", "num_gpus", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(problem(f"cluster.{name} is {getattr(self, name)}", fix="use at least 1"))
        if not 0 <= self.sync_overlap <= 1:
            raise ConfigError(problem(f"cluster.sync_overlap is {self.sync_overlap}", fix="use a share from 0 to 1"))
        if self.virtual_stages > 1 and self.pp == 1:
            raise ConfigError(
                problem(
                    f"cluster.virtual_stages = {self.virtual_stages} without a pipeline (cluster.pp = 1)",
                    so="there is no bubble to make smaller",
                    fix="leave it out, or set cluster.pp",
                )
            )
        if self.num_gpus % (self.tp * self.pp):
            raise ConfigError(
                problem(
                    f"cluster.num_gpus = {self.num_gpus} is not a multiple of tp x pp = {self.tp} x {self.pp}",
                    so=f"{self.num_gpus % (self.tp * self.pp)} devices would be in no rank",
                    fix=f"use {self.num_gpus // (self.tp * self.pp) * self.tp * self.pp} devices, or another tp or pp",
                )
            )
        if self.tp > self.gpus_per_node:
            raise ConfigError(
                problem(
                    f"cluster.tp = {self.tp} exceeds cluster.gpus_per_node = {self.gpus_per_node}",
                    so="every layer's matrices would be split across nodes",
                    fix="use at most the devices of one node",
                )
            )

    def check_layers(self, num_layers: int) -> None:
        """Raise ``ConfigError`` when a model of ``num_layers`` has too few for every part."""
        if self.num_parts > num_layers:
            chunks = f" x cluster.virtual_stages = {self.virtual_stages}" if self.virtual_stages > 1 else ""
            raise ConfigError(
                problem(
                    f"cluster.pp = {self.pp}{chunks} exceeds the model's {num_layers} layers",
                    so=f"a {'chunk' if chunks else 'stage'} would have no layer",
                    fix=f"use fewer stages{' or chunks' if chunks else ''}",
                )
            )

    @property
    def num_parts(self) -> int:
        """Of the model: chunk c of stage s is part ``c pp + s``."""
        return self.pp * self.virtual_stages

    @property
    def num_ranks(self) -> int:
        """HDP ranks."""
        return self.num_gpus // (self.tp * self.pp)

    @property
    def ranks_per_node(self) -> int:
        """Consecutive HDP ranks whose devices of one stage share a node."""
        return self.gpus_per_node // self.tp
