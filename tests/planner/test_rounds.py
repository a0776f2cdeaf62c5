"""The planner of rounds: how close to the bound, in how many rounds, and what a lockstep makespan is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.arrays import FloatArray
from bytescale.common.errors import ConfigError
from bytescale.config.schema import PlannerConfig
from bytescale.cost.assumed import MeshCosts
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.data.length_distributions import sample_lengths
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.aligned import align
from bytescale.planner.baselines import static_plan
from bytescale.planner.evaluate import evaluate, run_rounds
from bytescale.planner.make import make_planner
from bytescale.planner.rounds.planner import rounds_plan
from tests.helpers.effort import examples
from tests.helpers.llama import spec_of_llama
from tests.helpers.plans import random_plan
from tests.planner.helpers import COSTS, IDEAL, LINKS, cases, heavy_tailed

COUNTED = MeshCosts(kind="cuda", bytes_per_element=2).assumed(spec_of_llama("7b"))
CAPACITY = 8192


@pytest.mark.parametrize("cost", [IDEAL, COUNTED], ids=["free", "counted"])
@pytest.mark.parametrize("data", ["github", "byted"])
@pytest.mark.parametrize("num_ranks", [8, 64])
def test_mixed_lengths_take_few_rounds_close_to_the_bound(num_ranks: int, data: str, cost: CostModel) -> None:
    """Within 3 % of all compute spread evenly. 256 and 1024 ranks: ``benchmarks/planner_rounds.py``."""
    cluster = Cluster.uniform(num_ranks, CAPACITY)
    lengths = sample_lengths(data, max(2**20, 2**16 * num_ranks), 40_000, min(num_ranks * CAPACITY, 2**21))
    plan = rounds_plan(lengths, cluster=cluster, cost=cost)
    verify(plan)
    outcome = evaluate(plan, cluster=cluster, cost=cost)
    assert outcome.over_ideal <= 1.03
    assert plan.rank_rounds.max() <= -(-int(lengths.sum()) // (num_ranks * CAPACITY)) + 2
    assert outcome.traffic_tokens <= 2 * outcome.minimal_traffic_tokens


@pytest.mark.parametrize("data", ["github", "byted"])
def test_a_batch_of_hardly_more_than_one_round_is_shared_out_evenly(data: str) -> None:
    """Its short sequences fill no round, so the long ones have to end together. 64 and 1024 ranks: the benchmark."""
    lengths, cluster = sample_lengths(data, 2**13 * 256, 71_000, 2**21), Cluster.uniform(256, CAPACITY)
    plan = rounds_plan(lengths, cluster=cluster, cost=COUNTED)
    verify(plan)
    assert evaluate(plan, cluster=cluster, cost=COUNTED).over_ideal <= 1.12
    assert plan.rank_rounds.max() <= -(-int(lengths.sum()) // (256 * CAPACITY)) + 2


@examples(20, 150)
@given(
    case=cases(),
    cost=st.sampled_from(["links", "grids", "blocks"]),
    gathers=st.sampled_from([0.0, 0.3, 3.0]),
    data=st.data(),
)
def test_never_slower_than_a_static_mesh(
    case: tuple[list[int], Cluster], cost: str, gathers: float, data: st.DataObject
) -> None:
    lengths, cluster = case
    divisors = [domain for domain in range(1, cluster.num_ranks + 1) if cluster.num_ranks % domain == 0]
    domain = data.draw(st.sampled_from(divisors))
    even = float(COSTS[cost].work_seconds(lengths).sum()) / cluster.num_ranks
    model = replace(COSTS[cost], gather_seconds=gathers * even)
    plan = rounds_plan(lengths, cluster=cluster, cost=model, domain=domain)
    verify(plan)
    mesh = replace(static_plan(lengths, cluster=cluster), domain=domain)
    ends = [evaluate(one, cluster=cluster, cost=model).end_seconds for one in (plan, mesh)]
    assert ends[0] <= ends[1] * (1 + 1e-9)


def rounds_slowly(plan: Plan, seconds: FloatArray) -> list[float]:
    """The twin of ``run_rounds``: when each domain has ended its last round, by sets and a clock for each domain."""
    clock = [0.0] * (plan.num_ranks // plan.domain)
    for number in range(max(int(plan.rank_rounds.max()), 0)):
        home: dict[int, set[int]] = {}
        own: dict[int, float] = {}
        for micro_batch in np.flatnonzero(plan.micro_batch_rounds == number).tolist():
            domain = int(plan.micro_batch_ranks[micro_batch]) // plan.domain
            own[domain] = max(own.get(domain, 0.0), float(seconds[micro_batch]))
            group = plan.ranks_of(int(plan.groups_of(micro_batch)[0])) // plan.domain
            joined = set(group.tolist()) | {domain}
            for other in set(joined):
                joined |= home.get(other, {other})
            for other in joined:
                home[other] = joined
        for joined in {frozenset(some) for some in home.values()}:
            end = max(clock[domain] for domain in joined) + max(own[domain] for domain in joined)
            for domain in joined:
                clock[domain] = end
    return clock


@examples(30, 200)
@given(count=st.integers(1, 14), domain=st.integers(1, 4), domains=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_rounds_equal_a_clock_for_each_domain(count: int, domain: int, domains: int, seed: int) -> None:
    num_ranks = domain * domains
    plan = random_plan([7] * count, num_ranks, seed)
    plan = align(plan, cluster=Cluster.uniform(num_ranks, int(plan.capacity_tokens[0])), cost=IDEAL)
    plan = replace(plan, domain=domain)
    verify(plan)
    seconds = np.random.default_rng(seed).uniform(0.5, 2.0, plan.num_micro_batches)
    _, ends = run_rounds(plan, seconds[None])
    assert ends[0].max(axis=0) == pytest.approx(rounds_slowly(plan, seconds), rel=1e-12)


def test_a_round_takes_as_long_as_its_slowest_rank_and_its_gathers() -> None:
    """Two ranks: 3 and 1 seconds in the first round, 2 and 5 in the second, and 4 on the first rank in the third."""
    cost, cluster = CostModel(attention_seconds_per_pair=0.0, token_seconds=1.0), Cluster.uniform(2, 5)
    plan = Plan.build(
        lengths=[3, 1, 2, 5, 4],
        capacity_tokens=cluster.capacity_tokens,
        groups=[GroupSpec(sequences=[number], ranks=[rank]) for number, rank in enumerate((0, 1, 0, 1, 0))],
        schedule=[[[0], [2], [4]], [[1], [3]]],
    )
    ends = []
    for domain, gathers in ((1, 9.0), (2, 0.0), (2, 4.5)):
        model = replace(cost, gather_seconds=gathers)
        ends.append(evaluate(replace(plan, domain=domain), cluster=cluster, cost=model).rank_end_seconds.tolist())
    assert ends == [[9, 6], [3 + 5 + 4] * 2, [4.5 + 5 + 4.5] * 2]


@pytest.mark.parametrize(("capacity", "over"), [((8, 4, 4, 6), 1.2), ((8, 4, 6), 1.25)])
def test_ranks_that_differ_get_work_by_their_speed(capacity: tuple[int, ...], over: float) -> None:
    """In the second case, capacity is not in proportion to speed."""
    speeds = np.resize((2.0, 1.0, 1.0, 1.5), 24)
    cluster = Cluster(capacity_tokens=1024 * np.resize(capacity, 24), speeds=speeds)
    for seed in range(4):
        plan = rounds_plan(sample_lengths("github", 2**21, seed, 2**16), cluster=cluster, cost=IDEAL)
        verify(plan)
        assert evaluate(plan, cluster=cluster, cost=IDEAL).over_ideal <= over


@examples(10, 100)
@given(case=cases(max_ranks=20, max_sequences=40), data=st.data(), cost=st.sampled_from(sorted(COSTS)))
def test_any_ranks_that_differ(case: tuple[list[int], Cluster], data: st.DataObject, cost: str) -> None:
    lengths, cluster = case
    capacity = [data.draw(st.integers(1, 3)) * int(cluster.capacity_tokens[0]) for _ in range(cluster.num_ranks)]
    speeds = [data.draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in capacity]
    plan = rounds_plan(
        lengths, cluster=Cluster(capacity_tokens=np.array(capacity), speeds=np.array(speeds)), cost=COSTS[cost]
    )
    verify(plan)
    assert plan.lengths.tolist() == lengths


def test_a_planner_for_domains_is_made_from_a_configuration() -> None:
    cluster, lengths = Cluster.uniform(8, 64), heavy_tailed(80, 300, 0)
    for name in ("adaptive", "static", "greedy", "paper", "naive"):
        plan = make_planner(PlannerConfig(name=name), cluster, LINKS, domain=4)(lengths)  # type: ignore[arg-type]
        verify(plan)
        assert plan.domain == 4
        assert plan.planner.startswith(name if name != "adaptive" else "")
    with pytest.raises(ConfigError, match="lockstep domain of 3 ranks does not divide 8 ranks"):
        make_planner(PlannerConfig(), cluster, LINKS, domain=3)
