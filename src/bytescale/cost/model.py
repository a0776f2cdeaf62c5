"""The planner's cost model: a few numbers that give the time of one rank for its part of a sequence or a group.

It sums all layers, forward and backward, into one number per term. ``cost.stage`` keeps them separate, for the
simulator.

    work of a sequence on one rank            a q(s) + b s,  q(s) = s^2 without windows (``squares_of``)
    member of a group of D                    (a Q + b T) / D  +  exposed ring time  +  g
    with T = sum of s, Q = sum of q(s) over the group's sequences

The ring has D - 1 transfers and D blocks of attention. A transfer runs while a block computes, so only the time by
which a transfer is longer than a block is exposed (paper section 3: O(s^2) work hides O(s) traffic):

    x = ring_bytes_per_token T / (D bandwidth) + latency        one transfer
    c = a Q / D^2                                               one block
    exposed = (D - 1) (max(0, x - c) + o)                      o: ring_message_seconds, which nothing hides

The members may form a grid of R rows and C columns (``attention.grid``), D = R C. A ring is the case C = 1. While keys
pass a column, C blocks are computed. While queries pass a row and their results go home, two blocks are computed::

    y = row_bytes_per_token T / (D bandwidth) + 2 latency
    exposed = (R - 1) (max(0, x - C c) + o) + (C - 1) (max(0, y - 2 c) + 2 o)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.common.errors import ConfigError, problem
from bytescale.cost.flops import BACKWARD_ATTENTION_RATIO

COLUMNS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of columns that are tried, besides one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """One rank of reference speed, all its layers, forward and backward together. Times in seconds.

    Raises ``ConfigError`` for negative numbers, for bandwidths that are not above 0, and if computing costs no time.
    """

    attention_seconds_per_pair: float
    """a: seconds per s^2. The factor one half of the causal mask is included."""
    token_seconds: float
    """b: seconds per token of everything except attention."""
    micro_batch_seconds: float = 0.0
    """g: fixed seconds per micro-batch (kernel launches)."""
    ring_bytes_per_token: float = 0.0
    """Bytes that pass a rank's link per token of the shared sequences: K/V forward, K/V and dK/dV backward."""
    row_bytes_per_token: float | None = None
    """Bytes that pass a rank's link per token of a slice in one step of a grid's row: queries, and their results home,
    forward and backward. None: not known, and all groups are rings."""
    ring_step_seconds: float = 0.0
    """Latency of one ring step inside a node, all layers, forward and backward."""
    inter_node_ring_step_seconds: float | None = None
    """The same for a ring that leaves a node. None: as inside."""
    ring_message_seconds: float = 0.0
    """Part of a ring step that no compute hides, all layers, forward and backward."""
    intra_node_bytes_per_second: float = math.inf
    """Bandwidth of a rank's link to a neighbour in its node, one direction."""
    inter_node_bytes_per_second: float = math.inf
    """Bandwidth of a rank's link to a neighbour in another node, one direction."""
    ranks_per_node: int = 8
    """Consecutive ranks that share a node."""
    windows: tuple[tuple[int, float], ...] = ()
    """Sliding windows in keys, each with its share of a: of all layers' attention, as it is for short sequences."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            if spec.name == "windows":
                continue
            value = getattr(self, spec.name)
            if value is None:
                continue
            above_zero = spec.name.endswith("bytes_per_second") or spec.name == "ranks_per_node"
            if math.isnan(value) or value < 0 or (above_zero and value == 0):
                rule = "above 0" if above_zero else "of at least 0"
                raise ConfigError(problem(f"cost model: {spec.name} is {value}", fix=f"use a number {rule}"))
        if self.attention_seconds_per_pair == self.token_seconds == 0:
            raise ConfigError(
                problem(
                    "cost model: attention_seconds_per_pair and token_seconds are both 0",
                    so="computing would cost no time, and no plan would be better than another",
                    fix="measure a profile, or use a number above 0",
                )
            )

    def work_seconds(self, lengths: ArrayLike) -> FloatArray:
        """``[S]`` seconds of compute that each sequence costs one rank that runs it alone: a s^2 + b s, without g."""
        lengths = np.asarray(lengths, dtype=np.float64)
        if self.windows:
            return self.attention_seconds_per_pair * self.squares_of(lengths) + self.token_seconds * lengths
        return lengths * (self.attention_seconds_per_pair * lengths + self.token_seconds)

    def squares_of(self, lengths: ArrayLike) -> FloatArray:
        """Twice the pairs of query and key that attention computes, over its layers: s^2, and less with windows.

        A query sees at most w keys of a window, so a layer with one has 2 w s - w^2 in the place of s^2 where s > w.
        """
        return windowed_squares(lengths, self.windows)

    def compute_seconds(self, tokens: ArrayLike, squares: ArrayLike, degree: ArrayLike = 1) -> FloatArray:
        """Compute of each of ``degree`` members, without g and without communication: (a Q + b T) / D. Broadcasts."""
        tokens, squares = np.asarray(tokens, dtype=np.float64), np.asarray(squares, dtype=np.float64)
        return (self.attention_seconds_per_pair * squares + self.token_seconds * tokens) / np.asarray(degree)

    def ring_seconds(self, tokens: ArrayLike, degree: ArrayLike, inter_node: ArrayLike = False) -> FloatArray:
        """Time that a member's link is busy: D - 1 transfers of T / D tokens. 0 for D = 1. Broadcasts."""
        degree = np.asarray(degree, dtype=np.float64)
        return (degree - 1) * self._transfer_seconds(np.asarray(tokens, dtype=np.float64), degree, inter_node)

    def exposed_seconds(
        self,
        tokens: ArrayLike,
        squares: ArrayLike,
        degree: ArrayLike,
        inter_node: ArrayLike = False,
        columns: ArrayLike = 1,
    ) -> FloatArray:
        """The part of a group's transfers that attention does not hide (the formulas above). Broadcasts.

        ``columns`` divides ``degree``; 1 is a ring. Grids without ``row_bytes_per_token`` raise ``ConfigError``.
        """
        if self.row_bytes_per_token is None and (np.asarray(columns) > 1).any():
            raise ConfigError(
                problem(
                    "the cost model does not know the bytes that a grid's rows exchange",
                    so="the time of a plan with grids cannot be told",
                    fix="use a profile, or plan with planner.grids = false",
                )
            )
        return self._exposed(_Transfers.of(self, tokens, squares, degree, inter_node), np.asarray(columns))

    def best_shape(
        self, tokens: ArrayLike, squares: ArrayLike, degree: ArrayLike, inter_node: ArrayLike = False
    ) -> tuple[FloatArray, IntArray]:
        """The least exposed seconds of any shape, and the fewest columns that give them. Broadcasts."""
        transfers = _Transfers.of(self, tokens, squares, degree, inter_node)
        best = self._exposed(transfers, np.asarray(1))
        columns = np.ones(best.shape, dtype=np.int64)
        degree = np.asarray(degree)
        widest = int(degree.max(initial=1)) // 2
        for tried in COLUMNS:
            if self.row_bytes_per_token is None or tried > widest:
                break
            fits = (degree % tried == 0) & (degree >= 2 * tried)
            seconds = self._exposed(transfers, np.asarray(tried))
            better = fits & (seconds < best)
            best, columns = np.where(better, seconds, best), np.where(better, tried, columns)
        return best, columns

    def _exposed(self, transfers: _Transfers, columns: IntArray) -> FloatArray:
        degree, block, message = transfers.degree, transfers.block, self.ring_message_seconds
        around = (degree / columns - 1) * (np.maximum(transfers.keys - columns * block, 0.0) + message)
        if (columns == 1).all():
            return around
        # Members of a row have consecutive ranks, and wide groups begin at a node.
        far = transfers.inter_node & (self.ranks_per_node % columns != 0)
        row = np.where(far, transfers.row_far, transfers.row_near)
        return around + (columns - 1) * (np.maximum(row - 2 * block, 0.0) + 2 * message)

    def group_seconds(
        self, tokens: ArrayLike, squares: ArrayLike, degree: ArrayLike, inter_node: ArrayLike = False
    ) -> FloatArray:
        """Time that each member of a slice group takes, g included. All arguments broadcast.

        Args:
            tokens: T, sum of s over the group's sequences.
            squares: Q, sum of ``squares_of`` the sequences.
            degree: D, members, at least 1.
            inter_node: whether the ring leaves a node; its slowest link then sets the pace of every step.
        """
        return (
            self.compute_seconds(tokens, squares, degree)
            + self.exposed_seconds(tokens, squares, degree, inter_node)
            + self.micro_batch_seconds
        )

    def latency_seconds(self, inter_node: bool) -> float:
        """Latency of one ring step, all layers, forward and backward."""
        across = self.inter_node_ring_step_seconds
        return across if inter_node and across is not None else self.ring_step_seconds

    def leaves_node(self, first_rank: ArrayLike, degree: ArrayLike) -> NDArray[np.bool_]:
        """Whether a group of consecutive ranks from ``first_rank`` spans two nodes or more. Broadcasts."""
        first = np.asarray(first_rank)
        last = first + np.asarray(degree) - 1
        return np.asarray(first // self.ranks_per_node != last // self.ranks_per_node)

    def _transfer_seconds(self, tokens: FloatArray, degree: FloatArray, inter_node: ArrayLike) -> FloatArray:
        far = np.asarray(inter_node, dtype=bool)
        seconds_per_byte = np.where(far, 1.0 / self.inter_node_bytes_per_second, 1.0 / self.intra_node_bytes_per_second)
        latency = np.where(far, self.latency_seconds(True), self.latency_seconds(False))
        return self.ring_bytes_per_token * seconds_per_byte * tokens / degree + latency

    def forward_only(self, bytes_per_element: int) -> CostModel:
        """The costs of the same model without backward.

        A third of the matrix products are forward, and ``1 / (1 + BACKWARD_ATTENTION_RATIO)`` of attention. A ring
        carries K and V of ``bytes_per_element`` once, instead of twice and their gradients in fp32 or wider.
        """
        leaving = self.inter_node_ring_step_seconds
        traffic = bytes_per_element / (2 * bytes_per_element + max(4, bytes_per_element))
        return replace(
            self,
            attention_seconds_per_pair=self.attention_seconds_per_pair / (1 + BACKWARD_ATTENTION_RATIO),
            token_seconds=self.token_seconds / 3,
            micro_batch_seconds=self.micro_batch_seconds / 2,
            ring_bytes_per_token=self.ring_bytes_per_token * traffic,
            row_bytes_per_token=None,
            ring_step_seconds=self.ring_step_seconds / 2,
            inter_node_ring_step_seconds=None if leaving is None else leaving / 2,
            ring_message_seconds=self.ring_message_seconds / 2,
        )

    @staticmethod
    def from_work(*, linear_per_square: float = 24576) -> CostModel:
        """Abstract work s^2 + ``linear_per_square`` s with ideal links, for comparing planners."""
        return CostModel(attention_seconds_per_pair=1.0, token_seconds=linear_per_square, row_bytes_per_token=0.0)


def windowed_squares(lengths: ArrayLike, windows: Sequence[tuple[int, float]]) -> FloatArray:
    """``CostModel.squares_of`` for ``windows`` alone."""
    lengths = np.asarray(lengths, dtype=np.float64)
    squares = (1.0 - sum(share for _, share in windows)) * lengths * lengths if windows else lengths**2
    for window, share in windows:
        reached = np.minimum(lengths, window)
        squares = squares + share * reached * (2 * lengths - reached)
    return squares


@dataclass(frozen=True, slots=True, eq=False)
class _Transfers:
    """The times of which the exposed time of every shape consists, in seconds. All arrays broadcast."""

    degree: FloatArray
    block: FloatArray  # c
    keys: FloatArray  # x
    row_near: FloatArray  # y, where a row lies in a node
    row_far: FloatArray  # y, where it does not
    inter_node: NDArray[np.bool_]  # whether the group leaves a node

    @staticmethod
    def of(
        cost: CostModel, tokens: ArrayLike, squares: ArrayLike, degree: ArrayLike, inter_node: ArrayLike
    ) -> _Transfers:
        tokens, squares = np.asarray(tokens, dtype=np.float64), np.asarray(squares, dtype=np.float64)
        degree = np.asarray(degree, dtype=np.float64)
        row_bytes = (cost.row_bytes_per_token or 0.0) * tokens / degree
        return _Transfers(
            degree=degree,
            block=cost.attention_seconds_per_pair * squares / (degree * degree),
            keys=cost._transfer_seconds(tokens, degree, inter_node),
            row_near=row_bytes / cost.intra_node_bytes_per_second + 2 * cost.latency_seconds(False),
            row_far=row_bytes / cost.inter_node_bytes_per_second + 2 * cost.latency_seconds(True),
            inter_node=np.asarray(inter_node, dtype=bool),
        )
