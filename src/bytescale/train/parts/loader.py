"""The data of a run on one rank: read in this process, or by the servers of the remote loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import Config, LossPer
from bytescale.data.loading.assemble import MicroBatchData
from bytescale.data.loading.corpus import Corpus
from bytescale.data.loading.loader import Loader, Reader, StepData
from bytescale.data.loading.record import new_attempt_folder, recorder
from bytescale.data.open import opened_loader
from bytescale.data.order.batches import GlobalBatch
from bytescale.data.tokens.indexed import LABELS, WEIGHTS
from bytescale.hf.batch.documents import Documents, RankBatch
from bytescale.hf.batch.prefixes import part_of_trees, shared_plan
from bytescale.hf.loop.pictures import PictureLoader
from bytescale.plan.plan import Planner
from bytescale.plan.trees import Forest
from bytescale.planner.verified import VerifiedPlanner
from bytescale.runtime.plain_data import broadcast_json
from bytescale.train.ranks import Ranks
from bytescale.train.run_folder import RunFolder


@contextmanager
def loader_of_run(config: Config, ranks: Ranks, log: Callable[[str], None] = lambda line: None) -> Iterator[Loader]:
    """Open the loader that ``data.loader`` names, for the time of the block. Raises as ``opened_loader``."""

    def broadcast(items: list[Any]) -> None:
        items[:] = broadcast_json(items, ranks.checkpoint_group)

    reader = Reader(
        hdp_rank=ranks.hdp.rank, num_processes=ranks.world.size, is_first=ranks.is_first, broadcast=broadcast
    )
    kind = PrefixLoader if config.data.share_prefixes else PictureLoader
    with opened_loader(config.data, reader, log, kind=kind) as loader:
        if isinstance(loader, PictureLoader):
            loader.dtype, loader.ranks = ranks.dtype, ranks.mesh.encoding
        folder = RunFolder(Path(config.trainer.run_dir)).data
        about = {"num_ranks": ranks.hdp.size, "batch_tokens": config.data.batch_tokens}
        if config.data.record:
            loader.record = lambda: recorder(_new_attempt(folder, ranks, broadcast), ranks.hdp.rank, about)
        yield loader


def _new_attempt(folder: Path, ranks: Ranks, broadcast: Callable[[list[Any]], None]) -> Path | None:
    """The folder in which this attempt records its data; None on ranks with the same data as another of their mesh."""
    told: list[Any] = [str(new_attempt_folder(folder)) if ranks.is_first else ""]
    broadcast(told)
    return Path(told[0]) if ranks.mesh.stage == ranks.mesh.tp.rank == 0 else None


class PrefixLoader(Loader):
    """``data.share_prefixes``: prefixes that documents of a global batch have in common are rows that exist once.

    Which documents make a batch, and what its loss is divided by, stay as they are. Every rank reads the whole batch,
    finds the same trees in it (``hf.batch.prefixes``), and has the rows of its own micro-batches. A row has the sum of
    its documents' weights. Where nothing pays, the batch is read and planned as without.
    """

    def steps(self, planner: Planner, stop_step: int | None) -> Iterator[StepData]:
        assert isinstance(planner, VerifiedPlanner), "costs that are calibrated do not know trees"
        # Simulated steps would take a tree for one document.
        of_trees, sampler = replace(planner, step_times=None), self._started()
        while stop_step is None or sampler.next_step < stop_step:
            batch, started = sampler.next_batch(), time.perf_counter()
            documents = documents_of(self.corpus, batch, self._config.loss_per)
            plan, forest = shared_plan(documents, of_trees)
            if forest is None:
                data = self._with_tokens(batch, self._part_of(batch, planner(batch.lengths), started))
            else:
                data = _of_trees(self._part_of(batch, plan, started), documents, forest, batch)
            read = batch.num_tokens * self.corpus.index.token_bytes
            yield replace(data, times=replace(data.times, bytes_read=read))


def documents_of(corpus: Corpus, batch: GlobalBatch, loss_per: LossPer) -> Documents:
    """The batch with the weights that its loss has; a label of weight 0 is none."""
    found = corpus.documents(batch.samples)
    fields = {name: [torch.from_numpy(np.array(own[name])) for own in found] for name in ("tokens", LABELS)}
    scales = batch.scaling(loss_per).scales.tolist()
    weights = [torch.from_numpy(own[WEIGHTS].astype(np.float64)) for own in found]
    for labels, own in zip(fields[LABELS], weights, strict=True):
        labels[own == 0] = IGNORE_INDEX
    scaled = [own * scale for own, scale in zip(weights, scales, strict=True)]
    numbered = {name: dict(enumerate(values)) for name, values in {**fields, WEIGHTS: scaled}.items()}
    return Documents(fields=numbered, lengths=[len(own) for own in weights])


def micro_batches_of_trees(part: RankBatch, batch: GlobalBatch) -> tuple[MicroBatchData, ...]:
    """A rank's rows under a plan of trees: a label that several documents share counts once."""
    found = []
    for micro_batch, own in zip(part.rank_plan.micro_batches, part.rows, strict=True):
        assert micro_batch.trees is not None, "part_of_trees has added them"
        found.append(
            MicroBatchData(
                tokens=own["tokens"].numpy(),
                labels=own[LABELS].numpy(),
                position_ids=micro_batch.position_ids(),
                segment_samples=batch.samples.name[micro_batch.trees.documents],
                weights=own[WEIGHTS].numpy(),
            )
        )
    return tuple(found)


def _of_trees(data: StepData, documents: Documents, forest: Forest, batch: GlobalBatch) -> StepData:
    """A rank's step under a plan of the sequences of ``forest``."""
    part = part_of_trees(data.rank_plan, documents, forest, (), torch.float64)
    own_rows = zip(forest.documents.tolist(), forest.shared.tolist(), strict=True)
    return replace(
        data,
        num_targets=sum(int((documents.fields[LABELS][at][first:] != IGNORE_INDEX).sum()) for at, first in own_rows),
        rank_plan=part.rank_plan,
        micro_batches=micro_batches_of_trees(part, batch),
        forest=forest,
    )
