"""The memory that NCCL takes beside PyTorch's allocator."""

from __future__ import annotations

NCCL_BYTES_PER_NEIGHBOUR = 32 * (10 + 2) * 2**20
"""Bytes of the buffers that NCCL allocates when two GPUs of a node first exchange messages.

A communicator for collectives takes about as much. There are 32 channels of 10 MiB to receive and 2 MiB to send, as
NCCL's log of allocations shows on 8 H100s (NVIDIA/nccl#1685, where seven peers took 3.28 GB). Peers on other nodes
share one buffer.
"""
_GPUS_PER_NODE = 8


def nccl_reserve_bytes(num_hdp_ranks: int, tensor_parallel: int, num_stages: int) -> int:
    """Return the bytes that NCCL holds on one rank of a mesh, for its communicators and for all possible neighbours.

    In the course of a run a rank meets all HDP ranks of its node in rings, and the stages before and after its own.
    """
    hdp, tp, pp = (size > 1 for size in (num_hdp_ranks, tensor_parallel, num_stages))
    communicators = int(hdp or tp or pp) + int(hdp) + int(hdp and (tp or pp)) + int(tp)  # world, gradients, HDP, TP
    neighbours = min(num_hdp_ranks, _GPUS_PER_NODE) - 1 + 2 * int(pp)
    return NCCL_BYTES_PER_NEIGHBOUR * (communicators + neighbours)
