"""``bytescale demo``: trains on ranks of this machine, measures the planners there, and simulates them on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from rich import box
from rich.table import Table

from bytescale.cli.costs import corpus_batches
from bytescale.cli.train import TrainOptions, read_options, start_training
from bytescale.common.arrays import IntArray
from bytescale.common.environment import ranks_of_torchrun
from bytescale.common.errors import BytescaleError
from bytescale.common.units import format_count, format_seconds
from bytescale.config.load import DEMO_CONFIG
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import Config, ModelConfig, PlannerConfig, PlannerName
from bytescale.cost.assumed import Rates
from bytescale.cost.cluster import Cluster
from bytescale.cost.profile import Profile
from bytescale.planner.make import make_planner
from bytescale.simulator import ClusterConfig, SimulatedStep, simulate, step_seconds
from bytescale.simulator.draw import draw_steps
from bytescale.train.reporting.screen import console_of

GPUS = (64, 512)
CAPACITY_TOKENS = 8192
"""Tokens that a simulated GPU holds."""
PLANNERS: tuple[PlannerName, ...] = ("static", "naive", "adaptive")
_MODEL = "7b"
_BUCKET_MIB = 64.0


@dataclass(frozen=True, kw_only=True)
class DemoOptions(TrainOptions):
    """Show hybrid data parallelism on this machine: bytescale demo [CONFIG] [options].

    A small model is trained on 8 ranks. Then the next batches run under the static, the naive and the adaptive planner,
    and their times and losses are printed. At last the same lengths are simulated on 64 and 512 GPUs. With CONFIG, or
    with --resume, all of this is done for a run of your own.
    """

    command: ClassVar[str] = "demo"
    compares: ClassVar[bool] = True


def run(arguments: Sequence[str]) -> int:
    options = read_options(arguments, DemoOptions, DEMO_CONFIG)
    start_training(options)
    if options.dry_run or ranks_of_torchrun() is not None:
        return 0
    simulate_at_scale(options.config)
    from bytescale.train.reporting.run_log import next_lines

    print("\n".join(next_lines(options.config, options.config.trainer.steps)))
    print("        train on your own text: write this config, and set data.sources in it")
    print("          bytescale init my.toml")
    return 0


def simulate_at_scale(config: Config) -> None:
    """Print and draw what the batches after the run would take on ``GPUS``, with longer documents."""
    console = console_of()
    context = GPUS[0] * CAPACITY_TOKENS
    times = -(-context // config.data.context_length)
    corpus, batches = corpus_batches(config.data, first=config.trainer.steps, number=GPUS[-1] // GPUS[0])
    from bytescale.train.parts.describe import spec_of_content  # imports torch

    model = resolve_model(ModelConfig(preset=_MODEL), tokenizer_vocab_size=corpus.metadata.vocab_size)
    profile = Rates().profile(spec_of_content(model.content))
    console.print(
        f"scale   simulated: the same documents, but {times} times as long (the longest of {format_count(context)} "
        f"tokens), in a model of {_MODEL.upper()} on H100s that hold {format_count(CAPACITY_TOKENS)} tokens each"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("GPUs", "tokens", *PLANNERS, "adaptive over static"):
        table.add_column(name, justify="right", no_wrap=True)
    for num_gpus in GPUS:
        lengths = times * np.concatenate([batch.lengths for batch in batches[: num_gpus // GPUS[0]]])
        steps = simulated_steps(lengths, num_gpus, profile, context=times * config.data.context_length)
        seconds = [step.step_seconds for step in steps.values()]
        cells = [format_seconds(one) for one in seconds]
        faster = f"{seconds[0] / seconds[-1]:.2f} times as fast"
        table.add_row(str(num_gpus), format_count(int(lengths.sum())), *cells, faster)
    console.print(table)
    picture = Path(config.trainer.run_dir) / f"{GPUS[-1]}-gpus.png"
    try:
        draw_steps(steps, picture)
        console.print(f"        the last row as a picture: {picture}")
    except BytescaleError as error:  # matplotlib is missing; all else is done
        console.print(f"        no picture: {error}")


def simulated_steps(lengths: IntArray, num_gpus: int, profile: Profile, *, context: int) -> dict[str, SimulatedStep]:
    """Simulate one step of all sequences on ``num_gpus`` ranks, under every planner."""
    cluster = ClusterConfig(num_gpus=num_gpus, gradient_bucket_mib=_BUCKET_MIB)
    cost = profile.cost_model(ranks_per_node=cluster.ranks_per_node, pipeline_parallel=1)
    ranks = Cluster.uniform(num_gpus, CAPACITY_TOKENS)
    step = partial(step_seconds, profile=profile, cluster=cluster)
    planners = {
        name: make_planner(PlannerConfig(name=name), ranks, cost, context_length=context, step_seconds=step)
        for name in PLANNERS
    }
    return {name: simulate(planner(lengths), profile, cluster) for name, planner in planners.items()}
