"""Tensor parallelism of transformers' decoders: any mesh gives the loss and gradients of one process.

Norms and routers that compute in fp32 are kept in fp64 (``WideCasts``), so that one tolerance holds for all types.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.attention import select_kernel
from bytescale.checkpoint.layout import Layout
from bytescale.checkpoint.writing import layout_of
from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError
from bytescale.hf.model import tensor_parallel
from bytescale.hf.model.decoder import AttachedDecoder
from bytescale.hf.model.tensor_parallel import apply_tensor_parallelism
from bytescale.parity import small_model
from bytescale.parity.compare import Document, StepNumbers, WideCasts, difference, plain_step, random_plan
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime import Activations, Decoder, Executor, FlatParameters, Mesh, MeshShape, TokenShards
from bytescale.runtime.optimizer.zero import sum_replicas
from tests.helpers.effort import one_in, one_of
from tests.helpers.ranks import run_mesh
from tests.helpers.steps import Batch, slice_batch

from .support import documents

TOLERANCE = 1e-10
WORDS = {"vocab_size": 68}
"""Which 2 and 4 ranks share. 67 words they do not: embedding and head stay whole."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": WORDS,
    "gemma2": {},  # a soft cap, so the loss is the model's own
    "gemma3_text": WORDS | {"sliding_window": 5},  # tied and scaled
    "qwen3_moe": WORDS,
    "mimo_v2_flash": {"n_routed_experts": 4},  # sinks of heads
    "glm4_moe": WORDS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "deepseek_v3": {},  # attention without a plan
    "phi3": WORDS,  # fused, so that attention computes on every rank
    "starcoder2": WORDS,  # biases of row-wise parts
    "minimax": {},  # a recurrence
}
LENGTHS = [9, 1, 14, 3, 6]
MESHES = [MeshShape(hdp=1, tp=2), MeshShape(hdp=1, tp=4), MeshShape(hdp=2, tp=2)]


def model_of(name: str) -> nn.Module:
    return small_model(name, **MODELS[name])


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


def ring_plan(lengths: Sequence[int]) -> Plan:
    """Two ranks share all documents, each in its own micro-batch; of a document of one token one of them has none."""
    groups = [GroupSpec(sequences=[number], ranks=[1, 0]) for number in range(len(lengths))]
    schedule = [[[number] for number in range(len(lengths))]] * 2
    return Plan.build(lengths=lengths, capacity_tokens=[sum(lengths)] * 2, groups=groups, schedule=schedule)


def cut_step(
    shape: MeshShape, model: nn.Module, batch: Batch, plan: Plan, checkpointing: str = "none"
) -> tuple[StepNumbers, list[AttachedDecoder]]:
    """One step, and a pass without gradients, on a mesh of threads; gradients put together from all parts."""
    total = float(sum(weights.sum() for weights in batch.weights or []))

    def one_rank(mesh: Mesh) -> Any:
        decoder = AttachedDecoder(copy.deepcopy(model))
        with WideCasts():
            cuts = apply_tensor_parallelism(decoder, TokenShards(mesh.tp))
            flat = FlatParameters(decoder.model.named_parameters(), 1, cuts, late=decoder.late_parameters())
            activations = Activations(decoder.layers, checkpointing=checkpointing, tp=mesh.tp)  # type: ignore[arg-type]
            part = Decoder(
                module=decoder, activations=activations, head=decoder.head, splits_loss=decoder.splits_loss
            )
            kernel = select_kernel("math", torch.device("cpu"), torch.float64)
            executor, rank_plan = Executor(part=part, kernel=kernel, mesh=mesh), RankPlan.of(plan, mesh.hdp.rank)
            tokens = [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches]
            losses = executor.evaluate(rank_plan, tokens)
            result = executor.run(rank_plan, tokens, num_global_targets=total)
        sum_replicas(flat, mesh.tp)
        gradients = {entry.name: (entry.cut, flat.gradient_of(entry)) for entry in flat.entries}
        return result, gradients, losses, decoder, mesh

    outcomes = run_mesh(shape, one_rank)
    gradients: dict[str, Tensor] = {}
    logprobs = [torch.zeros(length, dtype=torch.float64) for length in batch.lengths]
    for _, own, losses, _, mesh in outcomes:
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
    return StepNumbers(loss=loss, logprobs=logprobs, gradients=gradients), [decoder for *_, decoder, _ in outcomes]


def places(cut: Cut) -> Tensor:
    """Of the numbers of a part in the whole parameter."""
    return cut.of(torch.arange(torch.Size(cut.shape).numel()).view(cut.shape)).flatten()


def worst(shape: MeshShape, model: nn.Module, lengths: Sequence[int], plan: Plan, checkpointing: str = "none") -> float:
    given, batch = batch_of(lengths)
    ours, _ = cut_step(shape, model, batch, plan, checkpointing)
    return difference(plain_step(copy.deepcopy(model), given), ours).worst


@pytest.mark.parametrize("checkpointing", ["none", "full", "attention"])
@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in MODELS for shape in MESHES])
def test_any_mesh_gives_the_numbers_of_one_process(name: str, shape: MeshShape, checkpointing: str) -> None:
    plan = whole_plan(LENGTHS) if shape.hdp == 1 else ring_plan(LENGTHS)
    assert worst(shape, model_of(name), LENGTHS, plan, checkpointing) <= TOLERANCE
