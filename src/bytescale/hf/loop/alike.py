"""Whether ranks have the same weights, in an exchange that they make anyway."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.common.errors import RankFailure
from bytescale.runtime.group import RankGroup
from bytescale.runtime.plain_data import all_gather_json

WEIGHTS_EVERY = 64
"""Batches from one comparison of the ranks' weights to the next."""


def require_alike(group: RankGroup, what: str, value: int, sums: dict[str, int]) -> None:
    """Raise ``RankFailure`` unless all ranks hold the same ``value`` (63 bits) and the same ``sums`` of weights.

    One message, and a second one to name the weights that differ.
    """
    try:
        group.agree(what, value ^ digest_of(sums))
    except RankFailure:
        of_ranks = all_gather_json(sums, group.group, group.device)
        for name in sums:
            told = [own.get(name) for own in of_ranks]
            usual = max(told, key=told.count)
            if others := [rank for rank, own in enumerate(told) if own != usual]:
                raise RankFailure(
                    f"rank {others[0]} of {group.size} has other weights than the others; {name} is the first",
                    so="gradients of two models would be added up",
                    fix="change or load weights on every rank alike, between two batches",
                ) from None
        raise


def digest_of(*content: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(content).encode(), digest_size=8).digest(), "little") >> 1


def weight_sums(model: nn.Module) -> dict[str, int]:
    """By name of each parameter, the sum of its numbers' bits as integers, which is exact in any order.

    Parameters that are sharded already (FSDP) or have no memory yet differ between ranks and are left out.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = {
        name: parameter.detach().contiguous().view(integers[parameter.element_size()]).sum(dtype=torch.int64)
        for name, parameter in model.named_parameters()
        if type(parameter.data) is Tensor and not parameter.is_meta
    }
    return dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)) if sums else {}
