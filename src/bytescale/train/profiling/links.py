"""Measures the links between ranks, as rings and collectives use them.

Messages follow each other in windows, until two windows take equally long: what buffers and bursts swallow has passed
then. A ring of the ranks of each node gives the links inside, and a ring of each node's first rank those across. As
many rings across as nodes have ranks, all at the same time, show what a node's link carries.

Every rank calls every function here, and all get the same numbers: the slowest rank's, because the others wait for it.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from bytescale.attention import PackedAttention
from bytescale.attention.kernels import OfQueries
from bytescale.cost.links import Links
from bytescale.hf.model.probe import LayerAttention
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import RankGroup
from bytescale.train.profiling.measurer import Measurer

MESSAGE_SECONDS = 0.05
MESSAGE_LATENCIES = 10
"""Messages double in size until one takes ``MESSAGE_SECONDS`` and so many latencies, or until ``LARGEST_BYTES``."""
LARGEST_BYTES = 2**28
SMALL_BYTES = 2**10
SMALL_ROUNDS = 30
WINDOW_SECONDS = 0.5
MOST_WINDOWS = 8
STEADY = 0.05
"""Two windows whose rates differ by less than this share show the sustained rate."""
RING_TOKENS = 512
"""Most tokens of each member's slice in the ring attention that is measured."""
FEWEST_RING_TOKENS = 16
RING_ROUNDS = 20

Send = Callable[[int], object]
"""Does one round of messages of so many bytes; does nothing on a rank that has no part in it."""


def measure_links(hdp: RankGroup, measurer: Measurer, nodes: Sequence[int] | None = None) -> Links:
    """Measure all links between the ranks of ``hdp``, at least two. ``nodes``: the node of each; None: they share one.

    Where no two ranks share a node, the links inside are taken to be as those across, and the other way round.
    """
    where = [0] * hdp.size if nodes is None else list(nodes)
    members = [[rank for rank in range(hdp.size) if where[rank] == node] for node in dict.fromkeys(where)]
    fewest = min(len(ranks) for ranks in members)
    inside = across = shared = None
    if max(len(ranks) for ranks in members) > 1:
        inside = ring_rate(hdp, [ranks for ranks in members if len(ranks) > 1])
    if len(members) > 1:
        across = ring_rate(hdp, [[ranks[0] for ranks in members]])
        if fewest > 1:
            rate, _ = ring_rate(hdp, [[ranks[place] for ranks in members] for place in range(fewest)])
            shared = fewest * rate
    near, far = inside or across, across or inside
    assert near is not None, "two ranks either share a node or do not"
    assert far is not None, "two ranks either share a node or do not"
    reduce, gather, small = measure_collectives(hdp)
    links = Links(
        intra_node_bytes_per_second=near[0],
        inter_node_bytes_per_second=far[0],
        node_bytes_per_second=math.inf if shared is None else shared,
        latency_seconds=near[1],
        inter_node_latency_seconds=far[1],
        reduce_bytes_per_second=reduce,
        gather_bytes_per_second=gather,
        collective_seconds=small,
    )
    return _with_message_seconds(links, hdp, measurer, crosses=len(members) > 1)


def measure_collectives(hdp: RankGroup) -> tuple[float, float, float]:
    """Bytes per second of training's reduce-scatter and all-gather, and the seconds of a small reduce-scatter.

    The bytes are those that each rank has to send: (R - 1) / R of the whole.
    """

    def zeros(size: int) -> torch.Tensor:
        """fp32, of about ``size`` bytes: a multiple of the ranks."""
        return torch.zeros(max(1, size // 4 // hdp.size) * hdp.size, device=hdp.device)

    def reduce(size: int) -> None:
        hdp.start_reduce_scatter(zeros(size)).wait()

    def gather(size: int) -> None:
        hdp.start_all_gather(zeros(size)).wait()

    sent = (hdp.size - 1) / hdp.size
    small = _median_seconds(hdp, reduce, 4 * hdp.size)
    return sent * _sustained(hdp, reduce, small), sent * _sustained(hdp, gather, small), small


def ring_rate(hdp: RankGroup, rings: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Bytes per second and latency of each rank's link while all ``rings`` of ranks run at the same time."""
    mine = [ring for ring in rings if hdp.rank in ring]

    def send(size: int) -> None:
        if not mine:
            return
        ring = mine[0]
        place = ring.index(hdp.rank)
        following, previous = ring[(place + 1) % len(ring)], ring[place - 1]
        outgoing = torch.zeros(size, dtype=torch.uint8, device=hdp.device)
        incoming = torch.empty_like(outgoing)
        hdp.exchange.start(send=outgoing, to=following, receive=incoming, source=previous, tag=0).wait()

    latency = _median_seconds(hdp, send, SMALL_BYTES)
    return _sustained(hdp, send, latency), latency


def _median_seconds(hdp: RankGroup, send: Send, size: int) -> float:
    return slowest(hdp, statistics.median(_seconds(hdp, send, size, 1) for _ in range(SMALL_ROUNDS)))


def _sustained(hdp: RankGroup, send: Send, latency: float) -> float:
    """Bytes per second of rounds that follow each other without a pause. ``latency``: seconds of a small round."""
    size, least = 2**14, max(MESSAGE_SECONDS, MESSAGE_LATENCIES * latency)
    while (taken := slowest(hdp, _seconds(hdp, send, size, 1))) < least and size < LARGEST_BYTES:
        size *= 2
    count = max(2, math.ceil(WINDOW_SECONDS / taken))
    rate = 0.0
    for _ in range(MOST_WINDOWS):
        before, rate = rate, count * size / slowest(hdp, _seconds(hdp, send, size, count))
        if abs(rate - before) < STEADY * rate:
            break
    return rate


def _seconds(hdp: RankGroup, send: Send, size: int, count: int) -> float:
    hdp.share([0.0])  # all start together
    started = time.perf_counter()
    for _ in range(count):
        send(size)
    if hdp.device.type == "cuda":
        torch.cuda.synchronize(hdp.device)
    return time.perf_counter() - started


def slowest(hdp: RankGroup, seconds: float) -> float:
    """The seconds of the slowest rank, so that all ranks make the same decision."""
    return float(np.max(hdp.share([seconds])))


def _with_message_seconds(links: Links, hdp: RankGroup, measurer: Measurer, *, crosses: bool) -> Links:
    """``links`` with the seconds of a ring step that no compute hides, beyond the visible part of its transfer.

    It is the mean of forward and backward. Slices are so short that transfers take little of the ring's time.
    """
    layer, element = _widest(measurer), measurer.dtype.itemsize
    numbers = layer.num_kv_heads * (layer.head_dim + layer.value_dim)
    bytes_per_token = numbers * element, numbers * (element + max(4, element))
    rate, latency = links.ring_bytes_per_second(crosses), links.ring_latency_seconds(crosses)
    tokens = RING_TOKENS
    while tokens > FEWEST_RING_TOKENS and sum(bytes_per_token) * tokens / rate > 2 * latency:
        tokens //= 2
    ring_seconds, forward, backward = _ring_attention(hdp, measurer, tokens)
    transfers = [size * tokens / rate + latency for size in bytes_per_token]
    exposed = sum(max(0.0, x - c) for x, c in zip(transfers, (forward, backward), strict=True))
    beyond = ring_seconds / (hdp.size - 1) - exposed
    return replace(links, message_seconds=max(0.0, beyond / 2))


def _widest(measurer: Measurer) -> LayerAttention:
    return max(measurer.model.structure.layers, key=lambda layer: layer.num_heads * layer.head_dim)


def _ring_attention(hdp: RankGroup, measurer: Measurer, tokens: int) -> tuple[float, float, float]:
    """Seconds of a ring attention beyond its blocks, forward and backward together, and of one block in each."""
    layer = _widest(measurer)
    plan = Plan.build(
        lengths=[hdp.size * tokens],
        capacity_tokens=[tokens] * hdp.size,
        groups=[GroupSpec(sequences=[0], ranks=range(hdp.size))],
        schedule=[[[0]]] * hdp.size,
    )
    ring = PackedAttention(RankPlan.of(plan, hdp.rank).micro_batches[0], measurer.kernel, hdp.exchange)
    assert ring.grid is not None, "the only sequence is shared"
    parts = [ring.triangles, *itertools.chain.from_iterable(ring.grid.blocks.values())]
    q = measurer.random(tokens, layer.num_heads, layer.head_dim).requires_grad_()
    k, v = (
        measurer.random(tokens, layer.num_kv_heads, width).requires_grad_()
        for width in (layer.head_dim, layer.value_dim)
    )
    scale = layer.head_dim**-0.5
    with torch.no_grad():
        out, lse = measurer.kernel.forward(q, k, v, ring.triangles, scale)

    def forward() -> None:
        with torch.no_grad():
            for part in parts:
                measurer.kernel.forward(q, k, v, part, scale)

    def backward() -> None:
        with torch.no_grad():
            for part in parts:
                measurer.kernel.backward(OfQueries(out, q, out, lse), k, v, part, scale)

    beyond, blocks = [], []
    for _ in range(RING_ROUNDS):
        hdp.share([0.0])  # all start together
        seconds = measurer.watch.once(lambda: ring(q, k, v).backward(out))
        alone = measurer.watch.once(forward), measurer.watch.once(backward)
        beyond.append(seconds - sum(alone))
        blocks.append([part / len(parts) for part in alone])
    slowest = np.max(hdp.share(beyond[1:]), axis=0)
    middle = np.min(hdp.share(np.median(blocks, axis=0).tolist()), axis=0)
    quiet_round = float(np.quantile(slowest, 0.2))
    return quiet_round, float(middle[0]), float(middle[1])
