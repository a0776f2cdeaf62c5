"""Where the rows of a micro-batch are cut, and what reaches a fragment from the tokens before it.

A rank's rows are fragments of the sequences that a group shares, two of each (some may be empty), and then whole
documents. A recurrent layer has to know two things of the tokens before a fragment: the last few rows, which its
convolution looks at (the halo), and the state that they leave behind (``states``). In a tree of documents
(``plan.trees``), the rows between two forks are a run, and a fragment of a shared tree is a part of one
(``attention.rings.runs``). A run begins with the state at the end of its parent.

Shape letters: T rows, F fragments, C channels, n rows that arrive, H heads, R rows and C columns of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bytescale.attention import PackedAttention
from bytescale.attention.rings.grid_messages import Grid
from bytescale.attention.rings.messages import Kind
from bytescale.attention.rings.runs import OwnRuns, Ranges, RowRuns, RowsBefore
from bytescale.plan.plan import offsets_of
from bytescale.plan.states import chain_is_faster
from bytescale.recurrence.states import EntryStates, StateRound, act, index_of, state_rounds


class GroupCuts(OwnRuns):
    """A micro-batch of a plan; its shared sequences' states and halos are exchanged with the other members.

    Attributes:
        fragments: rows of every fragment of a shared sequence; may be empty. Where a sequence is a tree, of every run.
        keep: called with what a cache holds after each of the runs, fragments first: ``"conv"``, the last inputs of a
            convolution ``[F, C, k]``, or ``"recurrent"``, the state ``[F, ...]``.
    """

    keep: Callable[[str, Tensor], None] | None = None

    def __init__(self, attention: PackedAttention) -> None:
        """``attention``: of the same micro-batch, whose messages and memory are used."""
        micro_batch = attention.micro_batch
        super().__init__(micro_batch)
        self._attention = attention
        if not attention.num_tokens:
            self.documents = [slice(0, 1)]  # the row that stands for no token
        counts = micro_batch.segment_stops - micro_batch.segment_starts
        edges = offsets_of(counts[: 2 * micro_batch.num_shared_sequences])
        if self.shared is not None and self.shared.has_trees:
            edges = self.shared.own_ends
        self.fragments = [slice(*pair) for pair in pairwise(edges.tolist())]
        self._halos: dict[int, RowsBefore] = {}
        self._rounds: tuple[Tensor, list[StateRound]] | None = None

    def halo(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Fetch the ``width`` rows before each fragment.

        Returns ``rows [T, C]``, which have to be used from here on; the rows that arrived, ``[n, C]``; and of each
        fragment, and of the documents behind them, where these rows are: first those of ``rows``, then those that
        arrived; -1: there is no such token.
        """
        if width not in self._halos:
            self._halos[width] = self.rows_before(width)
        halo, grid = self._halos[width], self._attention.grid
        found = iter(halo.places)
        empty = [part.start == part.stop for part in self.fragments] + [False] * len(self.documents)
        places = [[-1] * width if nothing else _padded(next(found), width) for nothing in empty]
        if grid is None:
            return rows, rows[:0], places
        own, arrived = _Halo.apply(rows, halo, grid, self._attention)
        return own, arrived, places

    def entry(self, out: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The state before each fragment.

        Args:
            out: any tensor that the layer's output depends on. It is returned, and has to be used from there on.
            decay: ``[F, ...]`` and state: ``[F, H, R, C]``, what each fragment does to a state.

        Returns ``out`` and the states ``[F, H, R, C]``.
        """
        assert self.shared is not None, "fragments are of shared sequences"
        sizes = (len(part) // 2 * part[0].numel() * part.element_size() for part in (decay, state))
        if self.shared.has_trees or chain_is_faster(self.shared.size, *sizes):
            if self._rounds is None:
                runs = [number for number, rows in enumerate(self.fragments) if rows.start < rows.stop]
                self._rounds = index_of(runs, state.device), list(state_rounds(self.shared, state.device))
            filled, rounds = self._rounds
            entry = torch.zeros_like(state)
            out, entry[filled] = EntryStates.apply(out, decay[filled], state[filled], self._attention, rounds)
            return out, entry
        decay, state = (part.unflatten(0, (-1, 2)).transpose(0, 1).contiguous() for part in (decay, state))
        out, entry = EntryStates.apply(out, decay, state, self._attention)
        return out, entry.transpose(0, 1).flatten(0, 1)


class _Halo(torch.autograd.Function):
    """Sends the rows that the fragments of others look at. Backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, halo: RowsBefore, grid: Grid, attention: PackedAttention) -> tuple[Tensor, ...]:
        (arrived,) = attention.remembered(lambda: (halo.fetch(rows, grid, Kind.FORWARD_HALO),))
        ctx.halo, ctx.grid = halo, grid
        return rows.view_as(rows), arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = gradients[0].clone()
        ctx.halo.give_back(total, gradients[1], ctx.grid, Kind.BACKWARD_HALO)
        return total, None, None, None


class OneProcessCuts(RowRuns):
    """One document, cut at some places: all its fragments are rows of this process. The slow twin of ``GroupCuts``."""

    keep = None

    def __init__(self, edges: Sequence[int], documents: Sequence[slice] = (), parents: Sequence[int] = ()) -> None:
        """``edges``: ``[F + 1]``, from 0 to the number of rows, rising; equal ones make an empty fragment."""
        super().__init__(documents, parents)
        self.fragments = [slice(*pair) for pair in pairwise(edges)]
        self.numbers = [0, 0]
        """Of states and of decays of a fragment, in all layers so far (``hf.model.probe``)."""

    def halo(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor, list[list[int]]]:
        """See ``GroupCuts``."""
        places = [[max(-1, run.start + at) for at in range(-width, 0)] for run in self.fragments]
        return rows, rows[:0], places + [_padded(ranges, width) for ranges in self.before(width)]

    def entry(self, out: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See ``GroupCuts``."""
        self.numbers = [known + one[0].numel() for known, one in zip(self.numbers, (state, decay), strict=True)]
        entry = [torch.zeros_like(state[0])]
        for one_decay, one_state in zip(decay[:-1], state[:-1], strict=True):
            entry.append(act(one_decay, entry[-1]) + one_state)
        return out, torch.stack(entry)


def _padded(ranges: Ranges, width: int) -> list[int]:
    """The rows of ``ranges``, behind as many -1 as ``width`` says."""
    rows = [row for pair in ranges for row in range(*pair)]
    return [-1] * (width - len(rows)) + rows


Cuts = GroupCuts | OneProcessCuts
