"""Equation 3 in the planners: fewer ranks, the smallest ratios that fit, and memory that is never exceeded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import ConfigError, PlanError
from bytescale.config.schema import PlannerConfig
from bytescale.cost.calibration import Calibrator
from bytescale.cost.cluster import Cluster
from bytescale.cost.curve import Curve
from bytescale.cost.links import Links
from bytescale.cost.memory.device_memory import States
from bytescale.cost.memory.measured import MeasuredMemory, MeasuredRows, RingWidths
from bytescale.cost.model import CostModel
from bytescale.cost.offload_rule import OffloadRule
from bytescale.cost.profile import Profile
from bytescale.plan.slices import micro_batch_tokens
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import greedy_plan, naive_plan, paper_plan
from bytescale.planner.calibrated import CalibratedPlanner
from bytescale.planner.rounds.planner import rounds_plan
from bytescale.planner.verified import VerifiedPlanner
from tests.helpers.llama import spec_of_llama

SPEC = spec_of_llama("7b", num_hidden_layers=8, vocab_size=32_000)
KEPT = 168_072.0
"""Bytes that a layer keeps of a token in BF16."""
MODEL = MeasuredMemory(
    states=States(num_parameters=SPEC.total, element_bytes=2, num_ranks=8),
    rows=MeasuredRows(
        saved_per_token=8 * KEPT,
        peak_per_token=9 * KEPT,
        fixed=0.0,
        movable_per_token=6 * KEPT,  # the last two layers stay
        moved_per_token=6 * KEPT,
    ),
    rings=(RingWidths(query=8192, keys=4096, lse=128, wide=2),),
    vocab_size=SPEC.vocab_size,
    head_numbers=SPEC.head,
    hidden_size=SPEC.hidden_size,
    kind="cuda",
    plain_head=True,
    num_layers=8,
)
CAPACITY = 1024
HOST = 4e9
# Attention at 100 TFLOP/s and 25 GB/s to the host: a sequence of 4K tokens can hide some 60 % of its activations.
LINKS = Links(device_to_host_bytes_per_second=25e9, host_to_device_bytes_per_second=25e9)


def rule(host_bytes: float = HOST) -> OffloadRule:
    profile = Profile.from_flops(SPEC, flops_per_second=100e12, links=LINKS)
    kept = Curve(0.0, MODEL.layer_saved_bytes_per_token, 0.0)
    return OffloadRule(
        profile=replace(profile, activation_bytes=kept),
        num_layers=8,
        movable_share=MODEL.limits().movable_share,
        host_bytes=host_bytes,
    )


def cost() -> CostModel:
    return rule().profile.cost_model()


@pytest.mark.parametrize("planner", [naive_plan, paper_plan, greedy_plan, adaptive_plan, rounds_plan])
@given(
    lengths=st.lists(st.integers(1, 12_000), min_size=1, max_size=30),
    num_ranks=st.sampled_from([1, 3, 8, 16]),
    host_bytes=st.sampled_from([1e9, HOST]),
)
def test_plans_keep_device_and_host_memory(planner, lengths: list[int], num_ranks: int, host_bytes: float) -> None:
    cluster = Cluster.uniform(num_ranks, CAPACITY, offload=rule(host_bytes))
    lengths = [min(length, cluster.largest_sequence) for length in lengths]
    plan = planner(lengths, cluster=cluster, cost=cost())
    room = float(MODEL.limits().device_peak(CAPACITY, 0, CAPACITY))
    limits = MODEL.limits(device_bytes=room * (1 + 1e-9), host_bytes=host_bytes * (1 + 1e-9))
    verify(plan, limits=limits)
    tokens = micro_batch_tokens(plan)
    assert not tokens.offloaded[tokens.held <= CAPACITY].any()
    assert tokens.offloaded[tokens.held > CAPACITY].all()


def test_long_sequences_take_fewer_ranks_and_short_ones_stay() -> None:
    lengths = [8192, 512, 700, 1024]
    without = naive_plan(lengths, cluster=Cluster.uniform(16, CAPACITY))
    offloaded = naive_plan(lengths, cluster=Cluster.uniform(16, CAPACITY, offload=rule()))
    assert without.group_sizes.max() == 8
    assert 1 < offloaded.group_sizes.max() < 8
    assert (offloaded.group_offload_ratio > 0).tolist() == (offloaded.group_sizes > 1).tolist()


def test_a_sequence_above_all_capacity_runs_slower_rather_than_not_at_all() -> None:
    """On one rank even what compute does not hide is offloaded: half the layers' activations may go."""
    cluster = Cluster.uniform(1, CAPACITY, offload=rule(host_bytes=np.inf))
    longest = cluster.largest_sequence
    assert longest > 2 * CAPACITY
    plan = adaptive_plan([longest, 100], cluster=cluster, cost=cost())
    assert plan.group_offload_ratio.max() == pytest.approx(1.0, abs=1e-2)
    with pytest.raises(PlanError, match=rf"Sequence 1 has {longest + 50} tokens, but 1 ranks .*too many.*host_gib"):
        adaptive_plan([100, longest + 50], cluster=cluster, cost=cost())


def test_a_straggler_takes_no_room_from_the_longest_sequence() -> None:
    """Equal ranks hold it by offloading, which ranks that differ do not."""
    equal = Cluster.uniform(4, CAPACITY, offload=rule())
    verified = VerifiedPlanner(PlannerConfig(), equal, cost())
    speeds, longest = (1.0, 0.5, 1.0, 1.0), equal.largest_sequence
    planner = CalibratedPlanner(verified, Calibrator(first=cost(), first_speeds=speeds))
    assert longest > 4 * CAPACITY
    plan = planner.plan_step(np.array([longest]), 0)
    assert (plan.group_weights == 1).all()
    assert plan.group_offload_ratio.max() > 0
    plan = planner.plan_step(np.array([2 * CAPACITY] * 4), 0)
    assert len(set(plan.group_weights.tolist())) > 1
    assert not plan.group_offload_ratio.any()
    even = CalibratedPlanner(verified, Calibrator(first=cost()))
    assert even.plan_step(np.array([2 * CAPACITY] * 4), 0).digest() == verified([2 * CAPACITY] * 4).digest()
    with pytest.raises(ConfigError, match="Ranks that differ offload activations"):
        replace(equal, speeds=np.array(speeds))
