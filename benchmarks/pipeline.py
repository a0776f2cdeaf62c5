"""Measures the pipeline executor: its bubble, its overhead, and the value of counting bubbles in the planner.

    python benchmarks/pipeline.py [--rounds 5] [--json FILE]

1. Bubble: real gloo ranks run one stage each, with micro-batches of equal lengths. The result is the share of time in
   which stages wait, beside (p - 1) / (m + p - 1) of an ideal 1F1B. The machine needs one core per stage. If stages
   share a core, the waiting says nothing.
2. Overhead: the CPU seconds of a stage's thread per micro-batch, with messages, for a model with a single product. This
   is what the executor costs beside the model's operations.
3. Objective: the value of counting bubbles. The paper's pipelined models run under plain 1F1B, on the first batches of
   32M tokens that have a sequence of 2M. The table compares Algorithm 2's PP-Balance, the adaptive plan made without
   knowledge of the stages (then aligned, so that it cannot hang), the adaptive plan with bubbles in its objective, and
   all compute spread evenly.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tests.helpers.forks import run_forked
from tests.hf.mesh_steps import rank_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import paper_assumptions as paper
from bytescale.attention import select_kernel
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.cost.profile import Profile
from bytescale.data.length_distributions import sample_lengths
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.planner.adaptive.aligned import align, aligned
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import paper_plan
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.simulator import ClusterConfig, simulate
from bytescale.train.reporting.work import named_clocks

TOKENS = 512
STAGES = 2
MICRO_BATCHES = (2, 4, 8, 16)
CONTEXT = 2**21


class Tokens:
    """Draw random tokens for one micro-batch."""

    def __init__(self, num_tokens: int, vocabulary: int) -> None:
        self.tokens = torch.randint(vocabulary, (num_tokens,))
        self.labels = self.tokens.roll(-1)
        self.position_ids = torch.arange(num_tokens)
        self.weights = None


class Nothing(nn.Module):
    """A part of a model that multiplies by one number."""

    hidden_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.head_weight = torch.zeros(16, self.hidden_size)

    def forward(self, inputs: Tensor, position_ids: Tensor, attention: object) -> Tensor:
        if inputs.dim() == 1:
            inputs = torch.ones(len(inputs), self.hidden_size)
        return inputs * self.scale


def equal_micro_batches(count: int, num_tokens: int) -> RankPlan:
    """Return a plan for one pipeline with ``count`` sequences of the same length."""
    plan = Plan.build(
        lengths=[num_tokens] * count,
        capacity_tokens=[num_tokens],
        groups=[GroupSpec(sequences=[number], ranks=[0]) for number in range(count)],
        schedule=[[[number] for number in range(count)]],
    )
    return RankPlan.of(plan, 0)


def open_mesh(num_stages: int) -> Mesh:
    """Run a pipeline of forked ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = RankGroup(dist.group.WORLD)
    return Mesh.of(world, MeshShape(hdp=1, pp=num_stages), lambda _, ranks: dist.new_group(list(ranks)))


def measured_steps(mesh: Mesh, part: Decoder, count: int, num_tokens: int, rounds: int) -> list[dict[str, float]]:
    """Return each round's wall seconds, the seconds spent waiting for messages, and this thread's CPU seconds."""
    rank_plan, data = equal_micro_batches(count, num_tokens), [Tokens(num_tokens, 16) for _ in range(count)]
    kernel = select_kernel("auto", torch.device("cpu"), torch.float32)
    results = []
    clocks = [clock for waits in named_clocks(mesh).values() for clock in waits]
    for _ in range(rounds + 1):
        dist.barrier()
        for clock in clocks:
            clock.take()
        started, cpu = time.perf_counter(), time.thread_time()
        Executor(part=part, kernel=kernel, mesh=mesh).run(rank_plan, data, num_global_targets=count * num_tokens)
        dist.barrier()
        results.append(
            {
                "wall": time.perf_counter() - started,
                "wait": sum(clock.take()() for clock in clocks),
                "cpu": time.thread_time() - cpu,
            }
        )
    return results[1:]  # the first round is a warm-up


def bubble(rounds: int) -> list[dict[str, float]]:
    """Measure the idle share of all stages for each number of micro-batches."""
    config = LlamaConfig(
        num_hidden_layers=8, hidden_size=256, num_attention_heads=4, intermediate_size=768, vocab_size=64
    )

    def one_rank(_: int) -> dict[int, list[dict[str, float]]]:
        mesh = open_mesh(STAGES)
        torch.manual_seed(0)
        model = rank_model(AutoModelForCausalLM.from_config(config), mesh)
        part = model.executor(mesh, select_kernel("auto", torch.device("cpu"), torch.float32)).part
        return {count: measured_steps(mesh, part, count, TOKENS, rounds) for count in MICRO_BATCHES}

    ranks = run_forked(STAGES, one_rank, timeout_seconds=540)
    rows = []
    for count in MICRO_BATCHES:
        shares = []
        for steps in zip(*(rank[count] for rank in ranks), strict=True):
            wall = max(step["wall"] for step in steps)
            # Idle time: a stage waits for a message, or at the end for the other stage.
            shares.append(1 - sum(step["cpu"] for step in steps) / (STAGES * wall))
        ideal = (STAGES - 1) / (count + STAGES - 1)
        rows.append({"micro_batches": count, "ideal": ideal, "measured": statistics.median(shares)})
    return rows


def overhead(rounds: int) -> dict[str, float]:
    """Measure the CPU milliseconds per micro-batch of each stage's thread, with a model that does nothing."""
    count = 64

    def one_rank(_: int) -> list[dict[str, float]]:
        return measured_steps(open_mesh(STAGES), Decoder(module=Nothing()), count, 16, rounds)

    ranks = run_forked(STAGES, one_rank, timeout_seconds=120)
    return {
        f"stage {stage}": 1e3 * statistics.median(step["cpu"] for step in steps) / count
        for stage, steps in enumerate(ranks)
    }


def on_the_papers_cluster(model: paper.PaperModel) -> tuple[ClusterConfig, Profile, Cluster, CostModel]:
    """Return the devices of ``model`` in section 8, their profile, and both in the form that planners take."""
    tp, pp = model.layout(paper.CAPACITY_TOKENS)
    devices = ClusterConfig(num_gpus=model.num_gpus, gpus_per_node=paper.GPUS_PER_NODE, tp=tp, pp=pp)
    profile = model.profile(tp)
    cost = profile.cost_model(ranks_per_node=devices.ranks_per_node, pipeline_parallel=pp)
    return devices, profile, Cluster.uniform(devices.num_ranks, paper.CAPACITY_TOKENS), cost


def objective(num_batches: int) -> list[dict[str, Any]]:
    """Simulate the step seconds of every batch for every planner. One row per pipelined model and data set."""
    rows = []
    for model in paper.MODELS:
        if not model.pipelined:
            continue
        devices, profile, cluster, cost = on_the_papers_cluster(model)
        given = {"cluster": cluster, "cost": cost}
        planners: dict[str, Callable[..., Plan]] = {
            "paper": partial(aligned(paper_plan), pipeline=True, **given),
            "ignored": lambda lengths, given=given: align(adaptive_plan(lengths, **given), **given),
            "counted": partial(adaptive_plan, num_stages=devices.pp, **given),
        }
        for data_set in paper.DATA_SETS:
            drawn = ((seed, sample_lengths(data_set, paper.BATCH_TOKENS, seed, CONTEXT)) for seed in itertools.count())
            longest = ((seed, batch) for seed, batch in drawn if batch.max() == CONTEXT)
            seeds, batches = zip(*itertools.islice(longest, num_batches), strict=True)
            seconds = {
                name: [simulate(plan(batch), profile, devices).step_seconds for batch in batches]
                for name, plan in planners.items()
            }
            seconds["even"] = [float(cost.work_seconds(batch).sum()) / devices.num_ranks for batch in batches]
            about = {"model": model.name, "pp": devices.pp, "data_set": data_set, "seeds": seeds}
            rows.append({**about, "seconds": seconds})
    return rows


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("bubble", "overhead", "objective"))
    options = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {
        "bubble": lambda: bubble(options.rounds),
        "overhead": lambda: overhead(options.rounds),
        "objective": lambda: objective(options.batches),
    }
    results = {name: part() for name, part in parts.items() if options.only in (None, name)}
    print_tables(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def print_tables(results: dict[str, Any]) -> None:
    """Print one table per part."""
    console = Console()
    if "bubble" in results:
        table = Table("micro-batches", "ideal idle share", "measured", title=f"1F1B on {STAGES} gloo ranks")
        for row in results["bubble"]:
            table.add_row(str(row["micro_batches"]), f"{row['ideal']:.1%}", f"{row['measured']:.1%}")
        console.print(table)
    if "overhead" in results:
        table = Table("stage", "CPU ms per micro-batch", title="executor with a model that does nothing")
        for stage, milliseconds in results["overhead"].items():
            table.add_row(stage, f"{milliseconds:.2f}")
        console.print(table)
    if "objective" in results:
        print_objective(console, results["objective"])


def print_objective(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print means over the batches."""
    names = ("paper", "ignored", "counted", "even")
    title = f"bubbles in the objective: simulated seconds, {len(rows[0]['seeds'])} batches with 2M"
    table = Table("model", "pp", "data", "PP-Balance", *names[1:], "ignored / counted", title=title)
    for row in rows:
        seconds = {name: statistics.mean(row["seconds"][name]) for name in names}
        gain = seconds["ignored"] / seconds["counted"]
        shown = (f"{seconds[name]:.1f}" for name in names)
        table.add_row(row["model"], str(row["pp"]), row["data_set"], *shown, f"{gain:.2f}x")
    console.print(table)


if __name__ == "__main__":
    main()
