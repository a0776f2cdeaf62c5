"""What one layer's attention does differently from plain causal attention: scale, sliding window, soft cap.

For a query at position ``p`` of its sequence and a key at position ``j``, with ``s = scale * (q . k)``:

* soft cap: ``s`` becomes ``soft_cap * tanh(s / soft_cap)`` (Gemma 2);
* mask: the query sees the keys ``p - window < j <= p``, or ``j <= p`` without a window (Mistral, Gemma, gpt-oss);
* softmax over what is left. With sinks, every query head has a learned logit that joins the sum of its softmax and has
  no value, so that the weights of the keys sum to less than one (gpt-oss).

The order is that of transformers' eager attention: scale, cap, mask, sink.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from bytescale.common.errors import ConfigError


@dataclass(frozen=True)
class AttentionRules:
    """The rules of one call of attention, hence of one layer. The defaults are those of plain causal attention.

    Raises ``ConfigError`` for values that no attention has.

    Attributes:
        scale: factor of ``q . k``; None: ``D ** -0.5`` with the keys' width D.
        window: how many keys a query sees, its own included: those at ``p - window + 1 .. p``. That is transformers'
            ``sliding_window`` (flash attention's ``window_size`` is one less). None: all keys up to its own.
        soft_cap: bound of the scores' absolute value, transformers' ``attn_logit_softcapping``. None: no bound.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not math.isfinite(self.scale):
            raise _impossible("scale", self.scale, "every output would be NaN", "a finite number")
        if self.window is not None and (isinstance(self.window, bool) or not isinstance(self.window, int)):
            raise _impossible("window", self.window, "a window is a number of keys", "an int")
        if self.window is not None and self.window < 1:
            raise _impossible("window", self.window, "a query would see no key, not even its own", "None or at least 1")
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap > 0):
            raise _impossible("soft_cap", self.soft_cap, "scores cannot be bounded by it", "None or a positive number")

    def scale_of(self, q: Tensor) -> float:
        """The factor of ``q . k`` for queries ``[..., D]``."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


PLAIN = AttentionRules()
"""Causal attention as it is without any rule."""


def _impossible(name: str, value: float, so: str, fix: str) -> ConfigError:
    return ConfigError(f"attention rule {name} = {value!r}", so=so, fix=f"set {name} to {fix}")
