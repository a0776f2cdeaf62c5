"""The output of a run: console, log.txt and metrics.jsonl. Only the first rank writes any."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, suppress
from statistics import mean
from types import TracebackType
from typing import TextIO

from bytescale.common.errors import visible
from bytescale.common.units import format_bytes, format_count, format_si
from bytescale.config.schema import Config
from bytescale.data.loading.loader import StepData
from bytescale.data.order.index import CorpusMetadata
from bytescale.plan.io import save_plan
from bytescale.plan.summary import gist
from bytescale.storage.place import Place
from bytescale.train.parts.job import Job
from bytescale.train.reporting.metrics import EvaluationMetrics, StepMetrics, memory_bytes
from bytescale.train.reporting.screen import Screen
from bytescale.train.reporting.step_row import ROW_COLUMNS, remarks, step_header, step_row
from bytescale.train.reporting.trackers import Tracker, open_trackers
from bytescale.train.run_folder import RunFolder, keep_until

_HEADER_EVERY = 20
"""Rows after which the columns' names are printed again."""


class RunLog:
    """Context manager: opened files are closed whatever happens."""

    def __init__(self, run: RunFolder, config: Config, screen: Screen | None) -> None:
        """``screen`` is None on ranks that write nothing."""
        self.run = run
        self.config = config
        self._screen = screen
        self._files = ExitStack()
        self._text: TextIO | None = None
        self._metrics: TextIO | None = None
        self._trackers: list[Tracker] = []
        self._first: StepMetrics | None = None
        self._last: StepMetrics | None = None
        self._last_losses: deque[float] = deque(maxlen=5)  # one batch's loss depends on its documents
        self._seconds = 0.0
        self._rows = 0

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._screen is not None:
            self._screen.close()
        if error is not None:
            with suppress(OSError):  # the disk may be full; the error itself goes on to the terminal
                self._to_file(f"stopped by {type(error).__name__}: {error}")
        self._files.close()

    def open(self, *, resume: bool, tokenizer: str | None) -> None:
        """Create the run folder (or find it, when resuming). ``tokenizer``: of the corpus, as its metadata names it."""
        if self._screen is None:
            return
        self._files.enter_context(self.run.lock())
        self.run.create(self.config, resume=resume, tokenizer=tokenizer)
        self._text = self._files.enter_context(self.run.log.open("a", encoding="utf-8"))

    def resumed(self, checkpoint: Place | None, steps_done: int) -> None:
        """Report where the run continues, and remove the metrics of steps that will be repeated."""
        if self._screen is None:
            return
        self._forget_after(steps_done)
        if checkpoint is None:
            self.write(f"no checkpoint in {self.run.checkpoints} yet: starting from step 1")
        else:
            self.write(f"resuming after step {steps_done} from {checkpoint}")

    def went_on(self, line: str, steps_done: int) -> None:
        """Report a change of ranks, likewise."""
        if self._screen is not None:
            self._forget_after(steps_done)
            self.write(line)

    def _forget_after(self, steps_done: int) -> None:
        for path in (self.run.metrics, self.run.evaluations):
            if path.exists():
                keep_until(path, steps_done)

    def introduce(self, job: Job, data: StepData) -> None:
        """Describe the model, the data, the ranks and the plan of the first batch. Only before the first step."""
        if self._metrics is not None or self._screen is None:
            return
        self._metrics = self._files.enter_context(self.run.metrics.open("a", encoding="utf-8"))
        self._trackers = open_trackers(self.run, self.config)
        for tracker in self._trackers:
            self._files.callback(tracker.close)
        if not job.changing.has_changed:  # its folder and its screen know the rest
            self._describe(job)
        self.write(f"plan    {gist(data.plan)}")
        self._screen.progress(data.step, self.config.trainer.steps)

    def _describe(self, job: Job) -> None:
        """The model, the data, the ranks and their memory."""
        mesh = job.ranks.mesh.shape
        degrees = f" ({mesh.pp} stages x {mesh.hdp} HDP x {mesh.tp} TP)" if mesh.size > mesh.hdp else ""
        dtype = str(job.ranks.dtype).removeprefix("torch.")
        self.write(f"model   {job.spec.describe()}")
        self.write(f"data    {describe_corpus(job.loader.metadata)}")
        self.write(
            f"ranks   {mesh.size} x {job.ranks.device.type}{degrees} ({dtype}), capacity "
            f"{format_count(job.memory.capacity_tokens)} tokens each, context "
            f"{format_count(job.config.data.context_length)}"
            + (f"; peak {format_si(job.peak_flops_per_second)}FLOP/s a rank" if job.peak_flops_per_second else "")
        )
        for line in (*job.kernels.lines(), *job.memory.lines()):
            self.write(line)
        if job.ranks.device.type == "cpu":
            begun = format_bytes(memory_bytes(job.ranks.device))
            self.write(
                f"        the rows show the memory of the whole process, which has {begun} before its first step"
            )

    def step(self, metrics: StepMetrics, data: StepData) -> None:
        """Write one row for people, one line for programs, and the plan."""
        before, self._first, self._last = self._last, self._first or metrics, metrics
        self._last_losses.append(metrics.loss)
        self._seconds += metrics.step_seconds
        if self._metrics is None or self._screen is None:
            return
        steps = self.config.trainer.steps
        if self._rows % _HEADER_EVERY == 0:
            self.write(step_header(steps, mfu=metrics.mfu is not None))
        self._rows += 1
        self._screen.line(step_row(metrics, steps, min(ROW_COLUMNS, self._screen.width)))
        self._to_file(step_row(metrics, steps))
        for line in remarks(metrics, before):
            self.write(line)
        self._screen.progress(metrics.step, steps)
        self._metrics.write(metrics.to_json())
        self._metrics.flush()
        for tracker in self._trackers:
            tracker.log(metrics.step, metrics.scalars())
        save_plan(data.plan, self.run.plan(metrics.step))

    def evaluated(self, metrics: EvaluationMetrics) -> None:
        """Write the result of an evaluation: two lines for people, and one of evaluations.jsonl for programs."""
        if self._screen is None:
            return
        for line in metrics.lines():
            self.write(line)
        with self.run.evaluations.open("a", encoding="utf-8") as file:
            file.write(metrics.to_json() + "\n")
        for tracker in self._trackers:
            tracker.log(metrics.step, {"eval_loss": metrics.loss, "eval_perplexity": metrics.perplexity})

    def finish(self, *, stopped: bool = False, suggests: bool = True) -> None:
        """Report where the results are and, if it ``suggests``, what to do next. ``stopped``: by a signal, early."""
        if self._screen is not None:
            self._screen.close()
        if self._first is None or self._last is None:
            self.write(f"nothing to do: step {self.config.trainer.steps} is done already, raise trainer.steps")
            return
        self.write(
            f"done    steps {self._first.step} to {self._last.step} in {self._seconds:.0f} s: loss "
            f"{self._first.loss:.3f} -> {mean(self._last_losses):.3f} (mean of the last "
            f"{len(self._last_losses)}); peak memory of a rank "
            f"{format_bytes(self._last.memory_bytes)}"
        )
        self.write(f"run     {self.run.path}  (config.toml, metrics.jsonl, plans/, checkpoints/)")
        if stopped:
            self.write(f"stopped by a signal after step {self._last.step}, which is saved")
            return
        if suggests:
            for line in next_lines(self.config, self._last.step):
                self.write(line)

    def write(self, line: str) -> None:
        """Write a line to the console and to log.txt."""
        line = visible(line)
        if self._screen is not None:
            self._screen.line(line)
            self._to_file(line)

    def _to_file(self, line: str) -> None:
        if self._text is not None:
            self._text.write(line + "\n")
            self._text.flush()


def next_lines(config: Config, step: int) -> list[str]:
    """What to do with a run that is done after ``step``, for people."""
    parallel, folder = config.parallel, config.trainer.run_dir
    flat = " --parallel.tp 1 --parallel.pp 1" if parallel.tp * parallel.pp > 1 else ""
    others = 2 if parallel.ranks != 2 or flat else 1
    return [
        "next    train on, on other ranks if you like:",
        f"          bytescale train --resume {folder} --trainer.steps {config.trainer.steps * 2} "
        f"--parallel.ranks {others}{flat}",
        "        see what every rank did, and what would help:",
        f"          bytescale report {folder}",
        "        make a folder of it that transformers loads:",
        f"          bytescale convert {folder}/checkpoints/step-{step:06d} {folder}/model",
    ]


def describe_corpus(corpus: CorpusMetadata) -> str:
    """Documents, sequences and tokens, and what the over-length policy did."""
    counts = corpus.counts
    first = f"first {corpus.num_parts_read} of {corpus.num_parts} shards: " if not corpus.is_complete else ""
    tokenizer = (corpus.tokenizer or "as in the .bin files") + " with BOS" * corpus.puts_bos
    cut = [
        f"{number} {what}"
        for number, what in (
            (counts.num_split, "split"),
            (counts.num_truncated, "truncated"),
            (counts.num_dropped, "dropped"),
        )
        if number
    ]
    if counts.num_untrained:
        cut.append(f"{counts.num_untrained} sequences without anything to train on")
    lost = f", {format_count(counts.num_lost_tokens)} tokens lost" if counts.num_lost_tokens else ""
    return (
        f"{first}{counts.num_documents} documents ({', '.join(cut) or 'none longer than the context'}{lost}) -> "
        f"{corpus.counts.num_samples} sequences, {format_count(corpus.counts.num_tokens)} tokens; tokenizer {tokenizer}"
    )
