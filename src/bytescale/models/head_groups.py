"""Attention and its projections, a group of heads at a time, so that longer contexts fit. Applied from outside.

Between the projections, heads are independent. With N groups of heads, forward keeps its input, attention's output and
its log-sum-exp, and backward processes one group after another::

    q, k, v again  ->  dq, dk, dv  ->  its rows of d q_proj, d k_proj, d v_proj;  added to the gradient of the input

So an N-th of those tensors exists at a time. A ring sends the same bytes in N times as many messages, and the three
projections are computed twice. The gradient of the input is rounded to its dtype after each group.

Shape letters: T tokens, C hidden size, H query heads, G key/value heads, D head width, N groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bytescale.attention import PackedAttention
from bytescale.models.llama import Attention
from bytescale.models.rope import Rotate, Rotation, rotate_back


def apply_head_groups(module: Attention, num_groups: int) -> None:
    """Make ``module`` process its heads in ``num_groups`` groups. This must divide the number of its key/value heads.

    With one group nothing changes. Raises ``ValueError`` if the heads cannot be divided.
    """
    num_kv_heads = module.k_proj.out_features // module.head_dim
    if num_kv_heads % num_groups:
        raise ValueError(f"{num_kv_heads} key/value heads do not make {num_groups} equal groups")
    if num_groups == 1:
        return

    def forward(hidden: Tensor, rotation: Rotation, attention: PackedAttention) -> Tensor:
        weights = [layer.weight for layer in (module.q_proj, module.k_proj, module.v_proj, module.o_proj)]
        result: Tensor = _HeadGroups.apply(module, attention, num_groups, hidden, *weights, *rotation)
        return result

    forward.rows_at_once = 0  # type: ignore[attr-defined]  # tensor parallelism gathers them all before
    module.forward = forward  # type: ignore[assignment]


Group = tuple[slice, slice]
"""The query heads and the key/value heads of a group."""


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

    def groups(self, num_groups: int) -> Iterator[Group]:
        wide, narrow = len(self.q) // num_groups, len(self.k) // num_groups
        for i in range(num_groups):
            yield slice(i * wide, (i + 1) * wide), slice(i * narrow, (i + 1) * narrow)

    def forward(self, hidden: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        """``hidden [T, C]`` -> the group's ``q [T, h, D]``, ``k, v [T, g, D]``."""
        q, k = _heads(hidden, self.q[group[0]]), _heads(hidden, self.k[group[1]])
        q, k = (self.rotate(heads, self.rotation, torch.empty_like(heads)) for heads in (q, k))
        return q, k, _heads(hidden, self.v[group[1]])

    def backward(
        self, gradients: tuple[Tensor, Tensor, Tensor], hidden: Tensor, group: Group, d_hidden: Tensor
    ) -> list[Tensor]:
        """The gradients of the group's weights, ``[heads, D, C]``, from ``dq, dk, dv``. Adds to ``d_hidden``."""
        counts = [heads.shape[1] for heads in gradients]
        together = gradients[0].new_empty(len(hidden), sum(counts), gradients[0].shape[2])
        d_q, d_k, d_v = together.split(counts, dim=1)
        rotate_back(gradients[0], self.rotation, d_q, self.rotate)
        rotate_back(gradients[1], self.rotation, d_k, self.rotate)
        d_v.copy_(gradients[2])
        # One matrix product for q, k and v together: so the sum in d_hidden is rounded once per group.
        weights = torch.cat([self.q[group[0]], self.k[group[1]], self.v[group[1]]])
        d_hidden.addmm_(together.flatten(1), weights.flatten(0, 1))
        return list((together.flatten(1).T @ hidden).view_as(weights).split(counts))


class _HeadGroups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, module: Attention, attention: PackedAttention, num_groups: int, hidden: Tensor, *rest: Tensor
    ) -> Tensor:
        """``rest``: the four weights, and the rotation."""
        projections = _Projections.of(rest[:4], (rest[4], rest[5]), module)

        def attend() -> tuple[Tensor, Tensor]:
            out, sums = hidden.new_empty(len(hidden), *projections.q.shape[:2]), []
            for group in projections.groups(num_groups):
                out[:, group[0]], lse = attention.forward(*projections.forward(hidden, group))
                sums.append(lse)
            return out, torch.cat(sums, dim=1)

        out, lse = attention.remembered(attend)
        ctx.given = module, attention, num_groups
        ctx.save_for_backward(hidden, *rest, out, lse)
        return F.linear(out.flatten(1), rest[3])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        module: Attention = ctx.given[0]
        attention: PackedAttention = ctx.given[1]
        hidden, *weights, cos, sin, out, lse = ctx.saved_tensors
        projections = _Projections.of(weights, (cos, sin), module)
        (d_result,) = gradients

        def attend_back(group: Group) -> tuple[Tensor, Tensor, Tensor]:
            heads, columns = group[0], projections.o[:, group[0]]
            d_out = (d_result @ columns.flatten(1)).unflatten(-1, columns.shape[1:])
            return attention.backward(d_out, *projections.forward(hidden, group), out[:, heads], lse[:, heads])

        d_o, d_hidden = d_result.T @ out.flatten(1), torch.zeros_like(hidden)
        d_q, d_k, d_v = (torch.empty_like(weight) for weight in (projections.q, projections.k, projections.v))
        for group in projections.groups(ctx.given[2]):
            # One expression, so that no variable keeps a group's tensors alive while the next group's are made.
            d_q[group[0]], d_k[group[1]], d_v[group[1]] = projections.backward(
                attend_back(group), hidden, group, d_hidden
            )
        d_weights = (*(gradient.flatten(0, 1) for gradient in (d_q, d_k, d_v)), d_o)
        return None, None, None, d_hidden, *d_weights, None, None


def _heads(hidden: Tensor, weight: Tensor) -> Tensor:
    """``hidden [T, C]`` by ``weight [h, D, C]`` -> ``[T, h, D]``."""
    return F.linear(hidden, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
