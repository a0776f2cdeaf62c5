"""One rank's part of a model that is large: no rank ever has the whole of it.

1. The model's shapes alone are attached and cut, on the meta device.
2. Its first layers, one of each kind, are made with numbers, and cut in the same way: what the attachment and the cuts
   find by comparing numbers, they find there (``hf.files.large.twin_of``).
3. The rank's parameters get memory in its flat buffers. Where nothing restores their values, each rank takes those of
   its optimizer shards from a folder, whose files are mapped into host memory, or makes them a tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bytescale.attention.choose import select_kernel
from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError
from bytescale.config.description import ModelDescription
from bytescale.config.resolve import HF_PREFIX, source_folder
from bytescale.config.schema import Config
from bytescale.cost.memory.measured import MeasuredRows
from bytescale.hf.files.folder import constants_of, empty_model, load_model, sees_pictures, set_constants
from bytescale.hf.files.hf_folder import exact_dtype
from bytescale.hf.files.large import InitialValues, give_memory, hollow_model, twin_of
from bytescale.hf.model.balance import BalanceLoss
from bytescale.hf.model.counting import OnMeta
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.long_rope import depends_on_pass
from bytescale.hf.model.measure import measure_rows
from bytescale.hf.model.parallelize import RankPart, parallelize
from bytescale.runtime.loss import PlainHead
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.usable import kind_of
from bytescale.train.parts.activations import activations_of

FEW_PARAMETERS = 10**8
"""A model of so many is built as a whole, with all of its weights; a larger one in parts, or by its shapes alone."""
Initial = Callable[[str, Cut, slice], Tensor]
"""``[n]``: a range of the values of a part of a parameter, by its name in the whole model."""


class LargePart(NamedTuple):
    architecture: ModelDescription  # with the constants that belong to the weights
    decoder: HFDecoder
    part: RankPart
    rows: MeasuredRows  # what its layers need
    initial: Initial


def shapes_of(architecture: ModelDescription, dtype: torch.dtype, longest: int) -> HFDecoder | None:
    """The shapes of a large model, attached; None: it is small, or has to be made as a whole.

    Adapters, frozen parts, encoders, angles of the longest position, and types whose code looks at numbers need the
    whole.
    """
    model = empty_model(architecture.content)
    is_small = sum(parameter.numel() for parameter in model.parameters()) <= FEW_PARAMETERS
    if architecture.trained or is_small or depends_on_pass(model) or sees_pictures(architecture.content):
        return None
    try:
        with OnMeta():
            model = model.to(dtype).train()
            return HFDecoder(model, longest_document=longest, indexer_loss=architecture.indexer_loss)
    except (RuntimeError, ConfigError):  # the whole model is attached instead, which says what is in the way
        return None


def part_of_large(
    config: Config,
    architecture: ModelDescription,
    decoder: HFDecoder,
    mesh: Mesh,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> LargePart:
    """Make it of ``decoder``, its shapes. Parameters of the part are one zero until they are in flat buffers.

    Raises as ``build_rank_model``.
    """
    content, longest = architecture.content, config.data.context_length
    with OnMeta():
        _ = decoder.head, decoder.spec  # what parameters without values must not be asked for
        stage = None if mesh.shape.pp == 1 else (min(mesh.stage, 1), 2)
        model = twin_of(decoder, content, dtype, least=1 if stage is None else 2)
    twin = HFDecoder(model.to(device).train(), longest_document=longest, indexer_loss=architecture.indexer_loss)
    twin.require_no_randomness()
    assert isinstance(twin.head, PlainHead) == isinstance(decoder.head, PlainHead), "heads are compared on real words"
    parallelize(twin, mesh, stage=stage)
    del twin, model
    with OnMeta():
        if architecture.balance:
            decoder.balance = BalanceLoss(decoder, architecture.balance)
        part = parallelize(decoder, mesh)
        meta = torch.device("meta")
        activations = activations_of(config, decoder, meta, kind_of(device), mesh)
        rows = measure_rows(decoder, select_kernel("auto", torch.device("cpu"), dtype), activations, meta)
        activations.remove()

    # Constants, and memory for parameters.
    source = config.trainer.init
    initial: Initial
    if source.startswith(HF_PREFIX):
        folder = source_folder(source)
        whole = load_model(folder, content, exact_dtype(folder, dtype))
        initial = values_in({name: value.detach() for name, value in whole.named_parameters()})

    else:
        whole = hollow_model(content, dtype)
        set_constants(whole, architecture.buffers)
        initial = InitialValues(content, dtype, config.trainer.seed)
    _take_constants(decoder.model, whole, device)
    for parameter in decoder.model.parameters():
        zero = torch.zeros((), dtype=dtype, device=device)
        give_memory(parameter, zero.expand(parameter.shape) if parameter.numel() else zero.new_empty(0))
    return LargePart(replace(architecture, buffers=constants_of(whole)), decoder, part, rows, initial)


def values_in(weights: Mapping[str, Tensor]) -> Initial:
    """Of whole parameters, by name."""

    def initial(name: str, cut: Cut, inside: slice) -> Tensor:
        values: Tensor = cut.of(weights[name]).flatten()[inside]
        return values

    return initial


def _take_constants(model: nn.Module, source: nn.Module, device: torch.device) -> None:
    """Put the buffers of ``source`` in the place of those of ``model``, which have shapes alone."""
    buffers = dict(source.named_buffers())
    for name, module in model.named_modules():
        for key, own in module._buffers.items():
            if own is not None:
                module._buffers[key] = buffers[f"{name}.{key}" if name else key].to(device)
