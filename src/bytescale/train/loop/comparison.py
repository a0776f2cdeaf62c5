"""The same batches under several planners, on the ranks of a run: how long they take, and that their losses agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import mean, median

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.common.units import format_bytes, format_count
from bytescale.config.schema import PlannerName
from bytescale.data.loading.loader import StepData
from bytescale.train.loop.step import train_step
from bytescale.train.parts.job import Job
from bytescale.train.reporting.metrics import StepMetrics
from bytescale.train.reporting.work import StepRecorder

NUM_BATCHES = 3
NUM_ROUNDS = 3
PLANNERS: tuple[PlannerName, ...] = ("static", "naive", "adaptive")


@dataclass(kw_only=True)
class Measured:
    planner: PlannerName
    batches: list[StepData]
    steps: list[list[StepMetrics]] = field(default_factory=list)
    """``[B]`` batches, each with the metrics of every round."""

    @property
    def seconds(self) -> float:
        """Seconds of all batches, of each the median over the rounds."""
        return sum(median(step.step_seconds for step in rounds) for rounds in self.steps)

    @property
    def losses(self) -> list[float]:
        """``[B]`` loss of each batch. Rounds repeat the same sums."""
        return [rounds[0].loss for rounds in self.steps]

    def row(self) -> str:
        steps = [step for rounds in self.steps for step in rounds]
        sent = sum(rounds[0].attention_bytes_sent for rounds in self.steps)
        tokens = sum(rounds[0].num_tokens for rounds in self.steps)
        return (
            f"{self.planner:<8}  {self.seconds:>7.2f}  {format_count(tokens / self.seconds):>6}  "
            f"{mean(step.waiting_share for step in steps):>7.0%}  {format_bytes(sent):>9}  "
            + "  ".join(f"{loss:.4f}" for loss in self.losses)
        )


def compare_planners(job: Job, checkpoints: Checkpointer, log: Callable[[str], None]) -> None:
    """Measure the next batches of a run under every planner of ``PLANNERS``, and say the result. All ranks call it.

    The planners take turns on each batch, round after round, so that noise of the machine affects all of them alike.
    The learning rate is 0: a step takes as long as in training, and the weights stay as they are.
    """
    start = job.config.trainer.steps
    position = job.loader.state_dict()
    measured = []
    for name in PLANNERS:
        job.loader.load_state_dict(position)
        planner = replace(job.planner, config=replace(job.planner.config, name=name))
        if job.calibration is not None:  # all that the run knows of costs
            planner = replace(job.calibration.planner, planner=planner).with_state(job.calibration.state)
        with job.loader.open(planner, start + NUM_BATCHES) as steps:
            batches = [replace(data, times=replace(data.times, wait_seconds=0.0)) for data in steps]
        measured.append(Measured(planner=name, batches=batches, steps=[[] for _ in batches]))
    still = replace(job.config.optimizer, lr=0.0)
    paused = replace(job, calibration=None, config=replace(job.config, optimizer=still))
    for _ in range(NUM_ROUNDS):
        for batch in range(NUM_BATCHES):
            for item in measured:
                data = item.batches[batch]
                item.steps[batch].append(train_step(paused, data.step + 1, data, checkpoints, StepRecorder()))
                if job.stop.agreed:
                    return
    last, plans = measured[-1], [data.plan for data in measured[0].batches]
    sequences, tokens = sum(plan.num_sequences for plan in plans), sum(plan.num_tokens for plan in plans)
    faster = [f"{item.seconds / last.seconds:.2f} times as fast as {item.planner}" for item in measured[:-1]]
    apart = max(abs(loss - other) for item in measured for loss, other in zip(item.losses, last.losses, strict=True))
    log(
        f"compare {len(plans)} new batches ({sequences} sequences, {format_count(tokens)} tokens), measured on "
        f"{job.ranks.world.size} ranks, {NUM_ROUNDS} times in turn, medians:"
    )
    log("          planner   seconds   tok/s  waiting       sent  loss of each batch")
    for item in measured:
        log(f"          {item.row()}")
    log(f"        {last.planner} is {' and '.join(faster)}; the losses differ by at most {apart:.0e}")
