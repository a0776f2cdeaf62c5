"""``HDP``: hybrid data parallelism for a model of transformers, in a loop that is not ours.

::

    hdp = bytescale.HDP(model, capacity_tokens=8192)
    hdp.adamw(lr=1e-5)
    for batch in loader:                            # a list of documents, the same on every rank
        for micro in hdp.plan(batch):
            logits = model(**micro.inputs).logits[0, : micro.num_rows]
            loss_of(logits, micro).backward()       # a sum over tokens, divided by a number of the GLOBAL batch
        hdp.step()

The gradient is a sum over all tokens of the global batch, whoever computes them. A loss that is a sum over this rank's
rows, divided by something that all ranks know, therefore gives the gradients of one process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytescale.attach.collected import Collected
from bytescale.attach.decoder import AttachedDecoder
from bytescale.attach.documents import Batch, Documents
from bytescale.attach.engine import Engine, require_use_of_host_memory
from bytescale.attach.handed_out import HandedOut
from bytescale.attach.loaded import LoadedBatches, loaded_batches
from bytescale.attach.micro_batch import Micro
from bytescale.attach.planned_batch import PlannedBatch, check_plan
from bytescale.attach.planning import make_planner
from bytescale.attach.prefill import Prefill, Ready, prefill
from bytescale.attach.probe import ModelFacts
from bytescale.attach.promise import Promise, layers_of
from bytescale.attach.rank_batch import RankBatch
from bytescale.attach.saving import Savings
from bytescale.attach.vocabulary import require_words
from bytescale.attach.weight_sums import weight_sums
from bytescale.common.errors import ConfigError, NonFiniteError, PlanError, problem
from bytescale.config import DataConfig, PlannerName
from bytescale.cost import CostModel
from bytescale.cost.assumed import assumed_cost
from bytescale.cost.memory import DeviceKind
from bytescale.plan import Plan, RankPlan
from bytescale.runtime import RankGroup, ShardedOptimizer, Update
from bytescale.runtime.checkpointing import Checkpointing
from bytescale.runtime.optimizers import GroupOptions
from bytescale.runtime.take_over import take_over


class HDP:
    """Hybrid data parallelism of one model over the ranks of a process group.

    Attributes:
        planner: from the lengths of documents to a plan. It can be pickled and called anywhere.
        cost: what the planner believes about the model.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        capacity_tokens: int,
        planner: PlannerName = "adaptive",
        equal_counts: bool = False,
        longest_document: int | None = None,
        cost: CostModel | None = None,
        forward_only: bool = False,
        kernel: str = "auto",
        checkpointing: Checkpointing = "none",
        host_gib: float = 0.0,
    ) -> None:
        """Attach to ``model``. Every rank of ``group`` calls it, with the same arguments and the same weights.

        Args:
            model: a causal decoder of transformers, or a module around one (peft). It is put on our attention, which
                holds inside of plans; outside of them its own goes on.
            group: the ranks; None: all ranks, or this one alone where torch.distributed has not been initialised.
            capacity_tokens: tokens that one micro-batch of a rank may hold. A longer document is shared by several.
            planner: see ``make_planner``.
            equal_counts: whether every rank gets equally many micro-batches, as FSDP needs (see ``make_planner``).
                Those that the plan does not have are one row that stands for no token.
            longest_document: tokens for which rotary positions that depend on the longest one (dynamic NTK, longrope)
                are fixed, for good; other models do not need it.
            cost: what the planner is to believe of training; None: counted from the model.
            forward_only: whether plans are for passes without backward, as scoring and prefill have them.
            kernel: ``auto``, or ``math`` for the slow reference.
            checkpointing: ``full`` or ``attention`` compute layers again in backward (``memory.checkpointing``).
            host_gib: host memory of a rank for activations. With it, a rank may hold more of a long document than
                ``capacity_tokens``: as much more as offloading makes room for (``memory.offload``).

        Raises:
            ConfigError: where a plan would not give the results of one process, with the part of the model that is in
                the way.
            RankFailure: if the ranks have different settings or models.
        """
        self.model = model
        self.group = _rank_group(group, next(model.parameters()).device)
        self.capacity_tokens = capacity_tokens
        self.equal_counts = equal_counts
        self.handed_out = HandedOut()
        self.promise = Promise(self)
        self._collected: Collected | None = None
        self._optimizer: ShardedOptimizer | None = None
        self._saved: Savings | None = None
        require_use_of_host_memory(host_gib, equal_counts=equal_counts, forward_only=forward_only)
        decoder = AttachedDecoder(model, longest_document=longest_document)
        with ExitStack() as undo:
            undo.callback(decoder.undo)
            self.engine = Engine(decoder, self.group, kernel=kernel, checkpointing=checkpointing, host_gib=host_gib)
            undo.callback(self.engine.activations.remove)
            self._prepare(planner, cost, forward_only)
            undo.pop_all()

    @property
    def facts(self) -> ModelFacts:
        """Every layer's attention, as the probe has found it."""
        return self.engine.decoder.facts

    def _prepare(self, planner: PlannerName, cost: CostModel | None, forward_only: bool) -> None:
        """Count costs, make the planner, and compare all of it between the ranks."""
        parameter = next(self.model.parameters())
        element, together = parameter.element_size(), self.group.size if self.equal_counts else 1
        if cost is None:
            device: DeviceKind = "cuda" if parameter.device.type == "cuda" else "cpu"
            cost = assumed_cost(self.engine.decoder.spec, device=device, bytes_per_element=element, domain=together)
        self.cost = cost.forward_only(element) if forward_only else cost
        self.planner = make_planner(
            num_ranks=self.group.size,
            capacity_tokens=self.capacity_tokens,
            cost=self.cost,
            planner=planner,
            equal_counts=self.equal_counts,
            offload=self.engine.offload_rule(),
        )
        self.group.agree("the weights of the model, its attention or the settings of HDP", self._fingerprint())

    def detach(self) -> None:
        """Put the model back on the attention that it had, and leave its gradients to others. ``step`` is refused then.

        ``state`` and ``save`` still work.
        """
        self.engine.decoder.attachment.detach()
        self.engine.activations.remove()
        if self._optimizer is not None:
            self._optimizer.leave(self.model)

    # -- plans ---------------------------------------------------------------------------------------------------

    def plan(
        self, batch: Batch, *, plan: Plan | None = None, shift_labels: bool = False, last: bool = False
    ) -> PlannedBatch:
        """Plan a global batch. Returns this rank's micro-batches, to be run in order. Every rank calls it.

        Args:
            batch: the documents, the same on every rank (``attach.documents``).
            plan: of these documents; None: it is made here.
            shift_labels: see ``Documents.of``.
            last: promises that ``step()`` follows the loop over this batch. Ranks then reduce gradients while others
                still compute (``attach.promise``).

        Raises:
            ConfigError: with ``last``, where nothing can overlap; or before the ``step()`` that was promised.
            DataError: for documents that cannot be used, see ``Documents.of``.
            PlanError: if no plan can be made, or the given plan is of other documents or ranks.
            RankFailure: if ranks have different documents or plans.
        """
        self.promise.require_none("a batch was planned")
        documents = Documents.of(batch, shift_labels=shift_labels)
        require_words(documents.fields, self.model)
        plan = self.planner(np.array(documents.lengths)) if plan is None else plan
        check_plan(plan, documents.lengths, self.group.size)
        rank_plan = RankPlan.of(plan, self.group.rank)
        self.group.agree("the documents of a batch, or its plan", documents.digest() ^ rank_plan.digest)
        self._collected = None
        return PlannedBatch(self, RankBatch.of(rank_plan, documents), last=last)

    def run(self, part: RankBatch, *, last: bool = False) -> PlannedBatch:
        """This rank's micro-batches of a batch that was planned and cut elsewhere (``cut``); ``last``: see ``plan``."""
        for rows in part.rows:
            require_words({name: [values] for name, values in rows.items()}, self.model)
        self._collected = None
        return PlannedBatch(self, part, last=last)

    def batches(
        self, data: DataConfig, *, state: dict[str, Any] | None = None, stop_step: int | None = None, last: bool = False
    ) -> AbstractContextManager[LoadedBatches]:
        """Open a loader for a ``with`` block: it iterates over the global batches of a corpus. Every rank calls it.

        Every rank gets its own rows alone, read ahead of the loop. The batches never depend on the ranks.

        Args:
            data: the ``[data]`` section of a configuration.
            state: where to start, as ``state_dict`` of the opened loader returned it; None: at the first batch.
            stop_step: the iteration ends before the batch of this number, counted from 0; None: it has no end.
            last: promises that ``step()`` follows the loop over each batch; see ``plan``.

        Raises as ``prepare_corpus``; ``ConfigError`` if the model lacks some ids, ``CheckpointError`` for other data.
        """
        return loaded_batches(self, data, state, stop_step, last)

    # -- training ------------------------------------------------------------------------------------------------

    def adamw(
        self,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        group_options: GroupOptions | None = None,
    ) -> torch.optim.Optimizer:
        """``optimizer`` with ``torch.optim.AdamW`` and its defaults."""
        return self.optimizer(
            torch.optim.AdamW, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True,
            group_options=group_options,
        )  # fmt: skip

    def optimizer(
        self, cls: type[torch.optim.Optimizer], *, group_options: GroupOptions | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """Train all parameters that require a gradient with any elementwise optimizer of PyTorch.

        The parameters move into flat memory. Master weights (at least fp32) and states are sharded over all ranks.
        A model of another ``HDP`` is taken over; ``step``, ``state`` and ``save`` of the other are refused then.

        Args:
            cls: such as ``torch.optim.SGD``; called with ``options``.
            group_options: ``(name, parameter) -> options`` of single parameters, such as
                ``lambda name, p: {} if p.dim() > 1 else {"weight_decay": 0.0}``.

        Returns:
            The optimizer of this rank's shards, for learning-rate schedulers. ``step()`` of this object calls it.

        Raises:
            ConfigError: if nothing is trainable, if the optimizer is not elementwise, or if there is one already.
        """
        if self._optimizer is not None:
            raise ConfigError(
                problem("this HDP has an optimizer", so="two of them would update the same weights", fix="make one")
            )
        if former := ShardedOptimizer.of(self.model):
            former.leave(self.model)
        named = list(self.model.named_parameters())
        self._optimizer = take_over(named, self.group, cls, options, group_options, **layers_of(self.engine.decoder))
        self._optimizer.join(self.model)
        return self._optimizer.torch_optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step. ``model.zero_grad()`` does the same once there is an optimizer."""
        self.sharded().zero_grad()

    def step(self, *, max_grad_norm: float = 1.0, lr: float | None = None) -> Update:
        """Sum gradients over ranks, clip them, update the weights, give them to all ranks, and zero the gradients.

        Args:
            max_grad_norm: gradients are scaled so that their global norm is at most this; 0: they are not.
            lr: sets the learning rate of all parameters; None: it stays.

        Raises:
            RankFailure: if a micro-batch has not been run forward and backward.
            ConfigError: if parameters were moved, replaced, added or unfrozen since ``adamw`` or ``optimizer``, or if
                this object was detached, or another one has taken the parameters over.
            NonFiniteError: if the gradients' norm is not a number. The weights are as before.
        """
        sharded = self.sharded()
        self.handed_out.finish()
        self.promise.kept()
        sharded.require_parameters_of(self.model)
        grad_norm = sum(self.group.sum_of([sharded.reduce_gradients()])) ** 0.5
        if not math.isfinite(grad_norm):
            sharded.zero_grad()
            raise NonFiniteError(
                problem(
                    f"the norm of the gradients is {grad_norm} at update {sharded.num_updates + 1}",
                    so="the update was not made, and the weights are as before",
                    fix="look at the loss and its divisor (weights that sum to zero), lower lr, or leave the batch out",
                )
            )
        update = sharded.update(grad_norm, max_grad_norm, lr)
        sharded.zero_grad()
        return update

    def gradients(self) -> dict[str, Tensor]:
        """The global gradient of every trained parameter, by name, before it is clipped. Every rank calls it.

        Copies, in fp32 or wider; ``step`` may follow.
        """
        self.promise.require_none("gradients() was called")
        return self.sharded().whole_gradients()

    def state(self) -> dict[str, Any]:
        """The optimizer's state as whole tensors: ``{"num_updates": n, "tensors": {name: {state: tensor}}}``.

        The states are ``master`` (the weights, in fp32 or wider) and those of the optimizer, such as ``exp_avg``. They
        are in CPU memory, the same on every rank, and fit any number of ranks. Every rank calls it.
        """
        return self.sharded().state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state()``, exactly. Every rank calls it, after ``adamw`` or ``optimizer``.

        Raises ``CheckpointError`` if it is of other parameters or another optimizer; ``ConfigError`` as ``step``.
        """
        self.sharded().load_state(state)

    def save(self, folder: Path | str, extra: dict[str, Any] | None = None, *, keep: int = 2) -> Path:
        """Write a checkpoint ``folder/step-<updates>`` in the trainer's format. Every rank calls it.

        It appears when it is complete, and fits any number of ranks. Frozen parameters are not in it.

        Args:
            extra: what the caller wants back from ``load``, as JSON: the place in the data, for example.
            keep: newest checkpoints in ``folder`` that are kept.

        Raises ``CheckpointError`` if it cannot be written.
        """
        return self._savings().save(Path(folder), extra or {}, keep)

    def load(self, path: Path | str) -> dict[str, Any]:
        """Continue exactly from a checkpoint, or from the newest in a folder of checkpoints. Returns its ``extra``.

        Every rank calls it, after ``adamw`` or ``optimizer``. Raises ``CheckpointError`` if there is none, or if it is
        of another model.
        """
        return self._savings().load(Path(path))

    # -- results per document --------------------------------------------------------------------------------------

    def collect(self, micro: Micro, values: Tensor) -> None:
        """Keep one result per row of a micro-batch, ``[T]`` or ``[T, ...]``, for ``collected``."""
        if self._collected is None:
            raise PlanError(
                problem("collect() was called before plan()", fix="collect inside the loop over hdp.plan(batch)")
            )
        self._collected.add(micro, values)

    def collected(self) -> list[Tensor]:
        """The kept results of all ranks, one tensor ``[length, ...]`` per document, in the caller's order.

        Every rank calls it, after the loop, and gets all of them.
        """
        if self._collected is None:
            raise PlanError(problem("nothing was collected", fix="call hdp.collect(micro, values) for every one"))
        return self._collected.of_all(self.group)

    def prefill(self, prompts: Sequence[Sequence[int] | Tensor], *, ready: Ready | None = None) -> Prefill:
        """Run prompts ``[S]`` forward: their next tokens, and KV caches from which ``model.generate`` goes on.

        Every rank calls it. ``ready`` is called on the rank that has a prompt's last token as soon as its logits are
        known. Raises as ``plan``, and ``ConfigError`` for a model that cannot generate.
        """
        return prefill(self, prompts, ready)

    # -- internals -------------------------------------------------------------------------------------------------

    def begin_batch(self, planned: PlannedBatch, part: RankBatch) -> None:
        """Forget what was collected: the documents of ``part`` follow. Called when a batch's loop begins."""
        self.promise.require_none("a loop over a batch began")
        self.engine.decoder.attachment.require_attached()
        self.engine.activations.begin_step(part.rank_plan.micro_batches)
        self.handed_out.begin(planned.number, len(planned))
        self._collected = Collected(part)

    def sharded(self) -> ShardedOptimizer:
        """The optimizer. Raises ``ConfigError`` if there is none, or if another ``HDP`` has taken the model over."""
        if self._optimizer is None:
            raise ConfigError(
                problem("this HDP has no optimizer", fix="call hdp.adamw(lr=...) or hdp.optimizer(...) first")
            )
        self._optimizer.require_not_replaced(self.model)
        return self._optimizer

    def _savings(self) -> Savings:
        optimizer = self.sharded()
        self._saved = self._saved or Savings(self.group, optimizer, self.model)
        return self._saved

    def _fingerprint(self) -> int:
        """63 bits of what has to be equal on all ranks."""
        shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in self.model.named_parameters()]
        settings = (self.facts, self.cost, self.capacity_tokens, self.equal_counts, self.planner.config)
        content = repr((settings, shapes, weight_sums(self.model)))
        return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little") >> 1


def _rank_group(group: dist.ProcessGroup | None, device: torch.device) -> RankGroup:
    """The ranks of ``group``; None: all ranks, or this one alone."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return RankGroup(None if group is None or group.size() == 1 else group, device=device)
