"""Local search over degrees, for batches of few sequences on few ranks, where every sequence matters.

Each sequence has a degree, and the degrees determine a schedule. Shared sequences come first, either widest first or
longest in time first. Each takes the consecutive ranks that are free first, and starts when the last of these is free.
Whole sequences follow, longest first, each on the rank that is free first. The search changes one degree, or raises one
and lowers another, as long as the makespan falls.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from bytescale.planner.adaptive.blocks import timer
from bytescale.planner.adaptive.placement import Placement
from bytescale.planner.adaptive.trial import Batch, Trial

MAX_SEQUENCES = 16
MAX_RANKS = 16
MAX_SCHEDULES = 1500
"""Schedules tried, some 30 microseconds each."""


def improve(batch: Batch, trial: Trial, good_enough: float) -> Trial:
    """``trial`` or a better one, after at most ``MAX_SCHEDULES`` schedules. Stops at a makespan of ``good_enough``."""
    search = _Search(batch)
    start = np.ones(len(batch.lengths), dtype=np.int64)
    start[trial.shared] = trial.placed.degrees
    for degrees in (start.tolist(), batch.fewest.tolist(), [batch.cluster.num_ranks] * len(start)):
        search.descend(degrees, good_enough)
    return search.trial() if search.best_end < trial.end * (1 - 1e-9) else trial


class _Search:
    """The best schedule so far, and how many were tried."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.num_ranks = batch.cluster.num_ranks
        self.lengths = batch.lengths.tolist()
        self.fewest = batch.fewest.tolist()
        self.capacity = int(batch.cluster.capacity_tokens.min())
        self.launch = batch.cost.micro_batch_seconds
        seconds_on = timer(batch.cost)
        self.works = works = batch.cost.work_seconds(batch.lengths).tolist()
        self.seconds = [
            [0.0] + [seconds_on(work, length, degree) for degree in range(1, self.num_ranks + 1)]
            for work, length in zip(works, self.lengths, strict=True)
        ]
        node = batch.cost.ranks_per_node
        self.windows = [  # first ranks per degree; a group that fits into a node stays in one
            [first for first in range(self.num_ranks - degree + 1) if degree > node or first % node + degree <= node]
            for degree in range(self.num_ranks + 1)
        ]
        self.best_end = float("inf")
        self.best: tuple[list[int], bool] = (self.fewest, True)
        self.num_schedules = 0

    def descend(self, degrees: list[int], good_enough: float) -> None:
        """Take moves that lower the makespan until none does."""
        here = self._end(degrees)
        improved = True
        while improved and self.best_end > good_enough:
            improved = False
            for moved in self._moves(degrees):
                if self.num_schedules >= MAX_SCHEDULES:
                    return
                end = self._end(moved)
                if end < here * (1 - 1e-9):
                    degrees, here, improved = moved, end, True
                    break

    def _moves(self, degrees: list[int]) -> list[list[int]]:
        """All neighbours: first one degree set to any other; then one degree raised and another lowered by one."""
        moves = []
        for place, degree in enumerate(degrees):
            for other in range(self.fewest[place], self.num_ranks + 1):
                if other != degree:
                    moves.append([*degrees[:place], other, *degrees[place + 1 :]])
        for up, down in permutations(range(len(degrees)), 2):
            if degrees[up] < self.num_ranks and degrees[down] > self.fewest[down]:
                moved = list(degrees)
                moved[up] += 1
                moved[down] -= 1
                moves.append(moved)
        return moves

    def _end(self, degrees: list[int]) -> float:
        """The smaller makespan of the two orders. Also remembers the best schedule of all."""
        ends = []
        for widest_first in (True, False):
            end = max(self._schedule(degrees, widest_first)[2])
            ends.append(end)
            if end < self.best_end * (1 - 1e-9):
                self.best_end, self.best = end, (list(degrees), widest_first)
        self.num_schedules += 1
        return min(ends)

    def _schedule(self, degrees: list[int], widest_first: bool) -> tuple[list[tuple[int, int]], list[int], list[float]]:
        """(place, first rank) of each shared sequence in order, rank of each whole one, and when each rank is free."""
        free = [0.0] * self.num_ranks
        shared = [place for place, degree in enumerate(degrees) if degree > 1]
        whole = [place for place, degree in enumerate(degrees) if degree == 1]
        if widest_first:
            shared.sort(key=lambda place: (-degrees[place], place))
        else:
            shared.sort(key=lambda place: (-self.seconds[place][degrees[place]], place))
        placed = []
        for place in shared:
            degree = degrees[place]
            start, first = min((max(free[first : first + degree]), first) for first in self.windows[degree])
            free[first : first + degree] = [start + self.seconds[place][degree]] * degree
            placed.append((place, first))
        ranks, tokens = [], [0] * self.num_ranks
        for place in whole:
            rank = free.index(min(free))
            packs = -(-tokens[rank] // self.capacity)
            tokens[rank] += self.lengths[place]
            free[rank] += self.works[place] + self.launch * (-(-tokens[rank] // self.capacity) - packs)
            ranks.append(rank)
        return placed, ranks, free

    def trial(self) -> Trial:
        """The best schedule as a trial. Whole sequences follow the shared ones, in the batch's order."""
        degrees, widest_first = self.best
        placed, ranks, free = self._schedule(degrees, widest_first)
        shared = np.array([place for place, _ in placed], dtype=np.int64)
        widths = np.array([degrees[place] for place, _ in placed], dtype=np.int64)
        first = np.array([first for _, first in placed], dtype=np.int64)
        return Trial(
            shared=shared,
            placed=Placement.side_by_side(first, widths, np.array(free)),
            local=np.setdiff1d(np.arange(len(degrees)), shared),
            local_ranks=np.array(ranks, dtype=np.int64),
            end=max(free),
        )
