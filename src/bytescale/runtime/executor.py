"""Runs one rank's part of a plan: its forwards and backwards in the order of ``plan.schedule``, without a barrier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bytescale.attention import AttentionKernel, PackedAttention, RingBuffers
from bytescale.attention.copies import to_device
from bytescale.common.arrays import IntArray
from bytescale.plan import MicroBatch, RankPlan
from bytescale.runtime.loss import IGNORE_INDEX, Head, PlainHead, loss_sum, token_losses
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.lockstep import Units
from bytescale.runtime.pipeline import Action, StageLinks, run_stage
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.tied import TiedHead
from bytescale.runtime.token_shards import TokenShards, own_rows


class DecoderModule(Protocol):
    """What the runtime requires of the code of a model or of a part of one: packed tokens to hidden states."""

    @property
    def layers(self) -> Iterable[nn.Module]:
        """In the order of forward. Each is given the hidden states (``optimizer.buckets.Chunk``)."""
        ...

    @property
    def head_weight(self) -> Tensor:
        """``[V, C]`` of a head that is plain (``loss.PlainHead``); used on the last part only."""
        ...

    @property
    def hidden_size(self) -> int:
        """C."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """As in ``nn.Module``. All parameters have one dtype, which is also that of the hidden states."""
        ...

    def __call__(self, inputs: Tensor, position_ids: Tensor, attention: PackedAttention, **more: Any) -> Tensor:
        """``tokens, position_ids [T]`` int64 -> ``[T, C]``. Later parts take the previous part's output, not tokens."""
        ...


Beside = Callable[[int], Mapping[str, Any]]
"""From the number of a micro-batch to what its module takes beside tokens, such as rows of pictures."""


class BatchLoss(Protocol):
    """A loss on sums over the global batch: the load balance of experts (``hf.model.balance``), or that of indexers.

    Called once a step, by every rank. The gradients that ``loss`` makes are summed over ranks with all others.
    """

    def reset(self, num_tokens: int) -> None:
        """Forget the previous step. Called before the first forward of a global batch of ``num_tokens``."""
        ...

    def sums(self) -> Tensor:
        """This rank's sums, fp64, of the same shape on every rank of a stage; a rank without tokens returns zeros."""
        ...

    def loss(self, total: Tensor) -> Tensor:
        """The loss, a scalar that is the same on every rank. ``total`` is the sum of all ranks' ``sums``."""
        ...


class MicroBatchTokens(Protocol):
    """One micro-batch's tokens in the layout of ``plan.MicroBatch``: int64 ``[T]``, NumPy arrays or tensors."""

    @property
    def tokens(self) -> IntArray | Tensor: ...
    @property
    def labels(self) -> IntArray | Tensor: ...
    @property
    def position_ids(self) -> IntArray | Tensor: ...
    @property
    def weights(self) -> NDArray[np.float64] | Tensor | None:
        """``[T]`` of the tokens' losses; None: all are 1."""
        ...


@dataclass(frozen=True)
class StepResult:
    """Sums over the tokens that this rank counts: every token is counted by one rank, whatever the mesh."""

    loss_sum: float  # weighted sum of the tokens' cross-entropies, in nats
    num_targets: int
    batch_loss: float = 0.0  # of this rank's layers, over the global batch; not in loss_sum


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A contiguous part of a model, on one stage: all of it, or the stage's layers."""

    module: DecoderModule
    activations: Activations = field(default_factory=lambda: Activations([]))
    """Checkpointing and offloading of its layers."""
    head: Head | None = None
    """None: the plain head of ``module.head_weight``, whose words the tensor-parallel ranks share."""
    tied: TiedHead | None = None
    """On the first and the last stage of a pipeline whose embedding is the head, too."""
    splits_loss: bool = False
    """Whether ``module`` gives a tensor-parallel rank its own rows alone (``own_rows``), and each counts these."""
    batch_loss: BatchLoss | None = None
    """Of the module's layers; None, on all ranks alike: there is none."""


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Runs plans on one rank."""

    part: Decoder
    """This stage's part of the model."""
    kernel: AttentionKernel
    mesh: Mesh
    z_loss: float = 0.0
    """See ``loss.loss_sum``."""
    units: Units | None = None
    """What opens the layers, where ranks share their parameters."""

    def run(
        self,
        rank_plan: RankPlan,
        micro_batches: Sequence[MicroBatchTokens],
        *,
        num_global_targets: float,
        after_last_message: Callable[[], None] = lambda: None,
        around: Callable[[Action], AbstractContextManager[None]] = lambda _: nullcontext(),
        beside: Beside = lambda _: {},
    ) -> StepResult:
        """Accumulate the gradient of ``sum of weighted losses / num_global_targets`` over this rank's tokens (Eq. 1-2).

        Args:
            micro_batches: the tokens of each of the plan's micro-batches. A label of ``IGNORE_INDEX`` has no loss.
            num_global_targets: tokens with a target in the whole global batch, over all ranks; or whatever else the sum
                of weighted losses is to be divided by.
            after_last_message: called before the first collective of the step's end.
            around: makes the context in which each forward and each backward runs, for measurements. A wait for another
                stage is outside.
            beside: what the module takes beside the tokens of each micro-batch.

        A rank whose slice holds no target, or no token at all, still takes part in the ring.
        """
        count = len(rank_plan.micro_batches)
        if len(micro_batches) != count:
            raise ValueError(f"tokens of {len(micro_batches)} micro-batches, the plan has {count}")
        run = self._begin(rank_plan, micro_batches, num_global_targets, beside)
        self.part.activations.begin_step(rank_plan.micro_batches)
        if self.part.batch_loss is not None:
            self.part.batch_loss.reset(rank_plan.num_tokens)

        def own_around(action: Action) -> AbstractContextManager[None]:
            return around(action) if action[1] < count else nullcontext()

        self._walk(rank_plan, run, run.forward, own_around, backward=True)
        after_last_message()
        if self.part.tied is not None:
            self.part.tied.add_gradient()
        return run.result()

    @torch.no_grad()
    def evaluate(
        self, rank_plan: RankPlan, micro_batches: Sequence[MicroBatchTokens], beside: Beside = lambda _: {}
    ) -> list[Tensor]:
        """Run forward only. Returns the losses ``[T]`` of each micro-batch's tokens; 0 for a token without a target.

        On ranks that are not on the last stage the result is empty.
        """
        run = self._begin(rank_plan, micro_batches, 1.0, beside)
        losses: dict[int, Tensor] = {}

        def forward(index: int, received: Tensor | None) -> Tensor:
            output = run.output(index, received)
            if not self.mesh.is_last_stage:
                return output
            labels = torch.as_tensor(run.data[index].labels)
            own = token_losses(self.head(), output, labels[self.counted(len(labels))])
            if self.part.splits_loss:
                shards = TokenShards(self.mesh.tp)
                shards.begin(len(labels))
                own = shards.gather_for_loss(own)
            losses[index] = own
            return own

        self._walk(rank_plan, run, forward, lambda _: nullcontext(), backward=False)
        return [losses[index] for index in sorted(losses)][: len(micro_batches)]

    def _begin(
        self, rank_plan: RankPlan, micro_batches: Sequence[MicroBatchTokens], num_global_targets: float, beside: Beside
    ) -> _Run:
        """With experts in parallel, also of the rounds in which this rank has no tokens: the others' may come to it."""
        plan, data = list(rank_plan.micro_batches), list(micro_batches)
        if self.units is not None and self.units.mixtures:
            for index in range(len(plan), rank_plan.num_rounds):
                plan.append(MicroBatch.of_documents(index, []))
                data.append(_NoTokens())
        return _Run(self, plan, data, num_global_targets, beside, RingBuffers())

    def _walk(
        self,
        rank_plan: RankPlan,
        run: _Run,
        forward: Callable[[int, Tensor | None], Tensor],
        around: Callable[[Action], AbstractContextManager[None]],
        *,
        backward: bool,
    ) -> None:
        """Run the stage. Then take part in the rounds of the lockstep domain in which this rank has no micro-batch."""
        module = self.part.module
        dtype = next(iter(module.parameters())).dtype
        if self.units is not None:
            self.units.begin()
        rank_plan = replace(rank_plan, micro_batches=tuple(run.plan))
        if self.part.tied is not None:
            self.part.tied.send_weights()
        links = StageLinks(self.mesh, rank_plan, module.hidden_size, dtype)
        run_stage(links, forward, around, run.buffers.release)
        if self.units is not None:
            for _ in range(len(rank_plan.micro_batches), rank_plan.num_rounds):
                self.units.pass_without_work(backward=backward)

    def counted(self, num_tokens: int) -> slice:
        """Rows of a micro-batch whose loss this rank computes."""
        own = own_rows(num_tokens, self.mesh.tp) if self.part.splits_loss else range(num_tokens)
        return slice(own.start, own.stop)

    def head(self) -> Head:
        part = self.part
        return PlainHead(part.module.head_weight, self.mesh.tp.group) if part.head is None else part.head


class _NoTokens:
    """``MicroBatchTokens`` of a round without tokens."""

    tokens = labels = position_ids = torch.zeros(0, dtype=torch.int64)
    weights = None


@dataclass
class _Run:
    """The state of one step, from the first forward to the last backward. Arguments as in ``Executor.run``."""

    executor: Executor
    plan: Sequence[MicroBatch]
    data: Sequence[MicroBatchTokens]
    num_global_targets: float
    beside: Beside
    buffers: RingBuffers
    losses: list[Tensor] = field(default_factory=list)
    num_targets: int = 0

    def forward(self, index: int, received: Tensor | None) -> Tensor:
        """Run one forward. Returns the input ``[t, C]`` of the next stage, and on the last one the loss."""
        with self.executor.part.activations.forward(self.plan[index]):
            output = self.output(index, received)
            return self._loss(output, self.data[index]) if self.executor.mesh.is_last_stage else output

    def output(self, index: int, received: Tensor | None) -> Tensor:
        """``[t, C]`` output of the stage for a micro-batch; ``received``: None on the first stage."""
        data, micro_batch = self.data[index], self.plan[index]
        inputs = self._to_device(data.tokens) if received is None else received
        executor, memory = self.executor, self.executor.part.activations.attention_memory
        exchange = executor.mesh.ring_exchange(micro_batch.shared)
        attention = PackedAttention(micro_batch, executor.kernel, exchange, memory, self.buffers)
        positions = self._to_device(data.position_ids)
        more = {"beside": beside} if (beside := self.beside(index)) else {}
        hidden = executor.part.module(inputs, positions, attention, **more)
        self.buffers.release()
        return hidden

    def result(self) -> StepResult:
        # All ranks of a TP group have the same loss, or each has its rows'.
        counts = self.executor.mesh.tp.rank == 0 or self.executor.part.splits_loss
        return StepResult(
            loss_sum=float(torch.stack(self.losses).double().sum()) if self.losses and counts else 0.0,
            num_targets=self.num_targets if counts else 0,
            batch_loss=finish_batch_loss(self.executor.part.batch_loss, self.executor.mesh),
        )

    def _loss(self, hidden: Tensor, data: MicroBatchTokens) -> Tensor:
        labels, z_loss = torch.as_tensor(data.labels), self.executor.z_loss
        own = self.executor.counted(len(labels))
        labels, token_weights = labels[own], None if data.weights is None else torch.as_tensor(data.weights)[own]
        total = loss_sum(self.executor.head(), hidden, labels, z_loss=z_loss, token_weights=token_weights)
        self.losses.append(total.detach())
        self.num_targets += int((labels != IGNORE_INDEX).sum())
        return total / self.num_global_targets

    def _to_device(self, array: IntArray | Tensor) -> Tensor:
        return to_device(torch.as_tensor(array), self.executor.mesh.hdp.device)


def finish_batch_loss(batch_loss: BatchLoss | None, mesh: Mesh) -> float:
    """Add the gradient of the batch loss to this rank's gradients. Called after a step's last backward.

    Returns the value of the loss; 0, without a collective, for a model that has none. At the routers every
    tensor-parallel rank has tokens of its own, so the sums are added up over tensor-parallel ranks too.
    """
    if batch_loss is None:
        return 0.0
    loss = batch_loss.loss(mesh.tp.all_reduce(mesh.hdp.all_reduce(batch_loss.sums())))
    if loss.requires_grad:  # false on a rank without tokens
        loss.backward()
    return float(loss.detach())
