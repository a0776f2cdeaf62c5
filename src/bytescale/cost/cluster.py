"""The cluster as a planner sees it: HDP ranks, with the capacity and the speed of each.

The size of a node is in the cost model, with the links (``CostModel.ranks_per_node``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.errors import ConfigError

if TYPE_CHECKING:
    from bytescale.cost.offload_rule import OffloadRule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """R ranks of hybrid data parallelism. One rank is tp x pp devices that act together.

    Raises ``ConfigError`` when a number is not positive or the arrays' lengths differ.
    """

    capacity_tokens: IntArray  # [R] tokens that one micro-batch of a rank may hold (the paper's C)
    speeds: NDArray[np.float64]  # [R] work per second, relative to the rank that the cost model describes
    offload: OffloadRule | None = None  # which activations may wait in host memory; of equal ranks alone

    def __post_init__(self) -> None:
        if self.capacity_tokens.ndim != 1 or self.capacity_tokens.shape != self.speeds.shape:
            raise ConfigError(
                f"capacity_tokens has shape {self.capacity_tokens.shape} and speeds {self.speeds.shape}",
                fix="give one number of each per rank",
            )
        rules = (
            ("a cluster has no ranks", len(self.speeds) == 0),
            ("a rank's capacity is below one token", bool((self.capacity_tokens < 1).any())),
            (
                "a rank's speed is not a finite number above 0",
                not bool(((self.speeds > 0) & np.isfinite(self.speeds)).all()),
            ),
            ("ranks that differ offload activations", self.offload is not None and not self.is_uniform),
        )
        for what, broken in rules:
            if broken:
                raise ConfigError(what, so="no plan could be made", fix="use positive numbers, or equal ranks")

    @property
    def num_ranks(self) -> int:
        return len(self.speeds)

    @property
    def is_uniform(self) -> bool:
        """Whether all ranks are equal in capacity and speed."""
        return bool((self.speeds == self.speeds[0]).all() and (self.capacity_tokens == self.capacity_tokens[0]).all())

    def fewest_ranks(self, lengths: IntArray) -> IntArray:
        """``[S]`` fewest ranks that hold each sequence (paper Eq. 3; without offloading ceil(s / C)). Equal ranks."""
        capacity = int(self.capacity_tokens.min())
        if self.offload is None:
            return -(-lengths // capacity)
        return self.offload.fewest_ranks(lengths, capacity, self.num_ranks)

    @property
    def largest_sequence(self) -> int:
        """Tokens of the largest sequence that all ranks can hold together. Equal ranks."""
        capacity = int(self.capacity_tokens.min())
        slice_tokens = capacity if self.offload is None else self.offload.largest_slice(capacity)
        return self.num_ranks * slice_tokens

    @property
    def room(self) -> int:
        """Tokens of the largest sequence that all ranks hold together, if each holds as much as it can."""
        return int(self.capacity_tokens.sum()) if self.offload is None else self.largest_sequence

    @staticmethod
    def uniform(num_ranks: int, capacity_tokens: int, *, offload: OffloadRule | None = None) -> Cluster:
        """``num_ranks`` equal ranks of reference speed."""
        return Cluster(
            capacity_tokens=np.full(num_ranks, capacity_tokens, dtype=np.int64),
            speeds=np.ones(num_ranks),
            offload=offload,
        )
