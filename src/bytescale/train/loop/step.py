"""One training step on one rank: agree, run the plan, reduce, update, publish."""

from __future__ import annotations

import torch

from bytescale.attention.clock import Clock, make_clock
from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.common.errors import RankFailure, problem
from bytescale.cost import flops
from bytescale.data import StepData
from bytescale.runtime import Mesh, run_rank_plan
from bytescale.train.loop.schedule import learning_rate
from bytescale.train.parts.job import Job
from bytescale.train.reporting.metrics import StepMetrics, Stopwatch, check_finite, memory_bytes
from bytescale.train.reporting.totals import Report, Sums


def train_step(job: Job, step: int, data: StepData, checkpoints: Checkpointer) -> StepMetrics:
    """Take step number ``step``, counted from 1.

    Raises:
        RankFailure: a rank is gone, holds another plan, or trained on other targets than the batch has.
        NonFiniteError: loss or gradient norm is not a number; the update was not made.
    """
    watch = Stopwatch()
    mesh, config = job.ranks.mesh, job.config
    rings = [group.exchange for group in mesh.ring_groups()]
    num_targets = max(1, data.num_targets)  # a batch of single tokens has none: its loss and gradients are zero

    # 1. Check that all ranks hold the same plan before any rank starts.
    mesh.world.agree(f"the plan of step {step}", data.rank_plan.digest)

    # 2. Forward and backward of this rank's micro-batches. Ranks wait only for members of a slice group and, in a
    # pipeline, for neighbouring stages.
    run_clock, wait_clocks, sent = make_clock(job.ranks.device), clocks_of(mesh), sum(ring.bytes_sent for ring in rings)
    for clock in wait_clocks:
        clock.take()
    with run_clock.span():
        job.optimizer.begin_step(data.rank_plan)
        sums = run_rank_plan(
            job.parts,
            data.rank_plan,
            data.micro_batches,
            num_global_targets=num_targets,
            kernel=job.kernel,
            mesh=mesh,
            z_loss=config.optimizer.z_loss,
            after_last_message=job.optimizer.after_last_message,
            ring_gradients=torch.bfloat16 if config.trainer.ring_gradients == "bf16" else None,
        )
    seconds_run, seconds_waited = run_clock.take(), [clock.take() for clock in wait_clocks]

    # 3. The remaining reductions of gradients, and one exchange of sums: loss, norm, and each rank's times.
    norm_share = job.optimizer.reduce_gradients()  # the host waits for its device here, so clocks may be read
    own = Sums(
        loss_sum=sums.loss_sum,
        num_targets=float(sums.num_targets),
        batch_loss=sums.batch_loss if mesh.hdp.rank == mesh.tp.rank == 0 else 0.0,  # a stage's ranks all have it
        norm_share=norm_share,
        busy_seconds=seconds_run() - sum(read() for read in seconds_waited),
        bytes_sent=float(sum(ring.bytes_sent for ring in rings) - sent),
        stop_heard=float(job.stop.heard),
    )
    report = Report.of_rank(own, data.times, memory_bytes=memory_bytes(job.ranks.device)).of_all(mesh.world)
    job.stop.agreed = report.sums.stop_heard > 0
    check_targets(step, report.sums.num_targets, data)
    loss = report.sums.loss_sum / num_targets
    grad_norm = report.sums.norm_share**0.5
    batch_loss = report.sums.batch_loss
    check_finite(step, loss + batch_loss, grad_norm, checkpoints.latest())

    # 4. Each rank updates its part of the weights, and all ranks gather them, possibly during the next forward.
    rate = learning_rate(step, config.trainer.steps, config.optimizer)
    job.optimizer.update(rate, grad_norm)

    seconds = watch.elapsed() + data.times.wait_seconds
    return step_metrics(
        job,
        step,
        data,
        report,
        loss=loss,
        batch_loss=batch_loss,
        grad_norm=grad_norm,
        learning_rate=rate,
        seconds=seconds,
    )


def clocks_of(mesh: Mesh) -> list[Clock]:
    """The clocks that run while this rank waits for others."""
    groups = {
        id(group): group
        for group in (mesh.world, *mesh.ring_groups(), mesh.gradients, mesh.tp, *mesh.pipeline_groups())
    }
    return [clock for group in groups.values() for clock in (group.clock, group.exchange.clock)]


def step_metrics(
    job: Job,
    step: int,
    data: StepData,
    report: Report,
    *,
    loss: float,
    batch_loss: float,
    grad_norm: float,
    learning_rate: float,
    seconds: float,
) -> StepMetrics:
    """The report of all ranks as one step's metrics."""
    summary, sums, maxima, num_ranks = data.summary, report.sums, report.maxima, job.ranks.world.size
    model_flops = flops.training_flops(
        job.architecture, num_tokens=summary.num_tokens, sum_of_squares=summary.sum_of_squares
    )
    mean_busy, peak = sums.busy_seconds / num_ranks, job.peak_flops_per_second
    return StepMetrics(
        step=step,
        loss=loss,
        batch_loss=batch_loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        num_tokens=summary.num_tokens,
        num_sequences=summary.num_sequences,
        step_seconds=seconds,
        tokens_per_second=summary.num_tokens / seconds,
        model_flops_per_second=model_flops / seconds,
        mfu=None if peak is None else model_flops / seconds / (num_ranks * peak),
        memory_bytes=int(maxima.memory_bytes),
        imbalance=maxima.busy_seconds / mean_busy,
        waiting_share=max(0.0, 1.0 - mean_busy / seconds),
        data_wait_seconds=maxima.data_wait_seconds,
        planning_seconds=maxima.planning_seconds,
        data_bytes_read=report.bytes_read,
        data_bytes_received=report.bytes_received,
        data_steps_ready=-int(maxima.minus_steps_ready),
        data_steps_planned=-int(maxima.minus_steps_planned),
        data_restarts=int(maxima.data_restarts),
        attention_bytes_sent=int(sums.bytes_sent),
        group_sizes={str(degree): count for degree, count in summary.group_sizes.items()},
    )


def check_targets(step: int, counted: float, data: StepData) -> None:
    """Raise ``RankFailure`` unless the ranks together trained on as many targets as the global batch has."""
    if int(counted) != data.num_targets:
        raise RankFailure(
            problem(
                f"step {step}: the ranks together trained on {int(counted)} targets, the global batch has "
                f"{data.num_targets}",
                so="loss and gradients would be scaled wrongly, so the update was not made",
                fix="report this: plan, loader and sampler disagree (the plan is in the run folder's plans/)",
            )
        )
