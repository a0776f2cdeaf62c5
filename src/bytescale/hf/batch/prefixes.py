"""Documents whose common prefixes are computed once: their rows, and values from rows to documents and back.

**Which rows are shared.** Two documents share their first rows as long as these are equal in *every field* of the batch
but ``weights``: tokens, labels, and whatever a loss may look at, such as old log-probabilities or an advantage for each
token. So the last token of a prefix has a row in each branch, because the branches have different labels there. A
shared row has the sum of its documents' weights, and ``multiplicity`` says how many documents have it. Fields that the
caller names as those of whole documents (a reward) keep no rows apart; micro-batches do not have them.

Shape letters: D documents, S sequences, U rows of one sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bytescale.common.errors import DataError, PlanError
from bytescale.hf.batch.documents import Documents, RankBatch
from bytescale.plan import MicroBatch, Plan, RankPlan
from bytescale.plan.plan import offsets_of
from bytescale.plan.trees import Forest
from bytescale.planner.prefixes import Prefixes, plan_prefixes, with_equal_work
from bytescale.planner.verified import VerifiedPlanner


def shared_plan(
    documents: Documents,
    planner: VerifiedPlanner,
    *,
    labels: Sequence[Hashable] | None = None,
    per_document: Collection[str] = (),
) -> tuple[Plan, Forest | None]:
    """A plan whose sequences are trees of documents. None: nothing is shared, and its sequences are the documents.

    Args:
        labels: see ``HDP.plan``; documents of one label alone share rows.
        per_document: fields that keep no rows apart.

    Raises ``DataError`` for fields that do not exist or are needed.
    """
    needed = {"tokens", "labels", "weights"} & set(per_document)
    unknown = sorted({*per_document} - set(documents.fields)) if not needed else sorted(needed)
    if unknown:
        raise DataError(
            f"per_document names {', '.join(map(repr, unknown))}; the batch has {sorted(documents.fields)}",
            so="rows with different values would be shared" if needed else "",
            fix="name fields of the batch that the loss does not look at row by row",
        )
    fields = [values for name, values in sorted(documents.fields.items()) if name not in ("weights", *per_document)]
    packed = [torch.cat([*values.values()]).cpu().contiguous() for values in fields]
    rows = np.concatenate([own.view(len(own), -1).view(torch.uint8).numpy() for own in packed], axis=1)
    content, edges = rows.tobytes(), (rows.shape[1] * offsets_of(documents.lengths)).tolist()
    prefixes = Prefixes.of([content[start:stop] for start, stop in pairwise(edges)], rows.shape[1], labels)
    plan, forest = plan_prefixes(planner, prefixes, labels)
    if forest is not None and (plan.group_sizes > 1).any():
        plan = with_equal_work(plan, forest, planner.cost)
        planner.check(plan)
    return plan, forest


def part_of_trees(
    rank_plan: RankPlan, documents: Documents, forest: Forest, per_document: Collection[str], dtype: torch.dtype
) -> RankBatch:
    """A rank's part of ``documents`` under a plan of the sequences of ``forest``: its own rows, with ``multiplicity``.

    Weights are added up in fp64, and kept in their own dtype or a wider one: at least fp32, and ``dtype`` if that is
    fp64 as the model's. Raises ``PlanError`` for a row that is not that of all documents that have it.
    """
    micro_batches = tuple(micro_batch.with_trees(forest) for micro_batch in rank_plan.micro_batches)
    nothing = MicroBatch.of_documents(0, []).with_trees(forest)
    no_rows, *rows = (_rows(own, documents, per_document, dtype) for own in (nothing, *micro_batches))
    return RankBatch(
        rank_plan=replace(rank_plan, micro_batches=micro_batches),
        rows=rows,
        no_rows=no_rows,
        lengths=forest.sequence_lengths.tolist(),
        forest=forest,
    )


def _rows(
    micro_batch: MicroBatch, documents: Documents, per_document: Collection[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """``[T, ...]`` of every field but ``per_document``, and ``multiplicity``."""
    runs = micro_batch.rows_of_documents
    places = torch.as_tensor(np.concatenate([np.zeros(0, np.int64), *(rows for _, _, rows in runs)]))

    def of_runs(values: Mapping[int, Tensor]) -> Tensor:
        cut = [values[number][start : start + len(rows)] for number, start, rows in runs]
        return torch.cat([values[0][:0], *cut])

    found = {}
    for name, values in documents.fields.items():
        if name in ("weights", *per_document):
            continue
        given = of_runs(values)
        at = places.to(given.device)
        found[name] = given.new_empty(micro_batch.num_tokens, *given.shape[1:]).index_put((at,), given)
        differs = (found[name][at] != given).flatten(1).any(dim=1) if given.dim() > 1 else found[name][at] != given
        if differs.any():
            raise PlanError(
                f"rows of the field {name!r} under a plan of trees are not those of all documents that have them",
                so="rows of other documents would be trained on in their place",
                fix="report this, with the documents",
            )
    weights = of_runs(documents.fields["weights"])
    kept = torch.promote_types(weights.dtype, torch.promote_types(dtype, torch.float32))
    for name, counted, own in (("weights", weights.double(), kept), ("multiplicity", torch.ones_like(places), None)):
        sums = counted.new_zeros(micro_batch.num_tokens).index_add_(0, places.to(counted.device), counted)
        found[name] = sums.to(own or sums.dtype)
    return found
