"""Where the rows of a micro-batch are cut, and what reaches a fragment from the tokens before it.

A rank's rows are fragments of the sequences that a group shares, two of each (some may be empty), and then whole
documents. A recurrent layer has to know two things of the tokens before a fragment: the last few rows, which its
convolution looks at (the halo), and the state that they leave behind. In a tree of documents (``plan.trees``), the rows
between two forks are a run, and a fragment of a shared tree is a part of one (``recurrence.trees``).

A run of tokens maps the state before it to the state after it: ``E -> D E + S``, where D is a matrix a head (delta
rules), or numbers (Mamba, lightning). First ``(D1, S1)``, then ``(D2, S2)``, is ``(D2 D1, D2 S1 + S2)``. The segments
of a sequence that N members share have positions 0 .. 2N-1; member ``i`` holds ``i`` and ``2N-1-i``. Each position
wants the composition of all maps before it, applied to nothing: an exclusive scan.

  scan    round r = 0, 1, .. with d = 2^r: position p sends the composition of the d maps up to its own to position
          p + d, which puts it before what it has. Where p < d, the composition is complete, and S alone is sent.
  chain   position 0 sends S to position 1, which sends ``D S + S'`` to position 2, and so on: 2N - 2 small messages in
          a row. ``chain_is_faster`` decides, by the same formula on every rank.

Backward is the scan of the transposed maps ``(D^T, dE)`` from the last position to the first, because the gradient of
the state before position p is ``dE_p + D_p^T (gradient of the state after p)``. It finishes under NCCL: all messages of
a round are one operation of each member, and rounds and positions have one order on all members.

Shape letters: T rows, F fragments, C channels, n rows that arrive; N members, K sequences of the group, H heads, R rows
and C columns of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bytescale.attention import PackedAttention
from bytescale.attention.kernels import add_rows
from bytescale.attention.rings.exchange import Message
from bytescale.attention.rings.grid_messages import Grid
from bytescale.attention.rings.messages import Kind
from bytescale.plan.states import chain_is_faster, holder
from bytescale.plan.trees import Forest
from bytescale.recurrence.trees import RowRuns, RowsBefore, SharedRuns, act, handed_back, handed_on, swap


def scanned(decay: Tensor, state: Tensor, grid: Grid, kind: Kind) -> Tensor:
    """The state ``[2, K, H, R, C]`` before each of this member's positions, from what each does to a state."""
    assert decay.dtype == state.dtype, "both travel in one message"
    positions = (grid.member, 2 * grid.size - 1 - grid.member)
    before: list[Tensor | None] = [None, None]  # the decay of all maps that are known before a position
    entry = state.new_zeros(state.shape)
    distance, last = 1, 2 * grid.size - 1
    while distance <= last:
        sends: list[Message] = []
        receives: list[Message] = []
        arrived: dict[int, list[Tensor]] = {}
        for slot, position in enumerate(positions):
            target, source = position + distance, position - distance
            if target <= last:
                parts = [act(decay[slot], entry[slot]) + state[slot]]
                if position >= distance:  # otherwise nothing lies before it
                    known = before[slot]
                    parts.append(decay[slot] if known is None else act(decay[slot], known))
                if holder(target, grid.size) == grid.member:
                    arrived[1] = parts  # the next position of the same member is its back segment
                else:
                    sends.append((torch.cat([part.flatten() for part in parts]), grid.ranks[holder(target, grid.size)]))
            if source >= 0 and holder(source, grid.size) != grid.member:
                likes = [state[slot], decay[slot]] if source >= distance else [state[slot]]
                room = state.new_empty(sum(like.numel() for like in likes))
                rooms = room.split([like.numel() for like in likes])
                arrived[slot] = [part.view_as(like) for part, like in zip(rooms, likes, strict=True)]
                receives.append((room, grid.ranks[holder(source, grid.size)]))
        if sends or receives:
            grid.exchange.start_all(sends, receives, tag=kind.tag(grid.group)).wait()
        for slot, parts in arrived.items():
            known = before[slot]
            entry[slot] = parts[0] if known is None else entry[slot] + act(known, parts[0])
            if len(parts) == 2:
                before[slot] = parts[1] if known is None else act(known, parts[1])
        distance *= 2
    return entry


class EntryStates(torch.autograd.Function):
    """States before fragments, and backward. ``out``, which it returns, ties backward to the layer's output.

    A member without a token of the shared sequences has to take part in backward, too.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, decay: Tensor, state: Tensor, attention: PackedAttention, runs: SharedRuns | None = None
    ) -> tuple[Tensor, Tensor]:
        """``attention`` may remember the states, if this is a recomputation.

        Without ``runs``, ``decay`` and ``state`` are those of ``scanned``; with it, of ``handed_on``.
        """
        grid = attention.grid
        assert grid is not None, "fragments are of shared sequences"
        by_scan = partial(scanned, decay, state, grid, Kind.FORWARD_STATES)
        compute = by_scan if runs is None else partial(handed_on, decay, state, runs, grid)
        (entry,) = attention.remembered(lambda: (compute(),))
        ctx.grid, ctx.runs = grid, runs
        ctx.save_for_backward(decay, entry)
        return out.view_as(out), entry

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        decay, entry = ctx.saved_tensors
        d_out, d_entry = gradients
        turned = decay.mT if decay.shape[-1] == entry.shape[-2] else decay
        if ctx.runs is None:
            backwards = turned.flip(0).contiguous(), d_entry.flip(0).contiguous()
            reached = scanned(*backwards, ctx.grid, Kind.BACKWARD_STATES).flip(0)
        else:
            reached = handed_back(turned, d_entry, ctx.runs, ctx.grid)
        of_decay = reached @ entry.mT if turned is not decay else (reached * entry).sum_to_size(decay.shape)
        return d_out, of_decay, reached, None, None


class GroupCuts(RowRuns):
    """A micro-batch of a plan; its shared sequences' states and halos are exchanged with the other members.

    Attributes:
        fragments: rows of every fragment of a shared sequence; may be empty. Where a sequence is a tree, of every run.
        keep: called with what a cache holds after each of the runs, fragments first: ``"conv"``, the last inputs of a
            convolution ``[F, C, k]``, or ``"recurrent"``, the state ``[F, ...]``.
    """

    keep: Callable[[str, Tensor], None] | None = None

    def __init__(self, attention: PackedAttention) -> None:
        """``attention``: of the same micro-batch, whose messages and memory are used."""
        self._attention = attention
        shared, trees, edges = attention.shared, attention.trees, [0]
        num_shared = 0 if shared is None else len(shared.sequences)
        self._shared_runs: SharedRuns | None = None
        if shared is not None:
            numbers = np.arange(num_shared + 1)
            lone = Forest(numbers[:-1], shared.lengths, 0 * numbers[:-1], numbers)
            runs = self._shared_runs = SharedRuns(shared, lone if trees is None else trees.of(numbers[:-1]))
            counts = np.stack([part[:, shared.member] for part in shared.segments], axis=1)
            edges = runs.ends.tolist() if runs.has_trees else [0, *np.cumsum(counts.ravel()).tolist()]
        self.fragments = [slice(*pair) for pair in pairwise(edges)]
        lengths = attention.local_lengths if attention.num_tokens else [1]  # the row that stands for no token
        ends, parents = np.cumsum([edges[-1], *lengths]).tolist(), list[int]()
        if trees is not None:
            alone = trees.of(np.arange(num_shared, len(trees.sequence_lengths)))
            if alone.shared.any():
                starts, above = alone.runs()
                ends, parents = [*(starts + edges[-1]).tolist(), ends[-1]], above.tolist()
        super().__init__([slice(*pair) for pair in pairwise(ends)], parents)
        self._halos: dict[int, RowsBefore] = {}

    def halo(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Fetch the ``width`` rows before each fragment.

        Returns ``rows [T, C]``, which have to be used from here on; the rows that arrived, ``[n, C]``; and of each
        fragment, and of the runs of trees, where these rows are: first those of ``rows``, then those that arrived; -1:
        there is no such token.
        """
        runs, grid = self._shared_runs, self._attention.grid
        if runs is None or grid is None:
            return rows, rows[:0], self.on_paths(width)
        if width not in self._halos:
            self._halos[width] = runs.halo(width, len(rows))
        own, arrived = _Halo.apply(rows, self._halos[width], grid, self._attention)
        filled = iter(self._halos[width].places)
        places = [next(filled) if part.start < part.stop else [-1] * width for part in self.fragments]
        return own, arrived, places + self.on_paths(width)

    def entry(self, out: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The state before each fragment.

        Args:
            out: any tensor that the layer's output depends on. It is returned, and has to be used from there on.
            decay: ``[F, ...]`` and state: ``[F, H, R, C]``, what each fragment does to a state.

        Returns ``out`` and the states ``[F, H, R, C]``.
        """
        runs = self._shared_runs
        assert runs is not None, "fragments are of shared sequences"
        sizes = (len(part) // 2 * part[0].numel() * part.element_size() for part in (decay, state))
        if runs.has_trees or chain_is_faster(runs.size, *sizes):
            filled = [rows.start < rows.stop for rows in self.fragments]
            entry = torch.zeros_like(state)
            out, entry[filled] = EntryStates.apply(out, decay[filled], state[filled], self._attention, runs)
            return out, entry
        decay, state = (part.unflatten(0, (-1, 2)).transpose(0, 1).contiguous() for part in (decay, state))
        out, entry = EntryStates.apply(out, decay, state, self._attention)
        return out, entry.transpose(0, 1).flatten(0, 1)


class _Halo(torch.autograd.Function):
    """Sends the rows that the fragments of others look at. Backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, halo: RowsBefore, grid: Grid, attention: PackedAttention) -> tuple[Tensor, ...]:
        def exchange() -> tuple[Tensor]:
            arrived = rows.new_empty(sum(halo.arriving), *rows.shape[1:])
            messages = [rows[sent.on(rows.device)].contiguous() for sent in halo.sent]
            swap(messages, list(arrived.split(halo.arriving)), grid, Kind.FORWARD_HALO, forwards=True)
            return (arrived,)

        (arrived,) = attention.remembered(exchange)
        ctx.halo, ctx.grid = halo, grid
        return rows.view_as(rows), arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        halo, total = ctx.halo, gradients[0].clone()
        returned = [total.new_empty(sent.num_rows, *total.shape[1:]) for sent in halo.sent]
        messages = list(gradients[1].contiguous().split(halo.arriving))
        swap(messages, returned, ctx.grid, Kind.BACKWARD_HALO, forwards=False)
        for sent, part in zip(halo.sent, returned, strict=True):
            add_rows(total, sent.on(total.device), part)
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
        return rows, rows[:0], places + self.on_paths(width)

    def entry(self, out: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See ``GroupCuts``."""
        self.numbers = [known + one[0].numel() for known, one in zip(self.numbers, (state, decay), strict=True)]
        entry = [torch.zeros_like(state[0])]
        for one_decay, one_state in zip(decay[:-1], state[:-1], strict=True):
            entry.append(act(one_decay, entry[-1]) + one_state)
        return out, torch.stack(entry)


Cuts = GroupCuts | OneProcessCuts
