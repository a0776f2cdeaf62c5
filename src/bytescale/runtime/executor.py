"""Runs one rank's part of a plan: forward and backward of its micro-batches, in order, with no barrier between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bytescale.attention import AttentionKernel, PackedAttention
from bytescale.plan import RankPlan
from bytescale.runtime.activations import Activations
from bytescale.runtime.auxiliary import begin_batch_loss, finish_batch_loss
from bytescale.runtime.hdp import HdpGroup
from bytescale.runtime.loss import IGNORE_INDEX, linear_cross_entropy


class TrainableModel(Protocol):
    """What the runtime asks of a model: hidden states from packed tokens, and the weight that makes logits of them."""

    @property
    def head_weight(self) -> Tensor:
        """``[V, C]``."""
        ...

    def __call__(self, tokens: Tensor, position_ids: Tensor, attention: PackedAttention) -> Tensor:
        """``tokens, position_ids [T]`` int64 -> ``[T, C]``."""
        ...


class MicroBatchTokens(Protocol):
    """One micro-batch's tokens in the layout of ``plan.MicroBatch``: int64 ``[T]``, NumPy arrays or tensors."""

    @property
    def tokens(self) -> NDArray[np.int64] | Tensor: ...
    @property
    def labels(self) -> NDArray[np.int64] | Tensor: ...
    @property
    def position_ids(self) -> NDArray[np.int64] | Tensor: ...


@dataclass(frozen=True)
class StepResult:
    """Sums over this rank's tokens."""

    loss_sum: float  # sum of the tokens' cross-entropies, in nats
    num_targets: int
    batch_loss: float = 0.0  # of the whole global batch, in the gradients but not in loss_sum (runtime.auxiliary)


def run_rank_plan(
    model: TrainableModel,
    rank_plan: RankPlan,
    micro_batches: Sequence[MicroBatchTokens],
    *,
    num_global_targets: int,
    kernel: AttentionKernel,
    hdp: HdpGroup,
    activations: Activations | None = None,
) -> StepResult:
    """Accumulate the gradient of ``sum of losses / num_global_targets`` over this rank's tokens (paper Eq. 1-2).

    Args:
        micro_batches: the tokens of each of the plan's micro-batches. A label of ``IGNORE_INDEX`` has no loss.
        num_global_targets: tokens with a target in the whole global batch, over all ranks.
        activations: checkpointing and offloading of the model's layers; None: autograd keeps everything.

    A rank without micro-batches runs nothing; one whose slice holds no target, or no token at all, still takes its
    part in the ring.
    """
    losses: list[Tensor] = []
    num_targets = 0
    activations = activations or Activations([])
    activations.begin_step(rank_plan.micro_batches)
    begin_batch_loss(model)
    for micro_batch, data in zip(rank_plan.micro_batches, micro_batches, strict=True):
        tokens, labels, position_ids = (
            torch.as_tensor(array).to(hdp.device, non_blocking=True)
            for array in (data.tokens, data.labels, data.position_ids)
        )
        attention = PackedAttention(micro_batch, kernel, hdp.exchange, activations.attention_memory)
        with activations.forward(micro_batch.index):
            hidden = model(tokens, position_ids, attention)
            loss_sum = linear_cross_entropy(hidden, model.head_weight, labels)
        with activations.backward(micro_batch.index):
            (loss_sum / num_global_targets).backward()
        losses.append(loss_sum.detach())
        num_targets += int((torch.as_tensor(data.labels) != IGNORE_INDEX).sum())
    return StepResult(
        loss_sum=float(torch.stack(losses).double().sum()) if losses else 0.0,
        num_targets=num_targets,
        batch_loss=finish_batch_loss(model, hdp),
    )
