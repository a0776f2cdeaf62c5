"""Attention of one micro-batch: the sequences that a rank holds whole, and its slices of those that a group shares.

Sequences that a rank holds alone are blocks of one kernel call. Those of a shared group go through a grid (``grid``),
or, where a window reaches less far than the sequences, through ``windowed_ring``.

Shape letters: T rows of the micro-batch, the first of which are the shared ones; H query heads, G key/value heads, D
width of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bytescale.attention.autocast import without_autocast
from bytescale.attention.blocks import BlockSet, causal_triangles
from bytescale.attention.choose import kernel_for
from bytescale.attention.kernels import AttentionKernel, OfQueries
from bytescale.attention.rings.exchange import Exchange
from bytescale.attention.rings.grid import BlockWork, grid_backward, grid_forward
from bytescale.attention.rings.grid_messages import Grid
from bytescale.attention.rings.messages import RingBuffers
from bytescale.attention.rings.window import WindowLayout
from bytescale.attention.rings.windowed_ring import WindowedRing, windowed_backward, windowed_forward
from bytescale.attention.rules import PLAIN, AttentionRules
from bytescale.attention.sinks import join_sinks, sinks_gradient
from bytescale.attention.trees import WindowedTrees, add_node_gradients, add_nodes, blocks_between_members, own_blocks
from bytescale.common.errors import PlanError
from bytescale.plan import MicroBatch


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
        shared = micro_batch.shared
        self.kernel = kernel
        self.memory = memory
        self.num_tokens = micro_batch.num_tokens
        slices = [] if shared is None else (shared.segments[0] + shared.segments[1])[:, shared.member].tolist()
        self.lengths: list[int] = slices + micro_batch.local_lengths.tolist()
        self.triangles = causal_triangles(self.lengths)
        self.nodes: list[BlockSet] = []
        self.longest_path = 0
        self.trees = micro_batch.trees
        blocks_of = None
        if (trees := self.trees) is not None:
            self.longest_path = int(trees.lengths.max(initial=0))
            self.triangles, self.nodes = own_blocks(micro_batch, trees)
            if shared is not None:
                blocks_of = partial(blocks_between_members, shared, trees.of(np.arange(len(shared.sequences))))
        self.grid = None if shared is None else Grid(shared, exchange, buffers or RingBuffers(), blocks_of)
        self.shared, self.local_lengths = shared, micro_batch.local_lengths
        self._bands: dict[int, BlockSet] = {}
        self._windowed: dict[int, WindowedRing] = {}
        self._windowed_trees: dict[int, WindowedTrees] = {}
        self._micro_batch, self._exchange, self._buffers = micro_batch, exchange, buffers

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules = PLAIN, sinks: Tensor | None = None
    ) -> Tensor:
        if q.shape[0] != self.num_tokens:
            raise ValueError(
                f"attention got {q.shape[0]} rows but its micro-batch has {self.num_tokens}: "
                "the model must keep one row per token, in order"
            )
        return _PackedAttentionFunction.apply(q, k, v, sinks, self, rules)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules = PLAIN, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute ``out [T, H, Dv]`` and ``lse [T, H]``, outside of autograd. Both include the sinks."""
        if rules.window is not None and rules.window < self.longest_path:
            out, lse = self._forward_windowed(q, k, v, rules)
            return (out, lse) if sinks is None else join_sinks(out, lse, sinks)
        work, blocks, windowed = (
            self._work(q, rules),
            self._local_blocks(rules.window),
            self._windowed_ring(rules.window),
        )
        if self.grid is None:
            out, lse = work.forward(q, k, v, blocks)
        elif windowed is not None:
            out, lse = windowed_forward(q, k, v, windowed, work)
        else:
            out, lse = grid_forward(q, k, v, blocks, self.grid, work)
        if self.nodes:
            out, lse = add_nodes((out, lse), (q, k, v), self.nodes, work)
        return (out, lse) if sinks is None else join_sinks(out, lse, sinks)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        rules: AttentionRules = PLAIN,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of ``q``, ``k`` and ``v`` from that of ``out`` and the results of ``forward``.

        ``out`` and ``lse`` include the sinks, whose own gradient ``sinks.sinks_gradient`` computes.
        """
        if rules.window is not None and rules.window < self.longest_path:
            return self._backward_windowed(OfQueries(dout, q, out, lse), k, v, rules)
        work, blocks = self._work(q, rules), self._local_blocks(rules.window)
        windowed = self._windowed_ring(rules.window)
        if self.grid is None:
            gradients = work.backward(OfQueries(dout, q, out, lse), k, v, blocks)
        elif windowed is not None:
            gradients = windowed_backward(dout, (q, k, v), (out, lse), windowed, work)
        else:
            gradients = grid_backward(dout, (q, k, v), (out, lse), blocks, self.grid, work)
        if self.nodes:
            gradients = add_node_gradients(gradients, OfQueries(dout, q, out, lse), (k, v), self.nodes, work)
        return gradients

    def _forward_windowed(self, q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> tuple[Tensor, Tensor]:
        """With trees, and a window shorter than a path: the shared rows as a micro-batch alone, and the local trees."""
        count, work = self._num_shared, self._work(q, rules)
        out, lse = self._trees_in(rules.window, q.device).forward(q[count:], k[count:], v[count:], work)
        if self._shared_alone is None:
            return out, lse
        shared = self._shared_alone.forward(q[:count], k[:count], v[:count], rules)
        return torch.cat([shared[0], out]), torch.cat([shared[1], lse])

    def _backward_windowed(
        self, queries: OfQueries, k: Tensor, v: Tensor, rules: AttentionRules
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, work = self._num_shared, self._work(queries.q, rules)
        own = OfQueries(*(rows[count:] for rows in queries))
        gradients = self._trees_in(rules.window, k.device).backward(own, k[count:], v[count:], work)
        if self._shared_alone is None:
            return gradients
        dout, q, out, lse = (rows[:count] for rows in queries)
        shared = self._shared_alone.backward(dout, q, k[:count], v[:count], out, lse, rules)
        dq, dk, dv = (torch.cat(parts) for parts in zip(shared, gradients, strict=True))
        return dq, dk, dv

    def _trees_in(self, window: int | None, device: torch.device) -> WindowedTrees:
        trees, alone = self.trees, self._shared_alone
        assert window is not None, "_forward_windowed is for windows"
        assert trees is not None, "_forward_windowed is for trees"
        if alone is not None and window < alone.longest_path:
            raise PlanError(
                f"ranks share trees of documents of {alone.longest_path} tokens, and a layer has a window of {window}",
                so="members would need keys of each other's branches, which they do not exchange",
                fix="plan these documents without share_prefixes",
            )
        if window not in self._windowed_trees:
            first = 0 if self.shared is None else len(self.shared.sequences)
            local = trees.of(np.arange(first, len(trees.sequence_lengths)))
            self._windowed_trees[window] = WindowedTrees(local, window, device)
        return self._windowed_trees[window]

    @property
    def _num_shared(self) -> int:
        return 0 if self.grid is None else self.grid.num_tokens

    @cached_property
    def _shared_alone(self) -> PackedAttention | None:
        """The attention of the shared rows alone."""
        micro_batch, shared = self._micro_batch, self.shared
        if shared is None or micro_batch.trees is None:
            return None
        count = len(shared.sequences)
        trees = micro_batch.trees.of(np.arange(count))
        alone = replace(
            micro_batch,
            segment_sequences=micro_batch.segment_sequences[: 2 * count],
            segment_starts=micro_batch.segment_starts[: 2 * count],
            segment_stops=micro_batch.segment_stops[: 2 * count],
            local_lengths=micro_batch.local_lengths[:0],
            trees=trees if trees.shared.any() else None,
        )
        return PackedAttention(alone, self.kernel, self._exchange, None, self._buffers)

    def _windowed_ring(self, window: int | None) -> WindowedRing | None:
        """Return the exchange for a window, or None where it reaches over all shared sequences: then the grid runs."""
        if self.grid is None or self.shared is None or window is None or self.longest_path:
            return None
        if window >= self.shared.lengths.max():
            return None
        if window not in self._windowed:
            layout = WindowLayout.of(self.shared, self.local_lengths, window)
            self._windowed[window] = WindowedRing(self.grid, layout)
        return self._windowed[window]

    def _work(self, q: Tensor, rules: AttentionRules) -> BlockWork:
        return BlockWork(kernel_for(self.kernel, rules), rules.scale_of(q))

    def _local_blocks(self, window: int | None) -> BlockSet:
        """Own rows by own rows; plain triangles where the window reaches over the longest of them."""
        if self.longest_path or window is None or window >= max(self.lengths, default=0):
            return self.triangles
        if window not in self._bands:
            self._bands[window] = causal_triangles(self.lengths, window)
        return self._bands[window]

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
        rules: AttentionRules,
    ) -> Tensor:
        with without_autocast(q.device):
            out, lse = attention.remembered(lambda: attention.forward(q, k, v, rules, sinks))
        ctx.attention, ctx.rules = attention, rules
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        (dout,) = gradients
        with without_autocast(q.device):
            of_sinks = sinks_gradient(dout, out, lse, sinks) if ctx.needs_input_grad[3] else None
            dq, dk, dv = ctx.attention.backward(dout, q, k, v, out, lse, ctx.rules)
        return dq, dk, dv, of_sinks, None, None
