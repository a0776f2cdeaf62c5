"""What a rank's memory allows: the capacity in tokens, what may be offloaded, and refusal of what cannot fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from bytescale.common.environment import host_bytes_of_a_rank, machine_bytes
from bytescale.common.errors import ConfigError
from bytescale.common.units import GIBI, format_bytes, format_count
from bytescale.config.schema import Config
from bytescale.config.validate import kind_of_ranks, may_offload
from bytescale.cost.cluster import Cluster
from bytescale.cost.memory.device_kernels import DeviceKind
from bytescale.cost.memory.device_memory import host_bytes_left
from bytescale.cost.memory.measured import MeasuredMemory, fitting_capacity
from bytescale.cost.profile import Profile
from bytescale.plan.limits import MemoryLimits
from bytescale.runtime.usable import kind_of, usable_device_bytes
from bytescale.train.parts.devices import Devices, RankDevice
from bytescale.train.profiling.peak import device_name, known_peak

_PROCESS_BYTES = 340e6
"""What a rank has in memory before its first tensor: Python, PyTorch and their libraries (measured, torch 2.13)."""


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The ranks' memory, the same numbers on every rank. Bytes, of the rank with the least memory."""

    model: MeasuredMemory
    cluster: Cluster
    """The ranks as planners see them, with what they may offload."""
    limits: MemoryLimits
    """What ``plan.verify`` checks every plan against."""
    device_bytes: float

    @property
    def capacity_tokens(self) -> int:
        """Of the rank with the least memory."""
        return int(self.cluster.capacity_tokens.min())

    def lines(self) -> list[str]:
        """The estimate for a full micro-batch, for people."""
        tokens, cluster = self.capacity_tokens, self.cluster
        peak = float(self.limits.device_peak(tokens, 0, tokens))
        lines = [
            f"memory  {format_bytes(peak)} of {format_bytes(self.device_bytes)} at the peak of a full micro-batch of "
            f"{format_count(tokens)} tokens: {self.model.parts_in_words(tokens, tokens)}"
        ]
        if cluster.offload is not None:
            lines.append(
                f"offload up to {format_bytes(self.limits.host_bytes)} of host memory a rank, which makes room for "
                f"slices of {format_count(cluster.offload.largest_slice(tokens))} tokens"
            )
        if self.model.states.host_bytes:
            lines.append(f"host    {format_bytes(self.model.states.host_bytes)} a rank for the optimizer")
        if not cluster.is_uniform:
            most = int(cluster.capacity_tokens.max())
            lines.append(
                f"ranks   differ: capacity {format_count(tokens)} to {format_count(most)} tokens, "
                f"speed {cluster.speeds.min():.2f} to {cluster.speeds.max():.2f} of the reference"
            )
        return lines


def memory_budget(
    config: Config, memory: MeasuredMemory, *, device: torch.device, devices: Devices, profile: Profile, domain: int = 1
) -> MemoryBudget:
    """The budget of a run.

    Args:
        memory: of the model, the same on all ranks.
        devices: of all HDP ranks.
        profile: times for Eq. 3.
        domain: HDP ranks that share the weights of layers.

    Raises:
        ConfigError: the capacity does not fit into a device, the optimizer not into host memory, or the context not
            into all ranks; or activations shall be offloaded, and none can be.
    """
    hdp, wanted = len(devices.of_ranks), config.parallel.capacity_tokens
    rooms = devices.device_bytes
    least = min(rooms)
    whole = memory.of_run(config, domain=domain)
    model = whole.fullest_stage(least)
    host = host_bytes_left(model.states, devices.host_bytes)
    cluster = Cluster.uniform(hdp, fitting_capacity(model, wanted, least, f"rank {devices.smallest}"))
    if config.planner.name == "adaptive" and config.memory.offload != "on":  # only then ranks may differ
        capacity = [fitting_capacity(whole.fullest_stage(room), wanted, room) for room in rooms]
        speeds = devices.speeds(profile.device)
        if len({*capacity}) > 1 or len({*speeds}) > 1:
            cluster = Cluster(capacity_tokens=np.array(capacity), speeds=np.array(speeds))
    cluster = with_offload(cluster, config, kind_of(device), model, profile, host)
    host_bytes = host if cluster.offload else 0.0
    room = least if cluster.is_uniform else rooms
    limits = replace(model.limits(device_bytes=least, host_bytes=host_bytes), device_bytes=room)
    budget = MemoryBudget(model=model, cluster=cluster, limits=limits, device_bytes=least)
    _check_context(config, budget)
    return budget


def with_offload(
    cluster: Cluster, config: Config, kind: DeviceKind, model: MeasuredMemory, times: Profile, host_bytes: float
) -> Cluster:
    """``cluster`` with what its ranks may offload into ``host_bytes`` each, if the config lets them.

    Raises ``ConfigError`` where they shall, and none can be.
    """
    is_useful = config.memory.offload == "on" or model.movable_bytes_per_token > 0
    if not (may_offload(config, kind) and cluster.is_uniform and is_useful):
        return cluster
    return replace(cluster, offload=model.offload_rule(times, host_bytes))


def rank_device(config: Config, device: torch.device, dtype: torch.dtype, num_ranks: int) -> RankDevice:
    """What this rank may use, of ``num_ranks`` in the whole mesh."""
    return RankDevice(
        name=device_name(device, dtype),
        device_bytes=usable_device_bytes(device, num_ranks, config.memory.device_gib),
        host_bytes=usable_host_bytes(config, num_ranks),
        flops_per_second=known_peak(device, dtype),
    )


def usable_host_bytes(config: Config, num_ranks: int) -> float:
    """What one rank may use of host memory for activations and the optimizer."""
    if config.memory.host_gib is not None:
        return config.memory.host_gib * GIBI
    return host_bytes_of_a_rank(num_ranks, with_optimizer=config.optimizer.offload)


def check_room(num_ranks: int) -> None:
    """Raise ``ConfigError`` if so many processes do not even have room on this machine before they hold any tensor."""
    needed, there = num_ranks * _PROCESS_BYTES, machine_bytes()
    if needed > there:
        raise ConfigError(
            f"{num_ranks} ranks on this machine need {format_bytes(needed)} for their processes alone, and it has "
            f"{format_bytes(there)}",
            so="the system would kill some of them",
            fix=f"use at most {int(there / _PROCESS_BYTES)} ranks, or several machines (docs/cluster.md)",
        )


def _check_context(config: Config, budget: MemoryBudget) -> None:
    hdp, longest, offload = budget.cluster.num_ranks, budget.cluster.room, budget.cluster.offload
    context = config.data.context_length
    if context > longest:
        kind = kind_of_ranks(config.parallel)
        over = (context - longest) / hdp * budget.model.saved_bytes_per_token
        may_start_to = offload is None and budget.model.movable_bytes_per_token > 0  # the last two layers stay
        raise ConfigError(
            f"a sequence of data.context_length = {context} tokens does not fit: {hdp} {kind} of capacity "
            f"{budget.capacity_tokens} hold {longest} tokens together"
            + (", all offloaded that may be" if offload else "")
            + f" ({format_bytes(over)} a rank too many)",
            so="a document of full length could not be trained on",
            fix=f"use {-(-context * hdp // longest)} {kind}, a shorter context, memory.checkpointing"
            + (', memory.offload = "on"' if may_start_to else "")
            + ", or more memory (memory.device_gib, memory.host_gib)",
        )
