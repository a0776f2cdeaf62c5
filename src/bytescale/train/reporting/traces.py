"""Traces of the steps that ``log.trace_steps`` names, in the run folder's traces/."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import asdict

from bytescale.common.units import format_seconds
from bytescale.data.loading.loader import StepData
from bytescale.runtime.plain_data import all_gather_json
from bytescale.simulator.trace import Span, Track, save_trace, simulated_tracks, spread_evenly
from bytescale.train.parts.job import Job
from bytescale.train.ranks import Ranks
from bytescale.train.reporting.metrics import StepMetrics
from bytescale.train.reporting.work import SpanRecorder, StepRecorder
from bytescale.train.run_folder import RunFolder

MAX_RANKS = 1024
"""Most HDP ranks in a trace; they are spread evenly over all of them."""


class StepTraces:
    """Traces the steps that are wanted, and says which of them never came."""

    def __init__(self, job: Job, run: RunFolder, log: Callable[[str], None]) -> None:
        self._job, self._run, self._log = job, run, log
        self._missing = sorted(set(job.config.log.trace_steps))

    def recorder(self, step: int) -> StepRecorder:
        for past in [past for past in self._missing if past < step]:
            self._missing.remove(past)
            if not self._run.trace(past).exists():
                self._log(f"trace   none of step {past}, which log.trace_steps names: the run goes on from step {step}")
        if step not in self._missing:
            return StepRecorder()
        self._missing.remove(step)
        return SpanRecorder(self._job.ranks.mesh, self._job.ranks.device)

    def write(self, record: StepRecorder, metrics: StepMetrics, data: StepData) -> None:
        """Collect what all ranks have recorded of a step, and write it beside the prediction. All ranks call it."""
        if not isinstance(record, SpanRecorder):
            return
        ranks = self._job.ranks
        shown = spread_evenly(ranks.mesh.shape.hdp, MAX_RANKS)
        own = _own_track(ranks, record, data, shown)
        told = all_gather_json(asdict(own), ranks.world.group, ranks.device)
        if not ranks.is_first:
            return
        tracks = [Track(**{**stored, "spans": [Span(**span) for span in stored["spans"]]}) for stored in told]
        times = self._job.step_times
        known = self._job.planner if self._job.calibration is None else self._job.calibration
        predicted = times.simulated(data.plan, known.cost)
        if data.items is not None:
            work = data.items.items.loads(ranks.mesh.encoding[1])
            predicted = predicted.with_encoders(self._job.memory.model.rows.encoder_seconds(work, times.profile))
        about = {
            "step": metrics.step,
            "measured_seconds": metrics.step_seconds,  # with the wait for its data, which the simulated one has at once
            "predicted_seconds": predicted.step_seconds,
            "prediction": times.profile.name,
            "num_ranks": ranks.mesh.shape.hdp,
        }
        tracks = [track for track in tracks if track.rank in shown]
        tracks += [track for rank in shown for track in simulated_tracks(predicted, rank, "predicted")]
        path = self._run.trace(metrics.step)
        path.parent.mkdir(exist_ok=True)
        save_trace(tracks, path, about)
        self._log(
            f"trace   step {metrics.step} took {format_seconds(metrics.step_seconds)}, predicted "
            f"{format_seconds(predicted.step_seconds)}: {path} (open it in https://ui.perfetto.dev)"
        )

    def finish(self) -> None:
        """Say of which steps there is no trace because the run ended before them."""
        for step in self._missing:
            self._log(f"trace   none of step {step}, which log.trace_steps names: the run ended before it")
        self._missing = []


def _own_track(ranks: Ranks, record: SpanRecorder, data: StepData, shown: Container[int]) -> Track:
    spans = record.finish("agree")
    if data.times.wait_seconds > 0:
        wait = data.times.wait_seconds
        begin = min(span.start for span in spans) - wait
        spans = [Span(name="wait: data", category="data", start=begin, seconds=wait), *spans]
    mesh = ranks.mesh
    name = f"stage {mesh.stage}" + (f", tp {mesh.tp.rank}" if mesh.shape.tp > 1 else "")
    return Track(rank=mesh.hdp.rank, name=name, spans=spans if mesh.hdp.rank in shown else [], kind="measured")
