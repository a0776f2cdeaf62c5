"""``bytescale train --dry-run``: everything up to the first forward, without ranks."""

from __future__ import annotations

from collections.abc import Callable

from bytescale.config.resolve import resolve_model
from bytescale.config.schema import Config
from bytescale.config.validate import hdp_ranks
from bytescale.cost.profile_file import warn_of_bad_fits
from bytescale.data.loading.corpus import check_vocabulary, prepare_corpus
from bytescale.data.order.batches import BatchSampler
from bytescale.data.tokens.progress import progress_bar
from bytescale.plan.summary import gist
from bytescale.runtime.usable import kind_of
from bytescale.train.loop.evaluation import corpus_of
from bytescale.train.parts.budget import rank_device
from bytescale.train.parts.describe import describe_model
from bytescale.train.parts.devices import Devices
from bytescale.train.parts.job import plan_of_run
from bytescale.train.parts.run_kernels import open_kernels
from bytescale.train.ranks import choose_device, choose_dtype
from bytescale.train.reporting.run_log import describe_corpus


def dry_run(config: Config, print_line: Callable[[str], None] = print) -> None:
    """Prepare the data, plan and verify the first batch, and say what would run. Starts nothing, makes no run folder.

    Raises what ``train`` would raise before its first step.
    """
    device = choose_device(config.trainer.device, 0, 1)
    dtype = choose_dtype(config.trainer.dtype, device)
    with progress_bar() as progress:
        corpus = prepare_corpus(config.data, progress, text_later=True)
        batch = BatchSampler(corpus.index, config.data).next_batch()
    architecture = resolve_model(config.model, tokenizer_vocab_size=corpus.metadata.vocab_size)
    check_vocabulary(corpus.metadata, architecture.vocab_size)
    if config.eval.sources:
        corpus_of(config, architecture.vocab_size)
    ranks, hdp = config.parallel.ranks, hdp_ranks(config.parallel)
    with open_kernels(config, device, dtype) as kernels:
        kernel_lines = kernels.lines()
        kernel, kind = kernels.kernel, kind_of(device)
        spec, counted = describe_model(config, architecture, kernel, device, dtype, num_ranks=hdp, kind=kind)
    devices = Devices.alike(rank_device(config, device, dtype, ranks), hdp)
    planning = plan_of_run(
        config, spec, counted, devices, device=device, dtype=dtype, ranks_per_node=ranks // config.parallel.tp
    )
    warn_of_bad_fits(planning.measured)
    plan = planning.planner(batch.lengths)
    print_line(f"model   {spec.describe()} on {ranks} x {device.type}")
    print_line(f"data    {describe_corpus(corpus.metadata)}")
    for line in (*kernel_lines, *planning.memory.lines()):
        print_line(line)
    print_line(f"plan    {gist(plan)}")
    print_line(f"run     {config.trainer.steps} steps into {config.trainer.run_dir} (dry run: nothing was started)")
