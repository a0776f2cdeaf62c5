"""Peak memory of a micro-batch, part by part, from the model's shape: what fits is known before anything runs.

The counts follow what autograd really saves; tests/cost/test_memory.py compares them with counted tensors.
"""

from bytescale.cost.memory.device_kernels import (
    HEAD_NUMBERS_PER_CHUNK,
    LOGITS_PER_CHUNK,
    NCCL_BYTES_PER_NEIGHBOUR,
    ROWS_PER_CHUNK,
    DeviceKind,
    KernelMemory,
    is_row_wise,
    loss_chunk_tokens,
    nccl_reserve_bytes,
)
from bytescale.cost.memory.device_memory import DeviceMemory, States, fitting_capacity, host_bytes_left
from bytescale.cost.memory.measured import MeasuredMemory, MeasuredRows
from bytescale.cost.memory.model import Checkpointing, MemoryModel
from bytescale.cost.memory.rows import ModelShare, RingWidths

__all__ = [
    "HEAD_NUMBERS_PER_CHUNK",
    "LOGITS_PER_CHUNK",
    "NCCL_BYTES_PER_NEIGHBOUR",
    "ROWS_PER_CHUNK",
    "Checkpointing",
    "DeviceKind",
    "DeviceMemory",
    "KernelMemory",
    "MeasuredMemory",
    "MeasuredRows",
    "MemoryModel",
    "ModelShare",
    "RingWidths",
    "States",
    "fitting_capacity",
    "host_bytes_left",
    "is_row_wise",
    "loss_chunk_tokens",
    "nccl_reserve_bytes",
]
