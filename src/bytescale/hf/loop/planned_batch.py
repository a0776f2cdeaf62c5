"""This rank's micro-batches of one global batch, in the plan's order.

``hdp.plan(batch, last=True)`` promises that ``step()`` follows, and gradients are reduced meanwhile. It cannot be
inferred: a rank without micro-batches does not see whether the others train or only look at a batch, and a batch that
came later would send ring messages behind reductions, which might never end (``plan.last_message``). A rank whose last
micro-batch has no shared documents then reduces during its backward, layer by layer. Every other one posts its
reductions when its loop over the batch ends. Nothing else may use the gradients until ``step()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bytescale.attention import RingBuffers
from bytescale.common.errors import ConfigError, PlanError
from bytescale.hf.batch.rank_batch import RankBatch
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.interface import note_bypass
from bytescale.plan import MicroBatch, Plan
from bytescale.plan.last_message import last_backward_is_silent

if TYPE_CHECKING:
    from bytescale.hf.loop.hdp import HDP


class PlannedBatch:
    """This rank's micro-batches of one global batch; iterating runs through them once, in the plan's order."""

    def __init__(self, hdp: HDP, part: RankBatch, *, last: bool = False) -> None:
        self.hdp = hdp
        self.number = next(hdp.handed_out.numbers)
        self.rank_plan = part.rank_plan
        self._part = part
        self._last = last
        self._num_passes = part.rank_plan.num_rounds
        if hdp.equal_counts and part.rank_plan.domain != part.rank_plan.num_ranks:
            raise PlanError(
                f"the plan is for domains of {part.rank_plan.domain} ranks in lockstep, not for equal_counts = True",
                so="ranks would run different numbers of passes and wait for each other for ever",
                fix="make the plan with equal_counts = True, too",
            )
        if last and not hdp.sharded().overlaps:
            raise ConfigError(
                "last=True, but the gradients of this model cannot be reduced layer by layer: its attention is not in "
                "numbered layers, or its trained parameters have several dtypes",
                so="nothing could overlap",
                fix="leave last=True out",
            )

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
            if self._last and index + 1 == len(self):
                hdp.handed_out.require_backwards("gradients are reduced (last=True)")
                hdp.sharded().expect_last_backward(last_backward_is_silent(self.rank_plan))
            hdp.handed_out.add(self.number, index, micro.target)
            note_bypass(micro.target.bypass)
            try:
                yield micro
            finally:
                note_bypass(None)
            micro.target.require_finished()
            buffers.release()
        if self._last:
            hdp.handed_out.require_backwards("gradients are reduced (last=True)")
            hdp.handed_out.require_trained(self.number)
            hdp.sharded().after_last_message()
            hdp.is_reducing = True


def check_plan(plan: Plan, lengths: list[int], num_ranks: int) -> None:
    """Raise ``PlanError`` unless ``plan`` is of documents of these lengths on so many ranks."""
    if plan.lengths.tolist() != lengths or plan.num_ranks != num_ranks:
        raise PlanError(
            f"the plan is of {plan.num_sequences} documents with {plan.num_tokens} tokens on {plan.num_ranks} "
            f"ranks; the batch has {len(lengths)} documents with {sum(lengths)} tokens, and there are {num_ranks} "
            "ranks",
            so="rows would go to wrong places",
            fix="give the plan that was made for these documents, in the same order",
        )
