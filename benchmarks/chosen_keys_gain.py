"""How much hybrid data parallelism gains where an indexer chooses the keys of each query: DeepSeek V3.2, GLM-5.

    python benchmarks/chosen_keys_gain.py [--models deepseek_v32 glm_moe_dsa] [--cells 64:256K 256:1M ...] [--seeds 2]

Batches of the length distributions, cut at the context, 8K tokens a rank, simulated on the device of the paper's case
study, as in ``recurrent_gain.py``. Models have the defaults of their configurations in transformers, counted by the
code that counts all models. Traffic of sharded parameters is left out, in all columns alike.

    full          static over adaptive seconds of a step, if every query saw all earlier keys: rings of keys and values
    chosen        the same with the chosen keys: index keys and latents travel
    step          seconds of the adaptive step with all keys, over those with the chosen ones
    messages      share of the adaptive step that messages take on the busiest rank, chosen keys
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

import paper_assumptions as paper
from bytescale.common.arrays import IntArray
from bytescale.common.units import parse_count
from bytescale.cost.spec import ModelSpec
from bytescale.data.length_distributions import sample_lengths
from bytescale.train.parts.describe import spec_of_content
from recurrent_gain import CELLS, simulated

MODELS = ("deepseek_v32", "glm_moe_dsa")


def with_all_keys(spec: ModelSpec, content: dict[str, int]) -> ModelSpec:
    """The same model without its indexers, whose queries see all keys."""
    heads = content["num_attention_heads"]
    numbers = heads * (content["qk_nope_head_dim"] + content["qk_rope_head_dim"] + content["v_head_dim"])
    plain = {"pair_numbers": float(numbers), "key_numbers": float(numbers), "chosen_numbers": 0.0, "num_chosen": 0}
    return replace(spec, layers=tuple(replace(layer, **plain) for layer in spec.layers))


def gains(chosen: ModelSpec, full: ModelSpec, lengths: IntArray, num_ranks: int, context: int) -> dict[str, float]:
    """Of one batch, the figures of a row."""
    row, seconds = dict[str, float](), dict[str, float]()
    for name, spec in (("full", full), ("chosen", chosen)):
        static, adaptive = simulated(spec, lengths, num_ranks, context)
        row[name], seconds[name] = static.step_seconds / adaptive.step_seconds, adaptive.step_seconds
        row["messages"] = float(adaptive.exposed_ring.max()) / adaptive.step_seconds
    return row | {"step": seconds["full"] / seconds["chosen"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cells", nargs="+", default=CELLS, help="RANKS:CONTEXT")
    parser.add_argument("--data", nargs="+", default=paper.DATA_SETS)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    table = Table("model", "data", "ranks", "context", "full", "chosen", "step", "messages")
    for model in arguments.models:
        content = AutoConfig.for_model(model).to_dict()
        chosen = spec_of_content(content)
        full = with_all_keys(chosen, content)
        for data in arguments.data:
            for cell in arguments.cells:
                ranks, context = int(cell.split(":")[0]), parse_count(cell.split(":")[1])
                rows = [
                    gains(chosen, full, sample_lengths(data, paper.BATCH_TOKENS, seed, context), ranks, context)
                    for seed in range(arguments.seeds)
                ]
                mean = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
                figures = (f"{mean[name]:.2f}" for name in ("full", "chosen", "step"))
                table.add_row(model, data, str(ranks), cell.split(":")[1], *figures, f"{100 * mean['messages']:.1f} %")
    Console().print(table)


if __name__ == "__main__":
    main()
