"""``bytescale simulate``: simulates one step on a modelled cluster of any size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from bytescale.cli.costs import CostOptions, costs_of, read_batch, read_cost_options
from bytescale.cli.plan import memory_in_words
from bytescale.common.units import format_bytes, format_count, format_seconds, format_si
from bytescale.cost.profile import Profile
from bytescale.plan import Plan
from bytescale.plan.io import load_plan
from bytescale.plan.verify import verify
from bytescale.simulator import ClusterConfig, SimulatedStep
from bytescale.simulator.draw import draw_steps
from bytescale.simulator.trace import save_trace, simulated_tracks, spread_evenly
from bytescale.train.reporting.screen import Console, console_of

_TRACED_RANKS = 64
_LARGE_SYNC = 0.3
"""From this share of the gradient sync on, a step is told to be small for its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(CostOptions):
    """Simulate one step: bytescale simulate [CONFIG.toml] --parallel.ranks 16384 --parallel.tp 8 [options]."""

    plan: Path | None = None
    """A .npz plan to simulate instead. It comes from a run folder or from bytescale plan --save."""
    png: Path | None = None
    """Draw all ranks over time into this file."""
    trace: Path | None = None
    """Write a Chrome trace (for ui.perfetto.dev) of up to 64 ranks, picked evenly, to this file."""


def run(arguments: Sequence[str]) -> int:
    """Run ``bytescale simulate``: plan, simulate, print, and write the files that were asked for."""
    options = read_cost_options(SimulateOptions, arguments, prog="bytescale simulate")
    console = console_of()
    if options.plan is not None:
        plan, origin = load_plan(options.plan), str(options.plan)
        verify(plan)
        costs = costs_of(options, longest=int(plan.lengths.max()))
    else:
        batch = read_batch(options.batch, options.config.data)
        longest, pictures = int(batch.lengths.max()), batch.pictures
        costs = costs_of(options, longest=longest, vocab_size=batch.vocab_size, pictures=pictures)
        plan, origin = costs.planner(options.config.planner.name)(batch.lengths), batch.origin
    profile, cluster = costs.checkpointed_profile, costs.cluster
    began = time.perf_counter()
    step = costs.simulated(plan)
    seconds = time.perf_counter() - began
    console.print(
        f"{cluster.num_gpus} devices as {plan.num_ranks} ranks of tp {cluster.tp} x pp {cluster.pp}; "
        f"{plan.num_sequences} sequences of {format_count(plan.num_tokens)} tokens ({origin}); plan: {plan.planner}; "
        f"times from {profile.name}"
    )
    print_step(console, step, profile, plan, cluster)
    console.print(memory_in_words(plan, costs))
    console.print(f"simulated in {format_seconds(seconds)}")
    if options.png is not None:
        draw_steps({plan.planner: step}, options.png)
        console.print(f"wrote {options.png}")
    if options.trace is not None:
        shown = spread_evenly(plan.num_ranks, _TRACED_RANKS)
        save_trace([track for rank in shown for track in simulated_tracks(step, rank)], options.trace)
        console.print(f"wrote {options.trace}: open it in https://ui.perfetto.dev")
    return 0


def print_step(console: Console, step: SimulatedStep, profile: Profile, plan: Plan, cluster: ClusterConfig) -> None:
    squares = profile.spec.squares_of(plan.lengths)
    done = profile.spec.training_flops(num_tokens=plan.num_tokens, sum_of_squares=squares)
    rate = done / step.step_seconds / cluster.num_gpus
    console.print(
        f"step {format_seconds(step.step_seconds)}, {format_si(step.tokens_per_second)} tokens/s, "
        f"{format_si(rate)}FLOP/s per device (attention counted by "
        + ("what its windows reach)" if profile.spec.windows else "the sum of s^2)")
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("time of a rank", no_wrap=True)
    for name in ("mean share", "least", "most"):
        table.add_column(name, justify="right", no_wrap=True)
    names = {"ring": "ring, exposed", "offload": "offload, exposed", "members": "slower members"}
    if plan.domain > 1:
        names["pp bubble"] = "rounds and gathers"
    shares = step.shares()
    for key, values in step.parts.items():
        least, most = format_seconds(float(values.min())), format_seconds(float(values.max()))
        table.add_row(names.get(key, key), f"{shares[key]:.1%}", least, most)
    console.print(table, soft_wrap=False)
    if shares["gradient sync"] > _LARGE_SYNC:
        console.print(
            f"the gradient sync takes {shares['gradient sync']:.0%} of the step: model and batch are small for so many "
            "devices"
        )
    traffic = step.traffic
    console.print(
        f"sent by all devices: ring {format_bytes(traffic.ring_intra_node)} inside nodes, "
        f"{format_bytes(traffic.ring_inter_node)} across; pipeline {format_bytes(traffic.pipeline)}; gradients and "
        f"parameters {format_bytes(traffic.gradient_sync)}; to host {format_bytes(traffic.offload)}"
    )
