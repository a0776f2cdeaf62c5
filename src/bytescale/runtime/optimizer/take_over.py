"""The optimizer of a model in a loop that is not ours: its parameters move into flat memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError
from bytescale.cost.gradient_sync import BUCKET_BYTES
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.buckets import Chunk
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.lockstep import shard_parts
from bytescale.runtime.optimizer.optimizers import GroupOptions
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.optimizer.units import DomainParameters
from bytescale.runtime.optimizer.zero import ZeroShards


def take_over(
    named_parameters: Sequence[tuple[str, nn.Parameter]],
    mesh: Mesh,
    cls: type[torch.optim.Optimizer],
    options: dict[str, Any],
    group_options: GroupOptions | None = None,
    *,
    cuts: Mapping[str, Cut] | None = None,
    chunk: Chunk,
    late: Collection[str] = (),
    experts: Sequence[nn.Module] = (),
    on_host: bool = False,
) -> ShardedOptimizer:
    """Move all parameters that require a gradient into flat memory, one buffer for each dtype.

    Args:
        named_parameters: in the order in which a forward needs them.
        mesh: of the ranks. HDP ranks share the states, and those of a domain the parameters of the chunk's parts.
        cls, options, group_options: as in ``ShardedOptimizer``.
        cuts: by name, which part of the whole parameter this rank holds; None: it holds whole parameters.
        chunk: the model and its layers, so that gradients of one dtype can be reduced during backward; where ranks
            share parameters, its parts (``lockstep.Units``).
        late: names of parameters whose gradients are complete at the end alone (``FlatParameters``).
        experts: mixtures whose experts they compute in parallel (``shard_parts``).
        on_host: whether master weights and states are in host memory, and updated there (``host_states``).

    Raises:
        ConfigError: if nothing is trainable, or the optimizer is not elementwise.
    """
    if not any(p.requires_grad for _, p in named_parameters):
        raise ConfigError(
            "no parameter of the model requires a gradient",
            so="there is nothing to train",
            fix="set requires_grad on the parameters that shall be trained, before this call",
        )
    require_elementwise(cls, options, one_by_one=on_host)
    shared: list[DomainParameters] = []
    units = None
    if mesh.domain.size > 1:
        named_parameters, shared, units = shard_parts(named_parameters, chunk[1], mesh, cuts=cuts, experts=experts)
    trainable = [item for item in named_parameters if item[1].requires_grad]
    dtypes = sorted({p.dtype for _, p in trainable}, key=str)
    size = BUCKET_BYTES if len(dtypes) == 1 else 0
    whole = [
        FlatParameters(own, mesh.hdp.size, cuts, bucket_bytes=size, late=late)
        for own in ([item for item in trainable if item[1].dtype == dtype] for dtype in dtypes)
    ]
    zeros = [ZeroShards(parameters, mesh, on_host=on_host) for parameters in (*whole, *shared)]
    if size and units is None:
        zeros[0].overlap_with(chunk, in_steps=False)
    return ShardedOptimizer(zeros, cls, options, group_options, units=units)


def require_elementwise(cls: type[torch.optim.Optimizer], options: dict[str, Any], *, one_by_one: bool = False) -> None:
    """Raise ``ConfigError`` unless ``cls`` does the same to a matrix as to two halves of its numbers.

    ``one_by_one``: also if a ``step()`` updates one half alone, as in host memory.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(4, 6, generator=generator) + 0.5
    whole, halves = [values.clone()], [half.clone() for half in values.flatten().split(12)]
    try:
        optimizers = cls(whole, **options), cls(halves, **options)
        for _ in range(3):
            gradient = torch.randn(4, 6, generator=generator)
            whole[0].grad = gradient.clone()
            optimizers[0].step()
            parts = [part.clone() for part in gradient.flatten().split(12)]
            for given in ([parts[0], None], [None, parts[1]]) if one_by_one else [parts]:
                for half, part in zip(halves, given, strict=True):
                    half.grad = part
                optimizers[1].step()
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{cls.__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())}) does not run: {error}",
            fix="use an elementwise optimizer with valid options, such as torch.optim.AdamW",
        ) from error
    if not torch.allclose(whole[0].flatten(), torch.cat(halves), rtol=1e-5, atol=1e-7):
        if one_by_one:
            require_elementwise(cls, options)  # it may be wrong on a device, too
            raise ConfigError(
                f"{cls.__name__} computes something else if it updates a part of the parameters alone",
                so="in host memory, one part is updated after the other",
                fix="leave offload out, or use another optimizer, such as torch.optim.AdamW",
            )
        raise ConfigError(
            f"{cls.__name__} is not elementwise: the update of a number depends on other numbers of its matrix",
            so="on this rank's shards of the parameters it would compute something else than on whole matrices",
            fix="use an elementwise optimizer, such as torch.optim.AdamW",
        )
