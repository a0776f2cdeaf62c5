"""Rotary positions whose angles depend on the longest position of a pass, and positions that end.

For dynamic NTK and longrope, transformers computes angles anew in every pass, from the largest of ``position_ids``,
which depends on what lies in a micro-batch. So the choice has to be made once, for all documents; it holds outside of
plans too. Learned positions (GPT-2, OPT) are a table, and a document cannot be longer than it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bytescale.common.errors import DataError
from bytescale.hf.model.head import causal_model
from bytescale.hf.model.interface import refusal

_FIXED = "bytescale_longest_document"
"""Attribute of a module whose angles were fixed: for how many tokens."""
_TOWER = re.compile("vis(ion|ual)|audio|image")
_TABLE = re.compile(r"(^|\.)(wpe|embed_positions|pos\w*_(emb|enc)\w*)(\.weights?)?$")


def fix_rope(model: nn.Module, longest_document: int | None) -> list[tuple[nn.Module, object]]:
    """Make the angles those of a document of ``longest_document`` tokens, in every pass.

    Returns what ``unfix_rope`` takes. Raises ``ConfigError`` where ``longest_document`` is None and angles depend on
    the pass, or where they were fixed for another number of tokens.
    """
    fixed_here = list[tuple[nn.Module, object]]()
    for name, module in model.named_modules():
        fixed_before = getattr(module, _FIXED, longest_document)
        if longest_document not in (None, fixed_before):
            raise refusal(
                name,
                f"an earlier HDP has fixed its rotary positions for documents of {fixed_before} tokens",
                so=f"those of {longest_document} tokens would be rotated as if they were of {fixed_before}",
                fix=f"give HDP(longest_document={fixed_before}), or load the model again",
            )
        kinds = _kinds(module)
        if not kinds:
            continue
        if longest_document is None:
            raise refusal(
                name,
                f"its rotary positions ({', '.join(sorted(set(kinds.values())))}) depend on the longest one of a pass",
                so="a document's tokens would be rotated differently, depending on what lies beside them",
                fix="give HDP(longest_document=...): every document, also a short one, is then rotated as one of so "
                "many tokens is; or load the model with other rope_parameters",
            )
        device = next(model.parameters()).device
        last = torch.tensor([[longest_document - 1]], device=device)
        for kind in kinds:
            options = {} if kind is None else {"layer_type": kind}
            module(torch.zeros(1, 1, 1, device=device), last, **options)  # computes the angles and keeps them
        before = module.rope_type
        fixed_here.append((module, before))
        module.rope_type = dict.fromkeys(before, "default") if isinstance(before, dict) else "default"
        setattr(module, _FIXED, longest_document)
    return fixed_here


def longest_document_of(model: nn.Module) -> int | None:
    """Tokens that a document may have: rows of the decoder's table of positions, or those that angles were fixed for.

    None: any number. The model need not have memory.
    """
    root = causal_model(model)
    decoder = root.get_decoder() if hasattr(root, "get_decoder") else root
    limits = [getattr(module, _FIXED) for module in model.modules() if hasattr(module, _FIXED)]
    for name, table in (*decoder.named_parameters(), *decoder.named_buffers()):
        if _TABLE.search(name) and not _TOWER.search(name) and table.dim() == 2 and table.is_floating_point():
            owner = decoder.get_submodule(name.rpartition(".")[0])
            limits.append(len(table) - getattr(owner, "offset", 0))  # OPT's first rows are for padding
    return min(limits, default=None)


def require_short_enough(lengths: Sequence[int], limit: int | None) -> None:
    """Raise ``DataError`` for a document of more than ``limit`` tokens (``longest_document_of``)."""
    for number, length in enumerate(lengths):
        if limit is not None and length > limit:
            raise DataError(
                f"document {number} has {length} tokens; the model has positions for {limit}",
                so="its last tokens would have none, or be rotated by other angles than alone",
                fix=f"split or truncate documents to {limit} tokens, or give HDP a larger longest_document where the "
                "model's angles depend on it",
            )


def unfix_rope(fixed: list[tuple[nn.Module, object]]) -> None:
    """Let the angles depend on the pass again, in modules that one call of ``fix_rope`` has changed."""
    for module, rope_type in fixed:
        module.rope_type = rope_type  # type: ignore[assignment]
        delattr(module, _FIXED)


def depends_on_pass(model: nn.Module) -> bool:
    """Whether some angles depend on the longest position of a pass."""
    return any(_kinds(module) for module in model.modules())


def _kinds(module: nn.Module) -> dict[str | None, str]:
    """Of a module with rotary positions, the kinds that depend on the pass, by type of layer (None: all layers)."""
    rope_type = getattr(module, "rope_type", None)
    types: dict[str | None, Any] = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    return {layer: kind for layer, kind in types.items() if "dynamic" in str(kind) or "longrope" in str(kind)}
