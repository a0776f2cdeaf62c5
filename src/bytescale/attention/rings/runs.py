"""Runs of rows, and the rows before a run that a window or a convolution looks at.

A document is a run, and of a tree of documents (``plan.trees``) the rows between two forks are one. Ranks that share a
sequence hold segments of its rows (``plan.layout``): a run is cut where segments end, and what follows a cut is a run
whose parent is the part before. So every run begins where its parent ends::

    rows        a a a a | b b b | c c c c c            a fork behind b, whose branches are c and d
                                | d d d                the runs b, c and d see, of earlier rows:
    looked at     b: a a;   c and d: b b b a   (4 rows each, if there are so many)

The rows before a run that it looks at are therefore the last rows of its parent, and if those are too few, of its
parent's parent. A member sends the last rows of each of its runs once to every member with a run that looks at them: as
many as the one that looks furthest needs. All members know all runs, so that nothing is asked for.

Shape letters: F runs of a member, N members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bytescale.attention.blocks import RowRanges
from bytescale.attention.copies import to_device
from bytescale.attention.kernels import add_rows
from bytescale.attention.rings.grid_messages import Grid
from bytescale.attention.rings.messages import Kind
from bytescale.plan import MicroBatch, SharedGroup
from bytescale.plan.plan import offsets_of
from bytescale.plan.trees import Forest

Ranges = list[tuple[int, int]]
"""Rows ``[start, stop)``."""


class RowRuns:
    """Rows of whole documents, or of the runs of trees, and numbers that layers look up rows by.

    Attributes:
        documents: rows of every whole document; with trees, of every run.
        parents: of each of them the place of the one before it, an earlier one; -1: there is none. Empty without trees.
    """

    def __init__(self, documents: Sequence[slice], parents: Sequence[int] = ()) -> None:
        self.documents, self.parents = list(documents), list(parents)
        self._tables: dict[Any, list[Tensor]] = {}

    @cached_property
    def levels(self) -> list[list[int]]:
        """The places of ``documents`` that nothing is before, then of those behind them, and so on."""
        if not self.parents:
            return [list(range(len(self.documents)))] if self.documents else []
        depths, levels = list[int](), list[list[int]]()
        for place, parent in enumerate(self.parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            if depths[place] == len(levels):
                levels.append([])
            levels[depths[place]].append(place)
        return levels

    def looked_at(self, width: int) -> list[Ranges]:
        """Of each run the ``width`` rows before it on its path: earlier runs, and how many of their last rows."""
        found: list[Ranges] = []
        for parent in self.parents or [-1] * len(self.documents):
            tails, left = Ranges(), width
            while parent >= 0 and left > 0:
                rows = self.documents[parent]
                tails.insert(0, (parent, min(left, rows.stop - rows.start)))
                left -= tails[0][1]
                parent = self.parents[parent]
            found.append(tails)
        return found

    def before(self, width: int) -> list[Ranges]:
        """Of each run the rows of ``looked_at``."""
        return [
            [(self.documents[run].stop - count, self.documents[run].stop) for run, count in tails]
            for tails in self.looked_at(width)
        ]

    def on_device(self, key: Any, device: torch.device, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """What ``make()`` returns, on ``device``: the same tensors in every layer (fla keeps what it derives of them).

        ``key`` tells tables apart.
        """
        if (key, device) not in self._tables:
            self._tables[key, device] = [to_device(table, device) for table in make()]
        return self._tables[key, device]


class RowsBefore(NamedTuple):
    """The rows before each of a rank's runs that are looked at, and how those of other members get there."""

    sent: list[RowRanges]  # by step t from 1 on, which own rows go to member ``i + t``
    arriving: list[int]  # by step, how many rows come from member ``i - t``, one step after the other
    places: list[Ranges]  # [F] of each run: of the rank's rows, and of those that arrived, counted on behind them

    def fetch(self, rows: Tensor, grid: Grid, kind: Kind) -> Tensor:
        """Send what others look at of ``rows [T, ...]``, and return what arrives: ``[n, ...]``."""
        arrived = rows.new_empty(sum(self.arriving), *rows.shape[1:])
        messages = [rows[sent.on(rows.device)].contiguous() for sent in self.sent]
        grid.swap(messages, arrived.split(self.arriving), kind).wait()
        return arrived

    def give_back(self, total: Tensor, of_arrived: Tensor, grid: Grid, kind: Kind) -> None:
        """Send the gradients of what arrived ``[n, ...]`` home, and add what others send to ``total [T, ...]``."""
        returned = [total.new_empty(sent.num_rows, *total.shape[1:]) for sent in self.sent]
        grid.swap(of_arrived.contiguous().split(self.arriving), returned, kind, forwards=False).wait()
        for sent, part in zip(self.sent, returned, strict=True):
            add_rows(total, sent.on(total.device), part)


class SharedRuns(RowRuns):
    """The runs of all sequences that a group shares, trees or not. ``documents`` are their rows, whoever holds them.

    Attributes:
        holders: ``[all runs]`` the member that holds each.
        places: ``[all runs]`` the place of each among the own ones; -1: another member's.
        own_ends: ``[F + 1]`` rows of the member at which its runs begin and end.
    """

    def __init__(self, shared: SharedGroup, trees: Forest) -> None:
        """``trees``: the shared sequences."""
        first = offsets_of(trees.sequence_lengths)
        segments = (shared.bounds + first[:-1, None, None]).reshape(-1, 2)
        holders = np.repeat(np.arange(shared.size), 2 * len(shared.lengths))
        order = np.argsort(segments[:, 0], kind="stable")
        order = order[segments[order, 0] < segments[order, 1]]
        runs, above = trees.runs()
        starts = np.union1d(runs, segments[order, 0])
        lengths = np.diff(starts, append=first[-1])
        parents, begins = np.arange(len(starts)) - 1, np.searchsorted(starts, runs)
        parents[begins] = np.where(above < 0, -1, np.append(begins[1:], len(starts))[above] - 1)
        super().__init__([slice(*pair) for pair in pairwise([*starts.tolist(), int(first[-1])])], parents.tolist())
        self.has_trees = bool(trees.shared.any())
        self.member, self.size = shared.member, shared.size
        self.holders = holders[order][np.searchsorted(segments[order, 0], starts, side="right") - 1]
        own = np.flatnonzero(self.holders == shared.member)
        self.own_ends = offsets_of(lengths[own])
        self.places = np.full(len(starts), -1)
        self.places[own] = np.arange(len(own))

    def others(self, sign: int) -> list[int]:
        """By step t from 1 on, the member ``i + t``, or ``i - t`` if ``sign`` is -1."""
        return [(self.member + sign * step) % self.size for step in range(1, self.size)]

    def rows_before(self, width: int, num_rows: int) -> RowsBefore:
        """``width``: rows before a run that are looked at; ``num_rows``: of the rank, those of no group included."""
        looked_at, holders, places = self.looked_at(width), self.holders.tolist(), self.places.tolist()
        travelling: dict[tuple[int, int], dict[int, int]] = {}  # by holder and target: last rows of each run
        for target, tails in zip(holders, looked_at, strict=True):
            for run, count in tails:
                known = travelling.setdefault((holders[run], target), {})
                known[run] = max(count, known.get(run, 0))
        stops = {run: int(self.own_ends[place + 1]) for run, place in enumerate(places) if place >= 0}
        sent = [sorted(travelling.get((self.member, target), {}).items()) for target in self.others(1)]
        arriving, last = list[int](), num_rows
        for source in self.others(-1):
            tails = sorted(travelling.get((source, self.member), {}).items())
            for run, count in tails:
                stops[run] = last = last + count
            arriving.append(sum(count for _, count in tails))
        return RowsBefore(
            [RowRanges([(stops[run] - count, stops[run]) for run, count in tails]) for tails in sent],
            arriving,
            [
                [(stops[run] - count, stops[run]) for run, count in tails]
                for tails, place in zip(looked_at, places, strict=True)
                if place >= 0
            ],
        )


class OwnRuns(RowRuns):
    """The runs of a rank's rows. ``documents`` and ``parents`` are those of sequences that it has alone.

    Attributes:
        shared: the runs of what a group shares, whose rows come first.
    """

    def __init__(self, micro_batch: MicroBatch) -> None:
        trees, first, count = micro_batch.forest, micro_batch.num_shared_tokens, micro_batch.num_shared_sequences
        self.num_rows = micro_batch.num_tokens
        self.shared: SharedRuns | None = None
        if micro_batch.shared is not None:
            self.shared = SharedRuns(micro_batch.shared, trees.of(np.arange(count)))
        alone = trees.of(np.arange(count, len(trees.sequence_lengths)))
        starts, above = alone.runs()
        ends, parents = [*(starts + first).tolist(), self.num_rows], above.tolist() if alone.shared.any() else []
        super().__init__([slice(*pair) for pair in pairwise(ends)], parents)

    def rows_before(self, width: int) -> RowsBefore:
        """The rows before all runs of the rank, those of shared sequences first."""
        if self.shared is None:
            return RowsBefore([], [], self.before(width))
        found = self.shared.rows_before(width, self.num_rows)
        return found._replace(places=found.places + self.before(width))

    @property
    def all_rows(self) -> list[slice]:
        """``[F]`` rows of all runs of the rank, in the order of ``rows_before``."""
        shared = [] if self.shared is None else pairwise(self.shared.own_ends.tolist())
        return [*(slice(*pair) for pair in shared), *self.documents]
