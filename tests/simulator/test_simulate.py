"""The simulator against closed forms and hand computations."""

from dataclasses import replace

import numpy as np
import pytest

from bytescale.common.errors import ConfigError, PlanError
from bytescale.cost.links import Links
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from bytescale.plan.verify import verify
from bytescale.simulator import ClusterConfig, SimulatedStep, simulate
from tests.simulator.plans import deadlocking_plan, hybrid, local_plan, profile


def check_books(step: SimulatedStep) -> None:
    """Every second of every rank and stage is accounted for."""
    total = step.compute + step.exposed_ring + step.exposed_offload + step.wait_members
    total = total + step.dp_bubble + step.pp_bubble + step.sync_seconds
    np.testing.assert_allclose(total, step.step_seconds)
    assert sum(step.shares().values()) == pytest.approx(1.0)
    assert min(step.dp_bubble.min(), step.pp_bubble.min(), step.wait_members.min()) >= -1e-9


def test_one_rank_takes_the_sum_of_its_work() -> None:
    step = simulate(local_plan([[3, 5, 7]]), profile(quadratic=0.5), ClusterConfig(num_gpus=1))
    assert step.step_seconds == pytest.approx(4 * 3 * (15 + 0.5 * (9 + 25 + 49)))
    assert step.dp_bubble.sum() == step.pp_bubble.sum() == 0
    check_books(step)


def test_recomputation_adds_a_forward() -> None:
    times = profile(quadratic=0.5)
    for checkpointing, seconds in (
        ("full", 4 * 4 * (15 + 0.5 * (9 + 25 + 49))),
        ("attention", 4 * (4 * 15 + 3 * 0.5 * (9 + 25 + 49))),
    ):
        step = simulate(local_plan([[3, 5, 7]]), replace(times, checkpointing=checkpointing), ClusterConfig(num_gpus=1))
        assert step.step_seconds == pytest.approx(seconds)
        check_books(step)


def test_equal_tasks_leave_no_bubble_and_unequal_ones_a_dp_bubble() -> None:
    equal = simulate(local_plan([[6, 6]] * 4), profile(), ClusterConfig(num_gpus=4))
    assert equal.dp_bubble.sum() == 0
    unequal = simulate(local_plan([[6, 6], [6]]), profile(), ClusterConfig(num_gpus=2))
    assert unequal.dp_bubble[:, 0].tolist() == [0, 4 * 3 * 6]
    assert unequal.rank_seconds.tolist() == [4 * 3 * 12, 4 * 3 * 6]
    check_books(unequal)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 5), (4, 4), (4, 13), (8, 3)])
def test_ideal_pipeline_bubble(stages: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1) of the step, for equal micro-batches and free transfers."""
    cluster = ClusterConfig(num_gpus=2 * stages, pp=stages)
    plan = local_plan([[6] * micro_batches] * 2)
    step = simulate(plan, profile(num_layers=8), cluster)
    assert step.pp_bubble.mean() / step.step_seconds == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert step.dp_bubble.sum() == pytest.approx(0)
    assert step.step_seconds == pytest.approx((micro_batches + stages - 1) * 3 * 6 * 8 / stages)
    check_books(step)


def test_two_pipelines_with_different_numbers_of_micro_batches() -> None:
    """Eight short micro-batches beside two of four times the size: both end near each other, neither deadlocks."""
    step = simulate(local_plan([[2] * 8, [8, 8]]), profile(num_layers=4), ClusterConfig(num_gpus=4, pp=2))
    assert step.step_seconds == pytest.approx(max((8 + 1) * 2, (2 + 1) * 8) * 3 * 2)
    check_books(step)


def test_a_shared_group_waits_for_its_last_member_and_runs_in_step() -> None:
    groups = [
        GroupSpec(sequences=[0], ranks=[0]),
        GroupSpec(sequences=[1], ranks=[0, 1]),
        GroupSpec(sequences=[2], ranks=[1]),
    ]
    plan = Plan.build(lengths=[5, 8, 3], capacity_tokens=[9, 9], groups=groups, schedule=[[[0], [1]], [[1, 2]]])
    step = simulate(plan, profile(), ClusterConfig(num_gpus=2))
    # Rank 1 waits for 4 * 3 * 5 s, then both run the group while rank 1 has 4 + 3 tokens to rank 0's 4.
    assert step.step_seconds == pytest.approx(12 * 5 + 12 * 7)
    assert step.dp_bubble[:, 0].tolist() == pytest.approx([0, 12 * 5])
    assert step.wait_members[:, 0].tolist() == pytest.approx([12 * 3, 0])
    check_books(step)


def test_exposed_ring_and_its_bytes() -> None:
    groups = [GroupSpec(sequences=[0], ranks=[0, 1, 2, 3])]
    plan = Plan.build(lengths=[16], capacity_tokens=[4] * 4, groups=groups, schedule=[[[0]]] * 4)
    step = simulate(plan, profile(ring_bytes=5.0), ClusterConfig(num_gpus=4, gpus_per_node=2))
    # 3 transfers of 4 tokens, 5 bytes forward and 10 backward, nothing to hide behind; 4 layers.
    assert step.exposed_ring[:, 0].tolist() == [4 * 3 * 4 * 15] * 4
    # Each member sends 12 of 16 tokens' K/V. Ring 0-1-2-3-0 on nodes {0, 1}, {2, 3}: two hops inside, two across.
    assert step.traffic.ring_intra_node == step.traffic.ring_inter_node == 2 * 12 * 15 * 4
    check_books(step)


def test_states_of_recurrent_layers_take_rounds_whatever_the_length() -> None:
    """4 members exchange states in 3 rounds: 6 bytes at 1 byte a second, and 3 of 4 layers wait for the latency."""
    links = Links(latency_seconds=2.0, intra_node_bytes_per_second=1.0, inter_node_bytes_per_second=1.0)
    model = hybrid(replace(profile(ring_bytes=0.0), links=links), 2.0)
    rings = 3 * 0.25 * 2.0  # which only the attention layers have
    for length in (16, 64):
        groups = [GroupSpec(sequences=[0], ranks=[0, 1, 2, 3])]
        plan = Plan.build(lengths=[length], capacity_tokens=[16] * 4, groups=groups, schedule=[[[0]]] * 4)
        step = simulate(plan, model, ClusterConfig(num_gpus=4, gpus_per_node=2))
        assert step.exposed_ring[:, 0].tolist() == [4 * 2 * (3 * (6.0 + 0.75 * 2.0) + rings)] * 4
        assert step.traffic.ring_intra_node + step.traffic.ring_inter_node == 4 * 4 * 2 * 3 * 6.0
        check_books(step)


def test_uneven_shares_follow_the_weights() -> None:
    groups = [GroupSpec(sequences=[0], ranks=[0, 1], weights=[3, 1])]
    plan = Plan.build(lengths=[16], capacity_tokens=[12, 12], groups=groups, schedule=[[[0]]] * 2)
    step = simulate(plan, profile(), ClusterConfig(num_gpus=2), speeds=np.array([3.0, 1.0]))
    assert step.compute[:, 0].tolist() == pytest.approx([12 * 12 / 3, 12 * 4])
    assert step.wait_members.sum() == pytest.approx(0)


def test_local_documents_send_nothing() -> None:
    step = simulate(local_plan([[6, 6]] * 4), profile(ring_bytes=5.0), ClusterConfig(num_gpus=4))
    assert step.traffic.ring_intra_node == step.traffic.ring_inter_node == 0


def test_offloaded_bytes_are_counted() -> None:
    plan = local_plan([[6, 6]])
    offloaded = replace(plan, group_offload_ratio=np.ones(2))
    assert simulate(offloaded, profile(), ClusterConfig(num_gpus=1)).traffic.offload == 2 * 2 * 60


def test_the_fixed_order_deadlocks_where_verify_says_so() -> None:
    plan, cluster = deadlocking_plan(), ClusterConfig(num_gpus=4, pp=2)
    with pytest.raises(PlanError):
        verify(plan, num_stages=2)
    with pytest.raises(PlanError, match="deadlocks on 2 stages"):
        simulate(plan, profile(), cluster)


def test_gradient_sync() -> None:
    heavy = replace(profile(ring_bytes=1.0), layer_parameters=100)
    step = simulate(local_plan([[6], [6]]), heavy, ClusterConfig(num_gpus=2))
    parameters = 4 * 100 + 1  # the vocabulary of one token is tied: one matrix of 1 x 1
    assert step.sync_seconds[0, 0] == pytest.approx(6 * parameters / 2)
    check_books(step)


def test_buckets_hide_the_gradient_sync_behind_computation() -> None:
    """Two micro-batches a rank; without room behind the last message the reduction is as visible as ever."""
    heavy = replace(profile(ring_bytes=1.0), layer_parameters=2**20)
    plan = local_plan([[6, 6], [6, 6]])
    fast = replace(heavy, links=replace(heavy.links, intra_node_bytes_per_second=2.0**21))
    once = simulate(plan, fast, ClusterConfig(num_gpus=2))
    cut = simulate(plan, fast, ClusterConfig(num_gpus=2, gradient_bucket_mib=1.0))
    assert 0 < cut.sync_seconds.max() < 0.2 * once.sync_seconds.max()
    check_books(cut)
    shared = Plan.build(
        lengths=[8], capacity_tokens=[4, 4], groups=[GroupSpec(sequences=[0], ranks=[0, 1])], schedule=[[[0]], [[0]]]
    )
    once, cut = (simulate(shared, fast, ClusterConfig(num_gpus=2, gradient_bucket_mib=mib)) for mib in (0.0, 1.0))
    assert cut.sync_seconds.max() >= 0.6 * once.sync_seconds.max()  # the reduction is two thirds of the bytes


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"num_gpus": 10, "tp": 2, "pp": 2}, "10 ranks are no multiple of tp = 2 x pp = 2"),
        ({"num_gpus": 16, "tp": 16}, "exceeds gpus_per_node"),
        ({"num_gpus": 0}, "num_gpus is 0"),
    ],
)
def test_impossible_clusters(cluster: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**cluster)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (ClusterConfig(num_gpus=2), "for 1 ranks but 2 devices"),
        (ClusterConfig(num_gpus=2, tp=2), "for tp = 1 but parallel.tp is 2"),
        (ClusterConfig(num_gpus=8, pp=8), "exceeds the model's 4 layers"),
    ],
)
def test_plan_profile_and_cluster_have_to_agree(cluster: ClusterConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(local_plan([[6]]), profile(), cluster)
