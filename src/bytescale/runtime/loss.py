"""Cross-entropy computed from hidden states, chunk by chunk: the logits of all tokens never exist together.

Gradients are computed in the same pass as the loss, while the logits of a chunk exist (paper section 7 keeps logits in
BF16 and computes in FP32; here logits exist for one chunk at a time). The loss is a sum, not a mean: the caller divides
by the number of targets in the GLOBAL batch, which no rank can know from its own tokens.

With the vocabulary sharded over a tensor-parallel group, each rank holds the logits of its own V words. The group
all-reduces three numbers per token: the largest of the ranks' log-sum-exps (LSEs), the sum of their exponentials, and
the logit of the target, which exactly one rank has. The gradient of the hidden states is summed over the group once, at
the end.

Memory in addition to the inputs, with n tokens a chunk: n V logits; the gradient of the hidden states ``[T, C]``; and
that of the weight ``[V, C]``, which is summed over chunks in fp32, because a hundred chunks summed in BF16 would keep 8
bits of 15.

Shape letters: T tokens, C hidden size, V vocabulary (of this rank), n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bytescale.attention.copies import to_device
from bytescale.common.labels import IGNORE_INDEX
from bytescale.cost.memory import HEAD_NUMBERS_PER_CHUNK, loss_chunk_tokens


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    z_loss: float = 0.0,
    group: dist.ProcessGroup | None = None,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Sum over tokens of ``-log softmax(hidden @ weight.T)[label]``, plus ``z_loss * lse^2``.

    Backward may run only once: it scales the gradients that forward computed, in place.

    Args:
        hidden: ``[T, C]``; weight: ``[V, C]``, same dtype.
        labels: ``[T]`` int64 in ``[0, V)``, or ``IGNORE_INDEX`` for tokens without a target. They are in CPU memory,
            whatever the device of ``hidden``: the tokens with a target are selected there, without waiting for a GPU.
        z_loss: weight of the squared log-sum-exp, which keeps logits from drifting (PaLM: 1e-4).
        group: tensor-parallel ranks that hold one V-word shard each, in rank order; hidden states and labels (of the
            whole vocabulary) are the same on all of them. None: this rank has all words.
        token_weights: ``[T]``, in CPU memory: what each token's summand is multiplied with. None: all are 1.

    Returns:
        Scalar in fp32 (fp64 for fp64 inputs), the same on every rank of ``group``. Zero, with zero gradients, when no
        token has a target.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, z_loss, group, token_weights)


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """``[T]`` ``-log softmax(hidden @ weight.T)[label]`` of every token, 0 without a target; for evaluation alone.

    Arguments, chunks and the dtype of the result are those of ``linear_cross_entropy``. No gradient flows.
    """
    with torch.no_grad():
        wide, rows = _wide(hidden.dtype), _row_kernel(hidden)
        losses = hidden.new_zeros(len(hidden), dtype=wide)
        first_word = 0 if group is None else group.rank() * weight.shape[0]
        with_target = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        on_device = to_device(torch.stack([with_target, labels[with_target] - first_word]), hidden.device)
        for part in on_device.split(loss_chunk_tokens(weight.shape[0], hidden.device.type), dim=1):
            chosen, targets = part
            logits = hidden[chosen] @ weight.T
            if isinstance(rows, TorchRows):
                logits = logits.to(wide)
            lse, target_logits = _over_group(*rows.statistics(logits, targets), group)
            losses[chosen] = (lse - target_logits).to(wide)
            del logits
        return losses


def accumulated_at_once(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Identity. In backward, the head's gradient is accumulated immediately, not when the tied embedding finishes.

    Autograd accumulates a parameter's gradient only once all uses of the parameter have computed theirs. If the head's
    weight is also the embedding, its gradient ``[V, C]`` would be held until backward reaches the other end of the
    model. A weight without a gradient (a frozen head) passes unchanged.
    """
    if not weight.requires_grad:
        return hidden, weight
    result: tuple[Tensor, Tensor] = _AccumulatedAtOnce.apply(hidden, weight.detach(), weight.backward)
    return result


def reference_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0, token_weights: Tensor | None = None
) -> Tensor:
    """The slow twin: all logits at once, PyTorch's own loss."""
    wide = _wide(hidden.dtype)
    logits = (hidden @ weight.T).to(wide)
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    losses = losses + z_loss * logits.logsumexp(dim=1).where(labels != IGNORE_INDEX, 0).square()
    return (losses if token_weights is None else losses * token_weights.to(wide)).sum()


class RowKernel(Protocol):
    """The operations on a chunk of logits: first ``statistics`` and then, if a gradient is needed, ``gradient``.

    Both may overwrite the logits. Targets outside ``[0, V)`` are words of other ranks.
    """

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """LSE ``[n]`` of each row of ``logits [n, V]``, and the target's logit ``[n]`` (0 if another rank has it)."""
        ...

    def gradient(self, logits: Tensor, targets: Tensor, lse: Tensor, z_loss: float) -> Tensor:
        """``softmax * (1 + 2 z lse) - one_hot``, ``[n, V]``, in the memory of ``logits``."""
        ...


class TorchRows:
    """Plain PyTorch; logits in fp32 or wider. One instance serves one chunk at a time.

    Exponentials, the most expensive part on a CPU, are computed once: ``statistics`` leaves ``exp(logit - largest)`` in
    the memory of the logits, and ``gradient`` only scales these numbers.
    """

    def __init__(self) -> None:
        self._largest: Tensor | None = None  # [n, 1]

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        here = (targets >= 0) & (targets < logits.shape[1])
        picked = logits.gather(1, targets.where(here, 0)[:, None]).squeeze(1)
        self._largest = logits.amax(dim=1, keepdim=True)
        lse = logits.sub_(self._largest).exp_().sum(dim=1).log_() + self._largest.squeeze(1)
        return lse, picked.where(here, 0)

    def gradient(self, logits: Tensor, targets: Tensor, lse: Tensor, z_loss: float) -> Tensor:
        assert self._largest is not None, "gradient() comes after statistics()"
        probabilities = logits.mul_((self._largest - lse[:, None]).exp_() * (1 + 2 * z_loss * lse[:, None]))
        here = (targets >= 0) & (targets < logits.shape[1])
        return probabilities.scatter_add_(1, targets.where(here, 0)[:, None], -here.to(logits.dtype)[:, None])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        z_loss: float,
        group: dist.ProcessGroup | None,
        token_weights: Tensor | None,
    ) -> Tensor:
        wide = _wide(hidden.dtype)
        rows = _row_kernel(hidden)
        loss = hidden.new_zeros((), dtype=wide)
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        first_word = 0 if group is None else group.rank() * weight.shape[0]
        with_target = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        chunk_tokens = loss_chunk_tokens(weight.shape[0], hidden.device.type)
        # One copy to the device serves all chunks: the rows that have a target, and their targets.
        on_device = to_device(torch.stack([with_target, labels[with_target] - first_word]), hidden.device)
        factors = None if token_weights is None else to_device(token_weights[with_target].to(wide), hidden.device)
        for start in range(0, on_device.shape[1], chunk_tokens):
            chosen, targets = on_device[:, start : start + chunk_tokens]
            factor = None if factors is None else factors[start : start + chunk_tokens]
            chunk = hidden[chosen]
            logits = chunk @ weight.T
            if isinstance(rows, TorchRows):
                logits = logits.to(wide)
            lse, target_logits = _over_group(*rows.statistics(logits, targets), group)
            losses = lse - target_logits + z_loss * lse.square()
            loss += (losses if factor is None else losses * factor).sum()
            if d_hidden is not None or d_weight is not None:
                logits = rows.gradient(logits, targets, lse, z_loss)
                if factor is not None:
                    logits.mul_(factor[:, None])
                logits = logits.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[chosen] = logits @ weight
            if d_weight is not None:
                _add_product(d_weight, logits, chunk)
            del logits  # freed before the next chunk's logits are made; otherwise both would exist
        if group is not None and d_hidden is not None:
            dist.all_reduce(d_hidden, group=group)
        ctx.weight_dtype = weight.dtype
        ctx.gradients = d_hidden, d_weight
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        (scale,) = gradients
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy: a second backward, but the first has used its gradients up")
        d_hidden, d_weight = ctx.gradients
        ctx.gradients = None
        if d_hidden is not None:
            d_hidden.mul_(scale.to(d_hidden.dtype))
        if d_weight is not None:
            d_weight = _converted(d_weight.mul_(scale), ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None, None


class _AccumulatedAtOnce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, values: Tensor, accumulate: Callable[[Tensor], None]
    ) -> tuple[Tensor, Tensor]:
        ctx.accumulate = accumulate
        return hidden.view_as(hidden), values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        d_hidden, d_weight = gradients
        ctx.accumulate(d_weight)
        return d_hidden, None, None


def _over_group(lse: Tensor, target_logits: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """LSE ``[n]`` over the words of all ranks, and the target's logit ``[n]`` from the rank that has it."""
    if group is None:
        return lse, target_logits
    largest = lse.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(lse - largest).exp(), target_logits])
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1]


def _add_product(total: Tensor, d_logits: Tensor, chunk: Tensor) -> None:
    """``total [V, C] += d_logits.T [V, n] @ chunk [n, C]``; if the dtypes differ, a few words at a time."""
    if total.dtype == chunk.dtype:
        total.addmm_(d_logits.T, chunk)
        return
    words = max(1, HEAD_NUMBERS_PER_CHUNK[total.device.type] // total.shape[1])
    for part, columns in zip(total.split(words), d_logits.split(words, dim=1), strict=True):
        part += columns.T @ chunk


def _converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``values`` in place to a dtype that is not wider, so that no second ``[V, C]`` is allocated."""
    if values.dtype == dtype:
        return values
    source = values.view(-1)
    result = source.view(dtype)[: len(source)]
    size = HEAD_NUMBERS_PER_CHUNK[values.device.type]
    for part, place in zip(source.split(size), result.split(size), strict=True):
        # ``to`` copies first: ``place`` overlaps this part, or earlier parts, which have been converted already.
        place.copy_(part.to(dtype))
    return result.view_as(values)


def _row_kernel(hidden: Tensor) -> RowKernel:
    if hidden.device.type == "cuda" and hidden.dtype == torch.bfloat16:
        from bytescale.runtime.loss_kernel import TritonRows

        return TritonRows()
    return TorchRows()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
