"""The speeds that planning assumes without a profile: round numbers for two kinds of devices.

Every rank makes the plan by itself, and all ranks must get the same plan, so no measurement of a rank may enter.
Balancing needs the ratio of attention to the rest, which a FLOP count gives. Whether sharing a sequence pays depends on
the ratio of compute to links, for which an order of magnitude is enough. A profile (``cost.profile``) replaces both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bytescale.config import Architecture, RingGradients
from bytescale.cost.links import Links
from bytescale.cost.model import CostModel
from bytescale.cost.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedDevice:
    """One rank's device and its links, with the right orders of magnitude."""

    flops_per_second: float
    intra_node_bytes_per_second: float
    inter_node_bytes_per_second: float
    message_seconds: float  # latency of one ring transfer
    micro_batch_seconds: float  # launch overhead of a forward and backward
    host_bytes_per_second: float  # to and from pinned host memory, one direction


ASSUMED: dict[str, AssumedDevice] = {
    # A core with AVX2, and gloo over loopback. Its copies use the cores themselves, so no transfer is hidden for free.
    # Bandwidth and latency are therefore a few times worse than those of the link alone.
    "cpu": AssumedDevice(
        flops_per_second=5e10,
        intra_node_bytes_per_second=2e8,
        inter_node_bytes_per_second=2e8,
        message_seconds=2e-3,
        micro_batch_seconds=3e-3,
        host_bytes_per_second=4e9,
    ),
    # An H100-class GPU in bf16, NVLink inside a node and one 400 Gb/s adapter a GPU across nodes, half of each usable.
    "cuda": AssumedDevice(
        flops_per_second=4e14,
        intra_node_bytes_per_second=2e11,
        inter_node_bytes_per_second=2.5e10,
        message_seconds=1e-5,
        micro_batch_seconds=2e-3,
        host_bytes_per_second=2.5e10,
    ),
}


def assumed_cost(
    architecture: Architecture,
    *,
    device: Literal["cpu", "cuda"],
    bytes_per_element: int,
    ring_gradients: RingGradients = "wide",
) -> CostModel:
    """The cost model of ``architecture`` on a device of ``ASSUMED``, without any measurement."""
    profile = assumed_profile(architecture, device=device, bytes_per_element=bytes_per_element)
    cost = profile.with_ring_gradients(ring_gradients).cost_model()
    return replace(cost, micro_batch_seconds=ASSUMED[device].micro_batch_seconds)


def assumed_profile(architecture: Architecture, *, device: Literal["cpu", "cuda"], bytes_per_element: int) -> Profile:
    """The same assumptions as a profile, layer by layer, as Equation 3 needs them."""
    assumed = ASSUMED[device]
    return Profile.from_flops(
        architecture,
        flops_per_second=assumed.flops_per_second,
        bytes_per_element=bytes_per_element,
        links=Links(
            intra_node_bytes_per_second=assumed.intra_node_bytes_per_second,
            inter_node_bytes_per_second=assumed.inter_node_bytes_per_second,
            latency_seconds=assumed.message_seconds,
            device_to_host_bytes_per_second=assumed.host_bytes_per_second,
            host_to_device_bytes_per_second=assumed.host_bytes_per_second,
        ),
    )
