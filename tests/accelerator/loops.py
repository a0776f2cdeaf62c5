"""Loops of one's own on simulated accelerators, with numbers that are compared with one process's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bytescale import HDP
from bytescale.attention.kernels import CudaFlashKernel
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.loop.planned_batch import PlannedBatch
from bytescale.parity.compare import Document, StepNumbers, WideCasts, difference, plain_step
from bytescale.runtime import pipeline
from tests.accelerator.device import Machine, here
from tests.accelerator.faults import Fault
from tests.accelerator.groups import Communicator, run_machines

LR = 1e-2
MICRO_BATCH, STEP = "micro-batch", "step"
OPTIONS = ("last", "share_prefixes", "plan")
"""Those of ``HDP.plan``; all others are ``HDP``'s."""


@dataclass(frozen=True)
class Outcome:
    """What a run on simulated accelerators has shown."""

    worst: float
    """The largest difference from one process: of losses, log-probabilities, gradients or weights."""
    faults: list[Fault]
    num_micro_batches: list[int]
    """Of every rank, in the loop whose host waits are counted."""
    waits: list[Counter[str]]
    """Of every rank: what the host waited for amid its micro-batches, and where."""

    @property
    def waits_per_micro_batch(self) -> float:
        return sum(sum(own.values()) for own in self.waits) / max(1, sum(self.num_micro_batches))


def labelled(documents: Sequence[Document]) -> list[Document]:
    """With the next tokens as labels."""
    return [{**own, "labels": torch.cat([own["tokens"][1:], torch.tensor([-100])])} for own in documents]


def loss_by_sum(micro: Any, model: nn.Module, total: float) -> Tensor:
    return micro.loss_sum(model) / total  # type: ignore[no-any-return]


def loss_by_logprobs(micro: Any, model: nn.Module, total: float) -> Tensor:
    return -(micro.weights * micro.logprobs(model)).sum() / total  # type: ignore[no-any-return]


def run_loop(
    model: nn.Module,
    documents: list[Document],
    num_ranks: int,
    *,
    loss: Callable[[Any, nn.Module, float], Tensor] = loss_by_sum,
    kernel: str = "flash",
    prepare: Callable[[HDP], object] = lambda hdp: None,
    on_host: bool = False,
    **options: Any,
) -> Outcome:
    """Two updates, and then the loss, the gradients and the log-probabilities of the weights that they give.

    Host waits are counted in the second update: what is found out once, such as the kind of a head, is known by then.
    ``kernel``: ``flash``, emulated, or ``math``. ``prepare`` is called with the ``HDP``, before its optimizer exists.
    ``on_host``: where the optimizer is. ``pp`` of ``HDP``: the loop's body is a function.
    """
    planned = {name: options.pop(name) for name in OPTIONS if name in options}
    passes = {name: value for name, value in planned.items() if name != "last"}  # which promises an update
    total, is_staged = float(sum(own["weights"].sum() for own in documents)), options.get("pp", 1) > 1

    def one_rank(own: Machine, group: Communicator) -> tuple[StepNumbers, int, Counter[str]]:
        ours: Any = copy.deepcopy(model).to(own.device)
        if ours._can_set_experts_implementation():  # their loops in Python wait for the device
            ours.set_experts_implementation("grouped_mm")
        hdp = HDP(ours, group if num_ranks > 1 else None, kernel="math", **options)
        if kernel == "flash":
            hdp.engine._kernel = lambda dtype: CudaFlashKernel()  # type: ignore[method-assign, assignment]
        prepare(hdp)
        hdp.adamw(lr=LR, offload=on_host)

        def run(**given: Any) -> tuple[float, int]:
            if is_staged:
                with WideCasts():
                    staged = hdp.plan(documents, **given)
                    return staged.forward_backward(lambda micro: loss(micro, ours, total)) / num_ranks, len(staged)
            parts = []
            for micro in hdp.plan(documents, **given):
                with own.part(MICRO_BATCH), WideCasts():
                    share = loss(micro, ours, total)
                    share.backward()
                    parts.append(share.detach())
            return sum(float(part) for part in parts), len(parts)

        for _ in range(2):
            before = len(own.waits)
            _, count = run(**planned)
            with own.part(STEP):
                hdp.step()
        waits = waits_amid(own, before)
        loss_sum, _ = run(**passes)
        gradients = {name: value.cpu() for name, value in hdp.gradients().items()}
        hdp.zero_grad()
        with WideCasts(), torch.no_grad():
            scored = hdp.plan(documents, **passes)
            scored.forward_backward(lambda micro: hdp.collect(micro, micro.logprobs(ours, rows_at_a_time=7)))
        logprobs = [own.cpu() for own in hdp.collected()]
        moved = hdp.engine.activations.offload
        assert moved is None or moved.bytes_moved > 0, "documents are longer than ranks can hold"
        hdp.detach()
        return StepNumbers(loss=loss_sum, logprobs=logprobs, gradients=gradients), count, waits

    with micro_batches_are_parts() if is_staged else nullcontext():
        results, machines = run_machines(num_ranks, one_rank)
    ours, alone = results[-1][0], _alone(model, documents)
    # The last row of a document predicts nothing, and its log-probability is no matter of the loss.
    numbers = [
        StepNumbers(loss=loss_sum, logprobs=[own[:-1] for own in one.logprobs], gradients=one.gradients)
        for one, loss_sum in ((alone, alone.loss), (ours, sum(own.loss for own, *_ in results)))
    ]
    return Outcome(
        worst=difference(*numbers).worst,
        faults=[fault for own in machines for fault in own.faults],
        num_micro_batches=[count for _, count, _ in results],
        waits=[waits for *_, waits in results],
    )


@contextmanager
def micro_batches_are_parts() -> Iterator[None]:
    """Whoever loops over a planned batch: host waits from its first micro-batch to behind its last one are counted."""
    iterate, run_stage = PlannedBatch.__iter__, pipeline.run_stage

    def amid() -> Any:
        return nullcontext() if (own := here()) is None else own.part(MICRO_BATCH)

    def iterated(planned: PlannedBatch) -> Iterator[Micro]:
        micros = iterate(planned)
        for place in range(len(planned)):
            with amid() if place else nullcontext():
                micro = next(micros)
            with amid():
                if (own := here()) is not None:
                    own.num_micro_batches += 1
                yield micro
        yield from micros  # has no more, and ends the batch

    def stage(links: Any, forward: Any, around: Any, behind_backward: Any) -> None:
        run_stage(links, forward, lambda action: amid(), behind_backward)

    with mock.patch.object(PlannedBatch, "__iter__", iterated), mock.patch.object(pipeline, "run_stage", stage):
        yield


def waits_amid(own: Machine, before: int = 0) -> Counter[str]:
    """What the host has waited for in micro-batches, and where, since there were ``before`` waits."""
    return Counter(f"{wait.what} at {wait.where}" for wait in own.waits[before:] if wait.during == MICRO_BATCH)


def _alone(model: nn.Module, documents: list[Document]) -> StepNumbers:
    """The same in plain transformers and PyTorch, in one process."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(own.parameters(), lr=LR)
    for _ in range(2):
        plain_step(own, labelled(documents))
        nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return plain_step(own, labelled(documents))
