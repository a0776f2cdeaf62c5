"""One micro-batch as the caller's loop sees it: inputs of the model, and this rank's rows of every field."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bytescale.attach.head import log_probabilities
from bytescale.attach.interface import KEYWORD
from bytescale.attach.passes import MicroBatchPass
from bytescale.plan import MicroBatch


class Micro:
    """A micro-batch of one rank. T: its rows, one per token.

    Every field of the documents is an attribute: ``micro.labels``, ``micro.weights`` and those that the batch has
    besides, each ``[T, ...]`` on the model's device.

    Attributes:
        index: its place in this rank's order.
        inputs: keyword arguments of the model: ``input_ids`` and ``position_ids`` ``[1, max(T, 1)]``, and what reaches
            attention. A rank that takes part in a ring without holding a token gets one row that stands for none.
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
        self._fields = {name: rows.to(device, non_blocking=True) for name, rows in fields.items()}
        tokens, position_ids = self._fields["tokens"], torch.as_tensor(plan.position_ids()).to(device)
        if not self.num_rows:
            tokens, position_ids = tokens.new_zeros(1), position_ids.new_zeros(1)
        self.inputs: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": position_ids[None],
            "use_cache": False,
            KEYWORD: target,
        }

    @property
    def position_ids(self) -> Tensor:
        """``[T]`` place of each row's token in its document."""
        return self.inputs["position_ids"][0, : self.num_rows]

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """``(document, start, stop)`` of the runs of tokens that the rows are, in order."""
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
        backward. ``model`` is the attached model, or a module around it.
        """
        return log_probabilities(model, self.inputs, self.labels, rows_at_a_time=rows_at_a_time)
