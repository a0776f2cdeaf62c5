"""What a model is and needs, without ranks: its counts, its memory, and layers to measure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from bytescale.attention import AttentionKernel
from bytescale.common.environment import machine_bytes
from bytescale.common.errors import ConfigError
from bytescale.common.units import format_bytes, format_si
from bytescale.config.description import ModelDescription, check_model
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import Config
from bytescale.config.validate import hdp_ranks
from bytescale.cost.memory.device_kernels import DeviceKind
from bytescale.cost.memory.device_memory import States, host_bytes_left
from bytescale.cost.memory.measured import MeasuredMemory
from bytescale.cost.spec import ModelSpec
from bytescale.hf.files.folder import empty_model, make_model, parameters_of, require_positions, set_constants
from bytescale.hf.files.large import twin_of
from bytescale.hf.model.counting import OnMeta
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.norms import replace_norms
from bytescale.train.parts import large_model
from bytescale.train.parts.budget import usable_host_bytes
from bytescale.train.parts.rank_model import build_rank_model

BYTES_PER_PARAMETER = 12
"""Of this machine's memory, while a model is built to be measured: weights, a copy in flat memory, gradients."""


def describe_model(
    config: Config,
    architecture: ModelDescription,
    kernel: AttentionKernel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_ranks: int,
    kind: DeviceKind,
) -> tuple[ModelSpec, MeasuredMemory]:
    """The counts of a model, and its memory on devices of a ``kind``, without ranks.

    It is built as one rank, stage by stage, to be measured: a large one without memory for its weights, on the meta
    device. Raises ``ConfigError`` where it needs weights, and has no room for them.
    """
    check_model(architecture)
    check_positions(config, architecture)

    def describe(device: torch.device) -> tuple[ModelSpec, MeasuredMemory]:
        parallel, memories = config.parallel, []
        for stage in range(parallel.pp):
            model = build_rank_model(
                config, architecture, kernel, device=device, dtype=dtype, kind=kind, stage=(stage, parallel.pp),
                planned_parts=parallel.tp,
            )  # fmt: skip
            memories.append(asdict(model.memory(kind, num_ranks)))
        return model.spec, MeasuredMemory.of_stages(memories)

    number, why = sum(value.numel() for value in parameters_of(architecture.content).values()), ""
    if number > large_model.FEW_PARAMETERS and not config.trainer.init:  # its weights are to be read, and checked
        try:
            with OnMeta():
                return describe(torch.device("meta"))
        except (RuntimeError, ConfigError) as error:  # an operator whose result depends on numbers, or a refusal
            why = f"; by its shapes alone it cannot be described ({' '.join(str(error).split())[:300]})"
    needed, here = number * BYTES_PER_PARAMETER, machine_bytes()
    if needed > here:
        raise ConfigError(
            f"{config.model.preset} has {format_si(number)} parameters; it is built once to be planned for, which "
            f"takes {format_bytes(needed)}, and this machine has {format_bytes(here)}{why}",
            so="it cannot be attached and measured here",
            fix="plan on a machine with more memory, or name a preset of about the same shape, such as 70b",
        )
    return describe(device)


def check_positions(config: Config, shape: ModelDescription) -> None:
    """Raise ``ConfigError`` if the model's table of positions is shorter than documents may be."""
    context = config.data.context_length
    require_positions(shape.content, context, what="data.context_length is", fix="set data.context_length to {}")


def check_host_room(config: Config) -> None:
    """Raise ``ConfigError`` if the optimizer, or copies of its states, have no room in this machine's memory.

    The vocabulary is the one that the model's section or its folder says. The ranks check it again with the corpus's.
    """
    shape, parallel = resolve_model(config.model), config.parallel
    on_host, is_copied, num_ranks = config.optimizer.offload, parallel.elastic, hdp_ranks(parallel)
    if not (on_host or is_copied) or shape.trained:
        return
    number = sum(value.numel() for value in parameters_of(shape.content).values()) // (parallel.tp * parallel.pp)
    element = 8 if config.trainer.dtype == "fp64" else 4
    states = States(
        num_parameters=number, element_bytes=element, num_ranks=num_ranks, on_host=on_host, is_copied=is_copied
    )
    host_bytes_left(states, usable_host_bytes(config, parallel.ranks))


def spec_of_content(content: dict[str, Any]) -> ModelSpec:
    """The counts of the model with this config.json, of its shapes alone."""
    with OnMeta():
        return HFDecoder(empty_model(content).to(torch.bfloat16)).spec


def layers_to_measure(config: Config, device: torch.device, dtype: torch.dtype) -> tuple[HFDecoder, ModelSpec]:
    """What ``profiling.Measurer`` takes: the model with random weights, on ``device``; of a large one, some layers.

    And the counts of the whole model.
    """
    architecture, longest = resolve_model(config.model), config.data.context_length
    check_model(architecture)
    if (whole := large_model.shapes_of(architecture, dtype, longest)) is not None:
        with OnMeta():
            model = twin_of(whole, architecture.content, dtype).to(dtype)
    else:
        model = make_model(architecture.content, dtype)
        set_constants(model, architecture.buffers)
    decoder = HFDecoder(model.to(device).train(), longest_document=longest)
    decoder.require_no_randomness()
    replace_norms(decoder.model)  # as training does
    return decoder, (decoder if whole is None else whole).spec
