"""How much hybrid data parallelism gains where most layers are recurrent: the adaptive plan against a static mesh.

    python benchmarks/recurrent_gain.py [--models 27B 35B-A3B nemotron] [--cells 64:256K 256:1M ...] [--seeds 2]

Batches of 32M tokens of the length distributions, cut at the context, 8K tokens a rank, simulated. A rank is one GPU
with the rates and links of the paper's case study (``paper_assumptions.py``), and nodes have eight. Models have the
shapes of Qwen3.6-27B and 35B-A3B (gated delta net in three of four layers) and of Nemotron 3 Nano 30B-A3B (Mamba 2 in
23 of 29), counted by the code that counts all models. A recurrence counts as six operations for each number of its
state and token, at the rate of matrices. Traffic of sharded parameters is left out, in all columns alike.

    attention     every recurrent layer is an attention layer with as many weights
    free          the hybrid, with states that travel in no time
    hybrid        the hybrid: states travel in a scan, which nothing hides
    messages      messages that nothing hides, states and rings, of the hybrid's adaptive step, on the busiest rank

The first three are static over adaptive seconds of a step, means over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import transformers
from rich.console import Console
from rich.table import Table

import paper_assumptions as paper
from bytescale.common.arrays import IntArray
from bytescale.common.units import format_si, parse_count
from bytescale.cost.cluster import Cluster
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile
from bytescale.cost.spec import ModelSpec
from bytescale.data.length_distributions import sample_lengths
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import static_plan
from bytescale.simulator import ClusterConfig, SimulatedStep, simulate
from bytescale.train.parts.describe import spec_of_content

CELLS = ("64:256K", "256:1M", "512:2M", "1024:2M", "4096:2M")
DEVICE = load_profile("case-study")


def qwen_27b() -> Any:
    shape: dict[str, Any] = {
        "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 48,
    }  # fmt: skip
    return transformers.Qwen3_5TextConfig(**shape)


def nemotron() -> Any:
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    kinds = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
    shape: dict[str, Any] = {
        "layers_block_type": [kinds[letter] for letter in pattern], "hidden_size": 2688, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    }  # fmt: skip
    return transformers.NemotronHConfig(**shape)


MODELS: dict[str, Callable[[], Any]] = {
    "27B": qwen_27b,
    "35B-A3B": transformers.Qwen3_5MoeTextConfig,  # whose defaults it has
    "nemotron": nemotron,
}


def profile_of(spec: ModelSpec) -> Profile:
    """The model on the device of the case study, which is one of the two that share its rank."""
    parts = DEVICE.tensor_parallel
    return Profile.from_flops(
        spec,
        flops_per_second=2 * DEVICE.spec.mean("active_weights") / (parts * DEVICE.rest_forward.linear),
        attention_flops_per_second=DEVICE.spec.mean("pair_numbers") / (parts * DEVICE.attention_forward.quadratic),
        links=DEVICE.links,
    )


def simulated(spec: ModelSpec, lengths: IntArray, num_ranks: int, context: int) -> tuple[SimulatedStep, SimulatedStep]:
    """A step of one batch by a static mesh for the ``context``, and by the adaptive plan."""
    devices = ClusterConfig(num_gpus=num_ranks, gpus_per_node=paper.GPUS_PER_NODE)
    cluster, profile = Cluster.uniform(num_ranks, paper.CAPACITY_TOKENS), profile_of(spec)
    plans = (
        static_plan(lengths, cluster=cluster, cp=context // paper.CAPACITY_TOKENS),
        adaptive_plan(lengths, cluster=cluster, cost=profile.cost_model(ranks_per_node=paper.GPUS_PER_NODE)),
    )
    static, adaptive = (simulate(plan, replace(profile, layer_parameters=0), devices) for plan in plans)
    return static, adaptive


def gains(spec: ModelSpec, lengths: IntArray, num_ranks: int, context: int) -> dict[str, float]:
    """Of one batch, the figures of a row."""
    full = next(layer for layer in spec.layers if layer.pair_numbers)
    rings = {"pair_numbers": full.pair_numbers, "key_numbers": full.key_numbers, "num_heads": full.num_heads}
    attention = replace(
        spec,
        layers=tuple(
            replace(layer, mixers=0, state_numbers=0.0, **rings) if layer.mixers else layer for layer in spec.layers
        ),
    )
    free = replace(spec, layers=tuple(replace(layer, state_numbers=0.0) for layer in spec.layers))
    row: dict[str, float] = {}
    for name, model in (("attention", attention), ("free", free), ("hybrid", spec)):
        static, adaptive = simulated(model, lengths, num_ranks, context)
        row[name] = static.step_seconds / adaptive.step_seconds
        row["messages"] = float(adaptive.exposed_ring.max()) / adaptive.step_seconds
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cells", nargs="+", default=CELLS, help="RANKS:CONTEXT")
    parser.add_argument("--data", nargs="+", default=paper.DATA_SETS)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    console = Console()
    for name in arguments.models:
        spec = spec_of_content(MODELS[name]().to_dict())
        title = (
            f"{name}: {format_si(spec.total)} parameters, {100 * spec.share_with('mixers'):.0f} % of layers recurrent"
        )
        table = Table("data", "ranks", "context", "attention", "free", "hybrid", "messages", title=title)
        for data in arguments.data:
            for cell in arguments.cells:
                ranks, context = cell.split(":")
                rows = [
                    gains(spec, sample_lengths(data, paper.BATCH_TOKENS, seed, parse_count(context)), int(ranks),
                          parse_count(context))
                    for seed in range(arguments.seeds)
                ]  # fmt: skip
                means = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
                table.add_row(
                    data, ranks, context, *(f"{means[key]:.2f}" for key in ("attention", "free", "hybrid")),
                    f"{100 * means['messages']:.1f} %",
                )  # fmt: skip
        console.print(table)


if __name__ == "__main__":
    main()
