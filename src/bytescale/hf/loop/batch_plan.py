"""From a global batch to this rank's part of a plan: of its documents, or of the trees that they make.

Lengths decide the plan, and every rank has them all. Of a large batch, a rank looks at the contents of two ranks'
documents alone: its own, which it trains on, and the next rank's. So each document is seen by a rank that trains on it
and by another one, and both have to have the same. All is told in one exchange: all ranks go on, or none.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bytescale.common.errors import DataError, PlanError, RankFailure
from bytescale.hf.batch.documents import Batch, Documents, RankBatch, lengths_of, require_trainable
from bytescale.hf.loop.alike import digest_of
from bytescale.hf.loop.planned_batch import PlannedBatch
from bytescale.hf.loop.session import Session
from bytescale.plan import Plan, RankPlan
from bytescale.plan.trees import Forest
from bytescale.runtime.plain_data import all_gather_json

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

    @staticmethod
    def of(
        hdp: Session, batch: Batch, *, shift_labels: bool, per_document: Collection[str] | None, whole: bool = False
    ) -> BatchToPlan:
        """Raises as ``HDP.plan`` for a batch that cannot be used, or not now.

        ``whole``: whether every rank needs all documents.
        """
        hdp.require_no_reduction("a batch was planned")
        given = BatchToPlan(hdp=hdp, batch=batch, lengths=lengths_of(batch), shift_labels=shift_labels)
        is_split = hdp.group.size > 1 and hdp.mesh.tp.size == 1 and len(batch) > ALL_DOCUMENTS
        if per_document is None and not whole and is_split:
            return given
        documents = Documents.of(batch, shift_labels=shift_labels, lengths=given.lengths)
        given.require_fitting(documents)
        return replace(given, documents=documents, per_document=per_document)

    def require_fitting(self, documents: Documents) -> None:
        for decoder in (self.hdp.engine.decoder, *self.hdp.engine.others):
            decoder.require_fitting(documents.fields, self.lengths)

    @property
    def all_documents(self) -> Documents:
        assert self.documents is not None, "prefixes are shared of documents that all ranks look at"
        return self.documents

    def plan(
        self, labels: Sequence[Hashable] | None = None, capacity_tokens: int | None = None
    ) -> tuple[Plan, Forest | None]:
        """A plan, and the trees that are its sequences; None: they are the documents. Arguments: see ``HDP.plan``."""
        planner = self.hdp.planner_of(capacity_tokens)
        if self.per_document is None:
            return planner(np.array(self.lengths), labels), None
        from bytescale.hf.batch.prefixes import shared_plan  # with share_prefixes alone

        return shared_plan(self.all_documents, planner, labels=labels, per_document=self.per_document)

    def part(self, plan: Plan, forest: Forest | None = None, *, last: bool = False) -> PlannedBatch:
        """This rank's part of the batch under a plan. Raises as ``HDP.plan`` for a plan of other documents or ranks."""
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
        what = "the documents of a batch, or its plan"
        if self.documents is None:
            hdp.agree(what, rank_plan.digest ^ digest_of(self.lengths))
            return PlannedBatch(hdp, RankBatch.of(rank_plan, self._own_documents(plan, rank_plan)), last=last)
        hdp.agree(what, rank_plan.digest ^ self.documents.digest(range(len(self.lengths))))
        if forest is None:
            return PlannedBatch(hdp, RankBatch.of(rank_plan, self.documents), last=last)
        from bytescale.hf.batch.prefixes import part_of_trees  # with share_prefixes alone

        dtype = next(hdp.model.parameters()).dtype
        part = part_of_trees(rank_plan, self.documents, forest, self.per_document or (), dtype)
        return PlannedBatch(hdp, part, last=last)

    def _own_documents(self, plan: Plan, rank_plan: RankPlan) -> Documents:
        """This rank's documents, checked, when all ranks have checked theirs. Every rank calls it.

        Raises ``DataError`` on every rank where one has found what cannot be used, and ``RankFailure`` where two ranks
        have different documents.
        """
        group = self.hdp.group
        own, following = _numbers(rank_plan), _numbers(RankPlan.of(plan, (group.rank + 1) % group.size, digest=0))
        error, documents, digests, totals = None, None, (0, 0), [0.0] * 4
        try:
            wanted = [*own, *following]
            documents = Documents.of(self.batch, shift_labels=self.shift_labels, numbers=wanted, lengths=self.lengths)
            self.require_fitting(documents)
            digests = documents.digest(own), documents.digest(following)
            totals = documents.totals(_counted(rank_plan))
        except DataError as found:
            error = found
        # A digest is counted once for its owner and once less for the rank before it: halves of it are exact in fp64.
        halves = [divmod(digest, _HALF) for digest in digests]
        difference = [float(ours - theirs) for ours, theirs in zip(*halves, strict=True)]
        failed, *sums = group.sum_of([float(error is not None), *difference, *totals])
        if failed:
            told = all_gather_json(None if error is None else str(error), group.group, group.device)
            rank = next(number for number, text in enumerate(told) if text)
            raise error or DataError(f"rank {rank} found in its documents: {told[rank]}")
        if any(sums[:2]):
            self._raise_different(digests)
        require_trainable(sums[2:])
        assert documents is not None, "there was no error"
        return documents

    def _raise_different(self, digests: tuple[int, int]) -> None:
        group = self.hdp.group
        told = all_gather_json(digests, group.group, group.device)
        for rank in range(group.size):
            if told[rank][1] != told[(rank + 1) % group.size][0]:
                raise RankFailure(
                    f"ranks {rank} and {(rank + 1) % group.size} have different contents in the documents of a batch "
                    f"that rank {(rank + 1) % group.size} trains on",
                    so="they would train on different data",
                    fix="give every rank the same batch, in the same order",
                )


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
