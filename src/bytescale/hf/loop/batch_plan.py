"""From a global batch to this rank's part of a plan: of its documents, or of the trees that they make."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bytescale.common.errors import PlanError
from bytescale.hf.batch.documents import Batch, Documents, RankBatch
from bytescale.hf.batch.prefixes import part_of_trees, shared_plan
from bytescale.hf.loop.planned_batch import PlannedBatch
from bytescale.plan import Plan, RankPlan
from bytescale.plan.trees import Forest

if TYPE_CHECKING:
    from bytescale.hf.loop.hdp import HDP


@dataclass(frozen=True, kw_only=True)
class BatchToPlan:
    """A checked global batch, and how it is to be planned."""

    hdp: HDP
    documents: Documents
    per_document: Collection[str] | None = None  # fields that keep no rows apart; None: prefixes are not shared

    @staticmethod
    def of(hdp: HDP, batch: Batch, *, shift_labels: bool, per_document: Collection[str] | None) -> BatchToPlan:
        """Raises as ``HDP.plan`` for a batch that cannot be used, or not now."""
        hdp.require_no_reduction("a batch was planned")
        documents = Documents.of(batch, shift_labels=shift_labels)
        for decoder in (hdp.engine.decoder, *hdp.engine.others):
            decoder.require_fitting(documents.fields, documents.lengths)
        return BatchToPlan(hdp=hdp, documents=documents, per_document=per_document)

    def plan(
        self, labels: Sequence[Hashable] | None = None, capacity_tokens: int | None = None
    ) -> tuple[Plan, Forest | None]:
        """A plan, and the trees that are its sequences; None: they are the documents. Arguments: see ``HDP.plan``."""
        planner = self.hdp.planner_of(capacity_tokens)
        if self.per_document is None:
            return planner(np.array(self.documents.lengths), labels), None
        return shared_plan(self.documents, planner, labels=labels, per_document=self.per_document)

    def part(self, plan: Plan, forest: Forest | None = None, *, last: bool = False) -> PlannedBatch:
        """This rank's part of the batch under a plan. Raises as ``HDP.plan`` for a plan of other documents or ranks."""
        hdp, digest, ranks = self.hdp, self.documents.digest(), self.hdp.group.size
        lengths = self.documents.lengths if forest is None else forest.sequence_lengths.tolist()
        if plan.lengths.tolist() != lengths or plan.num_ranks != ranks:
            raise PlanError(
                f"the plan is of {plan.num_sequences} documents with {plan.num_tokens} tokens on {plan.num_ranks} "
                f"ranks; the batch has {len(lengths)} documents with {sum(lengths)} tokens, and there are {ranks} "
                "ranks",
                so="rows would go to wrong places",
                fix="give the plan that was made for these documents, in the same order",
            )
        rank_plan = RankPlan.of(plan, hdp.group.rank)
        hdp.agree("the documents of a batch, or its plan", digest ^ rank_plan.digest)
        if forest is None:
            return PlannedBatch(hdp, RankBatch.of(rank_plan, self.documents), last=last)
        dtype = next(hdp.model.parameters()).dtype
        part = part_of_trees(rank_plan, self.documents, forest, self.per_document or (), dtype)
        return PlannedBatch(hdp, part, last=last)
