"""What loops over batches leave: passes, of which an update may lack none, and results of rows for the caller."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch import Tensor

from bytescale.common.errors import PlanError, RankFailure
from bytescale.hf.batch.documents import RankBatch, of_documents
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.passes import MicroBatchPass
from bytescale.runtime.group import RankGroup
from bytescale.runtime.plain_data import all_gather_json

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

    def add(self, batch: int, num_passes: int, index: int, target: MicroBatchPass) -> None:
        self._passes.append((batch, num_passes, index, target))

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


class Collector:
    """Takes the results of a loop over ``part``, a rank's part of a batch."""

    def __init__(self, group: RankGroup, part: RankBatch) -> None:
        self.part = part
        self._group, self._kept = group, list[tuple[Micro, Tensor]]()

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
        group = self._group
        # A rank without rows does not know the shape and the dtype of a result, so ranks tell them.
        mine = [[list(values.shape[1:]), str(values.dtype).removeprefix("torch.")] for _, values in self._kept[:1]]
        told = [own for of_rank in all_gather_json(mine, group.group, group.device) for own in of_rank]
        if not told:
            raise PlanError("no rank has collected anything", fix="call hdp.collect(micro, values) in the loop")
        shape, dtype = told[0][0], getattr(torch, told[0][1])
        lengths = self.part.lengths
        starts = [0, *itertools.accumulate(lengths)]
        wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.int16: torch.int32}.get(dtype, dtype)
        flat = torch.zeros(starts[-1], *shape, dtype=wide, device=group.device)
        for micro, values in self._kept:
            runs, rows = micro.plan.runs, flat.new_zeros(micro.plan.num_tokens, *shape)
            rows[micro.rows] = values.to(wide)
            for (document, start, stop), own in zip(runs, rows.split([b - a for _, a, b in runs]), strict=True):
                flat[starts[document] + start : starts[document] + stop] = own
        of_sequences = list(group.all_reduce(flat).to(dtype).split(lengths))
        if (forest := self.part.forest) is None:
            return of_sequences
        of_all = dict(zip(forest.documents.tolist(), of_documents(forest, of_sequences), strict=True))
        return [of_all[number] for number in range(len(of_all))]
