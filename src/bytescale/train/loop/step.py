"""One training step on one rank: agree, run the plan, reduce, update, publish."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import fields, replace

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.common.errors import RankFailure
from bytescale.config.schema import OptimizerConfig
from bytescale.data.loading.loader import StepData
from bytescale.runtime.executor import StepResult
from bytescale.train.parts.job import Job
from bytescale.train.reporting.metrics import (
    RankFigures,
    SharedFigures,
    StepMetrics,
    StepSums,
    check_finite,
    memory_bytes,
)
from bytescale.train.reporting.work import RankWork, StepRecorder

_DECAY_SHARE = 0.2
"""Of the steps after warm-up, in which the rate of ``wsd`` falls."""


def train_step(job: Job, step: int, data: StepData, checkpoints: Checkpointer, record: StepRecorder) -> StepMetrics:
    """Take step number ``step``, counted from 1. ``record`` writes down when its parts ran.

    Raises:
        RankFailure: a rank is gone, holds another plan, or trained on other targets than the batch has.
        NonFiniteError: loss or gradient norm is not a number; the update was not made.
    """
    began = time.perf_counter()

    # 1. Check that all ranks hold the same plan before any rank starts.
    with record.span("agree"):
        job.ranks.mesh.world.agree(f"the plan of step {step}", data.rank_plan.digest)
    job.changing.completed(step - 1)

    # 2. Forward and backward of this rank's micro-batches. Ranks wait only for members of a slice group and, in a
    # pipeline, for neighbouring stages.
    work = RankWork(job.ranks.mesh)
    result = run_passes(job, data, work, record)

    # 3. The remaining reductions of gradients, and one exchange of sums.
    with record.span("reduction"), work.sync():
        norm_share = job.optimizer.reduce_gradients()
    with record.span("report"):
        sums = sums_of_all(job, result, norm_share)
    job.stop.agreed, job.changing.are_due = sums.stop_heard > 0, sums.ranks_waiting > 0
    check_targets(step, sums.num_targets, data)
    loss = sums.loss_sum / data.loss_divisor
    check_finite(step, loss + sums.batch_loss, sums.grad_norm, checkpoints.latest())

    # 4. Each rank updates its part of the weights, and all ranks gather them, possibly during the next forward.
    rate = learning_rate(step, job.config.trainer.steps, job.config.optimizer)
    with record.span("update"):
        job.optimizer.update(sums.grad_norm, job.config.optimizer.clip_grad_norm, rate)

    # 5. The host reads its clocks, while a GPU updates, and ranks exchange their times.
    with record.span("report"):
        all_ranks = figures_of_all(job, data, work)
    seconds = time.perf_counter() - began + data.times.wait_seconds
    predicted = static = None
    if job.calibration is not None:
        if job.ranks.is_first:  # by what was known before this step
            predicted = job.calibration.predict(data.plan)
            if job.config.log.static_mesh:
                static = job.calibration.predict_static(data.plan, job.config.data.context_length)
        busy = work.busy_seconds()
        job.calibration.observe(data.step, data.plan, data.rank_plan, busy, busy + work.waiting_seconds())
        if job.ranks.is_first:
            job.calibration.took(data.plan, seconds)
    row = step_metrics(job, step, data, sums, all_ranks, rate=rate, seconds=seconds)
    return replace(row, predicted_seconds=predicted, static_seconds=static)


def run_passes(job: Job, data: StepData, work: RankWork, record: StepRecorder) -> StepResult:
    """Forward and backward of this rank's micro-batches, and of encoders before and behind them."""

    def encoders(name: str) -> ExitStack:
        spans = ExitStack()
        for span in (record.span("encode", name), work.encoding.span()) if data.items is not None else ():
            spans.enter_context(span)
        return spans

    with encoders("encode"):
        beside, begin_reduction = job.encode(data.items)

    def after_last_message() -> None:
        passes.close()  # encoders are no work of the plan's
        with encoders("encode: backward"):
            begin_reduction()

    with ExitStack() as passes:
        passes.enter_context(work.passes())
        job.optimizer.begin_step(data.rank_plan, overlaps=data.items is None)
        return job.executor.run(
            data.rank_plan,
            data.micro_batches,
            num_global_targets=data.loss_divisor,
            after_last_message=after_last_message,
            around=record.around(data.rank_plan),
            beside=beside,
        )


def sums_of_all(job: Job, result: StepResult, norm_share: float) -> StepSums:
    """Exchange what the update needs. Every rank calls it."""
    mesh = job.ranks.mesh
    own = StepSums(
        loss_sum=result.loss_sum,
        num_targets=result.num_targets,
        batch_loss=result.batch_loss if mesh.hdp.rank == mesh.tp.rank == 0 else 0.0,  # a stage's ranks all have it
        norm_share=norm_share,
        stop_heard=job.stop.heard,
        ranks_waiting=job.changing.num_waiting(),
    )
    return own.of_all(mesh.world)


def figures_of_all(job: Job, data: StepData, work: RankWork) -> RankFigures:
    """Exchange the times and counts of a step. Every rank calls it."""
    mesh, times, busy = job.ranks.mesh, data.times, work.busy_seconds()
    own = RankFigures(
        busy_seconds=busy,
        most_busy_seconds=busy,
        waiting_seconds=work.waiting_seconds(),
        sync_seconds=work.sync_seconds(),
        encode_seconds=work.encoding.take()(),
        attention_bytes_sent=work.bytes_sent(),
        memory_bytes=memory_bytes(job.ranks.device),
        data_wait_seconds=times.wait_seconds,
        planning_seconds=times.planning_seconds,
        data_restarts=times.restarts,
        data_steps_ready=times.steps_ready,
        data_bytes_read=[times.bytes_read],
    )
    return own.of_all(mesh.world)


def step_metrics(
    job: Job,
    step: int,
    data: StepData,
    sums: StepSums,
    all_ranks: RankFigures,
    *,
    rate: float,
    seconds: float,
) -> StepMetrics:
    plan, model_flops, peak = data.plan, job.training_flops(data), job.peak_flops_per_second
    degrees = sorted(Counter(plan.group_sizes.tolist()).items(), reverse=True)
    return StepMetrics(
        **{spec.name: getattr(all_ranks, spec.name) for spec in fields(SharedFigures)},
        step=step,
        loss=sums.loss_sum / data.loss_divisor,
        batch_loss=sums.batch_loss,
        grad_norm=sums.grad_norm,
        learning_rate=rate,
        num_tokens=plan.num_tokens,
        num_sequences=plan.num_sequences,
        step_seconds=seconds,
        tokens_per_second=plan.num_tokens / seconds,
        model_flops_per_second=model_flops / seconds,
        mfu=None if peak is None else model_flops / seconds / (job.ranks.world.size * peak),
        imbalance=all_ranks.most_busy_seconds / all_ranks.busy_seconds,
        waiting_share=max(0.0, 1.0 - all_ranks.busy_seconds / seconds),
        group_sizes={str(degree): count for degree, count in degrees},
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


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up to ``lr`` over ``warmup_steps``, then what ``schedule`` says, at least ``lr * min_lr_ratio``.

    ``step`` counts from 1; the first step already trains (at ``lr / warmup_steps``). P is the share of the steps after
    warm-up that are done, and the rate falls from ``lr`` at P = 0 to the floor at P = 1:

    - cosine: by ``(1 + cos(pi P)) / 2``
    - linear: by ``1 - P``
    - constant: not at all
    - wsd (warm-up, stable, decay): linearly over the last 0.2 of P
    - inverse-sqrt: as ``sqrt(warmup_steps / step)``, whatever the number of steps; it stops at the floor
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "inverse-sqrt":
        return config.lr * max(config.min_lr_ratio, math.sqrt(max(1, config.warmup_steps) / step))
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    above_floor = {
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "linear": 1.0 - done,
        "constant": 1.0,
        "wsd": min(1.0, (1.0 - done) / _DECAY_SHARE),
    }[config.schedule]
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * above_floor)
