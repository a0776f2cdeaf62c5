"""Where the rows of a micro-batch are cut, and what reaches a fragment from the tokens before it.

A rank's rows are fragments of the sequences that a group shares, two of each (some may be empty), and then whole
documents. A recurrent layer has to know two things of the tokens before a fragment: the last few rows, which its
convolution looks at (the halo), and the state that they leave behind. In a tree of documents (``plan.trees``), the rows
between two forks are a run. A run begins with the state at the end of its parent, and its halo lies on its path, which
may go through several short runs. Whoever has a tree has it alone.

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
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bytescale.attention import PackedAttention
from bytescale.attention.copies import to_device
from bytescale.attention.kernels import add_rows
from bytescale.attention.rings.exchange import Message, Transfer
from bytescale.attention.rings.grid_messages import Grid
from bytescale.attention.rings.messages import Kind
from bytescale.attention.rings.window import RowsBefore
from bytescale.common.errors import PlanError
from bytescale.plan.states import chain_is_faster, holder


def act(decay: Tensor, state: Tensor) -> Tensor:
    """``decay`` applied to a state ``[..., R, C]``, or to another decay.

    A decay is a matrix ``[..., R, R]``; a number ``[..., 1, 1]``; or, where R = 1, numbers ``[..., 1, C]``. With R = 1,
    a matrix is a number.
    """
    return decay @ state if decay.shape[-1] == state.shape[-2] else decay * state


def entry_states(decay: Tensor, state: Tensor, grid: Grid, kind: Kind) -> Tensor:
    """The state ``[2, K, H, R, C]`` before each of this member's positions, from what each does to a state."""
    assert decay.dtype == state.dtype, "both travel in one message"
    member, size = grid.member, grid.size
    sizes = (decay[0].numel() * decay.element_size(), state[0].numel() * state.element_size())
    function = _chain if chain_is_faster(size, *sizes) else _scan
    return function(decay, state, (member, 2 * size - 1 - member), grid, kind)


def _scan(decay: Tensor, state: Tensor, positions: tuple[int, int], grid: Grid, kind: Kind) -> Tensor:
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


def _chain(decay: Tensor, state: Tensor, positions: tuple[int, int], grid: Grid, kind: Kind) -> Tensor:
    entry = state.new_zeros(state.shape)
    sent: list[Transfer] = []
    for position in range(2 * grid.size - 1):
        source, target = holder(position, grid.size), holder(position + 1, grid.size)
        if source == grid.member:
            slot = positions.index(position)
            after = (act(decay[slot], entry[slot]) + state[slot]).contiguous()
            if target == grid.member:
                entry[1] = after
            else:
                to = (after, grid.ranks[target])
                sent.append(grid.exchange.start_all([to], [], tag=kind.tag(grid.group)))
        elif target == grid.member:
            place = (entry[positions.index(position + 1)], grid.ranks[source])
            grid.exchange.start_all([], [place], tag=kind.tag(grid.group)).wait()
    for transfer in sent:
        transfer.wait()
    return entry


class EntryStates(torch.autograd.Function):
    """``entry_states`` with its backward. ``out``, which it returns, ties backward to the layer's output.

    A member without a token of the shared sequences has to take part in backward, too.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, decay: Tensor, state: Tensor, attention: PackedAttention
    ) -> tuple[Tensor, Tensor]:
        """``attention`` may remember the states, if this is a recomputation."""
        grid = attention.grid
        assert grid is not None, "fragments are of shared sequences"
        (entry,) = attention.remembered(lambda: (entry_states(decay, state, grid, Kind.FORWARD_STATES),))
        ctx.grid = grid
        ctx.save_for_backward(decay, entry)
        return out.view_as(out), entry

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        decay, entry = ctx.saved_tensors
        d_out, d_entry = gradients
        turned = decay.mT if decay.shape[-1] == entry.shape[-2] else decay
        reached = entry_states(
            turned.flip(0).contiguous(), d_entry.flip(0).contiguous(), ctx.grid, Kind.BACKWARD_STATES
        ).flip(0)
        of_decay = reached @ entry.mT if turned is not decay else (reached * entry).sum_to_size(decay.shape)
        return d_out, of_decay, reached, None


class _Documents:
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


class GroupCuts(_Documents):
    """A micro-batch of a plan; its shared sequences' states and halos are exchanged with the other members.

    Attributes:
        fragments: rows of every fragment of a shared sequence; may be empty.
        keep: called with what a cache holds after each of the runs, fragments first: ``"conv"``, the last inputs of a
            convolution ``[F, C, k]``, or ``"recurrent"``, the state ``[F, ...]``.
    """

    keep: Callable[[str, Tensor], None] | None = None

    def __init__(self, attention: PackedAttention) -> None:
        """``attention``: of the same micro-batch, whose messages and memory are used.

        Raises ``PlanError`` for a plan in which ranks share trees.
        """
        self._attention = attention
        shared, edges = attention.shared, [0]
        if shared is not None:
            counts = np.stack([part[:, shared.member] for part in shared.segments], axis=1)
            edges = [0, *np.cumsum(counts.ravel()).tolist()]
        self.fragments = [slice(*pair) for pair in pairwise(edges)]
        lengths = attention.local_lengths if attention.num_tokens else [1]  # the row that stands for no token
        ends, parents = np.cumsum([edges[-1], *lengths]).tolist(), list[int]()
        if (trees := attention.trees) is not None:
            num_shared = 0 if shared is None else len(shared.sequences)
            if trees.of(np.arange(num_shared)).shared.any():
                raise PlanError(
                    "ranks share trees of documents, and a layer of the model is recurrent",
                    so="a branch would begin with a state of another branch",
                    fix="plan these documents without share_prefixes, or with hdp.plan, which keeps trees whole",
                )
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
        shared, grid = self._attention.shared, self._attention.grid
        if shared is None or grid is None:
            return rows, rows[:0], self.on_paths(width)
        if width not in self._halos:
            self._halos[width] = RowsBefore.of(shared, width, len(rows))
        own, arrived = _Halo.apply(rows, self._halos[width], grid, self._attention)
        return own, arrived, self._halos[width].places + self.on_paths(width)

    def entry(self, out: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The state before each fragment.

        Args:
            out: any tensor that the layer's output depends on. It is returned, and has to be used from there on.
            decay: ``[F, ...]`` and state: ``[F, H, R, C]``, what each fragment does to a state.

        Returns ``out`` and the states ``[F, H, R, C]``.
        """
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
            _swap(messages, list(arrived.split(halo.arriving)), grid, Kind.FORWARD_HALO, forwards=True)
            return (arrived,)

        (arrived,) = attention.remembered(exchange)
        ctx.halo, ctx.grid = halo, grid
        return rows.view_as(rows), arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        halo, total = ctx.halo, gradients[0].clone()
        returned = [total.new_empty(sent.num_rows, *total.shape[1:]) for sent in halo.sent]
        messages = list(gradients[1].contiguous().split(halo.arriving))
        _swap(messages, returned, ctx.grid, Kind.BACKWARD_HALO, forwards=False)
        for sent, part in zip(halo.sent, returned, strict=True):
            add_rows(total, sent.on(total.device), part)
        return total, None, None, None


def _swap(messages: list[Tensor], room: list[Tensor], grid: Grid, kind: Kind, *, forwards: bool) -> None:
    """Send the t-th message to member ``i + t`` and receive from ``i - t``, or the other way round; one operation."""
    sends: list[Message] = []
    receives: list[Message] = []
    for step, (message, place) in enumerate(zip(messages, room, strict=True), start=1):
        distance = step if forwards else -step
        sends.append((message, grid.ranks[(grid.member + distance) % grid.size]))
        receives.append((place, grid.ranks[(grid.member - distance) % grid.size]))
    if any(tensor.numel() for tensor, _ in [*sends, *receives]):
        grid.exchange.start_all(sends, receives, tag=kind.tag(grid.group)).wait()


class OneProcessCuts(_Documents):
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
