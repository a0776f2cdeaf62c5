"""The slow twin of the loss: all logits at once, PyTorch's own cross-entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bytescale.runtime import IGNORE_INDEX


def reference_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0, token_weights: Tensor | None = None
) -> Tensor:
    """Arguments and result as those of ``bytescale.runtime.linear_cross_entropy``."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = (hidden @ weight.T).to(wide)
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    losses = losses + z_loss * logits.logsumexp(dim=1).where(labels != IGNORE_INDEX, 0).square()
    return (losses if token_weights is None else losses * token_weights.to(wide)).sum()
