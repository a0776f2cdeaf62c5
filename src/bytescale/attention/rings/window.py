"""Which keys a sliding window needs from other members of a slice group, and in which blocks they are used.

A member holds a front and a back segment of every sequence (``plan.layout``); where they touch, both are one run of
tokens. With a window of ``w`` keys, the first ``w - 1`` queries of a run look at keys before the run, which other
members hold; all other queries look at the run's own keys only::

    positions     ... 3 4 5 6 | 7 8 9 10 11 12 |          a run of 7 .. 12, w = 4
                        ^^^^^   -----                     the outer queries 7, 8, 9 need 4, 5, 6 of others
                                      --------            the inner queries 10, 11, 12 need nothing

So the inner queries, and all sequences that a rank holds whole, are computed while the keys of others are on their way.
No query is in two blocks, so no partial results are merged. The keys of the outer queries are copied together from own
rows and from rows that have arrived; rows that both runs of a sequence look at travel once.

Shape letters: K sequences of the group, N members.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bytescale.attention.blocks import BlockSet, RowRanges
from bytescale.common.arrays import IntArray
from bytescale.plan import SharedGroup
from bytescale.plan.layout import segment_bounds


@dataclass(frozen=True)
class _TokenRun:
    """Tokens ``[start, stop)`` of a sequence. ``row`` of the member, or of what arrives, holds the first one."""

    start: int
    stop: int
    row: int


@dataclass(frozen=True)
class Gathered:
    """Rows that are copied together from own rows and from rows that arrived; some are copied twice."""

    num_rows: int
    own: RowRanges
    own_places: RowRanges
    arrived: RowRanges
    arrived_places: RowRanges


@dataclass(frozen=True)
class WindowLayout:
    """One member's part in the exchange of a window's keys, and its blocks.

    Attributes:
        inner: blocks whose keys are all among the member's own rows, whole local sequences included.
        outer: blocks of the other queries; their keys are rows of ``gathered``.
        sent: by step ``t`` from 1 on, which own rows go to member ``i + t``.
        arriving: by step, how many rows come from member ``i - t``. They are stored one step after the other.
    """

    inner: BlockSet
    outer: BlockSet
    gathered: Gathered
    sent: list[RowRanges]
    arriving: list[int]

    @staticmethod
    def of(shared: SharedGroup, local_lengths: IntArray, window: int) -> WindowLayout:
        """``local_lengths``: of the sequences that follow the shared ones in the micro-batch's rows."""
        own, sent, token_runs, arriving = _messages(shared, window)
        inner, outer, sources = _split(own, token_runs, window)
        num_shared = int((own.bounds[..., 1] - own.bounds[..., 0]).sum())
        edges = np.cumsum(np.concatenate([[num_shared], local_lengths])).tolist()
        inner += [(rows, rows) for rows in pairwise(edges)]
        return WindowLayout(_blocks(inner, window), _blocks(outer, window), _gathered(sources), sent, arriving)


@dataclass(frozen=True)
class _Held:
    """The two segments of every sequence that a member holds, ``bounds [K, 2, 2]``, and their first rows ``[K, 2]``."""

    bounds: IntArray
    first: IntArray

    @staticmethod
    def of(shared: SharedGroup, member: int) -> _Held:
        bounds = segment_bounds(shared.lengths, shared.weights, member)
        counts = (bounds[..., 1] - bounds[..., 0]).ravel()
        return _Held(bounds, (np.cumsum(counts) - counts).reshape(-1, 2))

    def missing(self, window: int) -> IntArray:
        """``[K, 2, 2]`` tokens ``[start, stop)`` before each segment: its queries see them, and others hold them.

        Tokens before the front segment are listed for it alone, although the back one may see them, too.
        """
        front, back = self.bounds[:, 0], self.bounds[:, 1]
        missing = np.empty_like(self.bounds)
        missing[:, 0] = np.stack([np.maximum(0, front[:, 0] - window + 1), front[:, 0]], axis=1)
        missing[:, 1] = np.stack([np.maximum(front[:, 1], back[:, 0] - window + 1), back[:, 0]], axis=1)
        without_queries = self.bounds[..., 0] == self.bounds[..., 1]
        missing[without_queries, 0] = missing[without_queries, 1]
        return missing

    def rows(self, starts: IntArray, stops: IntArray) -> list[tuple[int, int]]:
        """Rows of tokens ``[starts, stops)``, both ``[K, 2, 2]`` with the segment last, in rising order of tokens."""
        first = self.first[:, None, :] + starts - self.bounds[:, None, :, 0]
        kept = stops > starts
        return [
            (row, row + count) for row, count in zip(first[kept].tolist(), (stops - starts)[kept].tolist(), strict=True)
        ]

    def runs(self, sequence: int) -> list[_TokenRun]:
        """Return a sequence's segments without empty ones. Two segments that touch are one run."""
        (start, middle), (again, stop) = self.bounds[sequence].tolist()
        row, back_row = self.first[sequence].tolist()
        runs = (
            [_TokenRun(start, stop, row)]
            if middle == again
            else [_TokenRun(start, middle, row), _TokenRun(again, stop, back_row)]
        )
        return [run for run in runs if run.stop > run.start]


def _messages(shared: SharedGroup, window: int) -> tuple[_Held, list[RowRanges], list[list[_TokenRun]], list[int]]:
    """What this member holds, ``WindowLayout.sent``, by sequence what arrives, and ``WindowLayout.arriving``."""
    held = [_Held.of(shared, member) for member in range(shared.size)]
    own = held[shared.member]
    others = [held[(shared.member + step) % shared.size] for step in range(1, shared.size)]
    sent = [RowRanges(own.rows(*_overlaps(other.missing(window), own.bounds))) for other in others]
    return own, sent, *_arrivals(own.missing(window), others[::-1])


def _overlaps(wanted: IntArray, bounds: IntArray) -> tuple[IntArray, IntArray]:
    """Starts and stops, each ``[K, 2, 2]``: of every wanted range (first 2) by every held segment (second 2)."""
    starts = np.maximum(wanted[:, :, None, 0], bounds[:, None, :, 0])
    stops = np.minimum(wanted[:, :, None, 1], bounds[:, None, :, 1])
    return starts, np.maximum(starts, stops)


def _arrivals(missing: IntArray, sources: list[_Held]) -> tuple[list[list[_TokenRun]], list[int]]:
    """By sequence, what arrives of it and at which row; and how many rows come from each source, in their order."""
    token_runs: list[list[_TokenRun]] = [[] for _ in missing]
    arriving = []
    row = 0
    for source in sources:
        starts, stops = _overlaps(missing, source.bounds)
        before = row
        for sequence, wanted, segment in np.argwhere(stops > starts).tolist():
            start, stop = int(starts[sequence, wanted, segment]), int(stops[sequence, wanted, segment])
            token_runs[sequence].append(_TokenRun(start, stop, row))
            row += stop - start
        arriving.append(row - before)
    return token_runs, arriving


_Pair = tuple[tuple[int, int], tuple[int, int]]
_Source = tuple[bool, int, int]
"""Whether rows are own ones, the first row, and how many."""


def _split(own: _Held, arrived: list[list[_TokenRun]], window: int) -> tuple[list[_Pair], list[_Pair], list[_Source]]:
    """Ranges of query and key rows of the inner and of the outer blocks, and where the outer blocks' keys come from."""
    inner: list[_Pair] = []
    outer: list[_Pair] = []
    sources: list[_Source] = []
    num_gathered = 0
    for sequence in range(len(own.bounds)):
        runs = own.runs(sequence)
        known = sorted(
            [(run.start, True, run) for run in runs]
            + [(token_run.start, False, token_run) for token_run in arrived[sequence]],
            key=lambda entry: entry[0],
        )
        for run in runs:
            num_outer = 0 if run.start == 0 else min(window - 1, run.stop - run.start)
            end = run.row + run.stop - run.start
            if num_outer < run.stop - run.start:
                inner.append(((run.row + num_outer, end), (run.row, end)))
            if num_outer == 0:
                continue
            first, last = max(0, run.start - window + 1), run.start + num_outer
            for _, is_own, token_run in known:
                start, stop = max(first, token_run.start), min(last, token_run.stop)
                if stop > start:
                    sources.append((is_own, token_run.row + start - token_run.start, stop - start))
            outer.append(((run.row, run.row + num_outer), (num_gathered, num_gathered + last - first)))
            num_gathered += last - first
    assert sum(count for _, _, count in sources) == num_gathered, "every key that is seen is own or has arrived"
    return inner, outer, sources


def _gathered(sources: list[_Source]) -> Gathered:
    rows: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    places: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    place = 0
    for is_own, row, count in sources:
        rows[is_own].append((row, row + count))
        places[is_own].append((place, place + count))
        place += count
    return Gathered(
        place, RowRanges(rows[True]), RowRanges(places[True]), RowRanges(rows[False]), RowRanges(places[False])
    )


def _blocks(pairs: list[_Pair], window: int) -> BlockSet:
    ranges = np.array(pairs, dtype=np.int64).reshape(-1, 2, 2)
    return BlockSet.of(ranges[:, 0], ranges[:, 1], causal=True, window=window)
