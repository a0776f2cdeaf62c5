"""``HDP``: hybrid data parallelism for a model of transformers, in a loop that is not ours (``docs/own_loop.md``).

The gradient is a sum over all tokens of the global batch, whoever computes them. A loss that is a sum over this rank's
rows, divided by something that all ranks know, therefore gives the gradients of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from bytescale.common.errors import ConfigError, PlanError
from bytescale.config.schema import Checkpointing, DataConfig, Experts, PlannerName, Shard
from bytescale.config.sharing import check_invariant
from bytescale.cost.assumed import MeshCosts
from bytescale.cost.model import CostModel
from bytescale.hf.batch.documents import ITEM_FIELDS, Batch, RankBatch
from bytescale.hf.batch.planning import make_planner
from bytescale.hf.loop.alike import digest_of, weight_sums
from bytescale.hf.loop.batch_plan import BatchToPlan, CutBatch, planned_ahead
from bytescale.hf.loop.micro_batch import Engine, Micro
from bytescale.hf.loop.planned_batch import PlannedBatch
from bytescale.hf.loop.room import Capacity, Room, require_use_of_memory
from bytescale.hf.loop.session import mesh_of
from bytescale.hf.loop.updates import Updates
from bytescale.hf.model.decoder import HFDecoder, require_beside_first
from bytescale.plan import Plan
from bytescale.runtime.mesh import hdp_ranks_per_node
from bytescale.runtime.usable import kind_of

if TYPE_CHECKING:
    from bytescale.common.cut import Cut
    from bytescale.hf.loop.coupled import Loss, LossOfBatch, Values
    from bytescale.hf.loop.loaded import LoadedBatches
    from bytescale.hf.loop.prefill import Prefill, Prompt, Ready
    from bytescale.hf.loop.recovery import Recovery
    from bytescale.hf.model.indexer_loss import IndexerStage


class HDP(Updates):
    """Hybrid data parallelism of one model over the ranks of a process group.

    Attributes:
        planner: from the lengths of documents to a plan. It can be pickled and called anywhere.
        room: the capacity, and what else memory allows; ``room.memory`` estimates it where it was measured.
        cost: what the planner believes about the model.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        capacity_tokens: Capacity,
        tp: int = 1,
        pp: int = 1,
        device_gib: float | None = None,
        planner: PlannerName = "adaptive",
        equal_counts: bool = False,
        shard: Shard = "optimizer",
        domain: int | None = None,
        experts: Experts = "gathered",
        longest_document: int | None = None,
        cost: CostModel | None = None,
        forward_only: bool = False,
        kernel: str = "auto",
        checkpointing: Checkpointing = "none",
        host_gib: float = 0.0,
        indexer_loss: IndexerStage | None = None,
        indexer_loss_coefficient: float = 1.0,
        invariant: bool = False,
        joined: Recovery | None = None,
    ) -> None:
        """Attach to ``model``. Every rank of ``group`` calls it, with the same arguments and the same weights.

        Args:
            model: a causal decoder of transformers, or a module around one (peft). Outside of plans it stays as it is.
            group: the ranks; None: all, or this one alone without torch.distributed; ``joined``: see ``bytescale.join``
            capacity_tokens: of a micro-batch of a rank; ``auto``: see ``hf.loop.room``. Several share longer documents.
            tp: consecutive ranks that share matrices and rows, one rank for plans; ``pp``: stages. They cut the model.
            device_gib: what plans may use of a rank's device; None: most of it with ``auto``, else they are unchecked.
            planner: see ``make_planner``; ``cost``: what it believes (None: it counts); ``forward_only``: no backward.
            equal_counts: whether all ranks get equally many micro-batches, as FSDP needs; some have a row of no token.
            shard: ``optimizer``: states; ``parameters``: layers and their gradients, too, from ``adamw`` on (lockstep).
            domain: consecutive ranks that share parameters; None: those of a node. It divides the number of ranks.
            experts: ``gathered`` as the rest of a layer, or ``parallel``: tokens travel to them (``runtime.experts``).
            longest_document: its tokens, fixed for good, where rotary positions depend on it (dynamic NTK, longrope).
            kernel: ``auto``, the fastest flash attention of all ranks; ``flash``, ``fa3``, ``fa4``; or slow ``math``.
            checkpointing: ``full`` or ``attention`` compute layers again in backward.
            host_gib: host memory of a rank for activations. It may then hold more of a document (``memory.offload``).
            indexer_loss: times a coefficient, trains indexers: ``dense`` or ``sparse`` (``hf.model.indexer_loss``).
            invariant: whether log-probabilities have the same bits under any plan, on CPUs (``hf.model.invariant``).

        Raises ``ConfigError`` where a plan would not give the results of one process; ``RankFailure`` if ranks differ.
        """
        self.attach_anew = partial(HDP.__init__, **{name: own for name, own in locals().items() if name != "__class__"})
        super().__init__(model, mesh_of(group, model, (tp, pp), shard, domain, experts, equal_counts), experts, joined)
        require_use_of_memory(capacity_tokens, device_gib, host_gib, equal_counts, forward_only)
        check_invariant(invariant=invariant, tp=tp, experts=experts)
        learned = (indexer_loss, indexer_loss_coefficient) if indexer_loss else None
        decoder = HFDecoder(model, longest_document=longest_document, indexer_loss=learned, invariant=invariant)
        with ExitStack() as undo:
            undo.callback(decoder.undo.close)
            self._make_part(decoder, equal_counts)
            self.engine = Engine(decoder, self.mesh, kernel=kernel, checkpointing=checkpointing, host_gib=host_gib)
            undo.callback(self.engine.close)
            self._prepare(capacity_tokens, device_gib, planner, cost, None if forward_only else checkpointing)
            undo.pop_all()

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one micro-batch of a rank may hold."""
        return self.room.capacity_tokens

    def _make_part(self, decoder: HFDecoder, equal_counts: bool) -> None:
        """Reduce the model to this rank's part, once all ranks have been seen to have the same one."""
        self.domain = self.mesh.hdp.size if equal_counts else self.mesh.domain.size
        weights = {} if self.recovery is not None else weight_sums(self.model)  # of copies, in a moment
        shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in self.model.named_parameters()]
        self._fingerprint = digest_of(decoder.structure, shapes, weights)
        if self.mesh.hdp.size < self.group.size:
            self.group.agree("the weights of the model", self._fingerprint)
        self.cuts = self._cut(decoder)

    def _cut(self, decoder: HFDecoder) -> dict[str, Cut] | None:
        if self.mesh.tp.size == self.mesh.shape.pp == 1:
            return None
        from bytescale.hf.model.parallelize import parallelize  # where no rank has a whole model
        from bytescale.runtime.optimizer.lockstep import refuse_state_dicts

        for layer in decoder.layers:
            refuse_state_dicts(layer)
        return parallelize(decoder, self.mesh, cuts_words=False).cuts

    def _prepare(
        self,
        capacity_tokens: Capacity,
        device_gib: float | None,
        planner: PlannerName,
        cost: CostModel | None,
        checkpointing: Checkpointing | None,
    ) -> None:
        """``checkpointing``: None where plans are for forward alone."""
        if self.experts == "parallel":
            self.engine.decoder.require_experts(self.mesh.domain.size)
        element, shape = next(self.model.parameters()).element_size(), self.mesh.shape
        of_mesh = MeshCosts(
            kind=kind_of(self.group.device), bytes_per_element=element, tensor_parallel=shape.tp,
            pipeline_parallel=shape.pp, domain=self.domain, ranks_per_node=hdp_ranks_per_node(self.group, shape.tp),
            experts=self.experts, checkpointing=checkpointing or "none",
        )  # fmt: skip
        self.room = Room.of(self.engine, capacity_tokens, device_gib, of_mesh)
        cost = of_mesh.assumed(self.engine.decoder.spec) if cost is None else cost
        self.cost = cost if checkpointing else cost.forward_only(element)
        self.planner = make_planner(
            num_ranks=self.mesh.hdp.size,
            capacity_tokens=self.capacity_tokens,
            cost=self.cost,
            planner=planner,
            domain=self.domain,
            offload=self.room.offload,
            limits=self.room.limits,
            num_stages=shape.pp,
        )
        decoder = self.engine.decoder
        sharing = self.domain, self.mesh.domain.size, self.experts, decoder.learned, decoder.is_invariant
        settings = digest_of(self._fingerprint, self.cost, self.capacity_tokens, sharing, self.planner.config)
        self.group.agree("the weights of the model, its attention or the settings of HDP", settings)

    def attach(self, model: nn.Module, *, same_tokenizer: bool = False) -> None:
        """Let a second model run the micro-batches of this object, without gradients: a reference, or a teacher.

        Every rank calls it, with the same weights. ``micro.logprobs(model)`` and ``micro.inputs_for(model)`` take it
        from then on. It may be of another family. A model that is trained needs an ``HDP`` of its own.

        Args:
            same_tokenizer: says that words have the same numbers in both models where their matrices differ in size.

        Raises ``ConfigError`` as ``HDP(...)``, and for another vocabulary; ``RankFailure`` for different weights.
        """
        self.require("hdp.attach")
        require_beside_first(model, self.model, same_tokenizer=same_tokenizer)
        decoder = HFDecoder(model, invariant=self.engine.decoder.is_invariant)
        self.group.agree("the weights of a second model", digest_of(decoder.structure, weight_sums(model)))
        self._cut(decoder)
        decoder.is_frozen = True
        self.engine.others.append(decoder)

    def detach(self) -> None:
        """Put the model back on its own attention. ``step`` is refused then; ``state`` and ``save`` still work.

        Processes that wait to be taken in are told that the loop has ended (``recover``).
        """
        for decoder in (self.engine.decoder, *self.engine.others):
            decoder.undo.close()
        self.engine.close()
        if self._optimizer is not None:
            self._optimizer.leave(self.model)
        if self.recovery is not None:
            self.recovery.end()

    def plan(
        self,
        batch: Batch,
        *,
        plan: Plan | None = None,
        shift_labels: bool = False,
        together: Sequence[Hashable] | None = None,
        capacity_tokens: int | None = None,
        last: bool = False,
        share_prefixes: bool = False,
        per_document: Collection[str] = (),
    ) -> PlannedBatch:
        """Plan a global batch. Returns this rank's micro-batches, to be run in order. Every rank calls it.

        Args:
            batch: the documents, the same on every rank (``hf.batch.documents``).
            plan: of these documents; None: it is made here.
            shift_labels: see ``Documents.of``.
            together: a label for each document. Documents of one label come into one micro-batch of one group, for a
                loss that looks at all of them.
            capacity_tokens: tokens that a micro-batch of a rank may hold in this batch; None: as ``HDP(...)`` was told.
                Under ``torch.no_grad()``, the plan is then one for forward alone, which holds more.
            last: promises that ``step()`` follows the loop over this batch. Ranks then reduce gradients while others
                still compute (``hf.loop.planned_batch``).
            share_prefixes: whether prefixes that documents have in common are computed once, where that saves time
                (``hf.batch.prefixes`` says which rows are shared).
            per_document: with it, fields that keep no rows apart; micro-batches do not have them.

        Raises:
            ConfigError: with ``last``, where nothing can overlap; before the ``step()`` that was promised; with
                ``share_prefixes``, for a plan that was given.
            DataError: for documents that cannot be used, see ``Documents.of``.
            PlanError: if no plan can be made, or the given plan is of other documents or ranks.
            RankFailure: if ranks have different documents or plans.
        """
        if share_prefixes and plan is not None:
            raise ConfigError(
                "hdp.plan() got share_prefixes = True and a plan",
                so="the plan is of documents, and not of the trees that they make",
                fix="leave one of them out",
            )
        shared = tuple(per_document) if share_prefixes else None
        given = BatchToPlan.of(self, batch, shift_labels=shift_labels, per_document=shared)
        if plan is not None and self.mesh.shape.pp > 1:  # or stages could wait for each other
            self.planner.check(plan)
        cut = given.cut(*(given.plan(together, self.planner_of(capacity_tokens)) if plan is None else (plan, None)))
        return cut.agreed(last=last)

    def planned(
        self,
        batches: Iterable[Batch],
        *,
        shift_labels: bool = False,
        together: Callable[[Batch], Sequence[Hashable]] | None = None,
        capacity_tokens: int | None = None,
        last: bool = False,
        share_prefixes: bool = False,
        per_document: Collection[str] = (),
    ) -> Iterator[PlannedBatch]:
        """Yield of each batch what ``plan`` returns, which knows its ``batch``. Every rank calls it with the same ones.

        The next batch is taken, checked, planned and cut in a thread while the loop runs this one. When its turn comes,
        ranks compare it in the training thread, and its errors are raised there, those of ``batches`` too. The thread
        ends with the loop, also where the loop is left early. ``batches`` is one ahead of the loop, outside of the
        training thread: its random numbers have to be its own.

        Args:
            together: from a batch to the labels of its documents. All other arguments: see ``plan``.
        """
        planner, shared = self.planner_of(capacity_tokens), tuple(per_document) if share_prefixes else None

        def cut(batch: Batch) -> CutBatch:
            given = BatchToPlan.of(self, batch, shift_labels=shift_labels, per_document=shared)
            return given.cut(*given.plan(None if together is None else together(batch), planner))

        return planned_ahead((cut(batch) for batch in batches), self.group.device, last)

    def backward(
        self,
        batch: Batch,
        loss: Loss,
        *,
        together: Sequence[Hashable] | None = None,
        values: Values | None = None,
        passes: int | None = None,
        shift_labels: bool = False,
        share_prefixes: bool = False,
    ) -> LossOfBatch:
        """Run a batch forward and backward under a loss that looks at several whole documents (``hf.loop.coupled``).

        Every rank calls it. ``step`` follows.

        Args:
            batch: as ``plan`` takes it.
            loss: called with the documents of one label, as they are in ``batch``, and of each its values ``[S, ...]``.
                Returns a scalar, or a scalar and a dictionary of metrics. Losses and metrics are summed over labels.
            together: a label for each document; None: all have the same.
            values: from a micro-batch to the values of its rows, ``[T, ...]``; None: ``micro.logprobs(model)``.
            passes: 1 keeps the documents of a label in one micro-batch; 2 computes the values of all documents in a
                pass without gradients first; None: whatever takes less time. The numbers are the same.
            shift_labels: see ``Documents.of``.
            share_prefixes: see ``plan``. Documents of one label share rows. Without ``values``, only tokens and labels
                keep rows apart: the loss sees all other fields as they are in ``batch``.

        Raises as ``plan``; ``PlanError`` where one pass is asked for and no plan keeps a label's documents together;
        ``NonFiniteError`` if a loss is not a number. The gradients are then zero, where this object has an optimizer.
        """
        from bytescale.hf.loop.coupled import backward_of  # few loops have such losses

        labels = [0] * len(batch) if together is None else list(together)
        given = BatchToPlan.of(self, batch, shift_labels=shift_labels, per_document=() if share_prefixes else None)
        if share_prefixes and values is None:
            given = replace(
                given, per_document=set(given.all_documents.fields) - {"tokens", "labels", "weights", *ITEM_FIELDS}
            )
        return backward_of(given, batch, loss, labels=labels, values=values, passes=passes)

    def run(self, part: RankBatch, *, last: bool = False) -> PlannedBatch:
        """This rank's micro-batches of a batch that was planned and cut elsewhere (``cut``); ``last``: see ``plan``."""
        self.require("hdp.run")
        for rows in part.rows:
            fields = {name: {0: values} for name, values in rows.items()}
            self.engine.decoder.require_fitting(fields, part.lengths)
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
        from bytescale.hf.loop.loaded import loaded_batches  # readers of files and stores

        return loaded_batches(self, data, state, stop_step, last)

    def collect(self, micro: Micro, values: Tensor) -> None:
        """Keep one result per row of a micro-batch, ``[T]`` or ``[T, ...]``, for ``collected``."""
        if self.looped is None:
            raise PlanError("collect() was called before plan()", fix="collect inside the loop over hdp.plan(batch)")
        self.looped.collect(micro, values)

    def collected(self) -> list[Tensor]:
        """The kept results of all ranks, one tensor ``[length, ...]`` per document, in the caller's order.

        Every rank calls it, after the loop, and gets all of them.
        """
        if self.looped is None:
            raise PlanError("nothing was collected", fix="call hdp.collect(micro, values) for every one")
        return self.looped.collected()

    def prefill(self, prompts: Sequence[Prompt], *, ready: Ready | None = None) -> Prefill:
        """Run prompts forward: their next tokens, and KV caches from which ``model.generate`` goes on.

        A prompt is its tokens ``[S]``, or a document as ``plan`` takes it, with ``images``, ``videos`` or ``audios``.
        Every rank calls it. ``ready`` is called on the rank that has a prompt's last token as soon as its logits are
        known. Raises as ``plan``, and ``ConfigError`` for a model that cannot generate.
        """
        from bytescale.hf.loop.prefill import prefill  # few loops generate

        return prefill(self, prompts, ready)
