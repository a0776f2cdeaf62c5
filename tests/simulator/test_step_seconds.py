"""The time by which the adaptive planner compares plans is the simulator's, and no baseline's step is shorter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.arrays import IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.links import Links
from bytescale.cost.offload_rule import OffloadRule
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile
from bytescale.plan import Plan
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.aligned import aligned
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import greedy_plan, naive_plan, paper_plan, static_plan
from bytescale.simulator import ClusterConfig, simulate, step_seconds
from tests.helpers.effort import examples
from tests.helpers.llama import spec_of_llama

CAPACITY, CASE_STUDY = 8192, load_profile("case-study")


@dataclass(frozen=True)
class Job:
    """A batch and what it runs on."""

    lengths: IntArray
    profile: Profile
    devices: ClusterConfig
    cluster: Cluster
    context: int

    def seconds(self, plan: Plan) -> float:
        return step_seconds(plan, self.profile, self.devices, speeds=self.cluster.speeds)

    def planned(self, planner: Callable[..., Plan], **given: object) -> Plan:
        cost = self.profile.cost_model(ranks_per_node=self.devices.ranks_per_node, pipeline_parallel=self.devices.pp)
        return planner(self.lengths, cluster=self.cluster, cost=cost, **given)


@st.composite
def jobs(draw: st.DrawFn, *, most_stages: int = 1) -> Job:
    """Links from a hundredth to ten times the case study's, and a gradient sync from none to most of a step."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_ranks, stages = draw(st.integers(1, 70)), draw(st.integers(1, most_stages))
    near, far, latency = 10 ** random.uniform(-2, 1, 3)
    links = replace(
        CASE_STUDY.links,
        intra_node_bytes_per_second=near * CASE_STUDY.links.intra_node_bytes_per_second,
        inter_node_bytes_per_second=far * CASE_STUDY.links.inter_node_bytes_per_second,
        latency_seconds=latency * CASE_STUDY.links.latency_seconds,
    )
    heads = spec_of_llama("7b", **CASE_STUDY.model.config, num_key_value_heads=int(random.choice([1, 4, 32])))
    checkpointing = draw(st.sampled_from(["none", "full", "attention"]))
    profile = replace(CASE_STUDY.scaled_to(heads, tensor_parallel=1), links=links, checkpointing=checkpointing)
    unequal = draw(st.booleans())
    capacity = random.choice([CAPACITY, 2 * CAPACITY], num_ranks) if unequal else np.full(num_ranks, CAPACITY)
    speeds = random.choice([0.5, 1.0, 2.0], num_ranks) if unequal else np.ones(num_ranks)
    cluster = Cluster(capacity_tokens=capacity, speeds=speeds)
    if draw(st.booleans()) and stages == 1 and cluster.is_uniform:
        movable = (profile.spec.num_layers - 2) / profile.spec.num_layers
        rule = OffloadRule(profile=profile, num_layers=profile.spec.num_layers, movable_share=movable, host_bytes=1e11)
        cluster = replace(cluster, offload=rule)
    longest = min(cluster.largest_sequence, cluster.room)
    shortest = int(random.choice([16, min(2048, longest)]))
    lengths = np.exp(random.uniform(np.log(shortest), np.log(longest), draw(st.integers(1, 60)))).astype(np.int64)
    devices = ClusterConfig(
        num_gpus=num_ranks * stages,
        gpus_per_node=int(random.choice([1, 4, 8])),
        pp=stages,
        gradient_bucket_mib=float(random.choice([0.0, 16.0, 256.0])),
    )
    context = int(random.integers(0, 2 * num_ranks * CAPACITY))
    return Job(np.clip(lengths, 1, longest), profile, devices, cluster, context)


def baselines(job: Job) -> dict[str, Callable[..., Plan]]:
    """As ``make_planner`` and ``bytescale plan`` make them, those that can hold the batch."""
    is_piped = job.devices.pp > 1
    planners: dict[str, Callable[..., Plan]] = {
        "naive": naive_plan,
        "greedy": greedy_plan,
        "paper": partial(paper_plan, pipeline=is_piped),
    }
    if job.lengths.max() <= job.cluster.num_ranks * job.cluster.capacity_tokens.min():
        planners |= {"static": static_plan, "static-context": partial(static_plan, context=job.context)}
    return {name: aligned(planner) if is_piped else planner for name, planner in planners.items()}


def no_baseline_is_earlier(job: Job) -> None:
    given_to_ours = {"num_stages": job.devices.pp, "context": job.context, "step_seconds": job.seconds}
    plan = job.planned(adaptive_plan, **given_to_ours)
    verify(plan, num_stages=job.devices.pp)
    ours = job.seconds(plan)
    for name, planner in baselines(job).items():
        assert ours <= job.seconds(job.planned(planner)) * (1 + 1e-9), name


@examples(25, 400)
@given(job=jobs())
def test_no_baseline_s_step_is_shorter(job: Job) -> None:
    """By construction, gradient sync included: rings, grids, ranks that differ, offloading, large and small batches."""
    no_baseline_is_earlier(job)


@examples(6, 120)
@given(job=jobs(most_stages=5))
def test_no_baseline_s_step_is_shorter_in_a_pipeline(job: Job) -> None:
    no_baseline_is_earlier(job)


@examples(25, 250)
@given(job=jobs(), planner=st.sampled_from(["naive", "greedy", "paper", "adaptive"]))
def test_the_quick_step_time_is_the_simulator_s(job: Job, planner: str) -> None:
    """Without events on a heap: to rounding, because sums are made in another order."""
    plan = job.planned((baselines(job) | {"adaptive": adaptive_plan})[planner])
    step = simulate(plan, job.profile, job.devices, speeds=job.cluster.speeds)
    assert job.seconds(plan) == pytest.approx(step.step_seconds, rel=1e-12)


def test_a_small_batch_is_planned_for_its_gradient_sync() -> None:
    """Five sequences on 64 ranks: the plan with the shortest makespan has more of its gradient sync visible."""
    links = Links(intra_node_bytes_per_second=300e9, inter_node_bytes_per_second=40e9, latency_seconds=1e-5)
    tiny = spec_of_llama("tiny", vocab_size=4096)
    job = Job(
        lengths=np.array([1038, 4096, 4096, 3369, 760]),
        profile=Profile.from_flops(tiny, flops_per_second=400e12, launch_seconds=5e-5, links=links),
        devices=ClusterConfig(num_gpus=64, gradient_bucket_mib=1.0),
        cluster=Cluster.uniform(64, 1024),
        context=0,
    )
    by_makespan = job.planned(adaptive_plan)
    by_step = job.planned(adaptive_plan, step_seconds=job.seconds)
    mesh = job.planned(static_plan)
    assert job.seconds(by_step) <= job.seconds(mesh) < job.seconds(by_makespan)
