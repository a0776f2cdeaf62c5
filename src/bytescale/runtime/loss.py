"""Cross-entropy computed from hidden states, chunk by chunk: the logits of all tokens never exist together.

Gradients are computed in the same pass as the loss, while the logits of a chunk exist (paper section 7). The loss is a
sum: the caller divides by the number of targets in the GLOBAL batch.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bytescale.attention.autocast import in_autocast, without_autocast
from bytescale.attention.copies import to_device
from bytescale.attention.kernels import lse_dtype
from bytescale.common.labels import IGNORE_INDEX
from bytescale.cost.memory.device_kernels import HEAD_NUMBERS_PER_CHUNK, loss_chunk_tokens

if TYPE_CHECKING:
    from bytescale.runtime.loss_kernel import TritonRows

AT_ONCE = "is_differentiated_at_once"
"""An attribute of a head whose gradients are computed in forward (``Head.add_loss``), when no backward runs."""


class Head(Protocol):
    """From hidden states to the losses of a chunk (``PlainHead``, or ``hf.model.head.ModelHead``)."""

    @property
    def num_words(self) -> int:
        """V, of this rank, by which chunks are sized."""
        ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Tensor-parallel ranks that hold one V-word shard each, in rank order; None: this rank has all words."""
        ...

    def parameters(self) -> Sequence[Tensor]:
        """What is trained of it."""
        ...

    def add_loss(
        self, rows: Tensor, targets: Tensor, factor: Tensor | None, z_loss: float, sums: Sequence[Tensor | None] | None
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of ``rows [n, C]``, and its gradient ``[n, C]``. Those of ``parameters`` are added to ``sums``.

        ``factor``: ``[n]`` in the dtype of sums, or None. ``sums``: None where no gradient is needed at all.
        """
        ...

    def losses(self, rows: Tensor, labels: Tensor) -> Tensor:
        """``[n]`` ``-log softmax(logits)[label]`` of ``rows [n, C]``, in fp32 or wider; 0 where there is no target."""
        ...


@dataclass(frozen=True)
class PlainHead:
    """Logits are ``hidden @ weight.T`` and nothing else."""

    weight: Tensor
    """``[V, C]``."""
    group: dist.ProcessGroup | None = None
    arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context in which logits are computed (``hf.model.invariant``)."""

    @property
    def num_words(self) -> int:
        return len(self.weight)

    def parameters(self) -> Sequence[Tensor]:
        return [self.weight]

    def add_loss(
        self, rows: Tensor, targets: Tensor, factor: Tensor | None, z_loss: float, sums: Sequence[Tensor | None] | None
    ) -> tuple[Tensor, Tensor | None]:
        kernel, logits, targets, lse, target_logits = self._statistics(rows, targets)
        losses = lse - target_logits + z_loss * lse.square()
        loss = (losses if factor is None else losses * factor).sum()
        if sums is None:
            return loss, None
        logits = kernel.gradient(logits, targets, lse, z_loss)
        if factor is not None:
            logits.mul_(factor[:, None])
        logits = logits.to(rows.dtype)
        if sums[0] is not None:
            _add_product(sums[0], logits, rows)
        return loss, logits @ self.weight

    def losses(self, rows: Tensor, labels: Tensor) -> Tensor:
        """As ``Head``. No gradient flows."""
        *_, lse, target_logits = self._statistics(rows, labels)
        return (lse - target_logits).where(labels != IGNORE_INDEX, 0).to(lse_dtype(rows.dtype))

    def _statistics(
        self, rows: Tensor, labels: Tensor
    ) -> tuple[TorchRows | TritonRows, Tensor, Tensor, Tensor, Tensor]:
        """The kernel, logits ``[n, V]``, targets as places among this rank's words, LSEs, and the targets' logits."""
        kernel: TorchRows | TritonRows
        with self.arithmetic():
            logits = rows @ self.weight.T
        if rows.device.type == "cuda" and rows.dtype == torch.bfloat16:
            from bytescale.runtime.loss_kernel import TritonRows

            kernel = TritonRows()
        else:
            kernel, logits = TorchRows(), logits.to(lse_dtype(rows.dtype))
        targets = labels if self.group is None else labels - self.group.rank() * self.num_words
        return kernel, logits, targets, *_over_group(*kernel.statistics(logits, targets), self.group)


def loss_sum(
    head: Head, hidden: Tensor, labels: Tensor, *, z_loss: float = 0.0, token_weights: Tensor | None = None
) -> Tensor:
    """Sum over tokens of ``-log softmax(logits)[label]``, plus ``z_loss * lse^2``.

    Backward may run only once: it scales the gradients that forward computed, in place. The gradient of a plain head's
    weight is accumulated immediately (``accumulated_at_once``).

    Args:
        head: of the model.
        hidden: ``[T, C]``.
        labels: ``[T]`` int64 in ``[0, V)``, or ``IGNORE_INDEX`` for tokens without a target. In CPU memory they are
            selected without waiting for a GPU, whatever the device of ``hidden``.
        z_loss: weight of the squared log-sum-exp, which keeps logits from drifting (PaLM: 1e-4).
        token_weights: ``[T]``, where the labels are: what each token's summand is multiplied with. None: all are 1.
            A token of weight 0 is left out, so that a loss that is no number reaches nothing.

    Returns:
        Scalar in fp32 (fp64 for fp64 inputs), the same on every rank of the head's group, to which ``hidden`` and
        ``labels`` are common. Zero, with zero gradients, when no token has a target.
    """
    if not isinstance(head, PlainHead):
        return _sum(head, hidden, labels, z_loss, token_weights)
    hidden, weight = (in_autocast(rows) for rows in accumulated_at_once(hidden, head.weight))
    with without_autocast(hidden.device):
        return _sum(replace(head, weight=weight), hidden, labels, z_loss, token_weights)


@torch.no_grad()
def token_losses(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    """``[T]`` losses of all tokens, 0 without a target, in fp32 or wider. No gradient flows."""
    chunk_rows = loss_chunk_tokens(head.num_words, hidden.device.type)
    parts = zip(hidden.split(chunk_rows), to_device(labels, hidden.device).split(chunk_rows), strict=True)
    return torch.cat([head.losses(rows, own) for rows, own in parts])


def accumulated_at_once(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Identity. In backward, the head's gradient is accumulated immediately, not when the tied embedding finishes.

    Otherwise the gradient ``[V, C]`` of a tied weight would be held until backward reaches the embedding. A weight
    without a gradient (a frozen head) passes unchanged, and so does one that is trained alone.
    """
    if not weight.requires_grad or not hidden.requires_grad:
        return hidden, weight
    result: tuple[Tensor, Tensor] = _AccumulatedAtOnce.apply(hidden, weight.detach(), weight.backward)
    return result


class TorchRows:
    """The operations on a chunk of logits, in fp32 or wider; targets outside ``[0, V)`` are words of other ranks.

    Exponentials, the most expensive part on a CPU, are computed once: ``statistics`` leaves ``exp(logit - largest)`` in
    the memory of the logits, and ``gradient``, which may follow, only scales these numbers.
    """

    def __init__(self) -> None:
        self._largest: Tensor | None = None  # [n, 1]

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """LSE ``[n]`` of each row of ``logits [n, V]``, and the target's logit ``[n]`` (0 if another rank has it)."""
        here = (targets >= 0) & (targets < logits.shape[1])
        picked = logits.gather(1, targets.where(here, 0)[:, None]).squeeze(1)
        self._largest = logits.amax(dim=1, keepdim=True)
        lse = logits.sub_(self._largest).exp_().sum(dim=1).log_() + self._largest.squeeze(1)
        return lse, picked.where(here, 0)

    def gradient(self, logits: Tensor, targets: Tensor, lse: Tensor, z_loss: float) -> Tensor:
        """``softmax * (1 + 2 z lse) - one_hot``, ``[n, V]``, in the memory of ``logits``."""
        assert self._largest is not None, "gradient() comes after statistics()"
        probabilities = logits.mul_((self._largest - lse[:, None]).exp_() * (1 + 2 * z_loss * lse[:, None]))
        here = (targets >= 0) & (targets < logits.shape[1])
        return probabilities.scatter_add_(1, targets.where(here, 0)[:, None], -here.to(logits.dtype)[:, None])


def _sum(head: Head, hidden: Tensor, labels: Tensor, z_loss: float, token_weights: Tensor | None) -> Tensor:
    result: Tensor = _LossSum.apply(hidden, labels, token_weights, head, z_loss, *head.parameters())
    return result


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, token_weights: Tensor | None, head: Head, z_loss: float,
        *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        wide = lse_dtype(hidden.dtype)
        loss = hidden.new_zeros((), dtype=wide)
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        sums = [
            torch.zeros_like(value, dtype=wide) if needed else None
            for value, needed in zip(parameters, ctx.needs_input_grad[5:], strict=True)
        ]
        needed = sums if any(ctx.needs_input_grad) else None
        for chosen, targets, factor in _chunks(head, labels, token_weights, hidden.device, wide):
            part, d_rows = head.add_loss(hidden[chosen], targets, factor, z_loss, needed)
            loss += part
            if d_hidden is not None and d_rows is not None:
                d_hidden[chosen] = d_rows
            del d_rows
        if head.group is not None and d_hidden is not None:
            dist.all_reduce(d_hidden, group=head.group)
        ctx.dtypes = [value.dtype for value in parameters]
        ctx.gradients = [d_hidden, *sums]
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the loss of a head: a second backward, but the first has used its gradients up")
        totals, ctx.gradients = ctx.gradients, None
        d_hidden, *sums = [None if total is None else total.mul_(gradients[0].to(total.dtype)) for total in totals]
        pairs = zip(sums, ctx.dtypes, strict=True)
        converted = (None if total is None else _converted(total, dtype) for total, dtype in pairs)
        return d_hidden, None, None, None, None, *converted


def _chunks(
    head: Head, labels: Tensor, token_weights: Tensor | None, device: torch.device, wide: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Places of the tokens that have a target and a weight, their targets and weights, a chunk at a time."""
    is_counted = labels != IGNORE_INDEX
    if token_weights is not None:
        is_counted &= token_weights.to(labels.device) != 0
    with_target = is_counted.nonzero().squeeze(1)
    # One copy to the device serves all chunks.
    on_device = to_device(torch.stack([with_target, labels[with_target]]), device)
    factors = None
    if token_weights is not None:
        factors = to_device(token_weights.to(labels.device)[with_target].to(wide), device)
    size = loss_chunk_tokens(head.num_words, device.type)
    for start in range(0, on_device.shape[1], size):
        chosen, targets = on_device[:, start : start + size]
        yield chosen, targets, None if factors is None else factors[start : start + size]


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
