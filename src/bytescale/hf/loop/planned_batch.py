"""This rank's micro-batches of one global batch, in the plan's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bytescale.attention import RingBuffers
from bytescale.common.errors import PlanError, problem
from bytescale.hf.batch.rank_batch import RankBatch
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.interface import note_bypass
from bytescale.plan import MicroBatch, Plan

if TYPE_CHECKING:
    from bytescale.hf.loop.hdp import HDP


class PlannedBatch:
    """This rank's micro-batches of one global batch; iterating runs through them once, in the plan's order."""

    def __init__(self, hdp: HDP, part: RankBatch, *, last: bool = False) -> None:
        self.hdp = hdp
        self.number = hdp.handed_out.new_number()
        self.rank_plan = part.rank_plan
        self._part = part
        self._num_passes = part.rank_plan.num_rounds
        if part.rank_plan.domain % hdp.domain:
            raise PlanError(
                f"the plan is for domains of {part.rank_plan.domain} ranks in lockstep; here they have {hdp.domain}",
                so="ranks would run different numbers of passes and wait for each other for ever",
                fix="make the plan for the same domain, or with equal_counts = True, as HDP(...) was told",
            )
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
                micro = hdp.engine.micro(MicroBatch.of_documents(index, []), self._part.no_rows, buffers)
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
