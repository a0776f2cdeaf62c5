"""How a device computes: with which fused kernels, and how much of the long work at a time.

The runtime takes the same chunk sizes from here (``runtime.loss``, ``runtime.saved.activations``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bytescale.config.architecture import Architecture

DeviceKind = Literal["cpu", "cuda"]
LOGITS_PER_CHUNK = {
    "cpu": 2**22,  # 16 MiB in fp32, which fits the last-level cache of a server
    "cuda": 2**28,  # 512 MiB in BF16: summing the head's gradient costs 10 bytes of traffic per weight and chunk
}
"""Logits that exist at a time."""
HEAD_NUMBERS_PER_CHUNK = {"cpu": 2**22, "cuda": 2**26}
"""Numbers of the head's gradient that are converted between its sum's dtype and the weights' at a time."""
ROWS_PER_CHUNK = {"cpu": 2**15, "cuda": 2**14}
"""Rows of a feed-forward block that are recomputed at a time, with checkpointing. A 7B model takes 3.8 GB in BF16."""

NCCL_BYTES_PER_NEIGHBOUR = 32 * (10 + 2) * 2**20
"""Bytes of the buffers that NCCL allocates when two GPUs of a node first exchange messages.

A communicator for collectives takes about as much. There are 32 channels of 10 MiB to receive and 2 MiB to send, by
NCCL's log on 8 H100s (NVIDIA/nccl#1685). Peers on other nodes share one buffer.
"""
_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMemory:
    """The kernels of a device. The defaults compute everything at once with plain PyTorch."""

    fused_norm: bool = False
    """Whether RMSNorm is one kernel, which saves neither the normalised rows nor copies in fp32."""
    fused_attention: bool = False
    """Whether attention is CUDA's flash kernel, whose backward has its gradients and fp32 sums beside them at once."""
    fused_loss: bool = False
    """Whether logits stay in the compute dtype (the Triton kernel for BF16)."""
    loss_chunk_tokens: int = 1024
    """Tokens whose logits exist at a time."""
    head_chunk_numbers: float = math.inf
    """Numbers of the head's gradient that are converted at a time."""
    feed_forward_rows: float = math.inf
    """Rows of the feed-forward part that exist at a time in backward, under checkpointing."""

    @staticmethod
    def of_device(
        kind: DeviceKind, architecture: Architecture, *, element_bytes: int, tensor_parallel: int, attention: str
    ) -> KernelMemory:
        """Return what ``runtime`` uses on a device of this ``kind``. ``attention``: as ``kernels.attention``."""
        on_gpu = kind == "cuda"
        return KernelMemory(
            fused_norm=on_gpu,
            fused_attention=on_gpu and attention != "math",
            fused_loss=on_gpu and element_bytes == 2,
            loss_chunk_tokens=loss_chunk_tokens(-(-architecture.vocab_size // tensor_parallel), kind),
            head_chunk_numbers=HEAD_NUMBERS_PER_CHUNK[kind],
            feed_forward_rows=ROWS_PER_CHUNK[kind] if is_row_wise(architecture, tensor_parallel) else math.inf,
        )


def is_row_wise(architecture: Architecture, tensor_parallel: int) -> bool:
    """Whether feed-forward parts treat every row alone. A mixture with tensor parallelism moves rows between ranks."""
    return not (architecture.num_experts and tensor_parallel > 1)


def loss_chunk_tokens(vocab_size: int, kind: str) -> int:
    """Tokens whose logits over ``vocab_size`` words exist at a time on a device of this ``kind``."""
    return max(1, LOGITS_PER_CHUNK[kind] // vocab_size)


def nccl_reserve_bytes(num_hdp_ranks: int, tensor_parallel: int, num_stages: int) -> int:
    """Return the bytes that NCCL holds on one rank of a mesh, for its communicators and for all possible neighbours.

    In the course of a run a rank meets all HDP ranks of its node in rings, and the stages before and after its own.
    """
    hdp, tp, pp = (size > 1 for size in (num_hdp_ranks, tensor_parallel, num_stages))
    communicators = int(hdp or tp or pp) + int(hdp) + int(hdp and (tp or pp)) + int(tp)  # world, gradients, HDP, TP
    neighbours = min(num_hdp_ranks, _GPUS_PER_NODE) - 1 + 2 * int(pp)
    return NCCL_BYTES_PER_NEIGHBOUR * (communicators + neighbours)
