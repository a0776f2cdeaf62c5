"""What the ranks' memory allows in loops that are not ours: the capacity, grids, and what may be offloaded.

It is counted for training with AdamW, and for a loss that never has all rows' logits (``Micro.loss_sum``,
``Micro.logprobs``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bytescale.common.errors import ConfigError
from bytescale.config.schema import AUTO_CAPACITY
from bytescale.cost.assumed import MeshCosts
from bytescale.hf.loop.micro_batch import Engine
from bytescale.plan.limits import MemoryLimits

if TYPE_CHECKING:
    from bytescale.cost.memory.measured import MeasuredMemory
    from bytescale.cost.offload_rule import OffloadRule

Capacity = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Room:
    """Of every rank, the same on all.

    Attributes:
        memory: what a micro-batch needs; None: not measured, because nothing depends on it.
        limits: what plans are checked against; None: they are not.
        offload: what a micro-batch may offload; None: nothing.
    """

    capacity_tokens: int
    memory: MeasuredMemory | None = None
    limits: MemoryLimits | None = None
    offload: OffloadRule | None = None

    @staticmethod
    def of(engine: Engine, capacity_tokens: Capacity, device_gib: float | None, costs: MeshCosts) -> Room:
        """Measure what has to be known, as ``train.parts.budget`` does. Every rank calls it.

        Raises ``ConfigError`` for a capacity that does not fit ``device_gib``, and where offloading frees nothing.
        """
        auto = capacity_tokens == "auto"
        wanted = AUTO_CAPACITY if capacity_tokens == "auto" else capacity_tokens
        if not (auto or device_gib is not None or engine.pool):
            return Room(capacity_tokens=wanted)
        from bytescale.cost.memory.measured import fitting_capacity
        from bytescale.runtime.usable import usable_device_bytes  # where memory is limited

        memory, group = engine.measured_memory(), engine.group
        memory = memory.with_states(domain=costs.domain, experts_in_parallel=costs.experts == "parallel")
        limits, offload = None, None
        (host_bytes,) = group.min_of([float(engine.host_bytes)])
        if auto or device_gib is not None:
            (room,) = group.min_of([usable_device_bytes(group.device, group.size, device_gib)])
            memory = memory.fullest_stage(room)
            wanted = fitting_capacity(memory, wanted, room)
            limits = memory.limits(device_bytes=room, host_bytes=host_bytes)
        if engine.pool is not None:
            offload = memory.offload_rule(costs.times(engine.decoder.spec), host_bytes)
        return Room(capacity_tokens=wanted, memory=memory, limits=limits, offload=offload)


def require_use_of_memory(
    capacity_tokens: Capacity, device_gib: float | None, host_gib: float, equal_counts: bool, forward_only: bool
) -> None:
    """Raise ``ConfigError`` for what needs measured memory where it cannot be measured, and for other words."""
    if isinstance(capacity_tokens, str) and capacity_tokens != "auto":
        raise ConfigError(f"capacity_tokens = {capacity_tokens!r}", fix='give a number of tokens, or "auto"')
    asked = [f"{name} = {value}" for name, value in (("device_gib", device_gib), ("host_gib", host_gib)) if value]
    if capacity_tokens == "auto":
        asked.append('capacity_tokens = "auto"')
    for name, is_set, why in (
        ("forward_only", forward_only, "without a backward nothing is kept"),
        ("equal_counts", equal_counts, "memory of weights that FSDP frees and fills again looks like activations"),
    ):
        if asked and is_set:
            raise ConfigError(
                f"{asked[0]} with {name} = True: {why}",
                so="what a token needs could not be measured",
                fix=f"leave {name} out, or give capacity_tokens alone, as a number",
            )
