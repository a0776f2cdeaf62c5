"""Steps 1 and 2 of the planner of rounds: which long sequences share a round, and on how many ranks each.

A long sequence of s tokens and W seconds of work on D ranks can end a round that takes T seconds in time if
``W / D + exposed <= T``. Its ranks can be filled with short sequences up to T if ``(W - b s) / D + exposed + b C >= T``
(``planner`` has the picture). So every T gives each sequence a fewest and a most number of ranks; and a round without
waste is a run of sequences and a T at which the fewest sum to at most R, and the most to at least R.

Shape letters: n sequences of a run, longest first; J times that are tried; R ranks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.planner.adaptive.degrees import is_ideal

TIMES = 16
"""Times of a round that are tried, evenly spaced."""
DEGREES = 10
"""Degrees of which the exposed messages are known; others lie between two of them."""
ALIKE = 1.3
"""Sequences that are tried in a run at first, over those whose excess work is alike."""
SHRINK = 1.25
"""A run that wastes too much is tried again with so many times fewer sequences."""
WIDE = 8
"""Groups of more half nodes than this are wide."""
SPARE = 16
"""One rank in so many is spare where ranks differ."""
LONG = 0.5
"""Sequences of more work than this share of a rank that is full of short ones are long."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundBatch:
    """What all trials share. Ranks that differ count as ranks of mean speed: one of twice the speed is two of them."""

    lengths: IntArray  # [S] longest first
    cluster: Cluster
    cost: CostModel

    @cached_property
    def speed(self) -> float:
        """Mean speed of the ranks."""
        return float(self.cluster.speeds.mean())

    @cached_property
    def capacity(self) -> int:
        """C: tokens that a rank of mean speed holds if all ranks hold tokens in proportion to their speeds."""
        return max(1, int((self.cluster.capacity_tokens / self.cluster.speeds).min() * self.speed))

    @cached_property
    def work(self) -> FloatArray:
        """``[S]`` seconds of compute on one rank of mean speed."""
        return self.cost.work_seconds(self.lengths) / self.speed

    @cached_property
    def fewest(self) -> IntArray:
        """``[S]`` fewest ranks that hold each."""
        if self.cluster.is_uniform:
            return self.cluster.fewest_ranks(self.lengths)
        return np.minimum(-(-self.lengths // self.capacity), self.slots)

    @cached_property
    def num_long(self) -> int:
        """Sequences that do not fit into the smallest micro-batch, or fill too much of a rank's time."""
        fits = self.lengths <= self.cluster.capacity_tokens.min()
        rate = float(self.work[fits].sum() / self.lengths[fits].sum()) if fits.any() else 0.0
        slow = int((self.work > LONG * rate * self.capacity).sum()) if fits.any() else 0
        return max(int((~fits).sum()), slow)

    @cached_property
    def rate(self) -> float:
        """b: seconds per token of the short sequences; without any, of compute besides attention."""
        short = slice(self.num_long, None)
        if self.num_long == len(self.lengths):
            return self.cost.token_seconds / self.speed
        return float(self.work[short].sum() / self.lengths[short].sum())

    @cached_property
    def shortest(self) -> int:
        """Tokens of the shortest short sequence: a smaller room stays empty."""
        return int(self.lengths[-1]) if self.num_long < len(self.lengths) else self.capacity + 1

    @cached_property
    def node(self) -> int:
        """Ranks of a node; all ranks where nodes do not matter, or ranks differ and shares are rounded to them."""
        is_flat = is_ideal(self.cost) or not self.cluster.is_uniform
        return self.cluster.num_ranks if is_flat else min(self.cost.ranks_per_node, self.cluster.num_ranks)

    @cached_property
    def slots(self) -> int:
        """Ranks that the groups of a round may have: some fewer where ranks differ, as groups have whole ranks."""
        num_ranks = self.cluster.num_ranks
        return num_ranks if self.cluster.is_uniform else max(1, num_ranks - max(1, num_ranks // SPARE))

    @cached_property
    def degrees(self) -> IntArray:
        """Rising ranks that a group may have: any in a node, and then multiples of half a node. Wide groups have whole
        nodes or multiples of three halves: 608 ranks are a grid of 8 columns, 604 of 4, which wait for messages."""
        halves = np.arange(1, 2 * self.cluster.num_ranks // self.node + 1)
        halves = halves[(halves > 2) & ((halves <= WIDE) | (halves % 2 == 0) | (halves % 3 == 0))]
        wide = halves * self.node // 2
        return np.concatenate(
            (np.arange(1, self.node + 1), wide[wide < self.cluster.num_ranks], [self.cluster.num_ranks])
        )

    def exposed(self, lengths: IntArray, degrees: IntArray) -> FloatArray:
        """Seconds that sequences take on ``degrees`` ranks besides their share of the work. Broadcasts."""
        if is_ideal(self.cost):
            return np.zeros(np.broadcast_shapes(lengths.shape, degrees.shape))
        tokens, far = lengths.astype(np.float64), degrees > self.cost.ranks_per_node
        shape = self.cost.best_shape(tokens, self.cost.squares_of(tokens), degrees, far)
        return shape.seconds + self.cost.attention_block_seconds * (degrees - 1) / self.speed

    @cached_property
    def table(self) -> FloatArray:
        """``[DEGREES, L]`` exposed seconds of the long sequences on degrees from the fewest to all, geometric steps."""
        fewest = self.fewest[: self.num_long]
        steps = (self.cluster.num_ranks / fewest) ** (np.arange(DEGREES) / (DEGREES - 1))[:, None]
        return self.exposed(self.lengths[: self.num_long], self.in_nodes(np.ceil(fewest * steps - 1e-9)))

    def likely(self, first: int, degrees: IntArray) -> FloatArray:
        """``[J, n]`` about the exposed seconds of the sequences from ``first`` on, interpolated between steps."""
        if is_ideal(self.cost):
            return np.zeros((1, 1))
        fewest = self.fewest[first : first + degrees.shape[1]]
        width = np.log(self.cluster.num_ranks / fewest) + 1e-12
        at = np.clip(np.log(degrees / fewest) / width, 0, 1) * (DEGREES - 1)
        step = np.minimum(at.astype(np.int64), DEGREES - 2)
        part, column = at - step, first + np.arange(degrees.shape[1])
        return (1 - part) * self.table[step, column] + part * self.table[step + 1, column]

    def in_nodes(self, degrees: ArrayLike) -> IntArray:
        """The next degrees that groups may have."""
        return self.degrees[np.minimum(self.degrees.searchsorted(degrees), len(self.degrees) - 1)]


class Round(NamedTuple):
    """The long sequences of one round, on ranks as if all had the mean speed."""

    places: IntArray  # [n] in the batch
    degrees: IntArray  # [n] ranks of each
    firsts: IntArray  # [n] first rank of each; the others follow it


class Tried(NamedTuple):
    """A run that was tried, at the time that wastes least."""

    wasted: float  # seconds on all ranks together
    at_least: IntArray  # [n] ranks of each sequence
    at_most: FloatArray  # [n]
    is_long: bool  # whether ranks without a slice would wait


def cut(
    batch: RoundBatch, waste: float, claim: float, most: int, known: dict[tuple[int, int], Tried]
) -> list[Round] | None:
    """Cut the long sequences into runs, each as many as waste at most this share of the batch's time in their round.

    Where any number wastes more, those that waste least are taken. None if there would be more than ``most`` runs.
    ``known`` keeps what was tried from call to call with one ``claim``: how many times its share of the short
    sequences, by its work, a run may count on.
    """
    runs, first, allowed = list[Round](), 0, waste * float(batch.work.sum())
    while first < batch.num_long:
        run, count, tries = None, _most(batch, first), list[Tried]()
        while run is None:
            if (first, count) not in known:
                known[first, count] = _tried(batch, first, count, claim)
            tries.append(known[first, count])
            if tries[-1].wasted <= allowed or count == 1:
                placed = (place(batch, first, tried) for tried in sorted(tries, key=lambda tried: tried.wasted))
                run, tries = next((run for run in placed if run is not None), None), []
            count = max(1, min(count - 1, int(count / SHRINK)))
        runs.append(run)
        first += len(run.places)
        if len(runs) > most:
            return None
    return runs


def _most(batch: RoundBatch, first: int) -> int:
    """Sequences of a run that are tried at first: more than have ranks in proportion to their excess work."""
    num_ranks, rest = batch.slots, slice(first, batch.num_long)
    held = np.cumsum(batch.fewest[rest])
    excess = np.maximum(batch.work[rest] - batch.rate * batch.lengths[rest], 1e-300)
    alike = excess * num_ranks / np.cumsum(excess) >= batch.fewest[rest]
    count = len(alike) if alike.all() else int(alike.argmin())
    return max(1, min(int(held.searchsorted(num_ranks, side="right")), int(ALIKE * count) + 1, len(held)))


def _tried(batch: RoundBatch, first: int, count: int, claim: float) -> Tried:
    lengths, work, fewest = (part[first : first + count] for part in (batch.lengths, batch.work, batch.fewest))
    num_ranks, full, short = batch.slots, batch.rate * batch.capacity, float(batch.work[batch.num_long :].sum())
    excess = work - batch.rate * lengths
    share = max(float(excess.sum()), 1e-12 * float(work.sum())) / num_ranks
    least = max(float(work.sum()), float(work[0])) / num_ranks
    times = np.linspace(least, max(1.2 * share + full, 1.01 * least), TIMES)[:, None]  # [J, 1]
    exposed: FloatArray = batch.table[0, first : first + count]
    needed = np.ceil(work / np.maximum(times - exposed, 0.3 * times) * (1 - 1e-12))
    at_least = batch.in_nodes(np.clip(needed, fewest, num_ranks))  # [J, n]
    exposed = batch.likely(first, at_least)
    # On more ranks than these, even full ranks would end early. Any number does where ranks full of short ones do.
    over = times - full - exposed
    at_most = np.where(over > 1e-9 * times, np.floor(excess / np.maximum(over, 1e-9 * times) + 1e-9), num_ranks)
    at_most = np.minimum(at_most, lengths)  # every member has a token
    at_most = batch.degrees[np.maximum(batch.degrees.searchsorted(at_most, side="right") - 1, 0)]
    at_most = np.clip(at_most, at_least, num_ranks)
    room = batch.capacity - np.ceil(lengths / at_least)
    ends = work / at_least + exposed
    reach = ends + batch.rate * np.where(room >= batch.shortest, room, 0)
    wasted = (at_least * (np.maximum(times - reach, 0) + exposed)).sum(axis=1)
    wasted += np.maximum(num_ranks - at_most.sum(axis=1), 0) * np.maximum(times[:, 0] - full, 0)
    wasted += num_ranks * np.maximum(ends - times, 0).max(axis=1)
    filled = num_ranks * times[:, 0] - (at_least * ends).sum(axis=1)  # by short sequences, as far as there are any
    share = float(work.sum()) / float(batch.work[: batch.num_long].sum())
    wasted += np.maximum(filled - min(1.0, claim * share) * short, 0)
    wasted[at_least.sum(axis=1) > num_ranks] = np.inf
    chosen = int(wasted.argmin())
    is_long = bool(times[chosen, 0] > (1 + 1e-9) * full)
    return Tried(float(wasted[chosen]), at_least[chosen], at_most[chosen], is_long)


def place(batch: RoundBatch, first: int, tried: Tried) -> Round | None:
    """Step 2: put groups on neighbouring ranks, inside nodes where they fit. None if a node has no room for one.

    1. Groups that do not fit into a node come first, one after another.
    2. Narrower ones, widest first, go to the node with the least room that has enough.
    3. If ranks without a slice would wait, they join the group of their node that ends last, up to its most ranks.
    """
    num_ranks, node = batch.slots, batch.node
    degrees, most = tried.at_least.tolist(), tried.at_most.tolist()
    if sum(degrees) > num_ranks:
        return None
    work = batch.work[first : first + len(degrees)].tolist()
    wide = [number for number, degree in enumerate(degrees) if degree > node]
    narrow = sorted((number for number, degree in enumerate(degrees) if degree <= node), key=lambda n: -degrees[n])
    free = num_ranks - sum(degrees) - (node if narrow and wide else 0)
    _widen(batch, wide, degrees, most, work, free=free if tried.is_long else 0)
    used = sum(degrees[number] for number in wide)
    firsts, nodes = dict[int, int](), list[tuple[int, int, list[int]]]()  # first rank, ranks, groups
    for number in wide:
        firsts[number] = sum(degrees[other] for other in firsts)
    while used < num_ranks:
        size = min(node - used % node, num_ranks - used)
        nodes.append((used, size, []))
        used += size
    by_room: list[list[int]] = [[] for _ in range(node + 1)]  # nodes, by the ranks that are left
    for number, (_, size, _) in reversed(list(enumerate(nodes))):
        by_room[size].append(number)
    for number in narrow:
        room = next((room for room in range(degrees[number], node + 1) if by_room[room]), None)
        if room is None:
            return None
        at = by_room[room].pop()
        nodes[at][2].append(number)
        by_room[room - degrees[number]].append(at)
    for start, size, groups in nodes:
        if tried.is_long:
            _widen(batch, groups, degrees, most, work, free=size - sum(degrees[number] for number in groups))
        for number in groups:
            firsts[number], start = start, start + degrees[number]
    order = np.array(sorted(firsts, key=firsts.__getitem__), dtype=np.int64)
    return Round(first + order, np.array(degrees)[order], np.array([firsts[number] for number in order.tolist()]))


def _widen(
    batch: RoundBatch, groups: list[int], degrees: list[int], most: list[float], work: list[float], *, free: int
) -> None:
    """Give ``free`` ranks to the groups that end last, up to the next degrees that they may have."""
    ends = [(-work[number] / degrees[number], number) for number in groups]
    heapq.heapify(ends)
    while ends:
        _, number = heapq.heappop(ends)
        wider = int(batch.in_nodes(degrees[number] + 1))
        if degrees[number] < wider <= min(most[number], degrees[number] + free):
            free -= wider - degrees[number]
            degrees[number] = wider
            heapq.heappush(ends, (-work[number] / wider, number))
