"""The state before each run of rows that ranks share, from what every run does to a state.

A run of tokens maps the state before it to the state after it: ``E -> D E + S``, where D is a matrix a head (delta
rules), or numbers (Mamba, lightning). First ``(D1, S1)``, then ``(D2, S2)``, is ``(D2 D1, D2 S1 + S2)``. Every member
first computes the maps of its own runs, all at once. There are two ways to the states:

  scan    of documents alone. The segments of a document that N members share have positions 0 .. 2N-1; member ``i``
          holds ``i`` and ``2N-1-i``. Each position wants the composition of all maps before it, applied to nothing: an
          exclusive scan. In round r = 0, 1, .. with d = 2^r, position p sends the composition of the d maps up to its
          own to position p + d, which puts it before what it has. Where p < d, the composition is complete, and S alone
          is sent.
  rounds  of trees, and of documents where it is faster. States are handed on from run to run: in round d, the states
          after the runs of depth d reach the runs behind them, on the same member or in a message. In a document, that
          is a chain of 2N - 2 small messages. ``chain_is_faster`` decides, by the same formula on every rank.

Backward of the scan is the scan of the transposed maps ``(D^T, dE)`` from the last position to the first, because the
gradient of the state before position p is ``dE_p + D_p^T (gradient of the state after p)``. Backward of the rounds goes
through them from the last to the first: a run's state has the sum of the gradients of all that begin there. Both finish
under NCCL: all messages of a round are one operation of each member, and rounds and positions have one order on all
members.

Shape letters: F runs of a member, N members, K sequences of the group, H heads, R rows and C columns of a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bytescale.attention import PackedAttention
from bytescale.attention.copies import to_device
from bytescale.attention.rings.exchange import Message
from bytescale.attention.rings.grid_messages import Grid
from bytescale.attention.rings.messages import Kind
from bytescale.attention.rings.runs import SharedRuns
from bytescale.plan.states import holder


def act(decay: Tensor, state: Tensor) -> Tensor:
    """``decay`` applied to a state ``[..., R, C]``, or to another decay.

    A decay is a matrix ``[..., R, R]``; a number ``[..., 1, 1]``; or, where R = 1, numbers ``[..., 1, C]``. With R = 1,
    a matrix is a number.
    """
    return decay @ state if decay.shape[-1] == state.shape[-2] else decay * state


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


class StateRound(NamedTuple):
    """How a member's states of one depth reach the runs behind them, by indices (int64). Its runs count from 0."""

    parents: Tensor  # runs that others begin behind
    sent: list[Tensor]  # by step t from 1 on, which of ``parents`` member ``i + t`` gets
    arriving: list[int]  # by step, how many states come from member ``i - t``
    children: Tensor  # runs that begin behind a run of this depth
    sources: Tensor  # of each child the place of its parent: among ``parents``, and then what arrives


def state_rounds(runs: SharedRuns, device: torch.device) -> Iterator[StateRound]:
    """What the member does in each round. Indices are on ``device``: for lists, a GPU's host would wait at each use."""
    holders, places, above, own = runs.holders.tolist(), runs.places.tolist(), runs.parents, runs.member
    for level in runs.levels[1:]:
        travelling: dict[tuple[int, int], set[int]] = {}
        for run in level:
            travelling.setdefault((holders[above[run]], holders[run]), set()).add(above[run])
        parents = sorted({above[run] for run in level if holders[above[run]] == own})
        sent = [sorted(travelling.get((own, target), ())) for target in runs.others(1)]
        arriving = [sorted(travelling.get((source, own), ())) for source in runs.others(-1)]
        at = {run: number for number, run in enumerate([*parents, *chain.from_iterable(arriving)])}
        children = [run for run in level if holders[run] == own]
        yield StateRound(
            parents=index_of([places[run] for run in parents], device),
            sent=[index_of([at[run] for run in part], device) for part in sent],
            arriving=[len(part) for part in arriving],
            children=index_of([places[run] for run in children], device),
            sources=index_of([at[above[run]] for run in children], device),
        )


def index_of(rows: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(rows, dtype=torch.int64), device)


def handed_on(decay: Tensor, state: Tensor, rounds: Sequence[StateRound], grid: Grid) -> Tensor:
    """The states ``[F, H, R, C]`` before a member's runs, from what each does to a state."""
    entry = torch.zeros_like(state)
    for one in rounds:
        after = act(decay[one.parents], entry[one.parents]) + state[one.parents]
        received = state.new_empty(sum(one.arriving), *state.shape[1:])
        messages = [after[places] for places in one.sent]
        grid.swap(messages, received.split(one.arriving), Kind.FORWARD_STATES).wait()
        entry[one.children] = torch.cat([after, received])[one.sources]
    return entry


def handed_back(turned: Tensor, gradient: Tensor, rounds: Sequence[StateRound], grid: Grid) -> Tensor:
    """The gradients of what runs add to states, from those of the states before them; ``turned``: transposed decays."""
    reached, result = gradient.clone(), torch.zeros_like(gradient)
    for one in reversed(rounds):
        known = gradient.new_zeros(len(one.parents) + sum(one.arriving), *gradient.shape[1:])
        known.index_add_(0, one.sources, reached[one.children])
        after, *messages = known.split([len(one.parents), *one.arriving])
        returned = [gradient.new_empty(len(places), *gradient.shape[1:]) for places in one.sent]
        grid.swap(messages, returned, Kind.BACKWARD_STATES, forwards=False).wait()
        for places, part in zip(one.sent, returned, strict=True):
            after[places] += part
        result[one.parents] = after
        reached[one.parents] += act(turned[one.parents], after)
    return result


class EntryStates(torch.autograd.Function):
    """States before fragments, and backward. ``out``, which it returns, ties backward to the layer's output.

    A member without a token of the shared sequences has to take part in backward, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        decay: Tensor,
        state: Tensor,
        attention: PackedAttention,
        rounds: Sequence[StateRound] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``attention`` may remember the states, if this is a recomputation.

        Without ``rounds``, ``decay`` and ``state`` are those of ``scanned``; with it, of ``handed_on``.
        """
        grid = attention.grid
        assert grid is not None, "fragments are of shared sequences"
        by_scan = partial(scanned, decay, state, grid, Kind.FORWARD_STATES)
        compute = by_scan if rounds is None else partial(handed_on, decay, state, rounds, grid)
        (entry,) = attention.remembered(lambda: (compute(),))
        ctx.grid, ctx.rounds = grid, rounds
        ctx.save_for_backward(decay, entry)
        return out.view_as(out), entry

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        decay, entry = ctx.saved_tensors
        d_out, d_entry = gradients
        turned = decay.mT if decay.shape[-1] == entry.shape[-2] else decay
        if ctx.rounds is None:
            backwards = turned.flip(0).contiguous(), d_entry.flip(0).contiguous()
            reached = scanned(*backwards, ctx.grid, Kind.BACKWARD_STATES).flip(0)
        else:
            reached = handed_back(turned, d_entry, ctx.rounds, ctx.grid)
        of_decay = reached @ entry.mT if turned is not decay else (reached * entry).sum_to_size(decay.shape)
        return d_out, of_decay, reached, None, None
