"""``bytescale train --dry-run``: everything up to the first forward, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from bytescale.common.units import format_si
from bytescale.config import AttachedArchitecture, Config, resolve_model
from bytescale.config.validate import check_mesh, hdp_ranks
from bytescale.cost import CostModel, flops
from bytescale.cost.profile_file import warn_of_bad_fits
from bytescale.data.loading.corpus import check_vocabulary, prepare_corpus
from bytescale.data.order.batches import make_sampler
from bytescale.data.tokens.progress import progress_bar
from bytescale.plan.summary import gist
from bytescale.train.parts.budget import MemoryBudget, memory_budget, rank_device
from bytescale.train.parts.devices import Devices
from bytescale.train.parts.job import measured_profile, planning_cost, predicting_profile, step_times, verified_planner
from bytescale.train.parts.run_kernels import open_kernels
from bytescale.train.profiling.peak import device_name
from bytescale.train.ranks import choose_device, choose_dtype
from bytescale.train.reporting.run_log import describe_corpus


def dry_run(config: Config, print_line: Callable[[str], None] = print) -> None:
    """Prepare the data, plan and verify the first batch, and say what would run. Starts nothing, makes no run folder.

    Raises what ``train`` would raise before its first step.
    """
    device = choose_device(config.trainer.device, 0, 1)
    dtype = choose_dtype(config.trainer.dtype, device)
    with open_kernels(config, device, dtype) as kernels:
        kernel_lines = kernels.lines()
    with progress_bar() as progress:
        corpus = prepare_corpus(config.data, progress, text_later=True)
        batch = make_sampler(corpus.index, config.data).next_batch()
    architecture = resolve_model(config.model, tokenizer_vocab_size=corpus.metadata.vocab_size)
    check_vocabulary(corpus.metadata, architecture.vocab_size)
    ranks = config.parallel.ranks
    if isinstance(architecture, AttachedArchitecture):
        (described, memory, cost), times = _attached(config, architecture, device, dtype), None
    else:
        check_mesh(config.parallel, architecture, ranks)
        devices = Devices.alike(rank_device(config, device, dtype, ranks), hdp_ranks(config.parallel))
        profile = measured_profile(config, architecture, {device_name(device, dtype)})
        warn_of_bad_fits(profile)
        memory = memory_budget(config, architecture, device=device, dtype=dtype, devices=devices, profile=profile)
        cost = planning_cost(config, profile, architecture, device, dtype, ranks_per_node=ranks)
        predicting = predicting_profile(config, profile, architecture, device, dtype)
        times = step_times(config, predicting, hdp_ranks(config.parallel), ranks_per_node=ranks)
        described = f"{format_si(flops.total_parameters(architecture))} parameters"
    plan = verified_planner(config, memory, cost, hdp_ranks(config.parallel), times)(batch.lengths)
    print_line(f"model   {described} on {ranks} x {device.type}")
    print_line(f"data    {describe_corpus(corpus.metadata)}")
    for line in (*kernel_lines, *memory.lines()):
        print_line(line)
    print_line(f"plan    {gist(plan)}")
    print_line(f"run     {config.trainer.steps} steps into {config.trainer.run_dir} (dry run: nothing was started)")


def _attached(
    config: Config, architecture: AttachedArchitecture, device: torch.device, dtype: torch.dtype
) -> tuple[str, MemoryBudget, CostModel]:
    """Load a model that runs on transformers' own code, attach it and measure it, as one rank."""
    from bytescale.train.parts.attached_model import build_attached_model  # imports transformers

    with open_kernels(config, device, dtype) as kernels:
        model = build_attached_model(config, architecture, kernels.attention, device=device, dtype=dtype, num_shards=1)
        return (
            model.describe(),
            model.memory(config, device, config.parallel.ranks),
            replace(model.cost(device), ranks_per_node=config.parallel.ranks),
        )
