"""One training step on one rank: agree, run the plan, reduce, update, publish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from bytescale.common.errors import RankFailure, problem
from bytescale.cost import flops
from bytescale.data import StepData
from bytescale.data.loader import LoaderTimes
from bytescale.runtime import Mesh, StepResult, run_rank_plan
from bytescale.train.checkpoint import Checkpointer
from bytescale.train.job import Job
from bytescale.train.metrics import StepMetrics, Stopwatch, check_finite, memory_bytes
from bytescale.train.schedule import learning_rate


def train_step(job: Job, step: int, data: StepData, checkpoints: Checkpointer) -> StepMetrics:
    """Take step number ``step``, counted from 1.

    Raises:
        RankFailure: a rank is gone, holds another plan, or trained on other targets than the batch has.
        NonFiniteError: loss or gradient norm is not a number; the update was not made.
    """
    watch = Stopwatch()
    mesh, config = job.ranks.mesh, job.config
    exchange = mesh.hdp.exchange
    num_targets = max(1, data.num_targets)  # a batch of single tokens has none: its loss and gradients are zero

    # 1. All ranks hold the same plan, or nobody starts.
    mesh.world.agree(f"the plan of step {step}", data.rank_plan.digest)

    # 2. Forward and backward of this rank's micro-batches; ranks wait only for members of a slice group
    # and, in a pipeline, for the stage before or after.
    waited, sent, started = seconds_waited(mesh), exchange.bytes_sent, watch.elapsed()
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
    )
    busy_seconds = watch.elapsed() - started - (seconds_waited(mesh) - waited)

    # 3. The gradients' reductions that are left, one exchange of sums: loss, norm, and what each rank's time went to.
    report = RankReport.of(
        sums,
        batch_loss=sums.batch_loss if mesh.hdp.rank == mesh.tp.rank == 0 else 0.0,  # a stage's ranks all have it
        norm_share=job.optimizer.reduce_gradients(),
        busy_seconds=busy_seconds,
        bytes_sent=exchange.bytes_sent - sent,
        memory=memory_bytes(job.ranks.device),
        stop=job.stop.heard,
        times=data.times,
    )
    reports = [RankReport(*row) for row in mesh.world.share(list(astuple(report)))]
    job.stop.agreed = any(other.stop_heard for other in reports)
    check_targets(step, sum(other.num_targets for other in reports), data)
    loss = sum(other.loss_sum for other in reports) / num_targets
    grad_norm = sum(other.norm_share for other in reports) ** 0.5
    batch_loss = sum(other.batch_loss for other in reports)
    check_finite(step, loss + batch_loss, grad_norm, checkpoints.latest())

    # 4. Each rank updates its part of the weights, then all gather them, if need be during the next forward.
    rate = learning_rate(step, config.trainer.steps, config.optimizer)
    job.optimizer.update(rate, grad_norm)

    seconds = watch.elapsed() + data.times.wait_seconds
    return step_metrics(
        job,
        step,
        data,
        reports,
        loss=loss,
        batch_loss=batch_loss,
        grad_norm=grad_norm,
        learning_rate=rate,
        seconds=seconds,
    )


@dataclass(frozen=True)
class RankReport:
    """What every rank tells all others once a step; numbers only, since it travels as one row of fp64."""

    loss_sum: float
    num_targets: float
    batch_loss: float  # of this rank's stage, on one rank of it
    norm_share: float  # sum of squares of this rank's slice of the gradient
    busy_seconds: float  # in forward and backward, less waiting for peers
    bytes_sent: float  # attention traffic
    memory_bytes: float
    stop_heard: float  # 1: this rank was asked to stop
    data_wait_seconds: float
    planning_seconds: float
    data_bytes_read: float
    data_bytes_received: float
    data_steps_ready: float
    data_steps_planned: float
    data_restarts: float

    @staticmethod
    def of(
        sums: StepResult,
        *,
        batch_loss: float,
        norm_share: float,
        busy_seconds: float,
        bytes_sent: int,
        memory: int,
        stop: bool,
        times: LoaderTimes,
    ) -> RankReport:
        """This rank's report."""
        numbers = (
            *(sums.loss_sum, sums.num_targets, batch_loss, norm_share, busy_seconds, bytes_sent, memory, stop),
            *(times.wait_seconds, times.planning_seconds, times.bytes_read, times.bytes_received),
            *(times.steps_ready, times.steps_planned, times.restarts),
        )
        return RankReport(*map(float, numbers))


def seconds_waited(mesh: Mesh) -> float:
    """So far, for other ranks' messages."""
    groups = (mesh.hdp, *mesh.pipeline_groups())
    collectives = mesh.tp.collective_seconds + mesh.gradients.collective_seconds
    return sum(group.exchange.wait_seconds for group in groups) + collectives


def step_metrics(
    job: Job,
    step: int,
    data: StepData,
    reports: Sequence[RankReport],
    *,
    loss: float,
    batch_loss: float,
    grad_norm: float,
    learning_rate: float,
    seconds: float,
) -> StepMetrics:
    """All ranks' reports as one step's metrics."""
    summary = data.summary
    model_flops = flops.training_flops(
        job.architecture, num_tokens=summary.num_tokens, sum_of_squares=summary.sum_of_squares
    )
    busy, peak = [report.busy_seconds for report in reports], job.peak_flops_per_second
    mean_busy = sum(busy) / len(busy)
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
        mfu=None if peak is None else model_flops / seconds / (len(reports) * peak),
        memory_bytes=int(max(report.memory_bytes for report in reports)),
        imbalance=max(busy) / mean_busy,
        waiting_share=max(0.0, 1.0 - mean_busy / seconds),
        data_wait_seconds=max(report.data_wait_seconds for report in reports),
        planning_seconds=max(report.planning_seconds for report in reports),
        data_bytes_read=[int(report.data_bytes_read) for report in reports],
        data_bytes_received=[int(report.data_bytes_received) for report in reports],
        data_steps_ready=int(min(report.data_steps_ready for report in reports)),
        data_steps_planned=int(min(report.data_steps_planned for report in reports)),
        data_restarts=int(max(report.data_restarts for report in reports)),
        attention_bytes_sent=int(sum(report.bytes_sent for report in reports)),
        group_sizes={str(degree): count for degree, count in summary.group_sizes.items()},
    )


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
