"""Measures what layers of an attached model keep of a token, and what their backward needs beside it.

The model runs forward and backward on two numbers of short documents; memory is a line through both. What offloading
frees is measured in the same way. All ranks have the same weights and get the same numbers on equal devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bytescale.attach.head import Head, has_plain_head
from bytescale.attach.live_bytes import LiveBytes
from bytescale.attach.planned_batch import local_documents
from bytescale.attach.probe import LayerAttention, ModelFacts
from bytescale.config import RingGradients
from bytescale.cost import flops
from bytescale.cost.memory import DeviceKind, MeasuredMemory, MeasuredRows, RingWidths, States, nccl_reserve_bytes
from bytescale.plan import MicroBatch
from bytescale.runtime import Activations

DOCUMENT_TOKENS = 32
"""Short enough for any model's positions."""
NUM_DOCUMENTS = (4, 12)


Forward = Callable[[MicroBatch, Tensor, Tensor], Tensor]
"""From a micro-batch of whole documents, ``tokens [T]`` and ``position_ids [T]`` to hidden states ``[T, C]``."""


def measure_rows(forward: Forward, activations: Activations, device: torch.device) -> MeasuredRows:
    """Run the model, whose layers have ``activations``, without offloading and, where it may, with all of it.

    Gradients of parameters are added to; set them to zero after.
    """
    kept = _slopes(forward, activations, device, 0.0)
    rows = MeasuredRows(saved_per_token=kept.saved, peak_per_token=kept.peak, fixed=kept.fixed)
    if activations.offload is None:
        return rows
    _run(forward, activations, device, NUM_DOCUMENTS[-1], 1.0)  # from here on, the pages of host memory exist
    left = _slopes(forward, activations, device, 1.0)
    movable = max(0.0, min(kept.saved - left.saved, kept.peak - left.peak))
    return replace(rows, movable_per_token=movable, moved_per_token=left.moved)


class _Seen(NamedTuple):
    """Bytes of a run, or bytes per row: kept by forward, at the highest point, and moved to the host."""

    saved: float
    peak: float
    moved: float
    fixed: float = 0.0


def _slopes(forward: Forward, activations: Activations, device: torch.device, ratio: float) -> _Seen:
    few, many = (_run(forward, activations, device, number, ratio) for number in NUM_DOCUMENTS)
    rows = [number * DOCUMENT_TOKENS for number in NUM_DOCUMENTS]
    saved, peak, moved = ((b - a) / (rows[1] - rows[0]) for a, b in zip(few[:3], many[:3], strict=True))
    return _Seen(saved, peak, moved, fixed=max(0.0, few.peak - peak * rows[0]))


def _run(forward: Forward, activations: Activations, device: torch.device, number: int, ratio: float) -> _Seen:
    """Forward and backward of so many documents, with this share of their rows offloaded."""
    micro_batch = local_documents(0, [DOCUMENT_TOKENS] * number)
    micro_batch = replace(micro_batch, offload_ratios=((micro_batch.num_tokens, ratio),))
    positions = torch.as_tensor(micro_batch.position_ids()).to(device)
    tokens = torch.arange(micro_batch.num_tokens, device=device) % 61  # of any vocabulary; experts get different ones
    activations.begin_step([micro_batch])
    before = 0 if activations.offload is None else activations.offload.bytes_moved
    with LiveBytes() as live:
        with activations.forward(micro_batch):
            hidden = forward(micro_batch, tokens, positions)
        saved = live.now
        hidden.backward(torch.ones_like(hidden))
    moved = 0 if activations.offload is None else activations.offload.bytes_moved - before
    return _Seen(saved, live.peak, moved)


def measured_memory(
    model: nn.Module,
    facts: ModelFacts,
    rows: MeasuredRows,
    *,
    head: Head,
    hidden_size: int,
    kind: DeviceKind,
    num_ranks: int,
    ring_gradients: RingGradients = "wide",
) -> MeasuredMemory:
    """What a micro-batch needs on one of ``num_ranks`` devices of a ``kind``, by the measured rows.

    ``hidden_size``: of the hidden states that ``head`` is given.
    """
    element_bytes, weight = next(model.parameters()).element_size(), head.weight
    return MeasuredMemory(
        states=States(
            num_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            num_frozen=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
            element_bytes=element_bytes,
            num_ranks=num_ranks,
        ),
        rows=rows,
        rings=ring_widths(facts.layers, element_bytes, ring_gradients),
        vocab_size=head.num_words,
        head_numbers=hidden_size * head.num_words if weight is None else weight.numel(),
        hidden_size=hidden_size,
        kind=kind,
        plain_head=has_plain_head(model, head, hidden_size),
        kernel_bytes_per_token=kernel_bytes_per_token(facts.layers, kind, element_bytes),
        nccl_bytes=nccl_reserve_bytes(num_ranks, 1, 1) if kind == "cuda" else 0,
    )


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
