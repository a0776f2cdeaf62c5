"""Evaluation during training: the loss on other data, by the length of sequences.

It runs forward only, between two steps. Weights, optimizer, random numbers and the training data are not touched, so a
run has the same losses with and without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import Config, DataConfig, EvalConfig
from bytescale.data.loading.assemble import MicroBatchData, Segments
from bytescale.data.loading.corpus import Corpus, check_vocabulary, prepare_corpus
from bytescale.data.order.batches import GlobalBatch, batches_once
from bytescale.data.stats import BUCKET_EDGES
from bytescale.data.tokens.indexed import WEIGHTS
from bytescale.hf.batch.prefixes import part_of_trees, shared_plan
from bytescale.hf.loop.pictures import memory_of_pictures, read_pictures
from bytescale.plan import MicroBatch, RankPlan
from bytescale.planner.verified import VerifiedPlanner
from bytescale.train.parts.job import Job
from bytescale.train.parts.loader import documents_of, micro_batches_of_trees
from bytescale.train.reporting.metrics import EvaluationMetrics

_COLUMNS = 3  # of a bucket: sum of weighted losses, sum of absolute weights, labels that are counted

PlannedBatch = tuple[GlobalBatch, RankPlan, Sequence[MicroBatchData]]
"""With the rank's rows where prefixes are shared (``data.share_prefixes``); others are read for each evaluation."""


def settings_of(config: Config) -> DataConfig:
    """How ``eval.sources`` are read."""
    return replace(config.data, sources=config.eval.sources, weights=())


def corpus_of(config: Config, vocab_size: int) -> Corpus:
    """The tokenised ``eval.sources``. Raises as ``prepare_corpus`` and ``check_vocabulary``."""
    corpus = prepare_corpus(settings_of(config))
    check_vocabulary(corpus.metadata, vocab_size)
    return corpus


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The data of the evaluations of a run, planned once. Every rank holds its own part."""

    job: Job
    corpus: Corpus
    batches: Sequence[PlannedBatch]

    @staticmethod
    def of(job: Job) -> Evaluation | None:
        """Read and plan ``eval.sources``; None without any. Every rank calls it. Raises as ``prepare_corpus``."""
        if not job.config.eval.sources:
            return None
        corpus = corpus_of(job.config, job.architecture.vocab_size)
        forward_cost = job.planner.cost.forward_only(job.ranks.dtype.itemsize)
        planner = replace(job.planner, cost=forward_cost, step_times=None)
        batches = [
            _planned(job, planner, corpus, batch) for batch in batches_once(corpus.index, job.config.data.batch_tokens)
        ]
        return Evaluation(job=job, corpus=corpus, batches=batches)

    def run(self, step: int) -> EvaluationMetrics:
        """Evaluate between two steps. Every rank calls it. Raises ``RankFailure`` if ranks hold different plans."""
        mesh = self.job.ranks.mesh
        self.job.optimizer.wait_for_parameters()
        totals = np.zeros((len(BUCKET_EDGES) + 1, _COLUMNS))
        for number, (batch, rank_plan, rows) in enumerate(self.batches):
            mesh.world.agree(f"the plan of evaluation batch {number} after step {step}", rank_plan.digest)
            data = rows or self.corpus.micro_batches(rank_plan, Segments.of(batch, rank_plan, "token"))
            pictures = read_pictures(
                self.corpus, settings_of(self.job.config), batch, rank_plan, mesh.encoding, self.job.ranks.dtype
            )
            with torch.no_grad():
                beside, _ = self.job.encode(pictures)
            losses = self.job.executor.evaluate(rank_plan, data, beside)
            if losses and mesh.tp.rank == 0:  # those of the last stage; all ranks of a TP group have the same
                for part, own, values in zip(rank_plan.micro_batches, data, losses, strict=True):
                    add_to_buckets(totals, batch.lengths, part, own, values.double().cpu().numpy())
        sums = mesh.world.sum_of(totals.flatten().tolist())
        return EvaluationMetrics.of(step, BUCKET_EDGES, np.array(sums).reshape(-1, _COLUMNS))


def _planned(job: Job, planner: VerifiedPlanner, corpus: Corpus, batch: GlobalBatch) -> PlannedBatch:
    rank, size = job.ranks.mesh.hdp.rank, job.ranks.mesh.encoding[1]
    if not job.config.data.share_prefixes:
        needed = memory_of_pictures(corpus, batch, job.memory.model.rows, size, keeps_graphs=False)
        return batch, RankPlan.of(planner.beside(*needed, int(batch.lengths.max()))(batch.lengths), rank), ()
    documents = documents_of(corpus, batch, "token")
    # A loss is counted with the weight of each of its documents, so rows whose weights differ stay apart.
    plan, forest = shared_plan(
        replace(documents, fields={**documents.fields, "own": documents.fields[WEIGHTS]}), planner
    )
    if forest is None:
        return batch, RankPlan.of(plan, rank), ()
    part = part_of_trees(RankPlan.of(plan, rank), documents, forest, (), torch.float64)
    rows = micro_batches_of_trees(part, batch)
    of_each = [(own[WEIGHTS] / own["multiplicity"]).numpy() for own in part.rows]
    return batch, part.rank_plan, [replace(own, weights=one) for own, one in zip(rows, of_each, strict=True)]


def add_to_buckets(
    totals: NDArray[np.float64], lengths: IntArray, part: MicroBatch, data: MicroBatchData, losses: NDArray[np.float64]
) -> None:
    """Add the tokens of a micro-batch to ``totals [B, 3]``, under the lengths ``[S]`` of their sequences."""
    runs = part.rows_of_documents
    rows = np.concatenate([np.zeros(0, np.int64), *(own for _, _, own in runs)])
    bucket = np.repeat(
        np.searchsorted(BUCKET_EDGES, lengths[[number for number, _, _ in runs]]), [len(own) for _, _, own in runs]
    )
    weights = ((data.labels != IGNORE_INDEX).astype(np.float64) if data.weights is None else data.weights)[rows]
    counted = weights != 0
    weighted = np.multiply(weights, losses[rows], out=np.zeros_like(weights), where=counted)
    for column, values in enumerate((weighted, np.abs(weights), counted)):
        np.add.at(totals[:, column], bucket, values)


@dataclass(frozen=True, kw_only=True)
class BestEvaluation:
    """The evaluations so far. All ranks have the same one, and checkpoints keep it."""

    settings: EvalConfig
    step: int = 0
    loss: float = math.inf
    num_worse: int = 0
    """Evaluations after it, none of which had a lower loss."""

    @staticmethod
    def of(settings: EvalConfig, stored: dict[str, float]) -> BestEvaluation:
        """Go on from what ``as_dict`` has stored, or begin if that is empty."""
        step, num_worse = int(stored.get("step", 0)), int(stored.get("num_worse", 0))
        return BestEvaluation(settings=settings, step=step, loss=stored.get("loss", math.inf), num_worse=num_worse)

    def as_dict(self) -> dict[str, float]:
        """For a checkpoint. ``kept``: whether the best one's checkpoint is to be kept; 0 or 1."""
        if not self.step:
            return {}
        kept = int(self.settings.keep_best)
        return {"step": self.step, "loss": self.loss, "num_worse": self.num_worse, "kept": kept}

    def after(self, step: int, loss: float) -> BestEvaluation:
        """With one more evaluation. A loss that is no number is not the lowest one."""
        if loss < self.loss:
            return replace(self, step=step, loss=loss, num_worse=0)
        return replace(self, num_worse=self.num_worse + 1)

    def is_saved_at(self, step: int) -> bool:
        return self.settings.keep_best and self.step == step

    @property
    def is_final(self) -> bool:
        """Whether the run ends, because the loss has not become lower for long enough."""
        return 0 < self.settings.patience <= self.num_worse

    def why_final(self) -> str:
        return (
            f"stop    {self.num_worse} evaluations in a row had no lower loss than {self.loss:.4f}, that of step "
            f"{self.step} (eval.patience = {self.settings.patience})"
        )
