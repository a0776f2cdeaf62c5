"""What a model costs, counted from its parameters and from what the probe has seen of its attention.

The planner needs the ratio of attention to the rest, and the order of magnitude of links against compute
(``cost.assumed``). Both follow from counts, so that all ranks get the same numbers without a measurement.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from bytescale.attach.probe import ModelFacts
from bytescale.common.arrays import IntArray
from bytescale.cost import CostModel, flops
from bytescale.cost.assumed import ASSUMED


def count_costs(model: nn.Module, facts: ModelFacts, *, device_type: str, bytes_per_element: int) -> CostModel:
    """The cost model of any attached model on an assumed device.

    In a layer with a sliding window every query sees a bounded number of keys (``CostModel.windows``). Its ring traffic
    is bounded too and is left out.
    """
    assumed = ASSUMED["cuda" if device_type == "cuda" else "cpu"]
    per_square = ring_bytes = 0.0
    of_windows: dict[int, float] = {}
    gradient_bytes = max(4, bytes_per_element)
    for layer in facts.layers:
        widths = layer.head_dim + layer.value_dim
        per_square += layer.num_heads * widths
        if layer.rules.window is not None:
            of_windows[layer.rules.window] = of_windows.get(layer.rules.window, 0.0) + layer.num_heads * widths
        else:
            ring_bytes += layer.num_kv_heads * widths * (2 * bytes_per_element + gradient_bytes)
    matrices, trained = active_matrix_parameters(model)
    attention_ratio = 1 + flops.BACKWARD_ATTENTION_RATIO
    linear_flops = 2.0 * (2 * matrices + trained)  # forward, gradients of inputs, gradients of trained weights
    return CostModel(
        attention_seconds_per_pair=attention_ratio * per_square / assumed.flops_per_second,
        token_seconds=linear_flops / assumed.flops_per_second,
        micro_batch_seconds=assumed.micro_batch_seconds,
        ring_bytes_per_token=ring_bytes,
        ring_step_seconds=2 * len(facts.layers) * assumed.message_seconds,
        intra_node_bytes_per_second=assumed.intra_node_bytes_per_second,
        inter_node_bytes_per_second=assumed.inter_node_bytes_per_second,
        windows=tuple((window, part / per_square) for window, part in sorted(of_windows.items())),
    )


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
    get_input, get_output = (getattr(model, f"get_{kind}_embeddings", lambda: None) for kind in ("input", "output"))
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
