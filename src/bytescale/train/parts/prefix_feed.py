"""A run's data with ``data.share_prefixes``: prefixes that documents of a global batch share are rows that exist once.

Which documents make a batch, and what its loss is divided by, stay as they are. Every rank reads the whole batch, finds
the same trees in it (``hf.batch.prefixes``), and has the rows of its own micro-batches. A row has the sum of its
documents' weights. Where nothing pays, the batch is read and planned as without.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from bytescale.common.labels import IGNORE_INDEX
from bytescale.data.loading.assemble import MicroBatchData
from bytescale.data.loading.loader import LocalFeed, PlannedStep, StepData
from bytescale.data.order.batches import GlobalBatch
from bytescale.data.tokens.fields import LABELS, WEIGHTS
from bytescale.hf.batch.documents import Documents, RankBatch
from bytescale.hf.batch.prefixes import rows_of_sequences, shared_plan
from bytescale.plan.plan import Planner
from bytescale.plan.summary import PlanSummary
from bytescale.plan.trees import Forest
from bytescale.planner.verified import VerifiedPlanner


class PrefixFeed(LocalFeed):
    """Reads the corpus in this process, whole batches on every rank."""

    def steps(self, planner: Planner, stop_step: int | None) -> Iterator[StepData]:
        assert isinstance(planner, VerifiedPlanner), "costs that are calibrated do not know trees"
        # Simulated steps would take a tree for one document.
        planner, sampler = replace(planner, step_times=None), self._started()
        window = min((window for window, _ in planner.cost.windows), default=None)
        while stop_step is None or sampler.next_step < stop_step:
            batch, started = sampler.next_batch(), time.perf_counter()
            documents = self._documents(batch)
            plan, forest = shared_plan(documents, planner, window=window)
            planned = PlannedStep(
                batch=batch,
                plan=plan,
                digest=plan.digest(),
                summary=PlanSummary.of(plan),
                loss_per=self._config.loss_per,
                state_after=sampler.state_dict(),
                planning_seconds=time.perf_counter() - started,
            )
            data, segments = planned.part_of(self._rank)
            if forest is None:
                data = replace(data, micro_batches=self._corpus.micro_batches(data.rank_plan, segments))
            else:
                data = _of_trees(data, documents, forest, batch)
            read = batch.num_tokens * self._corpus.index.token_bytes
            yield replace(data, times=replace(data.times, bytes_read=read))

    def _documents(self, batch: GlobalBatch) -> Documents:
        """The batch with the weights that its loss has; a label of weight 0 is none."""
        found = self._corpus.documents(batch.samples)
        fields = {name: [torch.from_numpy(np.array(own[name])) for own in found] for name in ("tokens", LABELS)}
        scales = batch.scaling(self._config.loss_per).scales.tolist()
        weights = [torch.from_numpy(own[WEIGHTS].astype(np.float64)) for own in found]
        for labels, own in zip(fields[LABELS], weights, strict=True):
            labels[own == 0] = IGNORE_INDEX
        return Documents(fields={**fields, WEIGHTS: [own * scale for own, scale in zip(weights, scales, strict=True)]})


def _of_trees(data: StepData, documents: Documents, forest: Forest, batch: GlobalBatch) -> StepData:
    """A rank's step under a plan of the sequences of ``forest``: a label that several documents share counts once."""
    rows = rows_of_sequences(documents, forest, (), torch.float64)
    part = RankBatch.of(data.rank_plan, rows, forest)
    micro_batches = []
    for micro_batch, own in zip(part.rank_plan.micro_batches, part.rows, strict=True):
        assert micro_batch.trees is not None, "RankBatch.of has added them"
        micro_batches.append(
            MicroBatchData(
                tokens=own["tokens"].numpy(),
                labels=own[LABELS].numpy(),
                position_ids=micro_batch.position_ids(),
                segment_samples=batch.samples.name[micro_batch.trees.documents],
                weights=own[WEIGHTS].numpy(),
            )
        )
    squares = int((forest.lengths**2 - forest.shared**2).sum())
    return replace(
        data,
        num_targets=sum(int((labels != IGNORE_INDEX).sum()) for labels in rows.fields[LABELS]),
        rank_plan=part.rank_plan,
        micro_batches=tuple(micro_batches),
        summary=replace(data.summary, sum_of_squares=squares),
    )
