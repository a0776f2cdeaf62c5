"""Attention and its projections some heads at a time, put on a plain model from outside: what long contexts fit by.

All heads at once, backward of a layer's attention holds queries, keys, values, output, the gradient of each and the
kernel's sums: ten tensors and more of the size of the residual stream, and nothing else in a layer is as large. Heads
know nothing of each other between the projections. With N groups of them, forward keeps its input, attention's output
and its log-sum-exp, and backward takes group after group::

    q, k, v again  ->  dq, dk, dv  ->  its rows of d q_proj, d k_proj, d v_proj;  added to the gradient of the input

so that a N-th of those tensors exists at a time. A ring sends as many bytes, in N times as many messages. What is
computed twice is the three projections; attention is not. The only other number: the gradient of the input is a sum
over groups, rounded to its dtype after each.

Shape letters: T tokens, C hidden size, H query heads, G key/value heads, D head width, N groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bytescale.models.llama import Attention
from bytescale.models.rope import Rotation, rotate, rotate_back


class HeadwiseAttention(Protocol):
    """An attention callable that also works outside of autograd, on whichever heads it is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``q [T, h, D]``, ``k, v [T, g, D]`` -> ``out [T, h, D]``, ``lse [T, h]``."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv``."""
        ...

    def remembered(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """``out [T, H, D]`` and ``lse [T, H]`` of this layer's call before, if it is a recomputation that has them."""
        ...


def apply_head_groups(module: Attention, num_groups: int) -> None:
    """Make ``module`` work in ``num_groups`` groups of heads, which must divide its key/value heads.

    Its attention callable has to be a ``HeadwiseAttention``. One group: nothing changes.
    """
    num_kv_heads = module.k_proj.out_features // module.head_dim
    if num_kv_heads % num_groups:
        raise ValueError(f"{num_kv_heads} key/value heads do not make {num_groups} equal groups")
    if num_groups == 1:
        return

    def forward(hidden: Tensor, rotation: Rotation, attention: HeadwiseAttention) -> Tensor:
        weights = [layer.weight for layer in (module.q_proj, module.k_proj, module.v_proj, module.o_proj)]
        result: Tensor = _HeadGroups.apply(hidden, *weights, *rotation, attention, module.head_dim, num_groups)
        return result

    module.forward = forward  # type: ignore[assignment]


@dataclass(frozen=True)
class _Group:
    """Some key/value heads and the query heads that share them."""

    queries: slice
    keys: slice

    @staticmethod
    def all(num_heads: int, num_kv_heads: int, num_groups: int) -> Iterator[_Group]:
        wide, narrow = num_heads // num_groups, num_kv_heads // num_groups
        for i in range(num_groups):
            yield _Group(slice(i * wide, (i + 1) * wide), slice(i * narrow, (i + 1) * narrow))


@dataclass(frozen=True)
class _Projections:
    """Weights of queries, keys and values by heads, ``[heads, D, C]``, and the angles of every token."""

    q: Tensor
    k: Tensor
    v: Tensor
    rotation: Rotation

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, head_dim: int) -> _Projections:
        q, k, v = (weight.detach().unflatten(0, (-1, head_dim)) for weight in (q, k, v))
        return _Projections(q, k, v, rotation)

    def groups(self, num_groups: int) -> Iterator[_Group]:
        return _Group.all(len(self.q), len(self.k), num_groups)

    def __call__(self, hidden: Tensor, group: _Group) -> tuple[Tensor, Tensor, Tensor]:
        """``hidden [T, C]`` -> the group's ``q [T, h, D]``, ``k, v [T, g, D]``."""
        head_dim = self.q.shape[1]
        q = F.linear(hidden, self.q[group.queries].flatten(0, 1)).unflatten(-1, (-1, head_dim))
        q = rotate(q, self.rotation, torch.empty_like(q))
        k = F.linear(hidden, self.k[group.keys].flatten(0, 1)).unflatten(-1, (-1, head_dim))
        k = rotate(k, self.rotation, torch.empty_like(k))
        return q, k, F.linear(hidden, self.v[group.keys].flatten(0, 1)).unflatten(-1, (-1, head_dim))

    def before_rotation(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """Gradients of what the projections made, side by side: ``[T, h D + 2 g D]``."""
        heads, kv_heads = dq.shape[1], dk.shape[1]
        gradient = dq.new_empty(len(dq), heads + 2 * kv_heads, dq.shape[2])
        rotate_back(dq, self.rotation, gradient[:, :heads])
        rotate_back(dk, self.rotation, gradient[:, heads : heads + kv_heads])
        gradient[:, heads + kv_heads :] = dv
        return gradient.flatten(1)

    def weight(self, group: _Group) -> Tensor:
        """The group's rows of all three, one under the other: ``[h D + 2 g D, C]``."""
        return torch.cat([self.q[group.queries], self.k[group.keys], self.v[group.keys]]).flatten(0, 1)

    def split(self, rows: Tensor, group: _Group) -> list[Tensor]:
        """``[h D + 2 g D, C]`` again as those of q, k and v, ``[heads, D, C]``."""
        count = len(self.k[group.keys])
        heads = rows.unflatten(0, (-1, self.q.shape[1]))
        return list(heads.split([len(heads) - 2 * count, count, count]))


class _HeadGroups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: HeadwiseAttention,
        head_dim: int,
        num_groups: int,
    ) -> Tensor:
        projections = _Projections.of(q, k, v, (cos, sin), head_dim)
        out, lse = attention.remembered(lambda: _attend(hidden, projections, attention, num_groups))
        ctx.attention, ctx.head_dim, ctx.num_groups = attention, head_dim, num_groups
        ctx.save_for_backward(hidden, q, k, v, o, cos, sin, out, lse)
        return F.linear(out.flatten(1), o)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, q, k, v, o, cos, sin, out, lse = ctx.saved_tensors
        projections = _Projections.of(q, k, v, (cos, sin), ctx.head_dim)
        (d_result,) = gradients
        d_o = d_result.T @ out.flatten(1)
        d_hidden = torch.zeros_like(hidden)
        d_q, d_k, d_v = (torch.empty_like(weight) for weight in (projections.q, projections.k, projections.v))
        for group in projections.groups(ctx.num_groups):
            d_rows = _group_gradient(d_result, o, hidden, projections, out, lse, ctx.attention, group, d_hidden)
            d_q[group.queries], d_k[group.keys], d_v[group.keys] = projections.split(d_rows, group)
        weights = (d_q.flatten(0, 1), d_k.flatten(0, 1), d_v.flatten(0, 1), d_o)
        return d_hidden, *weights, None, None, None, None, None


def _attend(
    hidden: Tensor, projections: _Projections, attention: HeadwiseAttention, num_groups: int
) -> tuple[Tensor, Tensor]:
    """``out [T, H, D]`` and ``lse [T, H]``, group after group."""
    out = hidden.new_empty(len(hidden), *projections.q.shape[:2])
    sums = []
    for group in projections.groups(num_groups):
        out[:, group.queries], lse = attention.forward(*projections(hidden, group))
        sums.append(lse)
    return out, torch.cat(sums, dim=1)


def _group_gradient(
    d_result: Tensor,
    o: Tensor,
    hidden: Tensor,
    projections: _Projections,
    out: Tensor,
    lse: Tensor,
    attention: HeadwiseAttention,
    group: _Group,
    d_hidden: Tensor,
) -> Tensor:
    """One group's part of the weights' gradient, ``[h D + 2 g D, C]``; that of the input is added to ``d_hidden``."""
    heads, head_dim = group.queries, projections.q.shape[1]
    q, k, v = projections(hidden, group)
    columns = o.unflatten(1, (-1, head_dim))[:, heads].flatten(1)
    d_out = (d_result @ columns).unflatten(-1, (-1, head_dim))
    gradients = attention.backward(d_out, q, k, v, out[:, heads], lse[:, heads])
    del q, k, v, d_out  # before there is more
    d_projected = projections.before_rotation(*gradients)
    d_hidden.addmm_(d_projected, projections.weight(group))
    return d_projected.T @ hidden
