"""One training step of a decoder of transformers on a mesh of threads, against plain transformers in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.attention import AttentionKernel, select_kernel
from bytescale.common.cut import Cut
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.parallelize import parallelize
from bytescale.parity import Comparison
from bytescale.parity.compare import Document, StepNumbers, WideCasts, difference, plain_step, random_plan
from bytescale.plan import Plan, RankPlan
from bytescale.plan.verify import verify
from bytescale.runtime.executor import Decoder, Executor, StepResult
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.buckets import Chunk
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.lockstep import Units, shard_parts
from bytescale.runtime.optimizer.zero import sum_replicas
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.saved.host_pool import HostPool
from bytescale.runtime.tied import TiedHead
from tests.helpers.ranks import run_mesh
from tests.helpers.steps import Batch, slice_batch

Part = dict[str, tuple[Cut, Tensor]]


def compare_on_mesh(
    model: nn.Module, documents: list[Document], shape: MeshShape, *, seed: int = 0, checkpointing: str = "none"
) -> Comparison:
    """Loss, log-probabilities of a second pass, and every gradient, put together from the parts of all ranks."""
    reference = plain_step(copy.deepcopy(model), documents)
    plan = plan_of([len(document["tokens"]) for document in documents], shape, seed)
    return difference(reference, mesh_step(model, documents, shape, plan, checkpointing))


def mesh_step(
    model: nn.Module,
    documents: list[Document],
    shape: MeshShape,
    plan: Plan,
    checkpointing: str = "none",
    *,
    offload: bool = False,
) -> StepNumbers:
    """The numbers of one step, and of an evaluation, put together from all ranks. ``offload``: with host memory."""
    lengths = [len(document["tokens"]) for document in documents]
    total = float(sum(document["weights"].sum() for document in documents))
    batch = Batch(*([document[name] for document in documents] for name in ("tokens", "labels", "weights")))
    starts = [0, *accumulate(lengths)]

    def one_rank(mesh: Mesh) -> tuple[StepResult, list[tuple[Tensor, Tensor]], Part]:
        rank_plan = RankPlan.of(plan, mesh.hdp.rank)
        data = [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches]
        with WideCasts():
            own, pool = rank_model(model, mesh), HostPool(2**24, pinned=False) if offload else None
            flat, kernel = own.parameters, select_kernel("math", torch.device("cpu"), own.parameters.values.dtype)
            executor = own.executor(mesh, kernel, checkpointing=checkpointing, pool=pool)
            result = executor.run(rank_plan, data, num_global_targets=total)
            sum_replicas(flat, mesh.tp)
            losses = executor.evaluate(rank_plan, data)
        number = Batch([torch.arange(start, stop) for start, stop in pairwise(starts)], batch.labels)
        rows = [
            (slice_batch(number, micro_batch).tokens, -own)
            for micro_batch, own in zip(rank_plan.micro_batches, losses, strict=False)
        ]
        gradients = {entry.name: (entry.cut, flat.gradient_of(entry)) for entry in flat.entries}
        return result, rows if mesh.tp.rank == 0 else [], gradients

    outcomes = run_mesh(shape, one_rank)
    assert sum(result.num_targets for result, *_ in outcomes) == batch.num_targets
    logprobs = torch.zeros(sum(lengths), dtype=torch.float64)
    for _, rows, _ in outcomes:
        for places, values in rows:
            logprobs[places] = values.double()
    return StepNumbers(
        loss=sum(result.loss_sum for result, *_ in outcomes) / total,
        logprobs=list(logprobs.split(lengths)),
        gradients=put_together([part for *_, part in outcomes]),
    )


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """One rank's part of a decoder, as the trainer makes it."""

    decoder: HFDecoder
    parameters: FlatParameters
    more: Sequence[FlatParameters] = ()  # further ones, where ranks share layers
    units: Units | None = None  # open these layers

    @property
    def layers(self) -> Chunk:
        return self.decoder, self.decoder.layers

    def executor(
        self,
        mesh: Mesh,
        kernel: AttentionKernel,
        *,
        checkpointing: str = "none",
        pool: HostPool | None = None,
        wait_for_parameters: Callable[[], None] = lambda: None,
    ) -> Executor:
        """``wait_for_parameters``: where an optimizer gathers them (``TiedHead``)."""
        decoder, tied = self.decoder, None
        if decoder.stage is not None and decoder.stage.tied is not None:
            tied = TiedHead(mesh, decoder.stage.tied, self.parameters, wait_for_parameters)
        activations = Activations(
            decoder.layers,
            checkpointing=checkpointing,
            pool=pool,
            device=mesh.hdp.device,
            tp=mesh.tp,  # type: ignore[arg-type]
        )
        part = Decoder(
            module=decoder,
            activations=activations,
            head=decoder.head,
            splits_loss=decoder.splits_loss,
            tied=tied,
            batch_loss=decoder.indexer_loss,
        )
        return Executor(part=part, kernel=kernel, mesh=mesh, units=self.units)


def rank_model(
    model: nn.Module, mesh: Mesh, *, bucket_bytes: int = 0, experts: str = "gathered", indexer_loss: Any = None
) -> RankModel:
    """This rank's part of a copy of ``model``. Ranks of a domain share its layers; ``experts``: and experts so."""
    decoder = HFDecoder(copy.deepcopy(model).train(), indexer_loss=indexer_loss)
    own = parallelize(decoder, mesh)
    named, more, units = own.named, list[FlatParameters](), None
    if mesh.domain.size > 1:
        _ = decoder.head  # found by a pass
        if experts == "parallel":
            decoder.require_experts(mesh.domain.size)
        mixtures = decoder.experts if experts == "parallel" else ()
        named, shared, units = shard_parts(named, decoder.parts, mesh, cuts=own.cuts, experts=mixtures)
        more += shared
    late = decoder.late_parameters()
    parameters = FlatParameters(named, mesh.hdp.size, own.cuts, bucket_bytes=bucket_bytes, late=late)
    return RankModel(decoder=decoder, parameters=parameters, more=more, units=units)


def plan_of(lengths: list[int], shape: MeshShape, seed: int) -> Plan:
    """A random plan; with stages one that the check for deadlock accepts."""
    plan = random_plan(lengths, shape.hdp, seed, weighted=shape.pp == 1, num_stages=shape.pp)
    verify(plan, num_stages=shape.pp)
    return plan


def put_together(ranks: list[Part]) -> dict[str, Tensor]:
    """Whole gradients: summed over HDP ranks, parts in their places, replicas counted once."""
    whole: dict[str, Tensor] = {}
    for gradients in ranks:
        for name, (cut, gradient) in gradients.items():
            total = whole.setdefault(name, gradient.new_zeros(cut.shape))
            if cut.replica == 0:
                places = cut.of(torch.arange(total.numel()).view(cut.shape)).flatten()
                total.view(-1).index_add_(0, places, gradient.flatten())
    return whole
