"""The simulator agrees with the planners' own evaluation, a second program that computes the same times."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.cost.cluster import Cluster
from bytescale.cost.curve import Curve
from bytescale.cost.links import Links
from bytescale.cost.profile import Profile
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import greedy_plan, naive_plan, paper_plan, static_plan
from bytescale.planner.evaluate import evaluate
from bytescale.simulator import ClusterConfig, simulate
from tests.helpers.effort import examples
from tests.simulator.plans import hybrid, local_plan, profile

PLANNERS = {
    "static": static_plan,
    "naive": naive_plan,
    "paper": paper_plan,
    "greedy": greedy_plan,
    "adaptive": adaptive_plan,
}
RANKS, CAPACITY, NODE = 8, 64, 4


def in_proportion(*, links: Links) -> Profile:
    """Backward is twice forward in every term, so that folding the two directions, as planners do, loses nothing."""
    return replace(
        profile(quadratic=0.05),
        attention_forward=Curve(0.05, 0.1, 1.0),
        attention_backward=Curve(0.1, 0.2, 2.0),
        ring_forward_bytes_per_token=1.0,
        ring_backward_bytes_per_token=2.0,
        links=links,
    )


@examples(26, 80)
@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=8), num_stages=st.integers(2, 4))
def test_the_bubbles_of_one_pipeline(lengths: list[int], num_stages: int) -> None:
    """The planner's formula is never below 1F1B as simulated, exact for equal micro-batches, within 20 % for falls."""
    for given_lengths, within in ((lengths, 1.5), (sorted(lengths)[::-1], 1.2), ([lengths[0]] * len(lengths), 1.0)):
        model = in_proportion(links=Links())
        (layer,) = model.spec.layers
        spec = replace(model.spec, layers=(replace(layer, count=2 * num_stages),))
        model = replace(model, layer_parameters=0, spec=spec)
        cost = model.cost_model(pipeline_parallel=num_stages)
        plan = local_plan([given_lengths], CAPACITY)
        cluster = Cluster.uniform(1, CAPACITY)
        expected = evaluate(plan, cluster=cluster, cost=cost, num_stages=num_stages).end_seconds
        end = simulate(plan, model, ClusterConfig(num_gpus=num_stages, pp=num_stages)).rank_seconds.max()
        assert end * (1 - 1e-9) <= expected <= end * within * (1 + 1e-9)


@pytest.mark.parametrize("planner", PLANNERS)
@examples(8, 25)
@given(lengths=st.lists(st.integers(1, RANKS * CAPACITY), min_size=1, max_size=20), recurrent=st.booleans())
def test_equal_ends_with_ideal_links_and_no_later_ones_with_real(
    planner: str, lengths: list[int], recurrent: bool
) -> None:
    """With real links the simulator may end earlier: it hides the first transfer behind local attention as well."""
    cluster = Cluster.uniform(RANKS, CAPACITY)
    devices = ClusterConfig(num_gpus=RANKS, gpus_per_node=NODE)
    for links, ideal in (
        (Links(), True),
        (Links(intra_node_bytes_per_second=0.5, inter_node_bytes_per_second=0.1), False),
    ):
        model = in_proportion(links=links)
        model = hybrid(model, 0.0 if ideal else 0.75) if recurrent else model
        cost = model.cost_model(ranks_per_node=NODE)
        plan = PLANNERS[planner](np.array(lengths), cluster=cluster, cost=cost)
        outcome = evaluate(plan, cluster=cluster, cost=cost)
        step = simulate(plan, replace(model, layer_parameters=0), devices)
        end = step.rank_seconds.max()
        if ideal:
            assert end == pytest.approx(outcome.end_seconds)
            np.testing.assert_allclose(step.rank_seconds, outcome.rank_end_seconds)
        else:
            assert end <= outcome.end_seconds * (1 + 1e-9)
