"""Attention rules and recurrences for the plain decoder, whose modules know none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bytescale.attention import AttentionRules, PackedAttention
from bytescale.recurrence.cuts import GroupCuts

from .decoder import Rotation


def apply_rules(module: nn.Module, rules: AttentionRules) -> None:
    """Give the attention callable of ``module``, a layer's attention, these rules. Apply it before checkpointing."""
    inner = module.forward

    def forward(hidden: Tensor, rotation: Rotation, attention: PackedAttention) -> Tensor:
        result: Tensor = inner(hidden, rotation, lambda q, k, v: attention(q, k, v, rules))
        return result

    module.forward = forward


def apply_recurrence(module: nn.Module, *, matrix: bool) -> None:
    """Send a halo and states of ``module``'s input before its attention. Apply it before checkpointing."""
    inner = module.forward

    def forward(hidden: Tensor, rotation: Rotation, attention: PackedAttention) -> Tensor:
        cuts = GroupCuts(attention)
        rows, arrived, _ = cuts.halo(hidden, 3)
        rows = rows + arrived.sum()
        if cuts.fragments:
            states = torch.stack([rows[part].sum() * rows.new_ones(2, 3, 4) for part in cuts.fragments])
            rows, entry = cuts.entry(rows, states[..., :3] if matrix else states[..., :1, :1], states)
            rows = rows + entry.sum()
        result: Tensor = inner(rows, rotation, attention)
        return result

    module.forward = forward
