"""The counts of a model, from its parameters and from what the probe has seen of its attention."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from bytescale.cost.model import BACKWARD_ATTENTION_RATIO
from bytescale.cost.spec import LayerSpec, ModelSpec, counted
from bytescale.hf.model.head import embeddings_of
from bytescale.hf.model.probe import LayerAttention, ModelStructure, expert_numbers

_STATE_FLOPS = 6
"""Operations of a recurrence for each number of its state and token: a decay, a write and a read."""


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Of every mixture, the module that has all experts, in stacked weights without adapters."""
    named = model.named_modules()  # with adapters (peft), a module around it computes
    return [own for name, own in named if hasattr(own, "_is_expert_parallel") and not name.endswith("base_layer")]


def layers_of(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """All modules of the numbered lists that attentions and recurrences lie in, those without any included.

    ``names``: of the attentions and recurrences. One that lies in no list stands for itself.
    """
    modules = {name or type(module).__name__: module for name, module in model.named_modules()}
    found: dict[nn.Module, None] = {}
    for name in filter({*names}.__contains__, modules):
        match = re.match(r"(.*?)\.\d+(\.|$)", name)
        found |= dict.fromkeys(modules[match[1]].children() if match else [modules[name]])
    return list(found)


def spec_of(model: nn.Module, structure: ModelStructure, *, stage: str | None = None) -> ModelSpec:
    """Count any model, layer by layer. All ranks get the same without a measurement. ``stage``: of ``indexer_loss``.

    In a layer with a sliding window every query sees a bounded number of keys (``ModelSpec.windows``). Its ring traffic
    is bounded too and is left out. Where keys are chosen, all earlier tokens' rows travel, and few are attended to.
    Matrices outside of the layers are left out, but for the output projection.
    """
    modules = {name or type(module).__name__: module for name, module in model.named_modules()}
    embedding, head = (getattr(module, "weight", None) for module in embeddings_of(model))
    mixtures, counted_before, layers = experts_of(model), set[int](), list[LayerSpec]()
    some, of = expert_numbers(model)
    share = some[0] / of[0] if some and of else 1.0  # of a layer's experts that a token is sent through
    config = getattr(model, "config", None)
    for layer in layers_of(model, structure.names):
        inside, own = set(layer.modules()), {id(p): p for p in layer.parameters()}
        calls = [call for call in structure.layers if modules[call.name] in inside]
        ringed = [call for call in calls if call.rules.window is None]
        pairs = [_pairs(call, stage) for call in calls]
        mixers = [mixer for mixer in structure.mixers if modules[mixer.name] in inside]
        experts = [module for module in mixtures if module in inside]
        active = [
            (parameter.numel() * (share if ".experts." in f".{name}." else 1.0), parameter.requires_grad)
            for name, parameter in layer.named_parameters()
            if parameter.dim() > 1
        ]
        active.append((_STATE_FLOPS / 2 * sum(mixer.state_numbers for mixer in mixers), True))
        layers.append(
            LayerSpec(
                parameters=sum(p.numel() for key, p in own.items() if key not in counted_before),
                active_weights=sum(number for number, _ in active),
                trained_weights=sum(number for number, is_trained in active if is_trained),
                expert_weights=sum(parameter.numel() for module in experts for parameter in module.parameters()),
                expert_rows=float(len(experts) * (getattr(config, "num_experts_per_tok", 0) or 0)),
                pair_numbers=sum(numbers for numbers, _, _ in pairs),
                chosen_numbers=sum(numbers for _, numbers, _ in pairs),
                num_chosen=max((most for _, _, most in pairs), default=0),
                window=max((call.rules.window or 0 for call in calls), default=0) if not ringed else 0,
                num_heads=sum(call.num_heads for call in ringed),
                key_numbers=float(sum(_travelling(call, stage) for call in ringed)),
                mixers=len(mixers),
                state_numbers=sum(2.0 * (mixer.state_numbers + mixer.decay_numbers) for mixer in mixers),
            )
        )
        counted_before |= own.keys()
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    assert embedding is not None, "a decoder has an embedding"
    total, is_tied = sum(size for size, _ in sizes), head is None or head is embedding
    of_head = 0 if head is None else head.numel()
    return ModelSpec(
        layers=counted(layers),
        kind=str(getattr(config, "model_type", "")),
        vocab_size=embedding.shape[0],
        hidden_size=embedding.shape[1],
        outside=max(0, total - sum(layer.parameters for layer in layers) - (0 if is_tied else of_head)),
        head=of_head,
        head_trained=of_head if head is not None and head.requires_grad else 0,
        is_tied=is_tied,
        total=total,
        total_trained=sum(size for size, is_trained in sizes if is_trained),
    )


def _pairs(call: LayerAttention, stage: str | None) -> tuple[float, float, int]:
    """Numbers that a pair of query and key is multiplied with, those that chosen keys alone meet, and the most keys."""
    own, of_all = call.selection, float(call.num_heads * (call.head_dim + call.value_dim))
    if own is None:
        return of_all, 0.0, 0
    forward = 1 / (1 + BACKWARD_ATTENTION_RATIO)  # of what counts for both
    indexer = forward * own.index_flops / 2
    if stage == "dense":  # attention has no backward, and its scores are computed again from latents
        return forward * (of_all + bool(own.index_width) * own.pair_numbers / 2) + 3 * indexer, 0.0, 0
    indexer *= 1 if stage is None else 4  # scores again in backward, and the gradients of both factors
    return own.pair_numbers + indexer, float(own.pair_numbers), own.num_keys


def _travelling(call: LayerAttention, stage: str | None) -> int:
    """Numbers of a token that ranks with later tokens of its document need."""
    own, of_all = call.selection, call.num_kv_heads * (call.head_dim + call.value_dim)
    chosen = 0 if own is None else own.index_width + own.row_width
    return chosen + of_all if own is None or stage == "dense" else chosen
