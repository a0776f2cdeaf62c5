"""What becomes of activations between forward and backward: kept, computed again, or sent to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from bytescale.common.errors import PlanError
from bytescale.config.schema import Checkpointing
from bytescale.cost.memory.device_kernels import ROWS_PER_CHUNK
from bytescale.plan import MicroBatch
from bytescale.runtime.group import RankGroup
from bytescale.runtime.saved.checkpointing import (
    KeptAttention,
    RowChunk,
    apply_checkpointing,
    apply_row_chunks,
)

if TYPE_CHECKING:
    from bytescale.runtime.saved.host_pool import HostPool
    from bytescale.runtime.saved.offload import ActivationOffload


class Activations:
    """Checkpointing and offloading of one rank's layers: set up once, then told which micro-batch runs.

    Attributes:
        attention_memory: what ``PackedAttention`` has to be given.
        offload: None when no activations may go to host memory.
        row_chunk: how many rows ``row_wise`` methods process at a time.
        has_chunks: whether there are such methods.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        checkpointing: Checkpointing = "none",
        pool: HostPool | None = None,
        device: torch.device | None = None,
        tp: RankGroup | None = None,
        row_wise: Sequence[tuple[nn.Module, str]] = (),
        chunk_rows: int | None = None,
    ) -> None:
        """Apply checkpointing and offloading to ``layers``.

        Args:
            layers: in the order of forward.
            checkpointing: what is computed again in backward (``runtime.saved.checkpointing``).
            pool: host memory for offloading. With None, a plan whose offload ratios are above 0 cannot be run.
            device: that computes; None: the CPU.
            tp: the tensor-parallel ranks that share a micro-batch's rows.
            row_wise: pairs of a module inside the layers and the name of one of its methods that treats each row
                independently. With checkpointing these methods process ``chunk_rows`` rows at a time.
            chunk_rows: rows in one chunk; None: the usual number for the device.
        """
        kind = "cpu" if device is None or device.type == "meta" else device.type
        self.row_chunk = RowChunk(chunk_rows or ROWS_PER_CHUNK[kind])
        pairs = row_wise if checkpointing != "none" else ()
        self.has_chunks = bool(pairs)
        self.keeps_graphs = checkpointing == "none"
        self._undo = [apply_row_chunks(module, method, self.row_chunk) for module, method in pairs]
        self._undo.append(apply_checkpointing(layers, checkpointing, kept := KeptAttention()))
        self.attention_memory = kept if checkpointing == "attention" else None
        self.offload: ActivationOffload | None = None
        if pool is not None:
            from bytescale.runtime.saved.offload import ActivationOffload  # with offloading alone

            self.offload = ActivationOffload(layers, pool, device or torch.device("cpu"), tp)
        if self.attention_memory is not None and self.offload is not None:
            self.attention_memory.keep_with(self.offload.pack, self.offload.unpack)

    def begin_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        if self.offload is not None:
            self.offload.begin_step(micro_batches)
            return
        for micro_batch in micro_batches:
            if micro_batch.offloaded_tokens:
                raise PlanError(
                    f"the plan offloads {micro_batch.offloaded_tokens} of {micro_batch.num_tokens} tokens of "
                    f"micro-batch {micro_batch.index}, but this run has no host memory for activations",
                    so="the micro-batch would not fit on the device",
                    fix="give it some (memory.offload, or HDP(host_gib=...)), or plan without offloading",
                )

    def remove(self) -> None:
        """Give the layers back the forward that they had."""
        for undo in self._undo:
            undo()
        if self.offload is not None:
            self.offload.remove()

    def forward(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Context manager that surrounds the forward of a micro-batch of the step; backward may come at any time."""
        return nullcontext() if self.offload is None else self.offload.forward(micro_batch)
