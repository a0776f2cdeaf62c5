"""Measures what layers of an attached model keep of a token, and what their backward needs beside it.

The model runs forward and backward twice, on different numbers of short documents; memory is a line through both. All
ranks have the same weights and get the same numbers on equal devices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bytescale.attach.live_bytes import LiveBytes
from bytescale.attach.part import AttachedPart
from bytescale.attach.planned_batch import local_documents
from bytescale.attach.probe import LayerAttention
from bytescale.attention import PackedAttention
from bytescale.config import RingGradients
from bytescale.cost import flops
from bytescale.cost.memory import MeasuredRows, RingWidths
from bytescale.runtime import Activations

DOCUMENT_TOKENS = 32
"""Short enough for any model's positions."""
NUM_DOCUMENTS = (4, 12)


def measure_rows(
    part: AttachedPart, activations: Activations, attention_of: Callable[..., PackedAttention]
) -> MeasuredRows:
    """Run ``part``, whose layers have ``activations``. Gradients of parameters are added to; set them to zero after.

    ``attention_of``: from a micro-batch of whole documents to its attention.
    """
    (few, saved_few, peak_few), (many, saved_many, peak_many) = (
        _one_size(part, activations, attention_of, number) for number in NUM_DOCUMENTS
    )
    saved = (saved_many - saved_few) / (many - few)
    peak = (peak_many - peak_few) / (many - few)
    return MeasuredRows(saved_per_token=saved, peak_per_token=peak, fixed=max(0.0, peak_few - peak * few))


def _one_size(
    part: AttachedPart, activations: Activations, attention_of: Callable[..., PackedAttention], number: int
) -> tuple[int, int, int]:
    """Rows, the bytes that forward has kept, and those at the highest point."""
    micro_batch = local_documents(0, [DOCUMENT_TOKENS] * number)
    rows = micro_batch.num_tokens
    device = next(part.parameters()).device
    positions = torch.as_tensor(micro_batch.position_ids()).to(device)
    tokens = torch.arange(rows, device=device) % 61  # of any vocabulary; experts get different ones
    attention = attention_of(micro_batch)
    activations.begin_step([micro_batch])
    with LiveBytes() as live:
        with activations.forward(0):
            hidden = part(tokens, positions, attention)
        saved = live.now
        with activations.backward(0):
            hidden.backward(torch.ones_like(hidden))
    return rows, saved, live.peak


def ring_widths(
    layers: tuple[LayerAttention, ...], element_bytes: int, ring_gradients: RingGradients
) -> tuple[RingWidths, ...]:
    """What a row takes in attention, of the widest layer without a window and of the widest with each window."""
    gradient_bytes = flops.ring_gradient_bytes(element_bytes, ring_gradients)
    widest: dict[int | None, RingWidths] = {}
    for layer in layers:
        numbers = layer.num_kv_heads * (layer.head_dim + layer.value_dim)
        before = widest.get(layer.rules.window)
        widest[layer.rules.window] = RingWidths(
            query=max(layer.num_heads * max(layer.head_dim, layer.value_dim) * element_bytes, _of(before, "query")),
            keys=max(numbers * element_bytes, _of(before, "keys")),
            key_gradients=max(numbers * gradient_bytes, _of(before, "key_gradients")),
            window=layer.rules.window,
        )
    return tuple(widest[key] for key in sorted(widest, key=lambda window: window or 0))


def kernel_bytes_per_token(layers: tuple[LayerAttention, ...], device_type: str, element_bytes: int) -> float:
    """What CUDA's flash attention allocates for itself in backward: fp32 sums, and dk and dv of every query head."""
    if device_type != "cuda":
        return 0.0
    return max(
        4.0 * (layer.head_dim + 1) * layer.num_heads
        + 2 * layer.num_heads * max(layer.head_dim, layer.value_dim) * element_bytes
        for layer in layers
    )


def _of(ring: RingWidths | None, name: str) -> int:
    return 0 if ring is None else int(getattr(ring, name))
