"""What a model costs, counted from its parameters and from what the probe has seen of its attention.

The planner needs the ratio of attention to the rest, and the order of magnitude of links against compute
(``cost.assumed``). Both follow from counts, so that all ranks get the same numbers without a measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from bytescale.attach.head import causal_model
from bytescale.attach.probe import ModelFacts
from bytescale.common.arrays import IntArray
from bytescale.config import Architecture, RingGradients
from bytescale.cost import CostModel, Profile, flops
from bytescale.cost.assumed import ASSUMED, ASSUMED_MICRO_BATCH_SECONDS, Rates
from bytescale.cost.curve import Curve


def count_costs(model: nn.Module, facts: ModelFacts, *, device_type: str, bytes_per_element: int) -> CostModel:
    """The cost model of any attached model on an assumed device."""
    kind = "cuda" if device_type == "cuda" else "cpu"
    cost = counted_profile(model, facts, ASSUMED[kind], bytes_per_element=bytes_per_element).cost_model()
    return replace(cost, micro_batch_seconds=ASSUMED_MICRO_BATCH_SECONDS[kind])


def counted_profile(
    model: nn.Module,
    facts: ModelFacts,
    rates: Rates,
    *,
    bytes_per_element: int,
    ring_gradients: RingGradients = "wide",
    kept_bytes_per_token: float = 0.0,
) -> Profile:
    """The costs of any attached model by counted operations. Its layers are taken to be equal to their mean.

    In a layer with a sliding window every query sees a bounded number of keys (``Profile.windows``). Its ring traffic
    is bounded too and is left out. ``kept_bytes_per_token``: what all layers keep for backward.
    """
    layers, gradient_bytes = facts.layers, flops.ring_gradient_bytes(bytes_per_element, ring_gradients)
    per_square = keys = 0.0
    of_windows: dict[int, float] = {}
    for layer in layers:
        widths = layer.head_dim + layer.value_dim
        per_square += layer.num_heads * widths
        if layer.rules.window is None:
            keys += layer.num_kv_heads * widths
        else:
            of_windows[layer.rules.window] = of_windows.get(layer.rules.window, 0.0) + layer.num_heads * widths
    matrices, trained = active_matrix_parameters(model)
    head, head_trained = _head_parameters(model)
    count, fixed = len(layers), rates.launch_seconds
    attention = per_square / count / rates.attention_flops_per_second
    per_weight = 2.0 / rates.flops_per_second
    forward, backward = matrices - head, matrices - head + trained - head_trained
    stack = _equal_layers(model, facts, (matrices - head) / count)
    vocabulary = flops.head_parameters(stack) * (1 if stack.tie_embeddings else 2)
    return Profile(
        name="flops",
        architecture=stack,
        source=f"counted operations at {rates.flops_per_second:.3g} FLOP/s a device",
        attention_forward=Curve(attention, 0.0, fixed),
        attention_backward=Curve(flops.BACKWARD_ATTENTION_RATIO * attention, 0.0, fixed),
        rest_forward=Curve(0.0, forward / count * per_weight, fixed),
        rest_backward=Curve(0.0, backward / count * per_weight, fixed),
        head_forward=Curve(0.0, head * per_weight, 0.0),
        head_backward=Curve(0.0, (head + head_trained) * per_weight, 0.0),
        activation_bytes=Curve(0.0, kept_bytes_per_token / count, 0.0),
        ring_forward_bytes_per_token=keys / count * bytes_per_element,
        ring_backward_bytes_per_token=keys / count * (bytes_per_element + gradient_bytes),
        links=rates.links,
        layer_parameters=max(0, sum(p.numel() for p in model.parameters()) - vocabulary) // count,
        parameter_bytes=bytes_per_element,
        windows=tuple((window, part / per_square) for window, part in sorted(of_windows.items())),
        rings_only=True,
    )


def _equal_layers(model: nn.Module, facts: ModelFacts, active_per_layer: float) -> Architecture:
    """A Llama of as many layers, words and heads, whose layer has as many weights that a token is multiplied with."""
    get_input, get_output = _embeddings_of(model)
    embedding, head = get_input(), get_output()
    widest = max(facts.layers, key=lambda layer: layer.num_heads * layer.head_dim)
    words, hidden = embedding.weight.shape
    stack = Architecture(
        vocab_size=words,
        num_layers=len(facts.layers),
        hidden_size=hidden,
        num_heads=widest.num_heads,
        num_kv_heads=widest.num_kv_heads,
        head_dim=(widest.head_dim + widest.value_dim) // 2,
        ffn_hidden_size=1,
        tie_embeddings=head is None or head.weight is embedding.weight,
    )
    rest = active_per_layer - flops.attention_parameters(stack)
    return replace(stack, ffn_hidden_size=max(1, round(rest / (3 * hidden))))


def _embeddings_of(model: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The model's functions that return its embedding and its head."""
    root = causal_model(model)
    get_input, get_output = (getattr(root, f"get_{kind}_embeddings", lambda: None) for kind in ("input", "output"))
    return get_input, get_output


def _head_parameters(model: nn.Module) -> tuple[int, int]:
    """Weights of the output projection, and how many of them are trained."""
    weight = getattr(_embeddings_of(model)[1](), "weight", None)
    count = 0 if weight is None else weight.numel()
    return count, count if weight is not None and weight.requires_grad else 0


def training_flops(model: nn.Module, facts: ModelFacts, lengths: IntArray) -> int:
    """Operations of forward and backward over documents of ``lengths [S]``, as ``cost.flops.training_flops`` counts.

    Three times forward; all weights of the model are trained.
    """
    lengths = lengths.astype(np.int64)
    matrices, _ = active_matrix_parameters(model)
    forward = 2.0 * matrices * float(lengths.sum())
    for layer in facts.layers:
        reached = lengths if layer.rules.window is None else np.minimum(lengths, layer.rules.window)
        pairs = float((reached * (2 * lengths - reached)).sum()) / 2
        forward += 2.0 * layer.num_heads * (layer.head_dim + layer.value_dim) * pairs
    return int(3 * forward)


def active_matrix_parameters(model: nn.Module) -> tuple[float, float]:
    """Weights that one token is multiplied with, and how many of them are trained. An embedding is only looked up.

    Of a mixture of experts, the share that a token is sent through counts.
    """
    get_input, get_output = _embeddings_of(model)
    looked_up = {id(module.weight) for module in [get_input()] if module is not None and hasattr(module, "weight")}
    head = get_output()
    multiplied = {id(head.weight)} if head is not None and hasattr(head, "weight") else set()
    share = _active_share(model)
    matrices = trained = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or (id(parameter) in looked_up and id(parameter) not in multiplied):
            continue
        count = parameter.numel() * (share if ".experts." in f".{name}." else 1.0)
        matrices += count
        trained += count if parameter.requires_grad else 0.0
    return matrices, trained


def _active_share(model: nn.Module) -> float:
    """The share of a layer's experts that a token is sent through; 1 without experts."""
    config = getattr(model, "config", None)
    chosen = [getattr(config, name, None) for name in ("num_experts_per_tok", "moe_topk", "moe_k")]
    experts = [getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    pairs = [(a, b) for a in chosen for b in experts if isinstance(a, int) and isinstance(b, int) and b > 0]
    return pairs[0][0] / pairs[0][1] if pairs else 1.0
