"""Bandwidths and latencies of the links of one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from bytescale.common.errors import ConfigError, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """One device's links, one direction each. Infinite bandwidth and no latency: ideal, nothing is ever exposed."""

    intra_node_bytes_per_second: float = math.inf
    """To a neighbour in the same node (NVLink, shared memory)."""
    inter_node_bytes_per_second: float = math.inf
    """To a neighbour in another node (RDMA)."""
    latency_seconds: float = 0.0
    """From the start of a transfer until its first byte arrives; compute hides it like the bytes."""
    message_seconds: float = 0.0
    """Of every ring step and direction, which no compute hides: starting it, waking up, adding up what came."""
    device_to_host_bytes_per_second: float = math.inf
    """Offloading, forward."""
    host_to_device_bytes_per_second: float = math.inf
    """Loading back, backward."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if math.isnan(value) or value < 0 or (value == 0 and spec.name.endswith("bytes_per_second")):
                raise ConfigError(problem(f"links: {spec.name} is {value}", fix="use a number above 0"))

    def ring_bytes_per_second(self, inter_node: bool) -> float:
        """The pace of a ring: that of its slowest link."""
        return self.inter_node_bytes_per_second if inter_node else self.intra_node_bytes_per_second
