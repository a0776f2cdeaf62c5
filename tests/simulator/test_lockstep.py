"""Domains in lockstep: every forward and backward of a round together, gathers beside them, a reduction at the end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import ConfigError
from bytescale.cost.cluster import Cluster
from bytescale.cost.gradient_sync import gather_bytes, round_seconds, sync_bytes
from bytescale.cost.links import Links
from bytescale.cost.profile_file import load_profile
from bytescale.plan.verify import verify
from bytescale.planner.evaluate import evaluate
from bytescale.planner.rounds.planner import rounds_plan
from bytescale.simulator import ClusterConfig, simulate, step_seconds
from tests.helpers.effort import examples
from tests.helpers.llama import spec_of_llama
from tests.simulator.plans import local_plan, profile

WEIGHTS = 4 * 10 + 1
"""Of four layers of 10 weights, and a vocabulary of one word."""
FORWARD, BACKWARD = 4 * 10 + 2 * 1, 3 * 10 + 1
"""Weights that are gathered: forward opens the tied matrix at both ends, and the last layer and the head stay open."""
SLOW = Links(intra_node_bytes_per_second=1.0, inter_node_bytes_per_second=1.0)
CASE_STUDY = load_profile("case-study").scaled_to(spec_of_llama("7b"), tensor_parallel=1)


def test_a_round_ends_with_its_slowest_forward_and_backward() -> None:
    """Two ranks of two rounds; a token of the four layers takes 4 seconds forward and 8 backward."""
    plan = replace(local_plan([[3, 2], [1, 5]]), domain=2)
    step = simulate(plan, profile(), ClusterConfig(num_gpus=2))
    forward, backward = step.timeline.start[:, 0, 0], step.timeline.start[:, 0, 1]
    assert sorted(forward.tolist()) == [0, 0, 36, 36]
    assert sorted(backward.tolist()) == [12, 12, 56, 56]
    assert step.step_seconds == step_seconds(plan, profile(), ClusterConfig(num_gpus=2)) == 12 * (3 + 5)
    free = simulate(replace(plan, domain=1), profile(), ClusterConfig(num_gpus=2))
    assert free.step_seconds == 12 * 6


def test_gathers_set_the_pace_of_short_rounds_and_count_as_waiting() -> None:
    """A layer of 10 weights; 8 bytes of gathers and gradients for each of them pass a link of 1 byte a second."""
    model = replace(profile(), layer_parameters=10, parameter_bytes=2, links=SLOW)
    forward, backward = round_seconds(model, domain=2, ranks_per_node=8)
    assert forward == pytest.approx(FORWARD * 2 / 2)
    assert backward == pytest.approx(BACKWARD * 2 / 2 + WEIGHTS * 4 / 2)
    plan = replace(local_plan([[1, 50], [1]]), domain=2)
    step = simulate(plan, model, ClusterConfig(num_gpus=2))
    assert step.step_seconds == pytest.approx(forward + backward + 12 * 50)
    spent = step.compute + step.exposed_ring + step.wait_members + step.dp_bubble + step.pp_bubble + step.sync_seconds
    assert spent == pytest.approx(np.full((2, 1), step.step_seconds))
    assert step.traffic.gradient_sync == pytest.approx(2 * 2 * gather_bytes(model, WEIGHTS, 2))


def test_between_domains_gradients_are_reduced_once() -> None:
    model = replace(profile(), layer_parameters=10, parameter_bytes=2, links=SLOW)
    plan = replace(local_plan([[9], [9], [9], [9]]), domain=2)
    step = simulate(plan, model, ClusterConfig(num_gpus=4, gpus_per_node=2))
    between = sync_bytes(model, WEIGHTS / 2, 2)
    rounds = max(9 * 4, FORWARD) + max(9 * 8, BACKWARD + 2 * WEIGHTS)
    assert step.step_seconds == pytest.approx(rounds + between)


@examples(6, 40)
@given(seed=st.integers(0, 10**6), domain=st.sampled_from([2, 4, 8, 16]))
def test_planner_and_simulator_agree_on_lockstep_plans(seed: int, domain: int) -> None:
    """The planner's time of a step is the simulator's without what is reduced between domains at the end."""
    random = np.random.default_rng(seed)
    lengths = np.exp(random.uniform(np.log(200), np.log(16 * 8000), 60)).astype(np.int64)
    cluster, devices = Cluster.uniform(16, 8192), ClusterConfig(num_gpus=16)
    a_round = round_seconds(CASE_STUDY, domain=domain, ranks_per_node=8)
    cost = replace(CASE_STUDY.cost_model(ranks_per_node=8), gather_seconds=sum(a_round))
    plan = rounds_plan(lengths, cluster=cluster, cost=cost, domain=domain)
    verify(plan)
    step = simulate(plan, CASE_STUDY, devices)
    end = evaluate(plan, cluster=cluster, cost=cost).end_seconds
    # Forward and backward of a round wait for gathers each for itself, which the planner's one number cannot tell. The
    # simulator's sync holds what the last round's reduction takes longer than its compute, too.
    assert end * (1 - 1e-9) <= step.step_seconds
    assert step.step_seconds - step.sync_seconds.max() <= end * 1.25


def test_pipelines_are_refused() -> None:
    plan = replace(local_plan([[3], [1]]), domain=2)
    with pytest.raises(ConfigError, match=r"domains of 2 ranks in lockstep, but parallel\.pp is 2"):
        simulate(plan, profile(), ClusterConfig(num_gpus=4, pp=2))


def test_an_update_in_host_memory_takes_its_time() -> None:
    """28 bytes of each weight, of which two ranks have a half each, at 2 bytes a second, in both simulations."""
    model = replace(profile(), layer_parameters=10, links=Links(host_update_bytes_per_second=2))
    for domain in (1, 2):
        plan, on_host = (
            replace(local_plan([[3], [5]]), domain=domain),
            ClusterConfig(num_gpus=2, optimizer_on_host=True),
        )
        before = simulate(plan, model, ClusterConfig(num_gpus=2)).step_seconds
        assert simulate(plan, model, on_host).step_seconds == pytest.approx(before + 28 * WEIGHTS / 2 / 2)
        assert step_seconds(plan, model, on_host) == pytest.approx(before + 28 * WEIGHTS / 2 / 2)
