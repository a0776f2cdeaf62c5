"""Index keys, latents and gradients of both come to their end under NCCL's rules, in any group and in pipelines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bytescale.runtime.mesh import MeshShape
from tests.helpers.effort import examples
from tests.nccl.test_nccl import NO_SHRINKING, assert_finishes, plan_of, recorded


@examples(1, 16, phases=NO_SHRINKING)
@given(
    planner=st.sampled_from(["adaptive", "random", "static", "naive"]),
    mesh=st.sampled_from([MeshShape(hdp=3), MeshShape(hdp=2, pp=2), MeshShape(hdp=5), MeshShape(hdp=2, tp=2, pp=2)]),
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    checkpointing=st.sampled_from(["attention", "full", "none"]),
    seed=st.integers(0, 10**6),
)
def test_a_step_that_chooses_keys_finishes_under_nccls_rules(
    planner: str, mesh: MeshShape, lengths: list[int], checkpointing: str, seed: int
) -> None:
    plan = plan_of(planner, lengths, mesh, seed=seed)
    assert_finishes(recorded(plan, mesh, checkpointing=checkpointing, family="deepseek_v32"))


@examples(1, 16, phases=NO_SHRINKING)
@given(
    indexer_loss=st.sampled_from(["sparse", "dense"]),
    planner=st.sampled_from(["adaptive", "random", "static", "naive"]),
    mesh=st.sampled_from([MeshShape(hdp=3), MeshShape(hdp=2, pp=2), MeshShape(hdp=5)]),
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    checkpointing=st.sampled_from(["attention", "full", "none"]),
    seed=st.integers(0, 10**6),
)
def test_a_step_that_trains_indexers_finishes_under_nccls_rules(
    indexer_loss: str, planner: str, mesh: MeshShape, lengths: list[int], checkpointing: str, seed: int
) -> None:
    plan = plan_of(planner, lengths, mesh, seed=seed)
    options = {"checkpointing": checkpointing, "family": "deepseek_v32", "indexer_loss": indexer_loss}
    assert_finishes(recorded(plan, mesh, **options))
