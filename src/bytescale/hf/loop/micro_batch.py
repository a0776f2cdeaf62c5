"""One micro-batch as the caller's loop sees it, whole documents of it, and the engine that makes it.

Of documents that ranks share, every member gets the rows of all members, in a ring of messages over the communicator
that attention uses. Each computes the loss of the whole documents, and backward keeps the gradient of its own rows,
without a message: together the members have every row's gradient once. The value of a loss is counted by the group's
first member alone. All members send at the same place of the same micro-batch, between its forward and its backward,
and so before the rank's reductions (``plan.last_message``). A send and its receive are one operation, as NCCL requires.

Shape letters: T rows of a micro-batch, P of them of shared documents; D documents of the micro-batch, S tokens of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from bytescale.attention import Exchange, PackedAttention, RingBuffers, select_kernel
from bytescale.attention.copies import to_device
from bytescale.attention.flash import open_attention
from bytescale.attention.rings.messages import Kind
from bytescale.common.errors import DataError, PlanError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.common.units import GIBI
from bytescale.cost.memory.device_kernels import DeviceKind
from bytescale.hf.batch.documents import of_documents
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.head import RowScores, hidden_states, row_scores
from bytescale.hf.model.interface import KEYWORD, OnlyAttached, foreign_model
from bytescale.hf.model.passes import MicroBatchPass
from bytescale.hf.model.probe import check_widths, heads_of
from bytescale.plan import MicroBatch
from bytescale.plan.plan import concatenated_ranges
from bytescale.plan.rank_plan import SharedGroup
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import loss_sum
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.saved.checkpointing import Checkpointing

if TYPE_CHECKING:
    from bytescale.cost.memory.measured import MeasuredMemory
    from bytescale.runtime.saved.host_pool import HostPool


class Micro:
    """A micro-batch of one rank. T: its rows, one per token.

    Every field of the documents is an attribute: ``micro.labels``, ``micro.weights`` and those that the batch has
    besides, each ``[T, ...]`` on the model's device.

    Attributes:
        index: its place in this rank's order.
        inputs: keyword arguments of the model: ``input_ids`` and ``position_ids`` ``[1, max(T, 1)]``, and what
            reaches attention; a model that is not attached refuses them. A rank that takes part in a ring without a
            token gets one row that stands for none.
        position_ids: ``[T]`` place of each row's token in its document.
        num_rows: T. The model's output may have one row more: use ``logits[0, :micro.num_rows]``.
        plan: the plan's view of this micro-batch.
    """

    def __init__(
        self,
        plan: MicroBatch,
        fields: dict[str, Tensor],
        target: MicroBatchPass,
        group: RankGroup,
        others: Sequence[MicroBatchPass] = (),
    ) -> None:
        self.plan = plan
        self.index = plan.index
        self.num_rows = plan.num_tokens
        self.target = target
        self._given, self._exchange, self._targets = fields, group.exchange, (target, *others)
        device = group.device
        self._fields = {name: to_device(rows, device) for name, rows in fields.items()}
        tokens, self.position_ids = self._fields["tokens"], to_device(torch.as_tensor(plan.position_ids()), device)
        places = self.position_ids
        if not self.num_rows:
            tokens = places = tokens.new_zeros(1)
        self.inputs: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": places[None],
            "use_cache": False,
            "attention_mask": OnlyAttached(foreign_model("a model that is on no HDP's attention")),
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
        return WholeDocuments(self.plan, values, self._exchange)

    def __getattr__(self, name: str) -> Tensor:
        fields = self.__dict__.get("_fields", {})
        if name in fields:
            field: Tensor = fields[name]
            return field
        raise AttributeError(f"the batch has no field {name!r} with one number per token; it has {sorted(fields)}")

    def inputs_for(self, model: nn.Module) -> dict[str, Any]:
        """The inputs of another model than the attached one: one that ``HDP.attach`` was given, or a module around it.

        It runs under ``torch.no_grad()``. Raises ``ConfigError`` for a model that was not attached.
        """
        for target in self._targets:
            if target.decoder.is_in(model):
                return {**self.inputs, KEYWORD: target}
        raise foreign_model(type(model).__name__)

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


class WholeDocuments(Sequence[Tensor]):
    """``[D]`` tensors ``[S, ...]``: of each document of a micro-batch, the values of all its tokens, in their order.

    A gradient may flow through them. All members of a group have the documents that they share, and compute the same
    loss. So add losses up by ``sum``, which counts the value of each document once over all ranks.

    Attributes:
        numbers: ``[D]`` places of the documents in the global batch.
        counted: ``[D]`` whether this rank counts the document, which one rank does.
    """

    def __init__(self, plan: MicroBatch, values: Tensor, exchange: Exchange) -> None:
        """``values [T, ...]``: of this rank's rows. Every member of the shared group calls it at the same place."""
        if len(values) != plan.num_tokens:
            raise PlanError(
                f"{len(values)} values for the {plan.num_tokens} rows of micro-batch {plan.index}",
                so="they could not be given to their documents",
                fix="give one value per row, without the row that stands for none: values[: micro.num_rows]",
            )
        shared, num_shared = plan.shared, plan.num_shared_tokens
        self.numbers = plan.documents
        self.counted = [True] * len(plan.local_lengths)
        self._values = list(values[num_shared:].split(plan.local_lengths.tolist()))
        if shared is not None:
            whole: Tensor = _Gathered.apply(values[:num_shared], shared, exchange)
            self.counted = [shared.member == 0] * len(shared.sequences) + self.counted
            self._values = [*whole.split(shared.lengths.tolist()), *self._values]
        if plan.trees is not None:
            places = plan.trees.sequence_of.tolist()
            self.counted = [self.counted[place] for place in places]
            self._values = of_documents(plan.trees, self._values)
        self._index = plan.index
        self._rows = values

    def of(self, number: int) -> Tensor:
        """``[S, ...]`` of the document at this place of the global batch. Raises ``PlanError`` if it is elsewhere."""
        if number not in self.numbers:
            raise PlanError(
                f"document {number} is not in micro-batch {self._index}, which has documents {self.numbers}",
                so="a loss that looks at documents of several micro-batches cannot be computed in one of them",
                fix="use hdp.backward(batch, loss, together=...), which brings such documents together",
            )
        return self._values[self.numbers.index(number)]

    def sum(self, losses: Tensor | Sequence[Tensor]) -> Tensor:
        """The sum of ``losses [D]``: its value is over the documents that this rank counts, its gradient over all.

        So the values of all ranks add up to that of one process, and so do the gradients of the model. Parameters of
        the loss itself, such as a scale, belong before ``micro.documents``: they would get one gradient per member.
        """
        if not isinstance(losses, Tensor):
            losses = torch.stack(list(losses)) if len(losses) else self._rows.new_zeros(0)
        if losses.shape != (len(self),):
            raise PlanError(
                f"sum() got losses of shape {list(losses.shape)}, and the micro-batch has {len(self)} documents",
                so="documents that several ranks share could not be counted once",
                fix="give one loss for each document, in the order of micro.documents(...)",
            )
        # A rank without a row of these documents takes part in their backward all the same.
        anchor = self._rows[:0].sum()
        counted = torch.tensor(self.counted, dtype=torch.bool, device=losses.device)
        return losses[counted].sum() + (losses - losses.detach())[~counted].sum() + anchor

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: Any) -> Any:
        return self._values[place]


class _Gathered(torch.autograd.Function):
    """From this member's rows ``[P, ...]`` to those of all members, document by document. Backward keeps its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: SharedGroup, exchange: Exchange) -> Tensor:
        places = [torch.as_tensor(own, device=rows.device) for own in _places(shared)]
        ctx.own = places[shared.member]
        whole = rows.new_empty(int(shared.lengths.sum()), *rows.shape[1:])
        held, member = rows.contiguous(), shared.member
        whole[ctx.own] = held
        for _ in range(shared.size - 1):
            # The rows that came last go on to the next member, and those of one member further back arrive.
            member = (member - 1) % shared.size
            arriving = rows.new_empty(len(places[member]), *rows.shape[1:])
            exchange.start(
                send=held,
                to=shared.ranks[(shared.member + 1) % shared.size],
                receive=arriving,
                source=shared.ranks[shared.member - 1],
                tag=Kind.DOCUMENT_ROWS.tag(shared.group),
            ).wait()
            whole[places[member]] = held = arriving
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][ctx.own], None, None


def _places(shared: SharedGroup) -> list[np.ndarray]:
    """For each member, where its rows lie in all shared documents, one behind the other."""
    starts = np.cumsum(shared.lengths) - shared.lengths
    places = []
    for bounds in shared.bounds + starts[:, None, None]:
        places.append(concatenated_ranges(bounds[:, :, 0].ravel(), bounds[:, :, 1].ravel()))
    return places


class Engine:
    """Micro-batches of one attached model on one rank; ``others`` run the same ones without gradients."""

    def __init__(
        self, decoder: HFDecoder, group: RankGroup, *, kernel: str, checkpointing: Checkpointing, host_gib: float
    ) -> None:
        """Choose the kernel of attention, and apply checkpointing and offloading to the layers. Every rank calls it.

        Raises ``ConfigError`` where the layers have no numbers, or the kernel does not exist.
        """
        check_widths(decoder.structure, cuda_flash=group.device.type == "cuda" and kernel != "math")
        layers = decoder.layers if host_gib or checkpointing != "none" else []
        self.decoder, self.group = decoder, group
        self.attention = ExitStack()
        """While it is open, the process has the flash implementation that was chosen for the model."""
        tried = torch.float16 if next(decoder.parameters()).dtype == torch.float16 else torch.bfloat16  # or by autocast
        if heads := heads_of(decoder.structure):
            self.attention.enter_context(open_attention(kernel, group.device, tried, heads, group.min_of))
        name = "math" if kernel == "math" else "flash"
        self._kernel = cache(lambda dtype: select_kernel(name, group.device, dtype))
        self.others: list[HFDecoder] = []
        self.host_bytes = int(host_gib * GIBI)
        self.pool: HostPool | None = None
        if host_gib:
            from bytescale.runtime.saved.host_pool import HostPool  # with offloading alone

            self.pool = HostPool(self.host_bytes, pinned=group.device.type == "cuda")
        self.activations = Activations(layers, checkpointing=checkpointing, pool=self.pool, device=group.device)

    def close(self) -> None:
        """Give the layers and the process back what they had."""
        self.activations.remove()
        self.attention.close()

    def micro(self, plan: MicroBatch, fields: dict[str, Tensor], buffers: RingBuffers) -> Micro:
        """The micro-batch of a plan with its rows ``fields``."""
        # Without a ring, the row that stands for no token is a document of its own.
        attended = plan if plan.num_tokens or plan.shared is not None else MicroBatch.of_documents(0, [1])
        exchange = self.group.exchange

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
        return Micro(plan, fields, own, self.group, others)

    def measured_memory(self) -> MeasuredMemory:
        """What a micro-batch needs, from what the layers were seen to keep. Gradients stay.

        Every rank calls it, and gets the same.
        """
        from bytescale.hf.model.measure import measure_rows, measured_memory  # where memory is limited

        parameters = list(self.decoder.parameters())
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:  # gradients that backward would make would hide the peak of its layers
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with torch.enable_grad():
            rows = measure_rows(self.decoder, self._kernel(parameters[0].dtype), self.activations, self.group.device)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        rows = rows.of_all(self.group.min_of)
        kind: DeviceKind = "cuda" if self.group.device.type == "cuda" else "cpu"
        return measured_memory(self.decoder, rows, kind=kind, num_ranks=self.group.size)
