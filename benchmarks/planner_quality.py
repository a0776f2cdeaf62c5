"""Compares the adaptive planner with bounds, rivals and an exact solver, on random batches with modelled links.

    python benchmarks/planner_quality.py rivals [--count 1000]     against greedy, fewest ranks, paper and mesh
    python benchmarks/planner_quality.py exact [--count 500]       against OR-tools CP-SAT (pip install ortools)
    python benchmarks/planner_quality.py hang [--count 10000]      every planner's plans, verified for 1 to 8 stages
    python benchmarks/planner_quality.py grids [--count 1000]      simulated steps with grids against those with rings
    python benchmarks/planner_quality.py fewest [--count 40]       traffic against that of the fewest ranks, ideal links

``rivals``: batches have 1 to 3000 sequences of three kinds of lengths, on 1 to 300 ranks. Rings are from fully hidden
to three times too slow. The bound includes exposed communication (``planner.adaptive.target``). It holds for plans in
which no sequence shares its group with another.

``exact``: 2 to 8 ranks and 2 to 12 sequences. CP-SAT chooses every degree and every start. The ranks of a group need
not be neighbours, and one sequence is one group. If CP-SAT does not prove its answer in time, our plan is compared with
both its best answer and its bound. The optimum lies between the two.

``hang``: the planners that training uses plan the batches of ``rivals``, each with a random number of stages.
``verify`` checks every rule, including that no ranks wait for each other in a cycle under 1F1B.

``grids``: 4 to 3000 ranks with links from a tenth to ten times the case study's, H = G to H = 32 G. The simulator
tells when the last rank ends with the adaptive planner's plan, and with its plan of rings alone.

``fewest``: batches of 32M tokens of byted on ``--ranks``. If the traffic of a plan is above 1.05 times that of the
fewest ranks, CP-SAT is asked whether a plan with the fewest ranks can end in time at all. Its model has jobs of fixed
width on R machines. It has only the wide jobs, and times are rounded down. Therefore "INFEASIBLE" is a proof, and any
other answer proves nothing.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.config.schema import PlannerConfig
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.adaptive.target import Batch
from bytescale.planner.baselines import greedy_plan, paper_plan, static_plan
from bytescale.planner.evaluate import evaluate
from bytescale.planner.make import make_planner
from bytescale.simulator import simulate
from planner_batches import cost_model, random_batch, random_grid_batch, random_small_batch, sample

NUM_TOKENS, CAPACITY, MOST_TRAFFIC, MOST_END, WIDE = 2**25, 8192, 1.05, 1.01, 55
RIVALS = {
    "greedy": greedy_plan,
    "fewest": partial(greedy_plan, num_buckets=1),
    "paper": paper_plan,
    "static": static_plan,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rivals", "exact", "hang", "grids", "fewest"))
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--solver-seconds", type=float, default=2.0)
    parser.add_argument("--ranks", default="96,160,192,224,256,288,320,352,384,416,448", help="for fewest")
    arguments = parser.parse_args()
    if arguments.what == "rivals":
        against_rivals(arguments.first_seed, arguments.count or 1000)
    elif arguments.what == "fewest":
        for num_ranks in map(int, arguments.ranks.split(",")):
            against_fewest(num_ranks, arguments.first_seed, arguments.count or 40, arguments.solver_seconds)
    elif arguments.what == "grids":
        against_rings(arguments.first_seed, arguments.count or 1000)
    elif arguments.what == "hang":
        verify_pipelines(arguments.first_seed, arguments.count or 10_000)
    else:
        against_exact(arguments.first_seed, arguments.count or 500, arguments.solver_seconds)


def against_rivals(first_seed: int, count: int) -> None:
    over_bound, milliseconds, later = [], [], []
    for seed in range(first_seed, first_seed + count):
        lengths, cluster, cost = random_batch(seed)
        start = time.process_time()
        plan = adaptive_plan(lengths, cluster=cluster, cost=cost)
        milliseconds.append(1e3 * (time.process_time() - start))
        verify(plan)
        ours = evaluate(plan, cluster=cluster, cost=cost).end_seconds
        ends = {
            name: evaluate(planner(lengths, cluster=cluster, cost=cost), cluster=cluster, cost=cost).end_seconds
            for name, planner in RIVALS.items()
        }
        best = min(ends, key=lambda name: ends[name])
        over_bound.append(ours / Batch.of(np.sort(lengths)[::-1].copy(), cluster, cost).target)
        if ours > ends[best] * (1 + 1e-9):
            later.append((ours / ends[best], seed, best))
    print(f"{count} batches: later than the best rival on {len(later)} {sorted(later, reverse=True)[:5]}")
    print(
        f"end / bound: mean {np.mean(over_bound):.4f}, 95 % {np.quantile(over_bound, 0.95):.3f}, "
        f"worst {max(over_bound):.3f}; milliseconds: median {np.median(milliseconds):.1f}, "
        f"mean {np.mean(milliseconds):.1f}, worst {max(milliseconds):.0f}"
    )


def against_rings(first_seed: int, count: int) -> None:
    gains, slower, milliseconds = [], [], []
    for seed in range(first_seed, first_seed + count):
        lengths, profile, devices = random_grid_batch(seed)
        cost = profile.cost_model(ranks_per_node=devices.ranks_per_node)
        cluster = Cluster.uniform(devices.num_ranks, CAPACITY)
        start = time.process_time()
        grids = adaptive_plan(lengths, cluster=cluster, cost=cost)
        milliseconds.append(1e3 * (time.process_time() - start))
        rings = adaptive_plan(lengths, cluster=cluster, cost=replace(cost, row_bytes_per_token=None))
        verify(grids)
        seconds = [simulate(plan, profile, devices).rank_seconds.max() for plan in (rings, grids)]
        gains.append(seconds[0] / seconds[1])
        if gains[-1] < 1 - 1e-9:
            slower.append((gains[-1], seed))
        if (seed - first_seed + 1) % 100 == 0:
            print(f"{seed - first_seed + 1} batches, slower: {len(slower)}", flush=True)
    gain = np.array(gains)
    print(
        f"{count} batches from seed {first_seed} on: slower with grids {len(slower)} {sorted(slower)[:5]}; faster by "
        f"more than 1 % {int((gain > 1.01).sum())}; gain mean {gain.mean():.2f}, best {gain.max():.1f}; "
        f"milliseconds: median {np.median(milliseconds):.1f}, mean {np.mean(milliseconds):.1f}, "
        f"worst {max(milliseconds):.0f}"
    )


def against_exact(first_seed: int, count: int, solver_seconds: float) -> None:
    ratios, gaps, proven, milliseconds, unsolved = [], [], [], [], 0
    for seed in range(first_seed, first_seed + count):
        lengths, cluster, cost = random_small_batch(seed)
        start = time.process_time()
        plan = adaptive_plan(lengths, cluster=cluster, cost=cost)
        milliseconds.append(1e3 * (time.process_time() - start))
        ours = evaluate(plan, cluster=cluster, cost=cost).end_seconds
        end, bound, is_proven = exact_end(lengths, cluster, cost, solver_seconds, ours)
        gaps.append(ours / max(bound, work_bound(lengths, cluster, cost)))
        if end == 0:
            unsolved += 1
            continue
        ratios.append(ours / end)
        if is_proven:
            proven.append(ratios[-1])
        if (seed - first_seed + 1) % 100 == 0:
            print(f"{seed - first_seed + 1} instances, {len(proven)} proved", flush=True)
    print(
        f"{count} instances, {unsolved} without any answer from CP-SAT: ours / CP-SAT mean {np.mean(ratios):.4f}, "
        f"median {np.median(ratios):.4f}, worst {max(ratios):.3f}, best {min(ratios):.3f}; "
        f"{np.mean(milliseconds):.1f} ms a plan; the {len(proven)} solved to proof: mean {np.mean(proven or [1]):.4f}, "
        f"worst {max(proven or [1]):.3f}; ours / bound on all: mean {np.mean(gaps):.4f}, median {np.median(gaps):.4f}, "
        f"95 % {np.quantile(gaps, 0.95):.3f}, worst {max(gaps):.3f}"
    )


def against_fewest(num_ranks: int, first_seed: int, count: int, solver_seconds: float) -> None:
    cost, cluster = cost_model("ideal"), Cluster.uniform(num_ranks, CAPACITY)
    traffic, ends, above = [], [], []
    for seed in range(first_seed, first_seed + count):
        lengths = sample("byted", NUM_TOKENS, seed, min(num_ranks * CAPACITY, 2**21))
        outcome = evaluate(adaptive_plan(lengths, cluster=cluster, cost=cost), cluster=cluster, cost=cost)
        traffic.append(outcome.traffic_tokens / max(outcome.minimal_traffic_tokens, 1))
        ends.append(outcome.over_ideal)
        if traffic[-1] > MOST_TRAFFIC:
            verdict = fewest_ranks_verdict(lengths, cluster, cost, MOST_END * outcome.ideal_seconds, solver_seconds)
            above.append(f"seed {seed} {traffic[-1]:.3f} (fewest ranks {verdict})")
    print(
        f"{num_ranks} ranks, {count} batches: traffic mean {np.mean(traffic):.4f}, worst {max(traffic):.3f}, end worst "
        f"{max(ends):.4f}; above {MOST_TRAFFIC}: {len(above)} {', '.join(above)}",
        flush=True,
    )


def fewest_ranks_verdict(lengths: IntArray, cluster: Cluster, cost: CostModel, latest: float, seconds: float) -> str:
    """Ask CP-SAT whether all sequences of at least ``WIDE`` ranks can end by ``latest`` on the fewest ranks."""
    from ortools.sat.python import cp_model

    model, horizon = cp_model.CpModel(), 20_000
    fewest = cluster.fewest_ranks(lengths)
    wide = fewest >= WIDE
    intervals = []
    for work, degree in zip(cost.work_seconds(lengths[wide]).tolist(), fewest[wide].tolist(), strict=True):
        size = int(work / degree / latest * horizon)
        start = model.new_int_var(0, horizon - size, "")
        intervals.append(model.new_fixed_size_interval_var(start, size, ""))
    model.add_cumulative(intervals, fewest[wide].tolist(), cluster.num_ranks)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, 1
    return str(solver.status_name(solver.solve(model)))


def work_bound(lengths: IntArray, cluster: Cluster, cost: CostModel) -> float:
    """Return a lower bound: all compute spread evenly, and the longest sequence on its best degree."""
    degrees = np.arange(cluster.fewest_ranks(lengths.max(keepdims=True))[0], cluster.num_ranks + 1)
    longest = np.full(len(degrees), float(lengths.max()))
    alone = cost.group_seconds(longest, longest**2, degrees, degrees > cost.ranks_per_node).min()
    return max(float(cost.work_seconds(lengths).sum()) / cluster.num_ranks, float(alone))


def verify_pipelines(first_seed: int, count: int) -> None:
    configs = {
        "naive": PlannerConfig(name="naive"),
        "paper": PlannerConfig(name="paper"),
        "greedy": PlannerConfig(name="greedy"),
        "adaptive": PlannerConfig(name="adaptive"),
    }
    num_plans, num_shared, began = 0, 0, time.perf_counter()
    for seed in range(first_seed, first_seed + count):
        lengths, cluster, cost = random_batch(seed)
        num_stages = int(np.random.default_rng(seed).integers(1, 9))
        for config in configs.values():
            plan = make_planner(config, cluster, cost, num_stages=num_stages)(lengths)
            verify(plan, num_stages=num_stages)  # raises PlanError
            num_plans += 1
            num_shared += int((plan.group_sizes > 1).sum())
        if (seed - first_seed + 1) % 1000 == 0:
            print(f"{seed - first_seed + 1} batches, {time.perf_counter() - began:.0f} s", flush=True)
    print(
        f"{count} batches, 1 to 8 stages, {num_plans} plans of {', '.join(configs)} with {num_shared} shared groups: "
        f"every rule of verify holds, none can hang ({time.perf_counter() - began:.0f} s)"
    )


def exact_end(
    lengths: IntArray, cluster: Cluster, cost: CostModel, seconds: float, ours: float
) -> tuple[float, float, bool]:
    """Return CP-SAT's makespan (0: none found in time), its lower bound, and whether both are equal.

    The model schedules jobs, each of a width to be chosen, on R machines. CP-SAT is asked for a makespan of at most
    ``ours``, so it either proves that its answer is optimal or that there is none. Times are rounded down to 1 / 20,000
    of the evenly spread work, so the lower bound is valid. Degrees that are no faster than a narrower one are left out.
    A redundant constraint helps the solver: the sum of width times time is at most R times the makespan.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    capacity, num_ranks = int(cluster.capacity_tokens[0]), cluster.num_ranks
    scale = 2e4 * num_ranks / float(cost.work_seconds(lengths).sum())
    latest = int(ours * scale)
    end = model.new_int_var(0, latest, "end")
    intervals, widths, areas = [], [], []
    for length in lengths.tolist():
        start = model.new_int_var(0, latest, "")
        chosen, least = [], np.inf
        for degree in range(-(-length // capacity), num_ranks + 1):
            taken = float(cost.group_seconds(length, float(length) ** 2, degree, degree > cost.ranks_per_node))
            size = int(taken * scale)
            if taken >= least or size > latest:
                continue
            least = taken
            is_chosen = model.new_bool_var("")
            intervals.append(model.new_optional_fixed_size_interval_var(start, size, is_chosen, ""))
            widths.append(degree)
            areas.append(degree * size * is_chosen)
            model.add(end >= start + size).only_enforce_if(is_chosen)
            chosen.append(is_chosen)
        model.add_exactly_one(chosen)
    model.add_cumulative(intervals, widths, num_ranks)
    model.add(sum(areas) <= num_ranks * end)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return ours, ours, True
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    best = solver.objective_value / scale if found else 0.0
    return best, solver.best_objective_bound / scale, status == cp_model.OPTIMAL


if __name__ == "__main__":
    main()
