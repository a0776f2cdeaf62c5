"""Attention and its projections, a group of heads at a time, so that longer contexts fit. Applied from outside.

With all heads at once, backward of a layer's attention holds queries, keys, values, output, the gradient of each and
the kernel's sums. These are more than ten tensors of the size of the residual stream, and nothing else in a layer is as
large. Between the projections, heads are independent. With N groups of heads, forward keeps its input, attention's
output and its log-sum-exp, and backward processes one group after another::

    q, k, v again  ->  dq, dk, dv  ->  its rows of d q_proj, d k_proj, d v_proj;  added to the gradient of the input

So an N-th of those tensors exists at a time. A ring sends the same bytes in N times as many messages. The three
projections are computed twice; attention is not. Only one result differs: the gradient of the input is a sum over
groups that is rounded to its dtype after each group.

Shape letters: T tokens, C hidden size, H query heads, G key/value heads, D head width, N groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bytescale.models.llama import Attention
from bytescale.models.rope import Rotate, Rotation, rotate_back


class HeadwiseAttention(Protocol):
    """An attention callable that also works outside of autograd, on any subset of the heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``q [T, h, D]``, ``k, v [T, g, D]`` -> ``out [T, h, D]``, ``lse [T, h]``."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv``."""
        ...

    def remembered(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """``out [T, H, D]`` and ``lse [T, H]``, kept from the forward if this is a recomputation, else computed."""
        ...


def apply_head_groups(module: Attention, num_groups: int) -> None:
    """Make ``module`` process its heads in ``num_groups`` groups. This must divide the number of its key/value heads.

    The attention callable has to be a ``HeadwiseAttention``. With one group nothing changes. Raises ``ValueError`` if
    the heads cannot be divided.
    """
    num_kv_heads = module.k_proj.out_features // module.head_dim
    if num_kv_heads % num_groups:
        raise ValueError(f"{num_kv_heads} key/value heads do not make {num_groups} equal groups")
    if num_groups == 1:
        return

    def forward(hidden: Tensor, rotation: Rotation, attention: HeadwiseAttention) -> Tensor:
        weights = [layer.weight for layer in (module.q_proj, module.k_proj, module.v_proj, module.o_proj)]
        result: Tensor = _HeadGroups.apply(_Settings(module, attention, num_groups), hidden, *weights, *rotation)
        return result

    forward.rows_at_once = 0  # type: ignore[attr-defined]  # tensor parallelism gathers them all before
    module.forward = forward  # type: ignore[assignment]


@dataclass(frozen=True)
class _Settings:
    """What forward and backward of a block need besides tensors."""

    module: Attention
    attention: HeadwiseAttention
    num_groups: int


@dataclass(frozen=True)
class _Group:
    """Some key/value heads and the query heads that share them."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class _Projections:
    """The weights by head, ``q [H, D, C]``, ``k, v [G, D, C]``, ``o [C, H, D]``, and the angles of every token."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    rotation: Rotation
    rotate: Rotate

    @staticmethod
    def of(weights: Sequence[Tensor], rotation: Rotation, module: Attention) -> _Projections:
        q, k, v = (weight.detach().unflatten(0, (-1, module.head_dim)) for weight in weights[:3])
        o = weights[3].detach().unflatten(1, (-1, module.head_dim))
        return _Projections(q, k, v, o, rotation, module.rotate)

    def groups(self, num_groups: int) -> Iterator[_Group]:
        wide, narrow = len(self.q) // num_groups, len(self.k) // num_groups
        for i in range(num_groups):
            yield _Group(slice(i * wide, (i + 1) * wide), slice(i * narrow, (i + 1) * narrow))

    def forward(self, hidden: Tensor, group: _Group) -> tuple[Tensor, Tensor, Tensor]:
        """``hidden [T, C]`` -> the group's ``q [T, h, D]``, ``k, v [T, g, D]``."""
        q, k = _heads(hidden, self.q[group.queries]), _heads(hidden, self.k[group.keys])
        q, k = (self.rotate(heads, self.rotation, torch.empty_like(heads)) for heads in (q, k))
        return q, k, _heads(hidden, self.v[group.keys])

    def backward(
        self, gradients: tuple[Tensor, Tensor, Tensor], hidden: Tensor, group: _Group, d_hidden: Tensor
    ) -> list[Tensor]:
        """Returns the gradients of the group's weights, ``[heads, D, C]``, from ``dq, dk, dv``.

        Adds the gradient of ``hidden`` to ``d_hidden``.
        """
        counts = [heads.shape[1] for heads in gradients]
        together = gradients[0].new_empty(len(hidden), sum(counts), gradients[0].shape[2])
        d_q, d_k, d_v = together.split(counts, dim=1)
        rotate_back(gradients[0], self.rotation, d_q, self.rotate)
        rotate_back(gradients[1], self.rotation, d_k, self.rotate)
        d_v.copy_(gradients[2])
        # One matrix product for q, k and v together: so the sum in d_hidden is rounded once per group.
        weights = torch.cat([self.q[group.queries], self.k[group.keys], self.v[group.keys]])
        d_hidden.addmm_(together.flatten(1), weights.flatten(0, 1))
        return list((together.flatten(1).T @ hidden).view_as(weights).split(counts))


class _HeadGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: _Settings, hidden: Tensor, *weights_and_rotation: Tensor) -> Tensor:
        *weights, cos, sin = weights_and_rotation
        projections = _Projections.of(weights, (cos, sin), settings.module)
        out, lse = settings.attention.remembered(
            lambda: _attend(hidden, projections, settings.attention, settings.num_groups)
        )
        ctx.settings = settings
        ctx.save_for_backward(hidden, *weights_and_rotation, out, lse)
        return F.linear(out.flatten(1), weights[3])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        hidden, *weights, cos, sin, out, lse = ctx.saved_tensors
        projections = _Projections.of(weights, (cos, sin), settings.module)
        (d_result,) = gradients
        d_o = d_result.T @ out.flatten(1)
        d_hidden = torch.zeros_like(hidden)
        d_q, d_k, d_v = (torch.empty_like(weight) for weight in (projections.q, projections.k, projections.v))
        for group in projections.groups(settings.num_groups):
            # One expression, so that no variable keeps a group's tensors alive while the next group's are made.
            d_q[group.queries], d_k[group.keys], d_v[group.keys] = projections.backward(
                _attend_back(d_result, hidden, projections, out, lse, settings.attention, group),
                hidden,
                group,
                d_hidden,
            )
        d_weights = (*(gradient.flatten(0, 1) for gradient in (d_q, d_k, d_v)), d_o)
        return None, d_hidden, *d_weights, None, None


def _attend(
    hidden: Tensor, projections: _Projections, attention: HeadwiseAttention, num_groups: int
) -> tuple[Tensor, Tensor]:
    """``out [T, H, D]`` and ``lse [T, H]``, group after group."""
    out = hidden.new_empty(len(hidden), *projections.q.shape[:2])
    sums = []
    for group in projections.groups(num_groups):
        out[:, group.queries], lse = attention.forward(*projections.forward(hidden, group))
        sums.append(lse)
    return out, torch.cat(sums, dim=1)


def _attend_back(
    d_result: Tensor,
    hidden: Tensor,
    projections: _Projections,
    out: Tensor,
    lse: Tensor,
    attention: HeadwiseAttention,
    group: _Group,
) -> tuple[Tensor, Tensor, Tensor]:
    """One group's ``dq, dk, dv``, from the gradient ``[T, C]`` of the block's output."""
    heads = group.queries
    columns = projections.o[:, heads]
    d_out = (d_result @ columns.flatten(1)).unflatten(-1, columns.shape[1:])
    return attention.backward(d_out, *projections.forward(hidden, group), out[:, heads], lse[:, heads])


def _heads(hidden: Tensor, weight: Tensor) -> Tensor:
    """``hidden [T, C]`` by ``weight [h, D, C]`` -> ``[T, h, D]``."""
    return F.linear(hidden, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
