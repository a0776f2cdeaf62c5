"""What a run does with the activations of a rank's layers."""

from __future__ import annotations

import torch

from bytescale.config.schema import Config
from bytescale.config.validate import may_offload
from bytescale.cost.memory.device_kernels import DeviceKind
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.measure import row_wise_parts
from bytescale.hf.model.norms import replace_norms
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.saved.host_pool import HostPool
from bytescale.train.parts.budget import usable_host_bytes


def activations_of(
    config: Config, part: HFDecoder, device: torch.device, kind: DeviceKind, mesh: Mesh | None
) -> Activations:
    """Apply norms that keep less, checkpointing and offloading to the layers.

    ``kind``: of the devices that train; a model is also looked at on others. ``mesh``: of the ranks; None: one rank.
    """
    replace_norms(part.model)
    tp, num_ranks = (None, 1) if mesh is None else (mesh.tp, mesh.world.size)
    pool = None
    if may_offload(config, kind):
        pool = HostPool(int(usable_host_bytes(config, num_ranks)), pinned=device.type == "cuda")
    alone = tp is None or tp.size == 1  # otherwise messages run beside the products of all rows
    return Activations(
        part.layers,
        checkpointing=config.memory.checkpointing,
        pool=pool,
        device=device,
        tp=tp,
        row_wise=row_wise_parts(part) if alone and config.memory.checkpointing != "none" else (),
    )
