"""From a global batch to this rank's part of a plan: of its documents, or of the trees that they make.

Lengths decide the plan, and every rank has them all. Of a large batch, a rank looks at the contents of two ranks'
documents alone: its own, which it trains on, and the next rank's. So each document is seen by a rank that trains on it
and by another one, and both have to have the same. All is told in one exchange: all ranks go on, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from bytescale.common.errors import DataError, PlanError, RankFailure
from bytescale.hf.batch.documents import ITEM_NAMES, Batch, Documents, RankBatch, lengths_of, require_trainable
from bytescale.hf.loop.alike import digest_of
from bytescale.hf.loop.planned_batch import PlannedBatch
from bytescale.hf.loop.session import Session
from bytescale.plan import Plan, RankPlan
from bytescale.plan.trees import Forest
from bytescale.planner.verified import VerifiedPlanner
from bytescale.runtime.plain_data import all_gather_json

if TYPE_CHECKING:
    from bytescale.hf.loop.encoded import EncodedItems, Items
    from bytescale.runtime.mesh import Mesh

ALL_DOCUMENTS = 256
"""So many documents, every rank looks at in full."""
_HALF = 2**32


@dataclass(frozen=True, kw_only=True)
class BatchToPlan:
    """A global batch, and how it is to be planned."""

    hdp: Session
    batch: Batch
    lengths: list[int]
    shift_labels: bool = False
    documents: Documents | None = None  # all of them, checked; None: a rank checks those that it needs
    per_document: Collection[str] | None = None  # fields that keep no rows apart; None: prefixes are not shared
    items: Items | None = None  # images, videos and sounds; None: there are none

    @staticmethod
    def of(
        hdp: Session, batch: Batch, *, shift_labels: bool, per_document: Collection[str] | None, whole: bool = False
    ) -> BatchToPlan:
        """Raises as ``HDP.plan`` for a batch that cannot be used. ``whole``: whether every rank needs all documents."""
        given = BatchToPlan(hdp=hdp, batch=batch, lengths=lengths_of(batch), shift_labels=shift_labels)
        if any(name in document for document in batch for name in ITEM_NAMES):
            from bytescale.hf.loop.encoded import Items, require_use  # few batches have them

            if items := Items.of(batch, hdp.engine.decoder.encoders.work):
                require_use(items, hdp.engine.decoder, hdp.engine.others)
                given = replace(given, items=items)
        is_split = 1 < hdp.group.size == hdp.mesh.hdp.size and len(batch) > ALL_DOCUMENTS
        if per_document is None and not whole and is_split:
            return given
        documents = given.checked(None)
        return replace(given, documents=documents, per_document=per_document)

    def checked(self, numbers: Sequence[int] | None) -> Documents:
        """The documents with these ``numbers``; None: all."""
        documents = Documents.of(self.batch, shift_labels=self.shift_labels, numbers=numbers, lengths=self.lengths)
        if self.items is not None:
            documents = self.items.with_fields(documents, self.hdp.engine.decoder.encoders)
        for decoder in (self.hdp.engine.decoder, *self.hdp.engine.others):
            decoder.require_fitting(documents.fields, self.lengths)
        return documents

    @property
    def all_documents(self) -> Documents:
        assert self.documents is not None, "prefixes are shared of documents that all ranks look at"
        return self.documents

    def plan(
        self, labels: Sequence[Hashable] | None = None, planner: VerifiedPlanner | None = None
    ) -> tuple[Plan, Forest | None]:
        """A plan, and the trees that are its sequences; None: they are the documents. ``labels``: ``together``."""
        planner = self._beside_items(planner or self.hdp.planner)
        if self.per_document is None:
            return planner(np.array(self.lengths), labels), None
        from bytescale.hf.batch.prefixes import shared_plan  # with share_prefixes alone

        return shared_plan(self.all_documents, planner, labels=labels, per_document=self.per_document)

    def _beside_items(self, planner: VerifiedPlanner) -> VerifiedPlanner:
        memory, engine = self.hdp.room.memory, self.hdp.engine
        if self.items is None or memory is None or not (patches := memory.rows.encoder_patches):
            return planner
        from bytescale.hf.model.encoders import frames_of

        needed = self.items.memory(
            [[number / patches for number in frames_of(item)] for _, item in self.items.items],
            self.hdp.mesh.encoding[1], sum(self.lengths), memory.rows,
            keeps_graphs=engine.activations.keeps_graphs, by_frames=engine.decoder.encoders.by_frames,
        )  # fmt: skip
        return planner.beside(*needed, max(self.lengths))

    def part(self, plan: Plan, forest: Forest | None = None) -> PlannedBatch:
        """This rank's part of the batch under a plan. Raises as ``HDP.plan`` for a plan of other documents or ranks."""
        return self.cut(plan, forest).agreed()

    def cut(self, plan: Plan, forest: Forest | None = None) -> CutBatch:
        """What ``part`` does without a message to others, in any thread."""
        hdp, ranks = self.hdp, self.hdp.mesh.hdp.size
        lengths = self.lengths if forest is None else forest.sequence_lengths.tolist()
        if plan.lengths.tolist() != lengths or plan.num_ranks != ranks:
            raise PlanError(
                f"the plan is of {plan.num_sequences} documents with {plan.num_tokens} tokens on {plan.num_ranks} "
                f"ranks; the batch has {len(lengths)} documents with {sum(lengths)} tokens, and there are {ranks} "
                "ranks",
                so="rows would go to wrong places",
                fix="give the plan that was made for these documents, in the same order",
            )
        rank_plan = RankPlan.of(plan, hdp.mesh.hdp.rank)
        if self.documents is None:
            return self._cut_of_own(rank_plan, _numbers(RankPlan.of(plan, (hdp.group.rank + 1) % ranks, digest=0)))
        value = rank_plan.digest ^ self.documents.digest(range(len(self.lengths))) ^ digest_of(self.items)
        if forest is None:
            part = RankBatch.of(rank_plan, self.documents)
            encode = self._encode(part, self.documents, _numbers(rank_plan))
            return CutBatch(hdp=hdp, batch=self.batch, value=value, part=part, encode=encode)
        from bytescale.hf.batch.prefixes import part_of_trees  # with share_prefixes alone

        dtype = next(hdp.model.parameters()).dtype
        part = part_of_trees(rank_plan, self.documents, forest, self.per_document or (), dtype)
        encode = self._encode(part, self.documents, range(len(self.lengths)))
        return CutBatch(hdp=hdp, batch=self.batch, value=value, part=part, encode=encode)

    def _cut_of_own(self, rank_plan: RankPlan, following: list[int]) -> CutBatch:
        """Look at this rank's documents and the ``following`` ones, which are the next rank's."""
        own, value = (
            _numbers(rank_plan),
            rank_plan.digest ^ digest_of(self.lengths, self.items),
        )
        try:
            documents = self.checked([*own, *following])
        except DataError as error:
            return CutBatch(hdp=self.hdp, batch=self.batch, value=value, part=error, digests=(0, 0))
        part, digests = RankBatch.of(rank_plan, documents), (documents.digest(own), documents.digest(following))
        totals = documents.totals(_counted(rank_plan))
        encode = self._encode(part, documents, own)
        return CutBatch(
            hdp=self.hdp, batch=self.batch, value=value, part=part, digests=digests, totals=totals, encode=encode
        )

    def _encode(
        self, part: RankBatch, documents: Documents, numbers: Sequence[int]
    ) -> Callable[..., EncodedItems] | None:
        """What encodes the items for a part. Of documents with these ``numbers``, placeholders are counted."""
        if self.items is None:
            return None
        from bytescale.hf.loop.encoded import EncodedItems

        tokens, encoders = documents.fields["tokens"], self.hdp.engine.decoder.encoders
        totals = {number: encoders.counts(tokens[number]) for number in numbers}
        return partial(EncodedItems, items=self.items, rows=part.rows, totals=totals)


@dataclass(frozen=True, kw_only=True)
class CutBatch:
    """This rank's part of a planned batch. Any thread may have made it; ranks have not compared anything yet."""

    hdp: Session
    batch: Batch
    value: int  # the same on all ranks
    part: RankBatch | DataError  # or what was wrong with this rank's documents
    digests: tuple[int, int] | None = None  # of this rank's documents and the next one's; None: the value has all
    totals: Sequence[float] = (0.0,) * 4  # of those that this rank counts
    encode: Callable[..., EncodedItems] | None = None
    mesh: Mesh = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", self.hdp.mesh)

    def agreed(self, *, last: bool = False) -> PlannedBatch:
        """Return the part when all ranks have the same batch and plan. Every rank calls it, in its training thread.

        Raises ``DataError`` on every rank where one has found what cannot be used, and ``RankFailure`` where two ranks
        have different documents or plans.
        """
        self.hdp.require_ranks_of(self.mesh)
        self.hdp.require_no_reduction("a batch was planned")
        self.hdp.agree("the documents of a batch, or its plan", self.value)
        if self.digests is not None:
            self._require_same_documents(self.digests)
        assert not isinstance(self.part, DataError), "all ranks have raised it"
        return PlannedBatch(self.hdp, self.part, last=last, encode=self.encode)

    def _require_same_documents(self, digests: tuple[int, int]) -> None:
        group, error = self.hdp.group, self.part if isinstance(self.part, DataError) else None
        # A digest is counted once for its owner and once less for the rank before it: halves of it are exact in fp64.
        halves = [divmod(digest, _HALF) for digest in digests]
        difference = [float(ours - theirs) for ours, theirs in zip(*halves, strict=True)]
        failed, *sums = group.sum_of([float(error is not None), *difference, *self.totals])
        if failed:
            told = all_gather_json(None if error is None else str(error), group.group, group.device)
            rank = next(number for number, text in enumerate(told) if text)
            raise error or DataError(f"rank {rank} found in its documents: {told[rank]}")
        told = all_gather_json(digests, group.group, group.device) if any(sums[:2]) else []
        for rank, (_, copied) in enumerate(told):
            following = (rank + 1) % group.size
            if copied != told[following][0]:
                raise RankFailure(
                    f"ranks {rank} and {following} have different contents in the documents of a batch that rank "
                    f"{following} trains on",
                    so="they would train on different data",
                    fix="give every rank the same batch, in the same order",
                )
        require_trainable(sums[2:])


def planned_ahead(cuts: Iterator[CutBatch], device: torch.device, last: bool) -> Iterator[PlannedBatch]:
    """``HDP.planned``. A thread makes one of ``cuts`` while the one before is used, and ends with the loop."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None  # documents may lie on a GPU

    def make() -> CutBatch | None:
        with torch.cuda.stream(stream):
            return next(cuts, None)

    with ThreadPoolExecutor(1, thread_name_prefix="bytescale-planner") as thread:
        made = thread.submit(make)
        while (cut := made.result()) is not None:
            made = thread.submit(make)
            planned = cut.agreed(last=last)
            planned.batch = cut.batch
            yield planned


def _numbers(rank_plan: RankPlan) -> list[int]:
    """The documents that a rank has, whole or in part."""
    return sorted({number for own in rank_plan.micro_batches for number in own.sequences.tolist()})


def _counted(rank_plan: RankPlan) -> list[int]:
    """Those of them that it counts, so that every document is counted by one rank."""
    found = []
    for own in rank_plan.micro_batches:
        first = 0 if own.shared is None or own.shared.member == 0 else len(own.shared.sequences)
        found += own.sequences[first:].tolist()
    return found
