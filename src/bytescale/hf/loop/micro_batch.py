"""One micro-batch as the caller's loop sees it: inputs of the model, and this rank's rows of every field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from bytescale.attention import Exchange
from bytescale.attention.copies import to_device
from bytescale.common.errors import DataError, PlanError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.hf.batch.whole_documents import WholeDocuments
from bytescale.hf.model.decoder import MicroBatchPass
from bytescale.hf.model.head import RowScores, hidden_states, row_scores
from bytescale.hf.model.interface import KEYWORD, OnlyAttached, foreign_model
from bytescale.plan import MicroBatch
from bytescale.runtime.loss import loss_sum


class Micro:
    """A micro-batch of one rank. T: its rows, one per token.

    Every field of the documents is an attribute: ``micro.labels``, ``micro.weights`` and those that the batch has
    besides, each ``[T, ...]`` on the model's device.

    Attributes:
        index: its place in this rank's order.
        inputs: keyword arguments of the model: ``input_ids`` and ``position_ids`` ``[1, max(T, 1)]``, and what reaches
            attention; a model that is not attached refuses them. A rank that takes part in a ring without a token gets
            one row that stands for none.
        num_rows: T. The model's output may have one row more: use ``logits[0, :micro.num_rows]``.
        plan: the plan's view of this micro-batch.
    """

    def __init__(
        self,
        plan: MicroBatch,
        fields: dict[str, Tensor],
        target: MicroBatchPass,
        device: torch.device,
        *,
        exchange: Exchange,
        others: Sequence[MicroBatchPass] = (),
    ) -> None:
        self.plan = plan
        self.index = plan.index
        self.num_rows = plan.num_tokens
        self.target = target
        self._given, self._exchange, self._others = fields, exchange, others
        self._fields = {name: to_device(rows, device) for name, rows in fields.items()}
        tokens, position_ids = self._fields["tokens"], to_device(torch.as_tensor(plan.position_ids()), device)
        if not self.num_rows:
            tokens, position_ids = tokens.new_zeros(1), position_ids.new_zeros(1)
        self.inputs: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": position_ids[None],
            "use_cache": False,
            "attention_mask": OnlyAttached(foreign_model("a model that is on no HDP's attention")),
            KEYWORD: target,
        }

    @property
    def position_ids(self) -> Tensor:
        """``[T]`` place of each row's token in its document."""
        return self.inputs["position_ids"][0, : self.num_rows]

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """``(document, start, stop)`` of the runs of tokens that the rows are, in order, where all documents are whole.

        Raises ``PlanError`` where ranks share documents: a sum or mean over such a run is not the document's.
        """
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
        if self.target.decoder.is_in(model):
            return self.inputs
        for target in self._others:
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
        with torch.set_grad_enabled(torch.is_grad_enabled() and inputs is self.inputs):
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
        hidden, head = hidden_states(model, self.inputs)
        fastest = self.target.decoder.fastest(head, hidden.shape[-1])
        return loss_sum(fastest, hidden[0, : self.num_rows], labels, token_weights=token_weights)
