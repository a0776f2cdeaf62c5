"""The trainer's steps on simulated accelerators: any mesh, and an optimizer on the device or the host."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytescale.attention.kernels import CudaFlashKernel
from bytescale.config.overrides import optimizer_options
from bytescale.config.schema import OptimizerConfig
from bytescale.parity.compare import Document, WideCasts, plain_step
from bytescale.plan import Plan, RankPlan
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.saved.host_pool import HostPool
from tests.accelerator.device import Machine
from tests.accelerator.groups import Communicator, run_machines
from tests.accelerator.loops import LR, MICRO_BATCH, STEP, Outcome, waits_amid
from tests.helpers.steps import Batch, slice_batch
from tests.hf.mesh_steps import Part, put_together, rank_model

Result = TypeVar("Result")
CLIP = 0.5


def run_mesh(
    shape: MeshShape, work: Callable[[Machine, Mesh], Result], *, overlapped: bool = False, domain: int = 1
) -> tuple[list[Result], list[Machine]]:
    """Run ``work`` once per rank of a mesh; its results and the machines, in rank order."""
    store = dist.HashStore()

    def one_rank(own: Machine, group: Communicator) -> Result:
        world = RankGroup(group, device=own.device)

        def make_group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
            from bytescale.runtime import group as of_runtime

            return of_runtime.gloo_group(dist.PrefixStore(name, store), list(ranks).index(world.rank), len(ranks))

        mesh = Mesh.of(world, shape, make_group, overlapped=overlapped, domain=domain)
        mesh.connect()
        return work(own, mesh)

    return run_machines(shape.size, one_rank)


def run_steps(
    model: nn.Module,
    documents: list[Document],
    shape: MeshShape,
    plan: Plan,
    *,
    checkpointing: str = "none",
    bucket_bytes: int = 0,
    on_host: bool = False,
    offload: bool = False,
    num_steps: int = 2,
) -> Outcome:
    """Clipped updates of AdamW, compared with plain PyTorch in one process: losses, and the weights in the end.

    Args:
        bucket_bytes: of gradients that are reduced while ranks compute.
        on_host: whether the optimizer is in host memory.
        offload: whether activations of the plan's groups go there.
        num_steps: updates.
    """
    batch = Batch(*([document[name] for document in documents] for name in ("tokens", "labels", "weights")))
    total = float(sum(document["weights"].sum() for document in documents))
    config = OptimizerConfig(lr=LR, weight_decay=0.0, clip_grad_norm=CLIP, offload=on_host)

    def one_rank(own: Machine, mesh: Mesh) -> tuple[list[float], Part, int, Counter[str]]:
        rank_plan = RankPlan.of(plan, mesh.hdp.rank)
        data = [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches]
        with WideCasts():
            ours: Any = copy.deepcopy(model).to(own.device)
            if ours._can_set_experts_implementation():  # as the trainer does
                ours.set_experts_implementation("grouped_mm")
            part = rank_model(ours, mesh, bucket_bytes=bucket_bytes)
            pool = HostPool(2**24, pinned=True, page_bytes=2**13) if offload else None
            optimizer = ShardedOptimizer.of_config(part.parameters, config, mesh, more=part.more, units=part.units)
            if bucket_bytes:
                optimizer.zeros[0].overlap_with(part.layers)
            executor = part.executor(
                mesh, CudaFlashKernel(), checkpointing=checkpointing, pool=pool,
                wait_for_parameters=optimizer.wait_for_parameters,
            )  # fmt: skip
            losses = []
            for _ in range(num_steps):
                before = len(own.waits)
                optimizer.begin_step(rank_plan)
                result = executor.run(
                    rank_plan, data, num_global_targets=total, after_last_message=optimizer.after_last_message,
                    around=lambda _: own.part(MICRO_BATCH),
                )  # fmt: skip
                losses.append(result.loss_sum)
                with own.part(STEP):
                    norm = mesh.world.sum_of([optimizer.reduce_gradients()])[0] ** 0.5
                    optimizer.update(norm, CLIP, LR)
            optimizer.wait_for_parameters()
            moved = executor.part.activations.offload
            assert moved is None or moved.bytes_moved > 0, "the plan moves activations"
        waits = waits_amid(own, before)
        flat = part.parameters
        weights = {entry.name: (entry.cut, flat.value_of(entry).detach().cpu()) for entry in flat.entries}
        return losses, weights if mesh.hdp.rank == 0 else {}, len(data), waits

    results, machines = run_mesh(shape, one_rank, overlapped=bucket_bytes > 0)
    losses = [sum(own[step] for own, *_ in results) / total for step in range(num_steps)]
    weights = put_together([part for _, part, *_ in results])
    wanted_losses, wanted = _alone(model, documents, config, num_steps)
    worst = max(float((weights[name] - value).abs().max()) for name, value in wanted.items())
    off = max(abs(one / other - 1) for one, other in zip(losses, wanted_losses, strict=True))
    return Outcome(
        worst=max(worst, off),
        faults=[fault for own in machines for fault in own.faults],
        num_micro_batches=[count for *_, count, _ in results],
        waits=[waits for *_, waits in results],
    )


def _alone(
    model: nn.Module, documents: list[Document], config: OptimizerConfig, num_steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    own, losses = copy.deepcopy(model), []
    optimizer = torch.optim.AdamW(own.parameters(), lr=LR, weight_decay=0.0, **optimizer_options(config))
    for _ in range(num_steps):
        losses.append(plain_step(own, documents).loss)
        nn.utils.clip_grad_norm_(own.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach() for name, parameter in own.named_parameters()}
