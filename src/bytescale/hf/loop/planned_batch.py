"""This rank's micro-batches of one global batch, in the plan's order.

``hdp.plan(batch, last=True)`` promises that ``step()`` follows, and gradients are reduced meanwhile. It cannot be
inferred: a rank without micro-batches does not see whether the others train or only look at a batch, and a batch that
came later would send ring messages behind reductions, which might never end (``plan.last_message``). A rank whose last
micro-batch has no shared documents then reduces during its backward, layer by layer. Every other one posts its
reductions when its loop over the batch ends. Nothing else may use the gradients until ``step()``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bytescale.attention import RingBuffers
from bytescale.common.errors import ConfigError, PlanError, RankFailure
from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import DataConfig
from bytescale.data.loading.assemble import MicroBatchData
from bytescale.data.loading.corpus import check_vocabulary
from bytescale.data.loading.loader import Reader, StepData
from bytescale.data.open import opened_loader
from bytescale.data.order.batches import SamplerState
from bytescale.hf.batch.documents import RankBatch
from bytescale.hf.batch.prefixes import of_documents
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.head import embeddings_of
from bytescale.hf.model.long_rope import require_short_enough
from bytescale.hf.model.passes import MicroBatchPass
from bytescale.plan import MicroBatch
from bytescale.plan.last_message import last_backward_is_silent
from bytescale.runtime.plain_data import all_gather_json, broadcast_json

if TYPE_CHECKING:
    from bytescale.hf.loop.hdp import HDP


_LACKS = "the gradient would lack its tokens"
_ALL = (
    "call model(**micro.inputs) and backward on every micro-batch of hdp.plan(batch), and score under torch.no_grad()"
)


class PendingPasses:
    """Passes by batch and micro-batch. A loop may look at a batch first, and run it in a second one."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self._passes: list[tuple[int, int, int, MicroBatchPass]] = []
        """Of each the number of its batch, how many micro-batches this has, and which one it is."""

    def add(self, batch: PlannedBatch, index: int, target: MicroBatchPass) -> None:
        self._passes.append((batch.number, len(batch), index, target))

    def forget_looks(self, batch: int) -> None:
        """Forget a batch that was only looked at. A loop that scores never calls ``finish``."""
        own = [target for number, *_, target in self._passes if number == batch]
        if not any(target.trained for target in own):
            self._passes = [one for one in self._passes if one[0] != batch]

    def require_backwards(self, before: str) -> None:
        """Raise ``RankFailure`` if a backward has not run ``before`` something."""
        for *_, target in self._passes:
            if target.backward_is_missing:
                raise RankFailure(
                    f"{target.name}: its backward has not run before {before}",
                    so=_LACKS,
                    fix="call backward on every micro-batch's loss, inside of the loop over a batch that was "
                    "planned with last=True, and run scoring under torch.no_grad()",
                )

    def require_trained(self, batch: int) -> None:
        """Raise ``RankFailure`` if a pass of a batch that was planned with last=True ran without gradients."""
        for number, _, _, target in self._passes:
            if number == batch and not target.trained:
                raise RankFailure(
                    f"{target.name}: the loop over a batch that was planned with last=True ended without a backward",
                    so=f"{_LACKS}, and ranks are about to reduce it",
                    fix="plan a batch that is only looked at without last=True",
                )

    def finish(self) -> None:
        """An update is due: forget all. Raises ``RankFailure`` if gradients would lack tokens."""
        self.require_backwards("step()")
        passes, self._passes = self._passes, []
        trained = {(number, index) for number, _, index, target in passes if target.trained}
        ran = Counter(number for number, _ in trained)
        for number, _, index, target in passes:
            if (number, index) not in trained and (number in ran or not trained):
                raise RankFailure(f"{target.name} was not run by the model", so=_LACKS, fix=_ALL)
        for number, num_passes, _, _ in passes:
            if 0 < ran[number] < num_passes:
                raise RankFailure(
                    f"the loop over a batch ended after {ran[number]} of its {num_passes} micro-batches",
                    so="the gradient would lack the tokens of the others",
                    fix=_ALL,
                )


class PlannedBatch:
    """This rank's micro-batches of one global batch; iterating runs through them once, in the plan's order."""

    def __init__(self, hdp: HDP, part: RankBatch, *, last: bool = False) -> None:
        self.hdp = hdp
        self.number = next(hdp.pending.numbers)
        self.rank_plan, self.forest = part.rank_plan, part.forest
        self._part = part
        self._last = last
        self._kept: list[tuple[Micro, Tensor]] = []
        self._num_passes = part.rank_plan.num_rounds
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
        return self._num_passes

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The plan's, and behind them those without tokens that ranks in lockstep run."""
        own = self.rank_plan.micro_batches
        return [*own, *(MicroBatch.of_documents(index, []) for index in range(len(own), self._num_passes))]

    def __iter__(self) -> Iterator[Micro]:
        hdp = self.hdp
        hdp.begin_batch(self)
        self._kept = []
        buffers = RingBuffers()
        for index, plan in enumerate(self.micro_batches):
            rows = self._part.rows[index] if index < len(self._part.rows) else self._part.no_rows
            micro = hdp.engine.micro(plan, rows, buffers)
            if self._last and index + 1 == len(self):
                hdp.pending.require_backwards("gradients are reduced (last=True)")
                hdp.sharded().expect_last_backward(last_backward_is_silent(self.rank_plan))
            hdp.pending.add(self, index, micro.target)
            yield micro
            micro.target.require_finished()
            buffers.release()
        if self._last:
            hdp.pending.require_backwards("gradients are reduced (last=True)")
            hdp.pending.require_trained(self.number)
            hdp.sharded().after_last_message()
            hdp.is_reducing = True
        elif not torch.is_grad_enabled():
            hdp.pending.forget_looks(self.number)

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
        # A rank without rows does not know the shape and the dtype of a result, so ranks tell them.
        mine = [[list(values.shape[1:]), str(values.dtype).removeprefix("torch.")] for _, values in self._kept[:1]]
        told = [own for of_rank in all_gather_json(mine, group.group, group.device) for own in of_rank]
        if not told:
            raise PlanError("no rank has collected anything", fix="call hdp.collect(micro, values) in the loop")
        shape, dtype = told[0][0], getattr(torch, told[0][1])
        lengths = self._part.lengths
        starts = [0, *itertools.accumulate(lengths)]
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        flat = torch.zeros(starts[-1], *shape, dtype=wide, device=group.device)
        for micro, values in self._kept:
            runs = micro.plan.runs
            for (document, start, stop), own in zip(runs, values.split([b - a for _, a, b in runs]), strict=True):
                flat[starts[document] + start : starts[document] + stop] = own.to(wide)
        of_sequences = list(group.all_reduce(flat).to(dtype).split(lengths))
        if (forest := self.forest) is None:
            return of_sequences
        of_all = dict(zip(forest.documents.tolist(), of_documents(forest, of_sequences), strict=True))
        return [of_all[number] for number in range(len(of_all))]


_NO_TOKENS = np.zeros(0, dtype=np.int64)


class LoadedBatch(PlannedBatch):
    """A ``PlannedBatch`` that a loader has read.

    The micro-batches have ``labels``, ``weights`` and those of ``data.fields``. A label of weight 0 is -100.

    Attributes:
        step: its number, from 0.
        num_targets: labels in the GLOBAL batch that are trained on.
        loss_divisor: the loss is the sum of weight x loss over all ranks' rows, divided by this (``data.loss_per``).
    """

    def __init__(self, hdp: HDP, data: StepData, fields: Sequence[str], *, last: bool = False) -> None:
        super().__init__(hdp, _rank_batch(data, fields, next(hdp.model.parameters()).dtype), last=last)
        self.step = data.step
        self.num_targets = data.num_targets
        self.loss_divisor = data.loss_divisor


@dataclass(kw_only=True)
class LoadedBatches:
    """Iterates over the global batches of a corpus, on one rank."""

    hdp: HDP
    steps: Iterator[StepData]
    state: SamplerState
    fields: Sequence[str]
    last: bool

    def __iter__(self) -> Iterator[LoadedBatch]:
        for data in self.steps:
            require_short_enough(data.plan.lengths.tolist(), self.hdp.engine.decoder.longest_document)
            self.hdp.agree(f"the plan of step {data.step}", data.rank_plan.digest)
            self.state = data.sampler_state_after
            yield LoadedBatch(self.hdp, data, self.fields, last=self.last)

    def state_dict(self) -> SamplerState:
        """Where the batch behind the last one starts, as plain numbers and texts: ``HDP.batches`` continues there."""
        return dict(self.state)


@contextmanager
def loaded_batches(
    hdp: HDP, data: DataConfig, state: SamplerState | None, stop_step: int | None, last: bool
) -> Iterator[LoadedBatches]:
    """Open the loader of one rank for the time of the block; see ``HDP.batches``."""
    if data.share_prefixes:
        raise ConfigError("hdp.batches does not know data.share_prefixes", so="it would have no effect",
                          fix="leave it out, or call hdp.plan(documents, share_prefixes=True)")  # fmt: skip
    group = hdp.group

    def broadcast(items: list[Any]) -> None:
        items[:] = broadcast_json(items, group.group, device=group.device)

    reader = Reader(hdp_rank=group.rank, num_processes=group.size, is_first=group.rank == 0, broadcast=broadcast)
    with opened_loader(data, reader) as loader:
        check_vocabulary(loader.metadata, len(embeddings_of(hdp.model)[0].weight))
        if state is not None:
            loader.load_state_dict(state)
        start = loader.state_dict()
        with loader.open(hdp.planner, stop_step) as steps:
            yield LoadedBatches(hdp=hdp, steps=steps, state=start, fields=data.fields, last=last)


def _rank_batch(data: StepData, fields: Sequence[str], dtype: torch.dtype) -> RankBatch:
    """What a loader has read, as rows of every field. Weights are fp32, or fp64 for a model in fp64."""
    wide = torch.promote_types(dtype, torch.float32)
    nothing = MicroBatchData(
        tokens=_NO_TOKENS, labels=_NO_TOKENS, position_ids=_NO_TOKENS, segment_samples=_NO_TOKENS,
        fields={name: np.zeros(0, np.float32) for name in fields},
    )  # fmt: skip
    return RankBatch(
        rank_plan=data.rank_plan,
        rows=[_rows(micro_batch, wide) for micro_batch in data.micro_batches],
        no_rows=_rows(nothing, wide),
        lengths=data.plan.lengths.tolist(),
    )


def _rows(data: MicroBatchData, wide: torch.dtype) -> dict[str, Tensor]:
    labels = torch.as_tensor(data.labels)
    weights = labels != IGNORE_INDEX if data.weights is None else torch.as_tensor(data.weights)
    rows = {name: torch.as_tensor(values) for name, values in data.fields.items()}
    return {"tokens": torch.as_tensor(data.tokens), "labels": labels, "weights": weights.to(wide), **rows}
