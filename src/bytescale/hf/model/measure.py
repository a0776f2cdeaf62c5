"""Measures what layers of an attached model keep of a token, and what their backward needs beside it.

The model runs forward and backward on two numbers of short documents; memory is a line through both. What offloading
frees is measured in the same way. All ranks have the same weights and get the same numbers on equal devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.attention import AttentionKernel, PackedAttention
from bytescale.cost.memory.device_kernels import DeviceKind, nccl_reserve_bytes
from bytescale.cost.memory.device_memory import States
from bytescale.cost.memory.measured import MeasuredMemory, MeasuredRows, RingWidths
from bytescale.hf.model.counting import LiveBytes
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.encoders import frames_of
from bytescale.hf.model.head import embeddings_of
from bytescale.hf.model.interface import while_set
from bytescale.hf.model.probe import LayerAttention
from bytescale.hf.model.stages import hand_on, parts_of
from bytescale.plan import MicroBatch
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import PlainHead
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.lockstep import units_of
from bytescale.runtime.plain_data import all_gather_json
from bytescale.runtime.saved.activations import Activations

DOCUMENT_TOKENS = 32
"""Short enough for any model's positions."""
SHAPE_TOKENS = 1024
"""The same on the meta device, where rows cost nothing."""
NUM_DOCUMENTS = (4, 12)
_MANY = 4
"""Equal layers on the meta device: of more, so many are run."""


def measure_rows(
    decoder: HFDecoder, kernel: AttentionKernel, activations: Activations, device: torch.device
) -> MeasuredRows:
    """Run the model, whose layers have ``activations``, without offloading and, where it may, with all of it.

    The pool for offloading is told what a token takes. Gradients of parameters are added to; set them to zero after.
    The embedding has none meanwhile: theirs would be the most that a few rows need (``MeasuredMemory.phases``).
    """
    # Recurrences fill up a chunk for each document: short ones need most.
    is_free = device.type == "meta" and not decoder.mixers
    alone, length = RankGroup(device=device), SHAPE_TOKENS if is_free else DOCUMENT_TOKENS
    embedding, of_encoder = embeddings_of(decoder.model)[0], measure_encoder(decoder, activations.keeps_graphs)
    with ExitStack() as after:
        if isinstance(weight := getattr(embedding, "weight", None), nn.Parameter) and weight.requires_grad:
            after.callback(weight.requires_grad_, True)
            anchor = weight.new_zeros((), requires_grad=True)
            after.callback(embedding.register_forward_hook(lambda _, args, out: _End.apply(out, anchor)).remove)
            weight.requires_grad_(False)
        if device.type != "meta" or len(decoder.layers) <= _MANY or len(set(map(decoder.kind_of, decoder.layers))) > 1:
            return replace(_measured(decoder, kernel, activations, alone, length), **of_encoder)
        # Equal layers: a line through two numbers of them. The first layer, of more of them, shows what one returns.
        found, parts = list[dict[str, float]](), list[int]()
        shows = decoder.layers[0].register_forward_hook(lambda _, args, out: parts.append(parts_of(out)))
        after.callback(shows.remove)
        for number in (_MANY, _MANY - 2):  # the first layers, and the last two, which offloading treats apart
            num_calls, absent = decoder.num_calls * number // len(decoder.layers), decoder.layers[number - 2 : -2]
            skip = while_set(absent, "forward", lambda *args, **kwargs: hand_on(parts[0], *args, **kwargs))
            with skip, while_set([decoder], "num_calls", num_calls):
                found.append(asdict(_measured(decoder, kernel, activations, alone, length)))
        more, few = found
        steps = (len(decoder.layers) - _MANY) / 2
        rows = MeasuredRows(**{name: own + steps * (own - few[name]) for name, own in more.items()})
        of_one = {name: more[name] for name in ("fixed", "chunked_per_token")}  # of the layer that needs most
        movable = min(rows.movable_per_token, rows.moved_per_token)
        rows = replace(rows, movable_per_token=movable, **of_one, **of_encoder)
        if activations.offload is not None:
            activations.offload.pool.token_bytes = rows.moved_per_token
        return rows


def _measured(
    decoder: HFDecoder, kernel: AttentionKernel, activations: Activations, alone: RankGroup, length: int
) -> MeasuredRows:
    device = alone.device

    def run(number: int, ratio: float) -> _Bytes:
        micro_batch = MicroBatch.of_documents(0, [length] * number)
        micro_batch = replace(micro_batch, offload_ratios=((micro_batch.num_tokens, ratio),))
        attention = PackedAttention(micro_batch, kernel, alone.exchange, activations.attention_memory)
        positions = torch.as_tensor(micro_batch.position_ids()).to(device)
        tokens = torch.arange(micro_batch.num_tokens, device=device) % 61  # experts get different ones
        inputs = decoder.input_of(tokens)
        activations.begin_step([micro_batch])
        before = 0 if activations.offload is None else activations.offload.bytes_moved
        with LiveBytes() as live:
            with activations.forward(micro_batch):
                hidden = decoder(inputs, positions, attention)
            saved = live.now
            if hidden.requires_grad:  # otherwise the head alone is trained
                hidden.backward(torch.ones_like(hidden))
        moved = 0 if activations.offload is None else activations.offload.bytes_moved - before
        return saved, live.peak, moved

    chunk, activations.row_chunk.rows = activations.row_chunk.rows, NUM_DOCUMENTS[-1] * length
    kept, fixed = _slopes(run, 0.0, length)
    rows = MeasuredRows(saved_per_token=kept[0], peak_per_token=kept[1], fixed=fixed)
    activations.row_chunk.rows = length  # a twelfth of all rows
    apart = run(NUM_DOCUMENTS[-1], 0.0)[1] / (NUM_DOCUMENTS[-1] * length) if activations.has_chunks else kept[1]
    activations.row_chunk.rows = chunk
    if apart < kept[1]:
        rows = replace(rows, peak_per_token=apart, chunked_per_token=kept[1] - apart)
    if activations.offload is None:
        return rows
    run(NUM_DOCUMENTS[-1], 1.0)  # from here on, the pages of host memory exist
    left, _ = _slopes(run, 1.0, length)
    movable = max(0.0, min(kept[0] - left[0], kept[1] - left[1]))
    activations.offload.pool.token_bytes = left[2]
    return replace(rows, movable_per_token=movable, moved_per_token=left[2])


def measure_encoder(decoder: HFDecoder, keeps_graphs: bool = True) -> dict[str, float]:
    """What the encoder of images needs, which sees videos, too: fields of ``MeasuredRows``. Nothing: there is none.

    ``keeps_graphs``: whether backward does not encode again.
    """
    encoders = decoder.encoders
    if not encoders.kinds or (decoder.stage is not None and not decoder.stage.is_first):
        return {}
    if "image" not in encoders.kinds or encoders.sample("image", 1) is None:
        what = f"what the encoders of {type(encoders.root).__name__} need could not be measured"
        warnings.warn(f"{what}: leave room for pictures by device_gib", stacklevel=2)
        return {}
    is_cut = decoder.stage is not None  # then videos are encoded as a whole
    if not is_cut and "video" in encoders.kinds and (video := encoders.sample("video", 2)) is not None:
        encoders.takes_frames("video", video)
    num_rows, num_flops, num_patches = list[int](), list[tuple[float, float]](), 0

    def run(number: int, ratio: float) -> _Bytes:
        nonlocal num_patches
        item = encoders.sample("image", number)
        assert item is not None, "it was made before"
        num_patches = sum(frames_of(item))
        with LiveBytes() as live:
            rows, _ = encoders.encode("image", item)
            saved, forward = live.now, live.products
            if rows.requires_grad:
                rows.backward(torch.ones_like(rows))
        num_rows.append(len(rows))
        again = forward if rows.requires_grad and not keeps_graphs else 0
        num_flops.append((forward, live.products - forward + again))
        return saved, live.peak, rows.nbytes

    (saved, peak, of_row), fixed = _slopes(run, 0.0, 1)
    per = (num_rows[1] - num_rows[0]) / (NUM_DOCUMENTS[1] - NUM_DOCUMENTS[0])  # rows of a part
    own = {"saved": saved, "peak": peak, "row": of_row, "patches": num_patches / NUM_DOCUMENTS[1]}
    for name, few, many in zip(("forward", "backward"), *num_flops, strict=True):
        own[f"{name}_flops"] = (many - few) / (NUM_DOCUMENTS[1] - NUM_DOCUMENTS[0])
    return {f"encoder_{name}": value / per for name, value in own.items()} | {"encoder_fixed": fixed}


class _End(torch.autograd.Function):
    """Rows whose gradient is computed, and goes no further."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


_Bytes = tuple[float, float, float]
"""Kept by forward, at the highest point, and moved to the host."""


def _slopes(run: Callable[[int, float], _Bytes], ratio: float, length: int) -> tuple[_Bytes, float]:
    """Bytes for each row; and at the highest point, those that do not depend on the rows."""
    few, many = (run(number, ratio) for number in NUM_DOCUMENTS)
    rows = [number * length for number in NUM_DOCUMENTS]
    saved, peak, moved = ((b - a) / (rows[1] - rows[0]) for a, b in zip(few, many, strict=True))
    return (saved, peak, moved), max(0.0, few[1] - peak * rows[0])


def row_wise_parts(decoder: HFDecoder) -> list[tuple[nn.Module, str]]:
    """Feed-forward parts of the layers, with the name of the method that treats every row alone: linear layers around
    pointwise functions, and no others. A mixture of experts is none.
    """
    found = []
    for layer in decoder.layers:
        for part in layer.children():
            inside = list(part.modules())
            leaves = [module for module in inside if not list(module.children())]
            is_plain = all(type(leaf) is nn.Linear or not [*leaf.parameters(), *leaf.buffers()] for leaf in leaves)
            has_own = any(module._parameters for module in inside if module not in leaves)
            mixes = any(module in decoder.attentions or module in decoder.mixers for module in inside)
            linears = [leaf for leaf in leaves if isinstance(leaf, nn.Linear)]
            if is_plain and not has_own and not mixes and len(linears) > 1 and _is_row_wise(part, linears[0]):
                found.append((part, "forward"))
    return found


def _is_row_wise(part: nn.Module, first: nn.Linear) -> bool:
    """Whether the rows of ``[1, T, C]`` are computed one by one, to rows of as many numbers."""
    weight = first.weight
    rows = torch.linspace(-1, 1, 3 * weight.shape[1], device=weight.device).to(weight.dtype).view(1, 3, -1)
    try:
        with torch.no_grad():
            whole, apart = part(rows), torch.cat([part(row) for row in rows.split(1, 1)], 1)
    except (TypeError, RuntimeError):
        return False
    if not isinstance(whole, Tensor) or whole.shape != rows.shape:
        return False
    return whole.is_meta or torch.allclose(whole, apart, rtol=1e-2, atol=1e-3)


def measured_memory(decoder: HFDecoder, rows: MeasuredRows, *, kind: DeviceKind, num_ranks: int) -> MeasuredMemory:
    """What a micro-batch needs on one of ``num_ranks`` devices of a ``kind``, by the measured rows.

    The copy of a tied embedding counts as a weight of its own, with states that it does not have.
    """
    unit_of = units_of(decoder.parts)
    of_experts = {id(parameter) for module in decoder.experts for parameter in module.parameters()}
    trained, frozen, trained_experts, frozen_experts = ([0] * (len(decoder.parts) + 1) for _ in range(4))
    for parameter in decoder.parameters():
        if id(parameter) in unit_of:
            unit, number = unit_of[id(parameter)], decoder.size_of(parameter)
            (trained if parameter.requires_grad else frozen)[unit] += number
            if id(parameter) in of_experts:
                (trained_experts if parameter.requires_grad else frozen_experts)[unit] += number
    embedding = getattr(embeddings_of(decoder.model)[0], "weight", None)
    stage, num_parts = decoder.stage, 1 if decoder.token_rows is None else decoder.token_rows.shards.tp.size
    num_stages = 1 if stage is None else stage.count
    parameters, layers, weight = list(decoder.parameters()), decoder.structure.layers, decoder.model_head.weight
    element_bytes, vocab_size = parameters[0].element_size(), decoder.model_head.num_words
    return MeasuredMemory(
        states=States(
            num_parameters=sum(decoder.size_of(parameter) for parameter in parameters if parameter.requires_grad),
            num_frozen=sum(decoder.size_of(parameter) for parameter in parameters if not parameter.requires_grad),
            element_bytes=element_bytes,
            num_ranks=num_ranks,
            trained_of_units=tuple(trained),
            frozen_of_units=tuple(frozen),
            trained_experts=tuple(trained_experts),
            frozen_experts=tuple(frozen_experts),
        ),
        rows=rows,
        rings=ring_widths(layers, element_bytes),
        vocab_size=vocab_size,
        head_numbers=decoder.hidden_size * vocab_size if weight is None else weight.numel(),
        hidden_size=decoder.hidden_size,
        kind=kind,
        num_layers=len(decoder.layers),
        plain_head=isinstance(decoder.head, PlainHead),
        kernel_bytes_per_token=kernel_bytes_per_token(layers, kind, element_bytes),
        nccl_bytes=nccl_reserve_bytes(num_ranks, num_parts, num_stages) if kind == "cuda" else 0,
        num_in_flight=1 if stage is None else num_stages - stage.number,
        has_head=stage is None or stage.is_last,
        embedding_numbers=0 if embedding is None or not embedding.requires_grad else embedding.numel(),
    )


def ring_widths(layers: tuple[LayerAttention, ...], element_bytes: int) -> tuple[RingWidths, ...]:
    """What a row takes in attention, of the widest layer without a window and of the widest with each window."""
    sums, found = max(4, element_bytes), []
    for window in sorted({layer.rules.window for layer in layers}, key=lambda window: window or 0):
        own = [layer for layer in layers if layer.rules.window == window]
        query = max(layer.num_heads * max(layer.head_dim, layer.value_dim) for layer in own)
        keys = max(layer.num_kv_heads * (layer.head_dim + layer.value_dim) for layer in own)
        found.append(
            RingWidths(
                query=query * element_bytes,
                keys=keys * element_bytes,
                lse=max(layer.num_heads for layer in own) * sums,
                wide=sums / element_bytes,
                window=window,
            )
        )
    return tuple(found)


def kernel_bytes_per_token(layers: tuple[LayerAttention, ...], device_type: str, element_bytes: int) -> float:
    """What CUDA's flash attention allocates for itself in backward: fp32 sums, and dk and dv of every query head."""
    if device_type != "cuda":
        return 0.0
    return max(
        (
            4.0 * (layer.head_dim + 1) * layer.num_heads
            + 2 * layer.num_heads * max(layer.head_dim, layer.value_dim) * element_bytes
            for layer in layers
        ),
        default=0.0,
    )


def of_all_stages(own: MeasuredMemory, mesh: Mesh) -> MeasuredMemory:
    """That of all stages of a pipeline, from each one's. All of them call it."""
    told = all_gather_json(asdict(own), mesh.pipeline.group, mesh.world.device)
    return own if len(told) == 1 else MeasuredMemory.of_stages(told)
