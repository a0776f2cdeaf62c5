"""The training loop. ``train`` is its table of contents; each verb has a function below or a module beside."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bytescale.common.errors import RankFailure, problem
from bytescale.config import Config, validate
from bytescale.cost import flops
from bytescale.data import StepData
from bytescale.runtime import run_rank_plan
from bytescale.train.checkpoint import Checkpointer
from bytescale.train.feed import open_feed
from bytescale.train.job import Job, build_job
from bytescale.train.loader_metrics import loader_metrics, loader_row
from bytescale.train.metrics import StepMetrics, Stopwatch, check_finite, memory_bytes
from bytescale.train.ranks import open_ranks, ranks_of_torchrun
from bytescale.train.run_folder import RunFolder
from bytescale.train.run_log import RunLog
from bytescale.train.schedule import learning_rate
from bytescale.train.stop import StopRequest


def train(config: Config, print_line: Callable[[str], None] = print) -> Path:
    """Train as ``config`` says and return the run folder. Every rank calls it; the first one prints.

    Raises:
        ConfigError, DataError, PlanError, CheckpointError: bad input, before any work is lost.
        RankFailure: another rank is gone or disagrees; the last checkpoint is whole.
        NonFiniteError: loss or gradients are no numbers; weights and the last checkpoint are as before the step.
    """
    validate(config, num_ranks=ranks_of_torchrun())
    run = RunFolder(Path(config.trainer.run_dir))
    resume = config.trainer.resume or restarted_by_torchrun()
    with (
        open_ranks(config) as ranks,
        RunLog(run, config, print_line if ranks.is_first else None) as log,
        open_feed(config, ranks) as feed,
        StopRequest() as stop,
    ):
        job = build_job(config, ranks, feed, stop)
        log.open(resume=resume)
        checkpoints = Checkpointer(run.checkpoints, ranks, config.checkpoint)
        if resume:
            restore_latest(job, checkpoints, log)
        with job.open_loader() as loader:
            for data in loader:
                step = data.step + 1  # batches count from 0, people from 1
                log.introduce(job, data)
                log.step(train_step(job, step, data, checkpoints), data)
                checkpoints.poll()
                if job.checkpoint_is_due(step) or stop.agreed:
                    checkpoints.save(job.state_after(step, data), job.optimizer)
                if stop.agreed:
                    break
        checkpoints.finish()
        log.farewell(stopped=stop.agreed)
    return run.path


def train_step(job: Job, step: int, data: StepData, checkpoints: Checkpointer) -> StepMetrics:
    """Agree, run the plan, reduce once, update, publish: the four collectives of a step are all in here."""
    watch = Stopwatch()
    hdp, config = job.ranks.hdp, job.config
    waited_before = hdp.exchange.wait_seconds
    bytes_before = hdp.exchange.bytes_sent

    # 1. All ranks hold the same plan, or nobody starts.
    hdp.agree(f"the plan of step {step}", data.rank_plan.digest)

    # 2. Forward and backward of this rank's micro-batches; ranks wait only inside shared slice groups.
    started = watch.elapsed()
    job.parameters.zero_gradients()
    sums = run_rank_plan(
        job.model,
        data.rank_plan,
        data.micro_batches,
        num_global_targets=data.num_targets,
        kernel=job.kernel,
        hdp=hdp,
    )
    busy_seconds = watch.elapsed() - started - (hdp.exchange.wait_seconds - waited_before)

    # 3. One reduction of the gradients, one exchange of sums: loss, norm, and what each rank's time went to.
    norm_share = job.optimizer.reduce_gradients()
    rows = hdp.share(
        [
            sums.loss_sum,
            float(sums.num_targets),
            norm_share,
            busy_seconds,
            float(hdp.exchange.bytes_sent - bytes_before),
            float(memory_bytes(job.ranks.device)),
            float(job.stop.heard),
            *loader_row(data.times),
        ]
    )
    loss_sums, targets, norm_shares, busy, bytes_sent, memory, stops, *loader_columns = zip(*rows, strict=True)
    job.stop.agreed = any(stops)
    check_targets(step, sum(targets), data)
    loss = sum(loss_sums) / data.num_targets
    grad_norm = sum(norm_shares) ** 0.5
    check_finite(step, loss, grad_norm, checkpoints.latest())

    # 4. Each rank updates its slice of the weights, then all gather them.
    rate = learning_rate(step, config.trainer.steps, config.optimizer)
    job.optimizer.update(rate, grad_norm)

    step_seconds = watch.elapsed() + data.times.wait_seconds
    model_flops = flops.training_flops(
        job.architecture, num_tokens=data.summary.num_tokens, sum_of_squares=data.summary.sum_of_squares
    )
    mean_busy = sum(busy) / hdp.size
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=rate,
        num_tokens=data.summary.num_tokens,
        num_sequences=data.summary.num_sequences,
        step_seconds=step_seconds,
        tokens_per_second=data.summary.num_tokens / step_seconds,
        mfu=model_flops / step_seconds / (hdp.size * job.peak_flops_per_second),
        memory_bytes=int(max(memory)),
        imbalance=max(busy) / mean_busy,
        waiting_share=max(0.0, 1.0 - mean_busy / step_seconds),
        **loader_metrics(loader_columns),
        attention_bytes_sent=int(sum(bytes_sent)),
        group_sizes={str(degree): count for degree, count in data.summary.group_sizes.items()},
    )


def restore_latest(job: Job, checkpoints: Checkpointer, log: RunLog) -> None:
    """Continue from the newest checkpoint, or from step 1 when the run was killed before its first."""
    path = checkpoints.latest()
    steps_done = job.restore(checkpoints, path) if path else 0
    log.resumed(path, steps_done)


def restarted_by_torchrun() -> bool:
    """Whether torchrun started this process again after a failure (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def check_targets(step: int, counted: float, data: StepData) -> None:
    """Every target of the global batch was trained on exactly once, by somebody."""
    if int(counted) != data.num_targets:
        raise RankFailure(
            problem(
                f"step {step}: the ranks together trained on {int(counted)} targets, the global batch has "
                f"{data.num_targets}",
                so="loss and gradients would be scaled wrongly, so the update was not made",
                fix="report this: plan, loader and sampler disagree (the plan is in the run folder's plans/)",
            )
        )
