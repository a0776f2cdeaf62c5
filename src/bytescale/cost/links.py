"""Bandwidths and latencies of the links of one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bytescale.common.limits import check_limits, limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """One device's links, one direction each. The defaults are ideal links, whose transfers are never exposed."""

    intra_node_bytes_per_second: float = field(default=math.inf, metadata=limits(above=0))
    """To a neighbour in the same node (NVLink, shared memory)."""
    inter_node_bytes_per_second: float = field(default=math.inf, metadata=limits(above=0))
    """To a neighbour in another node (RDMA)."""
    node_bytes_per_second: float = field(default=math.inf, metadata=limits(above=0))
    """To other nodes, of all ranks of a node together, which may share an adapter."""
    latency_seconds: float = field(default=0.0, metadata=limits(least=0))
    """Time from the start of a transfer until its first byte arrives. Compute can hide it, like the transfer itself."""
    inter_node_latency_seconds: float | None = field(default=None, metadata=limits(least=0))
    """The same to a neighbour in another node. None: as inside a node."""
    message_seconds: float = field(default=0.0, metadata=limits(least=0))
    """Time of every ring step and direction that no compute hides: starting, waking up, adding up what arrived."""
    device_to_host_bytes_per_second: float = field(default=math.inf, metadata=limits(above=0))
    """For offloading, in forward."""
    host_to_device_bytes_per_second: float = field(default=math.inf, metadata=limits(above=0))
    """For loading back, in backward."""
    host_update_bytes_per_second: float = field(default=math.inf, metadata=limits(above=0))
    """Of an optimizer in host memory: weights, gradients and states that a rank's cores read and write."""
    reduce_bytes_per_second: float | None = field(default=None, metadata=limits(above=0))
    """Bytes of a bucket that each rank has to send, (R - 1) / R of it, over the time of its reduce-scatter. None: the
    bandwidth of a ring."""
    gather_bytes_per_second: float | None = field(default=None, metadata=limits(above=0))
    """The same of the all-gather."""
    collective_seconds: float | None = field(default=None, metadata=limits(least=0))
    """Time of a collective of a few bytes over all ranks. None: ceil(log2 R) latencies."""

    def __post_init__(self) -> None:
        check_limits(self, "links: ")

    def ring_bytes_per_second(self, inter_node: bool) -> float:
        """Bandwidth of a ring, which is that of its slowest link."""
        if not inter_node:
            return self.intra_node_bytes_per_second
        return min(self.inter_node_bytes_per_second, self.node_bytes_per_second)

    def ring_latency_seconds(self, inter_node: bool) -> float:
        across = self.inter_node_latency_seconds
        return across if inter_node and across is not None else self.latency_seconds
