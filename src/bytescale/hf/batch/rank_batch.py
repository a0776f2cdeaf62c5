"""One rank's part of a planned batch, for loops in which a driver plans and sends every worker its rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bytescale.hf.batch.documents import Batch, Documents
from bytescale.plan import Plan, RankPlan
from bytescale.runtime import RankGroup


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """One rank's part of a planned batch: its plan and its rows. It can be pickled and sent.

    Attributes:
        rows: for each micro-batch its rows of every field.
        no_rows: of every field, as a micro-batch without tokens has it.
        num_documents: in the global batch.
        lengths: tokens of all documents of the global batch; None, then on every rank: they are not known.
    """

    rank_plan: RankPlan
    rows: list[dict[str, Tensor]]
    no_rows: dict[str, Tensor]
    num_documents: int
    lengths: list[int] | None

    def all_lengths(self, group: RankGroup) -> list[int]:
        """Tokens of all documents of the global batch. Every rank calls it.

        Where ranks do not know them, the end of each document is the last token that any rank has of it.
        """
        ends = np.zeros(self.num_documents)
        for micro_batch in self.rank_plan.micro_batches:
            np.maximum.at(ends, micro_batch.segment_sequences, micro_batch.segment_stops)
        return [int(end) for end in group.max_of(ends.tolist())] if self.lengths is None else self.lengths

    @staticmethod
    def of(rank_plan: RankPlan, documents: Documents) -> RankBatch:
        """The rows of ``documents`` that belong to a rank."""
        return RankBatch(
            rank_plan=rank_plan,
            rows=[documents.rows(micro_batch) for micro_batch in rank_plan.micro_batches],
            no_rows={name: values[0][:0] for name, values in documents.fields.items()},
            num_documents=len(documents.lengths),
            lengths=documents.lengths,
        )


def cut(plan: Plan, rank: int, batch: Batch, *, shift_labels: bool = False) -> RankBatch:
    """Rank ``rank``'s part of ``batch`` under ``plan``, for a driver that plans and sends each worker its rows."""
    return RankBatch.of(RankPlan.of(plan, rank), Documents.of(batch, shift_labels=shift_labels))
