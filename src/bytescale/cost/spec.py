"""What a model costs, whoever has written its code: counts from which times, memory and MFU follow.

Those of transformers are what the probe has seen (``hf.model.costs``). Layers count as equal to their mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from bytescale.common.arrays import IntArray
from bytescale.common.units import format_si
from bytescale.config.architecture import Architecture
from bytescale.cost import flops
from bytescale.cost.model import windowed_squares


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Counts of a model. Numbers of weights and of elements are those of one layer, if they do not say otherwise."""

    stack: Architecture
    """A preset's numbers, or equal layers that stand for a model: as many layers, words and heads of the mean width."""
    kind: str = ""
    """A word on the model for people, such as its family; empty: there is nothing to say."""
    pair_numbers: float
    """Numbers that a pair of query and key is multiplied with: the widths of keys and of values, of all heads."""
    key_numbers: float
    """Numbers of a token's keys and values that travel around a ring. A window's are few, whatever the length: none."""
    parameters: int
    active: float
    """Weights that a token is multiplied with. Of a mixture of experts, those of its own experts."""
    trained: float
    """Those of them that are trained."""
    experts: int = 0
    """Weights of all experts, which ``parameters`` has; routers and shared experts are not among them."""
    expert_rows: float = 0.0
    """How many experts a token is sent to."""
    head: int
    """Weights of the output projection."""
    head_trained: int
    total: int
    """Weights of the whole model."""
    total_trained: int
    recurrent_share: float = 0.0
    """The share of the layers that are recurrent: ``stack`` counts them, too, and attention is a mean over all."""
    state_numbers: float = 0.0
    """Numbers that a member sends in one round of the scan over states (``plan.states``), for its two segments."""
    windows: tuple[tuple[int, float], ...] = ()
    """As in ``CostModel.windows``."""

    @staticmethod
    def of(model: Architecture | ModelSpec) -> ModelSpec:
        """The counts of a preset, by its numbers; counts stay as they are."""
        if isinstance(model, ModelSpec):
            return model
        active = flops.attention_parameters(model) + flops.active_feed_forward_parameters(model)
        head, total = flops.head_parameters(model), flops.total_parameters(model)
        return ModelSpec(
            stack=model,
            pair_numbers=flops.layer_attention_flops_per_square(model),
            key_numbers=flops.kv_bytes_per_token(model, bytes_per_element=1),
            parameters=flops.layer_parameters(model),
            active=active,
            trained=active,
            experts=3 * model.num_experts * model.ffn_hidden_size * model.hidden_size,
            expert_rows=model.experts_per_token if model.num_experts else 0,
            head=head,
            head_trained=head,
            total=total,
            total_trained=total,
        )

    def training_flops(self, *, num_tokens: int, sum_of_squares: float) -> int:
        """Operations of forward and backward of the whole model: three times forward. The numerator of MFU.

        ``sum_of_squares``: of ``squares_of`` the documents' lengths.
        """
        per_token = 2 * (self.stack.num_layers * self.active + self.head)
        return int(3 * (per_token * num_tokens + self.stack.num_layers * self.pair_numbers * sum_of_squares))

    def squares_of(self, lengths: IntArray) -> float:
        """Sum of ``CostModel.squares_of`` documents of ``lengths [S]``."""
        return float(windowed_squares(lengths, self.windows).sum())

    def describe(self) -> str:
        """The model in a line for people."""
        shape, part = self.stack, ""
        if shape.num_experts:
            count = format_si(flops.active_parameters(shape))
            part = f" ({count} active: {shape.experts_per_token} of {shape.num_experts} experts)"
        if self.total_trained < self.total:
            part = f" ({format_si(self.total_trained)} trained)"
        share, sizes = sum(part for _, part in self.windows), ", ".join(str(window) for window, _ in self.windows)
        windows = f" ({100 * share:.0f} % of attention in windows of {sizes})" if self.windows else ""
        return (
            f"{format_si(self.total)} parameters{part}, {self.kind + ', ' if self.kind else ''}{shape.num_layers} "
            f"layers{windows}, hidden {shape.hidden_size}, {shape.num_heads} heads over {shape.num_kv_heads}, "
            f"vocabulary {shape.vocab_size}"
        )
