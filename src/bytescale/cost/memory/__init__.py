"""Peak memory of a micro-batch, part by part: what fits is known before anything runs."""

from bytescale.cost.memory.device_kernels import (
    HEAD_NUMBERS_PER_CHUNK,
    LOGITS_PER_CHUNK,
    NCCL_BYTES_PER_NEIGHBOUR,
    ROWS_PER_CHUNK,
    DeviceKind,
    loss_chunk_tokens,
    nccl_reserve_bytes,
)
from bytescale.cost.memory.device_memory import DeviceMemory, States, fitting_capacity, host_bytes_left
from bytescale.cost.memory.measured import MeasuredMemory, MeasuredRows
from bytescale.cost.memory.rows import RingWidths

__all__ = [
    "HEAD_NUMBERS_PER_CHUNK",
    "LOGITS_PER_CHUNK",
    "NCCL_BYTES_PER_NEIGHBOUR",
    "ROWS_PER_CHUNK",
    "DeviceKind",
    "DeviceMemory",
    "MeasuredMemory",
    "MeasuredRows",
    "RingWidths",
    "States",
    "fitting_capacity",
    "host_bytes_left",
    "loss_chunk_tokens",
    "nccl_reserve_bytes",
]
