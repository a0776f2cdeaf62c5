"""The full cost model: the time of a micro-batch on one pipeline stage, term by term, forward and backward separately.

Per layer, for a member that holds the share ``w`` of the tokens of a group of D members, and computes the share ``u``
of its pairs (T = sum of s, S = sum of s^2; u = w except in grids of unequal members), beside local sequences (sum of
tokens ``t``, sum of squares ``q``), ``n = w T + t``, with (a, b, g) the attention curve. The grid has P rows and Q
columns. Each of K shared and k local sequences adds e to a block of attention, however short it is::

    rest         b_r n + g_r
    attention    a (u S + q) + b n + g + e (D K + k)
    block        c = a u S / D + e K                  one of the D blocks of a grid; a ring is a grid of one column
    keys         x = ring bytes * (largest w) T / bandwidth + latency           a message around the column
    row          y of queries there, z of results home, likewise
    ring         visible(P, Q; c, x, y, z)            what no block hides (``cost.visible``)
                 - min(a q, max(0, first message - c))                  local attention hides some of the first message
                 + (P - 1 + 2 (Q - 1)) message                          what no compute hides
    states       ceil(log2(2D)) (state bytes / bandwidth + rho latency)         of recurrent layers, hidden by nothing
    offload      max(0, r Act(n) / link - (rest + attention + ring))            exposed, for all layers but the last two

rho is the share of the layers that are recurrent; latencies and messages of rings count for the share of those with
attention, as all else is a mean over the stage's layers. Compute is divided by the rank's speed; the time of links is
not. A stage takes the sum over its layers, and the last stage also has the head. In the planner's summary
(``Profile.cost_model``), what a whole sequence adds is part of b.

Shape letters: M micro-batches (one per member for shared ones), 2 directions: forward, backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import FloatArray
from bytescale.cost.profile import Profile
from bytescale.cost.visible import num_messages, state_rounds, visible_seconds

RESIDENT_LAYERS = 2
"""The last layers of a stage are never offloaded: backward needs them at once (paper section 5.2)."""


def movable_layers(num_layers: int) -> int:
    """How many of the layers that a rank runs one after the other may be offloaded."""
    return max(0, num_layers - RESIDENT_LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """The load of each of M micro-batches on its rank. All arrays are ``[M]``. Squares are sums of squared lengths."""

    local_tokens: FloatArray
    local_squares: FloatArray
    shared_tokens: FloatArray  # of the whole group, 0 without one
    shared_squares: FloatArray  # of the whole group
    local_sequences: FloatArray
    shared_sequences: FloatArray  # of the whole group
    degree: FloatArray  # members, 1 without a shared group
    columns: FloatArray  # of the group's grid; 1: a ring
    share: FloatArray  # of the group's tokens that this member holds
    tile: FloatArray  # of the group's pairs of tokens that it computes; of a ring, as much as of the tokens
    largest_share: FloatArray  # of any member: it sets the pace of the ring
    inter_node: NDArray[np.bool_]  # whether a column of the grid leaves a node; of a ring: the group
    row_leaves_node: NDArray[np.bool_]  # whether a row does
    offload_ratio: FloatArray  # of this micro-batch's tokens
    speed: FloatArray  # of the rank

    @property
    def tokens(self) -> FloatArray:
        """Tokens that the rank holds."""
        return self.share * self.shared_tokens + self.local_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds that each micro-batch takes on one stage. Arrays ``[2, M]``: forward, backward."""

    compute: FloatArray
    exposed_ring: FloatArray
    exposed_offload: FloatArray

    @property
    def total(self) -> FloatArray:
        return self.compute + self.exposed_ring + self.exposed_offload


def stage_times(profile: Profile, loads: Loads, *, has_head: bool) -> StageTimes:
    """Times of a stage with the layers of ``profile``, by the formulas at the top of this file.

    What checkpointing computes again, it computes before a layer's backward, and sends again what it needs for that.
    """
    directions = (
        (profile.attention_forward, profile.sequence_forward_seconds, profile.rest_forward, profile.head_forward),
        (profile.attention_backward, profile.sequence_backward_seconds, profile.rest_backward, profile.head_backward),
    )
    ring_bytes = (profile.ring_forward_bytes_per_token, profile.ring_backward_bytes_per_token)
    offload_rate = (profile.links.device_to_host_bytes_per_second, profile.links.host_to_device_bytes_per_second)
    offloaded = loads.offload_ratio * profile.activation_bytes(loads.tokens)
    shared_squares = loads.tile * loads.shared_squares
    blocks = loads.degree * loads.shared_sequences + loads.local_sequences
    compute, ring, offload = np.empty((3, 2, len(loads.speed)))
    num_layers, (rate, latency) = profile.spec.num_layers, _link(profile, loads.inter_node)
    # The scan over the states of recurrent layers (``plan.states``), a mean over all layers.
    states = state_rounds(loads.degree) * (profile.state_bytes / rate + profile.spec.share_with("mixers") * latency)
    for row, (attention, sequence, rest, head) in enumerate(directions):
        attended = attention.quadratic * (shared_squares + loads.local_squares) + attention.linear * loads.tokens
        attended = attended + attention.constant + sequence * blocks
        layer_compute = (rest(loads.tokens) + attended) / loads.speed
        of_block = attention.quadratic * (shared_squares / loads.degree) + sequence * loads.shared_sequences
        block = of_block / loads.speed
        local = attention.quadratic * loads.local_squares / loads.speed
        layer_ring = _exposed_ring(profile, block, local, ring_bytes[row], profile.row_bytes_per_token[row], loads)
        layer_ring = layer_ring + states
        layer_offload = np.maximum(offloaded / offload_rate[row] - layer_compute - layer_ring, 0.0)
        compute[row] = num_layers * layer_compute
        if has_head:
            compute[row] += head(loads.tokens) / loads.speed
        ring[row] = num_layers * layer_ring
        offload[row] = movable_layers(num_layers) * layer_offload
        if row == 0:
            of_attention, of_rest = (count - 1 for count in profile.forwards)  # in backward
            again = (of_attention * attended + of_rest * rest(loads.tokens)) / loads.speed
    compute[1] += num_layers * again
    ring[1] += of_attention * ring[0]
    return StageTimes(compute=compute, exposed_ring=ring, exposed_offload=offload)


def _transfer_seconds(
    profile: Profile, bytes_per_token: float, loads: Loads, leaves_node: NDArray[np.bool_]
) -> FloatArray:
    rate, latency = _link(profile, leaves_node)
    rings = profile.spec.share_with("pair_numbers")
    return bytes_per_token * loads.largest_share * loads.shared_tokens / rate + rings * latency


def _link(profile: Profile, leaves_node: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
    """``[M]`` bytes a second and seconds of latency."""
    links = profile.links
    rate = np.where(leaves_node, links.ring_bytes_per_second(True), links.ring_bytes_per_second(False))
    return rate, np.where(leaves_node, links.ring_latency_seconds(True), links.ring_latency_seconds(False))


def _exposed_ring(
    profile: Profile,
    block: FloatArray,
    local: FloatArray,
    ring_bytes: float,
    row_bytes: tuple[float, float],
    loads: Loads,
) -> FloatArray:
    """``[M]`` seconds of ring and row messages that computation does not hide; ``local``: of whole sequences."""
    columns, rows = loads.columns, loads.degree / loads.columns
    keys = _transfer_seconds(profile, ring_bytes, loads, loads.inter_node)
    there, home = (_transfer_seconds(profile, size, loads, loads.row_leaves_node) for size in row_bytes)
    visible = visible_seconds(rows, columns, block, keys, there, home, np.maximum)
    first = np.where(columns > 1, there, keys)
    hidden_by_locals = np.minimum(np.maximum(first - block, 0.0), local)
    rings = profile.spec.share_with("pair_numbers")
    messages = num_messages(rows, columns) * rings * profile.links.message_seconds
    return np.where(loads.degree > 1, visible - hidden_by_locals + messages, 0.0)
