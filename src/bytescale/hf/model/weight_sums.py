"""A fingerprint of a model's weights, with which ranks find out whether they have the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def weight_sums(model: nn.Module) -> list[int]:
    """Per parameter, the sum of its numbers' bits as integers, which is exact in any order.

    Parameters that are sharded already (FSDP) or have no memory yet differ between ranks and are left out.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        parameter.detach().contiguous().view(integers[parameter.element_size()]).sum(dtype=torch.int64)
        for parameter in model.parameters()
        if type(parameter.data) is Tensor and not parameter.is_meta
    ]
    return torch.stack(sums).tolist() if sums else []
