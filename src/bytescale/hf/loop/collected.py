"""Results per token, gathered from all ranks and put back into the caller's documents."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from bytescale.common.errors import PlanError
from bytescale.hf.batch.rank_batch import RankBatch
from bytescale.hf.loop.micro_batch import Micro
from bytescale.runtime import RankGroup


class Collected:
    """Results of one global batch. S: documents."""

    def __init__(self, part: RankBatch) -> None:
        self._part = part
        self._kept: list[tuple[Micro, Tensor]] = []

    def add(self, micro: Micro, values: Tensor) -> None:
        """Keep ``values [T, ...]`` of a micro-batch. Raises ``PlanError`` for another number of rows."""
        if len(values) != micro.num_rows:
            raise PlanError(
                f"{len(values)} results for the {micro.num_rows} rows of micro-batch {micro.index}",
                so="they could not be given back to their tokens",
                fix="collect one result per row, without the row that stands for none: values[: micro.num_rows]",
            )
        self._kept.append((micro, values.detach()))

    def of_all(self, group: RankGroup) -> list[Tensor]:
        """``[S]`` tensors ``[length, ...]`` on the group's device, the same on every rank.

        Every token's result comes from one rank; the others add zero.
        """
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
            row = 0
            for document, start, stop in micro.plan.runs:
                place = slice(starts[document] + start, starts[document] + stop)
                flat[place] = values[row : row + stop - start].to(wide)
                row += stop - start
        return list(group.all_reduce(flat).to(dtype).split(lengths))
