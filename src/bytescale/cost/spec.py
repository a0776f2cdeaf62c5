"""What a model costs: counts of its layers and of its head, from which times, memory and MFU follow.

They are taken from the model itself (``hf.model.costs``). Planning, simulation and MFU use the same conventions:

* A multiplication and an addition count as two operations. Norms, rotations and softmax are left out (below 1 %).
* Causal attention of a sequence of ``s`` tokens counts as ``s^2 / 2`` pairs, and a pack as the sum over its documents.
* ``ModelSpec.training_flops`` counts the *model's* operations, from which MFU follows: backward has twice those of
  forward. Flash attention computes the scores again in backward: ``BACKWARD_ATTENTION_RATIO`` counts in times alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby

from bytescale.common.arrays import IntArray
from bytescale.common.limits import limits
from bytescale.common.units import format_si
from bytescale.cost.model import windowed_squares


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Counts of a layer: of weights, and of elements of a token."""

    count: int = field(default=1, metadata=limits(least=1, most=4096))
    """So many equal layers follow each other."""
    parameters: int = field(metadata=limits(least=0))
    active_weights: float = field(metadata=limits(least=0))
    """Weights that a token is multiplied with. Of a mixture of experts, those of its own experts."""
    trained_weights: float = field(metadata=limits(least=0))
    """Those of them that are trained."""
    expert_weights: int = field(default=0, metadata=limits(least=0))
    """Weights of all experts, which ``parameters`` has; routers and shared experts are not among them."""
    expert_rows: float = field(default=0.0, metadata=limits(least=0))
    """How many experts a token is sent to."""
    pair_numbers: float = field(default=0.0, metadata=limits(least=0))
    """Numbers that a pair of query and key is multiplied with: the widths of keys and of values, of all heads."""
    chosen_numbers: float = field(default=0.0, metadata=limits(least=0))
    """Those of them that chosen keys alone meet, at most ``num_chosen`` of each query. The others are an indexer's."""
    num_chosen: int = field(default=0, metadata=limits(least=0))
    window: int = field(default=0, metadata=limits(least=0))
    """Keys that a query sees at most; 0: all before it."""
    num_heads: int = field(default=0, metadata=limits(least=0))
    """Query heads whose keys travel around a ring. What a window reaches are few keys, whatever the length: none."""
    key_numbers: float = field(default=0.0, metadata=limits(least=0))
    """Numbers of a token's keys and values that travel around a ring."""
    mixers: int = field(default=0, metadata=limits(least=0))
    """Recurrences, whose states a group exchanges."""
    state_numbers: float = field(default=0.0, metadata=limits(least=0))
    """Numbers that a member sends in one round of the scan over states (``plan.states``), for its two segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Counts of a model."""

    layers: tuple[LayerSpec, ...]
    """In order. Equal ones that follow each other are one, with their ``count``."""
    kind: str = ""
    """A word on the model for people, such as its family; empty: there is nothing to say."""
    vocab_size: int = field(metadata=limits(least=1))
    hidden_size: int = field(metadata=limits(least=1))
    outside: int = field(metadata=limits(least=0))
    """Weights outside of the layers and of an untied output projection: the embedding, other tables, norms."""
    head: int = field(metadata=limits(least=0))
    """Weights of the output projection."""
    head_trained: int = 0
    is_tied: bool = False
    """Whether the output projection is the embedding."""
    total: int = 0
    """Weights of the whole model."""
    total_trained: int = 0

    @property
    def num_layers(self) -> int:
        return sum(layer.count for layer in self.layers)

    def mean(self, name: str) -> float:
        """The mean of a count of ``LayerSpec`` over all layers."""
        return float(sum(layer.count * getattr(layer, name) for layer in self.layers) / self.num_layers)

    def share_with(self, name: str) -> float:
        """The share of the layers in which this count is not 0."""
        return sum(layer.count for layer in self.layers if getattr(layer, name)) / self.num_layers

    @property
    def windows(self) -> tuple[tuple[int, float], ...]:
        """As ``CostModel.windows``."""
        found: dict[int, float] = {}
        for layer in self.layers:
            chosen = layer.chosen_numbers
            for window, numbers in ((layer.window, layer.pair_numbers - chosen), (layer.num_chosen, chosen)):
                found[window] = found.get(window, 0.0) + layer.count * numbers
        pairs = sum(found.values())
        return tuple((window, part / pairs) for window, part in sorted(found.items()) if window and part)

    @property
    def each(self) -> list[LayerSpec]:
        """Every layer on its own."""
        return [replace(layer, count=1) for layer in self.layers for _ in range(layer.count)]

    def training_flops(self, *, num_tokens: int, sum_of_squares: float) -> int:
        """Operations of forward and backward of the whole model: three times forward. The numerator of MFU.

        ``sum_of_squares``: of ``squares_of`` the documents' lengths.
        """
        per_token = 2 * (self.num_layers * self.mean("active_weights") + self.head)
        pairs = self.num_layers * self.mean("pair_numbers")
        return int(3 * (per_token * num_tokens + pairs * sum_of_squares))

    def squares_of(self, lengths: IntArray) -> float:
        """Sum of ``CostModel.squares_of`` documents of ``lengths [S]``."""
        return float(windowed_squares(lengths, self.windows).sum())

    def describe(self) -> str:
        """The model in a line for people."""
        part = ""
        if idle := sum(
            layer.count * (layer.parameters - layer.active_weights) for layer in self.layers if layer.expert_weights
        ):
            part = f" ({format_si(self.total - idle)} active)"
        if self.total_trained < self.total:
            part = f" ({format_si(self.total_trained)} trained)"
        share, sizes = sum(part for _, part in self.windows), ", ".join(str(window) for window, _ in self.windows)
        windows = f" ({100 * share:.0f} % of attention in windows of {sizes})" if self.windows else ""
        return (
            f"{format_si(self.total)} parameters{part}, {self.kind + ', ' if self.kind else ''}{self.num_layers} "
            f"layers{windows}, hidden {self.hidden_size}, vocabulary {self.vocab_size}"
        )


def counted(layers: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    """``ModelSpec.layers`` of layers one by one."""
    return tuple(replace(layer, count=len(list(same))) for layer, same in groupby(layers))
