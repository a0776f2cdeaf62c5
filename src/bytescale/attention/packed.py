"""Attention of one micro-batch: the sequences that a rank holds whole, and its slices of those that a group shares.

Sequences that a rank holds alone are blocks of one kernel call. Those of a shared group go through a grid (``grid``),
or, where a window reaches less far than the documents, through an exchange of the keys in its reach (``window``).

Shape letters: T rows of the micro-batch, the first of which are the shared ones; H query heads, G key/value heads, D
width of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bytescale.attention.autocast import without_autocast
from bytescale.attention.choose import kernel_for
from bytescale.attention.kernels import AttentionKernel, CpuFlashKernel, OfQueries
from bytescale.attention.rings.exchange import Exchange
from bytescale.attention.rings.grid import BlockWork, grid_backward, grid_forward
from bytescale.attention.rings.grid_messages import Grid
from bytescale.attention.rings.messages import RingBuffers
from bytescale.attention.rings.runs import OwnRuns
from bytescale.attention.rings.window import Windowed
from bytescale.attention.rules import PLAIN, AttentionRules
from bytescale.attention.sinks import join_sinks, sinks_gradient
from bytescale.attention.trees import add_node_gradients, add_nodes, blocks_between, own_blocks
from bytescale.plan import MicroBatch

Forward = Callable[[Tensor, Tensor, Tensor, AttentionRules, Tensor | None], tuple[Tensor, Tensor]]
"""As ``PackedAttention.forward``."""


class AttentionMemory(Protocol):
    """Keeps results of attention until backward, when activation checkpointing computes the layer again."""

    def recall(self) -> tuple[Tensor, ...] | None:
        """Return what was kept by the call at this place of the layer, or None if this call has to compute it."""

    def keep(self, *results: Tensor) -> None:
        """Store what was computed."""


class PackedAttention:
    """The attention callable that a model is given for one micro-batch on one rank.

    ``attention(q, k, v, rules, sinks)`` takes ``q [T, H, D]``, ``k [T, G, D]`` and ``v [T, G, Dv]``, whose rows are in
    the layout of the micro-batch (``plan.rank_plan``), and returns ``[T, H, Dv]``. ``sinks [H]`` are learned logits, or
    None. Every member of a shared group has to make the same calls, with the same heads and the same rules. A caller
    that keeps the results itself uses ``forward`` and ``backward`` instead.
    """

    def __init__(
        self,
        micro_batch: MicroBatch,
        kernel: AttentionKernel,
        exchange: Exchange,
        memory: AttentionMemory | None = None,
        buffers: RingBuffers | None = None,
    ) -> None:
        """``buffers`` hold the messages. Several micro-batches of a rank may use them, one after the other."""
        self.micro_batch, shared = micro_batch, micro_batch.shared
        self.kernel = kernel
        self.memory = memory
        self.num_tokens = micro_batch.num_tokens
        trees = micro_batch.forest
        self.triangles, self.nodes = own_blocks(micro_batch, trees)
        of_group = trees.of(np.arange(micro_batch.num_shared_sequences))
        self.grid: Grid | None = None
        if shared is not None:
            blocks_of = partial(blocks_between, shared, of_group)
            self.grid = Grid(shared, exchange, buffers or RingBuffers(), blocks_of)
        self._longest, self._longest_shared = (int(own.lengths.max(initial=0)) for own in (trees, of_group))
        self._of_windows: dict[int, Windowed] = {}
        self._exchange, self._buffers = exchange, buffers

    @cached_property
    def runs(self) -> OwnRuns:
        """Of the micro-batch's rows."""
        return OwnRuns(self.micro_batch)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules = PLAIN, sinks: Tensor | None = None, *,
        forward: Forward | None = None,
    ) -> Tensor:  # fmt: skip
        """``forward`` takes the place of the method of this name, for the same results up to rounding.

        Models have heads first: ``[1, H, T, D]``, ``[1, G, T, D]`` and ``[1, G, T, Dv]`` give ``[1, T, H, Dv]``.
        """
        num_rows = q.shape[0 if q.dim() == 3 else 2]
        if num_rows != self.num_tokens:
            raise ValueError(
                f"attention got {num_rows} rows but its micro-batch has {self.num_tokens}: "
                "the model must keep one row per token, in order"
            )
        if q.dim() == 4 and self._is_one_document and sinks is None and forward is None:
            kernel = kernel_for(self.kernel, rules)
            if isinstance(kernel, CpuFlashKernel):  # which needs no help in backward
                return kernel.of_document(q, k, v, rules.scale_of(q))
        return _PackedAttentionFunction.apply(q, k, v, sinks, self, (rules, forward or self.forward))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules = PLAIN, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute ``out [T, H, Dv]`` and ``lse [T, H]``, outside of autograd. Both include the sinks."""
        work, window = self._work(q, rules), rules.window
        if window is not None and self._cuts_others_alone(window):
            results = [part.forward(q[rows], k[rows], v[rows], rules) for rows, part in self._apart]
            out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
        elif window is not None and window < self._longest:
            out, lse = self._windowed(window).forward(q, k, v, work)
        else:
            if self.grid is None:
                out, lse = work.forward(q, k, v, self.triangles)
            else:
                out, lse = grid_forward(q, k, v, self.triangles, self.grid, work)
            if self.nodes:
                out, lse = add_nodes((out, lse), (q, k, v), self.nodes, work)
        return (out, lse) if sinks is None else join_sinks(out, lse, sinks)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rules: AttentionRules = PLAIN
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of ``q``, ``k`` and ``v`` from that of ``out`` and the results of ``forward``.

        ``out`` and ``lse`` include the sinks, whose own gradient ``sinks.sinks_gradient`` computes.
        """
        work, window, queries = self._work(q, rules), rules.window, OfQueries(dout, q, out, lse)
        if window is not None and self._cuts_others_alone(window):
            results = [
                part.backward(dout[rows], q[rows], k[rows], v[rows], out[rows], lse[rows], rules)
                for rows, part in self._apart
            ]
            dq, dk, dv = (torch.cat(parts) for parts in zip(*results, strict=True))
            return dq, dk, dv
        if window is not None and window < self._longest:
            return self._windowed(window).backward(queries, k, v, work)
        if self.grid is None:
            gradients = work.backward(queries, k, v, self.triangles)
        else:
            gradients = grid_backward(dout, (q, k, v), (out, lse), self.triangles, self.grid, work)
        if self.nodes:
            gradients = add_node_gradients(gradients, queries, (k, v), self.nodes, work)
        return gradients

    @cached_property
    def _is_one_document(self) -> bool:
        """Whether all rows are one document, and no result is kept for a layer that runs again."""
        return self.grid is None and self.memory is None and not self.nodes and len(self.triangles) == 1

    def _cuts_others_alone(self, window: int) -> bool:
        """Whether a window reaches over all documents that the group shares, but not over all others.

        All members compute shared documents in one way, and the others are known to this rank alone.
        """
        return self.grid is not None and self._longest_shared <= window < self._longest

    @cached_property
    def _apart(self) -> list[tuple[slice, PackedAttention]]:
        """The shared rows and the others, each as a micro-batch of its own."""
        first, parts = 0, []
        for micro_batch in self.micro_batch.apart():
            stop = first + micro_batch.num_tokens
            parts.append(
                (slice(first, stop), PackedAttention(micro_batch, self.kernel, self._exchange, None, self._buffers))
            )
            first = stop
        return parts

    def _windowed(self, window: int) -> Windowed:
        if window not in self._of_windows:
            self._of_windows[window] = Windowed(self.runs, window, self.grid)
        return self._of_windows[window]

    def _work(self, q: Tensor, rules: AttentionRules) -> BlockWork:
        return BlockWork(kernel_for(self.kernel, rules), rules.scale_of(q))

    def remembered(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return results that travelled or cost much: from memory where it has them, otherwise from ``compute()``."""
        known = None if self.memory is None else self.memory.recall()
        if known is not None:
            return known
        results = compute()
        if self.memory is not None:
            self.memory.keep(*results)
        return results


class _PackedAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        attention: PackedAttention,
        way: tuple[AttentionRules, Forward],
    ) -> Tensor:
        rules, compute = way
        ctx.attention, ctx.rules, ctx.heads_first = attention, rules, q.dim() == 4
        if ctx.heads_first:
            q, k, v = (of_model[0].transpose(0, 1) for of_model in (q, k, v))
        with without_autocast(q.device):
            out, lse = attention.remembered(lambda: compute(q, k, v, rules, sinks))
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out.unsqueeze(0) if ctx.heads_first else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dout = gradients[0][0] if ctx.heads_first else gradients[0]
        with without_autocast(q.device):
            of_sinks = sinks_gradient(dout, out, lse, sinks) if ctx.needs_input_grad[3] else None
            of_rows = ctx.attention.backward(dout, q, k, v, out, lse, ctx.rules)
        if ctx.heads_first:
            of_rows = tuple(gradient.transpose(0, 1).unsqueeze(0) for gradient in of_rows)
        return *of_rows, of_sinks, None, None
