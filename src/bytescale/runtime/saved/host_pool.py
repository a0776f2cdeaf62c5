"""Host memory for offloaded activations: pages of one size, pinned on machines with a GPU, reused, within a limit.

Any page serves any tensor, so no memory is lost to fragmentation. A layer writes its tensors one after another
(``PageWriter``), so at most one page per layer is partly empty. A page returns when the last tensor in it is gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bytescale.common.errors import BytescaleError
from bytescale.common.units import format_bytes
from bytescale.runtime.saved.copy_lane import Event

GPU_PAGE_BYTES = 2**24  # PCIe reaches full speed at a few MiB a copy; CUDA rounds pinned memory up to powers of two
CPU_PAGE_BYTES = 2**16
PAGES_AT_ONCE = 64
ALIGNMENT = 64  # bytes; each tensor in a page starts at a multiple of it


class HostMemoryError(BytescaleError, MemoryError):
    """Offloaded activations need more host memory than the limit allows."""


@dataclass(eq=False)
class Page:
    """A piece of host memory of fixed size."""

    data: Tensor  # [page_bytes] uint8
    users: int = 0  # tensors in the page, and its writer while the page is being filled
    free_after: Event = None  # reads of the page that may still run when it returns to the pool


@dataclass(frozen=True)
class Extent:
    """Bytes ``[start, stop)`` of a page."""

    page: Page
    start: int
    stop: int

    @property
    def data(self) -> Tensor:
        """``[stop - start]`` uint8."""
        return self.page.data[self.start : self.stop]


class HostPool:
    """The pages of one rank. They are allocated before a step or on demand, up to ``limit_bytes``, and never freed."""

    def __init__(
        self, limit_bytes: int, *, pinned: bool, page_bytes: int | None = None, token_bytes: float = 0.0
    ) -> None:
        """``pinned``: page-locked, so that copies overlap with compute. ``token_bytes``: of an offloaded token."""
        self.page_bytes = page_bytes or (GPU_PAGE_BYTES if pinned else CPU_PAGE_BYTES)
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0  # most that was ever in use
        self.token_bytes = token_bytes
        self._pinned = pinned
        self._free: list[Page] = []
        self._made = 0

    @property
    def bytes_in_use(self) -> int:
        return (self._made - len(self._free)) * self.page_bytes

    @property
    def bytes_allocated(self) -> int:
        return self._made * self.page_bytes

    def prepare(self, num_tokens: int, num_writers: int) -> None:
        """Allocate the pages of so many offloaded tokens, before a step; each writer may leave one partly empty.

        Pinning memory waits for all streams of the device. During forward, that would be in the middle of rings.
        """
        pages = math.ceil(num_tokens * self.token_bytes / self.page_bytes)
        wanted = min(pages + num_writers * (pages > 0), self.limit_bytes // self.page_bytes)
        while (missing := wanted - self._made) > 0:
            # CUDA rounds pinned memory up to powers of two, so pages are pinned by powers of two of them.
            self._allocate(min(PAGES_AT_ONCE, 1 << (missing.bit_length() - 1)))

    def _allocate(self, count: int) -> None:
        memory = torch.empty(count * self.page_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        self._free += map(Page, memory.split(self.page_bytes))
        self._made += count

    def take(self) -> Page:
        """Take a page out of the pool; it then has one user. Raises ``HostMemoryError`` at the limit."""
        if not self._free:
            if self.bytes_allocated + self.page_bytes > self.limit_bytes:
                raise HostMemoryError(
                    f"offloaded activations fill all {format_bytes(self.limit_bytes)} of host memory that they may "
                    f"have ({self._made} pages of {format_bytes(self.page_bytes)})",
                    so="the rest of this micro-batch has no place to go",
                    fix="raise memory.host_gib, or lower parallel.capacity_tokens so that less is offloaded",
                )
            self._allocate(1)
        page = self._free.pop()
        page.users = 1
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        return page

    def leave(self, page: Page, reads: Event) -> None:
        """Remove one user of ``page``. The next write to it waits for ``reads``, the last read from any page so far."""
        page.users -= 1
        if page.users == 0:
            page.free_after = reads
            self._free.append(page)


class PageWriter:
    """Reserves room in pages for the tensors of one layer, one after another."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._page: Page | None = None
        self._filled = 0

    def reserve(self, num_bytes: int) -> list[Extent]:
        """Reserve room for one tensor. The tensor counts as one user for each extent that it gets."""
        extents: list[Extent] = []
        while num_bytes:
            if self._page is None or self._filled == self._pool.page_bytes:
                self.close()
                try:
                    self._page, self._filled = self._pool.take(), 0
                except HostMemoryError:
                    for extent in extents:
                        self._pool.leave(extent.page, extent.page.free_after)
                    raise
            size = min(num_bytes, self._pool.page_bytes - self._filled)
            extents.append(Extent(self._page, self._filled, self._filled + size))
            self._page.users += 1
            self._filled += size
            num_bytes -= size
        self._filled = min(-(-self._filled // ALIGNMENT) * ALIGNMENT, self._pool.page_bytes)
        return extents

    def close(self) -> None:
        """Stop writing: the layer has no more tensors."""
        if self._page is not None:
            self._pool.leave(self._page, self._page.free_after)
            self._page = None
