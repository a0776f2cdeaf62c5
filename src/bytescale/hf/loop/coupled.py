"""Losses that look at several whole documents at once: pairs of DPO, groups of rollouts of one prompt.

The loss is a sum over *labels*; the loss of a label looks at the values (log-probabilities) of the documents that have
the label. Of two ways to compute it, with the same numbers, the one that is estimated to take less time is taken:

* **One pass.** The plan keeps the documents of a label in one micro-batch of one group, whose members gather them.
* **Two passes.** A pass without gradients gathers the values of all documents. Every rank computes the loss and its
  gradient with respect to the values, from which the second pass, on the same plan, goes backward.

Shape letters: T rows of a micro-batch, S tokens of a document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bytescale.common.errors import NonFiniteError, PlanError
from bytescale.cost.model import CostModel
from bytescale.hf.batch.documents import Batch
from bytescale.hf.loop.batch_plan import BatchToPlan
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.loop.planned_batch import PlannedBatch
from bytescale.plan import MicroBatch, Plan
from bytescale.plan.trees import Forest
from bytescale.planner.evaluate import evaluate
from bytescale.planner.prefixes import cost_of_trees
from bytescale.runtime.plain_data import all_gather_json

Loss = Callable[[list[Mapping[str, Any]], list[Tensor]], Any]
"""From the documents of a label and their values to a scalar, or to a scalar and metrics by name."""
Values = Callable[[Micro], Tensor]


@dataclass(kw_only=True)
class LossOfBatch:
    """The loss of a global batch, the same on every rank: sums over labels."""

    passes: int  # with how many it was computed
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # what the loss has returned beside it


def backward_of(
    given: BatchToPlan,
    batch: Batch,
    loss: Loss,
    *,
    labels: Sequence[Hashable],
    values: Values | None,
    passes: int | None,
) -> LossOfBatch:
    """``HDP.backward``."""
    of_labels: dict[Hashable, list[int]] = {}
    for number, label in enumerate(labels):
        of_labels.setdefault(label, []).append(number)
    hdp = given.hdp
    planned, passes = _cheaper(given, labels, passes)
    of_rows: Values = values or (lambda micro: micro.logprobs(hdp.model))
    looked = list[tuple[list[int], Tensor, dict[str, Any]]]()  # read behind the passes: the host waits for the device

    def loss_of(numbers: list[int], value_of: Callable[[int], Tensor], counts: bool = True) -> Tensor:
        part, metrics = _scalar(loss([batch[number] for number in numbers], list(map(value_of, numbers))), numbers)
        looked.append((numbers, part.detach() * counts, metrics if counts else {}))
        return part

    if passes == 2:
        with torch.no_grad():
            planned.forward_backward(lambda micro: planned.collect(micro, of_rows(micro)))
        wholes = [whole.requires_grad_() for whole in planned.collected()]
        for numbers in of_labels.values():
            part = loss_of(numbers, wholes.__getitem__)
            if part.requires_grad:
                part.backward()
        result, wrong = _read(looked, passes)
        _require_finite(wrong)
        gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for whole in wholes]
        backward_from(planned, [sums_of_rows(own, gradients) for own in planned.micro_batches], of_rows)
        return result

    def of_micro(micro: Micro) -> Tensor:
        rows = of_rows(micro)
        documents, total = micro.documents(rows), rows[:0].sum()
        for numbers in of_labels.values():
            if numbers[0] in documents.numbers:
                counts = documents.counted[documents.numbers.index(numbers[0])]
                total = total + loss_of(numbers, documents.of, counts)
        return total

    planned.forward_backward(of_micro)
    counted, wrong = _read(looked, passes)
    told = all_gather_json([wrong, counted.loss, counted.metrics], hdp.group.group, hdp.group.device)
    result, wrong = _read(told, passes)
    if wrong and hdp.has_optimizer:
        hdp.zero_grad()
    _require_finite(wrong)
    return result


def sums_of_rows(plan: MicroBatch, values: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
    """``[T, ...]``: of each row of a micro-batch the sum of ``values``, ``[S, ...]``, of the documents that have it."""
    runs = plan.rows_of_documents
    if not runs:
        return torch.zeros(0)
    like = values[runs[0][0]]
    sums = like.new_zeros(plan.num_tokens, *like.shape[1:])
    for document, start, rows in runs:
        sums.index_add_(0, torch.as_tensor(rows, device=like.device), values[document][start : start + len(rows)])
    return sums


def backward_from(planned: PlannedBatch, gradients: Sequence[Tensor], of_rows: Values) -> None:
    """Run a batch and go backward from ``gradients [T, ...]`` of each micro-batch's rows ``of_rows``."""

    def with_gradient(micro: Micro) -> Tensor:
        rows = of_rows(micro)
        return (rows * gradients[micro.index][micro.rows].to(rows).reshape(rows.shape)).sum()

    planned.forward_backward(with_gradient)


def _read(looked: Sequence[Any], passes: int) -> tuple[LossOfBatch, list[int]]:
    """The sum of losses and metrics, and the documents whose loss is no number."""
    total, wrong = LossOfBatch(passes=passes), list[int]()
    for numbers, part, metrics in looked:
        total.loss += float(part)
        total.metrics |= {name: total.metrics.get(name, 0.0) + float(value) for name, value in metrics.items()}
        wrong += [] if math.isfinite(float(part)) else numbers
    return total, wrong


def _scalar(returned: Any, numbers: list[int]) -> tuple[Tensor, dict[str, Any]]:
    """What a loss has returned, its metrics without their graphs. Raises ``PlanError`` for what is no scalar."""
    part, metrics = returned if isinstance(returned, tuple) else (returned, {})
    if not isinstance(part, Tensor) or part.dim():
        raise PlanError(
            f"the loss of documents {numbers} is a {type(part).__name__} of shape {list(getattr(part, 'shape', ()))}",
            so="it could not be added to those of other documents",
            fix="return a scalar tensor, or a scalar and a dictionary of metrics",
        )
    return part, {name: own.detach() if isinstance(own, Tensor) else own for name, own in metrics.items()}


def _require_finite(wrong: Sequence[int]) -> None:
    if wrong:
        raise NonFiniteError(
            f"the loss of documents {sorted(set(wrong))[:8]} is not a number",
            so="no gradient was kept, and the weights are as before",
            fix="look at their rewards and log-probabilities, or leave them out",
        )


def _cheaper(given: BatchToPlan, labels: Sequence[Hashable], passes: int | None) -> tuple[PlannedBatch, int]:
    alone = len(set(labels)) == len(labels)
    plans: dict[int, tuple[Plan, Forest | None]] = {}
    if passes != 2:
        try:
            plans[1] = given.plan(labels)
        except PlanError as error:
            if passes == 1 or alone:
                raise PlanError(
                    f"no plan keeps the documents of every label together: {error}",
                    fix="let hdp.backward take two passes, or give fewer documents one label",
                ) from error
    if passes == 2 or (passes is None and not alone):
        plans[2] = given.plan()
    best = next(iter(plans))
    if len(plans) > 1:
        hdp = given.hdp

        def seconds_of(number: int, cost: CostModel) -> float:
            plan, forest = plans[number]
            own = cost_of_trees(cost, forest)
            return evaluate(plan, cluster=hdp.planner.cluster, cost=own, num_stages=hdp.planner.num_stages).end_seconds

        seconds = {number: seconds_of(number, hdp.cost) for number in plans}
        seconds[2] += seconds_of(2, hdp.forward_cost())
        best = min(seconds, key=lambda number: seconds[number])
    return given.part(*plans[best]), best
