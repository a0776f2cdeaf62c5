"""Attention rules for our own models, whose modules know none: a layer's attention callable is given them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bytescale.attention import AttentionRules, PackedAttention
from bytescale.models.llama import Attention


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
