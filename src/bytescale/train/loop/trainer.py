"""The training loop. ``train`` is its table of contents; each verb is a function below or a module of this package."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.manifest import RunState, step_of
from bytescale.common.environment import ranks_of_torchrun
from bytescale.common.errors import CheckpointError
from bytescale.config.schema import Config
from bytescale.config.validate import validate
from bytescale.train.changing import ChangingRanks
from bytescale.train.loop.comparison import compare_planners
from bytescale.train.loop.evaluation import BestEvaluation, Evaluation
from bytescale.train.loop.step import train_step
from bytescale.train.parts.job import Job, build_job
from bytescale.train.parts.loader import loader_of_run
from bytescale.train.parts.run_kernels import open_kernels
from bytescale.train.ranks import open_ranks
from bytescale.train.reporting.run_log import RunLog
from bytescale.train.reporting.screen import Screen, screen_of_stdout
from bytescale.train.reporting.traces import StepTraces
from bytescale.train.run_folder import RunFolder
from bytescale.train.stop import StopRequest


def train(
    config: Config,
    print_line: Callable[[str], None] | None = None,
    *,
    stop: StopRequest | None = None,
    compares: bool = False,
) -> Path:
    """Train as ``config`` says and return the run folder. Every rank calls it; the first one prints.

    Lines go to ``print_line``. If that is None, they go to standard output; on a terminal, a live bar is shown below.

    ``compares``: measure the planners on the next batches, after the last step (``loop.comparison``).

    SIGTERM, SIGINT (Ctrl-C), or ``stop.heard``, ends the run after the current step, with a checkpoint.

    Raises:
        ConfigError, DataError, PlanError, CheckpointError: bad input, before any work is lost.
        RankFailure: another rank is gone or disagrees; the last checkpoint is intact.
        NonFiniteError: loss or gradients are not finite; weights and the last checkpoint are as before the step.
    """
    validate(config, num_ranks=ranks_of_torchrun())
    run = RunFolder(Path(config.trainer.run_dir))
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # by torchrun --max-restarts
    resume = config.trainer.resume or restarted
    changing = ChangingRanks(config)
    while changing.goes_on():
        screen = screen_of_stdout() if print_line is None else Screen(print_line)
        train_on_ranks(config, run, screen, changing, stop or StopRequest(), resume=resume, compares=compares)
    return run.path


def train_on_ranks(
    config: Config,
    run: RunFolder,
    screen: Screen,
    changing: ChangingRanks,
    stop: StopRequest,
    *,
    resume: bool,
    compares: bool,
) -> None:
    """Train until the run ends, or until ranks are lost or come. Arguments as above."""
    with (
        changing.survived(),
        open_ranks(config, changing) as ranks,
        open_kernels(config, ranks.device, ranks.dtype, ranks.world.min_of) as kernels,
        RunLog(run, config, screen if ranks.is_first else None) as log,
        loader_of_run(config, ranks, log.write) as loader,
        stop,
        ExitStack() as closing,
        changing.left_at_once(),
    ):
        job, load = build_job(config, ranks, kernels, loader, stop, changing)
        log.open(resume=resume or changing.has_changed, tokenizer=loader.metadata.tokenizer)
        checkpoints = Checkpointer(run.checkpoints, ranks.checkpoint_group, config.checkpoint, log=log.write)
        restored = restore(job, load, checkpoints, log, resume=resume)
        del load  # and the weights that it would read
        steps_done, best = (restored.step, restored.best) if restored else (0, {})
        if job.calibration is not None:
            closing.callback(job.calibration.close)
            job.calibration.open(run.calibration, steps_done, ranks.checkpoint_group)
        run_steps(job, run, checkpoints, log, BestEvaluation.of(config.eval, best))
        if changing.are_due:
            return
        if compares and not stop.agreed:
            compare_planners(job, checkpoints, log.write)
        log.finish(stopped=stop.early, suggests=not compares)


def run_steps(job: Job, run: RunFolder, checkpoints: Checkpointer, log: RunLog, best: BestEvaluation) -> None:
    """Train to the last step, until a signal is heard or evaluations stop to improve; write what is to be kept."""
    stop = job.stop
    traces = StepTraces(job, run, log.write)
    evaluation = Evaluation.of(job)
    planner = job.planner if job.calibration is None else job.calibration.planner
    with job.loader.open(planner, stop_step=job.config.trainer.steps) as steps:
        if job.changing.unsaved is not None:
            checkpoints.save(job.changing.unsaved, job.optimizer)
        for data in steps:
            step = data.step + 1  # batches count from 0, people from 1
            log.introduce(job, data)
            record = traces.recorder(step)
            metrics = train_step(job, step, data, checkpoints, record)
            traces.write(record, metrics, data)
            log.step(metrics, data)
            if evaluation is not None and job.is_due(job.config.eval.every, step):
                evaluated = evaluation.run(step)
                log.evaluated(evaluated)
                best = best.after(step, evaluated.loss)
            checkpoints.poll()
            due = job.is_due(job.config.checkpoint.every, step)
            if due or best.is_saved_at(step) or best.is_final or stop.agreed:
                checkpoints.save(job.state_after(step, data, best.as_dict()), job.optimizer)
            if best.is_final and step < job.config.trainer.steps:
                log.write(best.why_final())
            job.changing.did(job.state_after(step, data, best.as_dict()))
            # A run that ends takes nobody in.
            job.changing.are_due &= not (best.is_final or stop.agreed or step == job.config.trainer.steps)
            if best.is_final or stop.agreed:
                stop.early = stop.agreed and not best.is_final and step < job.config.trainer.steps
                break
            if job.changing.are_due:
                job.changing.completed(step)
                break
    job.optimizer.wait_for_parameters()
    checkpoints.finish(job.config.parallel.stop_seconds / 2 if stop.agreed else None)
    traces.finish()


def restore(
    job: Job, load: Callable[[], None], checkpoints: Checkpointer, log: RunLog, *, resume: bool
) -> RunState | None:
    """Continue after a change of ranks from their copies of states, and a run that resumes from its newest checkpoint.

    Returns what these say; None: the run begins, with the weights that ``load`` gives the model.
    """
    state, changing, path = None, job.changing, None
    try:
        state = changing.restored(job.optimizer)
    except CheckpointError as lost:
        log.write(f"warning {lost}")
        resume = True
    if state is None and resume:
        path = checkpoints.newest()
        if path is not None:
            state = checkpoints.restore(path, job.optimizer, job.architecture.as_dict())
        log.resumed(path, state.step if state else 0)
    if state is None:
        load()
    if state is not None and state.sampler:
        job.loader.load_state_dict(state.sampler)
    begun = RunState(step=0, sampler={}, architecture={}, mesh={})
    went_on = changing.begin(job.optimizer, state or begun, checkpoints)
    if went_on and path is None:
        log.went_on(went_on, state.step if state else 0)
        newest = checkpoints.newest()
        if state is not None and (newest is None or step_of(newest.name) < state.step):
            changing.unsaved = state  # what was written is lost with the groups, and one more death may lose all
    return state
