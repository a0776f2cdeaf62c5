"""Where the rows of a micro-batch are cut, and what reaches a fragment from the tokens before it.

A rank's rows are fragments of the sequences that a group shares, two of each (some may be empty), and then whole
documents. A recurrent layer has to know two things of the tokens before a fragment: the last few rows, which its
convolution looks at (the halo), and the state that they leave behind.

Shape letters: T rows, F fragments, C channels, n rows that arrive; the others as in ``states``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from bytescale.attention.rings.window import RowsBefore
from bytescale.recurrence.states import EntryStates, act


class GroupCuts:
    """A micro-batch of a plan; its shared sequences' states and halos are exchanged with the other members.

    Attributes:
        fragments: rows of every fragment of a shared sequence; may be empty.
        opens: by fragment, whether its sequence begins with it.
        documents: rows of every whole document.
    """

    def __init__(self, attention: PackedAttention) -> None:
        """``attention``: of the same micro-batch, whose messages and memory are used."""
        self._attention = attention
        shared, edges = attention.shared, [0]
        self.opens = []
        if shared is not None:
            counts = np.stack([part[:, shared.member] for part in shared.segments], axis=1)
            edges = [0, *np.cumsum(counts.ravel()).tolist()]
            self.opens = [shared.member == 0 and segment == 0 for _ in shared.lengths for segment in range(2)]
        self.fragments = [slice(*pair) for pair in pairwise(edges)]
        lengths = attention.local_lengths if attention.num_tokens else [1]  # the row that stands for no token
        ends = np.cumsum([edges[-1], *lengths]).tolist()
        self.documents = [slice(*pair) for pair in pairwise(ends)]
        self._halos: dict[int, RowsBefore] = {}

    def halo(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Fetch the ``width`` rows before each fragment.

        Returns ``rows [T, C]``, which have to be used from here on; the rows that arrived, ``[n, C]``; and of each
        fragment where these rows are: first those of ``rows``, then those that arrived; -1: there is no such token.
        """
        shared, grid = self._attention.shared, self._attention.grid
        if shared is None or grid is None:
            return rows, rows[:0], []
        if width not in self._halos:
            self._halos[width] = RowsBefore.of(shared, width)
        halo = self._halos[width]
        own, arrived = _Halo.apply(rows, halo, grid, self._attention)
        num_shared = grid.num_tokens  # rows behind these are documents
        places = [[at + len(rows) - num_shared if at >= num_shared else at for at in before] for before in halo.places]
        return own, arrived, places

    def entry(self, out: Tensor, decay: Tensor, state: Tensor, *, matrix: bool) -> tuple[Tensor, Tensor]:
        """The state before each fragment.

        Args:
            out: any tensor that the layer's output depends on. It is returned, and has to be used from there on.
            decay: ``[F, ...]`` and state: ``[F, H, R, C]``, what each fragment does to a state (``states``).
            matrix: how decays act.

        Returns ``out`` and the states ``[F, H, R, C]``.
        """
        grid = self._attention.grid
        assert grid is not None, "fragments are of shared sequences"
        decay, state = (part.unflatten(0, (-1, 2)).transpose(0, 1).contiguous() for part in (decay, state))
        out, entry = EntryStates.apply(out, decay, state, grid, self._attention, matrix)
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


class OneProcessCuts:
    """One document, cut at some places: all its fragments are rows of this process. The slow twin of ``GroupCuts``."""

    def __init__(self, edges: Sequence[int], documents: Sequence[slice] = ()) -> None:
        """``edges``: ``[F + 1]``, from 0 to the number of rows, rising; equal ones make an empty fragment."""
        self.fragments = [slice(*pair) for pair in pairwise(edges)]
        self.opens = [number == 0 for number in range(len(self.fragments))]
        self.documents = list(documents)
        self._numbers: Counter[str] = Counter()

    def take_numbers(self) -> dict[str, int]:
        """Numbers of states, decays and halo rows of a fragment since the last call (``hf.model.probe``)."""
        taken, self._numbers = self._numbers, Counter()
        return {name: taken[name] for name in ("state_numbers", "decay_numbers", "halo_numbers")}

    def halo(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor, list[list[int]]]:
        """See ``GroupCuts``."""
        self._numbers["halo_numbers"] += width * rows.shape[1]
        return rows, rows[:0], [[max(-1, run.start + at) for at in range(-width, 0)] for run in self.fragments]

    def entry(self, out: Tensor, decay: Tensor, state: Tensor, *, matrix: bool) -> tuple[Tensor, Tensor]:
        """See ``GroupCuts``."""
        self._numbers["state_numbers"] += state[0].numel()
        self._numbers["decay_numbers"] += decay[0].numel()
        entry = [torch.zeros_like(state[0])]
        for one_decay, one_state in zip(decay[:-1], state[:-1], strict=True):
            entry.append(act(one_decay, entry[-1], matrix=matrix) + one_state)
        return out, torch.stack(entry)


Cuts = GroupCuts | OneProcessCuts
