"""What runs the micro-batches of an attached model in a loop that is not ours: kernels, passes and activations."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

from bytescale.attention import PackedAttention, RingBuffers, select_kernel
from bytescale.common.errors import ConfigError
from bytescale.cost.assumed import ASSUMED
from bytescale.cost.memory import DeviceKind
from bytescale.cost.offload_rule import OffloadRule
from bytescale.hf.costs.measure import check_widths, measure_rows, measured_memory
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.decoder import AttachedDecoder, MicroBatchPass
from bytescale.plan import MicroBatch
from bytescale.runtime import Activations, HostPool, RankGroup
from bytescale.runtime.saved.checkpointing import Checkpointing

_GIB = 2**30


def require_use_of_host_memory(host_gib: float, *, equal_counts: bool, forward_only: bool) -> None:
    """Raise ``ConfigError`` if ``host_gib`` is above 0 for passes in which nothing can be offloaded."""
    for name, given, why in (
        ("forward_only", forward_only, "without a backward nothing is kept"),
        ("equal_counts", equal_counts, "memory of weights that FSDP frees and fills again looks like activations"),
    ):
        if host_gib and given:
            raise ConfigError(
                f"host_gib = {host_gib} with {name} = True: {why}",
                so="nothing could be offloaded",
                fix=f"leave host_gib out, or {name}",
            )


class Engine:
    """Micro-batches of one attached model on one rank; ``others`` run the same ones without gradients."""

    def __init__(
        self, decoder: AttachedDecoder, group: RankGroup, *, kernel: str, checkpointing: Checkpointing, host_gib: float
    ) -> None:
        """Apply checkpointing and offloading to the layers. Raises ``ConfigError`` where they have no numbers."""
        check_widths(decoder.facts, cuda_flash=group.device.type == "cuda" and kernel != "math")
        self.decoder, self.group = decoder, group
        self._kernel = cache(lambda dtype: select_kernel(kernel, group.device, dtype))
        self.others: list[AttachedDecoder] = []
        self._host_bytes = int(host_gib * _GIB)
        self._pool = HostPool(self._host_bytes, pinned=group.device.type == "cuda") if host_gib else None
        layers = decoder.layers if host_gib or checkpointing != "none" else []
        self.activations = Activations(layers, checkpointing=checkpointing, pool=self._pool, device=group.device)

    def micro(self, plan: MicroBatch, fields: dict[str, Tensor], buffers: RingBuffers) -> Micro:
        """The micro-batch of a plan with its rows ``fields``."""
        # Without a ring, the row that stands for no token is a document of its own.
        attended = plan if plan.num_tokens or plan.shared is not None else MicroBatch.of_documents(0, [1])
        exchange = self.group.exchange

        def pass_of(decoder: AttachedDecoder) -> MicroBatchPass:
            own = decoder is self.decoder
            kept = self.activations.attention_memory if own else None
            return MicroBatchPass(
                decoder,
                cache(lambda dtype: PackedAttention(attended, self._kernel(dtype), exchange, kept, buffers)),
                plan.num_tokens,
                has_ring=plan.shared is not None,
                name=f"micro-batch {plan.index} of rank {self.group.rank}",
                around=(lambda: self.activations.forward(plan)) if own else nullcontext,
            )

        own, *others = map(pass_of, (self.decoder, *self.others))
        return Micro(plan, fields, own, self.group, others)

    def offload_rule(self) -> OffloadRule | None:
        """Equation 3 for the planner, from what the layers were seen to keep; None: there is no host memory for them.

        Every rank calls it, and gets the same. Gradients stay. Raises ``ConfigError`` where offloading frees nothing.
        """
        if self._pool is None:
            return None
        parameters = list(self.decoder.parameters())
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:  # gradients that backward would make would hide the peak of its layers
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with torch.enable_grad():
            rows = measure_rows(self.decoder, self._kernel(parameters[0].dtype), self.activations, self.group.device)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._pool.token_bytes = rows.moved_per_token
        kind: DeviceKind = "cuda" if self.group.device.type == "cuda" else "cpu"
        rows = rows.of_all(lambda values: [-value for value in self.group.max_of([-value for value in values])])
        memory = measured_memory(self.decoder, rows, kind=kind, num_ranks=self.group.size)
        times = ASSUMED[kind].profile(self.decoder.spec, bytes_per_element=parameters[0].element_size())
        return memory.offload_rule(times, -self.group.max_of([-float(self._host_bytes)])[0])
