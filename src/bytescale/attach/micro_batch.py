"""One micro-batch as the caller's loop sees it: inputs of the model, and this rank's rows of every field."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bytescale.attach.head import has_plain_head, hidden_states, log_probabilities
from bytescale.attach.interface import KEYWORD, OnlyAttached, foreign_model
from bytescale.attach.passes import MicroBatchPass
from bytescale.attention.copies import to_device
from bytescale.common.errors import DataError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.plan import MicroBatch
from bytescale.runtime.loss import PlainHead, loss_sum


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
        self, plan: MicroBatch, fields: dict[str, Tensor], target: MicroBatchPass, device: torch.device
    ) -> None:
        self.plan = plan
        self.index = plan.index
        self.num_rows = plan.num_tokens
        self.target = target
        self._given = fields
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
        """``(document, start, stop)`` of the runs of tokens that the rows are, in order: NOT of whole documents.

        Ranks share long documents, so that a sum or mean over these rows is not the document's. What a loss needs of
        whole documents, such as GSPO's mean log-ratio, comes from a first pass: ``collect`` and ``collected``
        (docs/own_loop.md, "A number of a whole document").
        """
        plan = self.plan
        bounds = (plan.segment_sequences, plan.segment_starts, plan.segment_stops)
        return list(zip(*(array.tolist() for array in bounds), strict=True))

    def __getattr__(self, name: str) -> Tensor:
        fields = self.__dict__.get("_fields", {})
        if name in fields:
            field: Tensor = fields[name]
            return field
        raise AttributeError(f"the batch has no field {name!r} with one number per token; it has {sorted(fields)}")

    def logprobs(self, model: nn.Module, *, rows_at_a_time: int | None = None) -> Tensor:
        """``[T]`` log-probability of each row's label, in fp32 (fp64 for fp64); 0 where the label is -100.

        The logits of all rows never exist together. With gradients enabled, those of a chunk are computed again in
        backward. ``model`` is the attached model, or a module around it. Raises ``ConfigError`` for any other.
        """
        return log_probabilities(model, self.inputs, self.labels, rows_at_a_time=rows_at_a_time)

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
        assert token_weights is not None, "every batch has weights (attach.documents)"
        if bool((token_weights[labels != IGNORE_INDEX] == 1).all()):
            token_weights = None
        hidden, head = hidden_states(model, self.inputs)
        plain, key = self.target.model.plain_heads, id(head.weight)
        if key not in plain:
            plain[key] = has_plain_head(model, head, hidden.shape[-1])
        fastest = PlainHead(head.weight) if plain[key] and head.weight is not None else head
        return loss_sum(fastest, hidden[0, : self.num_rows], labels, token_weights=token_weights)
