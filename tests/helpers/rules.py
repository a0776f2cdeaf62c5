"""Attention rules and recurrences for our own models, whose modules know none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bytescale.attention import AttentionRules, PackedAttention
from bytescale.models.llama import Attention
from bytescale.recurrence.cuts import GroupCuts


@dataclass(frozen=True)
class Ruled:
    """``PackedAttention`` whose every call has the same rules; also on some heads at a time, outside of autograd."""

    attention: PackedAttention
    rules: AttentionRules

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, self.rules)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention.forward(q, k, v, self.rules)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.backward(dout, q, k, v, out, lse, self.rules)

    def remembered(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return self.attention.remembered(compute)


def apply_rules(module: Attention, rules: AttentionRules) -> None:
    """Give ``module``'s attention callable these rules. Apply it after head groups and before checkpointing."""
    inner = module.forward

    def forward(hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: PackedAttention) -> Tensor:
        return inner(hidden, rotation, Ruled(attention, rules))  # type: ignore[arg-type]

    module.forward = forward  # type: ignore[assignment,method-assign]


def apply_recurrence(module: Attention, *, matrix: bool) -> None:
    """Send a halo and states of ``module``'s input before its attention. Apply it before checkpointing."""
    inner = module.forward

    def forward(hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: PackedAttention) -> Tensor:
        cuts = GroupCuts(attention)
        rows, arrived, _ = cuts.halo(hidden, 3)
        rows = rows + arrived.sum()
        if cuts.fragments:
            states = torch.stack([rows[part].sum() * rows.new_ones(2, 3, 4) for part in cuts.fragments])
            rows, entry = cuts.entry(rows, states[..., :3] if matrix else states[..., :1, :1], states)
            rows = rows + entry.sum()
        return inner(rows, rotation, attention)

    module.forward = forward  # type: ignore[assignment,method-assign]
