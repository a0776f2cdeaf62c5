"""This rank's micro-batches of one global batch, in the plan's order.

``hdp.plan(batch, last=True)`` promises that ``step()`` follows, and gradients are reduced meanwhile. It cannot be
inferred: a rank without micro-batches does not see whether the others train or only look at a batch, and a batch that
came later would send ring messages behind reductions, which might never end (``plan.last_message``). A rank whose last
micro-batch has no shared documents then reduces during its backward, layer by layer. Every other one posts its
reductions when its loop over the batch ends. Nothing else may use the gradients until ``step()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

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

    _encoded: EncodedItems | None = None  # while micro-batches run
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

    def forward_backward(
        self, loss: Callable[[Micro], Any], *, prepare: Callable[[Micro], object] = lambda micro: None
    ) -> float:
        """Run every micro-batch forward, and backward from ``loss(micro)``. Every rank calls it; ``step`` follows.

        It is a loop whose body is a function, as pipelines need: on the last stage alone, ``loss`` runs the model on a
        micro-batch, once, and returns a scalar: a sum over rows, divided by a number of the global batch. Under
        ``torch.no_grad()`` there is no backward, and it need not return anything. ``prepare`` is called on every stage,
        with each micro-batch before it runs.

        Returns the sum over all micro-batches of all ranks, the same on every rank. Raises as a loop does.
        """
        losses = list[torch.Tensor]()

        def noted(micro: Micro) -> Any:
            try:
                total = loss(micro)
            except Exception as error:
                if self.hdp.mesh.shape.pp > 1:
                    error.add_note("Other stages wait for this rank until its process ends or calls hdp.recover().")
                raise
            if torch.is_grad_enabled() and not (micro.target.trained and isinstance(total, torch.Tensor)):
                raise ConfigError(
                    f"the loss of micro-batch {micro.index} did not run the model, or returned {type(total).__name__}",
                    so="ranks would wait for a gradient that does not come",
                    fix="return a scalar made by micro.loss_sum(model), micro.logprobs(model) or model(**micro.inputs)",
                )
            if isinstance(total, torch.Tensor):
                losses.append(total.detach().double())
            return total

        if self.hdp.mesh.shape.pp > 1:
            self._run_stage(noted, prepare)
        for micro in self if self.hdp.mesh.shape.pp == 1 else ():
            prepare(micro)
            total = noted(micro)
            if torch.is_grad_enabled():
                total.backward()
        return self.hdp.group.sum_of([float(sum(losses))])[0]

    def _run_stage(self, loss: Callable[[Micro], Any], prepare: Callable[[Micro], object]) -> None:
        """Run the micro-batches on this stage of a pipeline."""
        from bytescale.runtime.pipeline import StageLinks, run_stage  # few loops have stages

        self._begin()
        hdp, decoder, buffers = self.hdp, self.hdp.engine.decoder, RingBuffers()
        if torch.is_autocast_enabled(hdp.group.device.type):
            hdp.require("torch.autocast")
        if torch.is_grad_enabled():
            hdp.sharded()  # adds up what ranks have, also of a tied embedding on two stages

        def forward(index: int, received: torch.Tensor | None) -> Any:
            micro = self._micro(index, self.micro_batches[index], buffers)
            prepare(micro)
            with decoder.receiving(received, micro.inputs["input_ids"].shape[1]):
                is_last = hdp.mesh.is_last_stage
                output = loss(micro) if is_last else decoder.output(micro.inputs, micro.plan.num_tokens)
            buffers.release()
            return output

        if hdp.tied is not None:
            hdp.tied.send_weights()
        links = StageLinks(hdp.mesh, self.rank_plan, decoder.hidden_size, next(decoder.parameters()).dtype)
        run_stage(links, forward, lambda _: nullcontext(), buffers.release)
        if torch.is_grad_enabled() and hdp.tied is not None:
            hdp.tied.add_gradient()
        self._end()

    def _begin(self) -> None:
        hdp, self._kept = self.hdp, []
        hdp.require_ranks_of(self._mesh)
        hdp.begin_batch(self)
        if self._encode is not None:
            engine = hdp.engine
            self._encoded = self._encode(engine.decoder, hdp.group, keeps_graphs=engine.activations.keeps_graphs)
            hdp.encoders_backward = self._encoded.backward

    def __iter__(self) -> Iterator[Micro]:
        hdp = self.hdp
        hdp.require("a loop over micro-batches")
        self._begin()
        buffers = RingBuffers()
        for index, plan in enumerate(self.micro_batches):
            if self._last and index + 1 == len(self):
                hdp.pending.require_backwards("gradients are reduced (last=True)")
            micro = self._micro(index, plan, buffers)
            yield micro
            micro.target.require_finished()
            buffers.release()
        self._end()

    def _micro(self, index: int, plan: MicroBatch, buffers: RingBuffers) -> Micro:
        """The micro-batch of this number, which is run now."""
        hdp = self.hdp
        rows = self.part.rows[index] if index < len(self.part.rows) else self.part.no_rows
        micro = hdp.engine.micro(plan, rows, buffers)
        micro.inputs |= {} if self._encoded is None else self._encoded.beside(index)
        if self._last and index + 1 == len(self):
            # Behind the last backward comes that of encoders, whose rows travel.
            silent = self._encode is None and last_backward_is_silent(self.rank_plan, hdp.mesh.stage)
            hdp.sharded().expect_last_backward(silent)
        hdp.pending.add(self.number, len(self), index, micro.target)
        return micro

    def _end(self) -> None:
        """All micro-batches have been run: gradients may be reduced, if no others follow."""
        hdp, self._encoded = self.hdp, None
        hdp.finish_items()
        if self._last:
            hdp.pending.require_backwards("gradients are reduced (last=True)")
            hdp.pending.require_trained(self.number)
            hdp.sharded().after_last_message()
            hdp.is_reducing = True
        elif not torch.is_grad_enabled():
            hdp.pending.forget_looks(self.number)
