"""The exchange of a window's keys comes to its end under NCCL's rules, in any group, beside rings and in pipelines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bytescale.runtime.mesh import MeshShape
from tests.helpers.effort import examples
from tests.nccl.test_nccl import NO_SHRINKING, assert_finishes, plan_of, recorded


@examples(2, 24, phases=NO_SHRINKING)
@given(
    planner=st.sampled_from(["static", "naive", "paper", "adaptive", "random"]),
    mesh=st.sampled_from(
        [
            *(MeshShape(hdp=hdp) for hdp in (2, 3, 5, 8)),
            *(MeshShape(pp=pp, hdp=hdp) for pp, hdp in ((2, 3), (3, 2))),
            MeshShape(pp=2, hdp=2, tp=2),
        ]
    ),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    window=st.sampled_from([1, 2, 5, 12, 30, 100]),
    checkpointing=st.sampled_from(["none", "full", "attention"]),
    ranks_per_node=st.sampled_from([0, 2, 3]),
    seed=st.integers(0, 10**6),
)
def test_a_step_with_windows_finishes_under_nccls_rules(
    planner: str,
    mesh: MeshShape,
    lengths: list[int],
    window: int,
    checkpointing: str,
    ranks_per_node: int,
    seed: int,
) -> None:
    """Every second layer has the window, the others run rings."""
    plan = plan_of(planner, lengths, mesh, seed=seed)
    options = {"checkpointing": checkpointing, "window": window}
    assert_finishes(recorded(plan, mesh, ranks_per_node=ranks_per_node, **options))
