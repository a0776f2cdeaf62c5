"""The planner's cost model: a few numbers that give the time of one rank for its part of a sequence or a group.

It sums all layers, forward and backward, into one number per term. ``cost.stage`` keeps them separate.

    work of a sequence on one rank            a q(s) + b s,  q(s) = s^2 without windows (``squares_of``)
    member of a group of D                    (a S + b T) / D  +  exposed ring time  +  g
    with T = sum of s, S = sum of q(s) over the group's sequences

The members form a grid of P rows and Q columns, D = P Q (``attention.rings.grid``). A ring is the case Q = 1. Only the
time by which a message is longer than the attention beside it is exposed (``cost.visible``), in forward and backward
separately. Each pass has a share of every sum below::

    x = ring bytes   T / (D bandwidth) + latency     a message around the column
    y = queries'     T / (D bandwidth) + latency     one along the row, and z, one of results home
    c = a S / D^2                                    a block
    exposed = sum over passes of visible(P, Q; c, x, y, z)  +  messages o     o: ring_message_seconds, never hidden
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.common.errors import ConfigError
from bytescale.common.limits import check_limits, limits
from bytescale.cost.visible import num_messages, state_rounds, visible_seconds

COLUMNS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of columns that are tried, besides one."""

BACKWARD_ATTENTION_RATIO = 2.5  # five matrix products in backward, two in forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The forward or the backward: its shares of a cost model's sums. The shares of all passes add up to 1."""

    attention: float = 1.0
    """Of ``attention_seconds_per_pair``."""
    keys: float = 1.0
    """Of ``ring_bytes_per_token``."""
    queries: float = 0.5
    """Of ``row_bytes_per_token``: what goes along the row to other columns."""
    results: float = 0.5
    """Of ``row_bytes_per_token``: what comes home."""
    steps: float = 1.0
    """Of the latencies."""


class Shape(NamedTuple):
    """The shapes of some groups, and what they cost. All arrays have one shape."""

    seconds: FloatArray  # exposed
    columns: IntArray  # of the grid
    down: NDArray[np.bool_]  # whether consecutive ranks stand below each other in a column, not side by side in a row


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """One rank of reference speed, all its layers, forward and backward together. Times in seconds.

    Raises ``ConfigError`` for negative numbers, for bandwidths that are not above 0, and if computing costs no time.
    """

    attention_seconds_per_pair: float = field(metadata=limits(least=0))
    """a: seconds per s^2. The factor one half of the causal mask is included."""
    token_seconds: float = field(metadata=limits(least=0))
    """b: seconds per token of everything except attention."""
    forward_share: float = field(default=1 / 3, metadata=limits(least=0))
    """Of b, what forward takes."""
    micro_batch_seconds: float = field(default=0.0, metadata=limits(least=0))
    """g: fixed seconds per micro-batch (kernel launches)."""
    attention_block_seconds: float = field(default=0.0, metadata=limits(least=0))
    """e: what each block of a shared sequence's attention takes besides, however short it is. Of D blocks of each, one
    is part of b, and D - 1 count. Only the makespan of a plan (``planner.evaluate``) has them."""
    ring_bytes_per_token: float = field(default=0.0, metadata=limits(least=0))
    """Bytes that pass a rank's link per token of the shared sequences: K/V forward, K/V and dK/dV backward."""
    row_bytes_per_token: float | None = field(default=None, metadata=limits(least=0))
    """Bytes that pass a rank's link per token of a slice in one step of a grid's row: queries, and their results home,
    forward and backward. None: not known, and all groups are rings."""
    ring_step_seconds: float = field(default=0.0, metadata=limits(least=0))
    """Latency of one ring step inside a node, all layers, forward and backward."""
    inter_node_ring_step_seconds: float | None = field(default=None, metadata=limits(least=0))
    """The same for a ring that leaves a node. None: as inside."""
    ring_message_seconds: float = field(default=0.0, metadata=limits(least=0))
    """Part of a ring step that no compute hides, all layers, forward and backward."""
    intra_node_bytes_per_second: float = field(default=math.inf, metadata=limits(above=0))
    """Bandwidth of a rank's link to a neighbour in its node, one direction."""
    inter_node_bytes_per_second: float = field(default=math.inf, metadata=limits(above=0))
    """Bandwidth of a rank's link to a neighbour in another node, one direction."""
    ranks_per_node: int = field(default=8, metadata=limits(above=0))
    """Consecutive ranks that share a node."""
    passes: tuple[Pass, ...] = (Pass(),)
    """Forward and backward. One pass: how the sums are shared out is not known, and they count as a whole."""
    gather_seconds: float = field(default=0.0, metadata=limits(least=0))
    """Least time of a round of a lockstep domain, forward and backward: parameters are gathered in both, and gradients
    are reduced in one (``cost.gradient_sync.round_seconds``). They travel beside compute."""
    ring_share: float = field(default=1.0, metadata=limits(least=0))
    """Share of the layers that have attention, for which a group sends keys around a ring."""
    recurrent_share: float = field(default=0.0, metadata=limits(least=0))
    """Share of the layers that are recurrent. A group exchanges their states in ``ceil(log2(2D))`` rounds of one
    message's latency, before and after which they wait."""
    state_bytes: float = field(default=0.0, metadata=limits(least=0))
    """Bytes that pass a rank's link in such a round, all layers, forward and backward, however long the sequences."""
    windows: tuple[tuple[int, float], ...] = ()
    """Sliding windows in keys, each with its share of a: of all layers' attention, as it is for short sequences."""
    tree_squares: tuple[tuple[int, float], ...] = ()
    """Tokens, rising, of sequences that are trees of documents (``plan.trees``), and ``squares_of`` them: the mean of
    all sequences of so many tokens. Planners know sequences by their lengths."""

    def __post_init__(self) -> None:
        check_limits(self, "cost model: ")
        if self.attention_seconds_per_pair == self.token_seconds == 0:
            raise ConfigError(
                "cost model: attention_seconds_per_pair and token_seconds are both 0",
                so="computing would cost no time, and no plan would be better than another",
                fix="measure a profile, or use a number above 0",
            )

    def work_seconds(self, lengths: ArrayLike) -> FloatArray:
        """``[S]`` seconds of compute that each sequence costs one rank that runs it alone: a s^2 + b s, without g."""
        lengths = np.asarray(lengths, dtype=np.float64)
        if self.windows or self.tree_squares:
            return self.attention_seconds_per_pair * self.squares_of(lengths) + self.token_seconds * lengths
        return lengths * (self.attention_seconds_per_pair * lengths + self.token_seconds)

    def squares_of(self, lengths: ArrayLike) -> FloatArray:
        """Twice the pairs of query and key that attention computes, over its layers: s^2, and less with windows.

        A query sees at most w keys of a window, so a layer with one has 2 w s - w^2 in the place of s^2 where s > w.
        """
        squares = windowed_squares(lengths, self.windows)
        if not self.tree_squares:
            return squares
        known, of_trees = self._known_trees
        places = np.minimum(np.searchsorted(known, lengths), len(known) - 1)
        return np.where(known[places] == lengths, of_trees[places], squares)

    @cached_property
    def _known_trees(self) -> list[NDArray[Any]]:
        return [np.array(values) for values in zip(*self.tree_squares, strict=True)]

    def compute_seconds(self, tokens: ArrayLike, squares: ArrayLike, degree: ArrayLike = 1) -> FloatArray:
        """Compute of each of ``degree`` members, without g and without communication: (a S + b T) / D. Broadcasts."""
        tokens, squares = np.asarray(tokens, dtype=np.float64), np.asarray(squares, dtype=np.float64)
        return (self.attention_seconds_per_pair * squares + self.token_seconds * tokens) / np.asarray(degree)

    def exposed_seconds(
        self,
        tokens: ArrayLike,
        squares: ArrayLike,
        degree: ArrayLike,
        inter_node: ArrayLike = False,
        columns: ArrayLike = 1,
        rows_inter_node: ArrayLike = False,
    ) -> FloatArray:
        """The part of a group's messages that attention does not hide. Broadcasts.

        Args:
            tokens: T, sum of s over the group's sequences.
            squares: S, sum of ``squares_of`` the sequences.
            degree: D, members, at least 1.
            inter_node: whether a column leaves a node (of a ring: the group); the slowest link sets the pace.
            columns: of the grid, a divisor of ``degree``; 1 is a ring.
            rows_inter_node: whether a row leaves a node.

        Raises:
            ConfigError: there is a grid, and ``row_bytes_per_token`` is not known.
        """
        if self.row_bytes_per_token is None and (np.asarray(columns) > 1).any():
            raise ConfigError(
                "the cost model does not know the bytes that a grid's rows exchange",
                so="the time of a plan with grids cannot be told",
                fix="use a profile",
            )
        load = _Load.of(self, tokens, squares, degree)
        far, rows_far = np.asarray(inter_node), np.asarray(rows_inter_node)
        return np.asarray(self._exposed(load, np.asarray(columns), far, rows_far))

    def best_shape(
        self,
        tokens: ArrayLike,
        squares: ArrayLike,
        degree: ArrayLike,
        inter_node: ArrayLike = False,
        aligned: ArrayLike | None = None,
    ) -> Shape:
        """The shape with the least exposed seconds, and of equal ones that with the fewest columns. Broadcasts.

        ``aligned``: runs of so many members lie in a node (``plan.nodes.alignment``); None: as many as a node has.
        """
        members = np.asarray(degree)
        aligned = self.ranks_per_node if aligned is None else aligned
        best = self.shape_seconds(tokens, squares, members, 1, inter_node, aligned)
        widest = int(members.max(initial=1)) // 2
        for tried in self.shapes[1:]:
            if tried > widest:
                break
            fits = (members % tried == 0) & (members >= 2 * tried)
            if not fits.any():
                continue
            shape = self.shape_seconds(tokens, squares, np.where(fits, members, tried), tried, inter_node, aligned)
            better = fits & (shape.seconds < best.seconds)
            best = Shape(*(np.where(better, new, old) for new, old in zip(shape, best, strict=True)))
        return best

    @property
    def shapes(self) -> tuple[int, ...]:
        """Numbers of columns that groups may have, rising."""
        return (1,) if self.row_bytes_per_token is None else (1, *COLUMNS)

    def shape_seconds(
        self,
        tokens: ArrayLike,
        squares: ArrayLike,
        degree: ArrayLike,
        columns: ArrayLike,
        inter_node: ArrayLike,
        aligned: ArrayLike,
    ) -> Shape:
        """Groups of so many ``columns``, which divide ``degree``, in the better one of two orders. Broadcasts.

        Neighbours stand side by side in a row, or below each other in a column: one of them may lie inside a node.
        """
        load, far = _Load.of(self, tokens, squares, degree), np.asarray(inter_node, dtype=bool)
        columns, members, aligned = np.asarray(columns), np.asarray(degree), np.asarray(aligned)
        seconds = self._exposed(load, columns, far, far & (aligned % columns != 0))
        down = np.zeros(seconds.shape, dtype=bool)
        near = far & (columns > 1) & (aligned % (members // columns) == 0)
        if near.any():
            other = self._exposed(load, columns, far & ~near, far)
            down = near & (other < seconds)
            seconds = np.where(down, other, seconds)
        return Shape(seconds, np.broadcast_to(columns, seconds.shape), down)

    def _exposed(
        self,
        load: _Load,
        columns: Any,
        columns_far: Any,
        rows_far: Any,
        maximum: Callable[[Any, Any], Any] = np.maximum,
    ) -> Any:
        rows = load.degree / columns
        keys_rate, latency = self._link(columns_far)
        rows_rate, row_latency = self._link(rows_far)
        rings = self.ring_share
        keys_latency, rows_latency = rings * latency, rings * row_latency
        keys = self.ring_bytes_per_token * load.slice / keys_rate
        row = (self.row_bytes_per_token or 0.0) * load.slice / rows_rate
        exposed = num_messages(rows, columns) * rings * self.ring_message_seconds
        if self.recurrent_share:
            of_round = self.state_bytes / keys_rate + self.recurrent_share * latency
            exposed = exposed + state_rounds(load.degree) * of_round
        for one in self.passes:
            exposed = exposed + visible_seconds(
                rows,
                columns,
                one.attention * load.block,
                one.keys * keys + one.steps * keys_latency,
                one.queries * row + one.steps * rows_latency,
                one.results * row + one.steps * rows_latency,
                maximum,
            )
        return exposed

    def _link(self, far: Any) -> tuple[Any, Any]:
        """Bytes per second, and latency, of links inside a node or, where ``far`` is true, across."""
        near = self.intra_node_bytes_per_second, self.latency_seconds(False)
        across = self.inter_node_bytes_per_second, self.latency_seconds(True)
        if isinstance(far, np.ndarray) and far.ndim:
            return np.where(far, across[0], near[0]), np.where(far, across[1], near[1])
        return across if far else near

    def exposed_of_one(self, length: int, degree: int, columns: int, *, far: bool | None = None) -> float:
        """The same as ``shape_seconds``, for one group of one sequence, in plain floats: much faster for one value.

        ``far``: whether the group leaves a node; None: if it has more ranks than a node.
        """
        pairs = float(self.squares_of(length)) if self.windows or self.tree_squares else float(length) * length
        load = _Load(degree, length / degree, self.attention_seconds_per_pair * pairs / (degree * degree))
        node = self.ranks_per_node
        far = degree > node if far is None else far
        seconds = self._exposed(load, columns, far, far and node % columns != 0, max)
        if far and columns > 1 and node % (degree // columns) == 0:
            seconds = min(seconds, self._exposed(load, columns, False, True, max))
        return float(seconds)

    def group_seconds(
        self, tokens: ArrayLike, squares: ArrayLike, degree: ArrayLike, inter_node: ArrayLike = False
    ) -> FloatArray:
        """Seconds that each member of a ring takes, g included. Arguments as in ``exposed_seconds``."""
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

    def forward_only(self, bytes_per_element: int) -> CostModel:
        """The costs of the same model without backward: those of the first pass.

        Where passes are not known, ``1 / (1 + BACKWARD_ATTENTION_RATIO)`` of attention is forward. Messages have no
        second copies of ``bytes_per_element`` then, and no gradients in fp32 or wider.
        """
        leaving, rows = self.inter_node_ring_step_seconds, self.row_bytes_per_token
        traffic = bytes_per_element / (2 * bytes_per_element + max(4, bytes_per_element))
        first = self.passes[0]
        if len(self.passes) == 1:
            of_rows = bytes_per_element / (4 * bytes_per_element + max(4, bytes_per_element))
            of_attention = 1 / (1 + BACKWARD_ATTENTION_RATIO)
            first = Pass(attention=of_attention, keys=traffic, queries=of_rows, results=of_rows, steps=0.5)
        return replace(
            self,
            attention_seconds_per_pair=self.attention_seconds_per_pair * first.attention,
            token_seconds=self.token_seconds * self.forward_share,
            forward_share=1.0,
            micro_batch_seconds=self.micro_batch_seconds * first.steps,
            gather_seconds=self.gather_seconds * traffic,
            attention_block_seconds=self.attention_block_seconds * first.attention,
            ring_bytes_per_token=self.ring_bytes_per_token * first.keys,
            row_bytes_per_token=None if rows is None else rows * (first.queries + first.results),
            passes=(Pass(),),
            ring_step_seconds=self.ring_step_seconds * first.steps,
            inter_node_ring_step_seconds=None if leaving is None else leaving * first.steps,
            ring_message_seconds=self.ring_message_seconds * first.steps,
            state_bytes=self.state_bytes * first.steps,
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
class _Load:
    """What the members of groups compute and send, whatever their shape: numbers, or arrays that broadcast."""

    degree: Any
    slice: Any  # tokens of a member
    block: Any  # seconds of attention of a block, all passes together

    @staticmethod
    def of(cost: CostModel, tokens: ArrayLike, squares: ArrayLike, degree: ArrayLike) -> _Load:
        degree = np.asarray(degree, dtype=np.float64)
        block = cost.attention_seconds_per_pair * np.asarray(squares, dtype=np.float64) / (degree * degree)
        return _Load(degree, np.asarray(tokens, dtype=np.float64) / degree, block)
