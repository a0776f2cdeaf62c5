"""Rotary positions whose angles depend on the longest position of a pass: dynamic NTK and longrope.

transformers computes these angles anew in every pass, from the largest number in ``position_ids``. A document's tokens
would then be rotated differently depending on what lies beside them in a micro-batch. So the choice has to be made
once, for all documents; it holds outside of plans too.
"""

from __future__ import annotations

import torch
from torch import nn

from bytescale.attach.refusal import refusal

_DEPENDING = ("dynamic", "longrope")


def fix_rope(model: nn.Module, longest_document: int | None) -> None:
    """Make the angles those of a document of ``longest_document`` tokens, in every pass.

    Raises ``Refusal`` (a ``ConfigError``) where ``longest_document`` is None and angles depend on the pass.
    """
    for name, module in model.named_modules():
        kinds = _kinds(module)
        if not kinds:
            continue
        if longest_document is None:
            raise refusal(
                name,
                f"its rotary positions ({', '.join(sorted(set(kinds.values())))}) depend on the longest one of a pass",
                so="a document's tokens would be rotated differently, depending on what lies beside them",
                fix="give HDP(longest_document=...), for whose number of tokens the rotation is then fixed, or load "
                "the model with other rope_parameters",
            )
        device = next(model.parameters()).device
        last = torch.tensor([[longest_document - 1]], device=device)
        for kind in kinds:
            options = {} if kind is None else {"layer_type": kind}
            module(torch.zeros(1, 1, 1, device=device), last, **options)  # computes the angles and keeps them
        rope_type = module.rope_type
        fixed = dict.fromkeys(rope_type, "default") if isinstance(rope_type, dict) else "default"
        module.rope_type = fixed


def _kinds(module: nn.Module) -> dict[str | None, str]:
    """Of a module with rotary positions, the kinds that depend on the pass, by type of layer (None: all layers)."""
    rope_type = getattr(module, "rope_type", None)
    types = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    return {
        layer: kind
        for layer, kind in types.items()
        if isinstance(kind, str) and any(word in kind for word in _DEPENDING)
    }
