"""The devices of all ranks: how much memory each has, and how fast it is beside the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bytescale.common.errors import ConfigError
from bytescale.common.units import format_bytes
from bytescale.config.schema import Config
from bytescale.runtime.mesh import MeshShape

SAME = 0.05
"""Numbers of devices that differ by less than this share are equal: machines of one kind differ a little in memory."""


def fit_to_gpus(config: Config, num_gpus: int | None = None) -> Config:
    """Use one rank per GPU, with the same total capacity, if the machine has fewer GPUs than the config has ranks.

    So a config written for 4 CPU ranks of 2K tokens runs on one GPU as one rank of 8K. This applies only with
    ``trainer.device = "auto"``. The change is printed. ``num_gpus`` None: the GPUs are counted.
    """
    if num_gpus is None:
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks, capacity = config.parallel.ranks, config.parallel.capacity_tokens
    if config.trainer.device != "auto" or not 0 < num_gpus < ranks:
        return config
    fitted = replace(config.parallel, ranks=num_gpus, capacity_tokens=-(-ranks * capacity // num_gpus))
    print(
        f"{num_gpus} GPUs for {ranks} ranks: running {num_gpus} ranks of {fitted.capacity_tokens} tokens instead "
        '(trainer.device = "cpu" keeps them on the CPU)'
    )
    return replace(config, parallel=fitted)


@dataclass(frozen=True, kw_only=True)
class RankDevice:
    name: str
    """Of the device, with the dtype."""
    device_bytes: float
    host_bytes: float
    flops_per_second: float | None = None
    """Of the data sheet; None: not known."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of the HDP ranks, of each the one with the least memory of its TP group and pipeline."""

    of_ranks: tuple[RankDevice, ...]

    @staticmethod
    def alike(device: RankDevice, num_ranks: int) -> Devices:
        return Devices(of_ranks=(device,) * num_ranks)

    @staticmethod
    def of_mesh(everyone: Sequence[RankDevice], shape: MeshShape) -> Devices:
        """The devices of a mesh. ``everyone``: in the order of world ranks.

        Raises:
            ConfigError: devices differ inside a TP group or a pipeline, which act together.
        """
        chosen = []
        for hdp in range(shape.hdp):
            members = [(stage * shape.hdp + hdp) * shape.tp + tp for stage in range(shape.pp) for tp in range(shape.tp)]
            first = members[0]
            for other in members[1:]:
                _check_alike(first, everyone[first], other, everyone[other], shape)
            chosen.append(min((everyone[member] for member in members), key=lambda device: device.device_bytes))
        return Devices(of_ranks=tuple(chosen))

    @property
    def host_bytes(self) -> float:
        """What every rank may use of host memory."""
        return min(device.host_bytes for device in self.of_ranks)

    @property
    def device_bytes(self) -> tuple[float, ...]:
        """``[R]`` what each rank may use of its device. Devices of nearly the same size have the least of theirs."""
        own = [device.device_bytes for device in self.of_ranks]
        return tuple(min(other for other in own if _are_alike(other, size)) for size in own)

    @property
    def smallest(self) -> int:
        """The first rank of those with the least memory."""
        return self.device_bytes.index(min(self.device_bytes))

    def speeds(self, reference: str = "") -> tuple[float, ...]:
        """``[R]`` peak rate of each device over that of the device called ``reference``, or of the middle one.

        All are 1 if a rate is not known, or if all are nearly the same.
        """
        rates = [device.flops_per_second for device in self.of_ranks]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates) or _are_alike(min(known), max(known)):
            return (1.0,) * len(rates)
        named = [rate for rate, device in zip(known, self.of_ranks, strict=True) if device.name == reference]
        base = named[0] if named else sorted(known)[len(known) // 2]
        return tuple(rate / base for rate in known)


def _are_alike(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * max(one, other)


def _check_alike(first: int, one: RankDevice, second: int, other: RankDevice, shape: MeshShape) -> None:
    if one.name == other.name and _are_alike(one.device_bytes, other.device_bytes):
        return
    together = "TP group" if shape.pp == 1 or first // shape.tp == second // shape.tp else "pipeline"
    raise ConfigError(
        f"ranks {first} and {second} are in one {together} and have different devices: {one.name} with "
        f"{format_bytes(one.device_bytes)}, and {other.name} with {format_bytes(other.device_bytes)}",
        so="they compute every micro-batch together, so the better one would only wait for the other",
        fix="start ranks in such an order that the devices of a TP group and of a pipeline are the same, or use "
        "tp = 1 and pp = 1, where every rank gets what its device can do",
    )
