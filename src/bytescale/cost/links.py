"""Bandwidths and latencies of the links of one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from bytescale.common.errors import ConfigError, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """One device's links, one direction each. The defaults are ideal links, whose transfers are never exposed."""

    intra_node_bytes_per_second: float = math.inf
    """To a neighbour in the same node (NVLink, shared memory)."""
    inter_node_bytes_per_second: float = math.inf
    """To a neighbour in another node (RDMA)."""
    latency_seconds: float = 0.0
    """Time from the start of a transfer until its first byte arrives. Compute can hide it, like the transfer itself."""
    message_seconds: float = 0.0
    """Time of every ring step and direction that no compute hides: starting, waking up, adding up what arrived."""
    device_to_host_bytes_per_second: float = math.inf
    """For offloading, in forward."""
    host_to_device_bytes_per_second: float = math.inf
    """For loading back, in backward."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if math.isnan(value) or value < 0 or (value == 0 and spec.name.endswith("bytes_per_second")):
                raise ConfigError(problem(f"links: {spec.name} is {value}", fix="use a number above 0"))

    def ring_bytes_per_second(self, inter_node: bool) -> float:
        """Bandwidth of a ring, which is that of its slowest link."""
        return self.inter_node_bytes_per_second if inter_node else self.intra_node_bytes_per_second
