"""Global batches that the loaders read: every rank reads or fetches its own rows, and no rank holds a whole batch.

The loaders, their order and their places to resume from are the trainer's (``data.loading``, ``data.remote``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import DataConfig
from bytescale.data.feed import opened_feed
from bytescale.data.loading.assemble import MicroBatchData
from bytescale.data.loading.corpus import check_vocabulary
from bytescale.data.loading.loader import Reader, StepData
from bytescale.data.order.batches import SamplerState
from bytescale.hf.batch.documents import RankBatch
from bytescale.hf.loop.planned_batch import PlannedBatch
from bytescale.hf.model.head import embeddings_of
from bytescale.runtime.plain_data import broadcast_json

if TYPE_CHECKING:
    from bytescale.hf.loop.hdp import HDP

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
        """``fields``: the names of ``data.fields``."""
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
            self.hdp.group.agree(f"the plan of step {data.step}", data.rank_plan.digest)
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
    group = hdp.group

    def tell(items: list[Any]) -> None:
        items[:] = broadcast_json(items, group.group, device=group.device)

    reader = Reader(hdp_rank=group.rank, num_processes=group.size, is_first=group.rank == 0, tell=tell)
    with opened_feed(data, reader) as feed:
        check_vocabulary(feed.metadata, len(embeddings_of(hdp.model)[0].weight))
        if state is not None:
            feed.load_state_dict(state)
        start = feed.state_dict()
        with feed.open(hdp.planner, stop_step) as steps:
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
        num_documents=data.summary.num_sequences,
        lengths=None,  # under the remote loader, the first rank alone has the whole plan
    )


def _rows(data: MicroBatchData, wide: torch.dtype) -> dict[str, Tensor]:
    labels = torch.as_tensor(data.labels)
    weights = labels != IGNORE_INDEX if data.weights is None else torch.as_tensor(data.weights)
    rows = {name: torch.as_tensor(values) for name, values in data.fields.items()}
    return {"tokens": torch.as_tensor(data.tokens), "labels": labels, "weights": weights.to(wide), **rows}
