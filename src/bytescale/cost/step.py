"""What a step costs once, after its last backward: gradients are reduced, parameters gathered (ZeRO-1 over HDP)."""

from __future__ import annotations

import math

from bytescale.cost.profile import Profile
from bytescale.cost.split import stage_chunks

GRADIENT_BYTES = 4  # gradients are reduced in fp32
PARAMETER_BYTES = 2  # updated parameters are gathered in bf16


def stage_parameters(profile: Profile, *, stage: int, pipeline_parallel: int, virtual_stages: int = 1) -> float:
    """Weights per device of one stage: its layers, the embedding on the first, the head on the last."""
    shape = profile.architecture
    layers = sum(map(len, stage_chunks(shape, pipeline_parallel, stage, virtual_stages)))
    matrices = int(stage == 0) + int(stage == pipeline_parallel - 1 and not (shape.tie_embeddings and stage == 0))
    return (layers * profile.layer_parameters + matrices * shape.vocab_size * shape.hidden_size) / (
        profile.tensor_parallel
    )


def sync_bytes(parameters_per_device: float, num_ranks: int) -> float:
    """Bytes that each device sends in one step's reduce-scatter and all-gather: (R - 1) / R of both."""
    return parameters_per_device * (GRADIENT_BYTES + PARAMETER_BYTES) * (num_ranks - 1) / num_ranks


def sync_seconds(profile: Profile, parameters_per_device: float, *, num_ranks: int, ranks_per_node: int) -> float:
    """Time of one step's reduce-scatter and all-gather over ``num_ranks`` ranks.

    ``sync_bytes / bandwidth + 2 ceil(log2 R) latency``, at the pace of the slowest link that the ranks span. Nothing of
    it is overlapped: reduction starts after the LAST backward, since ranks run different numbers of micro-batches.
    """
    if num_ranks == 1:
        return 0.0
    rate = profile.links.ring_bytes_per_second(num_ranks > ranks_per_node)
    hops = math.ceil(math.log2(num_ranks))
    return sync_bytes(parameters_per_device, num_ranks) / rate + 2 * hops * profile.links.latency_seconds
