"""``bytescale plan``: plans one batch with several planners and compares the plans."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from bytescale.cli.batch_source import read_batch
from bytescale.cli.costs import CostOptions, Costs, costs_of
from bytescale.cli.options import leading_path, parse
from bytescale.cli.plan_report import Planned, memory_in_words, print_comparison, print_details
from bytescale.common.arrays import IntArray
from bytescale.common.errors import PlanError
from bytescale.common.limits import limits
from bytescale.common.units import format_count
from bytescale.config import Config, PlannerName, TrainerConfig, load_config
from bytescale.config.validate import hdp_ranks
from bytescale.plan.io import save_plan
from bytescale.plan.verify import verify
from bytescale.simulator import ClusterConfig, simulate
from bytescale.simulator.draw import draw_steps


@dataclass(slots=True, kw_only=True)
class PlanOptions(CostOptions):
    """Plan one batch: bytescale plan [CONFIG.toml] [options].

    With a config, the batch comes from its corpus and the ranks are its ranks. Without one, the batch comes from
    --batch.lengths FILE, or from a length distribution of the paper.
    """

    ranks: int = field(default=512, metadata=limits(least=1))
    """Number of HDP ranks."""
    ranks_per_node: int = field(default=8, metadata=limits(least=1))
    """Consecutive ranks that share a node."""
    tp: int = field(default=1, metadata=limits(least=1))
    """Tensor parallelism: the number of devices that share the matrices of a rank."""
    pp: int = field(default=1, metadata=limits(least=1))
    """Pipeline parallelism: the number of stages. Each stage has some of the layers, on its own devices."""
    virtual_stages: int = field(default=1, metadata=limits(least=1))
    """Chunks of layers on each stage. With more than one, the stages are interleaved."""
    planners: tuple[PlannerName, ...] = ("static", "naive", "paper", "adaptive")
    """Planners to compare. Details are shown for the last one."""
    png: Path | None = None
    """Draw all ranks over time, one panel per planner, into this file."""
    save: Path | None = None
    """Write the plan of the last planner to this .npz file."""
    json: bool = False
    """Print JSON instead of tables."""

    def layout(self, trainer: TrainerConfig) -> ClusterConfig:
        """Return the devices of the simulated cluster."""
        return ClusterConfig(
            num_gpus=self.ranks * self.tp * self.pp,
            gpus_per_node=self.ranks_per_node * self.tp,
            tp=self.tp,
            pp=self.pp,
            virtual_stages=self.virtual_stages,
            gradient_bucket_mib=trainer.gradient_bucket_mib,
        )


def run(arguments: Sequence[str]) -> int:
    """Run ``bytescale plan``. Returns the exit code."""
    path, rest = leading_path(arguments)
    config = load_config(path) if path else None
    options = parse(PlanOptions, rest, prog="bytescale plan", default=_defaults(config))
    return plan_command(options, config)


def plan_command(options: PlanOptions, config: Config | None = None) -> int:
    """Plan, compare, print, and write the wanted files. Raises what reading, planning and drawing raise."""
    console = Console(soft_wrap=True, highlight=False)
    layout = options.layout(config.trainer if config else TrainerConfig())
    lengths, origin, vocab_size = read_batch(options.batch, config)
    costs = costs_of(options, config, layout, longest=int(lengths.max()), vocab_size=vocab_size)
    planned, refused = _plan_all(options, lengths, costs)
    ideal = float(costs.cost_model.work_seconds(lengths).sum()) / options.ranks
    chosen = list(planned)[-1]
    if options.json:
        print(json.dumps(_as_dict(planned, ideal)))
    else:
        console.print(
            f"{len(lengths)} sequences of {format_count(int(lengths.sum()))} tokens ({origin}; longest "
            f"{format_count(int(lengths.max()))}) on {options.ranks} ranks of "
            f"{format_count(costs.capacity_tokens)} tokens{devices_in_words(options)}; times from {costs.profile.name}"
        )
        print_comparison(console, planned, ideal)
        for name, why in refused.items():
            console.print(f"{name}: {why}")
        print_details(console, chosen, planned, costs.cost_model)
        words = memory_in_words(planned[chosen].plan, costs.memory, costs.usable_bytes)
        console.print(words)
    for written in _write_files(options, planned, chosen):
        if not options.json:
            console.print(f"wrote {written}")
    return 0


def _write_files(options: PlanOptions, planned: dict[str, Planned], chosen: str) -> list[Path]:
    """Write the files that were asked for, and return their paths."""
    if options.save is not None:
        save_plan(planned[chosen].plan, options.save)
    if options.png is not None:
        draw_steps({name: item.step for name, item in planned.items()}, options.png)
    return [path for path in (options.save, options.png) if path is not None]


def devices_in_words(options: PlanOptions) -> str:
    """Describe the devices of a rank if it has more than one."""
    layout = [f"{name} {number}" for name, number in (("tp", options.tp), ("pp", options.pp)) if number > 1]
    chunks = f", {options.virtual_stages} chunks of layers a stage" if options.virtual_stages > 1 else ""
    return f" ({' x '.join(layout)} devices each{chunks})" if layout else ""


def _defaults(config: Config | None) -> PlanOptions:
    if config is None:
        return PlanOptions()
    return PlanOptions(
        **CostOptions.defaults_of(config),
        ranks=hdp_ranks(config.parallel),
        tp=config.parallel.tp,
        pp=config.parallel.pp,
        virtual_stages=config.parallel.virtual_stages,
    )


def _plan_all(options: PlanOptions, lengths: IntArray, costs: Costs) -> tuple[dict[str, Planned], dict[str, str]]:
    """Return the plan of every planner, and a reason for every planner that has none.

    For example, a static mesh does not exist for every number of ranks, and a naive plan may hang in interleaved
    stages. Raises the last planner's ``PlanError`` if no planner has a plan.
    """
    planned: dict[str, Planned] = {}
    refused: dict[str, str] = {}
    for name in options.planners:
        planner = costs.planner(name)
        began = time.perf_counter()
        try:
            plan = planner(lengths)
            seconds = time.perf_counter() - began
            verify(plan)
            step = simulate(plan, costs.checkpointed_profile, costs.cluster)
            planned[name] = Planned(plan=plan, step=step, planning_seconds=seconds)
        except PlanError as error:
            refused[name] = str(error)
            if len(refused) == len(options.planners):
                raise
    return planned, refused


def _as_dict(planned: dict[str, Planned], ideal_seconds: float) -> dict[str, object]:
    rows = {
        name: {
            "step_seconds": item.step.step_seconds,
            "imbalance": item.imbalance,
            "waiting": item.waiting,
            "ring_bytes": item.ring_bytes,
            "planning_seconds": item.planning_seconds,
            "shares": item.step.shares(),
        }
        for name, item in planned.items()
    }
    return {"ideal_seconds": ideal_seconds, "planners": rows}
