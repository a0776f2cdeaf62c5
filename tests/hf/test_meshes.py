"""Decoders of transformers on meshes give the loss, log-probabilities and gradients of plain transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from bytescale.config.schema import PlannerConfig
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.parity import Setup, small_model
from bytescale.parity.compare import difference, plain_step, random_documents
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from bytescale.plan.verify import verify
from bytescale.planner.make import make_planner
from bytescale.runtime.mesh import MeshShape
from bytescale.runtime.pipeline import StageLinks
from tests.helpers.effort import examples, in_the_rest, pairs

from .mesh_steps import compare_on_mesh, mesh_step, plan_of

FAMILIES = ["qwen3", "gemma2", "glm4", "qwen3_moe", "deepseek_v3", "qwen3_next"]
MESHES = [MeshShape(pp=2, hdp=2), MeshShape(tp=2, hdp=2), MeshShape(pp=2, hdp=2, tp=2)]
ANY_MESH = [
    MeshShape(pp=pp, hdp=hdp, tp=tp) for pp in (1, 2, 4) for hdp in (1, 2, 3) for tp in (1, 2, 4) if pp * hdp * tp <= 8
]
HEADS = [(4, 2), (4, 4), (8, 1)]


def worst(
    model: nn.Module, lengths: Sequence[int], shape: MeshShape, plan: Plan, seed: int = 0, **options: Any
) -> float:
    """The largest difference from plain transformers."""
    documents = random_documents(model, Setup(lengths=tuple(lengths), seed=seed))
    documents[0]["labels"][0] = 5  # at least one has a loss
    reference = plain_step(copy.deepcopy(model), documents)
    return difference(reference, mesh_step(model, documents, shape, plan, **options)).worst


def deep_model(name: str, heads: tuple[int, int] = HEADS[0], **changes: Any) -> nn.Module:
    """Of five layers, whose words 2 and 4 ranks share."""
    numbers = {"num_hidden_layers": 5, "vocab_size": 68}
    return small_model(name, num_attention_heads=heads[0], num_key_value_heads=heads[1], **numbers, **changes)


@pytest.mark.parametrize(("name", "shape"), pairs(FAMILIES, MESHES))
def test_a_mesh_gives_what_one_process_gives(name: str, shape: MeshShape) -> None:
    model = small_model(name, dtype=torch.float64)
    documents = random_documents(model, Setup(lengths=(37, 1, 8, 3, 24)))
    assert compare_on_mesh(model, documents, shape).worst < 1e-9


@examples(1, 40)
@given(
    name=st.sampled_from(["llama", "mixtral"]),
    shape=st.sampled_from(ANY_MESH),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    seed=st.integers(0, 10_000),
    heads=st.sampled_from(HEADS),
    tied=st.booleans(),
    checkpointing=st.sampled_from(["none", "full", "attention"]),
    ratio=st.sampled_from([0.0, 0.4, 1.0]),
)
@in_the_rest(
    example(  # rows that no tensor-parallel rank can share evenly, and ranks without any
        name="mixtral",
        shape=MeshShape(pp=2, hdp=1, tp=4),
        lengths=[1, 2, 3],
        seed=1,
        heads=(4, 2),
        tied=True,
        checkpointing="full",
        ratio=1.0,
    )
)
def test_any_mesh_any_plan(
    name: str,
    shape: MeshShape,
    lengths: list[int],
    seed: int,
    heads: tuple[int, int],
    tied: bool,
    checkpointing: str,
    ratio: float,
) -> None:
    plan = plan_of(lengths, shape, seed)
    plan = replace(plan, group_offload_ratio=np.full(plan.num_groups, ratio))
    model = deep_model(name, heads, tie_word_embeddings=tied)
    options = {"checkpointing": checkpointing, "offload": ratio > 0}
    assert worst(model, lengths, shape, plan, seed, **options) < 1e-9


@examples(1, 15)
@given(
    planner=st.sampled_from(["naive", "paper", "greedy", "adaptive"]),
    shape=st.sampled_from([MeshShape(pp=2, hdp=4), MeshShape(pp=4, hdp=2), MeshShape(pp=2, hdp=2, tp=2)]),
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=16),
    slack=st.integers(0, 8),
)
def test_plans_of_every_planner_run_through_a_pipeline(
    planner: str, shape: MeshShape, lengths: list[int], slack: int
) -> None:
    """Small capacities: pipelines get different numbers of micro-batches, and shared groups between them."""
    config = PlannerConfig(name=planner)  # type: ignore[arg-type]
    cluster = Cluster.uniform(shape.hdp, -(-max(lengths) // shape.hdp) + slack)
    plan = make_planner(config, cluster, CostModel.from_work(linear_per_square=40), num_stages=shape.pp)(lengths)
    verify(plan, num_stages=shape.pp)
    assert worst(small_model("llama", num_hidden_layers=4), lengths, shape, plan, slack) < 1e-9


def test_sends_are_let_go_while_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 micro-batches a stage holds no more messages than are in flight under 1F1B."""
    plan = Plan.build(
        lengths=[8] * 40,
        capacity_tokens=[8],
        groups=[GroupSpec(sequences=[n], ranks=[0]) for n in range(40)],
        schedule=[[[n] for n in range(40)]],
    )
    held: list[int] = []
    exchange: Callable[..., None] = StageLinks.exchange

    def counting(self: StageLinks, place: int, made: Tensor | None = None) -> None:
        exchange(self, place, made)
        if made is not None:
            held.append(len(self._sent))

    monkeypatch.setattr(StageLinks, "exchange", counting)
    assert worst(small_model("llama", num_hidden_layers=4), [8] * 40, MeshShape(pp=4, hdp=1), plan) < 1e-9
    assert len(held) == 2 * 40 * 6  # of a step and an evaluation: three stages send forward, three backward
    assert max(held) <= 8


def test_ranks_are_ordered_stage_then_hdp_then_tensor_parallel() -> None:
    """docs/architecture.md: 2 stages x 3 HDP x 2 TP."""
    shape = MeshShape(pp=2, hdp=3, tp=2)
    places = {shape.coordinates(rank): rank for rank in range(shape.size)}
    assert len(places) == shape.size
    assert all(shape.rank(*place) == rank for place, rank in places.items())
    assert (places[0, 1, 0], places[0, 1, 1], places[1, 1, 0], places[1, 1, 1]) == (2, 3, 8, 9)
