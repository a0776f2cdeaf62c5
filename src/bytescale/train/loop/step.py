"""One training step on one rank: agree, run the plan, reduce, update, publish."""

from __future__ import annotations

from dataclasses import replace

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.common.errors import RankFailure
from bytescale.data.loading.loader import StepData
from bytescale.runtime import StepResult
from bytescale.train.loop.learning_rate import learning_rate
from bytescale.train.parts.job import Job
from bytescale.train.reporting.metrics import StepMetrics, Stopwatch, check_finite, memory_bytes
from bytescale.train.reporting.span_recorder import StepRecorder
from bytescale.train.reporting.totals import RankFigures
from bytescale.train.reporting.work import RankWork, measured_work


def train_step(job: Job, step: int, data: StepData, checkpoints: Checkpointer, record: StepRecorder) -> StepMetrics:
    """Take step number ``step``, counted from 1. ``record`` writes down when its parts ran.

    Raises:
        RankFailure: a rank is gone, holds another plan, or trained on other targets than the batch has.
        NonFiniteError: loss or gradient norm is not a number; the update was not made.
    """
    watch = Stopwatch()

    # 1. Check that all ranks hold the same plan before any rank starts.
    with record.span("agree"):
        job.ranks.mesh.world.agree(f"the plan of step {step}", data.rank_plan.digest)

    # 2. Forward and backward of this rank's micro-batches. Ranks wait only for members of a slice group and, in a
    # pipeline, for neighbouring stages.
    with measured_work(job.ranks.mesh, job.ranks.device) as work:
        job.optimizer.begin_step(data.rank_plan)
        result = job.executor.run(
            data.rank_plan,
            data.micro_batches,
            num_global_targets=data.loss_divisor,
            after_last_message=job.optimizer.after_last_message,
            around=record.around(data.rank_plan, job.config.parallel.virtual_stages),
        )

    # 3. The remaining reductions of gradients, and one exchange of sums: loss, norm, and each rank's times.
    with record.span("reduction"), work.sync():
        norm_share = job.optimizer.reduce_gradients()  # the host waits for its device here, so clocks may be read
    with record.span("report"):
        all_ranks = figures_of_all(job, data, result, norm_share, work)
    predicted = predicted_seconds(job, data)
    if job.calibration is not None:
        job.calibration.observe(data.step, data.rank_plan, work.busy_seconds())
    job.stop.agreed = all_ranks.stop_heard > 0
    check_targets(step, all_ranks.num_targets, data)
    loss = all_ranks.loss_sum / data.loss_divisor
    check_finite(step, loss + all_ranks.batch_loss, all_ranks.grad_norm, checkpoints.latest())

    # 4. Each rank updates its part of the weights, and all ranks gather them, possibly during the next forward.
    rate = learning_rate(step, job.config.trainer.steps, job.config.optimizer)
    with record.span("update"):
        job.optimizer.update(all_ranks.grad_norm, job.config.optimizer.clip_grad_norm, rate)

    seconds = watch.elapsed() + data.times.wait_seconds
    if job.calibration is not None and data.plan is not None and job.ranks.is_first:
        job.calibration.took(data.plan, seconds)
    metrics = step_metrics(job, step, data, all_ranks, learning_rate=rate, seconds=seconds)
    return replace(metrics, predicted_seconds=predicted)


def predicted_seconds(job: Job, data: StepData) -> float | None:
    """How long this step should take, by what was known before it. None on ranks that do not have the whole plan."""
    if data.plan is None or not job.ranks.is_first or job.calibration is None:
        return None
    return job.calibration.predict(data.plan)


def figures_of_all(job: Job, data: StepData, result: StepResult, norm_share: float, work: RankWork) -> RankFigures:
    """Exchange what the ranks have to tell each other once a step. Every rank calls it."""
    mesh, times, busy = job.ranks.mesh, data.times, work.busy_seconds()
    own = RankFigures(
        loss_sum=result.loss_sum,
        num_targets=result.num_targets,
        batch_loss=result.batch_loss if mesh.hdp.rank == mesh.tp.rank == 0 else 0.0,  # a stage's ranks all have it
        norm_share=norm_share,
        busy_seconds=busy,
        most_busy_seconds=busy,
        waiting_seconds=work.waiting_seconds(),
        sync_seconds=work.sync_seconds(),
        bytes_sent=work.bytes_sent(),
        stop_heard=job.stop.heard,
        memory_bytes=memory_bytes(job.ranks.device),
        data_wait_seconds=times.wait_seconds,
        planning_seconds=times.planning_seconds,
        data_restarts=times.restarts,
        steps_ready=times.steps_ready,
        bytes_read=[times.bytes_read],
        bytes_received=[times.bytes_received],
    )
    return own.of_all(mesh.world)


def step_metrics(
    job: Job, step: int, data: StepData, all_ranks: RankFigures, *, learning_rate: float, seconds: float
) -> StepMetrics:
    """The figures of all ranks as one step's metrics."""
    summary, num_ranks, model_flops = data.summary, job.ranks.world.size, job.training_flops(data)
    mean_busy, peak = all_ranks.busy_seconds / num_ranks, job.peak_flops_per_second
    return StepMetrics(
        step=step,
        loss=all_ranks.loss_sum / data.loss_divisor,
        batch_loss=all_ranks.batch_loss,
        grad_norm=all_ranks.grad_norm,
        learning_rate=learning_rate,
        num_tokens=summary.num_tokens,
        num_sequences=summary.num_sequences,
        step_seconds=seconds,
        tokens_per_second=summary.num_tokens / seconds,
        model_flops_per_second=model_flops / seconds,
        mfu=None if peak is None else model_flops / seconds / (num_ranks * peak),
        memory_bytes=int(all_ranks.memory_bytes),
        imbalance=all_ranks.most_busy_seconds / mean_busy,
        waiting_share=max(0.0, 1.0 - mean_busy / seconds),
        waiting_seconds=all_ranks.waiting_seconds / num_ranks,
        sync_seconds=all_ranks.sync_seconds / num_ranks,
        data_wait_seconds=all_ranks.data_wait_seconds,
        planning_seconds=all_ranks.planning_seconds,
        data_bytes_read=all_ranks.bytes_read,
        data_bytes_received=all_ranks.bytes_received,
        data_steps_ready=int(all_ranks.steps_ready),
        data_restarts=int(all_ranks.data_restarts),
        attention_bytes_sent=int(all_ranks.bytes_sent),
        group_sizes={str(degree): count for degree, count in summary.group_sizes.items()},
    )


def check_targets(step: int, counted: float, data: StepData) -> None:
    """Raise ``RankFailure`` unless the ranks together trained on as many targets as the global batch has."""
    if int(counted) != data.num_targets:
        raise RankFailure(
            f"step {step}: the ranks together trained on {int(counted)} targets, the global batch has "
            f"{data.num_targets}",
            so="loss and gradients would be scaled wrongly, so the update was not made",
            fix="report this: plan, loader and sampler disagree (the plan is in the run folder's plans/)",
        )
