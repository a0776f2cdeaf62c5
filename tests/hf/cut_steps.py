"""One step of a decoder of transformers that is cut for tensor parallelism, on a mesh of threads, and its reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.attention import select_kernel
from bytescale.common.cut import Cut
from bytescale.hf.model.decoder import AttachedDecoder
from bytescale.hf.model.tensor_parallel import apply_tensor_parallelism
from bytescale.parity.compare import Document, StepNumbers, WideCasts, difference, plain_step
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime import Activations, Decoder, Executor, FlatParameters, Mesh, MeshShape, TokenShards
from bytescale.runtime.optimizer.zero import sum_replicas
from tests.helpers.ranks import run_mesh
from tests.helpers.steps import Batch, slice_batch

from .support import documents

LENGTHS = [9, 1, 14, 3, 6]


def batch_of(lengths: Sequence[int]) -> tuple[list[Document], Batch]:
    """Documents with a fifth of the labels masked, and the same for ``slice_batch``."""
    found = []
    for document in documents(lengths):
        labels = torch.cat([document["tokens"][1:], torch.tensor([-100])])
        labels[torch.rand(len(labels), generator=torch.Generator().manual_seed(len(labels))) < 0.2] = -100
        found.append({**document, "labels": labels})
    found[0]["labels"][0] = 5
    keys = ("tokens", "labels", "weights")
    return found, Batch(*([document[key] for document in found] for key in keys))


def whole_plan(lengths: Sequence[int]) -> Plan:
    """Two micro-batches on one rank; the first has a single token, fewer than there are tensor-parallel ranks."""
    short = list(lengths).index(1)
    rest = [number for number in range(len(lengths)) if number != short]
    groups = [GroupSpec(sequences=[short], ranks=[0]), GroupSpec(sequences=rest, ranks=[0])]
    return Plan.build(lengths=lengths, capacity_tokens=[sum(lengths)], groups=groups, schedule=[[[0], [1]]])


def cut_step(shape: MeshShape, model: nn.Module, batch: Batch, plan: Plan, checkpointing: str = "none") -> StepNumbers:
    """One step, and a pass without gradients, on a mesh of threads; gradients put together from all parts."""
    total = float(sum(weights.sum() for weights in batch.weights or []))

    def one_rank(mesh: Mesh) -> Any:
        decoder = AttachedDecoder(copy.deepcopy(model))
        with WideCasts():
            cuts = apply_tensor_parallelism(decoder, TokenShards(mesh.tp))
            flat = FlatParameters(decoder.model.named_parameters(), 1, cuts, late=decoder.late_parameters())
            activations = Activations(decoder.layers, checkpointing=checkpointing, tp=mesh.tp)  # type: ignore[arg-type]
            part = Decoder(module=decoder, activations=activations, head=decoder.head, splits_loss=decoder.splits_loss)
            kernel = select_kernel("math", torch.device("cpu"), flat.values.dtype)
            executor, rank_plan = Executor(part=part, kernel=kernel, mesh=mesh), RankPlan.of(plan, mesh.hdp.rank)
            tokens = [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches]
            losses = executor.evaluate(rank_plan, tokens)
            result = executor.run(rank_plan, tokens, num_global_targets=total)
        sum_replicas(flat, mesh.tp)
        gradients = {entry.name: (entry.cut, flat.gradient_of(entry)) for entry in flat.entries}
        return result, gradients, losses, mesh

    outcomes = run_mesh(shape, one_rank)
    gradients: dict[str, Tensor] = {}
    logprobs = [torch.zeros(length, dtype=torch.float64) for length in batch.lengths]
    for _, own, losses, mesh in outcomes:
        for name, (cut, gradient) in own.items():
            whole = gradients.setdefault(name, gradient.new_zeros(cut.shape))
            if cut.replica == 0:
                whole.view(-1).index_add_(0, places(cut), gradient.flatten())
        for micro_batch, rows in zip(RankPlan.of(plan, mesh.hdp.rank).micro_batches, losses, strict=True):
            starts, stops = micro_batch.segment_starts.tolist(), micro_batch.segment_stops.tolist()
            for sequence, start, stop in zip(micro_batch.segment_sequences.tolist(), starts, stops, strict=True):
                logprobs[sequence][start:stop], rows = -rows[: stop - start], rows[stop - start :]
    assert sum(result.num_targets for result, *_ in outcomes) == batch.num_targets
    loss = sum(result.loss_sum for result, *_ in outcomes) / total
    return StepNumbers(loss=loss, logprobs=logprobs, gradients=gradients)


def places(cut: Cut) -> Tensor:
    """Of the numbers of a part in the whole parameter."""
    return cut.of(torch.arange(torch.Size(cut.shape).numel()).view(cut.shape)).flatten()


def worst(shape: MeshShape, model: nn.Module, lengths: Sequence[int], plan: Plan, checkpointing: str = "none") -> float:
    given, batch = batch_of(lengths)
    ours = cut_step(shape, model, batch, plan, checkpointing)
    return difference(plain_step(copy.deepcopy(model), given), ours).worst
