"""Runs of rows in trees of documents (``plan.trees``), and their states where ranks share a tree.

The rows between two forks are a run. It begins with the state at the end of its parent, and the rows that a convolution
sees before it lie on its path, which may go through several short runs.

Ranks that share a tree hold segments of its rows (``plan.layout``). A run is cut where segments end, and what follows
a cut is a run whose parent is the part before. Every member first computes what its runs do to a state, ``E -> D E +
S``, all at once (``cuts``). Then states are handed on: in round d, the states after the runs of depth d reach the runs
behind them, on the same member or in a message. All members know all runs, so that nothing is asked for. Backward goes
through the same rounds from the last to the first: a run's state has the sum of the gradients of all that begin there.

Shape letters: F runs of a member, H heads, R rows and C columns of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bytescale.attention.blocks import RowRanges
from bytescale.attention.copies import to_device
from bytescale.attention.rings.exchange import Message
from bytescale.attention.rings.grid_messages import Grid
from bytescale.attention.rings.messages import Kind
from bytescale.common.arrays import IntArray
from bytescale.plan import SharedGroup
from bytescale.plan.layout import segment_bounds
from bytescale.plan.plan import offsets_of
from bytescale.plan.trees import Forest


def act(decay: Tensor, state: Tensor) -> Tensor:
    """``decay`` applied to a state ``[..., R, C]``, or to another decay.

    A decay is a matrix ``[..., R, R]``; a number ``[..., 1, 1]``; or, where R = 1, numbers ``[..., 1, C]``. With R = 1,
    a matrix is a number.
    """
    return decay @ state if decay.shape[-1] == state.shape[-2] else decay * state


class RowRuns:
    """Rows of whole documents, or of the runs of trees, and numbers that the layers look up rows by.

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

    def on_paths(self, width: int) -> list[list[int]]:
        """Of each run of a tree the ``width`` rows before it on its path; -1: there is none. Empty without trees."""
        found: list[list[int]] = []
        for parent in self.parents:
            rows = [-1] * width
            if parent >= 0:
                run = self.documents[parent]
                rows = [*found[parent], *range(max(run.start, run.stop - width), run.stop)][-width:]
            found.append(rows)
        return found

    def on_device(self, key: Any, device: torch.device, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """What ``make()`` returns, on ``device``: the same tensors in every layer (fla keeps what it derives of them).

        ``key`` tells tables apart.
        """
        if (key, device) not in self._tables:
            self._tables[key, device] = [to_device(table, device) for table in make()]
        return self._tables[key, device]


class RowsBefore(NamedTuple):
    """The rows before each of a member's runs, as far as a convolution reaches: its halo."""

    sent: list[RowRanges]  # by step t from 1 on, which own rows go to member ``i + t``
    arriving: list[int]  # by step, how many rows come from member ``i - t``, one step after the other
    places: list[list[int]]  # of each run: first own rows, then those that arrived; -1: there is no such token


class StateRound(NamedTuple):
    """How a member's states of one depth reach the runs behind them. Its runs are counted from 0."""

    parents: IntArray  # runs that others begin behind
    sent: list[IntArray]  # by step t from 1 on, which of ``parents`` member ``i + t`` gets
    arriving: list[int]  # by step, how many states come from member ``i - t``
    children: IntArray  # runs that begin behind a run of this depth
    sources: IntArray  # of each child the place of its parent: among ``parents``, and then what arrives


class SharedRuns(RowRuns):
    """The runs of all sequences that a group shares, trees or not. ``documents`` are their rows, whoever holds them."""

    def __init__(self, shared: SharedGroup, trees: Forest) -> None:
        """``trees``: the shared sequences."""
        first = offsets_of(trees.sequence_lengths)
        bounds = [segment_bounds(shared.lengths, shared.weights, member) for member in range(shared.size)]
        segments = (np.stack(bounds) + first[:-1, None, None]).reshape(-1, 2)
        holders = np.repeat(np.arange(shared.size), 2 * len(shared.lengths))
        order = np.argsort(segments[:, 0], kind="stable")
        order = order[segments[order, 0] < segments[order, 1]]
        runs, above = trees.runs()
        starts = np.union1d(runs, segments[order, 0])
        lengths = np.diff(starts, append=first[-1])
        parents, begins = np.arange(len(starts)) - 1, np.searchsorted(starts, runs)
        parents[begins] = np.where(above < 0, -1, np.append(begins[1:], len(starts))[above] - 1)
        super().__init__([slice(start, start + n) for start, n in zip(starts, lengths, strict=True)], parents.tolist())
        self.has_trees = bool(trees.shared.any())
        self._member, self.size, self._starts = shared.member, shared.size, starts
        self._holders = holders[order][np.searchsorted(segments[order, 0], starts, side="right") - 1]
        own = np.flatnonzero(self._holders == shared.member)
        self.ends = offsets_of(lengths[own])
        """``[F + 1]`` rows of the member at which its runs begin and end."""
        self._places = np.full(len(starts), -1)
        self._places[own] = np.arange(len(own))

    def halo(self, width: int, num_rows: int) -> RowsBefore:
        """``width``: rows before a run that are looked at; ``num_rows``: of the micro-batch."""
        rows = np.array(self.on_paths(width), dtype=np.int64).reshape(-1, width)
        holders = np.where(rows < 0, -1, self._holders[np.searchsorted(self._starts, rows, side="right") - 1])
        targets = np.broadcast_to(self._holders[:, None], rows.shape)
        sent, arriving = self._travelling(rows, holders, targets)
        places = np.where(holders == self._member, self._local(rows), -1)
        missing = (targets == self._member) & (holders >= 0) & (holders != self._member)
        places[missing] = num_rows + _places_in(np.concatenate(arriving), rows[missing])
        return RowsBefore(
            [RowRanges([(row, row + 1) for row in self._local(part).tolist()]) for part in sent],
            [len(part) for part in arriving],
            places[self._holders == self._member].tolist(),
        )

    @cached_property
    def rounds(self) -> list[StateRound]:
        """What the member does in each round."""
        rounds, above = list[StateRound](), np.array(self.parents)
        for level in self.levels[1:]:
            runs = np.array(level)
            parents, own = above[runs], self._holders[runs] == self._member
            holders = self._holders[parents]
            sent, arriving = self._travelling(parents, holders, self._holders[runs])
            at_home = np.unique(parents[holders == self._member])
            sources = _places_in(np.concatenate([at_home, *arriving]), parents[own])
            places = [_places_in(at_home, part) for part in sent]
            counts = [len(part) for part in arriving]
            rounds.append(StateRound(self._places[at_home], places, counts, self._places[runs[own]], sources))
        return rounds

    def _travelling(
        self, items: IntArray, holders: IntArray, targets: IntArray
    ) -> tuple[list[IntArray], list[IntArray]]:
        """By step: which of ``items`` member ``i + t`` gets, and which come from ``i - t``; each once, rising."""
        own, others = self._member, range(1, self.size)
        after, before = ([(own + sign * step) % self.size for step in others] for sign in (1, -1))
        sent = [np.unique(items[(holders == own) & (targets == target)]) for target in after]
        return sent, [np.unique(items[(holders == source) & (targets == own)]) for source in before]

    def _local(self, rows: IntArray) -> IntArray:
        """Rows of the member; of rows that others hold, anything."""
        runs = np.searchsorted(self._starts, rows, side="right") - 1
        return np.asarray(self.ends[self._places[runs]] + rows - self._starts[runs])


def _places_in(known: IntArray, items: IntArray) -> IntArray:
    order = np.argsort(known)
    return np.asarray(order[np.searchsorted(known[order], items)])


def handed_on(decay: Tensor, state: Tensor, runs: SharedRuns, grid: Grid) -> Tensor:
    """The states ``[F, H, R, C]`` before a member's runs, from what each does to a state."""
    entry = torch.zeros_like(state)
    for one in runs.rounds:
        after = act(decay[one.parents], entry[one.parents]) + state[one.parents]
        received = state.new_empty(sum(one.arriving), *state.shape[1:])
        messages = [after[places] for places in one.sent]
        swap(messages, list(received.split(one.arriving)), grid, Kind.FORWARD_STATES, forwards=True)
        entry[one.children] = torch.cat([after, received])[one.sources]
    return entry


def handed_back(turned: Tensor, gradient: Tensor, runs: SharedRuns, grid: Grid) -> Tensor:
    """The gradients of what runs add to states, from those of the states before them; ``turned``: transposed decays."""
    reached, result = gradient.clone(), torch.zeros_like(gradient)
    for one in reversed(runs.rounds):
        known = gradient.new_zeros(len(one.parents) + sum(one.arriving), *gradient.shape[1:])
        known.index_add_(0, torch.as_tensor(one.sources, device=known.device), reached[one.children])
        after, *messages = known.split([len(one.parents), *one.arriving])
        returned = [gradient.new_empty(len(places), *gradient.shape[1:]) for places in one.sent]
        swap(messages, returned, grid, Kind.BACKWARD_STATES, forwards=False)
        for places, part in zip(one.sent, returned, strict=True):
            after[places] += part
        result[one.parents] = after
        reached[one.parents] += act(turned[one.parents], after)
    return result


def swap(messages: list[Tensor], room: list[Tensor], grid: Grid, kind: Kind, *, forwards: bool) -> None:
    """Send the t-th message to member ``i + t`` and receive from ``i - t``, or the other way round; one operation."""
    sends: list[Message] = []
    receives: list[Message] = []
    for step, (message, place) in enumerate(zip(messages, room, strict=True), start=1):
        distance = step if forwards else -step
        sends.append((message, grid.ranks[(grid.member + distance) % grid.size]))
        receives.append((place, grid.ranks[(grid.member - distance) % grid.size]))
    if any(tensor.numel() for tensor, _ in [*sends, *receives]):
        grid.exchange.start_all(sends, receives, tag=kind.tag(grid.group)).wait()
