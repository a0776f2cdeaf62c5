"""Batches that a loader reads: ``HDP.batches``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bytescale.common.errors import ConfigError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import DataConfig
from bytescale.data.loading.assemble import MicroBatchData
from bytescale.data.loading.corpus import check_vocabulary
from bytescale.data.loading.loader import Reader, StepData
from bytescale.data.open import opened_loader
from bytescale.data.order.batches import SamplerState
from bytescale.hf.batch.documents import RankBatch
from bytescale.hf.loop.pictures import PictureLoader
from bytescale.hf.loop.planned_batch import PlannedBatch
from bytescale.hf.loop.session import Session
from bytescale.hf.model.long_rope import require_short_enough
from bytescale.runtime.plain_data import broadcast_json

_NO_TOKENS = np.zeros(0, dtype=np.int64)


class LoadedBatch(PlannedBatch):
    """A ``PlannedBatch`` that a loader has read.

    The micro-batches have ``labels``, ``weights`` and those of ``data.fields``. A label of weight 0 is -100.

    Attributes:
        step: its number, from 0.
        num_targets: labels in the GLOBAL batch that are trained on.
        loss_divisor: the loss is the sum of weight x loss over all ranks' rows, divided by this (``data.loss_per``).
    """

    def __init__(self, hdp: Session, data: StepData, fields: Sequence[str], *, last: bool = False) -> None:
        part = _rank_batch(data, fields, next(hdp.model.parameters()).dtype)
        super().__init__(hdp, part, last=last, encode=data.items and data.items.encoded)
        self.step = data.step
        self.num_targets = data.num_targets
        self.loss_divisor = data.loss_divisor


@dataclass(kw_only=True)
class LoadedBatches:
    """Iterates over the global batches of a corpus, on one rank."""

    hdp: Session
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
    hdp: Session, data: DataConfig, state: SamplerState | None, stop_step: int | None, last: bool
) -> Iterator[LoadedBatches]:
    """Open the loader of one rank for the time of the block; see ``HDP.batches``."""
    if data.share_prefixes:
        raise ConfigError("hdp.batches does not know data.share_prefixes", so="it would have no effect",
                          fix="leave it out, or call hdp.plan(documents, share_prefixes=True)")  # fmt: skip
    group = hdp.group

    def broadcast(items: list[Any]) -> None:
        items[:] = broadcast_json(items, group.group, device=group.device)

    reader = Reader(hdp_rank=hdp.mesh.hdp.rank, num_processes=group.size, is_first=group.rank == 0, broadcast=broadcast)
    with opened_loader(data, reader, kind=PictureLoader) as loader:
        assert isinstance(loader, PictureLoader), "it was asked for"
        loader.dtype, loader.ranks = next(hdp.model.parameters()).dtype, hdp.mesh.encoding
        if (memory := hdp.room.memory) is not None:
            loader.memory = memory.rows, hdp.engine.activations.keeps_graphs
        check_vocabulary(loader.metadata, hdp.engine.decoder.words[0] or 0)
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
