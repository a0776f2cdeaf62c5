"""``bytescale train --dry-run``: everything up to the first forward, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from bytescale.common.units import format_bytes, format_count, format_si
from bytescale.config import Config, resolve_architecture
from bytescale.cost import Cluster, flops
from bytescale.cost.assumed import assumed_cost
from bytescale.data import BatchSampler, check_vocabulary, prepare_corpus
from bytescale.data.progress import progress_bar
from bytescale.plan.summary import gist
from bytescale.train.job import verified_planner
from bytescale.train.run_log import describe_corpus


def dry_run(config: Config, print_line: Callable[[str], None] = print) -> None:
    """Prepare the data, plan and verify the first batch, and say what would run. Starts nothing, makes no run folder.

    Raises what ``train`` would raise before its first step.
    """
    with progress_bar() as progress:
        corpus = prepare_corpus(config.data, progress)
    architecture = resolve_architecture(config.model, tokenizer_vocab_size=corpus.facts.vocab_size)
    check_vocabulary(corpus.facts, architecture.vocab_size)
    batch = BatchSampler(corpus, config.data.batch_tokens, config.data.shuffle_seed).next_batch()
    element_bytes = {"bf16": 2, "fp64": 8}.get(config.trainer.dtype, 4)
    cluster = Cluster.uniform(config.parallel.ranks, config.parallel.capacity_tokens)
    device: Literal["cpu", "cuda"] = "cuda" if config.trainer.device == "cuda" else "cpu"
    cost = assumed_cost(architecture, device=device, bytes_per_element=element_bytes)
    plan = verified_planner(config, cluster, cost)(batch.lengths)
    parameters = flops.total_parameters(architecture)
    activations = config.parallel.capacity_tokens * flops.activation_bytes_per_token(
        architecture, bytes_per_element=element_bytes
    )
    # Weights, fp32 gradients, and this rank's share of fp32 master weights and two Adam moments (ZeRO-1).
    states = parameters * (element_bytes + 4) + parameters * 12 // config.parallel.ranks
    print_line(f"model   {format_si(parameters)} parameters; {format_bytes(states)} of states a rank")
    print_line(f"data    {describe_corpus(corpus.facts)}")
    print_line(
        f"memory  {format_bytes(activations)} of activations a rank for a full micro-batch of "
        f"{format_count(config.parallel.capacity_tokens)} tokens"
    )
    print_line(f"plan    {gist(plan)}")
    print_line(f"run     {config.trainer.steps} steps into {config.trainer.run_dir} (dry run: nothing was started)")
