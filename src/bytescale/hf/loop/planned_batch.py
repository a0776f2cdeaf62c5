"""This rank's micro-batches of one global batch, in the plan's order.

``hdp.plan(batch, last=True)`` promises that ``step()`` follows, and gradients are reduced meanwhile. It cannot be
inferred: a rank without micro-batches does not see whether the others train or only look at a batch, and a batch that
came later would send ring messages behind reductions, which might never end (``plan.last_message``). A rank whose last
micro-batch has no shared documents then reduces during its backward, layer by layer. Every other one posts its
reductions when its loop over the batch ends. Nothing else may use the gradients until ``step()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from bytescale.attention import RingBuffers
from bytescale.common.errors import ConfigError, PlanError
from bytescale.hf.batch.documents import Batch, RankBatch
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.loop.pending import Collector
from bytescale.hf.loop.session import Session
from bytescale.plan import MicroBatch
from bytescale.plan.last_message import last_backward_is_silent

if TYPE_CHECKING:
    from bytescale.hf.loop.encoded import EncodedItems


class PlannedBatch(Collector):
    """This rank's micro-batches of one global batch; iterating runs through them once, in the plan's order."""

    batch: Batch = ()  # the global batch, where ``HDP.planned`` has taken it

    def __init__(
        self, hdp: Session, part: RankBatch, *, last: bool = False, encode: Callable[..., EncodedItems] | None = None
    ) -> None:  # fmt: skip
        """``encode``: images, videos and sounds, by the model on the ranks of the group."""
        super().__init__(hdp.group, part)
        self._encode = encode
        self.hdp, hdp.looped, self._mesh = hdp, None, hdp.mesh
        self.number = next(hdp.pending.numbers)
        self.rank_plan, self.forest = part.rank_plan, part.forest
        self._last = last
        if part.rank_plan.domain % hdp.domain:
            raise PlanError(
                f"the plan is for domains of {part.rank_plan.domain} ranks in lockstep; here they have {hdp.domain}",
                so="ranks would run different numbers of passes and wait for each other for ever",
                fix="make the plan for the same domain, or with equal_counts = True, as HDP(...) was told",
            )
        if last and hdp.sharded().overlap is None:
            raise ConfigError(
                "last=True, but the gradients of this model cannot be reduced layer by layer: ranks share its "
                "parameters, or its trained parameters have several dtypes",
                so="nothing could overlap",
                fix="leave last=True out",
            )

    def __len__(self) -> int:
        return self.rank_plan.num_rounds

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The plan's, and behind them those without tokens that ranks in lockstep run."""
        own = self.rank_plan.micro_batches
        return [*own, *(MicroBatch.of_documents(index, []) for index in range(len(own), self.rank_plan.num_rounds))]

    def __iter__(self) -> Iterator[Micro]:
        hdp = self.hdp
        self._kept = []
        hdp.require_ranks_of(self._mesh)
        hdp.begin_batch(self)
        buffers, encoded = RingBuffers(), None
        if self._encode is not None:
            encoded = self._encode(hdp.engine.decoder, hdp.group, keeps_graphs=hdp.engine.activations.keeps_graphs)
            hdp.encoders_backward = encoded.backward
        for index, plan in enumerate(self.micro_batches):
            rows = self.part.rows[index] if index < len(self.part.rows) else self.part.no_rows
            micro = hdp.engine.micro(plan, rows, buffers)
            if encoded is not None:
                micro.inputs |= encoded.beside(index)
            if self._last and index + 1 == len(self):
                hdp.pending.require_backwards("gradients are reduced (last=True)")
                # Behind the last backward comes that of encoders, whose rows travel.
                silent = encoded is None and last_backward_is_silent(self.rank_plan)
                hdp.sharded().expect_last_backward(silent)
            hdp.pending.add(self.number, len(self), index, micro.target)
            yield micro
            micro.target.require_finished()
            buffers.release()
        hdp.finish_items()
        if self._last:
            hdp.pending.require_backwards("gradients are reduced (last=True)")
            hdp.pending.require_trained(self.number)
            hdp.sharded().after_last_message()
            hdp.is_reducing = True
        elif not torch.is_grad_enabled():
            hdp.pending.forget_looks(self.number)
