"""Does an indexer choose on our keys what it chooses alone? Layers are tried on one document, with few chosen keys."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.attention.earlier import EarlierRows
from bytescale.hf.model.blind import Blind, alike, few_keys, run_blind
from bytescale.hf.model.head import cache_name
from bytescale.hf.model.interface import KEYWORD, Call, refusal, while_set
from bytescale.hf.model.passes import documents_alone
from bytescale.hf.model.probe import LayerAttention
from bytescale.hf.model.selectors import LowestFirst, attend_to_chosen

_ROWS = 23
_CHOSEN = 3


class _OneDocument(Blind):
    """A pass whose rows are one document on this rank."""

    def __init__(self, names: dict[nn.Module, str], layers: Sequence[LayerAttention], like: Tensor) -> None:
        super().__init__(names)
        self._layers = {layer.name: layer for layer in layers}
        self.earlier = EarlierRows(documents_alone([_ROWS], like)[1])

    def select(self, indexer: Any) -> Tensor:
        window = self._layers[self.names[indexer.cache.layer]].rules.window
        return indexer.choose(self.earlier, indexer.keys().flatten(0, -2), window)

    def attend(self, call: Call) -> Tensor:
        rules, latents = self._layers[self.names[call.module]].rules, self.layer_rows[call.module].latents
        q, k, v = (rows[0].transpose(0, 1) for rows in (call.query, call.key, call.value))
        return attend_to_chosen(call, (q, k, v), rules.scale_of(q), latents, self.earlier)[None]


def require_same_choice(model: nn.Module, layers: Sequence[LayerAttention]) -> None:
    """Every layer with an indexer has to give for one document what it gives alone; of few chosen keys.

    Raises ``ConfigError`` for a layer that differs.
    """
    weight = next(model.parameters())
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    mask = torch.ones(_ROWS, _ROWS, dtype=torch.bool, device=weight.device).tril()
    hidden = torch.full_like(mask, torch.finfo(weight.dtype).min, dtype=weight.dtype)
    target = _OneDocument(names, layers, weight)
    with_indexer = [layer for layer in layers if layer.selection is not None and layer.selection.index_width]
    windows = {layer.name: layer.rules.window for layer in with_indexer}

    def compare(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if KEYWORD not in kwargs or kwargs[KEYWORD] is target:
            return  # it is one of the two passes below
        window = windows[names[layer]]
        visible = hidden.masked_fill(mask if window is None else mask.triu(1 - window), 0)
        plain = {name: value for name, value in kwargs.items() if name not in (KEYWORD, cache_name(layer))}
        with LowestFirst():
            alone = layer(*args, **plain | {"attention_mask": visible[None, None]})[0]
        ours = layer(*args, **plain | {"attention_mask": None, KEYWORD: target})[0]
        if not alike(alone, ours):
            raise refusal(
                f"{names[layer]} ({type(layer).__name__})",
                f"on keys of its whole document, it differs by {float((alone - ours).abs().max()):.1e}",
                so="its results would depend on the plan",
                fix="use a model type whose indexer chooses by topk among the keys that its cache returns",
            )

    tokens = torch.randint(2, 50, (_ROWS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), while_set(model.modules(), "training", False), ExitStack() as after:
        after.callback(few_keys.reset, few_keys.set(_CHOSEN))
        for one in (one for one, name in names.items() if name in windows):
            after.enter_context(one.register_forward_pre_hook(compare, with_kwargs=True, prepend=True))
        run_blind(model, Blind(names), torch.arange(_ROWS), tokens)
