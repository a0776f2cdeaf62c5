"""The counts of a model, from its parameters and from what the probe has seen of its attention."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from bytescale.attention import AttentionRules
from bytescale.config.architecture import Architecture
from bytescale.cost import flops
from bytescale.cost.spec import ModelSpec
from bytescale.hf.model.head import embeddings_of
from bytescale.hf.model.probe import LayerAttention, ModelStructure, expert_numbers

_STATE_FLOPS = 6
"""Operations of a recurrence for each number of its state and token: a decay, a write and a read."""


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Of every mixture, the module that has all experts, in stacked weights without adapters."""
    named = model.named_modules()  # with adapters (peft), a module around it computes
    return [own for name, own in named if hasattr(own, "_is_expert_parallel") and not name.endswith("base_layer")]


def spec_of(model: nn.Module, structure: ModelStructure) -> ModelSpec:
    """Count any model. All ranks get the same without a measurement.

    In a layer with a sliding window every query sees a bounded number of keys (``Profile.windows``). Its ring traffic
    is bounded too and is left out.
    """
    count, pairs, keys = len(structure.layers) + len(structure.mixers), 0, 0
    of_windows: dict[int, int] = {}
    for layer in structure.layers:
        widths = layer.head_dim + layer.value_dim
        pairs += layer.num_heads * widths
        if layer.rules.window is None:
            keys += layer.num_kv_heads * widths
        else:
            of_windows[layer.rules.window] = of_windows.get(layer.rules.window, 0) + layer.num_heads * widths
    matrices, trained, head, head_trained = _matrix_parameters(model)
    recurrences = _STATE_FLOPS / 2 * sum(mixer.state_numbers for mixer in structure.mixers)
    stack = _equal_layers(model, structure, (matrices - head) / count)
    mixtures = experts_of(model)
    of_experts = sum(parameter.numel() for module in mixtures for parameter in module.parameters())
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    total = sum(size for size, _ in sizes)
    vocabulary = flops.head_parameters(stack) * (1 if stack.tie_embeddings else 2)
    return ModelSpec(
        stack=stack,
        kind=str(getattr(getattr(model, "config", None), "model_type", "")),
        pair_numbers=pairs / count,
        key_numbers=keys / count,
        parameters=max(0, total - vocabulary) // count,
        active=(matrices - head + recurrences) / count,
        trained=(trained - head_trained + recurrences) / count,
        experts=of_experts // count,
        expert_rows=len(mixtures) * (getattr(getattr(model, "config", None), "num_experts_per_tok", 0) or 0) / count,
        head=head,
        head_trained=head_trained,
        total=total,
        total_trained=sum(size for size, is_trained in sizes if is_trained),
        recurrent_share=len(structure.mixers) / count,
        state_numbers=sum(2.0 * (one.state_numbers + one.decay_numbers) for one in structure.mixers) / count,
        windows=tuple((window, part / pairs) for window, part in sorted(of_windows.items())),
    )


def _equal_layers(model: nn.Module, structure: ModelStructure, active_per_layer: float) -> Architecture:
    """A Llama of as many layers, words and heads, whose layer has as many weights that a token is multiplied with."""
    embedding, head = embeddings_of(model)
    # Of a model without attention:
    plain = LayerAttention(name="", num_heads=1, num_kv_heads=1, head_dim=2, value_dim=2, rules=AttentionRules())
    widest: LayerAttention = max(structure.layers, key=lambda layer: layer.num_heads * layer.head_dim, default=plain)
    words, hidden = embedding.weight.shape
    stack = Architecture(
        vocab_size=words,
        num_layers=len(structure.layers) + len(structure.mixers),
        hidden_size=hidden,
        num_heads=widest.num_heads,
        num_kv_heads=widest.num_kv_heads,
        head_dim=(widest.head_dim + widest.value_dim) // 2,
        ffn_hidden_size=1,
        tie_embeddings=head is None or head.weight is embedding.weight,
    )
    rest = active_per_layer - flops.attention_parameters(stack)
    return replace(stack, ffn_hidden_size=max(1, round(rest / (3 * hidden))))


def _matrix_parameters(model: nn.Module) -> tuple[float, float, int, int]:
    """Weights that one token is multiplied with, how many of them are trained, and both of the output projection alone.

    An embedding is only looked up. Of a mixture of experts, the share that a token is sent through counts.
    """
    embedding, head = (getattr(module, "weight", None) for module in embeddings_of(model))
    share = _active_share(model)
    matrices = trained = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or (parameter is embedding and parameter is not head):
            continue
        count = parameter.numel() * (share if ".experts." in f".{name}." else 1.0)
        matrices += count
        trained += count if parameter.requires_grad else 0.0
    of_head = 0 if head is None else head.numel()
    return matrices, trained, of_head, of_head if head is not None and head.requires_grad else 0


def weights_of(model: nn.Module, layer: nn.Module) -> float:
    """Weights of one layer that a token is multiplied with."""
    share = _active_share(model)
    own = layer.named_parameters()
    return sum(p.numel() * (share if ".experts." in f".{name}." else 1.0) for name, p in own if p.dim() > 1)


def _active_share(model: nn.Module) -> float:
    """The share of a layer's experts that a token is sent through; 1 without experts."""
    chosen, experts = expert_numbers(model)
    return chosen[0] / experts[0] if chosen and experts else 1.0
