"""One micro-batch as the caller's loop sees it, and the engine that makes it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from bytescale.attention import PackedAttention, RingBuffers, select_kernel
from bytescale.attention.copies import to_device
from bytescale.attention.flash import open_attention
from bytescale.common.errors import ConfigError, DataError, PlanError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.common.units import GIBI
from bytescale.config.schema import Checkpointing
from bytescale.config.sharing import require_beside
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.head import RowScores, hidden_states, row_scores
from bytescale.hf.model.interface import KEYWORD, OnlyAttached
from bytescale.hf.model.passes import MicroBatchPass
from bytescale.hf.model.probe import check_widths, heads_of
from bytescale.plan import MicroBatch
from bytescale.runtime.loss import loss_sum
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.usable import kind_of

if TYPE_CHECKING:
    from bytescale.cost.memory.measured import MeasuredMemory
    from bytescale.hf.loop.whole_documents import WholeDocuments
    from bytescale.hf.model.chosen_keys import KeyChoices
    from bytescale.hf.model.routes import Choices, Routers
    from bytescale.runtime.mesh import Mesh
    from bytescale.runtime.saved.host_pool import HostPool


class Micro:
    """A micro-batch of one rank. T: its rows, one per token; with tensor parallelism, this rank's part of all rows.

    Every field of the documents is an attribute: ``micro.labels``, ``micro.weights`` and those that the batch has
    besides, each ``[T, ...]`` on the model's device.

    Attributes:
        index: its place in this rank's order.
        inputs: keyword arguments of the model: ``input_ids`` and ``position_ids`` ``[1, max(T, 1)]``, and what
            reaches attention; a model that is not attached refuses them. A rank that takes part in a ring without a
            token gets one row that stands for none. With tensor parallelism, positions are of all rows, and rows that
            pad may follow behind the T.
        position_ids: ``[T]`` place of each row's token in its document.
        num_rows: T. The model's output may have one row more: use ``logits[0, :micro.num_rows]``.
        plan: the plan's view of this micro-batch.
        rows: which of its rows these are: all of them without tensor parallelism.
    """

    def __init__(
        self,
        plan: MicroBatch,
        fields: dict[str, Tensor],
        target: MicroBatchPass,
        engine: Engine,
        others: Sequence[MicroBatchPass] = (),
    ) -> None:
        """``fields``: all rows of them."""
        self.plan, self._engine = plan, engine
        token_rows, device = engine.decoder.token_rows, engine.mesh.hdp.device
        self.index = plan.index
        own = range(plan.num_tokens) if token_rows is None else token_rows.range_of(plan.num_tokens)
        self.rows, self.num_rows = slice(own.start, own.stop), len(own)
        self.target = target
        self._of_all_rows = fields
        self._given = {name: rows[self.rows] for name, rows in fields.items()}
        self._exchange, self._targets, self._token_rows = engine.mesh.hdp.exchange, (target, *others), token_rows
        self._fields = {name: to_device(rows, device) for name, rows in self._given.items()}
        tokens = self._fields["tokens"] if token_rows is None else to_device(fields["tokens"], device)
        places = to_device(torch.as_tensor(plan.position_ids()), device)
        self.position_ids = places[self.rows]
        if not plan.num_tokens:
            tokens = places = tokens.new_zeros(1)
        if token_rows is not None:
            tokens = token_rows.tokens(tokens)
        self.inputs: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": places[None],
            "use_cache": False,
            "attention_mask": OnlyAttached(_foreign_model("a model that is on no HDP's attention")),
            KEYWORD: target,
        }

    @property
    def multiplicity(self) -> Tensor:
        """``[T]`` int64: documents that have each row. A loss that is not weighed by ``weights`` multiplies by it."""
        held: Tensor | None = self._fields.get("multiplicity")
        return torch.ones_like(self.tokens) if held is None else held

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """``(document, start, stop)`` of the runs of tokens that the rows are, in order, where all documents are whole.

        Raises ``PlanError`` where ranks share documents: a sum or mean over such a run is not the document's.
        """
        require_beside("micro.segments", self._engine.mesh.shape.tp)
        if self.plan.trees is not None:
            raise PlanError(
                f"micro-batch {self.index} has rows that several documents share",
                so="a run of rows would not be a document, and its loss not the document's",
                fix="take whole documents, micro.documents(values), or leave share_prefixes out",
            )
        if self.plan.shared is not None:
            raise PlanError(
                f"micro-batch {self.index} has parts of documents that {self.plan.shared.size} ranks share",
                so="a loss over a part, such as a mean or a ratio, would not be the document's",
                fix="take whole documents, micro.documents(values), or hdp.backward(batch, loss) for a loss that "
                "couples documents; micro.plan.runs has the parts themselves",
            )
        return self.plan.runs

    def documents(self, values: Tensor) -> WholeDocuments:
        """Whole documents from ``values [T, ...]`` of this rank's rows: ``[D]`` tensors ``[length, ...]``.

        Differentiable. Ranks that share documents send one another their rows, so that all of them call it, at the same
        place and with values of one dtype and shape. Losses of documents are added up by ``sum`` of the result.
        """
        from bytescale.hf.loop.whole_documents import WholeDocuments  # few losses look at them

        if len(values) != self.num_rows:
            raise PlanError(
                f"{len(values)} values for the {self.num_rows} rows of micro-batch {self.index}",
                so="they could not be given to their documents",
                fix="give one value per row, without the row that stands for none: values[: micro.num_rows]",
            )
        if self._token_rows is None:
            return WholeDocuments(self.plan, values, self._exchange)
        shards = self._token_rows.shards
        shards.begin(self.plan.num_tokens)
        return WholeDocuments(self.plan, shards.gather_for_loss(values), self._exchange, is_counted=shards.tp.rank == 0)

    def __getattr__(self, name: str) -> Tensor:
        fields = self.__dict__.get("_fields", {})
        if name in fields:
            field: Tensor = fields[name]
            return field
        raise AttributeError(f"the batch has no field {name!r} with one number per token; it has {sorted(fields)}")

    def record_routes(self) -> None:
        """Let the model's forwards of this micro-batch, from now on, note which experts its routers choose."""
        self._choices()

    def routes(self) -> Tensor:
        """``[T, L, K]``: of each row the K experts that each of the L routers (``hdp.routers``) chose last.

        In uint8, for more than 256 experts in int16. ``hdp.collect`` gives them to their documents. Raises
        ``ConfigError`` before a forward that records them.
        """
        return self._engine.routers.recorded(self._choices())

    def replay(self, field: str) -> None:
        """Let routers choose, in all passes of the model over this micro-batch, what a field of the documents says.

        The field is ``[S, L, K]`` whole numbers, such as ``routes`` of another pass, or what an engine for rollouts
        returns: the experts of each token for each router, in the order of ``hdp.routers``, or for each layer, of which
        those without routers are passed over. A token with a -1 chooses by itself. The weights of experts are computed
        from the current logits, and have gradients. A second model (``HDP.attach``) chooses by itself.

        Raises ``DataError`` for numbers that are not this model's, ``ConfigError`` for a model without routers.
        """
        routes = self._engine.routers.of_field(field, self._given.get(field), self._fields.get(field))
        self._choices().given = routes

    def _choices(self) -> Choices:
        from bytescale.hf.model.routes import Choices  # few loops look at routes

        require_beside("routes and chosen keys", 1, self._engine.mesh.shape.pp)
        _ = self._engine.routers  # watched from now on
        if self.target.choices is None:
            self.target.choices = Choices(self.num_rows)
        found: Choices = self.target.choices
        return found

    def record_chosen_keys(self) -> None:
        """Let the model's forwards of this micro-batch, from now on, note which keys its indexers choose."""
        self._key_choices()

    def chosen_keys(self) -> Tensor:
        """``[T, L, I, K]``: of each row the keys that each of the L indexers (``hdp.indexers``) chose last.

        Int32 positions in the document, and -1 where fewer than K are chosen; I selections, one for all heads or one
        for each key/value head. ``hdp.collect`` gives them to their documents. Raises ``ConfigError`` before a forward
        that records them.
        """
        return self._key_choices().recorded(self.rows)

    def replay_chosen_keys(self, field: str) -> None:
        """Let indexers choose, in all passes of the model over this micro-batch, what a field of the documents says.

        The field is what ``chosen_keys`` gives, ``[S, L, I, K]``. A token that has -1 alone chooses by itself.

        Raises ``DataError`` for positions that cannot be, ``ConfigError`` for a model that chooses no keys.
        """
        self._key_choices().play(field, self._of_all_rows.get(field), torch.as_tensor(self.plan.position_ids()))

    def _key_choices(self) -> KeyChoices:
        from bytescale.hf.model.chosen_keys import KeyChoices  # few loops look at them

        require_beside("routes and chosen keys", 1, self._engine.mesh.shape.pp)
        if self.target.key_choices is None:
            names = self.target.decoder.choosers
            self.target.key_choices = KeyChoices(list(names), max(names.values(), default=0))
        found: KeyChoices = self.target.key_choices
        return found

    def inputs_for(self, model: nn.Module) -> dict[str, Any]:
        """The inputs of another model than the attached one: one that ``HDP.attach`` was given, or a module around it.

        It runs under ``torch.no_grad()``. Raises ``ConfigError`` for a model that was not attached.
        """
        for target in self._targets:
            if target.decoder.is_in(model):
                return {**self.inputs, KEYWORD: target}
        raise _foreign_model(type(model).__name__)

    @overload
    def logprobs(
        self, model: nn.Module, *, temperature: float | Tensor = 1.0, rows_at_a_time: int | None = None
    ) -> Tensor: ...

    @overload
    def logprobs(
        self, model: nn.Module, *, temperature: float | Tensor = 1.0, rows_at_a_time: int | None = None,
        entropy: bool = False, top: int = 0, words: Tensor | None = None, hidden: bool = False,
        mean_logits: bool = False,
    ) -> RowScores: ...  # fmt: skip

    def logprobs(
        self, model: nn.Module, *, temperature: float | Tensor = 1.0, rows_at_a_time: int | None = None,
        entropy: bool = False, top: int = 0, words: Tensor | None = None, hidden: bool = False,
        mean_logits: bool = False,
    ) -> Any:  # fmt: skip
        """``[T]`` log-probability of each row's label, in fp32 (fp64 for fp64); 0 where the label is -100.

        The logits of all rows never exist together. With gradients enabled, those of a chunk are computed again in
        backward. A second model (``HDP.attach``) runs without gradients.

        Args:
            model: the attached model, a module around it, or a second model.
            temperature: logits are divided by it; a number, or ``[T]`` of them.
            rows_at_a_time: rows of logits that exist together; None: as many as the vocabulary allows.
            entropy: whether the entropy of each row is wanted. With this or any of the following the result is
                ``RowScores``.
            top: how many of a row's likeliest words are.
            words: ``[T, K]`` int64, words whose log-probabilities are; None: none.
            hidden: whether hidden states are.
            mean_logits: whether the mean of each row's logits is.

        Raises ``ConfigError`` for a model that is not attached, ``DataError`` for a temperature that is not positive.
        """
        inputs = self.inputs_for(model)
        with torch.set_grad_enabled(torch.is_grad_enabled() and inputs[KEYWORD] is self.target):
            scores = row_scores(
                model, inputs, self.labels, temperature=temperature, rows_at_a_time=rows_at_a_time, entropy=entropy,
                top=top, words=words, mean_logits=mean_logits,
            )  # fmt: skip
        return scores if entropy or top or words is not None or hidden or mean_logits else scores.logprobs

    def loss_sum(self, model: nn.Module, weights: Tensor | None = None) -> Tensor:
        """Sum over rows of ``weights`` times the cross-entropy of the row's label, in fp32 (fp64 for fp64).

        The fastest way to train: gradients of a chunk of logits are computed while the chunk exists, so that no logits
        are kept or computed twice. Backward may run once.

        Args:
            model: the attached model, or a module around it.
            weights: ``[T]`` constants; None: the batch's own.

        Raises ``DataError`` for weights of another shape or with a gradient, ``ConfigError`` for another model.
        """
        if weights is not None and (weights.shape != (self.num_rows,) or weights.requires_grad):
            raise DataError(
                f"loss_sum() got weights of shape {list(weights.shape)}, requires_grad={weights.requires_grad}; "
                f"the micro-batch has {self.num_rows} rows",
                so="it takes one constant for each row",
                fix="cut them like micro.weights, and compute a loss with a gradient of its own from logprobs()",
            )
        labels = self._given["labels"].to("cpu", torch.int64)
        token_weights: Tensor | None = (self._given["weights"] if weights is None else weights).to("cpu")
        assert token_weights is not None, "every batch has weights (hf.batch.documents)"
        if bool((token_weights[labels != IGNORE_INDEX] == 1).all()):
            token_weights = None
        hidden, head = hidden_states(model, self.inputs_for(model))
        return loss_sum(
            self.target.decoder.fastest(head), hidden[0, : self.num_rows], labels, token_weights=token_weights
        )


class Engine:
    """Micro-batches of one attached model on one rank; ``others`` run the same ones without gradients."""

    def __init__(
        self, decoder: HFDecoder, mesh: Mesh, *, kernel: str, checkpointing: Checkpointing, host_gib: float
    ) -> None:
        """Choose the kernel of attention, and apply checkpointing and offloading to the layers. Every rank calls it.

        Raises ``ConfigError`` where the layers have no numbers, or the kernel does not exist.
        """
        group = mesh.world
        check_widths(decoder.structure, cuda_flash=group.device.type == "cuda" and kernel != "math")
        layers = decoder.layers if host_gib or checkpointing != "none" else []
        self.decoder, self.group, self.mesh = decoder, group, mesh
        self.attention = ExitStack()
        """While it is open, the process has the flash implementation that was chosen for the model."""
        tried = torch.float16 if next(decoder.parameters()).dtype == torch.float16 else torch.bfloat16  # or by autocast
        if heads := heads_of(decoder.structure):
            self.attention.enter_context(open_attention(kernel, group.device, tried, heads, mesh.smallest_of_stage))
        name = "math" if kernel == "math" else "flash"
        self._kernel = cache(lambda dtype: select_kernel(name, group.device, dtype))
        self.others: list[HFDecoder] = []
        self.host_bytes = int(host_gib * GIBI)
        self.pool: HostPool | None = None
        if host_gib:
            from bytescale.runtime.saved.host_pool import HostPool  # with offloading alone

            self.pool = HostPool(self.host_bytes, pinned=group.device.type == "cuda")
        self.activations = Activations(
            layers, checkpointing=checkpointing, pool=self.pool, device=group.device, tp=mesh.tp
        )

    def close(self) -> None:
        """Give the layers and the process back what they had."""
        self.activations.remove()
        self.attention.close()
        if "routers" in vars(self):
            self.routers.close()

    @cached_property
    def routers(self) -> Routers:
        """They are watched from the first use on. Raises ``ConfigError`` for a model without them."""
        from bytescale.hf.model.routes import Routers  # few loops look at routes

        return Routers(self.decoder.model, self.decoder.structure.routers, len(self.decoder.layers))

    def micro(self, plan: MicroBatch, fields: dict[str, Tensor], buffers: RingBuffers) -> Micro:
        """The micro-batch of a plan with its rows ``fields``."""
        # Without a ring, the row that stands for no token is a document of its own.
        attended = plan if plan.num_tokens or plan.shared is not None else MicroBatch.of_documents(0, [1])
        exchange = self.mesh.hdp.exchange

        def pass_of(decoder: HFDecoder) -> MicroBatchPass:
            own = decoder is self.decoder
            kept = self.activations.attention_memory if own else None
            return MicroBatchPass(
                decoder,
                cache(lambda dtype: PackedAttention(attended, self._kernel(dtype), exchange, kept, buffers)),
                plan.num_tokens,
                has_ring=plan.shared is not None,
                name=f"micro-batch {plan.index} of rank {self.group.rank}",
                around=(lambda: self.activations.forward(plan)) if own else nullcontext,
            )

        own, *others = map(pass_of, (self.decoder, *self.others))
        return Micro(plan, fields, own, self, others)

    def measured_memory(self) -> MeasuredMemory:
        """What a micro-batch needs, from what the layers were seen to keep. Gradients stay.

        Every rank calls it, and gets the same.
        """
        from bytescale.hf.model.measure import measure_rows, measured_memory, of_all_stages  # where memory is limited

        parameters = list(self.decoder.parameters())
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:  # gradients that backward would make would hide the peak of its layers
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with torch.enable_grad():
            rows = measure_rows(self.decoder, self._kernel(parameters[0].dtype), self.activations, self.group.device)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        rows = rows.of_all(self.mesh.smallest_of_stage)
        kind, num_ranks = kind_of(self.group.device), self.mesh.hdp.size
        own = measured_memory(self.decoder, rows, kind=kind, num_ranks=num_ranks)
        return of_all_stages(own, self.mesh)


def _foreign_model(name: str) -> ConfigError:
    """Of a model that was given the micro-batch of another one."""
    return ConfigError(
        f"{name} was given a micro-batch of an HDP that is not attached to it",
        so="its attention would not reach the parts of a document that other ranks hold",
        fix="give it an HDP of its own: reference = bytescale.HDP(model, ..., forward_only=True). Then hand what "
        "bytescale.score(reference, documents) yields to the other loop, as a field of each document",
    )
