"""An attached model as the runtime sees a model: packed tokens to hidden states, with the loss of these.

``runtime.Executor`` runs our own models and these alike. What differs from ``HDP`` is who owns the loop: here the
trainer does, with its loss, its checkpointing of layers and its optimizer.

Shape letters: T rows of a micro-batch, C hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.attach.head import Head, has_plain_head, hidden_states, loss_sum, row_log_probabilities
from bytescale.attach.interface import KEYWORD, Attachment
from bytescale.attach.long_rope import fix_rope
from bytescale.attach.passes import AttachedModel, MicroBatchPass
from bytescale.attach.probe import ModelFacts, probe
from bytescale.attach.refusal import refusal
from bytescale.attention import PackedAttention


class AttachedPart(nn.Module):
    """A decoder of transformers that is on our attention (``runtime.TrainableModel``).

    Attributes:
        model: of transformers; names of parameters are its own.
        facts: every layer's attention, as the probe has found it.
        layers: the decoder's layers, in order.
        has_plain_head: whether logits are hidden states times the head's weight, so that ``loss_sum`` is not needed.
    """

    def __init__(self, model: nn.Module, *, longest_document: int) -> None:
        """Attach. ``longest_document``: for which rotary positions that depend on the longest one are fixed.

        Raises ``ConfigError`` where a plan would not give the results of one process, with the part that is in the way.
        """
        super().__init__()
        self.model = model.train()
        Attachment(model)
        fix_rope(model, longest_document)
        self.facts: ModelFacts = probe(model)
        if self.facts.random_parts:
            raise refusal(
                self.facts.random_parts[0],
                "it draws random numbers in training mode (dropout or jitter)",
                so="results would depend on the plan and on the number of ranks",
                fix="set every dropout probability in config.json to 0 (attention_dropout, resid_pdrop, ...)",
            )
        self.layers = layers_of(model, self.facts)
        self._attached = AttachedModel.of(model, self.facts)
        two = torch.arange(2, device=next(model.parameters()).device)[None]
        with torch.no_grad():
            hidden, self._head = hidden_states(model, {"input_ids": two, "position_ids": two, "use_cache": False})
        self.hidden_size: int = hidden.shape[-1]
        self.has_plain_head = has_plain_head(model, self._head, self.hidden_size)

    @property
    def head_weight(self) -> Tensor:
        """``[V, C]`` of a plain head."""
        weight = self._head.weight
        assert weight is not None, "only a plain head is asked for its weight"
        return weight

    def forward(self, inputs: Tensor, position_ids: Tensor, attention: PackedAttention) -> Tensor:
        """``tokens, position_ids [T]`` int64 -> hidden states ``[T, C]`` after the final norm."""
        num_rows = len(inputs)
        if not num_rows:  # transformers' models need a row; it stands for none
            inputs, position_ids = inputs.new_zeros(1), position_ids.new_zeros(1)
        target = MicroBatchPass(
            lambda dtype: attention, self._attached, num_rows=num_rows, has_ring=True, name="a micro-batch"
        )
        given: dict[str, Any] = {"input_ids": inputs[None], "position_ids": position_ids[None], "use_cache": False}
        hidden, self._head = hidden_states(self.model, {**given, KEYWORD: target})
        return hidden[0, :num_rows]

    def loss_sum(self, hidden: Tensor, labels: Tensor, *, z_loss: float, token_weights: Tensor | None) -> Tensor:
        """``attach.head.loss_sum`` of the micro-batch that ran forward last."""
        return loss_sum(self._head, hidden, labels, z_loss=z_loss, token_weights=token_weights)

    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """``[T]`` losses of the micro-batch that ran forward last, 0 without a target. No gradient flows."""
        with torch.no_grad():
            return -row_log_probabilities(self._head, hidden, labels.to(hidden.device))

    @property
    def head(self) -> Head:
        """From hidden states to logits."""
        return self._head


def layers_of(model: nn.Module, facts: ModelFacts) -> list[nn.Module]:
    """The decoder's layers: of every attention and recurrence, the numbered module around it, in the model's order.

    Raises ``ConfigError`` where one of them does not lie in numbered modules.
    """
    names: list[str] = []
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    for layer in sorted([*facts.layers, *facts.mixers], key=lambda layer: places[layer.name]):
        numbered = re.match(r"(.*?\.\d+)(\.|$)", layer.name)
        if numbered is None:
            raise refusal(
                layer.name,
                "it does not lie in a numbered list of layers",
                so="activation checkpointing could not tell where a layer begins",
                fix="train it in a loop of your own with bytescale.HDP",
            )
        names.append(numbered[1])
    return [model.get_submodule(name) for name in dict.fromkeys(names)]


def late_parameters(model: nn.Module, layers: list[nn.Module], head: Head) -> set[str]:
    """Names of parameters whose gradients may change until the last backward ends, so that they are reduced after it.

    A layer's own gradients are complete when backward has left the layer, and an untied head's when it enters the last
    one. All others may be used anywhere. So are parameters that several layers have.
    """
    uses: dict[int, int] = {}
    for layer in layers:
        for parameter in layer.parameters():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    early = {key for key, count in uses.items() if count == 1}
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    if head.weight is not None and head.weight is not getattr(embedding, "weight", None):
        early.add(id(head.weight))
    return {name for name, parameter in model.named_parameters() if id(parameter) not in early}
