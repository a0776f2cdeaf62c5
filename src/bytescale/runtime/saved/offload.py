"""Selective activation offloading: a share r of each micro-batch's activations waits for backward in host memory.

Tensors that autograd saves inside a layer are copied to pinned host memory while forward continues. They are copied
back one layer before backward uses them (paper section 5.2). For layers 0 .. l-1, in time::

    forward    | layer 0 | layer 1 | layer 2 | .. | l-2 | l-1 |          the last two layers stay on the device
    D2H stream           | 0       | 1       | ..                        one layer behind: a layer's end waits for the
    H2D stream                          .. | l-3   | l-4 | ..            copies of the layer before it
    backward                | l-1 | l-2  | l-3   | l-4 | ..              one layer ahead

Micro-batches may interleave in any way: each forward has its own pass.

Which tensors move: saved tensors one of whose dimensions counts tokens, wherever it stands: T of them, or K T in a
mixture of experts, or the tokens of this tensor-parallel rank. Parameters and buffers do not move, nor do tensors that
several layers are given (rotary angles), because the last layers keep those on the device anyway.

What moves of a tensor is its region of memory, as bytes: its own memory if it has no gaps, else that of its base, which
it keeps alive. A region that is saved twice in a layer, by whatever views, moves once.

Which bytes move: the first ``n / T`` of a region, with ``n`` the sum of floor(r_g n_g) over the micro-batch's groups.
They are not the rows of certain tokens: one range needs one copy.

Why no memory is reused while a copy is in flight: a tensor is held here until the compute stream has been made to wait
for its copy, and the next write to a page waits for the last read from it. So neither ``record_stream``, which would
return memory late, nor any synchronisation is needed. Gradients are bitwise those without offloading, whatever r.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from bytescale.cost.stage import movable_layers
from bytescale.plan import MicroBatch
from bytescale.runtime.group import RankGroup
from bytescale.runtime.saved.copy_lane import CopyLane, Event, compute_mark, compute_waits
from bytescale.runtime.saved.host_pool import Extent, HostPool, PageWriter
from bytescale.runtime.token_shards import own_rows


class ActivationOffload:
    """Offloads what a list of layers saves, on one rank.

    Use, for any order of forwards and backwards::

        offload.begin_step(micro_batches)
        with offload.forward(micro_batch): hidden = model(...)
        loss.backward()
    """

    def __init__(
        self, layers: Sequence[nn.Module], pool: HostPool, device: torch.device, tp: RankGroup | None = None
    ) -> None:
        """Watch ``layers`` with hooks.

        Args:
            layers: in the order of forward. All that each is given except for the residual stream (its first argument,
                or ``hidden_states`` where all have names) is shared by all layers, such as rotary angles.
            device: that computes.
            tp: the tensor-parallel ranks that divide the rows outside of attention and feed-forward among them.
        """
        self.pool = pool
        self.tp = tp or RankGroup(device=device)
        self.device = device
        self.bytes_moved = 0  # to the host, since the start
        self._to_host = CopyLane(device)
        self._to_device = CopyLane(device)
        self._num_offloaded_layers = movable_layers(len(layers))
        self._running: _Pass | None = None
        self._layers = list(layers)
        self._hooks = [hook for index, layer in enumerate(layers) for hook in self._watch(index, layer)]

    def begin_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.pool.prepare(max((own.offloaded_tokens for own in micro_batches), default=0), self._num_offloaded_layers)

    @contextmanager
    def forward(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Context manager that surrounds the forward of a micro-batch of the step.

        What waits in host memory belongs to autograd's graph: it is given back as backward uses it, or with the graph.
        """
        num_moved = micro_batch.offloaded_tokens
        if num_moved == 0 or self._num_offloaded_layers == 0:
            yield
            return
        self._running = _Pass(self, micro_batch.num_tokens, num_moved)
        try:
            yield
        finally:
            self._running = None

    def pack(self, tensor: Tensor) -> object:
        """What is saved in place of a tensor of the current layer."""
        layer = self._running.current if self._running is not None else None
        return tensor if layer is None else layer.pack(tensor)

    def unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.unpack()

    def remove(self) -> None:
        """Remove the hooks. What waits in host memory can still be fetched."""
        for hook in self._hooks:
            hook.remove()

    def _watch(self, index: int, layer: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._running is not None and torch.is_grad_enabled():
                others = kwargs if args else {name: own for name, own in kwargs.items() if name != "hidden_states"}
                self._running.enter_layer(index, [*module.parameters(), *module.buffers(), args[1:], others])

        def leave(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
            if self._running is not None:
                self._running.leave_layer()

        return (
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave, always_call=True),
        )


class _Pass:
    """One micro-batch between the start of its forward and the end of its backward."""

    def __init__(self, owner: ActivationOffload, num_tokens: int, num_moved: int) -> None:
        self.owner = owner
        self.num_tokens = num_tokens
        self.num_moved = num_moved
        self.num_own_rows = len(own_rows(num_tokens, owner.tp))
        self.layers: list[_LayerPass | None] = [None] * len(owner._layers)
        self.current: _LayerPass | None = None
        self._under_way: _LayerPass | None = None  # the layer before the current one
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def enter_layer(self, index: int, staying: object) -> None:
        storages = {leaf.untyped_storage()._cdata for leaf in tree_leaves(staying) if isinstance(leaf, Tensor)}
        moves = index < self.owner._num_offloaded_layers
        self.current = self.layers[index] = _LayerPass(self, index, moves, storages)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.owner.pack, self.owner.unpack)
        self._hooks.__enter__()

    def leave_layer(self) -> None:
        if self._hooks is None or self.current is None:
            return
        self._hooks.__exit__()
        self._hooks = None
        if self._under_way is not None:
            self._under_way.let_go()
        self.current.writer.close()
        self._under_way, self.current = self.current, None

    def fetch(self, layer: int) -> None:
        """Start to copy back what layer ``layer`` saved, if there is one that has run and was not fetched."""
        chosen = self.layers[layer] if 0 <= layer < len(self.layers) else None
        if chosen is not None:
            chosen.fetch()


class _LayerPass:
    """What one layer saved in one micro-batch."""

    def __init__(self, of: _Pass, index: int, moves: bool, staying: set[int]) -> None:
        self.of = of
        self.index = index
        self.blocks: weakref.WeakSet[_Block] = weakref.WeakSet()  # autograd owns them and drops them during backward
        self._moves = moves
        self._staying = staying
        self.writer = PageWriter(of.owner.pool)
        self._seen: dict[tuple[int, int, int, int], _Block] = {}  # valid while the sources are held
        self._sources: list[Tensor] = []
        self._copied: Event = None
        self._fetched = False

    def pack(self, tensor: Tensor) -> object:
        if not self._moves or not self._may_move(tensor):
            # Detached: an output that its own operation saves would keep that operation, and so itself, for ever.
            return _Resident(self, tensor.detach())
        start, stop = _region_of(tensor)
        size = tensor.element_size()
        num_moved = (stop - start) * size * self.of.num_moved // self.of.num_tokens
        if num_moved == 0:
            return _Resident(self, tensor.detach())
        region = (tensor.untyped_storage()._cdata, start * size, stop * size, tensor._version)
        block = self._seen.get(region)
        if block is None:
            elements = tensor.detach().as_strided((stop - start,), (1,), start)
            block = self._seen[region] = self._move(elements.view(torch.uint8), num_moved)
        offset = int(tensor.storage_offset()) - start
        return _Moved(self, block, tensor.shape, tensor.stride(), offset, tensor.dtype)

    def let_go(self) -> None:
        """Make the compute stream wait for the copies to the host; after that the device memory may be reused."""
        if self._sources:
            compute_waits(self._copied, self.of.owner.device)
        self._sources.clear()
        self._seen.clear()

    def fetch(self) -> None:
        if not self._fetched:
            self._fetched = True
            for block in list(self.blocks):
                block.fetch()

    def _may_move(self, tensor: Tensor) -> bool:
        return (
            any(size % self.of.num_tokens == 0 or size == self.of.num_own_rows for size in tensor.shape)
            and tensor.numel() > 0
            and tensor.device.type == self.of.owner.device.type  # an index may be left out: "cuda" is not "cuda:0"
            and tensor.untyped_storage()._cdata not in self._staying
        )

    def _move(self, region: Tensor, num_moved: int) -> _Block:
        """Start to copy the first ``num_moved`` bytes of ``region [n]``, uint8, to the host."""
        owner = self.of.owner
        extents = self.writer.reserve(num_moved)
        pieces = region[:num_moved].split([extent.stop - extent.start for extent in extents])
        pairs = [(extent.data, piece) for extent, piece in zip(extents, pieces, strict=True)]
        rest = None
        if num_moved < len(region):
            # On the copy stream too: on the compute stream it would take over 1 % of a layer's time.
            rest = torch.empty_like(region[num_moved:])
            pairs.append((rest, region[num_moved:]))
        after = [compute_mark(owner.device), *(extent.page.free_after for extent in extents)]
        self._copied = owner._to_host.copy(pairs, after=after)
        owner.bytes_moved += num_moved
        self._sources.append(region)
        block = _Block(owner, len(region), extents, rest, self._copied)
        self.blocks.add(block)
        return block


@dataclass(eq=False)
class _Block:
    """One region of memory: its first bytes on the host, the rest on the device."""

    owner: ActivationOffload
    num_bytes: int
    extents: list[Extent]
    rest: Tensor | None
    copied: Event
    restored: Tensor | None = None
    arrived: Event = None

    def fetch(self) -> None:
        if self.restored is not None:
            return
        device = self.owner.device
        self.restored = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        num_moved = self.num_bytes - (0 if self.rest is None else len(self.rest))
        pieces = self.restored[:num_moved].split([extent.stop - extent.start for extent in self.extents])
        pairs = [(piece, extent.data) for extent, piece in zip(self.extents, pieces, strict=True)]
        if self.rest is not None:  # copied on the copy stream too; held until the compute stream has waited
            pairs.append((self.restored[num_moved:], self.rest))
        self.arrived = self.owner._to_device.copy(pairs, after=[compute_mark(device), self.copied])

    def bytes(self) -> Tensor:
        """``[n]`` uint8 on the device, complete for all work that is launched from now on."""
        self.fetch()
        assert self.restored is not None, "fetch() has just made it"
        compute_waits(self.arrived, self.owner.device)
        self.arrived, self.rest = None, None
        return self.restored

    def __del__(self) -> None:
        """Return the pages to the pool, and free the device memory once no copy writes to it any more."""
        for event in (self.copied, self.arrived):
            compute_waits(event, self.owner.device)
        reads = self.owner._to_device.mark()
        for extent in self.extents:
            self.owner.pool.leave(extent.page, reads)


@dataclass(frozen=True, slots=True)
class _Resident:
    """A saved tensor that stays on the device. When backward unpacks it, the layer before is fetched."""

    layer: _LayerPass
    tensor: Tensor

    def unpack(self) -> Tensor:
        self.layer.of.fetch(self.layer.index - 1)
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Moved:
    """A saved tensor whose memory lies in a block; ``stride`` and ``offset`` in elements of the block."""

    layer: _LayerPass
    block: _Block
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def unpack(self) -> Tensor:
        self.layer.fetch()
        self.layer.of.fetch(self.layer.index - 1)
        return self.block.bytes().view(self.dtype).as_strided(self.shape, self.stride, self.offset)


def _region_of(tensor: Tensor) -> tuple[int, int]:
    """Where the memory that ``tensor`` keeps alive begins and ends in its storage, in elements."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride != expected:  # it has gaps, or elements that stand for several
            return 0, tensor.untyped_storage().nbytes() // tensor.element_size()
        expected *= size
    start = int(tensor.storage_offset())
    return start, start + tensor.numel()
