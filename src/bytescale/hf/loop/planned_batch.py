"""This rank's micro-batches of one global batch, in the plan's order.

``hdp.plan(batch, last=True)`` promises that ``step()`` follows, and gradients are reduced meanwhile. It cannot be
inferred: a rank without micro-batches does not see whether the others train or only look at a batch, and a batch that
came later would send ring messages behind reductions, which might never end (``plan.last_message``). A rank whose last
micro-batch has no shared documents then reduces during its backward, layer by layer. Every other one posts its
reductions when its loop over the batch ends. Nothing else may use the gradients until ``step()``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bytescale.attention import RingBuffers
from bytescale.common.errors import ConfigError, PlanError, RankFailure
from bytescale.hf.batch.documents import RankBatch
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.decoder import MicroBatchPass
from bytescale.hf.model.interface import note_bypass
from bytescale.plan import MicroBatch
from bytescale.plan.last_message import last_backward_is_silent

if TYPE_CHECKING:
    from bytescale.hf.loop.hdp import HDP


_LACKS = "the gradient would lack its tokens"
_ALL = (
    "call model(**micro.inputs) and backward on every micro-batch of hdp.plan(batch), and score under torch.no_grad()"
)


class HandedOut:
    """Passes by batch and micro-batch. A loop may look at a batch first, and run it in a second one."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self._batches: dict[int, tuple[int, dict[int, list[MicroBatchPass]]]] = {}

    def add(self, batch: PlannedBatch, index: int, target: MicroBatchPass) -> None:
        """A micro-batch is handed out."""
        _, held = self._batches.setdefault(batch.number, (len(batch), {}))
        held.setdefault(index, []).append(target)

    def require_backwards(self, before: str) -> None:
        """Raise ``RankFailure`` if a backward has not run ``before`` something."""
        for _, held in self._batches.values():
            for target in itertools.chain.from_iterable(held.values()):
                if target.backward_is_missing:
                    raise RankFailure(
                        f"{target.name}: its backward has not run before {before}",
                        so=_LACKS,
                        fix="call backward on every micro-batch's loss, inside of the loop over a batch that was "
                        "planned with last=True, and run scoring under torch.no_grad()",
                    )

    def require_trained(self, batch: int) -> None:
        """Raise ``RankFailure`` if a pass of a batch that was planned with last=True ran without gradients."""
        _, held = self._batches.get(batch, (0, {}))
        for target in itertools.chain.from_iterable(held.values()):
            if not target.trained:
                raise RankFailure(
                    f"{target.name}: the loop over a batch that was planned with last=True ended without a backward",
                    so=f"{_LACKS}, and ranks are about to reduce it",
                    fix="plan a batch that is only looked at without last=True",
                )

    def finish(self) -> None:
        """An update is due: forget all. Raises ``RankFailure`` if gradients would lack tokens."""
        self.require_backwards("step()")
        batches, self._batches = self._batches, {}
        trained = False
        for num_passes, held in batches.values():
            ran = {index for index, passes in held.items() if any(target.trained for target in passes)}
            trained |= bool(ran)
            for index, passes in held.items():
                if index not in ran and (ran or any(target.bypassed for target in passes)):
                    raise _not_run(passes[-1])
            if ran and len(ran) < num_passes:
                raise RankFailure(
                    f"the loop over a batch ended after {len(ran)} of its {num_passes} micro-batches",
                    so="the gradient would lack the tokens of the others",
                    fix=_ALL,
                )
        lost = [passes[-1] for _, held in batches.values() for passes in held.values()]
        if lost and not trained:
            raise _not_run(lost[0])


def _not_run(target: MicroBatchPass) -> RankFailure:
    if target.bypassed:
        return RankFailure(
            f"{target.name}: the model ran without micro.inputs, and attention of the plan was called zero times",
            so="its documents saw each other, and ranks that share them would wait",
            fix="call model(**micro.inputs) with all that is in it, hdp_attention included",
        )
    return RankFailure(f"{target.name} was not run by the model", so=_LACKS, fix=_ALL)


class PlannedBatch:
    """This rank's micro-batches of one global batch; iterating runs through them once, in the plan's order."""

    def __init__(self, hdp: HDP, part: RankBatch, *, last: bool = False) -> None:
        self.hdp = hdp
        self.number = next(hdp.handed_out.numbers)
        self.rank_plan = part.rank_plan
        self._part = part
        self._last = last
        self._kept: list[tuple[Micro, Tensor]] = []
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
        hdp.begin_batch(self)
        self._kept = []
        buffers = RingBuffers()
        for index in range(self._num_passes):
            if index < len(self._part.rows):
                micro = hdp.engine.micro(self.rank_plan.micro_batches[index], self._part.rows[index], buffers)
            else:
                micro = hdp.engine.micro(MicroBatch.of_documents(index, []), self._part.no_rows, buffers)
            if self._last and index + 1 == len(self):
                hdp.handed_out.require_backwards("gradients are reduced (last=True)")
                hdp.sharded().expect_last_backward(last_backward_is_silent(self.rank_plan))
            hdp.handed_out.add(self, index, micro.target)
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

    def collect(self, micro: Micro, values: Tensor) -> None:
        """``HDP.collect``. Raises ``PlanError`` for another number of rows."""
        if len(values) != micro.num_rows:
            raise PlanError(
                f"{len(values)} results for the {micro.num_rows} rows of micro-batch {micro.index}",
                so="they could not be given back to their tokens",
                fix="collect one result per row, without the row that stands for none: values[: micro.num_rows]",
            )
        self._kept.append((micro, values.detach()))

    def collected(self) -> list[Tensor]:
        """``HDP.collected``. Every token's result comes from one rank; the others add zero."""
        group = self.hdp.group
        # A rank without rows does not know the shape of a result, so ranks exchange it: number of dimensions and sizes.
        known = self._kept[0][1].shape[1:] if self._kept else torch.Size()
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
        mine = [len(known) + 1, dtypes.index(self._kept[0][1].dtype), *known] if self._kept else [0, 0]
        mine += [0] * (8 - len(mine))
        largest = [int(value) for value in group.max_of([float(value) for value in mine])]
        if not largest[0]:
            raise PlanError("no rank has collected anything", fix="call hdp.collect(micro, values) in the loop")
        lengths = self._part.all_lengths(group)
        starts = [0, *itertools.accumulate(lengths)]
        shape, dtype = largest[2 : 1 + largest[0]], dtypes[largest[1]]
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        flat = torch.zeros(starts[-1], *shape, dtype=wide, device=group.device)
        for micro, values in self._kept:
            runs = micro.plan.runs
            for (document, start, stop), own in zip(runs, values.split([b - a for _, a, b in runs]), strict=True):
                flat[starts[document] + start : starts[document] + stop] = own.to(wide)
        return list(group.all_reduce(flat).to(dtype).split(lengths))
