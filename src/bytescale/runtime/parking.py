"""Memory of a device that is given back while its numbers wait in host memory.

Tensors keep their places, but their storage has no bytes until ``fetch``, so nobody may compute with them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Bytes = torch.UntypedStorage


class Parking:
    """Storages by the kind of what they hold, with a copy of their bytes in host memory."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[Bytes, Bytes]]] = {}

    def holds(self, kind: str) -> bool:
        return kind in self._kept

    def park(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of ``tensors`` to host memory, each once, and free them."""
        if self.holds(kind):
            return
        storages = {storage.data_ptr(): storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}
        kept = self._kept[kind] = []
        for storage in storages.values():
            copy = torch.UntypedStorage(storage.nbytes(), device="cpu")
            copy.copy_(storage)
            storage.resize_(0)
            kept.append((storage, copy))

    def fetch(self, kind: str) -> None:
        for storage, copy in self._kept.pop(kind, []):
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
