"""States and halos of recurrent layers come to their end under NCCL's rules, beside rings and in pipelines."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.attention.rings.exchange import Exchange
from bytescale.runtime.mesh import MeshShape
from tests.helpers.effort import examples
from tests.nccl.replay import Mismatch
from tests.nccl.test_nccl import NO_SHRINKING, assert_finishes, plan_of, recorded


@examples(4, 24, phases=NO_SHRINKING)
@given(
    planner=st.sampled_from(["static", "naive", "paper", "adaptive", "random"]),
    mesh=st.sampled_from(
        [*(MeshShape(hdp=hdp) for hdp in (2, 3, 5, 8)), *(MeshShape(pp=pp, hdp=hdp) for pp, hdp in ((2, 3), (3, 2)))]
    ),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    recurrence=st.sampled_from(["matrix", "number"]),
    window=st.sampled_from([5, 100]),
    chain=st.booleans(),
    checkpointing=st.sampled_from(["none", "full", "attention"]),
    ranks_per_node=st.sampled_from([0, 2, 3]),
    seed=st.integers(0, 10**6),
)
def test_a_step_with_recurrences_finishes_under_nccls_rules(
    planner: str,
    mesh: MeshShape,
    lengths: list[int],
    recurrence: str,
    window: int,
    chain: bool,
    checkpointing: str,
    ranks_per_node: int,
    seed: int,
) -> None:
    """Every second layer has states and halos before its ring; the others have windows."""
    plan = plan_of(planner, lengths, mesh, seed=seed)
    options = {"checkpointing": checkpointing, "recurrence": recurrence, "window": window}
    with patch("bytescale.recurrence.cuts.chain_is_faster", lambda *_: chain):
        assert_finishes(recorded(plan, mesh, ranks_per_node=ranks_per_node, **options))


def test_a_round_whose_messages_are_posted_one_by_one_is_caught() -> None:
    """Sends before receives, each an operation of its own: two members wait for each other."""
    start_all = Exchange.start_all

    def one_by_one(self: Exchange, sends: list, receives: list, *, tag: int) -> object:
        for message in sends:
            start_all(self, [message], [], tag=tag)
        for message in receives[:-1]:
            start_all(self, [], [message], tag=tag)
        return start_all(self, [], receives[-1:], tag=tag)

    plan = plan_of("static", [40], MeshShape(hdp=4))
    with patch("bytescale.recurrence.cuts.chain_is_faster", lambda *_: False):
        assert_finishes(recorded(plan, MeshShape(hdp=4), recurrence="matrix"))
        with patch.object(Exchange, "start_all", one_by_one), pytest.raises((AssertionError, Mismatch)):
            assert_finishes(recorded(plan, MeshShape(hdp=4), recurrence="matrix"))
