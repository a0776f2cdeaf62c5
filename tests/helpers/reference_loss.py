"""The loss of a plain head, and its slow twin: all logits at once, PyTorch's own cross-entropy."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bytescale.runtime.loss import IGNORE_INDEX, PlainHead, _sum


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    z_loss: float = 0.0,
    group: dist.ProcessGroup | None = None,
    token_weights: Tensor | None = None,
) -> Tensor:
    """``loss_sum`` of a plain head ``weight [V, C]``, of the dtype of ``hidden [T, C]``; its gradient is returned."""
    return _sum(PlainHead(weight, group), hidden, labels, z_loss, token_weights)


def reference_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0, token_weights: Tensor | None = None
) -> Tensor:
    """Arguments and result as those of ``linear_cross_entropy``."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = (hidden @ weight.T).to(wide)
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    losses = losses + z_loss * logits.logsumexp(dim=1).where(labels != IGNORE_INDEX, 0).square()
    return (losses if token_weights is None else losses * token_weights.to(wide)).sum()
