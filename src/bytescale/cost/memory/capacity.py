"""How many tokens a rank may hold, and the refusal of what cannot fit: for training, planning and simulating alike."""

from __future__ import annotations

from bytescale.common.errors import ConfigError
from bytescale.common.units import format_bytes
from bytescale.config import AUTO_CAPACITY
from bytescale.cost.memory.device_memory import DeviceMemory


def fitting_capacity(model: DeviceMemory, wanted: int, usable_bytes: float, who: str = "a rank") -> int:
    """Return ``wanted`` tokens a micro-batch, or as many as fit if ``wanted`` is ``AUTO_CAPACITY``.

    Args:
        model: the memory of the pipeline's fullest stage, or of a measured model.
        usable_bytes: what a rank may use of its device.
        who: the rank, for messages.

    Raises:
        ConfigError: nothing fits, or fewer tokens than ``wanted``.
    """
    fits = model.capacity_tokens(usable_bytes)
    if fits == 0:
        raise ConfigError(
            f"{'NCCL, ' if model.nccl_bytes else ''}parameters, gradients and optimizer need "
            f"{format_bytes(model.states_bytes + model.nccl_bytes)} a rank, of "
            f"{format_bytes(usable_bytes)} that {who} may use",
            so="not one token would fit beside them",
            fix="use more ranks (the optimizer is sharded over them), more devices per rank (tp, pp), a smaller "
            "model, or a larger device_gib",
        )
    if wanted == AUTO_CAPACITY:
        return fits
    if wanted > fits:
        needed = float(model.limits().device_peak(wanted, 0, wanted))
        raise ConfigError(
            f"a micro-batch of parallel.capacity_tokens = {wanted} needs {format_bytes(needed)}, "
            f"{format_bytes(needed - usable_bytes)} more than the {format_bytes(usable_bytes)} that {who} may use",
            so="training would run out of memory",
            fix=f'set parallel.capacity_tokens to {fits} or less (or "auto"), memory.checkpointing to attention '
            "or full, or memory.device_gib",
        )
    return wanted
