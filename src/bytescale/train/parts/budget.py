"""What a rank's memory allows: the capacity in tokens, what may be offloaded, and refusal of what cannot fit."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bytescale.common.errors import ConfigError
from bytescale.common.units import format_bytes, format_count
from bytescale.config import Architecture, Config
from bytescale.config.validate import kind_of_ranks, may_offload
from bytescale.cost import Cluster, Profile
from bytescale.cost.assumed import ASSUMED
from bytescale.cost.memory import DeviceKind, DeviceMemory, MeasuredMemory, MemoryModel, fitting_capacity
from bytescale.cost.offload_rule import OffloadRule
from bytescale.plan.limits import MemoryLimits
from bytescale.runtime import HostPool
from bytescale.train.parts.devices import Devices, RankDevice
from bytescale.train.profiling.peak import device_name, known_peak

GIB = 2**30
USABLE_SHARE = 0.92  # of a device: the rest is for libraries' workspaces and fragments
HOST_SHARE = 0.5  # of the machine's memory, for offloaded activations


@dataclass(frozen=True, kw_only=True)
class UnequalRanks:
    """What ranks have that differ in memory or speed. Tuples ``[R]``."""

    capacity_tokens: tuple[int, ...]
    device_bytes: tuple[float, ...]
    speeds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The ranks' memory, the same numbers on every rank. Bytes, of the rank with the least memory."""

    model: DeviceMemory
    capacity_tokens: int
    device_bytes: float
    host_bytes: float  # for offloaded activations; 0 when nothing is offloaded
    rule: OffloadRule | None  # None: nothing is offloaded
    unequal: UnequalRanks | None = None  # None: plans are made for equal ranks

    @property
    def limits(self) -> MemoryLimits:
        """The limits that ``plan.verify`` checks every plan against."""
        limits = self.model.limits(device_bytes=self.device_bytes, host_bytes=self.host_bytes)
        return limits if self.unequal is None else replace(limits, device_bytes=self.unequal.device_bytes)

    def cluster(self, num_ranks: int) -> Cluster:
        """The ranks as planners see them."""
        if self.unequal is None:
            return Cluster.uniform(num_ranks, self.capacity_tokens, offload=self.rule)
        capacity, speeds = np.array(self.unequal.capacity_tokens), np.array(self.unequal.speeds)
        return Cluster(capacity_tokens=capacity, speeds=speeds, offload=self.rule)

    def host_pool(self, device: torch.device) -> HostPool | None:
        """Room for offloaded activations, made before the steps that need it; None when nothing is offloaded."""
        if self.rule is None:
            return None
        token_bytes = self.model.movable_bytes_per_token
        return HostPool(int(self.host_bytes), pinned=device.type == "cuda", token_bytes=token_bytes)

    def lines(self) -> list[str]:
        """The estimate for a full micro-batch, for people."""
        tokens = self.capacity_tokens
        peak = float(self.limits.device_peak(tokens, 0, tokens))
        lines = [
            f"memory  {format_bytes(peak)} of {format_bytes(self.device_bytes)} at the peak of a full micro-batch of "
            f"{format_count(tokens)} tokens: {self.model.parts_in_words(tokens, tokens)}"
        ]
        if self.rule is not None:
            largest = self.rule.largest_slice(tokens)
            lines.append(
                f"offload up to {format_bytes(self.host_bytes)} of host memory a rank, which makes room for slices of "
                f"{format_count(largest)} tokens"
            )
        if self.unequal is not None:
            capacity, speeds = self.unequal.capacity_tokens, self.unequal.speeds
            lines.append(
                f"ranks   differ: capacity {format_count(min(capacity))} to {format_count(max(capacity))} tokens, "
                f"speed {min(speeds):.2f} to {max(speeds):.2f} of the reference"
            )
        return lines


def memory_budget(
    config: Config,
    memory: Architecture | MeasuredMemory,
    *,
    device: torch.device,
    dtype: torch.dtype,
    devices: Devices,
    profile: Profile | None = None,
) -> MemoryBudget:
    """The budget of a run.

    Args:
        memory: of the model as it was measured, the same on all ranks; or the shape of our own model, which is counted.
        devices: of all HDP ranks.
        profile: times for Eq. 3; None: round numbers for the kind of device.

    Raises:
        ConfigError: the capacity does not fit into a device, or the context not into all ranks; or activations shall be
            offloaded, and none can be.
    """
    hdp = len(devices.of_ranks)
    device_bytes, host_bytes = min(devices.device_bytes), devices.host_bytes
    kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
    offloads = may_offload(config, device.type)
    whole = (
        memory
        if isinstance(memory, MeasuredMemory)
        else MemoryModel.of_config(
            config, memory, kind, element_bytes=dtype.itemsize, num_ranks=hdp, device_bytes=device_bytes
        )
    )
    model = whole.fullest_stage(device_bytes)
    capacity = fitting_capacity(model, config.parallel.capacity_tokens, device_bytes, f"rank {devices.smallest}")
    rule = None
    if offloads and (model.movable_bytes_per_token or (model is memory and config.memory.offload == "on")):
        if profile is None:
            assert not isinstance(memory, MeasuredMemory), "whoever measures memory knows the model's times"
            profile = ASSUMED[kind].profile(memory, bytes_per_element=dtype.itemsize)
        rule = model.offload_rule(profile, host_bytes)
    budget = MemoryBudget(
        model=model,
        capacity_tokens=capacity,
        device_bytes=device_bytes,
        host_bytes=host_bytes if rule else 0.0,
        rule=rule,
        unequal=_unequal(config, whole, devices, profile),
    )
    _check_context(config, budget, hdp)
    return budget


def _unequal(config: Config, whole: DeviceMemory, devices: Devices, profile: Profile | None) -> UnequalRanks | None:
    """The capacity and the speed of each rank; None if they are equal, or if the planner is for equal ranks."""
    if config.planner.name != "adaptive":
        return None
    capacity = []
    for room in devices.device_bytes:
        stage = whole.fullest_stage(room)
        capacity.append(fitting_capacity(stage, config.parallel.capacity_tokens, room))
    speeds = devices.speeds(profile.device if profile is not None else "")
    if min(capacity) == max(capacity) and min(speeds) == max(speeds):
        return None
    return UnequalRanks(capacity_tokens=tuple(capacity), device_bytes=devices.device_bytes, speeds=speeds)


def rank_device(config: Config, device: torch.device, dtype: torch.dtype, num_ranks: int) -> RankDevice:
    """What this rank may use, of ``num_ranks`` in the whole mesh."""
    return RankDevice(
        name=device_name(device, dtype),
        device_bytes=usable_device_bytes(config, device, num_ranks),
        host_bytes=usable_host_bytes(config, num_ranks),
        flops_per_second=known_peak(device, dtype, None),
    )


def usable_device_bytes(config: Config, device: torch.device, num_ranks: int) -> float:
    """What one rank may use of its device: as configured, or most of what there is."""
    if config.memory.device_gib is not None:
        return config.memory.device_gib * GIB
    if device.type == "cuda":
        return USABLE_SHARE * torch.cuda.get_device_properties(device).total_memory
    return USABLE_SHARE * machine_bytes() / _ranks_here(num_ranks)


def usable_host_bytes(config: Config, num_ranks: int) -> float:
    """What one rank may use of host memory for activations."""
    if config.memory.host_gib is not None:
        return config.memory.host_gib * GIB
    return HOST_SHARE * machine_bytes() / _ranks_here(num_ranks)


def machine_bytes() -> float:
    """Memory of this machine, or of the container that limits it."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.exists() else "max"
    return min(total, math.inf if text == "max" else float(text))


def _ranks_here(num_ranks: int) -> int:
    """Ranks that share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def _check_context(config: Config, budget: MemoryBudget, hdp: int) -> None:
    longest = budget.cluster(hdp).room
    context = config.data.context_length
    if context > longest:
        kind = kind_of_ranks(config.parallel)
        over = (context - longest) / hdp * budget.model.saved_bytes_per_token
        may_start_to = budget.rule is None and budget.model.movable_bytes_per_token > 0  # the last two layers stay
        most_groups = budget.model.most_head_groups
        raise ConfigError(
            f"a sequence of data.context_length = {context} tokens does not fit: {hdp} {kind} of capacity "
            f"{budget.capacity_tokens} hold {longest} tokens together"
            + (", all offloaded that may be" if budget.rule else "")
            + f" ({format_bytes(over)} a rank too many)",
            so="a document of full length could not be trained on",
            fix=f"use {-(-context * hdp // longest)} {kind}, a shorter context, memory.checkpointing"
            + (', memory.offload = "on"' if may_start_to else "")
            + (f", memory.head_groups = {most_groups}" if budget.model.head_groups < most_groups else "")
            + ", or more memory (memory.device_gib, memory.host_gib)",
        )
