"""This rank's micro-batches of one global batch, in the plan's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from bytescale.attach.interface import note_bypass
from bytescale.attach.micro_batch import Micro
from bytescale.attach.rank_batch import RankBatch
from bytescale.attention import RingBuffers
from bytescale.common.errors import PlanError, problem
from bytescale.plan import MicroBatch, Plan

if TYPE_CHECKING:
    from bytescale.attach.hdp import HDP


class PlannedBatch:
    """This rank's micro-batches of one global batch; iterating runs through them once, in the plan's order."""

    def __init__(self, hdp: HDP, part: RankBatch, *, last: bool = False) -> None:
        self.hdp = hdp
        self.number = hdp.handed_out.new_number()
        self.rank_plan = part.rank_plan
        self._part = part
        most = part.rank_plan.most_micro_batches
        self._num_passes = most if hdp.equal_counts else len(part.rank_plan.micro_batches)
        if last:
            hdp.promise.make(self)

    def __len__(self) -> int:
        return self._num_passes

    def __iter__(self) -> Iterator[Micro]:
        hdp = self.hdp
        hdp.begin_batch(self, self._part)
        buffers = RingBuffers()
        for index in range(self._num_passes):
            if index < len(self._part.rows):
                micro = hdp.engine.micro(self.rank_plan.micro_batches[index], self._part.rows[index], buffers)
            else:
                micro = hdp.engine.micro(local_documents(index, []), self._part.no_rows, buffers)
            hdp.promise.before(self, index)
            hdp.handed_out.add(self.number, index, micro.target)
            note_bypass(micro.target.bypass)
            try:
                yield micro
            finally:
                note_bypass(None)
            micro.target.require_finished()
            buffers.release()
        hdp.promise.end(self)


def local_documents(index: int, lengths: list[int]) -> MicroBatch:
    """A micro-batch of whole documents of these lengths."""
    stops = np.array(lengths, dtype=np.int64)
    return MicroBatch(
        index=index,
        shared=None,
        segment_sequences=np.arange(len(stops)),
        segment_starts=np.zeros_like(stops),
        segment_stops=stops,
        local_lengths=stops,
        offload_ratios=(),
    )


ONE_ROW = local_documents(0, [1])
"""A micro-batch of one document of one token."""


def check_plan(plan: Plan, lengths: list[int], num_ranks: int) -> None:
    """Raise ``PlanError`` unless ``plan`` is of documents of these lengths on so many ranks."""
    if plan.lengths.tolist() != lengths or plan.num_ranks != num_ranks:
        raise PlanError(
            problem(
                f"the plan is of {plan.num_sequences} documents with {plan.num_tokens} tokens on {plan.num_ranks} "
                f"ranks; the batch has {len(lengths)} documents with {sum(lengths)} tokens, and there are {num_ranks} "
                "ranks",
                so="rows would go to wrong places",
                fix="give the plan that was made for these documents, in the same order",
            )
        )
