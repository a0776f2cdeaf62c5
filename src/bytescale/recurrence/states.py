"""The state before every fragment of a shared sequence, from what every fragment does to a state.

A run of tokens maps the state before it to the state after it, and the map is affine: ``E -> D E + S``. S is the state
after the run if there was none before it. D is a matrix a head (delta rules), or numbers (Mamba, lightning). Maps can
be composed in any grouping: first ``(D1, S1)``, then ``(D2, S2)``, is ``(D2 D1, D2 S1 + S2)``.

The 2N segments of a sequence that N members share have positions 0 .. 2N-1 in the sequence; member ``i`` holds
positions ``i`` and ``2N-1-i`` (``plan.layout``). What is wanted of each position is the composition of all maps before
it, applied to nothing: an exclusive scan.

  scan    round r = 0, 1, .. with d = 2^r: position p sends the composition of the d maps up to its own to position
          p + d, which puts it before what it has. After ``ceil(log2(2N))`` rounds every position has all maps before
          it. Where p < d, the composition is complete, and S alone is sent.
  chain   position 0 sends S to position 1, which sends ``D S + S'`` to position 2, and so on: 2N - 2 messages in a row,
          each of them small. ``chain_is_faster`` decides, by the same formula on every rank.

Backward is the same: the gradient of the state before position p is ``dE_p + D_p^T (gradient of the state after p)``.
So it is the scan of the transposed maps ``(D^T, dE)`` from the last position to the first. A member's positions,
counted from the end, are the same two.

Why this finishes under NCCL: all messages of a round are one operation of each member, and rounds have one order on all
members (``attention.rings.windowed_ring``). In the chain every message is an operation, in the order of positions.

Shape letters: N members, K sequences of the group, H heads, R rows and C columns of a state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bytescale.attention import PackedAttention
from bytescale.attention.rings.exchange import Message, Transfer
from bytescale.attention.rings.grid_messages import Grid
from bytescale.attention.rings.messages import Kind
from bytescale.plan.states import chain_is_faster, holder


def act(decay: Tensor, state: Tensor, *, matrix: bool) -> Tensor:
    """``decay`` applied to a state ``[..., R, C]``, or to another decay: by rows ``[..., R, R]``, or elementwise."""
    return decay @ state if matrix else decay * state


def entry_states(decay: Tensor, state: Tensor, grid: Grid, kind: Kind, *, matrix: bool) -> Tensor:
    """The state before each of this member's positions.

    Args:
        decay: ``[2, K, H, R, R]`` if ``matrix``, else anything that broadcasts to the states.
        state: ``[2, K, H, R, C]``.
        grid: the member's ranks and messages.
        kind: of the messages.
        matrix: how decays act.

    Returns ``[2, K, H, R, C]``.
    """
    assert decay.dtype == state.dtype, "both travel in one message"
    member, size = grid.member, grid.size
    sizes = (decay[0].numel() * decay.element_size(), state[0].numel() * state.element_size())
    function = _chain if chain_is_faster(size, *sizes) else _scan
    return function(decay, state, (member, 2 * size - 1 - member), grid, kind, matrix)


def _scan(decay: Tensor, state: Tensor, positions: tuple[int, int], grid: Grid, kind: Kind, matrix: bool) -> Tensor:
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
                parts = [act(decay[slot], entry[slot], matrix=matrix) + state[slot]]
                if position >= distance:  # otherwise nothing lies before it
                    known = before[slot]
                    parts.append(decay[slot] if known is None else act(decay[slot], known, matrix=matrix))
                if holder(target, grid.size) == grid.member:
                    arrived[1] = parts  # the next position of the same member is its back segment
                else:
                    sends.append((torch.cat([part.flatten() for part in parts]), _rank_of(target, grid)))
            if source >= 0 and holder(source, grid.size) != grid.member:
                likes = [state[slot], decay[slot]] if source >= distance else [state[slot]]
                room = state.new_empty(sum(like.numel() for like in likes))
                rooms = room.split([like.numel() for like in likes])
                arrived[slot] = [part.view_as(like) for part, like in zip(rooms, likes, strict=True)]
                receives.append((room, _rank_of(source, grid)))
        if sends or receives:
            grid.exchange.start_all(sends, receives, tag=kind.tag(grid.group)).wait()
        for slot, parts in arrived.items():
            known = before[slot]
            entry[slot] = parts[0] if known is None else entry[slot] + act(known, parts[0], matrix=matrix)
            if len(parts) == 2:
                before[slot] = parts[1] if known is None else act(known, parts[1], matrix=matrix)
        distance *= 2
    return entry


def _chain(decay: Tensor, state: Tensor, positions: tuple[int, int], grid: Grid, kind: Kind, matrix: bool) -> Tensor:
    entry = state.new_zeros(state.shape)
    sent: list[Transfer] = []
    for position in range(2 * grid.size - 1):
        source, target = holder(position, grid.size), holder(position + 1, grid.size)
        if source == grid.member:
            slot = positions.index(position)
            after = (act(decay[slot], entry[slot], matrix=matrix) + state[slot]).contiguous()
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


def _rank_of(position: int, grid: Grid) -> int:
    return grid.ranks[holder(position, grid.size)]


class EntryStates(torch.autograd.Function):
    """``entry_states`` with its backward. ``out``, which it returns, ties backward to the layer's output.

    A member without a token of the shared sequences has to take part in backward, too.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, decay: Tensor, state: Tensor, grid: Grid, attention: PackedAttention, matrix: bool
    ) -> tuple[Tensor, Tensor]:
        """``attention`` may remember the states, if this is a recomputation."""
        (entry,) = attention.remembered(lambda: (entry_states(decay, state, grid, Kind.FORWARD_STATES, matrix=matrix),))
        ctx.grid, ctx.matrix = grid, matrix
        ctx.save_for_backward(decay, entry)
        return out.view_as(out), entry

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        decay, entry = ctx.saved_tensors
        d_out, d_entry = gradients
        turned = decay.mT if ctx.matrix else decay
        after = entry_states(
            turned.flip(0).contiguous(), d_entry.flip(0).contiguous(), ctx.grid, Kind.BACKWARD_STATES, matrix=ctx.matrix
        ).flip(0)
        of_decay = after @ entry.mT if ctx.matrix else (after * entry).sum_to_size(decay.shape)
        return d_out, of_decay, after, None, None, None
